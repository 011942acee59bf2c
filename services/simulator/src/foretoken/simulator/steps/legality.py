"""Which strategies can run: rules over cases, and the words of each for a case that breaks it.

What an axis of the layout can cut is in `domain/parallelism`, what micro batches and chunks a
schedule has an order for in its own file, what a framework can do in `trainer_limit.py`. The rest
is here. `judge_legality` gives every case a verdict; the checks of a scenario list the same limits.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from foretoken.domain.lowering.lower import list_limits
from foretoken.domain.lowering.options import LayoutCases
from foretoken.domain.requests.limit import Limit, list_broken
from foretoken.domain.requests.training_search import WEIGHT_PARALLELS
from foretoken.simulator.grid import Flags
from foretoken.simulator.rank import count_parts
from foretoken.simulator.steps.pipelines.schedule import PipelineSchedule, find_schedule
from foretoken.simulator.steps.sharding import ZERO_STAGES
from foretoken.simulator.steps.stage_operators import training_options
from foretoken.simulator.steps.strategies import RECOMPUTE_MODES, Strategies
from foretoken.simulator.steps.trainer_limit import break_bound

LEGAL = 0
# The verdict of what the framework cannot do.
TRAINER = "trainer"
_DEVICES = "devices"
# What a case is ruled out for where it is beyond several limits: the first of these.
VERDICTS = (
    *(_DEVICES, "batch", "layers", "heads", "mlp_width", "sequence", "experts", "weight_parallel"),
    *("shards", "recompute_layers", "pipeline_schedule", TRAINER),
)
_NONE = RECOMPUTE_MODES.index("none")
_TOKEN_SPLITS = [WEIGHT_PARALLELS.index(name) for name in ("msp", "fsp")]


def judge_legality(cases: Strategies) -> np.ndarray:
    """Return the verdict of each case: 0 where it can run, else 1 + its place in `VERDICTS`."""
    verdict: np.ndarray = np.zeros(len(cases), dtype=np.int8)
    is_beyond = device_limit(cases).is_broken
    verdict[is_beyond] = 1 + VERDICTS.index(_DEVICES)
    rows = np.flatnonzero(~is_beyond)
    if len(rows):
        verdict[rows] = _judge(cases.take(rows))
    return verdict


def _judge(cases: Strategies) -> np.ndarray:
    legal = 1 + len(VERDICTS)
    first: np.ndarray = np.full(len(cases), legal, dtype=np.int8)
    for limits in _LIMITS:
        for limit in limits(cases):
            number = VERDICTS.index(limit.subject) + 1 if limit.subject in VERDICTS else legal
            np.minimum(first, number, out=first, where=limit.is_broken)
    return np.where(first == legal, LEGAL, first)


def device_limit(cases: Strategies) -> Limit:
    """Return which layouts leave devices over."""
    return Limit(
        _DEVICES,
        cases.num_devices % (cases.tp * cases.pp * cases.cp) != 0,
        lambda: (
            f"tp {cases.tp[0]} x pp {cases.pp[0]} x cp {cases.cp[0]} does not divide the"
            f" {cases.num_devices[0]} devices"
        ),
        "layout",
    )


def batch_limits(cases: Strategies) -> Iterator[Limit]:
    """Yield what does not cut a global batch and its sequences."""
    scenario, step_samples = cases.source.scenario, cases.dp * cases.micro_batch_size
    model, length = scenario.model, scenario.sequence_length
    yield Limit(
        "batch",
        cases.global_batch_size % step_samples != 0,
        lambda: (
            f"{cases.global_batch_size[0]} is not a multiple of dp times micro_batch_size,"
            f" {step_samples[0]}"
        ),
        "global_batch_size",
    )
    yield Limit(
        "sequence",
        model.position == "learned" and length > model.max_position,
        lambda: f"{model.name} has {model.max_position} positions",
        "sequence_length",
    )
    yield Limit(
        "sequence",
        length % cases.cp != 0,
        lambda: f"is not a multiple of cp, {cases.cp[0]}",
        "sequence_length",
    )
    yield Limit(
        "sequence",
        (cases.sequence_parallel > 0) & (length // cases.cp % cases.tp != 0),
        lambda: f"a rank's part is not a multiple of tp, {cases.tp[0]}",
        "sequence_length",
    )


def round_limit(cases: Strategies) -> Limit:
    """Return which have other chunks per rank than their schedule needs."""
    needed = cases.needed_chunks
    return Limit(
        "pipeline_schedule",
        (needed > 0) & (cases.virtual_stages != 1) & (cases.virtual_stages != needed),
        lambda: f"{cases.source.pipeline_schedules[0]} has {needed[0]} per rank",
        "virtual_stages",
    )


def chunk_limit(cases: Strategies) -> Limit:
    """Return which cut a model into more chunks than it has layers, embedding and head."""
    model, num_chunks = cases.source.scenario.model, cases.pp * cases.chunks
    return Limit(
        "layers",
        num_chunks > count_parts(model.num_layers),
        lambda: (
            f"{num_chunks[0]} chunks of layers are more than the {model.num_layers} layers of"
            f" {model.name} with its embedding and its head"
        ),
        "layout.pp",
    )


def layout_limits(cases: Strategies) -> Iterator[Limit]:
    """Yield what the axes of a layout cannot cut of a model."""
    scenario = cases.source.scenario
    splits = (cases.sequence_parallel > 0) | np.isin(cases.weight_parallel, _TOKEN_SPLITS)
    yield from list_limits(
        LayoutCases(
            model=scenario.model,
            tp=cases.tp,
            pp=cases.pp,
            dp=cases.dp,
            cp=cases.cp,
            ep=cases.ep,
            training=training_options(scenario, scenario.trainer.resolve()).training,
            micro_batch_size=cases.micro_batch_size,
            splits_tokens=splits,
            is_isp=cases.is_isp,
            weight_degree=cases.weight_parts,
        )
    )


def shard_limits(cases: Strategies) -> Iterator[Limit]:
    """Yield which states cannot be split over ranks: by ZeRO, or by ZeRO and `isp` both."""
    replicas, shards = cases.replicas, np.maximum(1, cases.shard_degree)
    has_replicas = cases.stage_ranks % cases.weight_parts == 0
    yield Limit(
        "shards",
        (cases.shard_degree > 0) & (cases.zero_stage == 0),
        lambda: "needs zero_stage 1, 2 or 3",
        "shard_degree",
    )
    yield Limit(
        "weight_parallel",
        cases.is_isp & (cases.zero_stage == max(ZERO_STAGES)),
        lambda: "3 splits weights, and so does weight_parallel isp",
        "zero_stage",
    )
    yield Limit(
        "shards",
        has_replicas & (replicas % shards != 0),
        lambda: f"{shards[0]} does not divide the {replicas[0]} ranks that hold the same",
        "shard_degree",
    )


def recompute_limit(cases: Strategies) -> Limit:
    """Return which are to recompute more layers than a chunk has."""
    most = cases.max_layers
    return Limit(
        "recompute_layers",
        (cases.recompute != _NONE) & (cases.source.scenario.recompute_layers > most),
        lambda: f"no chunk has more than {most[0]} layers",
    )


def order_limits(cases: Strategies) -> Iterator[Limit]:
    """Yield which micro batches and chunks the schedules have no order for."""
    for code, name in enumerate(cases.source.pipeline_schedules):
        schedule, is_own = find_schedule(name), cases.pipeline_schedule == code
        if not is_own.any():
            continue
        if schedule.limits is None:
            yield _ask(schedule, cases, is_own)
            continue
        for limit in schedule.limits(cases.pp, cases.num_micro_batches, cases.chunks):
            yield replace(
                limit,
                subject="pipeline_schedule",
                field=limit.subject,
                is_broken=is_own & limit.is_broken,
                reason=lambda: _say_order(cases),
            )


def _say_order(cases: Strategies) -> str:
    """Return why the schedule of the first case has no order for its numbers."""
    limits = find_schedule(cases.source.pipeline_schedules[cases.pipeline_schedule[0]]).limits
    numbers = (int(column[0]) for column in (cases.pp, cases.num_micro_batches, cases.chunks))
    return next((item.description for item in list_broken(limits(*numbers) if limits else ())), "")


def _ask(schedule: PipelineSchedule, cases: Strategies, is_own: Flags) -> Limit:
    """Ask a schedule that names no limits, once for each of the few combinations there are."""
    asked = np.stack((cases.pp, cases.num_micro_batches, cases.chunks), axis=1)[is_own]
    combinations, places = np.unique(asked, axis=0, return_inverse=True)
    refusals = [schedule.find_refusal(*row) for row in combinations.tolist()]
    broken = np.zeros(len(cases), dtype=np.bool_)
    broken[is_own] = np.array([bool(why) for why in refusals])[places.ravel()]
    return Limit("pipeline_schedule", broken, lambda: refusals[0])


def trainer_limits(cases: Strategies) -> Iterator[Limit]:
    """Yield what frameworks cannot do; `trainer_limit` has the words."""
    for bound in cases.source.bounds:
        if bound.can.has or bound.can.conflicts:
            yield Limit(TRAINER, break_bound(cases, bound), lambda: "")


_LIMITS: tuple[Callable[[Strategies], Iterator[Limit]], ...] = (
    batch_limits,
    layout_limits,
    shard_limits,
    lambda cases: iter((round_limit(cases), chunk_limit(cases), recompute_limit(cases))),
    order_limits,
    trainer_limits,
)
