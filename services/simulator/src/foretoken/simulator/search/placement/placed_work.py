"""What the strategies of a mixed cluster run on every kind of node, priced there.

A strategy is on a kind of node what it would be on equal ones: passes, transfers and states are
those of a search over one device. A step takes of each kind what its stages there have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from foretoken.domain.requests.training_search import WEIGHT_PARALLELS
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.placement.cluster import NodeKind, Pipeline
from foretoken.simulator.search.placement.columns import PlacedStrategies
from foretoken.simulator.search.placement.layer_kind import (
    FIRST_KIND,
    LAST_KIND,
    NUM_KINDS,
    list_layer_kinds,
)
from foretoken.simulator.search.training.chunk_kinds import ChunkKind
from foretoken.simulator.search.training.device_work import DeviceWork, TimedPasses
from foretoken.simulator.search.training.shape_library import ShapeLibrary
from foretoken.simulator.search.training.transfer_calls import at_stride
from foretoken.simulator.steps.call_prices import CallBook, Variants
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.stage_hardware import StageHardware
from foretoken.simulator.steps.strategies import AS_GIVEN, AXES, Strategies, StrategySource

# Where a stage is for which layers are cut.
FIRST, BETWEEN, LAST = range(3)
_ISP = WEIGHT_PARALLELS.index("isp")
# Layers of the longer of two chunks whose difference is a layer.
_NUM_COMPARED = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CutCosts:
    """What layers are cut by, in µs of one micro batch at the estimates.

    `constants` are what chunks have besides their layers, [kind of node, position]; `per_layer` is
    [kind of node, kind of layer], and `sent` what stages exchange with the next, [stage].
    """

    constants: Floats
    per_layer: Floats
    sent: Floats


class KindWork:
    """The strategies that use one kind of node: `row_in` finds them, -1 for others."""

    def __init__(self, rows: Ints, own: Strategies, shapes: ShapeLibrary, book: CallBook) -> None:
        """Write the calls of passes and transfers."""
        self.rows = rows
        is_copied = (own.pp > 1) & own.base.model.has_tied_embedding
        self.device = DeviceWork(own, shapes.group(own), np.asarray(is_copied), book)
        schedules = [find_schedule(name) for name in own.source.pipeline_schedules]
        self.is_split = np.array([item.splits_backward for item in schedules])[
            own.pipeline_schedule
        ]
        self._book = book

    @cached_property
    def sends_us(self) -> tuple[Floats, Floats]:
        """What is sent to the next stage and back, each [near or across, variant, strategy]."""
        return self.device.transfers.time(np.arange(len(self.rows)), self._book.prices_us)

    def time_passes(self, kinds: Sequence[ChunkKind]) -> TimedPasses:
        """Return the passes of kinds of chunks."""
        return self.device.time_passes(kinds, is_split=bool(self.is_split.any()))

    @cached_property
    def lines(self) -> tuple[Floats, Floats]:
        """The constants and the layers of `CutCosts`: (strategy, position), (strategy, kind)."""
        model = self.device.strategies.base.model
        num_first = int((list_layer_kinds(model) == FIRST_KIND).sum())
        last = [_chunk(at, model.num_layers, model.num_layers - num_first) for at in range(3)]
        first = _chunk(BETWEEN, num_first, num_first) if num_first else last[BETWEEN]
        timed = self.time_passes([kind for pair in (*last, first) for kind in pair])
        totals = [[self._total(timed, kind) for kind in pair] for pair in (*last, first)]
        slopes = [longer - shorter for shorter, longer in totals]
        per_layer = np.zeros((len(self.rows), NUM_KINDS))
        per_layer[:, LAST_KIND], per_layer[:, FIRST_KIND] = slopes[BETWEEN], slopes[-1]
        constants = [
            shorter - len(pair[0].layers) * slope
            for (shorter, _), slope, pair in zip(totals[:3], slopes[:3], last, strict=True)
        ]
        return np.stack(constants, axis=1), per_layer

    def _total(self, timed: TimedPasses, kind: ChunkKind) -> Floats:
        """Return the passes of a micro batch at the estimates."""
        rows = np.arange(len(self.rows))
        of_name = {name: found.of(kind, rows).total_us[0] for name, found in timed.by_name.items()}
        back = of_name["both"]
        if self.is_split.any():
            back = np.where(self.is_split, of_name["input"] + of_name["weight"], back)
        return np.asarray(of_name["forward"] + back)


def _chunk(position: int, stop: int, most: int) -> tuple[ChunkKind, ChunkKind]:
    """Return two chunks that differ by a layer, of at most so many layers before `stop`."""
    count = min(_NUM_COMPARED, most)

    def cut(num_layers: int) -> ChunkKind:
        return ChunkKind(
            has_embedding=position == FIRST,
            has_head=position == LAST,
            receives_input=position != FIRST,
            receives_gradient=position != LAST,
            has_copy=position == LAST,
            # Of one type of layers alone: the first have another number than the last.
            alike=(0,) * num_layers if stop == most else (1,) * num_layers,
            layers=range(stop - num_layers, stop),
        )

    return cut(count - 1), cut(count)


class PlacedWork:
    """Strategies with what they run on each kind of node, in one question for each."""

    def __init__(
        self,
        strategies: PlacedStrategies,
        predictor: LatencySource,
        shapes: Sequence[ShapeLibrary],
        variants: Callable[[int], Variants | None] = lambda _: None,
    ) -> None:
        """Price strategies that can run; `variants` are the prices on a kind of node."""
        self.strategies, self._predictor, self._variants = strategies, predictor, variants
        self.space, self.points = strategies.space, strategies.points
        self.kinds: dict[int, KindWork] = {}
        self.row_in = np.full((len(self.space.kinds), len(strategies)), -1, dtype=np.int64)
        self._versions: dict[str, None] = {}
        self._across: dict[Pipeline, list[bool]] = {}
        for number, kind in enumerate(self.space.kinds):
            is_used = [number in point.pipeline.stages for point in self.points]
            rows = np.flatnonzero(np.array(is_used, dtype=np.bool_))
            if not len(rows):
                continue
            book = self.open_book(number)
            own = _on_kind(strategies, rows, kind)
            self.kinds[number] = KindWork(rows, own, shapes[number], book)
            self.row_in[number, rows] = np.arange(len(rows))
            self.fetch(number, book)

    @property
    def num_shapes(self) -> int:
        """Shapes of layers on kinds of nodes that were priced."""
        return sum(len(work.device.groups.shapes) for work in self.kinds.values())

    @property
    def model_version(self) -> str:
        """The versions of the predictor's models."""
        return ", ".join(filter(None, self._versions))

    def open_book(self, kind: int) -> CallBook:
        """Return an empty book of calls on a kind of node."""
        return CallBook(self._variants(kind))

    def fetch(self, kind: int, book: CallBook) -> None:
        """Ask what the calls of a book cost on a kind of node."""
        book.fetch(self.kinds[kind].device.scenario_of(0), self._predictor)
        self._versions.setdefault(book.model_version)

    def costs_of(self, row: int) -> CutCosts:
        """Return what the layers of a strategy are cut by."""
        constants, per_layer = (
            np.zeros((len(self.space.kinds), 3)),
            np.zeros((len(self.space.kinds), 2)),
        )
        for kind in set(self.points[row].pipeline.stages):
            own = self.row_in[kind, row]
            constants[kind], per_layer[kind] = (lines[own] for lines in self.kinds[kind].lines)
        return CutCosts(constants=constants, per_layer=per_layer, sent=self._sent_us[row])

    @cached_property
    def _sent_us(self) -> dict[int, Floats]:
        """What the stages of every strategy exchange with the next, at the estimates: [stage]."""
        pp, found = self.strategies.pp, dict[int, Floats]()
        for num_stages in np.unique(pp).tolist():
            rows = np.flatnonzero(pp == num_stages)
            ways = zip(*self.sends(rows), strict=True)
            sent = [ahead[0] + back[0] for ahead, back in ways]
            found.update(zip(rows.tolist(), np.stack(sent, axis=1), strict=True))
        return found

    def stages(self, rows: Ints) -> Ints:
        """Return the kinds of nodes of the stages of strategies with as many: [strategy, stage]."""
        return np.array([self.points[row].pipeline.stages for row in rows.tolist()])

    def sends(self, rows: Ints) -> tuple[list[Floats], list[Floats]]:
        """Return what stages send to the next, and what comes back, of as many stages each.

        By stage, [variant, strategy]. Between kinds of nodes the slower end sets the pace.
        """
        stages = self.stages(rows)
        is_across = np.array(
            [self._list_across(self.points[row].pipeline) for row in rows.tolist()]
        )
        found: tuple[list[Floats], list[Floats]] = ([], [])
        for stage in range(stages.shape[1]):
            ends = [stages[:, stage], stages[:, (stage + 1) % stages.shape[1]]]
            for columns, read in zip(found, (_sends_ahead, _sends_back), strict=True):
                own, other = (self.pick(rows, end, read) for end in ends)
                far = np.maximum(own[1], other[1])
                columns.append(np.where(is_across[:, stage], far, own[0]))
        return found

    def pick(self, rows: Ints, kinds: Ints, read: Callable[[KindWork], Floats]) -> Floats:
        """Return of each row what its kind of node has: [..., strategy]."""
        parts = []
        for kind in np.unique(kinds).tolist():
            at = np.flatnonzero(kinds == kind)
            parts.append((at, read(self.kinds[kind])[..., self.row_in[kind, rows[at]]]))
        return join_columns(parts, len(rows))

    def _list_across(self, pipeline: Pipeline) -> list[bool]:
        """Tell of every stage whether it sends to another node; after the last comes the first."""
        if pipeline not in self._across:
            own = [self.space.kinds[kind] for kind in pipeline.stages]
            hardware = StageHardware(
                tuple(kind.device for kind in own), tuple(kind.topology for kind in own)
            )
            found = []
            for stage, kind in enumerate(pipeline.stages):
                rank = at_stride(self.kinds[kind].device.groups.shapes[0].rank, pipeline.stage_size)
                pair = hardware.pair(stage, (stage + 1) % len(own), rank)
                found.append(pair.dims["num_nodes"] > 1)
            self._across[pipeline] = found
        return self._across[pipeline]


def _sends_ahead(work: KindWork) -> Floats:
    return work.sends_us[0]


def _sends_back(work: KindWork) -> Floats:
    return work.sends_us[1]


def join_columns(parts: Sequence[tuple[Ints, Floats]], length: int) -> Floats:
    """Return columns of some cases each as one of all: [..., case]."""
    found = np.zeros((*parts[0][1].shape[:-1], length))
    for at, column in parts:
        found[..., at] = column
    return found


def _on_kind(strategies: PlacedStrategies, rows: Ints, kind: NodeKind) -> Strategies:
    """Return strategies as if all their stages were on one kind of node."""
    columns = {name: getattr(strategies, name)[rows] for name in AXES}
    is_isp, degree = columns["weight_parallel"] == _ISP, columns["weight_degree"]
    columns["weight_degree"] = is_isp * np.where(degree > 0, degree, columns["tp"])
    columns["device"] = np.zeros_like(rows)
    base = replace(strategies.space.scenario, device=kind.device, topology=kind.topology)
    source = StrategySource(
        scenario=base,
        devices=(kind.device,),
        pipeline_schedules=strategies.source.pipeline_schedules,
        overlaps=AS_GIVEN,
    )
    return Strategies(source=source, **columns)
