"""How long a serving step takes, as tables that compiled code looks up."""

from typing import Any, NamedTuple

import numpy as np

from foretoken.simulator.cost.ffn_apart import together_us
from foretoken.simulator.cost.step_scope import AS_ESTIMATED
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.jit import compiled, compiled_part

# Kinds of steps: every request decodes, or some compute their prompt.
DECODE, MIXED = 0, 1
# Among those with prompts, those where nobody decodes: only `stretch` tells them apart.
PREFILL = 2


class StepShape(NamedTuple):
    """What the cost of a step depends on, besides the prefills in it.

    `num_rows` sequences get a token. `decode_kv_tokens` and `decode_kv_tokens_max` count the
    contexts of the decoding sequences with the new token. A prefill computes some tokens after the
    context that is there already.
    """

    num_tokens: int
    num_rows: int
    num_decodes: int
    decode_kv_tokens: int
    decode_kv_tokens_max: int
    num_prefills: int


class CostTables(NamedTuple):
    """Times in µs of the steps of one engine; the first index is the pipeline stage.

    `tokens_us` is by (only decodes or not, tokens of the step), `rows_us` by sequences that get a
    token, both from 0. `decode_us` is by (sequences, mean context, longest over mean) of sequences
    that decode on their own, `mixed_us` by (new tokens of the longest prefill with them, then the
    same) and `prefill_us` by (new tokens, context before them); all are linear between the points
    of their axes. Prefills fill a device together: the one that takes longest pays `prefill_us`,
    the others `prefill_more_us`. A step takes at least
    `floor_us`, as `tokens_us`, what its launches take. `shared` is by tokens of all engines that
    run in lock step together, of one column where engines run on their own: what comes once on top
    of the slowest of them, what is sent to experts on devices of their own and back, in how many
    parts, and over how many layers; see `together_us`. `stretch` is by (decodes, mixed, prefill
    alone) what a step is multiplied with, and what is added.
    """

    tokens_us: Floats
    rows_us: Floats
    decode_seqs: Floats
    decode_mean: Floats
    decode_raggedness: Floats
    decode_us: Floats
    mixed_prefill: Floats
    mixed_us: Floats
    prefill_tokens: Floats
    prefill_context: Floats
    prefill_us: Floats
    prefill_more_us: Floats
    floor_us: Floats
    shared: Floats
    stretch: Floats


_together_us = compiled_part(together_us)


@compiled
def stage_us(
    tables: CostTables, stage: int, shape: StepShape, prefill_tokens: Ints, prefill_context: Ints
) -> float:
    """Return the time of a step on one stage, in µs.

    The first `shape.num_prefills` entries of the last two are its prefills.
    """
    kind = MIXED if shape.num_prefills > 0 else DECODE
    total_us = (
        tables.tokens_us[stage, kind, shape.num_tokens] + tables.rows_us[stage, shape.num_rows]
    )
    if kind == DECODE:
        if shape.num_decodes > 0:
            total_us += _decode_us(tables, tables.decode_us[stage], shape)
    else:
        total_us += _mixed_us(tables, stage, shape, prefill_tokens, prefill_context)
    total_us = max(total_us, tables.floor_us[stage, kind, shape.num_tokens])
    which = PREFILL if kind == MIXED and shape.num_decodes == 0 else kind
    return float(total_us * tables.stretch[which, 0] + tables.stretch[which, 1])


@compiled_part
def _mixed_us(
    tables: CostTables, stage: int, shape: StepShape, prefill_tokens: Ints, prefill_context: Ints
) -> float:
    """Return the attention of a step with prefills."""
    total_us, most_us, saved_us, longest = 0.0, 0.0, 0.0, 0
    for index in range(shape.num_prefills):
        longest = max(longest, prefill_tokens[index])
        at = (float(prefill_tokens[index]), float(prefill_context[index]))
        more_us = _prefill_us(tables, tables.prefill_more_us[stage], at)
        alone_us = _prefill_us(tables, tables.prefill_us[stage], at)
        total_us += more_us
        if alone_us > most_us:
            most_us, saved_us = alone_us, more_us
    total_us += most_us - saved_us
    if shape.num_decodes > 0:
        i, ratio = _place(tables.mixed_prefill, float(longest))
        added_us = _decode_us(tables, tables.mixed_us[stage, i], shape)
        if ratio > 0.0:
            upper_us = _decode_us(tables, tables.mixed_us[stage, i + 1], shape)
            added_us += (upper_us - added_us) * ratio
        total_us += added_us
    return float(total_us)


@compiled_part
def _prefill_us(tables: CostTables, values: Floats, at: tuple[float, float]) -> float:
    return _between_2(tables.prefill_tokens, tables.prefill_context, values, at[0], at[1])


@compiled_part
def _decode_us(tables: CostTables, values: Floats, shape: StepShape) -> float:
    """Return the attention of the decoding sequences, from a table of them."""
    mean = shape.decode_kv_tokens / shape.num_decodes
    return _between_3(
        tables.decode_seqs,
        tables.decode_mean,
        tables.decode_raggedness,
        values,
        (float(shape.num_decodes), mean, shape.decode_kv_tokens_max / mean),
    )


@compiled
def shared_us(tables: CostTables, stage: int, num_tokens: int) -> float:
    """Return what engines in lock step take together on a stage, by the tokens of all, in µs."""
    return float(tables.shared[stage, 0, min(num_tokens, tables.shared.shape[2] - 1)])


@compiled
def with_shared_us(tables: CostTables, stage: int, own_us: float, num_tokens: int) -> float:
    """Return the time of a step of engines in lock step, by that of the slowest alone, in µs."""
    place = min(num_tokens, tables.shared.shape[2] - 1)
    shared_us, sent_us, num_parts, num_layers = tables.shared[stage, :, place]
    if num_parts == 1.0:
        return float(own_us + shared_us + sent_us)
    return float(_together_us(own_us, shared_us, sent_us, num_parts, num_layers))


def shared_table(
    shared_us: Floats, sent_us: float | Floats = 0.0, num_parts: float | Ints = 1, layers: int = 1
) -> Floats:
    """Return the table `shared`: [stage, what, tokens], of times by [stage, tokens]."""
    parts = (shared_us, sent_us, num_parts, layers)
    whole = np.stack([np.broadcast_to(part, shared_us.shape) for part in parts], axis=1)
    return np.ascontiguousarray(whole, dtype=np.float64)


@compiled_part
def _place(axis: Floats, wanted: float) -> tuple[int, float]:
    """Return the lower neighbour on an axis and how far beyond it; outside, its end."""
    last = len(axis) - 1
    if last == 0 or wanted <= axis[0]:
        return 0, 0.0
    if wanted >= axis[last]:
        return last - 1, 1.0
    index, beyond = 0, last
    while beyond - index > 1:
        middle = (index + beyond) // 2
        if axis[middle] <= wanted:
            index = middle
        else:
            beyond = middle
    return index, (wanted - axis[index]) / (axis[index + 1] - axis[index])


@compiled_part
def _between_2(first: Floats, second: Floats, values: Floats, at_1: float, at_2: float) -> float:
    i, ratio_1 = _place(first, at_1)
    j, ratio_2 = _place(second, at_2)
    i_next, j_next = min(i + 1, len(first) - 1), min(j + 1, len(second) - 1)
    lower = values[i, j] + (values[i, j_next] - values[i, j]) * ratio_2
    upper = values[i_next, j] + (values[i_next, j_next] - values[i_next, j]) * ratio_2
    return float(lower + (upper - lower) * ratio_1)


@compiled_part
def _between_3(
    first: Floats, second: Floats, third: Floats, values: Floats, at: tuple[float, float, float]
) -> float:
    i, ratio_1 = _place(first, at[0])
    j, ratio_2 = _place(second, at[1])
    k, ratio_3 = _place(third, at[2])
    j_next, k_next = min(j + 1, len(second) - 1), min(k + 1, len(third) - 1)
    total = 0.0
    for side in range(2):
        share = ratio_1 if side else 1.0 - ratio_1
        if share > 0.0:
            low = (
                values[i + side, j, k]
                + (values[i + side, j, k_next] - values[i + side, j, k]) * ratio_3
            )
            high = (
                values[i + side, j_next, k]
                + (values[i + side, j_next, k_next] - values[i + side, j_next, k]) * ratio_3
            )
            total += share * (low + (high - low) * ratio_2)
    return total


def flat_tables(step_us: float = 1000.0, us_per_token: float = 10.0, **sizes: Any) -> CostTables:
    """Return tables of one stage in which a step costs a constant and so much a token.

    `max_tokens` (default 8192) bounds the tokens of a step, `us_per_kv_token` (default 0) is what a
    decoding sequence pays for a token of context.
    """
    max_tokens = int(sizes.get("max_tokens", 8192))
    per_kv = float(sizes.get("us_per_kv_token", 0.0))
    tokens = step_us + us_per_token * np.arange(max_tokens + 1, dtype=np.float64)
    seqs, mean = np.array([0.0, 4096.0]), np.array([0.0, 1e6])
    decode = per_kv * seqs[:, None, None] * mean[None, :, None] * np.ones(2)
    return CostTables(
        tokens_us=np.stack((tokens, tokens))[None],
        rows_us=np.zeros((1, max_tokens + 1)),
        decode_seqs=seqs,
        decode_mean=mean,
        decode_raggedness=np.array([1.0, 1e6]),
        decode_us=decode[None],
        mixed_prefill=np.array([1.0]),
        mixed_us=decode[None, None],
        prefill_tokens=np.array([0.0, 1e6]),
        prefill_context=np.array([0.0, 1e6]),
        prefill_us=np.zeros((1, 2, 2)),
        prefill_more_us=np.zeros((1, 2, 2)),
        floor_us=np.zeros((1, 2, max_tokens + 1)),
        shared=shared_table(np.zeros((1, 1))),
        stretch=AS_ESTIMATED,
    )
