"""Attention by its definition in float64, sequence by sequence, for any layout of inputs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from foretoken.profiler.attention.batch import AttentionCase
from foretoken.profiler.kernel import Inputs


class Sequence(NamedTuple):
    """One sequence: [tokens, heads, features] each."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def attend_one(sequence: Sequence, window: int) -> torch.Tensor:
    """Return causal attention from the end of the context, query by query."""
    query, key, value = (tensor.double() for tensor in sequence)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    context_len = len(key) - len(query)
    rows = []
    for position, vectors in enumerate(query):
        end = context_len + position + 1
        first = max(end - window, 0) if window else 0
        scores = torch.einsum("hd,khd->hk", vectors, key[first:end]) / query.shape[-1] ** 0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value[first:end]))
    return torch.stack(rows)


def sequences_of(case: AttentionCase, inputs: Inputs) -> list[Sequence]:
    """Return the sequences in the inputs of a kernel, whatever its layout."""
    query, key = inputs[:2]
    if query.dim() == 4:
        return list(_dense_sequences(case, inputs))
    batch = case.joined
    queries = query.split(batch.q_lens)
    if key.dim() == 2:
        contexts = [list(_single(case, tensor)) for tensor in inputs[1:3]]
    elif key.dim() == 3:
        contexts = [tensor.split(batch.kv_lens) for tensor in inputs[1:3]]
    else:
        contexts = [list(_paged(case, tensor, inputs)) for tensor in inputs[1:3]]
    return [Sequence(*vectors) for vectors in zip(queries, *contexts, strict=True)]


def outputs_of(case: AttentionCase, attended: Any) -> list[torch.Tensor]:
    """Return what a kernel gave each sequence: [tokens, heads, features]."""
    parts = attended if isinstance(attended, tuple) else (attended,)
    if parts[0].dim() == 3:
        return list(parts[0].split(case.joined.q_lens))
    return [
        row[:, -q_len:].transpose(0, 1)
        for part, batch in zip(parts, case.batches, strict=True)
        for row, q_len in zip(part, batch.q_lens, strict=True)
    ]


def relative_error(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> float:
    """Return the largest distance of a sequence over its length as vectors."""
    assert len(expected) == len(actual)
    errors = [
        float((right.double() - left).norm() / left.norm())
        for left, right in zip(expected, actual, strict=True)
    ]
    return max(errors)


def _dense_sequences(case: AttentionCase, inputs: Inputs) -> Iterator[Sequence]:
    for index, batch in enumerate(case.batches):
        query, key, value = inputs[4 * index : 4 * index + 3]
        for row, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
            yield Sequence(
                query[row, :, -q_len:].transpose(0, 1),
                key[row, :, -kv_len:].transpose(0, 1),
                value[row, :, -kv_len:].transpose(0, 1),
            )


def _single(case: AttentionCase, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the contexts of sequences that have their rows apart, head by head."""
    num_heads = case.num_kv_heads
    for part in rows.split([kv_len * num_heads for kv_len in case.joined.kv_lens]):
        yield part.unflatten(0, (num_heads, -1)).transpose(0, 1)


def _paged(case: AttentionCase, pages: torch.Tensor, inputs: Inputs) -> Iterator[torch.Tensor]:
    """Yield the contexts in pages, which a table or a list names."""
    for index, kv_len in enumerate(case.joined.kv_lens):
        if inputs[3].dim() == 2:
            chosen = inputs[3][index, : -(-kv_len // pages.shape[1])]
        else:
            chosen = inputs[4][inputs[3][index] : inputs[3][index + 1]]
        yield pages.double()[chosen.long()].flatten(0, 1)[:kv_len]
