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
    REJECTED = 4
    LOST = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One entry per request in the order of the plan; times in ns, -1 where never reached.

    `arrival_ns` is when the client sent it, `queued_ns` when the engine's scheduler could first see
    it, `scheduled_ns` when it was first in a step. `num_cached_tokens` were found in the prefix
    cache, `num_loaded_tokens` of them in a tier below the device, at all admissions together.

    `engine` counts through all pools. Where prompts are computed elsewhere, `prefill_engine` did
    (-1: nowhere else), at `prefilled_ns`, and the KV cache was on `engine` at `transferred_ns`: it
    hands the first token out as the first of its steps with the request begins. `num_retries` is
    how often the request began anew. The four are None where there is but one pool that never
    fails.
    `session` is the same number for requests that wait for each other (None: none do).
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
    prefill_engine: Ints | None = None
    prefilled_ns: Ints | None = None
    transferred_ns: Ints | None = None
    num_retries: Ints | None = None
    session: Ints | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRuns:
    """Output tokens that left at evenly spaced steps of an engine.

    One entry per run, those of a request together and in order: requests ascend. Run i is `count`
    tokens, the first at the end of step `first_step` of the request's engine, each other `stride`
    steps after the one before: 1, or up to the number of stages of a pipeline; 0 where they left
    together. `engine` is the one whose steps those are (None: the request's).
    """

    request: Ints
    first_step: Ints
    stride: Ints
    count: Ints
    engine: Ints | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One entry per step of one engine, in order; prefills apart, each with the step it is in.

    `scheduled_ns` is when the batch was chosen, `start_ns` when the first stage began, `end_ns`
    when the last one ended and its tokens left the engine, `delivered_ns` when the output server
    had handed them out (None: at once). `num_tokens` were computed of `num_decodes`
    decoding and `num_prefills` prefilling requests; `num_rows` of them were sampled from, and
    `num_output_tokens` left (None: as many; fewer where drafts were refused).
    `decode_kv_tokens` and `_max` count the decoding requests' contexts with the new token.
    `num_running` and `num_waiting` requests, and `num_used_blocks` of the KV cache, count after the
    batch was chosen; `num_preempted` lost their blocks for it. A prefill computes `prefill_tokens`
    of `prefill_request` (its index) after `prefill_context` tokens that were there. Engines in lock
    step computed `num_group_tokens` of `num_group_seqs` together; None where each runs on its own.
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
    num_group_seqs: Ints | None = None
    num_output_tokens: Ints | None = None
    delivered_ns: Ints | None = None

    @property
    def seen_ns(self) -> Ints:
        """When clients see the tokens of each step."""
        return self.end_ns if self.delivered_ns is None else self.delivered_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSpan:
    """A time in ns during which the devices of an engine were held: `is_ready` where it served."""

    engine: int
    start_ns: int
    end_ns: int
    is_ready: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRecord:
    """One pool of a cluster: its engines are `first_engine` to `first_engine + num_engines`.

    `spans` are when its engines were held, `sent_bytes` the KV caches that left or reached it and
    `port_busy_ns` how long its ports were busy with them, all together.
    """

    name: str
    first_engine: int
    num_engines: int
    num_kv_blocks: int
    block_size: int
    spans: Sequence[ReplicaSpan] = ()
    num_failures: int = 0
    num_scale_ups: int = 0
    num_scale_downs: int = 0
    num_adapter_loads: int = 0
    sent_bytes: int = 0
    port_busy_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderRecord:
    """What replicas that encode images apart did together: of so many prompts; times in ns."""

    name: str
    num_replicas: int
    num_prompts: int
    busy_ns: int
    port_busy_ns: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRecord:
    """A whole simulation: its requests, their tokens, and the steps of each engine.

    `pools` are those of a cluster whose replicas are engines, in order; without one `num_kv_blocks`
    is each engine's. `encoders` are apart from these (None: engines encode).
    """

    requests: RequestRecord
    tokens: TokenRuns
    steps: Sequence[StepRecord]
    num_kv_blocks: int
    block_size: int
    pools: Sequence[PoolRecord] = ()
    encoders: EncoderRecord | None = None


def count_group_tokens(record: ServingRecord, groups: Sequence[range]) -> ServingRecord:
    """Return the record with the tokens of each group of engines that are in lock step.

    Such engines have their steps together, those without work too.
    """
    steps = list(record.steps)
    for group in groups:
        members = [steps[engine] for engine in group]
        tokens: Ints = np.stack([member.num_tokens for member in members]).sum(axis=0)
        seqs: Ints = np.stack([m.num_decodes + m.num_prefills for m in members]).sum(axis=0)
        for engine in group:
            steps[engine] = replace(steps[engine], num_group_tokens=tokens, num_group_seqs=seqs)
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
