"""What micro batches need of every layer, for groups of strategies that need the same.

A group are strategies with the same operators, micro batch size and recomputation: how layers are
cut to a pipeline and how states are shared is not in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode, RankContext
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Flags, Ints
from foretoken.simulator.search.training.shape_library import ShapeLibrary
from foretoken.simulator.search.training.shapes import Shape
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.strategies import Strategies
from foretoken.simulator.training.memory.layer_kind import layer_kinds
from foretoken.simulator.training.memory.pass_peak import (
    ChunkNeed,
    PlaceColumns,
    PlaceMeter,
    PlaceNeeds,
    cut_places,
)
from foretoken.simulator.training.memory.saved_tensor import list_saved
from foretoken.simulator.training.recompute import split_saved


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryShapes:
    """What groups of strategies run, but for the exchanges of shared weights.

    `of_strategy` has the number of each strategy's shape. `kinds` tells which layers are alike.
    """

    shapes: tuple[Shape, ...]
    of_strategy: Ints
    kinds: tuple[int, ...]

    def take(self, rows: Ints) -> "MemoryShapes":
        """Return the shapes of some strategies."""
        return replace(self, of_strategy=self.of_strategy[rows])


def group_shapes(strategies: Strategies, library: ShapeLibrary) -> MemoryShapes:
    """Return the shapes of strategies that can run.

    Raises:
        InvalidRequestError: a layout does not fit the model.

    """
    shapes, of_strategy = library.group_layers(strategies)
    num_layers = strategies.source.scenario.model.num_layers
    kinds = layer_kinds(shapes[0].forward, num_layers)
    return MemoryShapes(shapes=shapes, of_strategy=of_strategy, kinds=kinds)


# Where layers recompute or not, and where the head has a table of its own or the embedding's.
_Variant = tuple[bool, bool]


class MicroBatchGroups:
    """The groups of some strategies; `of_strategy` has the number of each strategy's."""

    def __init__(self, strategies: Strategies, shapes: MemoryShapes) -> None:
        """Measure one strategy of each group."""
        self._num_first = strategies.source.scenario.recompute_layers
        rows, self.of_strategy = number_rows(
            [shapes.of_strategy, strategies.micro_batch_size, strategies.recompute]
        )
        meter = _Meter(strategies.take(rows), shapes.take(rows))
        measured = [meter.measure(row) for row in range(len(rows))]
        self._places = {
            variant: _columns([needs[variant] for needs in measured], shapes.kinds)
            for variant in measured[0]
        }

    def cut(self, layers: Sequence[int], *, is_shared: bool) -> ChunkNeed:
        """Return what chunks of so many layers each need, in the order of the model.

        A tied head `is_shared` where the rank that has it has the embedding too.
        """
        places = self._places.get((True, is_shared), self._places[True, True])
        if self._num_first:
            other = self._places.get((False, is_shared), self._places[False, True])
            places = _mix(places, other, _are_first(layers, self._num_first))
        return cut_places(places, layers)


class _Meter:
    """Measures the places of one group after another, one layer of each kind."""

    def __init__(self, strategies: Strategies, shapes: MemoryShapes) -> None:
        source = strategies.source.scenario
        self._strategies = strategies
        self._shapes = shapes
        self._variants = [
            (recomputes, is_shared)
            for recomputes in ((True, False) if source.recompute_layers else (True,))
            for is_shared in ((True, False) if source.model.has_tied_embedding else (True,))
        ]
        self._modes: dict[int, TrainingScenario] = {}
        self._known: dict[tuple[int, int, bool], _Measured] = {}

    def measure(self, row: int) -> Mapping[_Variant, PlaceNeeds]:
        """Return what one strategy needs."""
        mode = int(self._strategies.recompute[row])
        if mode not in self._modes:
            self._modes[mode] = self._strategies.scenario(row)
        return {
            (recomputes, is_shared): self._find(row, is_shared=is_shared).measure(
                self._modes[mode] if recomputes else None
            )
            for recomputes, is_shared in self._variants
        }

    def _find(self, row: int, *, is_shared: bool) -> "_Measured":
        number = int(self._shapes.of_strategy[row])
        size = int(self._strategies.micro_batch_size[row])
        if (number, size, is_shared) not in self._known:
            shape = self._shapes.shapes[number]
            scenario = replace(shape.scenario, micro_batch_size=size)
            index = int(np.searchsorted(shape.micro_batch_sizes, size))
            forward = shape.forward if is_shared else with_copies(shape.forward)
            measured = _Measured(forward, index, scenario, shape.rank, self._shapes.kinds)
            self._known[number, size, is_shared] = measured
        return self._known[number, size, is_shared]


class _Measured:
    """What the operators of a shape keep, under any recomputation."""

    def __init__(
        self,
        forward: Nodes,
        index: int,
        scenario: TrainingScenario,
        rank: RankContext,
        kinds: tuple[int, ...],
    ) -> None:
        self._layers = [kinds.index(kind) for kind in range(max(kinds) + 1)]
        # Where all layers are alike, one stands for all.
        is_uniform = len(self._layers) == 1
        self._rank = replace(rank, layers_by_stage=(1,)) if is_uniform else rank
        self._forward = tuple(
            replace(node, dims=_at(node, index), repeat=1 if is_uniform else node.repeat)
            for node in forward
        )
        self._scenario = scenario
        self._saved = list_saved(self._forward, scenario)
        self._meter = PlaceMeter(self._forward, scenario)

    def measure(self, other: TrainingScenario | None) -> PlaceNeeds:
        """Return what is needed with the recomputation of another scenario, in all layers."""
        saved, rebuilt = self._saved, self._saved[:0]
        if other is not None:
            scenario = replace(
                self._scenario,
                recompute=other.recompute,
                recompute_modules=other.recompute_modules,
                partitions_activations=other.partitions_activations,
            )
            saved, rebuilt = split_saved(self._saved, self._forward, scenario, self._rank)
        return self._meter.measure(saved, rebuilt, self._layers)


def _at(node: OperatorNode, index: int) -> dict[str, int]:
    """Return the dimensions for one of the micro batch sizes."""
    return {
        name: int(value[index]) if isinstance(value, np.ndarray) else value
        for name, value in node.dims.items()
    }


def with_copies(forward: Nodes) -> Nodes:
    """Return operators of which none has its weights in common with another."""
    return tuple(
        replace(node, shares_weights=False) if node.shares_weights else node for node in forward
    )


def _columns(needs: Sequence[PlaceNeeds], kinds: Sequence[int]) -> PlaceColumns:
    """Return the needs of places [groups, places] of layers of these kinds."""
    places = [0, *(1 + kind for kind in kinds), 2 + max(kinds)]
    columns = PlaceColumns.of_needs(needs)
    return columns.map(lambda name: getattr(columns, name)[:, places])


def _are_first(layers: Sequence[int], count: int) -> Flags:
    """Return which places are of the first `count` layers of their chunk."""
    inside = np.concatenate([np.arange(number) for number in layers])
    return np.concatenate([[False], inside < count, [False]])


def _mix(places: PlaceColumns, others: PlaceColumns, is_first: Flags) -> PlaceColumns:
    return places.map(lambda name: np.where(is_first, getattr(places, name), getattr(others, name)))
