"""What the engines held over time: requests, blocks, and how long they were busy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.units import NS_PER_S
from foretoken.simulator.cluster.fleet import FleetPool
from foretoken.simulator.serving.metrics import busy_ns, is_completed
from foretoken.simulator.serving.record import ServingRecord, StepRecord

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]

# A series has at most so many intervals; a run of more seconds has longer ones.
_MAX_INTERVALS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The time that rates count: from the first arrival to the last completion, in ns."""

    start_ns: int
    end_ns: int

    @property
    def duration_s(self) -> float:
        """Its length."""
        return (self.end_ns - self.start_ns) / NS_PER_S


def find_interval(record: ServingRecord) -> Interval:
    """Return the time from the first arrival to the last completion; empty where none completed."""
    requests = record.requests
    if not is_completed(requests).any():
        return Interval(start_ns=0, end_ns=0)
    start_ns = int(np.min(requests.arrival_ns))
    return Interval(start_ns=start_ns, end_ns=max(int(np.max(requests.finished_ns)), start_ns + 1))


def held_ns(steps: StepRecord) -> Ints:
    """Return how long the counts after each step's scheduling stood: to the next one, or its end.

    Between the end of a step and the next one's scheduling the engine holds nothing.
    """
    scheduled, end = np.asarray(steps.scheduled_ns), np.asarray(steps.end_ns)
    if len(end) == 0:
        return np.zeros(0, dtype=np.int64)
    following = np.append(scheduled[1:], end[-1])
    return np.asarray(np.maximum(np.minimum(following, end) - scheduled, 0))


def count_outputs(steps: StepRecord) -> Ints:
    """Return the tokens of answers that left at the end of each step."""
    outputs = steps.num_output_tokens
    return np.asarray(steps.num_rows if outputs is None else outputs)


def interval_edges(interval: Interval) -> Ints:
    """Return the bounds of the intervals of a series, whole seconds from the start of the run."""
    num_seconds = -(-interval.end_ns // NS_PER_S)
    width_s = max(1, -(-num_seconds // _MAX_INTERVALS))
    num_intervals = -(-num_seconds // width_s)
    return np.arange(num_intervals + 1, dtype=np.int64) * (width_s * NS_PER_S)


def integrate(start_ns: Ints, spans_ns: Ints, values: NDArray[np.number], edges_ns: Ints) -> Floats:
    """Return the integral in s over each interval of what stands at `values` for their spans.

    The spans ascend and do not overlap; between them it is 0.
    """
    if len(start_ns) == 0:
        return np.zeros(len(edges_ns) - 1)
    areas = values * spans_ns
    upto = np.concatenate(([0.0], np.cumsum(areas, dtype=np.float64)))
    place = np.searchsorted(start_ns, edges_ns, side="right")
    # Of the span that an edge falls into, only what lies before the edge.
    current = np.maximum(place - 1, 0)
    into = np.clip(edges_ns - start_ns[current], 0, spans_ns[current])
    missing = np.where(place > 0, (spans_ns[current] - into) * values[current], 0.0)
    return np.asarray(np.diff(upto[place] - missing) / NS_PER_S)


def series_of(record: ServingRecord, fleet: Sequence[FleetPool]) -> dict[str, NDArray[np.number]]:
    """Return the run by intervals of a second, by the names in `SeriesColumns`.

    Shares are of the blocks and the devices that were held. Of an engine with several stages the
    time of a step counts as busy, which overlapping steps share.
    """
    interval = find_interval(record)
    edges = interval_edges(interval)
    width_s = np.diff(edges) / NS_PER_S
    # In devices of the largest engine: alike ones weigh 1.
    largest = max(pool.num_devices for pool in fleet)
    parts = [_pool_series(record, pool, interval, pool.num_devices / largest) for pool in fleet]
    total = {name: _add_up([part[name] for part in parts]) for name in parts[0]}
    requests = record.requests
    return {
        "start_s": edges[:-1] / NS_PER_S,
        "num_arrivals": _count_between(requests.arrival_ns, edges),
        "num_first_tokens": _count_between(requests.first_token_ns, edges),
        "num_completions": _count_between(requests.finished_ns, edges),
        "num_prefill_tokens": np.asarray(total["prompts"], dtype=np.int64),
        "num_output_tokens": np.asarray(total["outputs"], dtype=np.int64),
        "running_mean": total["running_s"] / width_s,
        "waiting_mean": total["waiting_s"] / width_s,
        "kv_utilization_ratio": _share(total["block_s"], total["held_block_s"]),
        "batch_size_mean": total["sizes"] / np.maximum(total["steps"], 1),
        "utilization_ratio": _share(total["busy_device_s"], total["held_device_s"]),
        "power_w": total["energy_j"] / width_s,
        "replicas_mean": total["ready_s"] / width_s,
    }


def _pool_series(
    record: ServingRecord, pool: FleetPool, interval: Interval, weight: float
) -> dict[str, Floats]:
    """Return sums over each interval of what the engines of a pool did and held.

    Those of devices count each engine with the weight.
    """
    edges = interval_edges(interval)
    parts = [_engine_series(record.steps[e], pool.num_stages, edges) for e in pool.engines]
    total = {name: _add_up([part[name] for part in parts]) for name in parts[0]}
    held_s, ready_s = _held_series(pool, interval)
    idle_w, busy_w = pool.scenario.device_idle_w, pool.scenario.busy_power_w
    energy_j = pool.num_devices * (idle_w * held_s + (busy_w - idle_w) * total["busy_s"])
    return {
        **total,
        "held_block_s": held_s * max(pool.record.num_kv_blocks, 1),
        "busy_device_s": total["busy_s"] * weight,
        "held_device_s": held_s * weight,
        "ready_s": ready_s,
        "energy_j": energy_j,
    }


def _held_series(pool: FleetPool, interval: Interval) -> tuple[Floats, Floats]:
    """Return how long engines were held in each interval, all together, and how long they served.

    What is held at the end of the run is to the end of the last interval.
    """
    edges = interval_edges(interval)
    held_s = np.zeros(len(edges) - 1)
    ready_s = np.zeros(len(edges) - 1)
    if not pool.record.spans:
        everyone = np.diff(edges) / NS_PER_S * pool.record.num_engines
        return everyone, everyone
    for engine in pool.engines:
        for span in pool.spans_of(engine, 0, interval.end_ns):
            end_ns = int(edges[-1]) if span.end_ns == interval.end_ns else span.end_ns
            within = np.clip(edges, span.start_ns, end_ns)
            held_s += np.diff(within) / NS_PER_S
            ready_s += np.diff(within) / NS_PER_S * span.is_ready
    return held_s, ready_s


def _add_up(parts: Sequence[Floats]) -> Floats:
    return np.asarray(np.sum(parts, axis=0))


def _share(used: Floats, held: Floats) -> Floats:
    """Return used over held; 0 where nothing was held."""
    return np.asarray(np.divide(used, held, out=np.zeros(len(used)), where=held > 0))


def _engine_series(steps: StepRecord, num_stages: int, edges: Ints) -> dict[str, Floats]:
    """Return sums over each interval of what an engine did."""
    scheduled, start, end = (
        np.asarray(column) for column in (steps.scheduled_ns, steps.start_ns, steps.end_ns)
    )
    spans, ones = held_ns(steps), np.ones(len(end), dtype=np.int64)
    occupied = np.minimum(busy_ns(steps, num_stages), _until_next(steps))
    return {
        "running_s": integrate(scheduled, spans, np.asarray(steps.num_running), edges),
        "waiting_s": integrate(scheduled, spans, np.asarray(steps.num_waiting), edges),
        "block_s": integrate(scheduled, spans, np.asarray(steps.num_used_blocks), edges),
        "busy_s": integrate(start, occupied, ones, edges),
        "sizes": _sum_between(end, np.asarray(steps.num_decodes) + steps.num_prefills, edges),
        "steps": _sum_between(end, ones, edges),
        "outputs": _sum_between(end, count_outputs(steps), edges),
        "prompts": _sum_between(end[steps.prefill_step], np.asarray(steps.prefill_tokens), edges),
    }


def _until_next(steps: StepRecord) -> Ints:
    start, end = np.asarray(steps.start_ns), np.asarray(steps.end_ns)
    return np.diff(start, append=end[-1:]) if len(start) else start


def _sum_between(times_ns: Ints, values: Ints, edges: Ints) -> Floats:
    """Return the sums of values at ascending times, by the interval (left open) they fall into."""
    upto = np.concatenate(([0], np.cumsum(values, dtype=np.float64)))
    places = np.searchsorted(times_ns, edges, side="right")
    places[0] = 0
    return np.asarray(np.diff(upto[places]))


def _count_between(times_ns: NDArray[np.integer], edges: Ints) -> Ints:
    """Return how many times fall into each interval (left open); those never reached do not."""
    reached = np.sort(np.asarray(times_ns)[np.asarray(times_ns) >= 0])
    places = np.searchsorted(reached, edges, side="right")
    places[0] = 0
    return np.asarray(np.diff(places), dtype=np.int64)
