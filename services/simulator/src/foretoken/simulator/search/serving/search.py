"""Search the deployments of a space for the best: enumerate, rule out, answer, rank, simulate."""

import json
import time
from collections import Counter
from dataclasses import fields, replace
from itertools import chain

import numpy as np

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    CandidateColumns,
    ServingSearchReport,
    ServingSearchRequest,
)
from foretoken.domain.results.echo import Echo
from foretoken.simulator.search.context import SearchContext
from foretoken.simulator.search.serving.candidate_scenario import CandidateMaker
from foretoken.simulator.search.serving.closed_form import has_closed_form
from foretoken.simulator.search.serving.engine_answer import NOT_ANSWERED, AnswerCache
from foretoken.simulator.search.serving.finalist_selection import FinalistSelection
from foretoken.simulator.search.serving.finalists import (
    OTHER_RATIOS,
    CandidateRuns,
    LoadOutcome,
    make_finalist,
)
from foretoken.simulator.search.serving.load import profile_load
from foretoken.simulator.search.serving.outcome import (
    ClosedForm,
    find_sensitivities,
    make_closed_form,
    share_best_time,
)
from foretoken.simulator.search.serving.rank import Figures
from foretoken.simulator.search.serving.space import SearchSpace, resolve_space
from foretoken.simulator.search.serving.table import build_table, name_of


def count_points(request: ServingSearchRequest) -> int:
    """Return how many points a search would look at, before equal ones are merged.

    Raises:
        UnknownDeviceError, UnknownPluginError: no such name.
        InvalidRequestError: the engine's limits cannot be used.

    """
    return resolve_space(request).num_points


def search_serving(
    request: ServingSearchRequest, predictor: PredictorPort, context: SearchContext
) -> ServingSearchReport:
    """Return the ranked deployments of a space; see `ServingSearch.run`."""
    return ServingSearch(predictor).run(request, context)


class ServingSearch:
    """Answers searches; what it learned of engines for one serves the next."""

    def __init__(self, predictor: PredictorPort, max_kept: int = 512) -> None:
        self._predictor = predictor
        self._cache = AnswerCache(predictor, max_kept)
        self._runs = CandidateRuns(predictor)

    def run(self, request: ServingSearchRequest, context: SearchContext) -> ServingSearchReport:
        """Return the ranked deployments of a space, the best of them simulated.

        Raises:
            CancelledJobError: the job was cancelled.
            InvalidRequestError: the request cannot be answered; the message says what to change.
            UnknownDeviceError, UnknownPluginError: no such name.

        """
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        context.update(0.01, "ask the predictor about the engines")
        form = self.answer(request)
        report = _report(form)
        context.update(0.3, f"{report.num_evaluated:,} points answered")
        if request.has_sensitivity and report.best:
            found = find_sensitivities(form, report, self._predictor)
            report = replace(report, sensitivities=found)
        if request.num_finalists and (report.best or form.points.is_near.any()):
            report = self._simulate(form, report, context)
        if report.best and not report.finalists:
            shares = share_best_time(form, self._predictor)
            report = replace(report, echo=Echo.of_estimate(report.best, shares))
        return replace(
            report,
            cpu_s=time.process_time() - started_cpu_s + context.worker_cpu_s,
            wall_s=time.perf_counter() - started_s,
            num_workers=context.num_workers,
        )

    def _simulate(
        self, form: ClosedForm, report: ServingSearchReport, context: SearchContext
    ) -> ServingSearchReport:
        """Return the report with what was simulated: ranks, finalists and misses.

        Each is published when it is done: a miss at once, a finalist with its other loads.
        """
        selection, maker = FinalistSelection(form), make_candidates(form)
        outcomes: dict[int, list[LoadOutcome]] = {}
        while rows := selection.next_rows():
            context.update(0.35, f"{len(outcomes)} candidates simulated, {len(rows)} more to go")
            names = {row: selection.name(row) for row in rows}
            for row, (outcome,) in self._runs.run(maker, names, (1.0,), context):
                outcomes[row] = [outcome]
                selection.tell(row, outcome)
                if not outcome.probe.is_met:
                    context.publish(make_finalist(maker, (row, names[row]), 0, [outcome]))
        final = _report(selection.finish())
        rank = np.asarray(final.candidates.rank)
        met = selection.sort([row for row in outcomes if outcomes[row][0].probe.is_met])
        # Curves are to compare several.
        num_curves = form.request.num_curves if form.request.num_finalists > 1 else 0
        names = {row: selection.name(row) for row in met}
        without = dict.fromkeys(met[num_curves:], ())
        curves = self._runs.run(
            maker, {row: names[row] for row in met[:num_curves]}, OTHER_RATIOS, context
        )
        for num_done, (row, others) in enumerate(chain(without.items(), curves), 1):
            outcomes[row] += others
            name = (row, names[row])
            context.publish(make_finalist(maker, name, int(rank[row]), outcomes[row]))
            context.update(0.6 + 0.35 * num_done / len(met), f"{num_done} of {len(met)} finalists")
        return replace(
            final,
            sensitivities=report.sensitivities,
            finalists=tuple(
                make_finalist(maker, (row, selection.name(row)), int(rank[row]), outcomes[row])
                for row in (*met, *sorted(outcomes.keys() - names.keys()))
            ),
            num_simulated=len(outcomes),
            num_near=selection.late.num_near,
            num_near_simulated=selection.late.num_simulated,
            num_near_ruled_in=selection.late.num_ruled_in,
            num_near_ruled_out=selection.late.num_ruled_out,
        )

    def answer(self, request: ServingSearchRequest) -> ClosedForm:
        """Return the closed-form answer of a request.

        Raises:
            InvalidRequestError: the request cannot be answered; the message says what to change.
            UnknownDeviceError, UnknownPluginError: no such name.

        """
        space = resolve_space(request)
        _check(request, space)
        load = profile_load(request.scenario)
        return make_closed_form(
            request, space, load, self._cache.answer(request.scenario, space, load)
        )


def candidate_scenario(
    request: ServingSearchRequest, row: int, search: ServingSearch
) -> ServingScenario:
    """Return the deployment of a candidate by its place in the table of a request's report.

    The request is answered again in closed form, from what the search has kept of it.

    Raises:
        InvalidRequestError: there is no such candidate.

    """
    form = search.answer(request)
    if not 0 <= row < len(form.points):
        raise InvalidRequestError.of_field("candidate", f"there are {len(form.points)}, from 0")
    points = form.points.take(form.ranking.order[row : row + 1])
    name = name_of(points, 0, form.answers.engines, form.space)
    return make_candidates(form).scenario(row, name)


def make_candidates(form: ClosedForm) -> CandidateMaker:
    """Return what makes scenarios of the candidates, by their place in the table."""
    return CandidateMaker(
        request=form.request,
        space=form.space,
        answers=form.answers,
        load=form.load,
        points=form.points.take(form.ranking.order),
    )


def _check(request: ServingSearchRequest, space: SearchSpace) -> None:
    for profile, rules in dict.fromkeys((kind.profile, kind.rules) for kind in space.kinds):
        if not has_closed_form(EngineSpec(profile=profile).with_rules(rules).resolve()):
            raise InvalidRequestError.of_field(
                "space.profiles",
                f"{profile} has no steady state to search by: its batches run until their last"
                " request is done; leave it out, or simulate it",
            )
    if not space.kinds:
        raise InvalidRequestError.of_field(
            "space", f"no layout fits into {space.max_devices} devices: raise max_devices"
        )
    devices = {kind.device for kind in space.kinds}
    unpriced = [
        device
        for device in sorted(devices)
        if device not in request.space.usd_per_hour
        and not (device == request.scenario.device and request.scenario.device_usd_per_hour)
    ]
    if request.objective == "cost" and unpriced:
        raise InvalidRequestError.of_field(
            "space.usd_per_hour", f"to rank by cost, price {', '.join(unpriced)}"
        )


def _report(form: ClosedForm) -> ServingSearchReport:
    points, ranking = form.points.take(form.ranking.order), form.ranking
    figures = Figures(
        **{
            item.name: getattr(form.figures, item.name)[..., ranking.order]
            for item in fields(Figures)
        }
    )
    table = build_table(points, figures, form.answers.engines, form.space)
    table = replace(table, rank=ranking.rank)
    places = np.argsort(ranking.order)[ranking.leaders]
    leaders = [str(name) for name in table.name[places]]
    verdicts = Counter(points.verdict[~points.is_ok].tolist())
    verdicts.update(form.num_ruled_out)
    num_pairs = sum(form.num_ruled_out.values())
    num_distinct = len(points) + num_pairs
    report = ServingSearchReport(
        num_points=form.space.num_points,
        num_distinct=num_distinct,
        num_evaluated=int((~np.isin(points.verdict, NOT_ANSWERED)).sum()),
        num_ruled_out_by_verdict=dict(sorted(verdicts.items())),
        best=leaders[0] if leaders else "",
        ties=tuple(leaders[1:]),
        candidates=table,
        model_version=form.answers.model_version,
        request_json=json.dumps(schema.encode(form.request)),
    )
    return _with_least(report, table, form.request.target_rps)


def _with_least(
    report: ServingSearchReport, table: CandidateColumns, target_rps: float
) -> ServingSearchReport:
    """Return the report with the fewest devices and the least price that carry the target."""
    qualifies = np.asarray(table.rank) > 0
    if target_rps == 0 or not qualifies.any():
        return report
    rows = np.flatnonzero(qualifies)
    fewest = rows[np.argmin(np.asarray(table.num_devices)[rows])]
    prices = np.asarray(table.usd_per_hour)[rows]
    report = replace(
        report,
        min_devices=int(table.num_devices[fewest]),
        min_devices_by=str(table.name[fewest]),
    )
    if not prices.any():
        return report
    cheapest = rows[np.argmin(prices)]
    return replace(
        report,
        min_usd_per_hour=float(prices.min()),
        min_usd_per_hour_by=str(table.name[cheapest]),
    )
