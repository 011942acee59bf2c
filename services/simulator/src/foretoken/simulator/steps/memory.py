"""What the ranks of a pipeline hold: states of their chunks, and what micro batches leave behind.

A model is measured by place (see `parameters.py`), one layer of each kind, for groups of cases that
run the same operators. How it is cut to chunks, and which of them a rank holds, only says which
places are added up: one scenario, a search and the cuts of a mixed cluster read the same figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from foretoken.domain.lowering.graph import RankContext
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.lowering.sequence_parallel import splits_tokens
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.held.pass_peak import (
    ChunkNeeds,
    PlaceColumns,
    PlaceMeter,
    PlaceNeed,
    chunk_bounds,
    cut_places,
)
from foretoken.simulator.steps.held.saved_tensor import list_saved
from foretoken.simulator.steps.held.state_bytes import (
    GroupSizes,
    StateBytes,
    StateRules,
    sum_states,
)
from foretoken.simulator.steps.parameters import (
    COPIED_HEAD,
    EMBEDDING,
    FIGURES,
    HEAD,
    LAYERS,
    HeldWeights,
    number_layer_kinds,
)
from foretoken.simulator.steps.recompute import split_saved
from foretoken.simulator.steps.sharding import Degrees, ScenarioDegrees
from foretoken.simulator.steps.stage_operators import micro_batch_shape, training_options


def as_one_chunk(scenario: TrainingScenario) -> TrainingScenario:
    """Return a scenario whose model is on one rank of the pipeline, with nothing split or rerun."""
    return replace(
        scenario,
        layout=replace(scenario.layout, pp=1),
        virtual_stages=1,
        stage_layers=(),
        recompute="none",
        recompute_layers=0,
        recompute_modules=(),
        partitions_activations=False,
        zero_stage=0,
        shard_degree=0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeModel:
    """What one rank with the whole model runs forward for a micro batch.

    `kinds` has the number of each layer's kind; the scenario is one `as_one_chunk`.
    """

    forward: Nodes
    rank: RankContext
    scenario: TrainingScenario
    kinds: tuple[int, ...]

    @classmethod
    def of_scenario(cls, scenario: TrainingScenario) -> "WholeModel":
        """Return that of a scenario, however it is cut.

        Raises:
            InvalidRequestError: the layout does not fit the model.

        """
        alone = as_one_chunk(scenario)
        (rank,) = chunk_ranks(alone)
        options = training_options(alone, alone.trainer.resolve())
        forward = lower_rank(micro_batch_shape(alone), options, rank)
        kinds = number_layer_kinds(forward, alone.model.num_layers)
        return cls(forward=forward, rank=rank, scenario=alone, kinds=kinds)

    @property
    def layers(self) -> list[int]:
        """One layer of each kind."""
        return [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]

    def weights(self, degree: int) -> HeldWeights:
        """Return the operators with weights, which `isp` splits over so many ranks."""
        forward = tuple(node for node in self.forward if node.shares_weights or node.num_weights)
        return HeldWeights(
            forward=forward,
            layers=self.layers,
            degree=degree,
            trainer=self.scenario.trainer.resolve(),
            splits_tokens=splits_tokens(self.rank, self.scenario),
        )


class ActivationMeter:
    """Measures what a micro batch needs in every place of a model, under any recomputation."""

    def __init__(self, model: WholeModel) -> None:
        """Find what operators keep where nothing is recomputed."""
        self._layers, self._rank, self._forward = model.layers, model.rank, model.forward
        if len(self._layers) == 1:
            # Where all layers are alike, one stands for all.
            self._rank = replace(model.rank, layers_by_stage=(1,))
            self._forward = tuple(replace(node, repeat=1) for node in model.forward)
        self._scenario = model.scenario
        self._saved = list_saved(self._forward, self._scenario)
        self._meter = PlaceMeter(self._forward, self._scenario)
        copies = _with_copies(self._forward)
        self._copying = PlaceMeter(copies, self._scenario) if copies else self._meter

    @property
    def stream_bytes(self) -> float:
        """The residual stream."""
        return self._meter.stream_bytes

    def measure(self, scenario: TrainingScenario, *, in_some: bool) -> tuple[PlaceNeed, ...]:
        """Return what all places need as a scenario recomputes.

        Where it does `in_some` layers of a chunk alone, the kinds of layers follow once more, for
        those that recompute nothing.
        """
        own = replace(
            self._scenario,
            recompute=scenario.recompute,
            recompute_modules=scenario.recompute_modules,
            partitions_activations=scenario.partitions_activations,
        )
        ways = [split_saved(self._saved, self._forward, own, self._rank)]
        if in_some:
            ways.append((self._saved, ()))
        found = [self._meter.measure(*way, self._layers) for way in ways]
        embedding, head = found[-1][:2]
        copied = self._copying.measure(*ways[-1], ())[1]
        return (embedding, head, copied, *(need for needs in found for need in needs[2:]))


def _with_copies(forward: Nodes) -> Nodes:
    """Return operators of which a tied head has a table of its own; none where it has one."""
    if not any(node.shares_weights for node in forward):
        return ()
    return tuple(replace(node, shares_weights=False) for node in forward)


@dataclass(frozen=True, kw_only=True)
class HeldChunks:
    """A model in chunks of so many `layers`, in its order, and the chunks of every rank.

    `ranks` has as many chunks for each: [rank, chunk]. `kinds` are those of the layers.
    The first `num_recomputed` layers of a chunk recompute (0: all).
    """

    layers: tuple[int, ...]
    ranks: Ints
    kinds: tuple[int, ...]
    num_kinds: int
    num_recomputed: int

    @cached_property
    def places(self) -> Ints:
        """The places of the model, in its order."""
        inside = np.array(self.kinds)
        if self.num_recomputed:
            nth = np.concatenate([np.arange(count) for count in self.layers])
            inside = inside + self.num_kinds * (nth >= self.num_recomputed)
        ends = {0, len(self.layers) - 1}
        # A tied head shares the table of the embedding if one rank has both.
        head = HEAD if any(ends <= set(held) for held in self.ranks.tolist()) else COPIED_HEAD
        return np.concatenate([[EMBEDDING], LAYERS + inside, [head]]).astype(np.int64)

    @cached_property
    def kinds_of_chunks(self) -> list[tuple[bool, bool, tuple[int, ...]]]:
        """What is equal for chunks that need the same: both ends, and the kinds of layers."""
        stops, last = np.cumsum(self.layers).tolist(), len(self.layers) - 1
        return [
            (chunk == 0, chunk == last, self.kinds[stop - count : stop])
            for chunk, (count, stop) in enumerate(zip(self.layers, stops, strict=True))
        ]

    @cached_property
    def kinds_of_ranks(self) -> list[tuple[int, ...]]:
        """The kinds of layers that each rank has."""
        kinds = [set(kinds) for *_, kinds in self.kinds_of_chunks]
        held = [set().union(*(kinds[chunk] for chunk in chunks)) for chunks in self.ranks.tolist()]
        return [tuple(sorted(kinds)) for kinds in held]

    def cut_needs(self, needs: PlaceColumns) -> ChunkNeeds:
        """Return what the chunks need: [case, chunk]."""
        return cut_places(needs.take(self.places), self.layers)


class StateMeter:
    """Adds up states of ranks, for groups of cases that hold the same weights."""

    def __init__(self, held: Sequence[HeldWeights]) -> None:
        """Count what each group has by place."""
        self._held = held
        self._counts = np.stack([weights.count() for weights in held])
        self._placeholders: dict[tuple[int, ...], Floats] = {}

    def measure(
        self, chunks: HeldChunks, group: Ints, degrees: Degrees, rules: StateRules
    ) -> StateBytes:
        """Return what ranks keep, given the group of each case: [case, rank]."""
        # Kinds of layers are the same whether they recompute or not.
        places = np.where(
            chunks.places < LAYERS + chunks.num_kinds,
            chunks.places,
            chunks.places - chunks.num_kinds,
        )
        counts = dict(zip(FIGURES, np.moveaxis(self._counts[:, :, places], 1, 0), strict=True))
        sizes = []
        for name, ranks, parts in (
            ("dense", degrees.dense, degrees.weight_parts),
            ("expert", degrees.expert, np.ones(1, dtype=np.int64)),
        ):
            if counts[name].any():
                shards = np.asarray(ranks.shards)
                own = (counts[name], counts[f"{name}_narrow"])
                sizes.append(_size_group(own, chunks, group, shards, np.asarray(parts)))
        return sum_states(sizes, self._count_placeholders(chunks)[group], rules)

    def _count_placeholders(self, chunks: HeldChunks) -> Floats:
        """Return what stays next to the states, of shape [group, rank]."""
        for kinds in chunks.kinds_of_ranks:
            if kinds not in self._placeholders:
                counts = [weights.count_placeholders(kinds) for weights in self._held]
                self._placeholders[kinds] = np.array(counts)
        return np.stack([self._placeholders[kinds] for kinds in chunks.kinds_of_ranks], axis=1)


class ModelMemory:
    """What the ranks of one scenario hold, however its model is cut."""

    def __init__(self, scenario: TrainingScenario) -> None:
        """Measure the places of its model.

        Raises:
            InvalidRequestError: the layout does not fit the model.

        """
        self._model, self._scenario = WholeModel.of_scenario(scenario), scenario
        meter, in_some = ActivationMeter(self._model), scenario.recompute_layers > 0
        self._places = meter.measure(scenario, in_some=in_some)
        self._needs = PlaceColumns.of_needs([self._places], [meter.stream_bytes])
        self._states = StateMeter([self._model.weights(ScenarioDegrees.of(scenario).weight_parts)])

    @property
    def kinds(self) -> tuple[int, ...]:
        """The number of each layer's kind."""
        return self._model.kinds

    def cut(
        self, layers: Sequence[int], ranks: Sequence[Sequence[int]], kinds: Sequence[int] = ()
    ) -> HeldChunks:
        """Return chunks of so many layers as ranks hold them, by default of the model's layers."""
        return HeldChunks(
            layers=tuple(layers),
            ranks=np.array(ranks),
            kinds=tuple(kinds) or self.kinds,
            num_kinds=max(self.kinds) + 1,
            num_recomputed=self._scenario.recompute_layers,
        )

    def places_of(self, chunks: HeldChunks) -> list[list[PlaceNeed]]:
        """Return what the places of every chunk need."""
        bounds = zip(*chunk_bounds(chunks.layers), strict=True)
        return [[self._places[at] for at in chunks.places[start:stop]] for start, stop in bounds]

    def measure(self, chunks: HeldChunks) -> tuple[ChunkNeeds, StateBytes]:
        """Return what chunks need, [1, chunk], and the states of ranks, [1, rank]."""
        layout = replace(self._scenario.layout, pp=len(chunks.ranks))
        degrees = ScenarioDegrees.of(replace(self._scenario, layout=layout))
        only = np.zeros(1, dtype=np.int64)
        states = self._states.measure(chunks, only, degrees, state_rules(degrees))
        return chunks.cut_needs(self._needs), states


def _size_group(
    counts: tuple[Floats, Floats], chunks: HeldChunks, group: Ints, shards: Ints, parts: Ints
) -> GroupSizes:
    """Return the parameters of the chunks of every rank, given those of places: [group, place].

    The second are those of them that are multiplied in 8 bit.
    """
    starts, _ = chunk_bounds(chunks.layers)
    in_layers = counts[0].copy()
    in_layers[:, [0, -1]] = 0.0
    total, largest, inside, narrow, largest_narrow = (
        reduce(values, starts, axis=1)[:, chunks.ranks]
        for reduce, values in (
            (np.add.reduceat, counts[0]),
            (np.maximum.reduceat, in_layers),
            (np.add.reduceat, in_layers),
            (np.add.reduceat, counts[1]),
            (np.maximum.reduceat, counts[1]),
        )
    )
    return GroupSizes(
        num_params=total[group],
        num_layer_params=largest[group],
        num_narrow=narrow[group],
        num_layer_narrow=largest_narrow[group],
        num_outside=(total - inside)[group],
        num_layers=np.array(chunks.layers)[chunks.ranks],
        num_shards=np.reshape(shards, (-1, 1, 1)),
        num_parts=np.reshape(parts, (-1, 1, 1)),
    )


def state_rules(degrees: Degrees) -> StateRules:
    """Return what is kept of parameters by the degrees of cases."""
    base = degrees.base
    return StateRules(
        trainer=base.trainer.resolve(),
        dtype=base.dtype,
        stage=np.reshape(degrees.state_stage, (-1, 1)),
        is_once=np.reshape(degrees.is_once, (-1, 1)),
    )
