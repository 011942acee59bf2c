"""Every kernel of attention that this machine has: against the definition, equal and ragged."""

from collections.abc import Mapping

import pytest
import torch
from attention_reference import attend_one, outputs_of, relative_error, sequences_of
from torch.profiler import ProfilerActivity, profile

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.attention_prefill_window import window_prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.profiler.attention.batch import (
    AttentionCase,
    list_inputs,
    packed_inputs,
    read_decode,
    read_decode_batch,
    read_latent_prefill,
    read_mixed,
    read_prefill,
    read_prefill_batch,
    read_window_decode,
    table_inputs,
)
from foretoken.profiler.attention.ragged import Batch
from foretoken.profiler.kernel import Kernel, TensorFactory, all_kernels, kernel_of_call

CPU = torch.device("cpu")
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
LATENT = {"num_heads": 3, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10}
READERS = {
    "attention_prefill": read_prefill,
    "attention_prefill_window": read_prefill,
    "attention_decode": read_decode,
    "attention_decode_window": read_window_decode,
    "attention_mixed": read_mixed,
    "mla_prefill": read_latent_prefill,
}


def prefill_of(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], window: int = 0
) -> dict[str, int]:
    """Return the sums of these sequences."""
    dims = {
        "num_seqs": len(q_lens),
        "q_tokens": sum(q_lens),
        "kv_tokens": sum(kv_lens),
        "score_pairs": Batch(q_lens, kv_lens).score_pairs(window),
    }
    return {**dims, "window": window} if window else dims


def decode_of(*kv_lens: int) -> dict[str, int]:
    return {
        "num_seqs": len(kv_lens),
        "kv_tokens": sum(kv_lens),
        "kv_tokens_max": max(kv_lens),
    }


def _window_decode_of(window: int, *kv_lens: int) -> dict[str, int]:
    visible = sum(min(kv_len, window) for kv_len in kv_lens)
    return {**decode_of(*kv_lens), "visible_tokens": visible, "window": window}


def _mixed_of(prefills: Mapping[str, int], *kv_lens: int) -> dict[str, int]:
    decodes = {f"decode_{name}": value for name, value in decode_of(*kv_lens).items()}
    decodes["num_decode_seqs"] = decodes.pop("decode_num_seqs")
    return {**prefills, **decodes}


BATCHES: list[tuple[str, Mapping[str, int]]] = [
    ("attention_prefill", {**prefill_dims(2, 7, 0), **HEADS}),
    ("attention_prefill", {**prefill_dims(2, 5, 4), **HEADS}),
    ("attention_prefill", {**prefill_of((3, 9, 1), (3, 9, 1)), **HEADS}),
    ("attention_prefill", {**prefill_of((6, 2, 3), (9, 14, 3)), **HEADS}),
    ("attention_prefill", {**prefill_of((6, 2), (9, 14)), **HEADS, "num_kv_heads": 4}),
    ("attention_prefill_window", {**window_prefill_dims(2, 90, 7), **HEADS}),
    ("attention_prefill_window", {**window_prefill_dims(1, 200, 150), **HEADS}),
    ("attention_prefill_window", {**prefill_of((70, 5, 40), (76, 5, 44), 7), **HEADS}),
    ("attention_decode", {**decode_of(9, 9, 9), **HEADS}),
    ("attention_decode", {**decode_of(17, 4, 1, 9), **HEADS}),
    ("attention_decode", {**decode_of(17, 4, 1, 9), **HEADS, "num_kv_heads": 4}),
    ("attention_decode_window", {**_window_decode_of(6, 9, 9), **HEADS}),
    ("attention_decode_window", {**_window_decode_of(6, 3, 9, 4), **HEADS}),
    ("attention_mixed", {**_mixed_of(prefill_dims(2, 5, 3), 8, 8, 8), **HEADS}),
    ("attention_mixed", {**_mixed_of(prefill_of((7, 2), (7, 6)), 3, 12), **HEADS}),
    ("mla_prefill", {**prefill_dims(2, 6, 0), **LATENT}),
    ("mla_prefill", {**prefill_dims(2, 4, 5), **LATENT}),
    ("mla_prefill", {**prefill_of((6, 2, 3), (9, 14, 3)), **LATENT}),
]
RUNS = [
    pytest.param(operator, dims, kernel, id=f"{operator}-{index}-{kernel.source.split('.')[-1]}")
    for index, (operator, dims) in enumerate(BATCHES)
    for kernel in all_kernels()[operator].members
    if kernel.is_present(CPU) and kernel.can_run(dims)
]


def _tensors(dtype: torch.dtype = torch.float32) -> TensorFactory:
    return TensorFactory(CPU, dtype, seed=1)


def _case(operator: str, dims: Mapping[str, int]) -> AttentionCase:
    return READERS[operator](dims)


@pytest.mark.parametrize(("operator", "dims", "kernel"), RUNS)
def test_a_kernel_attends_as_defined(
    operator: str, dims: Mapping[str, int], kernel: Kernel
) -> None:
    case = _case(operator, dims)
    inputs = kernel.make_inputs(dims, _tensors())
    actual = outputs_of(case, kernel.bind(dims)(*inputs))
    expected = [attend_one(one, case.window) for one in sequences_of(case, inputs)]
    assert relative_error(expected, actual) < 2e-6


@pytest.mark.parametrize(
    ("operator", "dims", "kernel"), [run for run in RUNS if run.values[2].differentiable]
)
def test_a_kernel_has_the_gradients_of_the_definition(
    operator: str, dims: Mapping[str, int], kernel: Kernel
) -> None:
    case = _case(operator, dims)
    inputs = kernel.make_inputs(dims, _tensors())
    leaves = [inputs[position].requires_grad_() for position in kernel.differentiable]
    assert len(leaves) == 3
    actual = outputs_of(case, kernel.bind(dims)(*inputs))
    expected = [attend_one(one, case.window) for one in sequences_of(case, inputs)]
    directions = [torch.randn_like(one) for one in expected]
    gradients = [
        torch.autograd.grad(
            sum((one.double() * to).sum() for one, to in zip(outputs, directions, strict=True)),
            leaves,
        )
        for outputs in (expected, actual)
    ]
    assert relative_error([one.double() for one in gradients[0]], list(gradients[1])) < 5e-6


@pytest.mark.parametrize("operator", sorted(READERS))
def test_an_operator_has_kernels_for_equal_and_for_ragged_batches(operator: str) -> None:
    for is_equal in (True, False):
        sources = {
            run.values[2].source
            for run in RUNS
            if run.values[0] == operator and _case(operator, run.values[1]).is_equal is is_equal
        }
        assert sources


@pytest.mark.parametrize(
    ("dims", "source"),
    [
        (decode_of(9, 9), ""),
        (decode_of(9, 5), ", per sequence"),
    ],
)
def test_the_default_says_how_a_ragged_batch_runs(dims: Mapping[str, int], source: str) -> None:
    call = OperatorCall(operator="attention_decode", dtype=DType.FP32, dims={**dims, **HEADS})
    name = "torch.nn.functional.scaled_dot_product_attention"
    assert f"{name}{source}" == kernel_of_call(call, CPU).source


def test_a_padded_kernel_can_be_named() -> None:
    call = OperatorCall(
        operator="attention_prefill",
        dtype=DType.FP32,
        phase=Phase.BACKWARD,
        dims={**prefill_of((3, 9), (3, 9)), **HEADS},
        kernel="torch.nn.functional.scaled_dot_product_attention, padded",
    )
    assert call.kernel == kernel_of_call(call, CPU).source


@pytest.mark.parametrize("operator", ["attention_decode", "attention_prefill"])
def test_no_fp8_cache_on_a_cpu(operator: str) -> None:
    dims = {**prefill_dims(1, 4, 0), **decode_of(4), **HEADS}
    call = OperatorCall(operator=operator, dtype=DType.BF16, dims=dims, variant="kv=fp8")
    with pytest.raises(InvalidRequestError, match="no kernel"):
        kernel_of_call(call, CPU)


def test_a_batch_that_cannot_be_says_why() -> None:
    dims = {**decode_of(4, 4), "kv_tokens_max": 3, **HEADS}
    kernel = all_kernels()["attention_decode"]
    with pytest.raises(InvalidRequestError, match="kv_tokens: 8 is more than 6, num_seqs times"):
        kernel.make_inputs(dims, _tensors())


def test_grouped_heads_share_keys_without_a_copy() -> None:
    """Nothing repeats keys for the heads of a group, and the fused kernel runs."""
    for kv_lens in ((64, 64), (96, 32)):
        dims = {**decode_of(*kv_lens), **HEADS}
        call = OperatorCall(operator="attention_decode", dtype=DType.FP32, dims=dims)
        kernel = kernel_of_call(call, CPU)
        inputs = kernel.make_inputs(dims, _tensors())
        with profile(activities=[ProfilerActivity.CPU]) as seen, torch.no_grad():
            kernel.bind(dims)(*inputs)
        names = {event.key for event in seen.key_averages()}
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
        assert "aten::repeat_interleave" not in names


@pytest.mark.parametrize("operator", ["attention_decode", "attention_prefill"])
def test_inputs_are_the_bytes_that_the_operator_counts(operator: str) -> None:
    dims = {**prefill_of((6, 2, 3), (9, 14, 3)), **decode_of(9, 14, 3), **HEADS}
    wanted = {name: dims[name] for name in find_operator(operator).dim_names}
    call = OperatorCall(operator=operator, dtype=DType.FP32, dims=wanted)
    kernel = kernel_of_call(call, CPU)
    inputs = kernel.make_inputs(wanted, _tensors())
    output = kernel.bind(wanted)(*inputs)
    moved = sum(tensor.nbytes for tensor in (*inputs[:3], output))
    assert find_operator(operator).moved_bytes(wanted, 4.0) == moved


@pytest.mark.parametrize("kv_lens", [(5, 40, 16), (33,)])
def test_pages_hold_every_context_once(kv_lens: tuple[int, ...]) -> None:
    """Tables and lists of pages name each page once, and as many as contexts fill."""
    case = read_decode({**decode_of(*kv_lens), **HEADS})
    _, keys, _, table, lengths, _ = table_inputs(case, 16, _tensors(), ())
    counts = [-(-int(length) // 16) for length in lengths]
    named = [int(page) for row, count in zip(table, counts, strict=True) for page in row[:count]]
    assert list(range(len(keys))) == sorted(named)
    _, listed_keys, _, starts, pages, last_lens, _ = list_inputs(case, 16, _tensors(), None)
    assert named == pages.tolist()
    assert len(listed_keys) == sum(counts)
    sizes = ((starts.diff() - 1) * 16 + last_lens).tolist()
    assert list(case.joined.kv_lens) == sizes


def test_pages_of_an_fp8_cache_are_fp8_and_queries_need_not_be() -> None:
    case = read_decode({**decode_of(5, 40), **HEADS})
    inputs = list_inputs(case, 16, _tensors(torch.bfloat16), torch.float8_e4m3fn)
    assert (torch.bfloat16, torch.float8_e4m3fn) == (inputs[0].dtype, inputs[1].dtype)
    assert float(inputs[1].float().std()) > 0.5


def test_layouts_hold_the_same_lengths() -> None:
    """What the reference reads out of packed and paged inputs has each sequence's lengths."""
    case = read_mixed({**_mixed_of(prefill_of((7, 2), (7, 6)), 3, 12), **HEADS})
    layouts = (
        packed_inputs(case, _tensors()),
        table_inputs(case, 4, _tensors(), ()),
        list_inputs(case, 4, _tensors(), None),
    )
    for inputs in layouts:
        sequences = sequences_of(case, inputs)
        assert list(case.joined.q_lens) == [len(one.query) for one in sequences]
        assert list(case.joined.kv_lens) == [len(one.key) for one in sequences]


@pytest.mark.parametrize("operator", sorted({*READERS, "mla_decode", "mla_prefill_module"}))
@pytest.mark.parametrize("quick", [True, False])
def test_a_sweep_has_equal_and_ragged_batches_that_can_be(operator: str, quick: bool) -> None:
    """Every point has sequences, a small share of them unequal."""
    if operator in READERS:
        equal = [_case(operator, dims).is_equal for dims in find_operator(operator).sweep(quick)]
    else:
        read = read_decode_batch if operator == "mla_decode" else read_prefill_batch
        equal = [read(dims).is_equal for dims in find_operator(operator).sweep(quick)]
    assert 0 < equal.count(False) <= len(equal) / 3


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("operator", ["attention_decode", "attention_prefill"])
def test_a_full_sweep_has_the_heads_of_common_models(operator: str, model: str) -> None:
    """Also cut over 2, 4 and 8 devices, where every one has a key head at least."""
    found = find_model(model)
    wanted = {
        (found.num_heads // tp, max(found.num_kv_heads // tp, 1), found.head_dim)
        for tp in (1, 2, 4, 8)
    }
    names = ("num_heads", "num_kv_heads", "head_dim")
    swept = {tuple(dims[name] for name in names) for dims in find_operator(operator).sweep(False)}
    assert wanted <= swept
