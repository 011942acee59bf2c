"""Answer all strategies of a mixed cluster in closed form, and say why the others are out."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.training_search import RuledOut
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.placement.chain import Chain, Cut, find_method
from foretoken.simulator.search.placement.cutting import StageSite, make_chain, transfer_times
from foretoken.simulator.search.placement.stage_cost import Numbers, StageLines, measure_lines
from foretoken.simulator.search.placement.stage_memory import MemoryLines, StageMemories
from foretoken.simulator.search.placement.step_time import PlacedStages, time_steps
from foretoken.simulator.search.placement.strategy import (
    PlacedStrategy,
    PlacementSpace,
    StageWork,
    describe_stages,
)

Watch = Callable[[float, str], None]
# Cuts between two reports of progress.
_PER_UPDATE = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class CutStrategy:
    """A strategy that fits, with the layers of its stages.

    Of the fullest device `reserved_bytes` are taken and `margin_bytes` left.
    """

    strategy: PlacedStrategy
    stage_layers: tuple[int, ...]
    reserved_bytes: float
    margin_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacementAnswers:
    """All strategies that fit, with columns of one entry each: `step_us` is (strategy, bound)."""

    space: PlacementSpace
    strategies: Sequence[CutStrategy]
    step_us: Numbers
    bubble_ratio: Numbers
    exposed_ratio: Numbers
    ruled_out: tuple[RuledOut, ...]
    num_points: int
    num_legal: int
    num_shapes: int
    model_version: str
    notes: tuple[str, ...]


def survey_placements(
    space: PlacementSpace, predictor: LatencySource, watch: Watch
) -> PlacementAnswers:
    """Return the answers of a space; `watch` is told how far it is.

    Raises:
        InvalidRequestError: the partition method does not take a problem of this size.

    """
    watch(0.02, "list the placements")
    strategies, reasons = list(space.strategies()), _Reasons(space)
    whole = [item for item in strategies if reasons.check_batch(item)]
    watch(0.05, f"{len(strategies):,} points: price the stages on {len(space.kinds)} kinds of node")
    surveyor = _Surveyor(space, predictor, reasons)
    surveyor.measure(whole)
    legal = [item for item in whole if reasons.check_work(item, surveyor.refused)]
    fitting = surveyor.cut(legal, watch)
    watch(0.3, f"{len(legal):,} can run, {len(fitting):,} fit")
    step_us, bubble, exposed = surveyor.time(fitting)
    return PlacementAnswers(
        space=space,
        strategies=fitting,
        step_us=step_us,
        bubble_ratio=bubble,
        exposed_ratio=exposed,
        ruled_out=reasons.list(),
        num_points=len(strategies),
        num_legal=len(legal),
        num_shapes=surveyor.num_shapes,
        model_version=", ".join(dict.fromkeys(filter(None, surveyor.model_versions))),
        notes=surveyor.notes,
    )


@dataclass(slots=True)
class _Reasons:
    """Counts why strategies are out, and keeps the first of each kind."""

    space: PlacementSpace
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    first: dict[str, tuple[PlacedStrategy, str]] = field(default_factory=dict)

    def add(self, verdict: str, strategy: PlacedStrategy, reason: str) -> None:
        self.counts[verdict] += 1
        self.first.setdefault(verdict, (strategy, reason))

    def check_batch(self, strategy: PlacedStrategy) -> bool:
        samples = strategy.work.dp * strategy.work.micro_batch_size
        if strategy.global_batch_size % samples == 0:
            return True
        reason = (
            f"{strategy.global_batch_size} samples are not a multiple of dp times"
            f" micro_batch_size, {samples}"
        )
        self.add("global_batch_size", strategy, reason)
        return False

    def check_work(
        self, strategy: PlacedStrategy, refused: Sequence[dict[StageWork, InvalidRequestError]]
    ) -> bool:
        for kind in set(strategy.pipeline.stages):
            error = refused[kind].get(strategy.work)
            if error is not None:
                name = error.violations[0].field if error.violations else "scenario"
                self.add(name, strategy, error.message)
                return False
        return True

    def list(self) -> tuple[RuledOut, ...]:
        """Return the most frequent reason first."""
        return tuple(
            RuledOut(
                verdict=verdict,
                num_strategies=count,
                example=name_strategy(self.first[verdict][0], self.space),
                reason=self.first[verdict][1],
            )
            for verdict, count in sorted(self.counts.items(), key=lambda item: -item[1])
        )


class _Surveyor:
    """What was measured of stages, and what follows for strategies."""

    def __init__(self, space: PlacementSpace, predictor: LatencySource, reasons: _Reasons) -> None:
        self._space = space
        self._predictor = predictor
        self._reasons = reasons
        self._lines: list[dict[StageWork, StageLines]] = []
        self._memories = StageMemories(space.scenario)
        self._method = find_method(space.space.partition)
        self._stopped: dict[str, int] = defaultdict(int)
        self._cuts: dict[tuple[object, ...], Cut] = {}
        self.refused: list[dict[StageWork, InvalidRequestError]] = []
        self.model_versions: list[str] = []

    @property
    def num_shapes(self) -> int:
        """Kinds of work on kinds of nodes that were lowered."""
        return sum(len(lines) for lines in self._lines)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the cuts."""
        return tuple(f"{note} ({count} strategies)" for note, count in self._stopped.items())

    def measure(self, strategies: Sequence[PlacedStrategy]) -> None:
        """Lower and price what stages do on every kind of node."""
        for kind, nodes in enumerate(self._space.kinds):
            works: dict[StageWork, bool] = {}
            for item in strategies:
                if kind in item.pipeline.stages:
                    is_alone = works.get(item.work, False) or len(item.pipeline.stages) == 1
                    works[item.work] = is_alone
            lines, refused, version = measure_lines(
                nodes, works, self._space.scenario, self._predictor
            )
            self._lines.append(lines)
            self.refused.append(refused)
            self.model_versions.append(version)

    def cut(self, strategies: Sequence[PlacedStrategy], watch: Watch) -> list[CutStrategy]:
        """Return the strategies that have the memory, their layers cut."""
        found = []
        for done, strategy in enumerate(strategies):
            if done % _PER_UPDATE == 0:
                watch(
                    0.1 + 0.2 * done / len(strategies),
                    f"{done:,} of {len(strategies):,} strategies cut to stages",
                )
            memory = self._memories.lines(
                strategy.work, len(strategy.pipeline.stages), strategy.num_micro_batches
            )
            cut = self._cut_chain(make_chain(strategy, self._site(strategy, memory)))
            if cut.note:
                self._stopped[cut.note] += 1
            if cut.num_nodes:
                found.append(self._fill(strategy, cut, memory))
            else:
                self._reasons.add("memory", strategy, self._explain(strategy, memory))
        return found

    def _cut_chain(self, chain: Chain) -> Cut:
        """Return the cut of a chain; equal ones are cut once."""
        arrays = (chain.costs, chain.transfers, chain.bytes_needed, chain.bytes_there)
        key = (chain.kinds, *(array.tobytes() for array in arrays))
        if key not in self._cuts:
            self._cuts[key] = self._method.cut(chain)
        return self._cuts[key]

    def _site(self, strategy: PlacedStrategy, memory: MemoryLines) -> StageSite:
        return StageSite(
            kinds=self._space.kinds,
            lines=self._lines_of(strategy),
            memory=memory,
            num_layers=self._space.scenario.model.num_layers,
        )

    def _lines_of(self, strategy: PlacedStrategy) -> list[StageLines | None]:
        return [lines.get(strategy.work) for lines in self._lines]

    def _fill(self, strategy: PlacedStrategy, cut: Cut, memory: MemoryLines) -> CutStrategy:
        reserved = memory.constants + memory.per_layer * np.array(cut.num_nodes)
        margins = self._room(strategy) - reserved
        fullest = int(margins.argmin())
        return CutStrategy(
            strategy=strategy,
            stage_layers=cut.num_nodes,
            reserved_bytes=float(reserved[fullest]),
            margin_bytes=float(margins[fullest]),
        )

    def _room(self, strategy: PlacedStrategy) -> Numbers:
        kinds = self._space.kinds
        return np.array(
            [find_device(kinds[kind].device).memory_bytes for kind in strategy.pipeline.stages]
        )

    def _explain(self, strategy: PlacedStrategy, memory: MemoryLines) -> str:
        room = np.maximum(0.0, self._room(strategy) - memory.constants)
        most = int(np.floor(room / np.maximum(memory.per_layer, 1.0)).sum())
        needed = self._space.scenario.model.num_layers
        if most < needed:
            return f"the stages have memory for {most} of {needed} layers"
        return f"{self._method.name} finds no cut that every stage has the memory for"

    def time(self, cuts: Sequence[CutStrategy]) -> tuple[Numbers, Numbers, Numbers]:
        """Return steps in µs by bound, idle shares, and shares of waiting for communication."""
        step_us = np.zeros((len(cuts), 3))
        bubble, exposed = np.zeros(len(cuts)), np.zeros(len(cuts))
        alike: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        for row, item in enumerate(cuts):
            strategy = item.strategy
            schedule = strategy.work.pipeline_schedule
            stages = len(strategy.pipeline.stages)
            alike[stages, strategy.num_micro_batches, schedule].append(row)
        for (_, count, schedule), rows in alike.items():
            placed = [self._place(cuts[row]) for row in rows]
            figures = time_steps(placed, count, schedule, self._space.scenario)
            step_us[rows], bubble[rows] = figures.step_us, figures.bubble_ratio
            exposed[rows] = figures.exposed_ratio
        return step_us, bubble, exposed

    def _place(self, cut: CutStrategy) -> PlacedStages:
        strategy, lines = cut.strategy, self._lines_of(cut.strategy)
        own = [lines[kind] for kind in strategy.pipeline.stages]
        return PlacedStages(
            lines=[line for line in own if line is not None],
            layers=cut.stage_layers,
            transfers=transfer_times(strategy.pipeline, self._space.kinds, lines),
        )


def name_strategy(strategy: PlacedStrategy, space: PlacementSpace) -> str:
    """Return a name that no other strategy of the space has."""
    work, asked = strategy.work, space.space
    parts = [
        f"tp{work.tp} pp{len(strategy.pipeline.stages)} dp{work.dp}",
        f"cp{work.cp}" if work.cp > 1 else "",
        f"mbs{work.micro_batch_size}",
        "sp" if work.sequence_parallel else "",
        f"zero{work.zero_stage}" if len(asked.zero_stages) > 1 else "",
        f"recompute {work.recompute}" if len(asked.recompute) > 1 else "",
        work.pipeline_schedule if len(asked.pipeline_schedules) > 1 else "",
        f"gbs{strategy.global_batch_size}" if len(asked.global_batch_sizes) > 1 else "",
    ]
    stages = describe_stages(strategy.pipeline, space.kinds)
    return f"{' '.join(part for part in parts if part)} on {stages}"
