"""What the streams of every pipeline stage do in a step, from its spans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.results.training_report import NUM_COMPUTE_KINDS, SPAN_KINDS, SpanColumns

# Spans that overlap by less than this share of the later one touch.
_TOUCHING_RATIO = 1e-6

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpanArrays:
    """`SpanColumns` as arrays, in the order of their starts; empty where there are none."""

    stage: Integers
    chunk: Integers
    micro_batch: Integers
    kind: Integers
    start_ms: Floats
    end_ms: Floats

    def pick(self, chosen: NDArray[np.bool_] | Integers) -> "SpanArrays":
        """Return some of the spans."""
        return SpanArrays(
            **{name: getattr(self, name)[chosen] for name in SpanArrays.__dataclass_fields__}
        )

    @property
    def is_compute(self) -> NDArray[np.bool_]:
        """Whether each span is on the stream of computation, rather than of communication."""
        return np.asarray(self.kind < NUM_COMPUTE_KINDS)

    @property
    def stages(self) -> Sequence[int]:
        """The stages that do something, in their order."""
        return [int(stage) for stage in np.unique(self.stage)]

    @property
    def end_of_all_ms(self) -> float:
        """When the last span ends; 0 where there is none."""
        return float(self.end_ms.max(initial=0.0))


def span_arrays(spans: SpanColumns) -> SpanArrays:
    """Return the spans as arrays."""
    whole = {
        name: np.asarray(getattr(spans, name), dtype=np.int64)
        for name in ("stage", "chunk", "micro_batch", "kind")
    }
    start = np.asarray(spans.start_ms, dtype=np.float64)
    arrays = SpanArrays(**whole, start_ms=start, end_ms=np.asarray(spans.end_ms, dtype=np.float64))
    return arrays.pick(np.argsort(start, kind="stable"))


def kind_label(kind: int) -> str:
    """Return how a page writes a kind of span."""
    return SPAN_KINDS[kind].replace("_", " ")


def assign_lanes(spans: SpanArrays) -> list[int]:
    """Return the lane of each span in its stream of its stage: the first that is free, from 0.

    Two passes that run together, and transfers at the same time, need more than one.
    """
    lanes = np.zeros(len(spans.kind), dtype=np.int64)
    for stage in spans.stages:
        for is_compute in (True, False):
            here = (spans.stage == stage) & (spans.is_compute == is_compute)
            lanes[here] = pick_lanes(spans.start_ms[here], spans.end_ms[here])
    return [int(lane) for lane in lanes]


def pick_lanes(starts: Floats, ends: Floats) -> list[int]:
    """Return the first lane that is free when each span starts, from 0; they start in order."""
    free: list[float] = []
    lanes = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        # What touches does not overlap, whatever the last digits of a sum say.
        begin = start + _TOUCHING_RATIO * max(end - start, 0.0)
        lane = next((index for index, until in enumerate(free) if until <= begin), len(free))
        free[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def measure_streams(spans: SpanArrays) -> Mapping[int, Mapping[str, float]]:
    """Return the ms that each stage computes, communicates alone, and waits, by stage.

    Computation is by kind of span, communication that no computation hides as `exposed
    communication`; waiting is the rest up to the end of the last stage. Together they are the time
    from the start of the step to that end.
    """
    end = spans.end_of_all_ms
    result = {}
    for stage in spans.stages:
        here = spans.pick(spans.stage == stage)
        parts: dict[str, float] = {}
        computing, transferring = here.pick(here.is_compute), here.pick(~here.is_compute)
        either = _union_ms(here.start_ms, here.end_ms)
        busy = _union_ms(computing.start_ms, computing.end_ms)
        lengths = computing.end_ms - computing.start_ms
        # Passes that run together share their time.
        scale = busy / max(float(lengths.sum()), 1e-12)
        for kind in np.unique(computing.kind).tolist():
            parts[kind_label(kind)] = float(lengths[computing.kind == kind].sum()) * scale
        if len(transferring.kind):
            parts["exposed communication"] = max(either - busy, 0.0)
        parts["waiting"] = max(end - either, 0.0)
        result[stage] = parts
    return result


def pick_stages(stages: Sequence[int], most: int) -> Sequence[int]:
    """Return at most so many of the stages: the first, the last, and evenly between them."""
    if len(stages) <= most:
        return stages
    places = np.unique(np.linspace(0, len(stages) - 1, most).round().astype(int))
    return [stages[place] for place in places]


def _union_ms(start: Floats, end: Floats) -> float:
    """Return how long at least one of the intervals lasts; they are in order of start."""
    if not len(start):
        return 0.0
    reached = np.maximum.accumulate(end)
    before = np.concatenate(([-np.inf], reached[:-1]))
    return float(np.maximum(end - np.maximum(start, before), 0.0).sum())
