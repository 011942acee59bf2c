"""Attention by torch's `scaled_dot_product_attention`: as it chooses, and with each backend.

It takes no ragged batch. Sequences of unequal length run one after the other, or padded to the
longest. On a CPU one after the other is the default: on one core of an EPYC of 2024 padding took
1.3 to 3.5 times as long for decodes (0.8 for 64 contexts of 64 tokens), 1.7 to 4.9 times for
prefills. Nested tensors took 40 to 100 times as long, and no causal mask, so they are not offered.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from foretoken.profiler.attention.batch import (
    HALF_DTYPES,
    AttentionCase,
    AttentionCode,
    corner_mask,
    dense_inputs,
    padded_inputs,
    random_vectors,
    visible_keys,
)
from foretoken.profiler.kernel import Inputs, TensorFactory, has_capability, is_cuda, runs

if torch.backends.cuda.is_built():
    # Loads torch's compiler, which takes as long as all the rest of torch.
    from torch.nn.attention.bias import causal_lower_right

NAME = "torch.nn.functional.scaled_dot_product_attention"
# Backends that know causality from the end of the context; others take it as a mask.
_ALIGNED_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
_NUM_INPUTS_PER_BATCH = 4
# Blocks of a quarter of the window were the fastest of a quarter, half, one and two windows.
_BLOCKS_PER_WINDOW = 4
_SMALLEST_BLOCK = 32

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return causal attention; queries are the last positions of their context.

    All are [seqs, heads, tokens, features]; the mask is empty, or says that and no more.
    """
    is_grouped = query.shape[1] != key.shape[1]
    if mask.numel():
        # On CUDA a plain mask would rule the flash kernel out.
        bias = causal_lower_right(*mask.shape) if mask.is_cuda else mask
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, enable_gqa=is_grouped
        )
    is_causal = query.shape[2] > 1
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=is_grouped
    )


def _attend_masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return attention to what the mask shows; causal attention where it is empty."""
    if not mask.numel():
        return attend(query, key, value, mask)
    is_grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=is_grouped
    )


def _attend_with(
    backend: SDPBackend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    with sdpa_kernel(backend):
        run = attend if backend in _ALIGNED_BACKENDS else _attend_masked
        return run(query, key, value, mask)


def _bind_batches(run: Attend, case: AttentionCase) -> Callable[..., Any]:
    """Return a function that runs the batches one after the other."""
    if len(case.batches) == 1:
        return run

    def run_all(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = _NUM_INPUTS_PER_BATCH
        starts = range(0, len(inputs), count)
        return tuple(run(*inputs[start : start + count]) for start in starts)

    return run_all


def _sequence_vectors(
    case: AttentionCase, tensors: TensorFactory
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [tokens, heads, features], and keys and values as rows of features.

    The rows of a sequence come together, and those of a head in it: every sequence has a cache of
    its own, [heads, tokens, features], as frameworks keep it that attend with torch.
    """
    batch = case.joined
    query, key, value = random_vectors(case, sum(batch.q_lens), sum(batch.kv_lens), tensors)
    if case.shared_key_dim:
        key = torch.cat([part.transpose(0, 1).flatten(0, 1) for part in key.split(batch.kv_lens)])
    return query, key.reshape(-1, case.key_dim), value.reshape(-1, case.value_dim)


def _sequence_inputs(case: AttentionCase, tensors: TensorFactory) -> Inputs:
    """Return queries, keys and values of single sequences, and a mask for all of them."""
    return *_sequence_vectors(case, tensors), corner_mask(case.joined, tensors.device, case.window)


def _bind_each(case: AttentionCase, run: Attend) -> Callable[..., torch.Tensor]:
    """Return a function that runs sequences one after the other: [tokens, heads, features]."""
    batch, num_heads = case.joined, case.num_kv_heads
    num_rows = [kv_len * num_heads for kv_len in batch.kv_lens]

    def run_all(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        attended = []
        parts = zip(
            query.split(batch.q_lens), key.split(num_rows), value.split(num_rows), strict=True
        )
        for queries, keys, values in parts:
            one = run(
                queries.transpose(0, 1).unsqueeze(0),
                keys.view(1, num_heads, -1, case.key_dim),
                values.view(1, num_heads, -1, case.value_dim),
                mask,
            )
            attended.append(one.squeeze(0).transpose(0, 1))
        return torch.cat(attended)

    return run_all


def _attend_cornered(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return causal attention with the part of the mask that is one sequence's."""
    q_len, kv_len = query.shape[2], key.shape[2]
    needs_mask = q_len not in (1, kv_len)
    return attend(query, key, value, mask[-q_len:, -kv_len:] if needs_mask else mask[:0])


def _block_size(window: int) -> int:
    return max(window // _BLOCKS_PER_WINDOW, _SMALLEST_BLOCK)


def _block_mask(case: AttentionCase, device: torch.device) -> torch.Tensor:
    """Return what a block of queries sees of the keys up to its last, for all blocks."""
    q_max, kv_max = case.joined.lengths
    size = min(_block_size(case.window), q_max)
    return visible_keys(size, min(size + case.window - 1, kv_max), case.window, device)


def _attend_in_blocks(
    window: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return attention over a window, block by block of queries on the keys that a block sees."""
    q_len, kv_len, size = query.shape[2], key.shape[2], _block_size(window)
    blocks = []
    for start in range(0, q_len, size):
        end = min(start + size, q_len)
        last = kv_len - q_len + end
        first = max(last - (end - start) - window + 1, 0)
        blocks.append(
            _attend_masked(
                query[:, :, start:end],
                key[:, :, first:last],
                value[:, :, first:last],
                mask[start - end :, first - last :],
            )
        )
    return torch.cat(blocks, dim=2)


def _dense_block_inputs(case: AttentionCase, tensors: TensorFactory) -> Inputs:
    query, key, value, _ = dense_inputs(case, tensors)
    return query, key, value, _block_mask(case, tensors.device)


def _sequence_block_inputs(case: AttentionCase, tensors: TensorFactory) -> Inputs:
    return *_sequence_vectors(case, tensors), _block_mask(case, tensors.device)


def is_cpu(device: torch.device) -> bool:
    """Return whether a device is the host's processor."""
    return str(device.type) == "cpu"


def on_cpu(code: AttentionCode) -> AttentionCode:
    """Return the code for CPUs alone: elsewhere others come before it."""
    return replace(code, is_present=lambda device: is_cpu(device) and code.is_present(device))


def on_cuda(code: AttentionCode) -> AttentionCode:
    """Return the code for GPUs alone."""
    return replace(code, is_present=lambda device: is_cuda(device) and code.is_present(device))


def _backend(
    backend: SDPBackend, name: str, can_run: Callable[[AttentionCase], bool]
) -> AttentionCode:
    return AttentionCode(
        source=f"{NAME}, {name}",
        make_inputs=dense_inputs,
        bind=lambda case: _bind_batches(partial(_attend_with, backend), case),
        can_run=lambda case: case.is_equal and not case.window and can_run(case),
        is_differentiable=True,
    )


def _try_cudnn(device: torch.device) -> None:
    vectors = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, device=device)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        functional.scaled_dot_product_attention(vectors, vectors, vectors, is_causal=True)


_cudnn_runs = runs(_try_cudnn)

EQUAL = AttentionCode(
    source=NAME,
    make_inputs=dense_inputs,
    bind=lambda case: _bind_batches(attend, case),
    can_run=lambda case: case.is_equal and not case.window,
    is_differentiable=True,
)
PER_SEQUENCE = AttentionCode(
    source=f"{NAME}, per sequence",
    make_inputs=_sequence_inputs,
    bind=lambda case: _bind_each(case, _attend_cornered),
    can_run=lambda case: not case.is_equal and not case.window,
    is_differentiable=True,
)
PADDED = AttentionCode(
    source=f"{NAME}, padded",
    make_inputs=padded_inputs,
    bind=lambda case: _bind_batches(_attend_masked, case),
    # The mask is that of all heads.
    can_run=lambda case: not case.is_equal and case.has_small_scores,
    is_differentiable=True,
)
IN_BLOCKS = AttentionCode(
    source=f"{NAME}, in blocks of queries",
    make_inputs=_dense_block_inputs,
    bind=lambda case: partial(_attend_in_blocks, case.window),
    can_run=lambda case: case.is_equal and case.window > 0,
)
PER_SEQUENCE_IN_BLOCKS = AttentionCode(
    source=f"{NAME}, per sequence in blocks of queries",
    make_inputs=_sequence_block_inputs,
    bind=lambda case: _bind_each(case, partial(_attend_in_blocks, case.window)),
    can_run=lambda case: not case.is_equal and case.window > 0,
)
# Keys before the window are read, and hidden.
MASKED = AttentionCode(
    source=f"{NAME}, masked",
    make_inputs=padded_inputs,
    bind=lambda case: _bind_batches(_attend_masked, case),
    can_run=lambda case: case.is_equal and case.window > 0 and case.has_small_scores,
)
FLASH = replace(
    _backend(SDPBackend.FLASH_ATTENTION, "flash", lambda case: case.is_narrow),
    is_present=has_capability(8),
    dtypes=HALF_DTYPES,
)
CUDNN = replace(
    _backend(SDPBackend.CUDNN_ATTENTION, "cudnn", lambda case: case.key_dim % 8 == 0),
    is_present=lambda device: has_capability(8)(device) and _cudnn_runs(device),
    dtypes=HALF_DTYPES,
)
# It would have to copy the keys of every group of heads.
EFFICIENT = replace(
    _backend(SDPBackend.EFFICIENT_ATTENTION, "efficient", lambda case: not case.is_grouped),
    is_present=is_cuda,
)
MATH = _backend(SDPBackend.MATH, "math", lambda case: case.has_small_scores)
BACKENDS = (FLASH, CUDNN, EFFICIENT, on_cuda(MATH))

# What runs where nothing but torch is installed; the first that can run a case is its default.
ON_CPU = tuple(on_cpu(code) for code in (EQUAL, PER_SEQUENCE, PADDED, MATH))
ON_CPU_WINDOW = tuple(on_cpu(code) for code in (IN_BLOCKS, PER_SEQUENCE_IN_BLOCKS, MASKED, PADDED))
