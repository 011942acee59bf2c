"""Search the strategies of a mixed cluster: place, cut, answer in closed form, rank, simulate."""

import json
import time
from dataclasses import replace

import numpy as np

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.training_report import TrainingReport
from foretoken.domain.training_search import (
    TRAINING_OBJECTIVES,
    StrategyFinalist,
    TrainingSearchReport,
    TrainingSearchRequest,
)
from foretoken.simulator.grid import Ints
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.context import SearchContext
from foretoken.simulator.search.placement.cluster import MAX_ORDERS
from foretoken.simulator.search.placement.strategy import (
    PlacementSpace,
    fixed_axes,
    layer_period,
    with_alike_layers,
)
from foretoken.simulator.search.placement.survey import (
    PlacementAnswers,
    name_strategy,
    survey_placements,
)
from foretoken.simulator.search.placement.table import PlacementFigures, build_table, list_cells
from foretoken.simulator.search.training.finalists import (
    StrategyRuns,
    encode_scenario,
    weigh_simulated,
)


def count_placements(request: TrainingSearchRequest) -> int:
    """Return how many points a search over a mixed cluster would look at.

    Raises:
        UnknownDeviceError, UnknownTopologyError: no such name.
        InvalidRequestError: kinds of nodes that cannot be used.

    """
    return PlacementSpace(request).num_points


def search_placements(
    request: TrainingSearchRequest, predictor: LatencySource, context: SearchContext
) -> TrainingSearchReport:
    """Return the ranked strategies of a mixed cluster, the best of them simulated.

    Raises:
        CancelledJobError: the job was cancelled.
        InvalidRequestError: the request cannot be answered; the message says what to change.
        UnknownDeviceError, UnknownPluginError, UnknownTopologyError: no such name.

    """
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    _check(request)
    space = PlacementSpace(request)
    answers = survey_placements(space, predictor, context.update)
    report, order = _report(request, answers)
    closed_form_s = time.process_time() - started_cpu_s
    if request.num_finalists and len(order):
        report = _simulate(request, report, (answers, order), predictor, context)
    return replace(
        report,
        closed_form_s=closed_form_s,
        cpu_s=time.process_time() - started_cpu_s + context.worker_cpu_s,
        wall_s=time.perf_counter() - started_s,
        num_workers=context.num_workers,
    )


def _check(request: TrainingSearchRequest) -> None:
    space, scenario = request.space, request.scenario
    unpriced = sorted(
        {
            group.device
            for group in space.node_groups
            if not (group.usd_per_hour or space.usd_per_hour.get(group.device))
        }
    )
    fixed = ", ".join(fixed_axes(space, scenario))
    given = [
        name
        for name in ("stage_layers", "stage_devices", "stage_topologies", "module_times")
        if getattr(scenario, name)
    ]
    InvalidRequestError.check(
        "search",
        {
            "objective": (
                request.objective != "cost" or not unpriced,
                f"to rank by cost, price {', '.join(unpriced)}: `usd_per_hour` of its node group",
            ),
            "space": (not fixed, f"a mixed cluster is not searched over {fixed}; leave it out"),
            "scenario": (not given, f"the search sets {', '.join(given)}; leave it out"),
            "recompute_layers": (
                scenario.recompute_layers == 0,
                "stages have different numbers of layers; leave it 0",
            ),
        },
    )


def _report(
    request: TrainingSearchRequest, answers: PlacementAnswers
) -> tuple[TrainingSearchReport, Ints]:
    """Return the report without finalists, and the rows of its candidates."""
    figures, strategies = PlacementFigures(answers), answers.strategies
    space = answers.space
    report = TrainingSearchReport(
        num_points=answers.num_points,
        num_legal=answers.num_legal,
        num_fitting=len(strategies),
        num_shapes=answers.num_shapes,
        ruled_out=answers.ruled_out,
        model_version=answers.model_version,
        notes=(*answers.notes, *_notes(request, space)),
        request_json=json.dumps(schema.encode(request)),
    )
    if not strategies:
        return report, np.zeros(0, dtype=np.int64)
    ranking = figures.rank(request.objective)
    is_priced = bool(np.all(figures.usd_per_hour > 0))
    firsts = {
        objective: int(figures.rank(objective).order[0])
        for objective in TRAINING_OBJECTIVES
        if objective != "cost" or is_priced
    }
    listed = ranking.order[: request.max_candidates]
    missing = [row for row in dict.fromkeys(firsts.values()) if row not in listed]
    rows = np.concatenate([listed, np.array(missing, dtype=np.int64)])
    rank_of = np.empty(len(strategies), dtype=np.int64)
    rank_of[ranking.order] = ranking.rank
    names = {row: name_strategy(strategies[row].strategy, space) for row in firsts.values()}
    return (
        replace(
            report,
            best={objective: names[row] for objective, row in firsts.items()},
            ties=tuple(
                name_strategy(strategies[row].strategy, space) for row in ranking.ties.tolist()[1:]
            ),
            candidates=build_table(figures, rows, rank_of[rows]),
            cells=list_cells(figures),
        ),
        rows,
    )


def _notes(request: TrainingSearchRequest, space: PlacementSpace) -> tuple[str, ...]:
    notes, model = [], request.scenario.model
    if with_alike_layers(model) != model or layer_period(model) > 1:
        notes.append(
            f"the layers of {model.name} differ: the closed form takes a typical one for all of"
            " them, the simulated strategies have them as they are"
        )
    if request.has_sensitivity:
        notes.append("what changes of links, memory or batch would do is not asked here")
    if space.num_orders_left:
        notes.append(
            f"{space.num_orders_left:,} orders of stages were not tried: where a pipeline has more"
            f" than {MAX_ORDERS}, the stages of a kind of node stay together"
        )
    return tuple(notes)


def _simulate(
    request: TrainingSearchRequest,
    report: TrainingSearchReport,
    listed: tuple[PlacementAnswers, Ints],
    predictor: LatencySource,
    context: SearchContext,
) -> TrainingSearchReport:
    """Return the report with its first candidates simulated event by event."""
    answers, order = listed
    cuts = [answers.strategies[row] for row in order[: request.num_finalists]]
    scenarios = [answers.space.scenario_of(cut.strategy, cut.stage_layers) for cut in cuts]
    found: dict[int, StrategyFinalist] = {}
    message = (
        f"{report.num_points:,} points: {report.num_legal:,} can run, {report.num_fitting:,} fit"
    )
    context.update(0.35, f"{message}; simulating {len(cuts)}")
    for place, simulated in StrategyRuns(predictor).run(scenarios, context):
        found[place] = StrategyFinalist(
            candidate=place,
            name=str(report.candidates.name[place]),
            closed_form_ms=float(report.candidates.step_time_ms[place]),
            report=simulated,
            scenario_json=encode_scenario(scenarios[place]),
        )
        context.publish(found[place])
        context.update(
            0.35 + 0.6 * len(found) / len(cuts), f"{message}; simulated {len(found)} of {len(cuts)}"
        )
    finalists = sorted(
        found.values(), key=lambda item: _placing(request.objective, answers, order, item)
    )
    rank = 0
    ranked = []
    for item in finalists:
        fits = item.report.feasibility.is_feasible
        rank += fits
        ranked.append(replace(item, rank=rank if fits else 0))
    return replace(report, finalists=tuple(ranked), num_simulated=len(ranked))


def _placing(
    objective: str, answers: PlacementAnswers, order: Ints, finalist: StrategyFinalist
) -> tuple[bool, float]:
    """Return what finalists are sorted by: those that fit first, the best of them first."""
    report: TrainingReport = finalist.report
    strategy = answers.strategies[order[finalist.candidate]].strategy
    value = weigh_simulated(
        report,
        objective,
        strategy.pipeline.num_devices,
        strategy.global_batch_size,
        answers.space.usd_per_hour(strategy.pipeline),
    )
    return not report.feasibility.is_feasible, value
