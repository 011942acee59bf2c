"""What every device of a pipeline holds at every moment of a step.

Each rank follows its own order of passes: a forward pass adds what it keeps, a backward pass takes
it away. States are there all the time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.memory import TRAINING_AXES, training_headroom_bytes
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import (
    SPAN_KINDS,
    MemoryColumns,
    SpanColumns,
    StageMemory,
)
from foretoken.simulator.grid import Floats
from foretoken.simulator.rank import chunk_layers
from foretoken.simulator.steps.held.pass_peak import ChunkNeeds, PlaceNeed
from foretoken.simulator.steps.held.state_bytes import StateBytes
from foretoken.simulator.steps.memory import ModelMemory
from foretoken.simulator.steps.pipelines.schedule import Pass, RankOrder
from foretoken.simulator.steps.stage_hardware import stage_devices


@dataclass(frozen=True, slots=True)
class _Moments:
    """From each of `time_ms` on `kept` bytes of activations, and `passing` of the pass that runs.

    All have one entry per moment.
    """

    time_ms: Floats
    kept: Floats
    passing: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkNeed:
    """`ChunkNeeds` of one chunk, and the needs of its `places` in the order of the model."""

    saved: float
    weight_half: float
    forward: float
    backward: float
    places: Sequence[PlaceNeed]

    @property
    def largest_saved(self) -> str:
        """The operator that keeps the largest tensor, those of all layers together."""
        kept: Counter[tuple[str, str]] = Counter()
        for tensor in (tensor for place in self.places for tensor in place.kept):
            kept[tensor.role, tensor.producer] += tensor.num_bytes
        return max(kept, key=lambda name: kept[name], default=("", ""))[0]

    @property
    def largest_passing(self) -> str:
        """The operator at which a backward pass takes most."""
        kept = accumulate(place.saved for place in self.places)
        taken = [place.backward + saved for place, saved in zip(self.places, kept, strict=True)]
        return self.places[int(np.argmax(taken))].largest_passing


def measure_memory(
    scenario: TrainingScenario, orders: Sequence[RankOrder], spans: SpanColumns | None = None
) -> tuple[tuple[StageMemory, ...], MemoryColumns]:
    """Return the peak of every rank of the pipeline, and its memory over the step.

    `orders` say which chunks a rank runs. Times are those of `spans`, or 0 without.

    Raises:
        InvalidRequestError: the layout does not fit the model.

    """
    memory = ModelMemory(scenario)
    held = [sorted({item.chunk for slot in order for item in slot}) for order in orders]
    chunks = memory.cut(chunk_layers(scenario), held)
    needs, states = memory.measure(chunks)
    named = name_needs(needs, memory.places_of(chunks))
    stages, columns = [], []
    for stage, order in enumerate(orders):
        own = states.take((0, stage))
        moments = _follow(order, named, _stage_spans(spans, stage), own)
        stages.append(
            _stage_memory(stage, own, moments, [named[chunk] for chunk in held[stage]], scenario)
        )
        columns.append(_columns(stage, own, moments))
    names = ("stage", "time_ms", "bytes")
    joined = {name: np.concatenate([part[name] for part in columns]) for name in names}
    return tuple(stages), MemoryColumns(**joined)


def name_needs(needs: ChunkNeeds, places: Sequence[Sequence[PlaceNeed]]) -> list[ChunkNeed]:
    """Return what every chunk of one scenario needs, given its places."""
    columns = {item.name: getattr(needs, item.name)[0].tolist() for item in fields(needs)}
    return [
        ChunkNeed(places=own, **{name: column[chunk] for name, column in columns.items()})
        for chunk, own in enumerate(places)
    ]


def _follow(
    order: RankOrder, needs: Sequence[ChunkNeed], spans: Mapping[str, Floats], states: StateBytes
) -> _Moments:
    """Return what a rank holds: at both ends of each slot of its order, then while it updates."""
    passes = [
        (index, item.chunk, item.micro_batch, SPAN_KINDS.index(item.kind), _effect(item, needs))
        for index, slot in enumerate(order)
        for item in slot
    ]
    slots = np.array([item[0] for item in passes], dtype=np.int64)
    added, passing, freed = (
        np.bincount(slots, [item[4][part] for item in passes], minlength=len(order))
        for part in range(3)
    )
    start_ms, end_ms = _slot_times(slots, np.array([item[1:4] for item in passes]), spans)
    after = np.cumsum(added - freed)
    # Two moments of each slot; nothing before the first.
    time_ms = np.zeros(2 * len(order) + 1)
    time_ms[1::2], time_ms[2::2] = start_ms, end_ms
    kept = np.zeros_like(time_ms)
    kept[1::2], kept[2::2] = after + freed, after
    above = np.zeros_like(time_ms)
    above[1::2] = passing + states.gathered
    time_ms = np.maximum.accumulate(time_ms)
    if states.update > 0:
        last_ms = max(spans["end_ms"], default=time_ms[-1])
        time_ms = np.concatenate([time_ms, [time_ms[-1], last_ms]])
        kept = np.concatenate([kept, [kept[-1], kept[-1]]])
        above = np.concatenate([above, [states.update, 0.0]])
    return _Moments(time_ms, kept, above)


def _effect(item: Pass, needs: Sequence[ChunkNeed]) -> tuple[float, float, float]:
    """Return the bytes that a pass adds, those it takes for itself, and those it frees."""
    need = needs[item.chunk]
    match item.kind:
        case "forward":
            return need.saved, need.forward, 0.0
        case "backward":
            return 0.0, need.backward, need.saved
        case "backward_input":
            return 0.0, need.backward, need.saved - need.weight_half
        case "backward_weight":
            return 0.0, 0.0, need.weight_half


def _stage_spans(spans: SpanColumns | None, stage: int) -> Mapping[str, Floats]:
    """Return the spans of one rank, none without any."""
    names = ("chunk", "micro_batch", "kind", "start_ms", "end_ms")
    if spans is None:
        return dict.fromkeys(names, np.zeros(0))
    rows = np.flatnonzero(np.asarray(spans.stage) == stage)
    return {name: np.asarray(getattr(spans, name))[rows] for name in names}


def _slot_times(
    slots: NDArray[np.int64], passes: NDArray[np.int64], spans: Mapping[str, Floats]
) -> tuple[Floats, Floats]:
    """Return when each slot begins and ends, in ms; 0 where no span tells.

    `passes` has a row of chunk, micro batch and kind for each entry of `slots`.
    """
    start_ms, end_ms = np.zeros(slots[-1] + 1), np.zeros(slots[-1] + 1)
    if not len(spans["kind"]):
        return start_ms, end_ms
    found = np.stack([spans["chunk"], spans["micro_batch"], spans["kind"]], axis=1)
    sizes = np.maximum(passes.max(axis=0), found.max(axis=0)).astype(np.int64) + 1
    keys = np.ravel_multi_index(tuple(np.maximum(found, 0).astype(np.int64).T), tuple(sizes))
    wanted = np.ravel_multi_index(tuple(passes.T), tuple(sizes))
    is_pass = found[:, 0] >= 0
    table = dict(zip(keys[is_pass].tolist(), np.flatnonzero(is_pass).tolist(), strict=True))
    rows = np.array([table.get(key, -1) for key in wanted.tolist()])
    is_told = rows >= 0
    np.maximum.at(end_ms, slots[is_told], spans["end_ms"][rows[is_told]])
    np.maximum.at(start_ms, slots[is_told], spans["start_ms"][rows[is_told]])
    return start_ms, end_ms


def _stage_memory(
    stage: int,
    states: StateBytes,
    moments: _Moments,
    needs: Sequence[ChunkNeed],
    scenario: TrainingScenario,
) -> StageMemory:
    trainer, saved = scenario.trainer.resolve(), sum(need.saved for need in needs)
    peak = int(np.argmax(moments.kept + moments.passing))
    kept, passing = float(moments.kept[peak]), float(moments.passing[peak])
    parts = {
        "weights": float(states.weights),
        "gradients": float(states.gradients),
        "optimizer": float(states.optimizer),
        "activations": kept,
        "temporary": passing + float(states.placeholders),
    }
    reserved = sum(parts.values()) * trainer.reserved_ratio
    device = find_device(stage_devices(scenario)[stage])
    degrees = [scenario.layout.degree(axis) for axis in TRAINING_AXES]
    return StageMemory(
        stage=stage,
        weights_bytes=parts["weights"],
        gradients_bytes=parts["gradients"],
        optimizer_bytes=parts["optimizer"],
        activations_bytes=parts["activations"],
        temporary_bytes=parts["temporary"],
        reserved_bytes=reserved,
        headroom_bytes=training_headroom_bytes(device, trainer, degrees),
        device_bytes=float(device.memory_bytes),
        peak_ms=float(moments.time_ms[peak]),
        num_in_flight=kept / saved if saved else 0.0,
        largest=_largest(parts, needs, states),
    )


def _largest(parts: Mapping[str, float], needs: Sequence[ChunkNeed], states: StateBytes) -> str:
    """Return what dominates: a part, and of what passes make, the operator it is of."""
    name = max(parts, key=lambda part: parts[part])
    if name == "activations":
        return f"{name}: {max(needs, key=lambda need: need.saved).largest_saved}"
    if name == "temporary":
        need = max(needs, key=lambda need: need.backward)
        if need.backward < max(states.gathered, states.placeholders, states.update):
            return f"{name}: whole parameters or gradients"
        return f"{name}: {need.largest_passing}"
    return name


def _columns(stage: int, states: StateBytes, moments: _Moments) -> dict[str, np.ndarray]:
    return {
        "stage": np.full(len(moments.time_ms), stage, dtype=np.int32),
        "time_ms": moments.time_ms,
        "bytes": states.kept + moments.kept + moments.passing,
    }
