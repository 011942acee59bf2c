"""Search the strategies of a space for the best: count, answer, rank, choose, simulate."""

import time
from dataclasses import replace

from foretoken.domain.requests.training_search import (
    StrategyFinalist,
    TrainingSearchReport,
    TrainingSearchRequest,
)
from foretoken.domain.results.echo import Echo
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.grid import Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.context import SearchContext
from foretoken.simulator.search.internevo.question import list_points
from foretoken.simulator.search.placement.request import count_placements
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.closed_form import ClosedForm
from foretoken.simulator.search.training.finalists import (
    StrategyRuns,
    encode_scenario,
    weigh_simulated,
)
from foretoken.simulator.search.training.outcome import describe, make_report, with_finalists
from foretoken.simulator.search.training.question import ask
from foretoken.simulator.search.training.space import check_space, resolve_space
from foretoken.simulator.search.training.survey import Survey
from foretoken.simulator.training.step import share_step_time

# Simulations for each finalist that is wanted, at the most.
_MAX_TRIES = 4


class FinalistSelection:
    """The first strategies of a ranking; the next takes the place of one that does not fit."""

    def __init__(self, request: TrainingSearchRequest, ranked: Answers, prices: Floats) -> None:
        """Take strategies in their order, and the hourly price of each device of their space."""
        self._objective, self._num_wanted = request.objective, request.num_finalists
        self._ranked = ranked
        self._prices = prices
        self._reports: dict[int, TrainingReport] = {}

    @property
    def num_simulated(self) -> int:
        """Strategies that were simulated."""
        return len(self._reports)

    def next_rows(self) -> list[int]:
        """Return the rows to simulate next; none where enough fit, or too many did not."""
        num_missing = self._num_wanted - len(self._places())
        num_left = _MAX_TRIES * self._num_wanted - len(self._reports)
        first = len(self._reports)
        return list(range(first, min(first + min(num_missing, num_left), len(self._ranked))))

    def tell(self, row: int, report: TrainingReport) -> None:
        """Take note of a simulation."""
        self._reports[row] = report

    def finalist(self, row: int) -> StrategyFinalist:
        """Return a strategy that was simulated, with its place among all that were by now."""
        strategies = self._ranked.strategies
        return StrategyFinalist(
            candidate=row,
            name=strategies.name(row),
            rank=self._places().get(row, 0),
            closed_form_ms=float(self._ranked.step_us[row]) / US_PER_MS,
            report=self._reports[row],
            scenario_json=encode_scenario(strategies.scenario(row)),
        )

    def finalists(self) -> tuple[StrategyFinalist, ...]:
        """Return all that were simulated, the best first, those that do not fit last."""
        found = [self.finalist(row) for row in sorted(self._reports)]
        return tuple(sorted(found, key=lambda item: (item.rank == 0, item.rank)))

    def _places(self) -> dict[int, int]:
        """Return the place of each row that fits, from 1."""
        values = {
            row: self._value(row, report)
            for row, report in self._reports.items()
            if report.feasibility.is_feasible
        }
        order = sorted(values, key=lambda row: (values[row], row))
        return {row: place for place, row in enumerate(order, 1)}

    def _value(self, row: int, report: TrainingReport) -> float:
        """Return what is to be small."""
        strategies = self._ranked.strategies
        num_devices = int(strategies.num_devices[row])
        return weigh_simulated(
            report,
            self._objective,
            num_devices,
            int(strategies.global_batch_size[row]),
            float(self._prices[strategies.device[row]]) * num_devices,
        )


# How far a search is once all is counted, asked again with changes, and simulated.
_COUNTED, _SENSITIVE, _SIMULATED = 0.4, 0.6, 0.95


def count_points(request: TrainingSearchRequest) -> int:
    """Return how many points a search would look at.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.
        InvalidRequestError: the space cannot vary the scenario.

    """
    if request.space.node_groups:
        return count_placements(request)
    check_space(request)
    space = resolve_space(request)
    if request.space.enumeration == "grid":
        return space.num_points + space.num_cut
    return len(list_points(space.source, request.space))


def search_training(
    request: TrainingSearchRequest, predictor: LatencySource, context: SearchContext
) -> TrainingSearchReport:
    """Return the ranked strategies of a space, the best of them simulated event by event.

    Raises:
        CancelledJobError: the job was cancelled.
        InvalidRequestError: the request cannot be answered; the message says what to change.
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.

    """
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    search = _Search(request, predictor, context)
    report = search.run()
    return replace(
        report,
        cpu_s=time.process_time() - started_cpu_s + context.worker_cpu_s,
        wall_s=time.perf_counter() - started_s,
        num_workers=context.num_workers,
    )


class _Search:
    """One search, whose parts tell how far it is."""

    def __init__(
        self, request: TrainingSearchRequest, predictor: LatencySource, context: SearchContext
    ) -> None:
        self._request, self._predictor, self._context = request, predictor, context
        self._num_points = count_points(request)

    def run(self) -> TrainingSearchReport:
        request = self._request
        question = ask(request, self._predictor)
        self._context.update(0.01, f"{self._num_points:,} points: ask the predictor")
        started_s = time.process_time()
        form = question.answer(self._tell)
        report = replace(make_report(form), tie_calls=question.find_tie_calls(form))
        report = replace(report, closed_form_s=time.process_time() - started_s)
        changed = question.find_sensitivities(form, self._tell_changed)
        report = replace(report, sensitivities=changed)
        if request.num_finalists and form.ranked is not None:
            report = self._with_finalists(form, form.ranked, report)
        if form.ranked is not None and not report.finalists:
            best = form.ranked.strategies
            shares = share_step_time(best.scenario(0), self._predictor)
            report = replace(report, echo=Echo.of_estimate(best.name(0), shares))
        return report

    def _tell(self, survey: Survey) -> None:
        ratio = survey.num_points / max(1, self._num_points)
        self._context.update(_COUNTED * ratio, describe(survey))

    def _tell_changed(self, ratio: float, words: str) -> None:
        self._context.update(_COUNTED + (_SENSITIVE - _COUNTED) * ratio, words)

    def _with_finalists(
        self, form: ClosedForm, ranked: Answers, report: TrainingSearchReport
    ) -> TrainingSearchReport:
        """Return the report with the first strategies simulated, each published when it is done."""
        request, context = self._request, self._context
        selection = FinalistSelection(request, ranked, form.prices)
        runs = StrategyRuns(self._predictor)
        while rows := selection.next_rows():
            scenarios = [ranked.strategies.scenario(row) for row in rows]
            for place, simulated in runs.run(scenarios, context):
                selection.tell(rows[place], simulated)
                num_done = selection.num_simulated
                ratio = min(1.0, num_done / request.num_finalists)
                context.update(
                    _SENSITIVE + (_SIMULATED - _SENSITIVE) * ratio,
                    f"{describe(form.survey)}; simulated {num_done} of {request.num_finalists}",
                )
                context.publish(selection.finalist(rows[place]))
        return with_finalists(report, form, selection.finalists())
