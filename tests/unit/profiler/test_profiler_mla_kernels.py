"""Latent attention: against the definition on unpacked keys, sequence by sequence."""

from collections.abc import Mapping

import pytest
import torch
from latent_reference import WIDTHS, run_sequence
from torch.utils.flop_counter import FlopCounterMode

from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.profiler.attention.batch import read_decode_batch, read_prefill_batch
from foretoken.profiler.attention.latent import LatentBlock
from foretoken.profiler.attention.ragged import Batch
from foretoken.profiler.kernel import (
    TensorFactory,
    all_kernels,
    find_kernels,
    kernel_of_call,
)

_DECODE = {"num_seqs": 2, "kv_tokens": 18, "kv_tokens_max": 9, **WIDTHS}
_RAGGED = {"num_seqs": 3, "kv_tokens": 20, "kv_tokens_max": 11, **WIDTHS}
_CPU = torch.device("cpu")


def _tensors() -> TensorFactory:
    return TensorFactory(torch.device("cpu"), torch.float64, seed=1)


def _check_block(operator: str, dims: Mapping[str, int], batch: Batch) -> None:
    """Compare the default kernel, on sequences of this batch, with the definition."""
    kernel = kernel_of_call(OperatorCall(operator=operator, dtype=DType.FP32, dims=dims), _CPU)
    inputs = kernel.make_inputs(dims, _tensors())
    block = LatentBlock(*(tensor.clone() for tensor in inputs))
    outputs = kernel.bind(dims)(*inputs).split(batch.q_lens)
    assert ("per sequence" in kernel.source) is not batch.is_equal
    for index, output in enumerate(outputs):
        torch.testing.assert_close(run_sequence(block, batch, index), output)


def test_the_heads_of_a_prefill_share_the_key_with_position() -> None:
    dims = {**prefill_dims(2, 4, 0), **WIDTHS}
    _, key, _, _ = all_kernels()["mla_prefill"].make_inputs(dims, _tensors())
    assert torch.equal(key[:, 0, :, 4:], key[:, 1, :, 4:])
    assert not torch.equal(key[:, 0, :, :4], key[:, 1, :, :4])


@pytest.mark.parametrize("dims", [_DECODE, _RAGGED], ids=["equal", "ragged"])
def test_a_decode_attends_to_the_latents_as_keys_and_as_values(dims: Mapping[str, int]) -> None:
    """Its inputs and output are the bytes that the operator counts, where nothing is padded."""
    batch, spec = read_decode_batch(dims), find_operator("mla_decode")
    present = [
        kernel
        for kernel in find_kernels("mla_decode", DType.FP32, Phase.FORWARD, _CPU)
        if kernel.can_run(dims)
    ]
    assert (1 if batch.is_equal else 2) == len(present)
    for kernel in present:
        query, cache, *bias = kernel.make_inputs(dims, _tensors())
        is_padded = cache.dim() == 3
        contexts = cache.unbind() if is_padded else cache.split(batch.kv_lens)
        attended = kernel.bind(dims)(query, cache, *bias)
        for index, kv_len in enumerate(batch.kv_lens):
            context = contexts[index][:kv_len]
            for head in range(3):
                weights = (context @ query[index, head]).softmax(0)
                torch.testing.assert_close(weights @ context[:, :8], attended[index, head])
        moved_bytes = query.nbytes + cache.nbytes + attended.nbytes
        assert is_padded or spec.moved_bytes(dims, 8.0) == moved_bytes


@pytest.mark.parametrize(
    ("q_lens", "context_lens"),
    [((4, 4), (0, 0)), ((3, 3), (5, 5)), ((4, 1, 3), (0, 6, 2)), ((5, 2), (0, 0))],
)
def test_a_prefill_block_is_the_definition(
    q_lens: tuple[int, ...], context_lens: tuple[int, ...]
) -> None:
    kv_lens = tuple(new + old for new, old in zip(q_lens, context_lens, strict=True))
    batch = Batch(q_lens, kv_lens)
    sums = {
        "num_seqs": len(q_lens),
        "q_tokens": sum(q_lens),
        "kv_tokens": sum(kv_lens),
        "score_pairs": batch.score_pairs(),
    }
    dims = {**sums, **WIDTHS}
    _check_block("mla_prefill_module", dims, read_prefill_batch(dims))


@pytest.mark.parametrize("dims", [_DECODE, _RAGGED], ids=["equal", "ragged"])
def test_a_decode_block_in_the_latent_space_is_the_same_block(dims: Mapping[str, int]) -> None:
    _check_block("mla_decode_module", dims, read_decode_batch(dims))


@pytest.mark.parametrize("operator", ["mla_decode", "mla_decode_module"])
def test_a_decode_multiplies_as_often_as_its_operator_says(operator: str) -> None:
    kernel = all_kernels()[operator]
    inputs = kernel.make_inputs(_DECODE, _tensors())
    with FlopCounterMode(display=False) as counter:
        kernel.bind(_DECODE)(*inputs)
    assert find_operator(operator).flops(_DECODE, 2.0) == counter.get_total_flops()


def test_a_block_holds_the_weights_that_its_operator_counts() -> None:
    inputs = all_kernels()["mla_decode_module"].make_inputs(_DECODE, _tensors())
    block = LatentBlock(*inputs)
    matrices = (block.down, block.query_up, block.latent_up, block.out)
    num_weights = sum(matrix.numel() for matrix in matrices)
    assert find_operator("mla_decode_module").num_weights(_DECODE) == num_weights
