"""What stages must hold: states by their layers, activations by the moments of their schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.domain.units import ceil_divide
from foretoken.simulator.grid import Floats
from foretoken.simulator.search.placement.cluster import NodeKind
from foretoken.simulator.search.placement.layer_kind import FIRST_KIND, LAST_KIND, NUM_KINDS
from foretoken.simulator.search.placement.strategy import PlacedStrategy, StageWork
from foretoken.simulator.search.training.shape_library import ShapeLibrary
from foretoken.simulator.steps.held.in_flight import FullMoments, find_moments, hold_most
from foretoken.simulator.steps.memory import ModelMemory
from foretoken.simulator.steps.pipelines.schedule import find_schedule


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryLines:
    """Bytes that stages reserve on a device: `constants` (stages), `per_layer` (stages, kinds)."""

    constants: Floats
    per_layer: Floats


class StageMemories:
    """Measures pipelines; those that hold the same are measured once."""

    def __init__(self, scenario: TrainingScenario) -> None:
        """Take the scenario of which stages vary."""
        self._scenario = scenario
        self._models: dict[StageWork, ModelMemory] = {}
        # Moments are kept next to what they are known by.
        self._lines: dict[tuple[StageWork, int], tuple[object, MemoryLines]] = {}

    def lines(self, strategy: PlacedStrategy, kind: NodeKind) -> MemoryLines:
        """Return what the stages of a pipeline hold, as lines over their layers.

        `kind` is one of its kinds of nodes: what is held is the same on all.

        Raises:
            InvalidRequestError: the layout does not fit the model.

        """
        moments = _find_moments(strategy)
        key = strategy.work, id(moments)
        if key not in self._lines:
            self._lines[key] = moments, self._fit(strategy, kind, moments)
        return self._lines[key][1]

    def measure(
        self,
        strategy: PlacedStrategy,
        kind: NodeKind,
        layers: Sequence[int],
        layer_kinds: Sequence[int] = (),
    ) -> Floats:
        """Return the bytes that stages reserve whose chunks have so many layers: (stages).

        Layers are those of the model, or of `layer_kinds`.
        """
        moments, model = _find_moments(strategy), self._find(strategy.work, kind)
        chunks = model.cut(layers, [rank.chunks for rank in moments], layer_kinds)
        needs, states = model.measure(chunks)
        passing = [hold_most(rank.counts, needs.counted[0][:, rank.chunks]) for rank in moments]
        ratio = self._scenario.trainer.resolve().reserved_ratio
        reserved: Floats = states.at_most(np.array(passing))[0] * ratio
        return reserved

    def _find(self, work: StageWork, kind: NodeKind) -> ModelMemory:
        if work not in self._models:
            on_kind = replace(self._scenario, device=kind.device, topology=kind.topology)
            self._models[work] = ModelMemory(work.apply(on_kind))
        return self._models[work]

    def _fit(
        self, strategy: PlacedStrategy, kind: NodeKind, moments: Sequence[FullMoments]
    ) -> MemoryLines:
        num_chunks = len(moments) * strategy.virtual_stages
        even = int(ceil_divide(self._scenario.model.num_layers, num_chunks))
        few, many = 1, max(2, even)
        kinds = self._find(strategy.work, kind).kinds

        def measure(layer_kind: int, count: int) -> Floats:
            layers = (count,) * num_chunks
            return self.measure(strategy, kind, layers, (layer_kind,) * sum(layers))

        low = measure(kinds[-1], few)
        slopes = [(measure(kinds[-1], many) - low) / (many - few)] * NUM_KINDS
        if kinds[0] != kinds[-1]:
            ends = [measure(kinds[0], count) for count in (few, many)]
            slopes[FIRST_KIND] = (ends[1] - ends[0]) / (many - few)
        per_layer = np.maximum(0.0, np.stack(slopes, axis=1))
        return MemoryLines(
            constants=low - few * per_layer[:, LAST_KIND],
            # Of each layer in any one of the chunks of a stage.
            per_layer=per_layer / strategy.virtual_stages,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBook:
    """What stages run and hold, whatever operators cost: kept over all answers of a search.

    `shapes` are those of every kind of node.
    """

    shapes: Sequence[ShapeLibrary]
    memories: StageMemories

    @classmethod
    def of_request(cls, request: TrainingSearchRequest) -> Self:
        """Return a book of the stages of a request, with nothing in it."""
        return cls(
            shapes=[ShapeLibrary() for _ in request.space.node_groups],
            memories=StageMemories(request.scenario),
        )


def _find_moments(strategy: PlacedStrategy) -> tuple[FullMoments, ...]:
    return find_moments(
        find_schedule(strategy.schedule),
        len(strategy.pipeline.stages),
        strategy.num_micro_batches,
        strategy.virtual_stages,
    )
