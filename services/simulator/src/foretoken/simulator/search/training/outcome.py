"""The report of a search: counts with reasons, ranks, fronts, the table of the best.

Reasons are in the words in which a simulation refuses a strategy.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    TRAINING_OBJECTIVES,
    WEIGHT_PARALLELS,
    RuledOut,
    StrategyColumns,
    StrategyFinalist,
    TrainingSearchReport,
)
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.search.training.answers import Answers, objective_values
from foretoken.simulator.search.training.canonical import REASONS
from foretoken.simulator.search.training.closed_form import ClosedForm
from foretoken.simulator.search.training.survey import MEMORY, Survey, find_fronts
from foretoken.simulator.software_note import list_trainer_notes
from foretoken.simulator.steps.legality import TRAINER, device_limit
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.strategies import RECOMPUTE_MODES, Strategies
from foretoken.simulator.steps.trainer_limit import list_lacks
from foretoken.simulator.training.memory_plan import plan_memory
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario


def build_table(answers: Answers, rank: Ints, prices: Floats) -> StrategyColumns:
    """Return the columns of strategies in their order; the fronts are of those given."""
    strategies = answers.strategies
    source = strategies.source
    is_front_cost, is_front_memory = find_fronts(answers, prices)
    return StrategyColumns(
        name=_texts(strategies.names(np.arange(len(answers)))),
        device=_pick(source.devices, strategies.device),
        num_devices=strategies.num_devices,
        tp=strategies.tp,
        pp=strategies.pp,
        virtual_stages=strategies.virtual_stages,
        dp=strategies.dp,
        cp=strategies.cp,
        ep=strategies.ep,
        micro_batch_size=strategies.micro_batch_size,
        num_micro_batches=strategies.num_micro_batches,
        global_batch_size=strategies.global_batch_size,
        sequence_parallel=strategies.sequence_parallel.astype(np.bool_),
        zero_stage=strategies.zero_stage,
        shard_degree=strategies.shard_degree,
        overlap=_texts(strategies.overlaps()),
        recompute=_pick(RECOMPUTE_MODES, strategies.recompute),
        weight_parallel=_pick(WEIGHT_PARALLELS, strategies.weight_parallel),
        weight_degree=strategies.weight_degree,
        pipeline_schedule=_pick(source.pipeline_schedules, strategies.pipeline_schedule),
        placement=_texts(strategies.placements()),
        stage_layers=_texts(strategies.stage_cuts()),
        step_time_ms=answers.step_us / US_PER_MS,
        step_time_low_ms=answers.low_us / US_PER_MS,
        step_time_high_ms=answers.high_us / US_PER_MS,
        tokens_per_s=answers.tokens_per_s,
        tokens_per_s_per_gpu=answers.tokens_per_s_per_gpu,
        mfu_ratio=answers.mfu_ratio,
        bubble_ratio=answers.bubble_ratio,
        exposed_communication_ratio=answers.exposed_ratio,
        reserved_bytes=answers.reserved_bytes,
        margin_bytes=answers.margin_bytes,
        usd_per_step=answers.usd_per_step(prices),
        usd_per_billion_tokens=answers.usd_per_billion_tokens(prices),
        rank=rank,
        is_pareto_cost=is_front_cost,
        is_pareto_memory=is_front_memory,
    )


def _texts(words: Sequence[str]) -> np.ndarray:
    return np.array(words, dtype=object)


def _pick(names: Sequence[str], codes: Ints) -> np.ndarray:
    chosen: np.ndarray = np.array(names, dtype=object)[codes]
    return chosen


def explain(strategies: Strategies, row: int) -> str:
    """Return why the simulator cannot run a strategy, in its words; empty where it can."""
    one = strategies.take(np.array([row]))
    limit = device_limit(one)
    if limit.is_broken[0]:
        return f"{limit.field}: {limit.reason()}"
    return _find_problem(one.scenario(0)) or _find_lack(one)


def _find_lack(one: Strategies) -> str:
    """Return what a framework has not of a strategy, in its words."""
    for bound in one.source.bounds:
        if lacks := list_lacks(one, bound):
            return InvalidRequestError.of_violations(lacks).message
    return ""


def explain_cut(one: Strategies) -> str:
    """Return why no strategy of a space has the values of this one, which may break other rules."""
    return _find_lack(one) or (
        f"{one.source.bounds[0].name}: hides the same with less overlap, what differs cannot be"
        " turned on or off"
    )


def _find_problem(scenario: TrainingScenario) -> str:
    """Return what `simulate_training` refuses a scenario for; empty where nothing is wrong.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.

    """
    schedule = find_schedule(scenario.pipeline_schedule)
    try:
        check_scenario(scenario)
        chunks = schedule.virtual_stages or scenario.virtual_stages
        scenario = replace(scenario, virtual_stages=chunks)
        check_chunks(chunk_ranks(scenario), scenario)
        schedule.orders(scenario.layout.pp, scenario.num_micro_batches, chunks)
    except InvalidRequestError as err:
        return err.message
    return ""


_SIMULATED_MEMORY = "memory, simulated"


def describe(survey: Survey) -> str:
    """Return how many points were counted, in words."""
    return f"{survey.num_points:,} points: {survey.num_legal:,} can run, {survey.num_fitting:,} fit"


def make_report(form: ClosedForm) -> TrainingSearchReport:
    """Return what the closed form says: counts, ranks, fronts."""
    request, survey = form.request, form.survey
    report = TrainingSearchReport(
        num_points=survey.num_points,
        num_legal=survey.num_legal,
        num_fitting=survey.num_fitting,
        num_shapes=form.num_shapes,
        ruled_out=tuple(
            RuledOut(
                verdict=verdict,
                num_strategies=count,
                example=example.name(0),
                reason=survey.reasons.get(verdict) or _explain(verdict, example),
            )
            for verdict, (count, example) in survey.verdicts.items()
        ),
        cells=survey.cells,
        model_version=form.model_version,
        request_json=json.dumps(schema.encode(request)),
    )
    if form.ranked is None:
        return replace(report, notes=_notes(form, 0))
    names = form.ranked.strategies
    candidates = _list_candidates(form, form.ranked)
    return replace(
        report,
        best=_find_best(form, form.ranked, ()),
        ties=tuple(names.names(form.ties)),
        candidates=candidates,
        notes=_notes(form, len(candidates.name)),
    )


def with_finalists(
    report: TrainingSearchReport, form: ClosedForm, finalists: Sequence[StrategyFinalist]
) -> TrainingSearchReport:
    """Return a report with what was simulated.

    What the simulation finds too large is out; the first of the others is the best.
    """
    if form.ranked is None:
        return report
    failed = {item.candidate: item for item in finalists if item.rank == 0}
    if failed:
        first = min(failed)
        out = RuledOut(
            verdict=_SIMULATED_MEMORY,
            num_strategies=len(failed),
            example=failed[first].name,
            reason=failed[first].report.feasibility.reason,
        )
        report = replace(
            report,
            num_fitting=report.num_fitting - len(failed),
            ruled_out=(*report.ruled_out, out),
            candidates=_rule_out(report.candidates, failed),
        )
    best = _find_best(form, form.ranked, failed)
    names = [best.get(form.request.objective, ""), *_tie_names(form, failed)]
    winner = next((item.name for item in finalists if item.rank == 1), "")
    if winner:
        best[form.request.objective] = winner
    return replace(
        report,
        best=best,
        ties=tuple(name for name in dict.fromkeys(names) if name not in ("", winner))
        if len(names) > 1
        else (),
        finalists=tuple(finalists),
        num_simulated=len(finalists),
    )


def _tie_names(form: ClosedForm, failed: Collection[int]) -> list[str]:
    if form.ranked is None or not len(form.ties):
        return []
    rows = [row for row in (0, *form.ties.tolist()) if row not in failed]
    return form.ranked.strategies.names(np.array(rows, dtype=np.int64)) if rows else []


def _find_best(form: ClosedForm, ranked: Answers, failed: Collection[int]) -> dict[str, str]:
    """Return the name of the first by each objective; by cost where all is priced."""
    found = {}
    for objective in TRAINING_OBJECTIVES:
        if objective == "cost" and not form.prices.all():
            continue
        values = objective_values(ranked, objective, form.prices)[0]
        order = np.lexsort((ranked.step_us, values))
        if objective == form.request.objective:
            order = np.arange(len(ranked))
        row = next((row for row in order.tolist() if row not in failed), None)
        if row is not None:
            found[objective] = ranked.strategies.name(row)
    return found


def _list_candidates(form: ClosedForm, ranked: Answers) -> StrategyColumns:
    """Return the first of the ranking, then what ties, is best otherwise, or on a front."""
    num_first = min(form.num_listed, len(ranked))
    is_extra = np.zeros(len(ranked), dtype=np.bool_)
    for front in find_fronts(ranked, form.prices):
        is_extra |= front
    for objective in TRAINING_OBJECTIVES:
        values = objective_values(ranked, objective, form.prices)[0]
        is_extra[np.lexsort((ranked.step_us, values))[0]] = True
    is_extra[form.ties] = True
    is_extra[:num_first] = False
    rows = np.concatenate((np.arange(num_first), np.flatnonzero(is_extra)))
    chosen = ranked.take(rows)
    return build_table(chosen, _ranks(form, ranked, rows, num_first), form.prices)


def _ranks(form: ClosedForm, ranked: Answers, rows: Ints, num_first: int) -> Ints:
    """Return the places of rows among all that fit: of the first in turn, then by value."""
    rank = rows + 1
    values = objective_values(ranked, form.request.objective, form.prices)[0]
    rank[num_first:] = 1 + form.survey.count_better(values[rows[num_first:]])
    return rank


def _rule_out(candidates: StrategyColumns, failed: Collection[int]) -> StrategyColumns:
    """Return the columns with no rank for some rows; those after them move up."""
    rank = np.array(candidates.rank)
    is_out = np.zeros(len(rank), dtype=np.bool_)
    is_out[list(failed)] = True
    moved = np.maximum(1, rank - np.cumsum(is_out))
    return replace(candidates, rank=np.where(is_out, 0, moved))


def _explain(verdict: str, example: Strategies) -> str:
    """Return in full why a strategy is out."""
    if verdict == MEMORY:
        return plan_memory(example.scenario(0)).feasibility.reason
    if verdict == TRAINER:
        return explain_cut(example)
    return REASONS.get(verdict) or explain(example, 0)


def _notes(form: ClosedForm, num_listed: int) -> tuple[str, ...]:
    """Return what a reader must know of the answer."""
    request, survey = form.request, form.survey
    scenario = request.scenario
    notes = list(form.notes)
    if num_listed < survey.num_fitting:
        notes.append(
            f"of {survey.num_fitting:,} strategies that fit {num_listed:,} are listed:"
            " the best, what ties with the first, and those on a front"
        )
    notes += list_trainer_notes(scenario)
    if not form.prices.all():
        notes.append(
            "without a price per device and hour there are no costs: --price, --price-list, or"
            " usd_per_hour of the space"
        )
    if scenario.straggler_ratio or scenario.network_spread_ratio or scenario.overflow_ratio:
        notes.append(
            "the closed form is of the typical step: stragglers, a busy network and skipped updates"
            " are simulated alone"
        )
    if survey.num_points and not survey.num_legal:
        notes.append("no strategy of the space can run: see why, and widen it")
    elif survey.num_legal and not survey.num_fitting:
        notes.append("no strategy fits the memory: try more devices, tp, pp, ZeRO or recomputation")
    return tuple(notes)
