"""The experts of one rank: against one MLP after the other."""

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.profiler.kernel import Kernel, TensorFactory, find_kernels


def _dims(num_pairs: int, num_active: int) -> dict[str, int]:
    return {
        "num_tokens": 8,
        "top_k": 2,
        "num_experts": 8,
        "num_local_experts": 4,
        "num_local_pairs": num_pairs,
        "num_active_experts": num_active,
        "hidden": 6,
        "intermediate": 5,
    }


def _kernel() -> Kernel:
    found = find_kernels("moe_local_experts", DType.FP32, Phase.FORWARD, torch.device("cpu"))
    return found[0]


def _tensors() -> TensorFactory:
    return TensorFactory(torch.device("cpu"), torch.float32, seed=1)


@pytest.mark.parametrize(("num_pairs", "num_active"), [(8, 4), (9, 4), (3, 3), (5, 2), (7, 1)])
def test_each_expert_runs_its_share_of_the_rows(num_pairs: int, num_active: int) -> None:
    kernel, dims = _kernel(), _dims(num_pairs, num_active)
    x, up, down = kernel.make_inputs(dims, _tensors())
    expected = []
    for expert, rows in enumerate(x.tensor_split(num_active)):
        gate, value = (rows @ up[expert].T).chunk(2, dim=1)
        expected.append((functional.silu(gate) * value) @ down[expert].T)
    torch.testing.assert_close(torch.cat(expected), kernel.bind(dims)(x, up, down))


@pytest.mark.parametrize(("num_pairs", "num_active"), [(8, 4), (9, 4), (3, 3)])
def test_the_work_and_the_weights_are_those_the_operator_says(
    num_pairs: int, num_active: int
) -> None:
    kernel, dims = _kernel(), _dims(num_pairs, num_active)
    spec, (x, up, down) = find_operator("moe_local_experts"), kernel.make_inputs(dims, _tensors())
    with FlopCounterMode(display=False) as counter:
        kernel.bind(dims)(x, up, down)
    assert spec.flops(dims, 4.0) == counter.get_total_flops()
    assert spec.num_weights(dims) * num_active == (up.numel() + down.numel()) * 4


@pytest.mark.parametrize(("num_pairs", "num_active"), [(3, 4), (9, 5)])
def test_more_active_experts_than_pairs_or_local_ones_are_refused(
    num_pairs: int, num_active: int
) -> None:
    with pytest.raises(InvalidRequestError, match="cannot reach"):
        _kernel().bind(_dims(num_pairs, num_active))
