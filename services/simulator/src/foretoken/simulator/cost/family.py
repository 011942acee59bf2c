"""Families of operators whose time depends on the same few numbers of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretoken.domain.lowering.graph import (
    BatchShape,
    DecodeShape,
    OperatorNode,
    PrefillShape,
    RankContext,
)
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.simulator.grid import cross_points, spaced_integers

Axes = tuple[Any, ...]

# How much longer than the mean the longest decoding context is.
_RAGGEDNESS = np.array([1.0, 1.5, 2.0, 4.0, 8.0])
# Points per doubling: decoding costs are close to linear in both numbers, prefilling in neither.
_DECODE_SEQS_PER_OCTAVE = 2
_DECODE_MEAN_PER_OCTAVE = 2
_PREFILL_PER_OCTAVE = 4
_CONTEXT_PER_OCTAVE = 2
# Contexts start here: shorter ones cost as much.
_SHORTEST_CONTEXT = 16
# Prefills in a batch that tells what one more takes: enough to fill a device with short ones.
BATCHED = 8
# One kernel over prefills and decoding sequences launches blocks for the longest prefill in every
# sequence; their cost changes slowly.
_SHORTEST_MIXED_PREFILL = 64
_MIXED_PREFILL_PER_OCTAVE = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """What bounds a step.

    Tokens of an engine and of its group, sequences, rows that are sampled from, length of a
    context.
    """

    num_tokens: int
    num_group_tokens: int
    num_seqs: int
    num_rows: int
    context: int


def rows_axes(limits: StepLimits) -> Axes:
    """Return the axes of what depends on the rows that are sampled from."""
    return (np.arange(1, limits.num_rows + 1),)


def decode_axes(limits: StepLimits) -> Axes:
    """Return (sequences, mean context, longest context over mean) of decoding sequences."""
    return (
        spaced_integers(1, limits.num_seqs, _DECODE_SEQS_PER_OCTAVE),
        spaced_integers(
            min(_SHORTEST_CONTEXT, limits.context), limits.context, _DECODE_MEAN_PER_OCTAVE
        ),
        _RAGGEDNESS,
    )


def prefill_axes(limits: StepLimits) -> Axes:
    """Return (new tokens, context before them) of one prefill."""
    longest = min(limits.num_tokens, limits.context)
    context = spaced_integers(_SHORTEST_CONTEXT, limits.context, _CONTEXT_PER_OCTAVE)
    return (
        spaced_integers(1, longest, _PREFILL_PER_OCTAVE),
        np.concatenate(([0], context)),
    )


def mixed_axes(limits: StepLimits) -> Axes:
    """Return the longest prefill, then the axes of the sequences that decode with it."""
    longest = min(limits.num_tokens, limits.context)
    first = spaced_integers(
        min(_SHORTEST_MIXED_PREFILL, longest), longest, _MIXED_PREFILL_PER_OCTAVE
    )
    return (first, *decode_axes(limits))


def tokens_batch(axes: Axes) -> BatchShape:
    """Return batches of so many tokens and nothing else that varies."""
    return BatchShape(num_tokens=axes[0], num_output_rows=1, num_group_tokens=1)


def group_batch(axes: Axes) -> BatchShape:
    """Return batches of so many tokens on all engines in lock step together."""
    return BatchShape(num_tokens=1, num_output_rows=1, num_group_tokens=axes[0])


def rows_batch(axes: Axes) -> BatchShape:
    """Return batches in which so many sequences get a token."""
    return BatchShape(num_tokens=1, num_output_rows=axes[0], num_group_tokens=1)


def decode_batch(axes: Axes) -> BatchShape:
    """Return batches of decoding sequences, one per grid point."""
    num_seqs, mean, raggedness = cross_points(axes)
    kv_tokens = num_seqs * mean
    # Every sequence has a context of at least one token.
    longest = np.rint(mean * raggedness).astype(np.int64)
    decode = DecodeShape(
        num_seqs=num_seqs,
        kv_tokens=kv_tokens,
        kv_tokens_max=np.minimum(longest, kv_tokens - num_seqs + 1),
    )
    return BatchShape(num_tokens=1, num_output_rows=1, num_group_tokens=1, decode=decode)


def prefill_batch(axes: Axes) -> BatchShape:
    """Return batches of one prefill, one per grid point."""
    return _prefills_batch(axes, 1)


def prompt_nodes(options: LoweringOptions, rank: RankContext) -> Sequence[OperatorNode]:
    """Return the operators of a step of one prompt on a rank, whose number no length changes."""
    batch = prefill_batch((np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)))
    return lower_rank(batch, options, rank)


def prefill_batching(axes: Axes) -> BatchShape:
    """Return batches of `BATCHED` prefills that are alike, one per grid point."""
    return _prefills_batch(axes, BATCHED)


def _prefills_batch(axes: Axes, num_seqs: int) -> BatchShape:
    new_tokens, context = cross_points(axes)
    shape = PrefillShape(**prefill_dims(num_seqs + 0 * new_tokens, new_tokens, context))
    return BatchShape(num_tokens=1, num_output_rows=1, num_group_tokens=1, prefill=shape)


def varying_nodes(
    batch: BatchShape, options: LoweringOptions, ranks: Sequence[RankContext]
) -> list[list[OperatorNode]]:
    """Return, for each rank, the operators that depend on the grid: those of the family."""
    return [
        [
            node
            for node in lower_rank(batch, options, rank)
            if any(isinstance(value, np.ndarray) for value in node.dims.values())
        ]
        for rank in ranks
    ]
