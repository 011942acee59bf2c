"""Times of steps of strategies on one kind of device, from their calls to columns of steps.

Shapes and states write their calls to one book, which is priced at once; then the passes of chunks
are timed, and steps put together of those and of what ends them.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from foretoken.domain.lowering.options import Nodes
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import OVERLAPS
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.training.chunk_kinds import cut_model
from foretoken.simulator.search.training.pass_timer import (
    NO_EXCHANGE,
    PassColumns,
    PassKeys,
    PassTimer,
)
from foretoken.simulator.search.training.priced_piece import PricedPiece, WrittenGroup
from foretoken.simulator.search.training.shape_library import ShapeGroups
from foretoken.simulator.search.training.state_columns import StateWriter
from foretoken.simulator.search.training.step_columns import (
    RankStates,
)
from foretoken.simulator.search.training.transfer_columns import TransferWriter
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.steps.memory import WholeModel
from foretoken.simulator.steps.parameters import number_layer_kinds
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.sharding import ScenarioDegrees
from foretoken.simulator.steps.strategies import (
    RECOMPUTE_MODES,
    Strategies,
    trainer_with,
)
from foretoken.simulator.training.efficiency import count_step_flops, peak_flops_per_s
from foretoken.simulator.training.schedule import find_schedule
from foretoken.simulator.training.stage_operators import list_agreements
from foretoken.simulator.training.state_sharding import StateExchange, exchange_in_layers

_FULL = RECOMPUTE_MODES.index("full")
_FORMS = {"zero_bubble_v": "folded", "dualpipe": "mirrored"}


class StrategyPiece:
    """Some strategies on one kind of device."""

    def __init__(
        self,
        strategies: Strategies,
        groups: ShapeGroups,
        book: CallBook,
        predictor: LatencySource,
    ) -> None:
        """Keep the strategies with the shapes of their layers, and who prices their calls."""
        scenario = strategies.source.scenario
        self._all = strategies
        self._dp = strategies.dp
        self._base = self._scenario_of(0)
        self._scenario = scenario
        self._predictor = predictor
        self._trainers = [trainer_with(scenario.trainer, name).resolve() for name in OVERLAPS]
        self._calibration = scenario.calibration or TrainingCalibration()
        self._modes = [_mode(scenario, name) for name in RECOMPUTE_MODES]
        self.groups = groups
        self._book = book
        forward, num_layers = groups.shapes[0].forward, scenario.model.num_layers
        self._layer_kinds = number_layer_kinds(forward, num_layers)
        self._weights, self._weight_of_shape = self._count_weights()
        names = strategies.source.pipeline_schedules
        self._schedules = [find_schedule(name) for name in names]
        self._find_sharding()

    @property
    def model_version(self) -> str:
        """The models that gave the prices."""
        return self._book.model_version

    @property
    def step_s_at_peak(self) -> Floats:
        """Time of a step whose devices do nothing but what the model needs, of each strategy."""
        rows = self._all
        first, number = number_rows([rows.num_devices, rows.global_batch_size])
        times = []
        for row in first:
            # The work of the model does not depend on how it is laid out.
            scenario = self._scenario_of(row)
            times.append(count_step_flops(scenario) / peak_flops_per_s(scenario))
        return np.array(times)[number]

    def price(self) -> PricedPiece:
        """Ask what all calls cost, and time the passes of chunks."""
        exchanges, of_row = self._list_exchanges()
        timer = PassTimer(self._scenario, self.groups.shapes, exchanges, self._modes, self._book)
        transfers = TransferWriter(self.groups.shapes, self._book)
        groups = [self._write(rows, transfers) for rows in self._cut()]
        self._book.fetch(self._base, self._predictor)
        return PricedPiece(
            groups=groups,
            passes=self._time_passes(timer, groups, exchanges, of_row),
            prices_us=self._book.prices_us,
            num_micro_batches=self._all.num_micro_batches,
            hides=self._hides,
            gathers_early=self._gathers_early,
            trainer=self._trainers[0],
            calibration=self._calibration,
        )

    def _scenario_of(self, row: int) -> TrainingScenario:
        return self._all.take(np.array([row])).scenario(0)

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

    def _find_sharding(self) -> None:
        """Find what each strategy splits its states over; see `steps/sharding.py`."""
        rows = self._all
        self._zero, self._is_once = rows.state_stage, rows.is_once
        self._shards, self._replicas = rows.shards, rows.replicas
        self._degree = rows.weight_parts
        hides = np.array([trainer.overlaps_gradient_reduction for trainer in self._trainers])
        gathers = np.array([trainer.overlaps_parameter_gather for trainer in self._trainers])
        self._hides = hides[rows.overlap] & ~self._is_once
        self._gathers_early = gathers[rows.overlap]

    def _is_copied(self) -> Flags:
        """Tell where a tied head is a copy of the embedding."""
        if not self._base.model.has_tied_embedding:
            return np.zeros(len(self._all), dtype=bool)
        folded = np.array([schedule.name in _FORMS for schedule in self._schedules])
        is_copied: Flags = (self._all.pp > 1) & ~folded[self._all.pipeline_schedule]
        return is_copied

    def _list_exchanges(self) -> tuple[list[StateExchange], Ints]:
        """Return what states exchange in layers, each way once, and that of each strategy."""
        rows, of_row = self._all, np.zeros(len(self._all), dtype=np.int64)
        some = np.flatnonzero((self._zero > 1) & ~self._is_once)
        exchanges = [NO_EXCHANGE]
        if not len(some):
            return exchanges, of_row
        is_copied, shape = self._is_copied()[some], self.groups.of_strategy[some]
        is_again = (rows.recompute[some] == _FULL) & self._trainers[0].gathers_again
        keys = [self._weight_of_shape[shape], self._zero[some], self._shards[some]]
        keys += [rows.tp[some], self._degree[some], self._replicas[some], rows.ep[some]]
        keys += [self._hides[some], self._gathers_early[some], is_again, is_copied]
        if self._base.model.moe is not None:
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
        rows = self._all
        return dataclasses.replace(
            scenario,
            layout=dataclasses.replace(scenario.layout, dp=int(self._dp[row])),
            trainer=trainer_with(self._scenario.trainer, OVERLAPS[rows.overlap[row]]),
            recompute=RECOMPUTE_MODES[rows.recompute[row]],
            zero_stage=int(rows.zero_stage[row]),
            shard_degree=int(rows.shard_degree[row]),
        )

    def _cut(self) -> Iterator[Ints]:
        """Yield the strategies that cut the model alike."""
        keys = [self._all.pipeline_schedule, self._all.pp, self._all.chunks]
        first, number = number_rows(keys)
        for at in range(len(first)):
            yield np.flatnonzero(number == at)

    def _write(self, rows: Ints, transfers: TransferWriter) -> WrittenGroup:
        """Write what ends the steps of strategies that cut the model alike."""
        at, model = int(rows[0]), self._base.model
        schedule = self._schedules[self._all.pipeline_schedule[at]]
        pp, num_dense = int(self._all.pp[at]), model.num_layers
        if model.moe is not None:
            num_dense = model.moe.num_dense_layers
        num_chunks = pp * int(self._all.chunks[at])
        form = _FORMS.get(schedule.name, "round")
        cut = cut_model(model.num_layers, num_dense, pp, num_chunks, form)
        shape = self.groups.of_strategy[rows]
        weights = self._weight_of_shape[shape]
        first, key = self._number_states(rows, weights)
        rank, counts = self.groups.shapes[0].rank, self._weights[weights[first]]
        writer = StateWriter(self._all.take(rows[first]), cut, rank, self._book)
        states = tuple(writer.write_chunk(kind, counts, self._layer_kinds) for kind in cut.kinds)
        rank_states = {}
        for kinds in cut.rank_kinds:
            num_updated = np.sum([states[kind].num_updated for kind in kinds], axis=0)
            checks, updates = writer.write_updates(num_updated)
            rank_states[kinds] = RankStates(checks=checks, updates=updates)
        stride = self._all.stage_ranks[rows]
        return WrittenGroup(
            rows=rows,
            schedule=schedule.name,
            cut=cut,
            key=key,
            states=states,
            rank_states=rank_states,
            agreement=self._write_agreements(rows),
            transfers=transfers.write(shape, self.groups.micro_batch[rows], stride, cut, rank),
        )

    def _number_states(self, rows: Ints, weights: Ints) -> tuple[Ints, Ints]:
        columns = self._all
        keys = [weights, columns.tp[rows], columns.cp[rows], columns.dp[rows], columns.ep[rows]]
        keys += [self._zero[rows], self._shards[rows], self._hides[rows].astype(np.int64)]
        keys += [self._all.is_isp[rows].astype(np.int64), self._degree[rows]]
        return number_rows(keys)

    def _write_agreements(self, rows: Ints) -> Ints:
        """Return the calls by which ranks agree on an update: (call, strategy)."""
        columns = self._all
        keys = [columns.tp[rows], columns.cp[rows], columns.dp[rows], columns.num_devices[rows]]
        first, number = number_rows([*keys, (columns.zero_stage[rows] > 0).astype(np.int64)])
        found = []
        for at in rows[first]:
            nodes = list_agreements(
                self._scenario_of(at), self._trainers[0], self.groups.shapes[0].rank
            )
            calls = [int(self._book.add(node, 1)[0]) for node in nodes]
            found.append([*calls, *[0] * (2 - len(calls))])
        return np.array(found, dtype=np.int64).T[:, number]

    def _time_passes(
        self,
        timer: PassTimer,
        groups: Sequence[WrittenGroup],
        exchanges: Sequence[StateExchange],
        of_row: Ints,
    ) -> dict[str, PassColumns]:
        """Return the times of all passes by name, those of the halves where some are split."""
        gathers = np.array([bool(exchange.forward) for exchange in exchanges])
        keys = PassKeys(
            shape=self.groups.of_strategy,
            micro_batch=self.groups.micro_batch,
            recompute=self._all.recompute,
            exchange=of_row,
        )
        forward = dataclasses.replace(
            keys,
            recompute=np.zeros_like(keys.recompute),
            exchange=np.where(gathers[of_row], of_row, 0),
        )
        kinds = [kind for group in groups for kind in group.cut.kinds]
        names = ["both"]
        if any(schedule.splits_backward for schedule in self._schedules):
            names += ["input", "weight"]
        found = {name: timer.time(name, keys, kinds) for name in names}
        return {**found, "forward": timer.time("forward", forward, kinds)}


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
