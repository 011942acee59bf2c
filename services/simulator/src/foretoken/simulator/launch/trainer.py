"""How a training framework is started: the contract of `trainers/`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.frameworks.trainer_capability import TrainerCapabilities
from foretoken.domain.hardware.topology import TopologySpec, find_topology, topology_of_device
from foretoken.domain.lowering.placement import expert_mesh
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.rank import even_layers
from foretoken.simulator.steps.sharding import ScenarioDegrees
from foretoken.simulator.training.recompute import selected_modules
from foretoken.simulator.training.schedule import find_schedule

# What a simulation of a step does not say, told with every script.
LEARNING_REMARK = (
    "the learning rate and the number of steps are placeholders: a simulation says nothing of"
    " learning"
)
# The file that starts a node's part of the run.
SCRIPT = "train.sh"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """A scenario on nodes: `num_nodes` times `devices_per_node` processes."""

    scenario: TrainingScenario
    num_nodes: int
    devices_per_node: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingLaunch:
    """Files that start a run, the image they need, and what their reader has to know.

    `files` has `SCRIPT`, which is run on every node, and what it reads from its own folder.
    """

    files: Mapping[str, str]
    image: str
    remarks: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedStrategy:
    """What files of a framework ask for, in the words of a scenario.

    `shard_degree` is 1 without ZeRO, `expert_tp` without experts; `stage_layers` are those of every
    chunk in the order of the model.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    has_experts: bool = False
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    pipeline_schedule: str = "one_f_one_b"
    sequence_length: int
    micro_batch_size: int
    global_batch_size: int
    zero_stage: int = 0
    shard_degree: int = 1
    sequence_parallel: bool = False
    context_parallel: str = "ring"
    weight_parallel: str = ""
    recompute: str = "none"
    recompute_layers: int = 0
    recompute_modules: tuple[str, ...] = ()
    partitions_activations: bool = False
    dtype: DType = DType.BF16


class TrainingFramework(Protocol):
    """What a module of `trainers/` offers as its `TRAINER`."""

    @property
    def name(self) -> str:
        """Name of the framework, as `--framework` takes it."""

    @property
    def profiles(self) -> Sequence[str]:
        """Trainer profiles that describe it."""

    @property
    def can(self) -> TrainerCapabilities:
        """What the release that files are written for can do."""

    def launch(self, job: TrainingJob) -> TrainingLaunch:
        """Return what starts a run.

        Raises:
            InvalidRequestError: the framework cannot do what the scenario says.

        """

    def starts(self, files: Mapping[str, str]) -> bool:
        """Tell whether files start this framework: `SCRIPT` is a script or a command."""

    def read(self, files: Mapping[str, str]) -> LaunchedStrategy:
        """Return what files ask for, read from their text alone."""

    def find_models(self, files: Mapping[str, str]) -> Sequence[str]:
        """Return the presets whose geometry the files have."""


@dataclass(slots=True)
class Refusals:
    """Collects what a framework cannot do, so that all of it is told at once."""

    framework: str
    found: list[FieldViolation] = field(default_factory=list)

    def add(self, name: str, reason: str) -> None:
        """Note that a field of the scenario asks for something else than the framework has."""
        self.found.append(FieldViolation(name, f"{self.framework}: {reason}"))

    def add_if(self, is_refused: object, name: str, reason: str) -> None:
        """Note it where the condition holds."""
        if is_refused:
            self.add(name, reason)

    def finish(self) -> None:
        """Raise what was noted.

        Raises:
            InvalidRequestError: anything was.

        """
        if self.found:
            raise InvalidRequestError.of_violations(self.found)

    def add_lacks(self, scenario: TrainingScenario, can: TrainerCapabilities) -> None:
        """Note what of a scenario the framework's capabilities have not."""
        # The names of frameworks are in the help of commands, which waits for no numeric library.
        from foretoken.simulator.steps.strategies import Strategies, TrainerBound
        from foretoken.simulator.steps.trainer_limit import list_lacks

        bound = TrainerBound(name=self.framework, can=can)
        self.found += list_lacks(Strategies.of_scenario(scenario), bound)


def topology_of(scenario: TrainingScenario) -> TopologySpec:
    """Return the nodes of a scenario: those it names, or the first that its device is known in."""
    if scenario.topology:
        return find_topology(scenario.topology)
    return topology_of_device(scenario.device)


def plan_job(scenario: TrainingScenario) -> TrainingJob:
    """Return on how many whole nodes a scenario runs.

    Raises:
        InvalidRequestError: it fills no whole number of nodes.

    """
    topology = topology_of(scenario)
    num_devices = scenario.layout.num_devices
    per_node = min(num_devices, topology.devices_per_node)
    if num_devices % per_node:
        raise InvalidRequestError.of_field(
            "layout",
            f"{num_devices} devices fill no whole number of nodes of {topology.name}, which have"
            f" {topology.devices_per_node}: choose degrees whose product is a multiple of it",
        )
    return TrainingJob(
        scenario=scenario, num_nodes=num_devices // per_node, devices_per_node=per_node
    )


def chunk_layers(scenario: TrainingScenario) -> tuple[int, ...]:
    """Return the layers of every chunk in the order of the model; the first take what is over."""
    if scenario.stage_layers:
        return scenario.stage_layers
    num_chunks = scenario.layout.pp * num_virtual_stages(scenario)
    return even_layers(scenario.model.num_layers, num_chunks)


def num_virtual_stages(scenario: TrainingScenario) -> int:
    """Return the chunks of layers of a rank."""
    return find_schedule(scenario.pipeline_schedule).virtual_stages or scenario.virtual_stages


def splits_sequence(scenario: TrainingScenario) -> bool:
    """Tell whether tensor-parallel ranks split tokens between their products."""
    return scenario.sequence_parallel and scenario.layout.tp > 1


def strategy_of(scenario: TrainingScenario) -> LaunchedStrategy:
    """Return what files for a scenario have to ask for."""
    layout = scenario.layout
    virtual_stages = num_virtual_stages(scenario)
    schedule = scenario.pipeline_schedule
    if schedule == "interleaved" and virtual_stages == 1:
        schedule = "one_f_one_b"
    modules = selected_modules(scenario)
    # The first layers of a chunk, all of them, are those of `full` without a number.
    recompute_layers = scenario.recompute_layers
    if recompute_layers >= max(chunk_layers(scenario)):
        recompute_layers = 0
    return LaunchedStrategy(
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        cp=layout.cp,
        ep=layout.ep,
        expert_tp=expert_mesh(layout, scenario.expert_tp).tp if scenario.model.moe else 1,
        has_experts=scenario.model.moe is not None,
        virtual_stages=virtual_stages,
        stage_layers=chunk_layers(scenario),
        pipeline_schedule=schedule,
        sequence_length=scenario.sequence_length,
        micro_batch_size=scenario.micro_batch_size,
        global_batch_size=scenario.global_batch_size,
        zero_stage=scenario.zero_stage,
        shard_degree=ScenarioDegrees.of(scenario).shards,
        sequence_parallel=splits_sequence(scenario),
        context_parallel=scenario.context_parallel if layout.cp > 1 else "ring",
        weight_parallel=scenario.weight_parallel,
        recompute=scenario.recompute,
        recompute_layers=recompute_layers,
        recompute_modules=modules if scenario.recompute == "selective" else (),
        partitions_activations=scenario.partitions_activations,
        dtype=scenario.dtype,
    )


def launched_fields(scenario: TrainingScenario) -> dict[str, Any]:
    """Return what options are written of: the strategy, the trainer's `rules.`, and the layers."""
    strategy, trainer = strategy_of(scenario), scenario.trainer.resolve()
    return {
        **{item.name: getattr(strategy, item.name) for item in fields(strategy)},
        **{f"rules.{item.name}": getattr(trainer, item.name) for item in fields(trainer)},
        "num_layers": scenario.model.num_layers,
        "num_experts": scenario.model.moe.num_experts if scenario.model.moe else 0,
        "top_k": scenario.model.moe.top_k if scenario.model.moe else 0,
    }


def strategy_of_fields(read: Mapping[str, Any]) -> LaunchedStrategy:
    """Return the strategy that options which were read ask for."""
    names = {item.name for item in fields(LaunchedStrategy)}
    return LaunchedStrategy(**{name: value for name, value in read.items() if name in names})


def strategy_content(strategy: LaunchedStrategy) -> dict[str, Any]:
    """Return a strategy as the content of a scenario file, without what is as by default."""
    said = {item.name: getattr(strategy, item.name) for item in fields(strategy)}
    layout = {axis: said.pop(axis) for axis in ("tp", "pp", "dp", "cp", "ep")}
    counts = said.pop("stage_layers")
    if counts != even_layers(sum(counts), len(counts)):
        said["stage_layers"] = counts
    if not strategy.zero_stage or strategy.shard_degree == strategy.dp * strategy.cp:
        del said["shard_degree"]
    if not said.pop("has_experts"):
        del said["expert_tp"]
    return {"layout": layout, **said}


def refuse_common(scenario: TrainingScenario, refusals: Refusals) -> None:
    """Note what no framework of `trainers/` has files for, whatever it can do."""
    devices = {name or scenario.device for name in scenario.stage_devices}
    refusals.add_if(
        devices - {scenario.device},
        "stage_devices",
        f"has no pipeline over {', '.join(sorted(devices))}; one kind of device can be written,"
        " with stage_layers where stages differ",
    )
    refusals.add_if(
        set(scenario.stage_topologies) - {scenario.topology, ""},
        "stage_topologies",
        "all stages run on nodes of one kind",
    )
    pp, num_micro_batches = scenario.layout.pp, scenario.num_micro_batches
    refusals.add_if(
        scenario.virtual_stages > 1 and num_micro_batches % pp,
        "global_batch_size",
        f"interleaved stages take micro batches in groups of pp ({pp}), not {num_micro_batches}",
    )


def list_differences(
    scenario: TrainingScenario, followed: Iterable[tuple[str, object]]
) -> list[str]:
    """Return remarks on rules the times rest on and the framework has no option for.

    `followed` are rules of the trainer with the only value that the framework knows.
    """
    trainer = scenario.trainer.resolve()
    return [
        f"the scenario was simulated with {rule} {_text(getattr(trainer, rule))}, which the"
        f" framework cannot change: it is {_text(value)}"
        for rule, value in followed
        if getattr(trainer, rule) != value
    ]


def _text(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
