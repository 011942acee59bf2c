"""What strategies run on one kind of device: the calls of their passes, transfers and states.

Shapes write their calls to one book, which is priced at once; then the passes of chunks are timed.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from foretoken.domain.lowering.options import Nodes
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.search.training.chunk_kinds import ChunkKind
from foretoken.simulator.search.training.pass_timer import (
    NO_EXCHANGE,
    PassColumns,
    PassKeys,
    PassTimer,
)
from foretoken.simulator.search.training.shape_library import ShapeGroups
from foretoken.simulator.search.training.state_calls import Calls, StateWriter
from foretoken.simulator.search.training.transfer_calls import TransferWriter
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.steps.chunks import Buckets, ChunkPasses
from foretoken.simulator.steps.memory import WholeModel
from foretoken.simulator.steps.parameters import number_layer_kinds
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.sharding import ScenarioDegrees
from foretoken.simulator.steps.stage_operators import list_agreements
from foretoken.simulator.steps.state_collectives import StateExchange, exchange_in_layers
from foretoken.simulator.steps.strategies import RECOMPUTE_MODES, Strategies, trainer_with

_FULL = RECOMPUTE_MODES.index("full")


class DeviceWork:
    """Some strategies on one kind of device; `is_copied` where a tied head is a copy."""

    def __init__(
        self, strategies: Strategies, groups: ShapeGroups, is_copied: Flags, book: CallBook
    ) -> None:
        """Write the calls of passes and transfers to the book, which is priced afterwards."""
        self.strategies, self.groups = strategies, groups
        self._is_copied = is_copied
        self.trainers = strategies.source.trainers
        self._scenario = strategies.base
        forward, num_layers = groups.shapes[0].forward, self._scenario.model.num_layers
        self._layer_kinds = number_layer_kinds(forward, num_layers)
        self._weights, self._weight_of_shape = self._count_weights()
        hides = np.array([trainer.overlaps_gradient_reduction for trainer in self.trainers])
        gathers = np.array([trainer.overlaps_parameter_gather for trainer in self.trainers])
        self.hides: Flags = hides[strategies.overlap] & ~strategies.is_once
        self.gathers_early: Flags = gathers[strategies.overlap]
        self._exchanges, self._exchange = self._list_exchanges()
        modes = [_mode(self._scenario, name) for name in RECOMPUTE_MODES]
        self._timer = PassTimer(self._scenario, groups.shapes, self._exchanges, modes, book)
        self.transfers = TransferWriter(groups.shapes, book).write(
            groups.of_strategy, groups.micro_batch, strategies.stage_ranks
        )

    def scenario_of(self, row: int) -> TrainingScenario:
        """Return the scenario of one strategy."""
        return self.strategies.take(np.array([row])).scenario(0)

    @property
    def weights(self) -> Ints:
        """Equal for strategies whose layers have the same parameters."""
        return self._weight_of_shape[self.groups.of_strategy]

    def write_states(self, rows: Ints, book: CallBook) -> StateWriter:
        """Return what writes the ends of steps of some strategies to a book."""
        return StateWriter(
            keys=self.strategies.take(rows),
            counts=self._weights[self.weights[rows]],
            layer_kinds=self._layer_kinds,
            rank=self.groups.shapes[0].rank,
            book=book,
        )

    def write_agreements(self, rows: Ints, book: CallBook) -> Ints:
        """Return the calls by which ranks agree on an update: (call, strategy)."""
        columns = self.strategies
        keys = [columns.tp[rows], columns.cp[rows], columns.dp[rows], columns.num_devices[rows]]
        first, number = number_rows([*keys, (columns.zero_stage[rows] > 0).astype(np.int64)])
        found = []
        for at in rows[first]:
            nodes = list_agreements(
                self.scenario_of(at), self.trainers[0], self.groups.shapes[0].rank
            )
            calls = [int(book.add(node, 1)[0]) for node in nodes]
            found.append([*calls, *[0] * (2 - len(calls))])
        return np.array(found, dtype=np.int64).T[:, number]

    def time_passes(self, kinds: Iterable[ChunkKind], *, is_split: bool) -> "TimedPasses":
        """Return the times of all passes, those of the halves where some are split."""
        gathers = np.array([bool(exchange.forward) for exchange in self._exchanges])
        keys = PassKeys(
            shape=self.groups.of_strategy,
            micro_batch=self.groups.micro_batch,
            recompute=self.strategies.recompute,
            exchange=self._exchange,
        )
        forward = dataclasses.replace(
            keys,
            recompute=np.zeros_like(keys.recompute),
            exchange=np.where(gathers[self._exchange], self._exchange, 0),
        )
        kinds = list(kinds)
        names = ["both", *(["input", "weight"] if is_split else [])]
        found = {name: self._timer.time(name, keys, kinds) for name in names}
        return TimedPasses(
            {**found, "forward": self._timer.time("forward", forward, kinds)},
            self.trainers[0].overlap_slowdown_ratio,
        )

    def _count_weights(self) -> tuple[Ints, Ints]:
        """Return the different weights of shapes, [weights, figure, place], and those of each."""
        counts = []
        for shape in self.groups.shapes:
            model = WholeModel(
                forward=shape.forward,
                rank=shape.rank,
                scenario=shape.scenario,
                kinds=self._layer_kinds,
            )
            counts.append(model.weights(ScenarioDegrees.of(shape.scenario).weight_parts).count())
        distinct, number = np.unique(np.stack(counts), axis=0, return_inverse=True)
        return distinct, number.reshape(-1)

    def _list_exchanges(self) -> tuple[list[StateExchange], Ints]:
        """Return what states exchange in layers, each way once, and that of each strategy."""
        rows, of_row = self.strategies, np.zeros(len(self.strategies), dtype=np.int64)
        some = np.flatnonzero((rows.state_stage > 1) & ~rows.is_once)
        exchanges = [NO_EXCHANGE]
        if not len(some):
            return exchanges, of_row
        is_copied, shape = self._is_copied[some], self.groups.of_strategy[some]
        is_again = (rows.recompute[some] == _FULL) & self.trainers[0].gathers_again
        keys = [self._weight_of_shape[shape], rows.state_stage[some], rows.shards[some]]
        keys += [rows.tp[some], rows.weight_parts[some], rows.replicas[some], rows.ep[some]]
        keys += [self.hides[some], self.gathers_early[some], is_again, is_copied]
        if stack_of(self._scenario.model).experts:
            keys += [rows.cp[some], rows.dp[some]]
        first, number = number_rows([np.asarray(key, dtype=np.int64) for key in keys])
        known: dict[tuple[int, bool], Nodes] = {}
        for at in first.tolist():
            key = int(shape[at]), bool(is_copied[at])
            lowered = self.groups.shapes[key[0]]
            if key not in known:
                known[key] = _weighted(lowered.forward, is_copied=key[1])
            scenario = self._with_states(lowered.scenario, int(some[at]))
            exchanges.append(exchange_in_layers(known[key], lowered.rank, scenario))
        of_row[some] = number + 1
        return exchanges, of_row

    def _with_states(self, scenario: TrainingScenario, row: int) -> TrainingScenario:
        """Return the scenario of a shape with what a strategy shares, hides and recomputes."""
        rows = self.strategies
        return dataclasses.replace(
            scenario,
            layout=dataclasses.replace(scenario.layout, dp=int(rows.dp[row])),
            trainer=trainer_with(self._scenario.trainer, rows.source.overlaps[rows.overlap[row]]),
            recompute=RECOMPUTE_MODES[rows.recompute[row]],
            zero_stage=int(rows.zero_stage[row]),
            shard_degree=int(rows.shard_degree[row]),
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TimedPasses:
    """The passes of strategies by name, and how much communication slows computation."""

    by_name: Mapping[str, PassColumns]
    slowdown_ratio: float

    def with_variants(self, variants: list[int]) -> "TimedPasses":
        """Return the times by some of the prices."""
        return TimedPasses(
            {name: found.with_variants(variants) for name, found in self.by_name.items()},
            self.slowdown_ratio,
        )

    def of_chunk(
        self, kind: ChunkKind, rows: Ints, buckets: list[Buckets], *, is_split: bool
    ) -> ChunkPasses:
        """Return the passes of a kind of chunk for some strategies, with what is reduced then."""
        passes = self.by_name
        last = passes["weight" if is_split else "both"]
        return ChunkPasses(
            forward=passes["forward"].of(kind, rows),
            backward=passes["both"].of(kind, rows),
            backward_input=passes["input"].of(kind, rows) if is_split else None,
            backward_weight=last.of(kind, rows) if is_split else None,
            not_accumulated_us=last.sums_us(kind, rows),
            buckets=buckets,
            slowdown_ratio=self.slowdown_ratio,
        )


def list_buckets(
    calls: Iterable[Calls], key: Ints, hides: Flags, prices_us: Floats
) -> list[Buckets]:
    """Return the sums of gradients that overlap the last backward pass where cases hide them."""
    return [
        Buckets(prices_us[:, item.numbers][:, key], item.counts[key] * hides)
        for item in calls
        if np.any(item.counts)
    ]


def _mode(scenario: TrainingScenario, name: str) -> TrainingScenario:
    """Return a scenario that recomputes by a mode, with the settings that go with it."""
    return dataclasses.replace(
        scenario,
        recompute=name,
        recompute_layers=scenario.recompute_layers if name != "none" else 0,
        recompute_modules=scenario.recompute_modules if name == "selective" else (),
        partitions_activations=scenario.partitions_activations and name == "full",
    )


def _weighted(forward: Nodes, *, is_copied: bool) -> Nodes:
    """Return the operators with weights, of a tied head its own where it is a copy."""
    nodes = [
        dataclasses.replace(node, shares_weights=False) if is_copied else node for node in forward
    ]
    return tuple(node for node in nodes if int(node.num_weights))
