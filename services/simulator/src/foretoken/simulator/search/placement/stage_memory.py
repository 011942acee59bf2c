"""What stages must hold: states by their layers, activations by the moments of their schedule.

Needs of chunks and states are lines over the layers of a sample. Where layers of two kinds meet in
a stage, what they keep adds up, and what passes take is that of the kind which takes more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.units import ceil_divide
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.placement.cluster import NodeKind
from foretoken.simulator.search.placement.layer_kind import (
    FIRST_KIND,
    LAST_KIND,
    NUM_KINDS,
    list_layer_kinds,
)
from foretoken.simulator.search.placement.sample import (
    NUM_SAMPLE_STAGES,
    SAMPLE_LAYERS,
    Sample,
    Samples,
)
from foretoken.simulator.search.placement.stage_cost import BETWEEN, FIRST, LAST
from foretoken.simulator.search.placement.strategy import PlacedStrategy, StageWork
from foretoken.simulator.training.memory.chunk import ChunkGraph
from foretoken.simulator.training.memory.in_flight import FullMoments, find_moments, hold_most
from foretoken.simulator.training.memory.pass_peak import measure_chunk
from foretoken.simulator.training.memory.state_bytes import StateBytes, count_states
from foretoken.simulator.training.schedule import find_schedule

# What is counted of a chunk, in the order of `FullMoments`, then of all chunks of a stage.
_NEEDS = ("saved", "weight_half", "forward", "backward")
_PEAKS = slice(2, 4)
_STATES = ("kept", "gathered", "update")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryLines:
    """Bytes that stages reserve on a device: `constants` (stages), `per_layer` (stages, kinds)."""

    constants: Floats
    per_layer: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Lines:
    """Bytes over layers: both (position, kind of layer, figure), of needs and of states."""

    constants: Floats
    per_layer: Floats

    def of(self, position: int, layers: Ints, figures: slice) -> Floats:
        """Return the figures of chunks with these layers of each kind: (chunks, figure).

        They add up over layers, from what the kind of layer that needs more has beside.
        """
        constants = self.constants[position, :, figures]
        is_there = (layers > 0)[:, :, None]
        beside = np.where(is_there, constants, -np.inf).max(axis=1)
        found: Floats = beside + layers @ self.per_layer[position, :, figures]
        return found

    def of_largest(self, position: int, layers: Ints, figures: slice) -> Floats:
        """Return the figures of the kind of layer that needs most: (chunks, figure)."""
        total = layers.sum(axis=1)[:, None, None]
        lines = self.constants[position, :, figures] + total * self.per_layer[position, :, figures]
        found: Floats = np.where((layers > 0)[:, :, None], lines, -np.inf).max(axis=1)
        return found


class StageMemories:
    """Measures pipelines; those that hold the same are measured once."""

    def __init__(self, scenario: TrainingScenario, samples: Samples) -> None:
        """Take the samples of a scenario, which other questions may use too."""
        self._scenario, self._samples = scenario, samples
        self._has_first = FIRST_KIND in list_layer_kinds(scenario.model)
        self._needs: dict[tuple[StageWork, bool], tuple[_Lines, _Lines]] = {}
        # Moments are kept beside what they are known by.
        self._lines: dict[tuple[StageWork, int], tuple[object, MemoryLines]] = {}

    def lines(self, strategy: PlacedStrategy, kind: NodeKind) -> MemoryLines:
        """Return what the stages of a pipeline hold, as lines over their layers.

        `kind` is one of its kinds of nodes: what is held is the same on all.

        Raises:
            InvalidRequestError: stages cannot work so.

        """
        moments = _find_moments(strategy)
        key = strategy.work, id(moments)
        if key not in self._lines:
            self._lines[key] = moments, self._fit(strategy, kind, moments)
        return self._lines[key][1]

    def measure(self, strategy: PlacedStrategy, kind: NodeKind, layers: Ints) -> Floats:
        """Return the bytes that stages reserve: (stages).

        `layers` are those of every chunk, of each kind: (chunks, kinds).
        """
        moments = _find_moments(strategy)
        needs, states = self._find_needs(strategy.work, kind, is_alone=len(moments) == 1)
        trainer = self._scenario.trainer.resolve()
        return _allocate(moments, layers, needs, states) * trainer.reserved_ratio

    def _fit(
        self, strategy: PlacedStrategy, kind: NodeKind, moments: Sequence[FullMoments]
    ) -> MemoryLines:
        num_chunks = len(moments) * strategy.virtual_stages
        even = int(ceil_divide(self._scenario.model.num_layers, num_chunks))
        few, many = 1, max(2, even)

        def measure(layer_kind: int, count: int) -> Floats:
            layers = np.zeros((num_chunks, NUM_KINDS), dtype=np.int64)
            layers[:, layer_kind] = count
            return self.measure(strategy, kind, layers)

        low = measure(LAST_KIND, few)
        slopes = [(measure(LAST_KIND, many) - low) / (many - few)] * NUM_KINDS
        if self._has_first:
            ends = [measure(FIRST_KIND, count) for count in (few, many)]
            slopes[FIRST_KIND] = (ends[1] - ends[0]) / (many - few)
        per_layer = np.maximum(0.0, np.stack(slopes, axis=1))
        return MemoryLines(
            constants=low - few * per_layer[:, LAST_KIND],
            # Of each layer in any one of the chunks of a stage.
            per_layer=per_layer / strategy.virtual_stages,
        )

    def _find_needs(
        self, work: StageWork, kind: NodeKind, *, is_alone: bool
    ) -> tuple[_Lines, _Lines]:
        if (work, is_alone) not in self._needs:
            num_stages = 1 if is_alone else NUM_SAMPLE_STAGES
            samples = [self._samples.find(work, kind, num_stages)] * NUM_KINDS
            if self._has_first:
                samples[FIRST_KIND] = self._samples.find(work, kind, num_stages, is_first=True)
            self._needs[work, is_alone] = _fit_needs(samples)
        return self._needs[work, is_alone]


def _find_moments(strategy: PlacedStrategy) -> tuple[FullMoments, ...]:
    return find_moments(
        find_schedule(strategy.schedule),
        len(strategy.pipeline.stages),
        strategy.num_micro_batches,
        strategy.virtual_stages,
    )


def _fit_needs(samples: Sequence[Sequence[Sample]]) -> tuple[_Lines, _Lines]:
    """Return the lines of needs and of states, of samples of each kind of layer."""
    found: list[tuple[Floats, Floats]] = []
    for own in samples:
        few, many = (_measure(sample) for sample in own)
        per_layer = (many - few) / (SAMPLE_LAYERS[1] - SAMPLE_LAYERS[0])
        found.append((few - SAMPLE_LAYERS[0] * per_layer, per_layer))
    constants, slopes = (np.stack(parts, axis=1) for parts in zip(*found, strict=True))
    num_needs = len(_NEEDS)
    return (
        _Lines(constants[..., :num_needs], slopes[..., :num_needs]),
        _Lines(constants[..., num_needs:], slopes[..., num_needs:]),
    )


def _measure(sample: Sample) -> Floats:
    """Return needs, then states, of every stage of a sample: (stage, figure)."""
    rows = []
    for chunk in sample.operators.chunks:
        graph = ChunkGraph(rank=chunk.rank, forward=chunk.forward, plan=chunk.plan)
        need, states = measure_chunk(graph, sample.scenario), count_states([graph], sample.scenario)
        rows.append(
            [getattr(need, name) for name in _NEEDS] + [getattr(states, name) for name in _STATES]
        )
    return np.array(rows, dtype=np.float64)


def _allocate(
    moments: Sequence[FullMoments], layers: Ints, needs: _Lines, states: _Lines
) -> Floats:
    """Return what tensors occupy on every stage, at its fullest moment."""
    num_chunks, num_stages = len(layers), len(moments)
    of_chunk = _by_position(layers, needs, slice(None))
    of_chunk[:, _PEAKS] = _by_position(layers, needs, _PEAKS, is_largest=True)
    # The first stage has the first chunk, and the last one the last.
    held = layers.reshape(-1, num_stages, NUM_KINDS).sum(axis=0)
    kept, gathered, update = _by_position(held, states, slice(None), num_chunks=num_chunks).T
    passing = np.array([hold_most(rank.counts, of_chunk[list(rank.chunks)].T) for rank in moments])
    of_stage = StateBytes(weights=kept, gathered=gathered, update=update)
    return np.asarray(of_stage.at_most(passing), dtype=np.float64)


def _by_position(
    layers: Ints, lines: _Lines, figures: slice, *, is_largest: bool = False, num_chunks: int = 0
) -> Floats:
    """Return the figures of chunks, or of stages of so many chunks, in the model's order."""
    last = len(layers) - 1
    measure = lines.of_largest if is_largest else lines.of
    if max(num_chunks, len(layers)) == 1:
        return measure(0, layers, figures)
    parts = [
        measure(position, layers[own], figures)
        for position, own in (
            (FIRST, slice(0, 1)),
            (BETWEEN, slice(1, last)),
            (LAST, slice(last, None)),
        )
    ]
    return np.concatenate(parts)
