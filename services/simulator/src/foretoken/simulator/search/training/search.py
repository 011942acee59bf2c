"""Search the strategies of a space for the best: count, answer, rank, simulate."""

import time
from dataclasses import replace

from foretoken.domain.requests.training_search import TrainingSearchReport, TrainingSearchRequest
from foretoken.domain.results.echo import Echo
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.context import SearchContext
from foretoken.simulator.search.internevo.question import list_points
from foretoken.simulator.search.placement.request import count_placements
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.closed_form import ClosedForm
from foretoken.simulator.search.training.finalist_selection import FinalistSelection
from foretoken.simulator.search.training.finalists import StrategyRuns
from foretoken.simulator.search.training.outcome import describe, make_report, with_finalists
from foretoken.simulator.search.training.question import ask
from foretoken.simulator.search.training.space import check_space, resolve_space
from foretoken.simulator.search.training.survey import Survey
from foretoken.simulator.training.step import share_step_time

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
