"""What a training scenario must not ask for: values there are not, and rules that contradict."""

from collections.abc import Iterator, Sequence
from math import isfinite

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.lowering.expert_layer import check_routing
from foretoken.domain.lowering.graph import RankContext
from foretoken.domain.lowering.lower import check_layout
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.limit import check_limits, list_broken
from foretoken.domain.requests.scenario import CONTEXT_PARALLELS, TrainingScenario
from foretoken.simulator.steps.legality import (
    batch_limits,
    chunk_limit,
    recompute_limit,
    round_limit,
    shard_limits,
)
from foretoken.simulator.steps.sharding import ZERO_STAGES
from foretoken.simulator.steps.stage_hardware import StageHardware
from foretoken.simulator.steps.stage_operators import training_options
from foretoken.simulator.steps.strategies import RECOMPUTE_MODES, Strategies
from foretoken.simulator.training.module_profile import check_module_layout, check_module_times

_CHOICES = {
    "recompute": RECOMPUTE_MODES,
    "context_parallel": CONTEXT_PARALLELS,
    "weight_parallel": ("", "msp", "fsp", "isp"),
    "zero_stage": ZERO_STAGES,
}
# Nobody computes gradients in narrower formats.
_DTYPES = (DType.FP32, DType.TF32, DType.FP16, DType.BF16, DType.FP8)
# What nobody sets of a model without experts.
_OF_EXPERTS = {
    "expert_tp": 0,
    "moe_routing": "",
    "moe_imbalance_ratio": 1,
    "moe_capacity_factor": 0,
}
_LEAST = {
    "sequence_length": 1,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "virtual_stages": 1,
    "recompute_layers": 0,
    "shard_degree": 0,
    "weight_degree": 0,
    "expert_tp": 0,
    "moe_imbalance_ratio": 1,
    "moe_capacity_factor": 0,
    "overflow_ratio": 0,
    "straggler_ratio": 0,
    "network_spread_ratio": 0,
    "power_limit_w": 0,
}


def check_scenario(scenario: TrainingScenario) -> None:
    """Check what no layout can mend.

    Raises:
        InvalidRequestError: with one violation per reason.

    """
    violations = list(_values(scenario))
    if scenario.moe_routing:
        check_routing(scenario.moe_routing)
    if not violations:
        case = Strategies.of_scenario(scenario)
        violations = [
            *list_broken(batch_limits(case)),
            *_stages(case),
            *_hardware(scenario),
            *_recompute(case),
            *list_broken(shard_limits(case)),
            *_parallelism(scenario),
        ]
    if violations:
        raise InvalidRequestError.of_violations(violations)
    check_module_times(scenario)


def check_chunks(ranks: Sequence[RankContext], scenario: TrainingScenario) -> None:
    """Check that the layout can cut the model, into chunks of which each has a layer.

    The embedding and the head count as one each.

    Raises:
        InvalidRequestError: with the reasons.

    """
    check_limits([chunk_limit(Strategies.of_scenario(scenario))])
    check_layout(ranks[0], training_options(scenario, scenario.trainer.resolve()))
    check_module_layout(scenario)


def _values(scenario: TrainingScenario) -> Iterator[FieldViolation]:
    for name, allowed in _CHOICES.items():
        if getattr(scenario, name) not in allowed:
            names = ", ".join(repr(item) if item == "" else str(item) for item in allowed)
            yield FieldViolation(name, f"must be one of {names}")
    if scenario.dtype not in _DTYPES:
        names = ", ".join(dtype.name.lower() for dtype in _DTYPES)
        problem = f"{scenario.dtype.name.lower()} is not trained in; must be one of {names}"
        yield FieldViolation("dtype", problem)
    for name, least in _LEAST.items():
        value = getattr(scenario, name)
        if not (value >= least and isfinite(value)):
            yield FieldViolation(name, f"must be at least {least} and finite")
    for name in ("overflow_ratio", "straggler_ratio", "network_spread_ratio"):
        if getattr(scenario, name) >= 1:
            yield FieldViolation(name, "must be below 1")


def _stages(case: Strategies) -> Iterator[FieldViolation]:
    scenario = case.source.scenario
    if found := list(list_broken([round_limit(case)])):
        yield from found
        return
    given, num_chunks = scenario.stage_layers, int((case.pp * case.chunks)[0])
    if not given:
        return
    problem = ""
    if len(given) != num_chunks:
        problem = f"must have an entry for each of the {num_chunks} chunks of layers"
    elif min(given) < 0 or min(given[1:-1], default=1) < 1:
        problem = "every chunk between the embedding's and the head's must have a layer"
    elif sum(given) != scenario.model.num_layers:
        problem = f"must add up to the {scenario.model.num_layers} layers of the model"
    if problem:
        yield FieldViolation("stage_layers", problem)


def _hardware(scenario: TrainingScenario) -> Iterator[FieldViolation]:
    for name in dict.fromkeys((scenario.device, *scenario.stage_devices)):
        if reason := find_device(name).find_missing_format(scenario.dtype):
            yield FieldViolation("dtype", reason)
    pp, hardware = scenario.layout.pp, StageHardware.of_scenario(scenario)
    if not hardware.is_given:
        return
    for name, find in (("stage_devices", find_device), ("stage_topologies", find_topology)):
        given = getattr(scenario, name)
        if given and len(given) != pp:
            problem = f"has {len(given)} entries, must have one for each of the {pp} stages"
            yield FieldViolation(name, problem)
        for item in dict.fromkeys(item for item in given if item):
            find(item)
    if scenario.module_times is not None:
        problem = "module_times are of one device: leave one of the two out"
        yield FieldViolation("stage_devices", problem)


def _recompute(case: Strategies) -> Iterator[FieldViolation]:
    scenario = case.source.scenario
    mode = scenario.recompute
    if scenario.recompute_modules and mode != "selective":
        yield FieldViolation("recompute_modules", f"are for recompute selective, not {mode}")
    if scenario.recompute_layers and mode == "none":
        yield FieldViolation("recompute_layers", "needs recompute full or selective")
    yield from list_broken([recompute_limit(case)])
    if scenario.partitions_activations and mode != "full":
        problem = "splits the saved inputs of layers: needs recompute full"
        yield FieldViolation("partitions_activations", problem)


def _parallelism(scenario: TrainingScenario) -> Iterator[FieldViolation]:
    model = scenario.model
    if scenario.weight_degree and scenario.weight_parallel != "isp":
        yield FieldViolation("weight_degree", "is for weight_parallel isp")
    if not stack_of(model).experts:
        for name, none in _OF_EXPERTS.items():
            if getattr(scenario, name) != none:
                yield FieldViolation(name, f"{model.name} has no experts")
