"""The closed-form answer of a mixed cluster: place, cut, time, and say why the others are out."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.requests.limit import Limit
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.domain.units import US_PER_S
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.placement.cluster import MAX_ORDERS
from foretoken.simulator.search.placement.columns import (
    PlacedStrategies,
    as_column,
    list_cluster_prices,
    list_columns,
)
from foretoken.simulator.search.placement.layer_cutter import LayerCut, LayerCutter
from foretoken.simulator.search.placement.placed_steps import time_placed
from foretoken.simulator.search.placement.placed_work import PlacedWork
from foretoken.simulator.search.placement.stage_memory import StageBook
from foretoken.simulator.search.placement.strategy import (
    PlacedStrategy,
    PlacementSpace,
    StageWork,
)
from foretoken.simulator.search.placement.ties import time_placed_errors
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.closed_form import (
    ClosedForm,
    Setting,
    Tell,
    count_kept,
    rank_kept,
)
from foretoken.simulator.search.training.survey import MEMORY, Survey, SurveyRules
from foretoken.simulator.search.training.ties import TimedErrors
from foretoken.simulator.steps.legality import TRAINER, batch_limits, order_limits
from foretoken.simulator.steps.strategies import Strategies
from foretoken.simulator.steps.trainer_limit import list_lacks
from foretoken.simulator.training.efficiency import count_step_flops

# More than any degree, and than any micro batch.
_RADIX = 4096
# Strategies cut between two reports of progress, and timed together.
_PER_UPDATE, _PER_ANSWER = 200, 20_000


def answer_placements(
    request: TrainingSearchRequest, book: StageBook, setting: Setting, tell: Tell
) -> ClosedForm:
    """Return the answer of a mixed cluster; `tell` hears now and then how far it is.

    `book` is of the request's scenario; what it has is not lowered again.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.
        InvalidRequestError: the partition method does not take a problem of this size.

    """
    space = PlacementSpace(request)
    rules = SurveyRules(
        objective=request.objective,
        prices=list_cluster_prices(space),
        num_kept=count_kept(request),
    )
    survey = Survey(rules)
    placing = _Placing(space, book, setting, survey)
    placing.run(tell)

    def measure(answers: Answers) -> TimedErrors:
        return time_placed_errors(answers, book.shapes, setting.predictor)

    ranked, ties = rank_kept(survey, rules, measure if setting.has_ties else None)
    return ClosedForm(
        request=request,
        survey=survey,
        prices=rules.prices,
        ranked=ranked,
        ties=ties,
        num_listed=count_kept(request),
        num_shapes=placing.num_shapes,
        model_version=placing.model_version,
        notes=placing.notes,
    )


@dataclass(slots=True)
class _Verdicts:
    """Why strategies are out: the rows of each verdict, and the reason of the first."""

    rows: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, verdict: str, rows: list[int], reason: str) -> None:
        self.rows[verdict] += rows
        self.reasons.setdefault(verdict, reason)


class _Placing:
    """The points of a space, judged, cut, timed, and handed to a survey."""

    def __init__(
        self, space: PlacementSpace, book: StageBook, setting: Setting, survey: Survey
    ) -> None:
        self._space, self._survey = space, survey
        self._predictor, self._shapes = setting.predictor, book.shapes
        self._cutter = LayerCutter(space, book.memories, setting.memory_ratio)
        self._points = list(space.strategies())
        self._columns = list_columns(space, self._points)
        self._verdicts = _Verdicts()
        self._lacks: dict[tuple[StageWork, int, str, int], str] = {}
        self._errors: dict[tuple[StageWork, int], InvalidRequestError | None] = {}
        self.num_shapes, self.model_version = 0, ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the placements."""
        notes = self._cutter.notes
        if not self._space.num_orders_left:
            return notes
        left = (
            f"{self._space.num_orders_left:,} orders of stages were not tried: where a pipeline has"
            f" more than {MAX_ORDERS}, the stages of a kind of node stay together"
        )
        return (*notes, left)

    def run(self, tell: Tell) -> None:
        """Judge all points and answer those that can run, a part at a time."""
        points, survey = self._points, self._survey
        possible = self._check_numbers()
        legal = [row for row in possible if self._check_work(row)]
        survey.num_points = len(points) - len(legal)
        for verdict, rows in self._verdicts.rows.items():
            self._rule_out(verdict, rows, self._verdicts.reasons[verdict])
        for start in range(0, len(legal), _PER_ANSWER):
            some = self._columns.take(np.array(legal[start : start + _PER_ANSWER]))
            work = PlacedWork(some, self._predictor, self._shapes)
            self._answer(work, self._cut(work, tell))
            self.num_shapes = max(self.num_shapes, work.num_shapes)
            self.model_version = work.model_version
        tell(survey)

    def _cut(self, work: PlacedWork, tell: Tell) -> list[LayerCut]:
        """Return the cuts of strategies that can run, which are counted."""
        cuts = []
        for row, point in enumerate(work.points):
            cuts.append(self._cutter.cut(point, work.costs_of(row)))
            self._survey.num_points += 1
            if len(cuts) % _PER_UPDATE == 0:
                tell(self._survey)
        return cuts

    def _check_numbers(self) -> list[int]:
        """Return the points whose batch and layers can be divided as they ask."""
        out = np.zeros(len(self._points), dtype=np.bool_)
        broken = []
        for limit in _placed_limits(self._columns):
            rows = np.flatnonzero(limit.is_broken & ~out)
            out[rows] = True
            if len(rows):
                first = self._columns.take(rows[:1])
                one = next(item for item in _placed_limits(first) if item.is_broken)
                broken.append((rows.tolist(), limit.field or limit.subject, one.reason()))
        # In the order of the points, each verdict where the first of its own is.
        for ruled_out, verdict, reason in sorted(broken):
            self._verdicts.add(verdict, ruled_out, reason)
        return np.flatnonzero(~out).tolist()

    def _check_work(self, row: int) -> bool:
        point = self._points[row]
        error = next(
            filter(
                None, (self._find_error(point.work, kind) for kind in set(point.pipeline.stages))
            ),
            None,
        )
        if error is None:
            if lack := self._find_lack(point):
                self._verdicts.add(TRAINER, [row], lack)
            return not lack
        name = error.violations[0].field if error.violations else "scenario"
        self._verdicts.add(name, [row], error.message)
        return False

    def _find_error(self, work: StageWork, kind: int) -> InvalidRequestError | None:
        """Return why stages on a kind of node cannot work so, if they cannot."""
        if (work, kind) not in self._errors:
            self._errors[work, kind] = None
            try:
                self._space.check(work, self._space.kinds[kind])
            except InvalidRequestError as err:
                self._errors[work, kind] = err
        return self._errors[work, kind]

    def _find_lack(self, point: PlacedStrategy) -> str:
        """Return what a framework has not of a strategy; empty where all have all."""
        num_stages = len(point.pipeline.stages)
        key = (point.work, num_stages, point.schedule, point.virtual_stages)
        if key not in self._lacks:
            one = Strategies.of_scenario(self._space.scenario_of(point, ()))
            lacks = [lack for bound in self._space.bounds for lack in list_lacks(one, bound)]
            self._lacks[key] = InvalidRequestError.of_violations(lacks).message
        return self._lacks[key]

    def _rule_out(self, verdict: str, rows: Sequence[int], reason: str) -> None:
        first = self._columns.take(np.array(rows, dtype=np.int64))
        everyone = np.ones(len(rows), dtype=np.bool_)
        self._survey.rule_out(verdict, first, everyone, reason)

    def _answer(self, work: PlacedWork, cuts: list[LayerCut]) -> None:
        """Time strategies that can run, those alone that fit."""
        for cut in cuts:
            if cut.reason:
                self._survey.reasons.setdefault(MEMORY, cut.reason)
        layers = [cut.layers for cut in cuts]
        strategies = replace(work.strategies, chunk_layers=as_column(layers))
        num, chosen = len(cuts), [row for row, own in enumerate(layers) if own]
        # What does not fit takes forever.
        steps, ratios = np.full((3, num), np.inf), np.zeros((2, num))
        if chosen:
            found = time_placed(work, chosen, layers)
            steps[:, chosen] = found.step_us
            exposed = np.minimum(1.0, found.exposed_us / found.step_us[0])
            ratios[:, chosen] = np.clip(1 - found.busy_ratio, 0.0, 1.0), exposed
        self._survey.add(
            Answers(
                strategies=strategies,
                step_us=steps[0],
                low_us=steps[1],
                high_us=steps[2],
                bubble_ratio=ratios[0],
                exposed_ratio=ratios[1],
                mfu_ratio=_find_mfu(work.points, steps[0], self._space),
                shape=_number_shapes(strategies),
                reserved_bytes=np.array([cut.reserved_bytes for cut in cuts]),
                margin_bytes=np.array([cut.margin_bytes for cut in cuts]),
            )
        )


def _placed_limits(cases: PlacedStrategies) -> Iterator[Limit]:
    """Yield which strategies cannot run whatever their stages do."""
    num_layers = cases.source.scenario.model.num_layers
    rounds, num_stages = cases.virtual_stages, cases.pp
    batch, *_ = batch_limits(cases)
    yield batch
    yield Limit(
        "pipeline_schedule",
        cases.needed_chunks > 1,
        lambda: (
            f"{cases.points[0].schedule} folds the pipeline back: on a mixed cluster, layers are"
            " cut for schedules that go round it alone"
        ),
    )
    yield Limit(
        "virtual_stages",
        (rounds > 1) & (num_stages == 1),
        lambda: "a pipeline of one stage has nothing to interleave",
    )
    yield Limit(
        "virtual_stages: unequal rounds",
        (num_layers % rounds != 0) | (num_stages * rounds > num_layers),
        lambda: (
            f"{num_layers} layers are not {rounds[0]} equal rounds of {num_stages[0]} stages with a"
            " layer at least"
        ),
    )
    for limit in order_limits(cases):
        yield replace(limit, is_broken=limit.is_broken & (rounds > 1))


def _find_mfu(points: Sequence[PlacedStrategy], step_us: Floats, space: PlacementSpace) -> Floats:
    """Return the shares of the peak of all devices that steps reach; 0 of what takes forever."""
    scenario = space.scenario
    per_sample = count_step_flops(replace(scenario, micro_batch_size=1, global_batch_size=1))
    peaks = [find_device(kind.device).peak_flops(scenario.dtype) for kind in space.kinds]
    there = np.array(
        [
            point.pipeline.stage_size * sum(peaks[kind] for kind in point.pipeline.stages)
            for point in points
        ]
    )
    done = per_sample * np.array([point.global_batch_size for point in points])
    return np.asarray(done / (there * step_us / US_PER_S), dtype=np.float64)


def _number_shapes(strategies: PlacedStrategies) -> Ints:
    """Return what is equal where stages run the same operators on the same kinds of node."""
    points = strategies.points
    number = np.zeros(len(points), dtype=np.int64)
    for name in ("tp", "cp", "micro_batch_size", "sequence_parallel"):
        number = number * _RADIX + getattr(strategies, name)
    for kind in range(len(strategies.space.kinds)):
        number = 2 * number + [kind in point.pipeline.stages for point in points]
    return number
