"""The states that the ranks of a pipeline keep, for many strategies at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.lowering.graph import RankContext, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.training.memory_places import (
    MemoryShapes,
    with_copies,
)
from foretoken.simulator.search.training.memory_ranks import PipelineCut
from foretoken.simulator.search.training.shapes import Shape
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.strategies import Strategies
from foretoken.simulator.training.memory.pass_peak import chunk_bounds
from foretoken.simulator.training.memory.saved_tensor import layer_range
from foretoken.simulator.training.memory.state_bytes import (
    GroupSizes,
    StateBytes,
    StateRules,
    count_placeholders,
    narrow_copies,
    sum_states,
)
from foretoken.simulator.training.state_sharding import parameter_groups

_DENSE, _EXPERT = "dense", "expert"


class ParameterColumns:
    """The parameters of a rank by place, in the order of the model.

    They are of groups of strategies that split weights alike; `of_strategy` has the number of each
    strategy's.
    """

    def __init__(self, strategies: Strategies, shapes: MemoryShapes, rules: StateRules) -> None:
        """Count what one strategy of each group has."""
        rows, self.of_strategy = number_rows(
            [strategies.tp, strategies.ep, strategies.weight_parallel, strategies.weight_degree]
        )
        self._kinds = shapes.kinds
        self._trainer = rules.trainer
        self._held = [
            _Held.of_shape(shapes.shapes[int(number)], degree)
            for number, degree in zip(
                shapes.of_strategy[rows], strategies.weight_degree[rows].tolist(), strict=True
            )
        ]
        whole = replace(rules, sharding=replace(rules.sharding, parameters=False))
        is_tied = strategies.source.scenario.model.has_tied_embedding
        self._places = {
            is_shared: np.array(
                [held.count_places(whole, is_shared=is_shared) for held in self._held]
            )
            for is_shared in ((True, False) if is_tied else (True,))
        }
        self._placeholders: dict[tuple[int, ...], Floats] = {}

    def count_states(
        self, cut: PipelineCut, numbers: Ints, shards: Ints, rules: StateRules
    ) -> StateBytes:
        """Return what ranks keep, of shape [strategies, ranks], given the group of each.

        `shards` has over how many ranks are split: states of dense parameters, those of experts,
        and weights themselves, of shape [3, strategies].
        """
        dense, expert, narrow = np.moveaxis(self._find_places(cut)[numbers], 1, 0)
        groups = [
            self._group(places, cut, degree, parts)
            for places, degree, parts in (
                (dense, shards[0], shards[2]),
                (expert, shards[1], np.ones_like(shards[2])),
            )
            if places.any()
        ]
        states = sum_states(groups, rules)
        copies = 0.0
        if not rules.sharding.parameters:
            starts, _ = chunk_bounds(cut.layers)
            copies = np.add.reduceat(narrow, starts, axis=1)[:, cut.chunks].sum(axis=-1)
        return replace(
            states,
            weights=states.weights + copies,
            placeholders=self._count_placeholders(cut)[numbers],
        )

    def _find_places(self, cut: PipelineCut) -> Floats:
        """Return parameters by place: [groups, kinds of parameters, layers + 2]."""
        return self._places.get(cut.is_shared, self._places[True])

    def _group(self, places: Floats, cut: PipelineCut, degree: Ints, parts: Ints) -> GroupSizes:
        starts, _ = chunk_bounds(cut.layers)
        in_layers = places.copy()
        in_layers[:, [0, -1]] = 0.0
        total, largest, inside = (
            reduce(values, starts, axis=1)[:, cut.chunks]
            for reduce, values in (
                (np.add.reduceat, places),
                (np.maximum.reduceat, in_layers),
                (np.add.reduceat, in_layers),
            )
        )
        return GroupSizes(
            num_params=total,
            num_layer_params=largest,
            num_outside=total - inside,
            num_layers=np.array(cut.layers)[cut.chunks],
            num_shards=degree[:, None, None],
            num_parts=parts[:, None, None],
        )

    def _count_placeholders(self, cut: PipelineCut) -> Floats:
        """Return what stays beside the states, of shape [groups, ranks]."""
        starts = np.concatenate([[0], np.cumsum(cut.layers)]).tolist()
        held = [
            {
                kind
                for chunk in rank.chunks
                for kind in self._kinds[starts[chunk] : starts[chunk + 1]]
            }
            for rank in cut.ranks
        ]
        return np.stack([self._placeholders_of(tuple(sorted(kinds))) for kinds in held], axis=1)

    def _placeholders_of(self, kinds: tuple[int, ...]) -> Floats:
        if kinds not in self._placeholders:
            layers = [self._kinds.index(kind) for kind in kinds]
            nodes = (held.in_layers(layers) for held in self._held)
            counts = [count_placeholders(found, self._trainer) for found in nodes]
            self._placeholders[kinds] = np.array(counts)
        return self._placeholders[kinds]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """The operators of a whole model on a rank that have weights."""

    forward: Nodes
    rank: RankContext
    scenario: TrainingScenario

    @classmethod
    def of_shape(cls, shape: Shape, degree: int) -> "_Held":
        """Return those of a shape whose weights `isp` splits over `degree` ranks."""
        return cls(
            forward=tuple(
                node for node in shape.forward_of(0) if node.shares_weights or node.num_weights
            ),
            rank=shape.rank,
            scenario=replace(shape.scenario, weight_degree=degree),
        )

    def in_layers(self, layers: Sequence[int]) -> Nodes:
        """Return what runs in any of these layers."""
        return tuple(
            node for node in self.forward if any(layer in layer_range(node) for layer in layers)
        )

    def count_places(self, rules: StateRules, *, is_shared: bool) -> Floats:
        """Return dense parameters, those of experts, and copies in 8 bit: [3, layers + 2]."""
        forward = self.forward if is_shared else with_copies(self.forward)
        counts = np.zeros((3, self.rank.model.num_layers + 2))
        for place, section in ((0, Section.EMBEDDING), (-1, Section.HEAD)):
            nodes = tuple(node for node in forward if node.section is section)
            (dense,) = parameter_groups(nodes, self.rank, self.scenario)
            counts[0, place] = dense.num_params
            counts[2, place] = narrow_copies(nodes, rules)
        inside = tuple(node for node in forward if node.section is Section.LAYER)
        for row, group in enumerate(parameter_groups(inside, self.rank, self.scenario)):
            counts[row, 1:-1] = group.layer_params
        for node in inside:
            layers = 1 + np.array(layer_range(node))
            counts[2, layers] += narrow_copies([node], rules) / node.repeat
        return counts
