"""Linear recurrences over the tokens of sequences, in chunks and token by token.

A state S [key features, value features] per sequence and head decays, takes up a key and a value
of each token and answers its query: y = S^T q. With the delta rule what the key recalls already is
taken off the value first. All in fp32, as the state is.
Source: Gated Delta Networks (Yang, Kautz, Hatamizadeh, 2025), section 3.3; Mamba2 (Dao and Gu,
2024), section 6.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from foretoken.profiler.kernel import TensorFactory


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Tokens of sequences: [seqs, heads, tokens, features] each.

    `log_decay` has one feature, or as many as a key; `strength`, of one feature, is how much of a
    value the delta rule learns, None without the rule.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    strength: torch.Tensor | None = None


def has_equal_sequences(dims: Mapping[str, int]) -> bool:
    """Return whether tokens can be shared out evenly: unequal lengths are not in the dimensions."""
    return dims["num_tokens"] % dims["num_seqs"] == 0


def zeros_of_state(tensors: TensorFactory, *shape: int) -> torch.Tensor:
    """Return the state of sequences that begin."""
    return torch.zeros(shape, dtype=torch.float32, device=tensors.device)


def scan_chunks(
    tokens: Tokens, state: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [seqs, heads, tokens, value features] and the last state.

    Within a chunk everything is a product of matrices; the state goes from chunk to chunk.
    `chunk` times the strongest decay must not pass what fp32 holds, where decays are by feature.
    """
    length = tokens.query.shape[2]
    query, key, value, decay = (
        _in_chunks(tensor, chunk)
        for tensor in (tokens.query, tokens.key, tokens.value, tokens.log_decay)
    )
    total = decay.cumsum(-2)
    seen = _decayed_products(query, key, total).tril()
    if tokens.strength is not None:
        strength = _in_chunks(tokens.strength, chunk)
        recalled = _decayed_products(key * strength, key, total).tril(-1)
        identity = torch.eye(chunk, device=recalled.device)
        recalled = recalled + identity
        value = _solve(recalled, value * strength)
        reach = _solve(recalled, key * strength * total.exp())
    last = total[..., -1:, :]
    query, key = query * total.exp(), key * (last - total).exp()
    outputs = []
    for place in range(query.shape[2]):
        learnt = value[:, :, place]
        if tokens.strength is not None:
            learnt = learnt - reach[:, :, place] @ state
        outputs.append(query[:, :, place] @ state + seen[:, :, place] @ learnt)
        kept = last[:, :, place].transpose(-1, -2).exp()
        state = state * kept + key[:, :, place].transpose(-1, -2) @ learnt
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length], state


def step_tokens(tokens: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same, one token after the other."""
    outputs = []
    for place in range(tokens.query.shape[2]):
        query, key, value, decay = (
            tensor[:, :, place].float()
            for tensor in (tokens.query, tokens.key, tokens.value, tokens.log_decay)
        )
        state = state * decay.exp().unsqueeze(-1)
        if tokens.strength is not None:
            recalled = torch.einsum("bhk,bhkv->bhv", key, state)
            value = (value - recalled) * tokens.strength[:, :, place].float()
        state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query, state))
    return torch.stack(outputs, 2), state


def _in_chunks(tensor: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return [seqs, heads, chunks, chunk, features] in fp32, zeros at the end of the last chunk."""
    missing = math.ceil(tensor.shape[2] / chunk) * chunk - tensor.shape[2]
    return functional.pad(tensor.float(), (0, 0, 0, missing)).unflatten(2, (-1, chunk))


def _decayed_products(
    first: torch.Tensor, second: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """Return the products of all pairs of a chunk, decayed from the second token to the first."""
    if total.shape[-1] > 1:
        return (first * total.exp()) @ (second * (-total).exp()).transpose(-1, -2)
    # Of pairs the other way round, which nobody uses, the decay would grow without bound.
    decay = (total - total.transpose(-1, -2)).tril().exp()
    return first @ second.transpose(-1, -2) * decay


def _solve(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
