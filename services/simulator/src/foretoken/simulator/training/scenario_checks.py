"""What a training scenario must not ask for: values there are not, and rules that contradict."""

from collections.abc import Iterator, Sequence
from math import isfinite

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.estimate import DType
from foretoken.domain.graph import RankContext
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.lowering import check_layout
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.units import ceil_divide
from foretoken.simulator.rank import count_parts
from foretoken.simulator.training.module_profile import check_module_layout, check_module_times
from foretoken.simulator.training.schedule import PipelineSchedule
from foretoken.simulator.training.stage_hardware import StageHardware
from foretoken.simulator.training.stage_operators import training_options
from foretoken.simulator.training.zero import ZERO_STAGES, check_sharding

_CHOICES = {
    "recompute": ("none", "selective", "full"),
    "context_parallel": ("ring", "all_to_all"),
    "weight_parallel": ("", "msp", "fsp", "isp"),
    "zero_stage": ZERO_STAGES,
}
# Nobody computes gradients in narrower formats.
_DTYPES = (DType.FP32, DType.TF32, DType.FP16, DType.BF16, DType.FP8)
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
    "overflow_ratio": 0,
    "straggler_ratio": 0,
    "network_spread_ratio": 0,
}


def check_scenario(scenario: TrainingScenario, schedule: PipelineSchedule) -> None:
    """Check what no layout can mend.

    Raises:
        InvalidRequestError: with one violation per reason.

    """
    violations = list(_values(scenario))
    if not violations:
        violations = [
            FieldViolation(name, problem)
            for name, problem in (
                *_batch(scenario),
                *_stages(scenario, schedule),
                *_hardware(scenario),
                *_recompute(scenario, schedule),
                *_parallelism(scenario),
            )
        ]
        violations += check_sharding(scenario)
    if violations:
        raise InvalidRequestError.of_violations(violations)
    check_module_times(scenario)


def check_chunks(ranks: Sequence[RankContext], scenario: TrainingScenario) -> None:
    """Check that the layout can cut the model, into chunks of which each has a layer.

    The embedding and the head count as one each.

    Raises:
        InvalidRequestError: with the reasons.

    """
    model = scenario.model
    if len(ranks) > count_parts(model.num_layers):
        message = f"{len(ranks)} chunks of layers are more than the {model.num_layers} layers of"
        problem = f"{message} {model.name} with its embedding and its head"
        raise InvalidRequestError.of_field("layout.pp", problem)
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


def _batch(scenario: TrainingScenario) -> Iterator[tuple[str, str]]:
    layout, model = scenario.layout, scenario.model
    step_samples = layout.dp * scenario.micro_batch_size
    if scenario.global_batch_size % step_samples:
        size = scenario.global_batch_size
        problem = f"{size} is not a multiple of dp times micro_batch_size, {step_samples}"
        yield "global_batch_size", problem
    if model.position == "learned" and scenario.sequence_length > model.max_position:
        yield "sequence_length", f"{model.name} has {model.max_position} positions"
    if scenario.sequence_length % layout.cp:
        yield "sequence_length", f"is not a multiple of cp, {layout.cp}"
    if scenario.sequence_parallel and (scenario.sequence_length // layout.cp) % layout.tp:
        yield "sequence_length", f"a rank's part is not a multiple of tp, {layout.tp}"


def _stages(scenario: TrainingScenario, schedule: PipelineSchedule) -> Iterator[tuple[str, str]]:
    layout, needed = scenario.layout, schedule.virtual_stages
    if needed and scenario.virtual_stages not in (1, needed):
        yield "virtual_stages", f"{schedule.name} has {needed} per rank"
        return
    num_chunks = layout.pp * (needed or scenario.virtual_stages)
    given = scenario.stage_layers
    if not given:
        return
    if len(given) != num_chunks:
        yield "stage_layers", f"must have an entry for each of the {num_chunks} chunks of layers"
    elif min(given) < 0 or min(given[1:-1], default=1) < 1:
        yield "stage_layers", "every chunk between the embedding's and the head's must have a layer"
    elif sum(given) != scenario.model.num_layers:
        yield "stage_layers", f"must add up to the {scenario.model.num_layers} layers of the model"


def _hardware(scenario: TrainingScenario) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys((scenario.device, *scenario.stage_devices)):
        if reason := find_device(name).find_missing_format(scenario.dtype):
            yield "dtype", reason
    pp, hardware = scenario.layout.pp, StageHardware.of_scenario(scenario)
    if not hardware.is_given:
        return
    for name, find in (("stage_devices", find_device), ("stage_topologies", find_topology)):
        given = getattr(scenario, name)
        if given and len(given) != pp:
            yield name, f"has {len(given)} entries, must have one for each of the {pp} stages"
        for item in dict.fromkeys(item for item in given if item):
            find(item)
    if scenario.module_times is not None:
        yield "stage_devices", "module_times are of one device: leave one of the two out"


def _recompute(scenario: TrainingScenario, schedule: PipelineSchedule) -> Iterator[tuple[str, str]]:
    mode = scenario.recompute
    num_chunks = scenario.layout.pp * (schedule.virtual_stages or scenario.virtual_stages)
    even = int(ceil_divide(scenario.model.num_layers, num_chunks))
    most = max(scenario.stage_layers, default=even)
    if scenario.recompute_modules and mode != "selective":
        yield "recompute_modules", f"are for recompute selective, not {mode}"
    if scenario.recompute_layers and mode == "none":
        yield "recompute_layers", "needs recompute full or selective"
    elif scenario.recompute_layers > most:
        yield "recompute_layers", f"no chunk has more than {most} layers"
    if scenario.partitions_activations and mode != "full":
        yield "partitions_activations", "splits the saved inputs of layers: needs recompute full"


def _parallelism(scenario: TrainingScenario) -> Iterator[tuple[str, str]]:
    model = scenario.model
    if scenario.shard_degree and not scenario.zero_stage:
        yield "shard_degree", "needs zero_stage 1, 2 or 3"
    if scenario.weight_degree and scenario.weight_parallel != "isp":
        yield "weight_degree", "is for weight_parallel isp"
    if scenario.weight_parallel == "isp" and scenario.zero_stage == max(ZERO_STAGES):
        yield "zero_stage", "3 splits weights, and so does weight_parallel isp"
    if model.moe is None:
        for name, none in (("expert_tp", 0), ("moe_routing", ""), ("moe_imbalance_ratio", 1)):
            if getattr(scenario, name) != none:
                yield name, f"{model.name} has no experts"
