"""Which strategies can run, and of the others why not: every point under one verdict.

The rules are those of `scenario_checks`, of the layout checks of lowering and of the schedules,
over columns; a property test holds them to what the simulator says. Their words are the
simulator's: of each verdict one strategy is put to the checks themselves.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.training_search import WEIGHT_PARALLELS
from foretoken.simulator.grid import Flags, Ints
from foretoken.simulator.rank import chunk_ranks, count_parts
from foretoken.simulator.steps.strategies import RECOMPUTE_MODES, Strategies
from foretoken.simulator.steps.trainer_limit import break_bound, list_lacks
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario
from foretoken.simulator.training.schedule import PipelineSchedule, find_schedule
from foretoken.simulator.training.zero import ZERO_STAGES

LEGAL = 0
# The verdict of what the framework cannot do.
TRAINER = "trainer"
_NONE = RECOMPUTE_MODES.index("none")
_MSP, _FSP, _ISP = (WEIGHT_PARALLELS.index(name) for name in ("msp", "fsp", "isp"))


def judge_legality(strategies: Strategies) -> np.ndarray:
    """Return the verdict of each strategy: 0 where it can run, else 1 + its place in `VERDICTS`.

    The first rule that is broken counts.
    """
    verdict: np.ndarray = np.zeros(len(strategies), dtype=np.int8)
    breaks_devices = _breaks_devices(strategies)
    verdict[breaks_devices] = 1
    rows = np.flatnonzero(~breaks_devices)
    rest = strategies.take(rows)
    of_rest = np.zeros(len(rest), dtype=np.int8)
    for number, rule in enumerate(_RULES.values(), 2):
        of_rest[(of_rest == LEGAL) & rule(rest)] = number
    verdict[rows] = of_rest
    return verdict


def explain(strategies: Strategies, row: int) -> str:
    """Return why the simulator cannot run a strategy, in its words; empty where it can."""
    one = strategies.take(np.array([row]))
    if _breaks_devices(one)[0]:
        degrees = f"tp {one.tp[0]} x pp {one.pp[0]} x cp {one.cp[0]}"
        return f"layout: {degrees} does not divide the {one.num_devices[0]} devices"
    return find_problem(one.scenario(0)) or _find_lack(one)


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


def find_problem(scenario: TrainingScenario) -> str:
    """Return what `simulate_training` refuses a scenario for; empty where nothing is wrong.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.

    """
    schedule = find_schedule(scenario.pipeline_schedule)
    try:
        check_scenario(scenario, schedule)
        chunks = schedule.virtual_stages or scenario.virtual_stages
        scenario = replace(scenario, virtual_stages=chunks)
        check_chunks(chunk_ranks(scenario), scenario)
        schedule.orders(scenario.layout.pp, scenario.num_micro_batches, chunks)
    except InvalidRequestError as err:
        return err.message
    return ""


def _breaks_devices(strategies: Strategies) -> Flags:
    used = strategies.tp * strategies.pp * strategies.cp
    broken: Flags = strategies.num_devices % used != 0
    return broken


def _breaks_batch(strategies: Strategies) -> Flags:
    samples = strategies.dp * strategies.micro_batch_size
    broken: Flags = strategies.global_batch_size % samples != 0
    return broken


def _breaks_sequence(strategies: Strategies) -> Flags:
    """Sequences that are too long, or cannot be cut for cp and by tokens over tp."""
    scenario = strategies.source.scenario
    model, length = scenario.model, scenario.sequence_length
    tp, cp = strategies.tp, strategies.cp
    is_isp = strategies.is_isp
    splits = strategies.sequence_parallel.astype(np.bool_)
    splits_in_layers = splits | np.isin(strategies.weight_parallel, (_MSP, _FSP))
    pieces = cp * np.where(is_isp, tp, 1) * np.where(cp > 1, 2, 1)
    part = length // cp
    broken: Flags = length % pieces != 0
    broken |= splits & (part % tp != 0)
    broken |= ~is_isp & splits_in_layers & (tp > 1) & (part % tp != 0)
    if model.moe is not None:
        broken |= (strategies.micro_batch_size * length // cp) % tp != 0
    if model.position == "learned" and length > model.max_position:
        broken[:] = True
    return broken


def _breaks_layers(strategies: Strategies) -> Flags:
    num_parts = count_parts(strategies.source.scenario.model.num_layers)
    broken: Flags = strategies.pp * strategies.chunks > num_parts
    return broken


def _breaks_heads(strategies: Strategies) -> Flags:
    """Heads that tp, or an exchange of heads, does not divide; kernels that cannot be split."""
    scenario, tp, cp = strategies.source.scenario, strategies.tp, strategies.cp
    model, trainer = scenario.model, scenario.trainer.resolve()
    is_isp = strategies.is_isp
    broken: Flags = model.num_heads % tp != 0
    # Latent attention has no key heads of its own, which only exchanges of heads know.
    broken |= _breaks_key_heads(model.num_kv_heads, tp) & ~(is_isp & (model.mla is not None))
    if trainer.attention != "flash":
        broken |= (cp > 1) | (is_isp & (tp > 1))
    if scenario.context_parallel == "all_to_all":
        degree = tp * cp
        exchanged = model.num_heads % degree != 0
        if model.mla is None:
            exchanged |= _breaks_key_heads(model.num_kv_heads, degree)
        broken |= (cp > 1) & exchanged
    return broken


def _breaks_key_heads(num_heads: int, degree: Ints) -> Flags:
    broken: Flags = (num_heads % degree != 0) & (degree % num_heads != 0)
    return broken


def _breaks_widths(strategies: Strategies) -> Flags:
    model, tp = strategies.source.scenario.model, strategies.tp
    moe = model.moe
    widths = [model.intermediate] if moe is None or moe.num_dense_layers else []
    if moe is not None and moe.num_shared_experts:
        widths.append(moe.num_shared_experts * moe.expert_intermediate)
    broken: Flags = np.zeros(len(strategies), dtype=np.bool_)
    for width in widths:
        broken |= width % tp != 0
    broken &= strategies.weight_parallel != _ISP
    return broken


def _breaks_experts(strategies: Strategies) -> Flags:
    ep, moe = strategies.ep, strategies.source.scenario.model.moe
    if moe is None:
        return np.asarray(ep > 1, dtype=np.bool_)
    width = strategies.expert_width
    broken: Flags = moe.num_experts % ep != 0
    broken |= strategies.stage_ranks % (width * ep) != 0
    broken |= moe.expert_intermediate % width != 0
    return broken


def _breaks_weight_shares(strategies: Strategies) -> Flags:
    """Weights that `isp` cannot split, or that ZeRO splits too."""
    is_isp = strategies.is_isp
    broken = strategies.stage_ranks % strategies.weight_parts != 0
    broken |= strategies.zero_stage == max(ZERO_STAGES)
    if strategies.source.scenario.model.moe is not None:
        broken[:] = True
    return np.asarray(is_isp & broken, dtype=np.bool_)


def _breaks_shards(strategies: Strategies) -> Flags:
    """States that are to be split over ranks that do not divide those that hold the same."""
    replicas = strategies.replicas
    broken = replicas % np.maximum(1, strategies.shard_degree) != 0
    broken |= (strategies.shard_degree > 0) & (strategies.zero_stage == 0)
    return np.asarray(broken, dtype=np.bool_)


def _breaks_recompute(strategies: Strategies) -> Flags:
    scenario = strategies.source.scenario
    num_chunks = strategies.pp * strategies.chunks
    most = -(-scenario.model.num_layers // num_chunks)
    broken: Flags = (strategies.recompute != _NONE) & (scenario.recompute_layers > most)
    return broken


def _breaks_schedule(strategies: Strategies) -> Flags:
    broken: Flags = np.zeros(len(strategies), dtype=np.bool_)
    for code, name in enumerate(strategies.source.pipeline_schedules):
        rows = np.flatnonzero(strategies.pipeline_schedule == code)
        if len(rows):
            broken[rows] = _breaks_order(strategies.take(rows), find_schedule(name))
    return broken


def _breaks_order(strategies: Strategies, schedule: PipelineSchedule) -> Flags:
    """Return which micro batches and chunks a schedule has no order for."""
    needed = schedule.virtual_stages
    wrong: Flags = np.zeros(len(strategies), dtype=np.bool_)
    if needed:
        wrong = ~np.isin(strategies.virtual_stages, (1, needed))
    rule = _ORDER_RULES.get(schedule.name)
    if rule is not None:
        return wrong | rule(strategies)
    # A schedule of somebody else is asked, once for each of the few combinations.
    asked = np.stack((strategies.pp, strategies.num_micro_batches, strategies.chunks), axis=1)
    combinations, places = np.unique(asked[~wrong], axis=0, return_inverse=True)
    refused = [not _has_order(schedule, *row) for row in combinations.tolist()]
    wrong[~wrong] = np.array(refused, dtype=np.bool_)[places.ravel()]
    return wrong


def _has_order(schedule: PipelineSchedule, num_ranks: int, num_micro: int, chunks: int) -> bool:
    try:
        schedule.orders(num_ranks, num_micro, chunks)
    except InvalidRequestError:
        return False
    return True


def _runs_always(strategies: Strategies) -> Flags:
    return np.zeros(len(strategies), dtype=np.bool_)


def _breaks_interleaved(strategies: Strategies) -> Flags:
    broken: Flags = strategies.num_micro_batches % strategies.pp != 0
    broken &= strategies.virtual_stages > 1
    return broken


def _breaks_dualpipe(strategies: Strategies) -> Flags:
    pp, num_micro = strategies.pp, strategies.num_micro_batches
    broken: Flags = (pp % 2 != 0) | (num_micro % 2 != 0) | (num_micro < 2 * pp)
    return broken


_ORDER_RULES: dict[str, Callable[[Strategies], Flags]] = {
    "gpipe": _runs_always,
    "one_f_one_b": _runs_always,
    "zero_bubble_h1": _runs_always,
    "zero_bubble_v": _runs_always,
    "interleaved": _breaks_interleaved,
    "dualpipe": _breaks_dualpipe,
}


def _breaks_trainer(strategies: Strategies) -> Flags:
    bounds = strategies.source.bounds
    if not any(bound.can.has or bound.can.conflicts for bound in bounds):
        return np.zeros(len(strategies), dtype=np.bool_)
    broken: Flags = np.logical_or.reduce([break_bound(strategies, bound) for bound in bounds])
    return broken


# In the order in which they are looked at, after that of the devices.
_RULES: dict[str, Callable[[Strategies], Flags]] = {
    "batch": _breaks_batch,
    "layers": _breaks_layers,
    "heads": _breaks_heads,
    "mlp_width": _breaks_widths,
    "sequence": _breaks_sequence,
    "experts": _breaks_experts,
    "weight_parallel": _breaks_weight_shares,
    "shards": _breaks_shards,
    "recompute_layers": _breaks_recompute,
    "pipeline_schedule": _breaks_schedule,
    TRAINER: _breaks_trainer,
}
VERDICTS = ("devices", *_RULES)
