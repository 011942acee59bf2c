"""Attention over a sliding window: against its definition, query by query, head by head."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from foretoken.domain.operators.attention_prefill_window import window_prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.profiler.attention.ragged import Batch
from foretoken.profiler.kernel import Inputs, Kernel, TensorFactory, all_kernels

# Query-key pairs of a call, hidden or not.
_PAIRS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, *_, **__: query[2] * key[2]
    )
}
_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def _tensors() -> TensorFactory:
    return TensorFactory(torch.device("cpu"), torch.float32, seed=1)


def _attend_one(inputs: Inputs, head: int, position: int, seen: slice) -> torch.Tensor:
    """Return what a query of a head gets from the keys of a slice, by the definition."""
    query, key, value, *_ = inputs
    keys, values = key[:, head // 2, seen], value[:, head // 2, seen]
    scores = torch.einsum("bd,bkd->bk", query[:, head, position], keys) / 8**0.5
    return torch.einsum("bk,bkd->bd", scores.softmax(-1), values)


def _prefill_kernel(source: str) -> Kernel:
    members = all_kernels()["attention_prefill_window"].members
    return next(kernel for kernel in members if kernel.source.endswith(source))


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window"), [(7, 7, 3), (5, 8, 4), (4, 4, 9), (6, 6, 1), (90, 92, 3)]
)
@pytest.mark.parametrize("source", ["in blocks of queries", "masked"])
def test_a_prefill_sees_the_latest_keys_up_to_its_own(
    q_len: int, kv_len: int, window: int, source: str
) -> None:
    kernel = _prefill_kernel(source)
    pairs = Batch((q_len,) * 2, (kv_len,) * 2).score_pairs(window)
    dims = {
        "num_seqs": 2,
        "q_tokens": 2 * q_len,
        "kv_tokens": 2 * kv_len,
        "score_pairs": pairs,
        "window": window,
        **_HEADS,
    }
    inputs = kernel.make_inputs(dims, _tensors())
    attended = kernel.bind(dims)(*inputs)
    assert (2, 4, q_len, 8) == attended.shape
    for head in range(4):
        for position in range(q_len):
            end = kv_len - q_len + position + 1
            seen = slice(max(end - window, 0), end)
            expected = _attend_one(inputs, head, position, seen)
            torch.testing.assert_close(expected, attended[:, head, position])


def test_keys_before_the_window_are_not_read() -> None:
    """In blocks, a prefill of 1,024 tokens computes a fraction of the pairs that a mask does."""
    dims = {**window_prefill_dims(1, 1024, 64), **_HEADS}
    counts = []
    for source in ("in blocks of queries", "masked"):
        kernel = _prefill_kernel(source)
        inputs = kernel.make_inputs(dims, _tensors())
        with FlopCounterMode(display=False, custom_mapping=_PAIRS) as counter:
            kernel.bind(dims)(*inputs)
        counts.append(counter.get_total_flops())
    assert 0 < counts[0] < counts[1] / 8


@pytest.mark.parametrize("window", [1, 3, 8, 20])
def test_a_prefill_computes_the_pairs_that_its_dimensions_say(window: int) -> None:
    dims = {**window_prefill_dims(3, 8, window), **_HEADS}
    *_, mask = _prefill_kernel("masked").make_inputs(dims, _tensors())
    assert dims["score_pairs"] == 3 * int(mask.sum())


@pytest.mark.parametrize(("kv_len", "window"), [(9, 4), (3, 4)])
def test_a_decode_sees_the_keys_in_the_window(kv_len: int, window: int) -> None:
    """Its inputs are the bytes that the operator counts: the window, the query, the output."""
    visible_len = min(kv_len, window)
    dims = {
        "num_seqs": 2,
        "kv_tokens": 2 * kv_len,
        "kv_tokens_max": kv_len,
        "visible_tokens": 2 * visible_len,
        "window": window,
        **_HEADS,
    }
    kernel, spec = (
        all_kernels()["attention_decode_window"],
        find_operator("attention_decode_window"),
    )
    inputs = kernel.make_inputs(dims, _tensors())
    attended = kernel.bind(dims)(*inputs)
    for head in range(4):
        expected = _attend_one(inputs, head, 0, slice(visible_len))
        torch.testing.assert_close(expected, attended[:, head, 0])
    moved_bytes = sum(tensor.nbytes for tensor in (*inputs, attended))
    assert spec.moved_bytes(dims, 4.0) == moved_bytes
