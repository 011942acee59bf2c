"""Latent attention: against the definition on unpacked keys, sequence by sequence."""

from collections.abc import Mapping

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.operator import find_operator
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.profiler.kernel import TensorFactory, all_kernels
from foretoken.profiler.latent_attention import LatentBlock

_WIDTHS = {
    "num_heads": 3,
    "hidden": 16,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}
_DECODE = {"num_seqs": 2, "kv_tokens": 18, "kv_tokens_max": 9, **_WIDTHS}


def _tensors() -> TensorFactory:
    return TensorFactory(torch.device("cpu"), torch.float64, seed=1)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention of one head of one sequence, query by query."""
    context_len = len(key) - len(query)
    rows = []
    for position, vector in enumerate(query):
        end = context_len + position + 1
        weights = (key[:end] @ vector / len(vector) ** 0.5).softmax(0)
        rows.append(weights @ value[:end])
    return torch.stack(rows)


def _normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    epsilon = torch.finfo(x.dtype).eps
    return weight * x / ((x * x).mean(-1, keepdim=True) + epsilon).sqrt()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return pairs of features rotated, of the two that `_WIDTHS` has."""
    return torch.stack(
        (x[:, 0] * cos[:, 0] - x[:, 1] * sin[:, 0], x[:, 1] * cos[:, 1] + x[:, 0] * sin[:, 1]), 1
    )


def _run_sequence(block: LatentBlock, index: int) -> torch.Tensor:
    """Return the block's output for one sequence, keys and values unpacked head by head."""
    hidden, old = block.hidden[index], block.cache[index, : -block.hidden.shape[1]]
    low, latents, shared = (hidden @ block.down).split((6, 8, 2), 1)
    latents = torch.cat((old[:, :8], _normalize(latents, block.latent_norm)))
    shared = torch.cat((old[:, 8:], _rotate(shared, block.cos, block.sin)))
    queries = (_normalize(low, block.query_norm) @ block.query_up).chunk(3, 1)
    unpacked = (latents @ block.latent_up).chunk(3, 1)
    heads = []
    for query, pair in zip(queries, unpacked, strict=True):
        turned = torch.cat((query[:, :4], _rotate(query[:, 4:], block.cos, block.sin)), 1)
        heads.append(_attend(turned, torch.cat((pair[:, :4], shared), 1), pair[:, 4:]))
    return torch.cat(heads, 1) @ block.out


def _check_block(operator: str, dims: Mapping[str, int], q_len: int) -> None:
    kernel = all_kernels()[operator]
    inputs = kernel.make_inputs(dims, _tensors())
    block = LatentBlock(*(tensor.clone() for tensor in inputs))
    output = kernel.bind(dims)(*inputs).reshape(2, q_len, 16)
    for index in range(2):
        torch.testing.assert_close(_run_sequence(block, index), output[index])


@pytest.mark.parametrize(("q_len", "context_len"), [(4, 0), (3, 5), (1, 6)])
def test_a_prefill_attends_head_by_head(q_len: int, context_len: int) -> None:
    kernel = all_kernels()["mla_prefill"]
    dims = {**prefill_dims(2, q_len, context_len), **_WIDTHS}
    query, key, value, mask = kernel.make_inputs(dims, _tensors())
    attended = kernel.bind(dims)(query, key, value, mask)
    for index in range(2):
        for head in range(3):
            expected = _attend(query[index, head], key[index, head], value[index, head])
            torch.testing.assert_close(expected, attended[index, head])


def test_the_heads_of_a_prefill_share_the_key_with_position() -> None:
    dims = {**prefill_dims(2, 4, 0), **_WIDTHS}
    _, key, _, _ = all_kernels()["mla_prefill"].make_inputs(dims, _tensors())
    assert torch.equal(key[:, 0, :, 4:], key[:, 1, :, 4:])
    assert not torch.equal(key[:, 0, :, :4], key[:, 1, :, :4])


def test_a_decode_attends_to_the_latents_as_keys_and_as_values() -> None:
    """Its inputs and output are the bytes that the operator counts."""
    kernel, spec = all_kernels()["mla_decode"], find_operator("mla_decode")
    query, cache = kernel.make_inputs(_DECODE, _tensors())
    attended = kernel.bind(_DECODE)(query, cache)
    for index in range(2):
        for head in range(3):
            weights = (cache[index] @ query[index, head]).softmax(0)
            torch.testing.assert_close(weights @ cache[index, :, :8], attended[index, head])
    moved_bytes = query.nbytes + cache.nbytes + attended.nbytes
    assert spec.moved_bytes(_DECODE, 8.0) == moved_bytes


@pytest.mark.parametrize(("q_len", "context_len"), [(4, 0), (3, 5)])
def test_a_prefill_block_is_the_definition(q_len: int, context_len: int) -> None:
    dims = {**prefill_dims(2, q_len, context_len), **_WIDTHS}
    _check_block("mla_prefill_module", dims, q_len)


def test_a_decode_block_in_the_latent_space_is_the_same_block() -> None:
    _check_block("mla_decode_module", _DECODE, 1)


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


@pytest.mark.parametrize("operator", ["mla_decode", "mla_decode_module"])
def test_a_ragged_batch_is_refused(operator: str) -> None:
    with pytest.raises(InvalidRequestError, match="ragged"):
        all_kernels()[operator].make_inputs({**_DECODE, "kv_tokens": 17}, _tensors())
