"""What the engines of a simulation did, as columns: the input of every metric and picture."""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]

# A time that was never reached, an engine that was never assigned.
NOT_REACHED = -1


class RequestOutcome(enum.IntEnum):
    """How a request ended; why not, where it was refused on arrival."""

    COMPLETED = 1
    CONTEXT_TOO_LONG = 2
    EXCEEDS_KV_CACHE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One entry per request in the order of the plan; times in ns, -1 where never reached.

    `arrival_ns` is when the client sent it, `queued_ns` when the engine's scheduler could first see
    it, `scheduled_ns` when it was first in a step. `num_cached_tokens` were found in the prefix
    cache, `num_loaded_tokens` of them in a tier below the device, at all admissions together.
    """

    arrival_ns: Ints
    queued_ns: Ints
    scheduled_ns: Ints
    first_token_ns: Ints
    finished_ns: Ints
    num_prefill_tokens: Ints
    num_decode_tokens: Ints
    num_preemptions: Ints
    num_cached_tokens: Ints
    num_loaded_tokens: Ints
    engine: Ints
    slo_class: Ints
    outcome: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRuns:
    """Output tokens that left at evenly spaced steps of an engine.

    One entry per run, those of a request together and in order: requests ascend. Run i is `count`
    tokens, the first at the end of step `first_step` of the request's engine, each other `stride`
    steps after the one before: 1, or up to the number of stages of a pipeline.
    """

    request: Ints
    first_step: Ints
    stride: Ints
    count: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One entry per step of one engine, in order; prefills apart, each with the step it is in.

    `scheduled_ns` is when the batch was chosen, `start_ns` when the first stage began, `end_ns`
    when the last one ended and its tokens left. `num_tokens` were computed of `num_decodes`
    decoding and `num_prefills` prefilling requests; `num_rows` of them got a token.
    `decode_kv_tokens` and `_max` count the decoding requests' contexts with the new token.
    `num_running` and `num_waiting` requests, and `num_used_blocks` of the KV cache, count after the
    batch was chosen; `num_preempted` lost their blocks for it. A prefill computes `prefill_tokens`
    of `prefill_request` (its index) after `prefill_context` tokens that were there. Engines in lock
    step computed `num_group_tokens` together; None where each runs on its own.
    """

    scheduled_ns: Ints
    start_ns: Ints
    end_ns: Ints
    num_tokens: Ints
    num_rows: Ints
    num_decodes: Ints
    num_prefills: Ints
    decode_kv_tokens: Ints
    decode_kv_tokens_max: Ints
    num_running: Ints
    num_waiting: Ints
    num_used_blocks: Ints
    num_preempted: Ints
    prefill_step: Ints
    prefill_request: Ints
    prefill_tokens: Ints
    prefill_context: Ints
    num_group_tokens: Ints | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRecord:
    """A whole simulation: its requests, their tokens, and the steps of each engine."""

    requests: RequestRecord
    tokens: TokenRuns
    steps: Sequence[StepRecord]
    num_kv_blocks: int
    block_size: int


def count_group_tokens(record: ServingRecord) -> ServingRecord:
    """Return the record of engines that are all in lock step, with the tokens of the group.

    Such engines have their steps together, those without work too.
    """
    total: Ints = np.stack([steps.num_tokens for steps in record.steps]).sum(axis=0)
    steps = [replace(each, num_group_tokens=total) for each in record.steps]
    return replace(record, steps=steps)


def split_steps(steps: StepRecord, size: int) -> Iterator[StepRecord]:
    """Yield the steps of an engine in pieces of a size, at least one: a long run is a lot."""
    count = len(steps.end_ns)
    for first in range(0, max(count, 1), size):
        last = min(first + size, count)
        low, high = np.searchsorted(steps.prefill_step, (first, last))
        columns = {
            column.name: getattr(steps, column.name)[low:high]
            if column.name.startswith("prefill_")
            else getattr(steps, column.name)[first:last]
            for column in fields(StepRecord)
            if getattr(steps, column.name) is not None
        }
        columns["prefill_step"] = columns["prefill_step"] - first
        yield StepRecord(**columns)
