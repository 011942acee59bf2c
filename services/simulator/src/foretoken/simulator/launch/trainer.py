"""How a training framework is started: the contract of `trainers/`, and what its options say."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.trainer import TrainerCapabilities, TrainerProfile, find_trainer
from foretoken.domain.hardware.topology import topology_of_device
from foretoken.domain.lowering.communication import expert_mesh
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.stack import stack_of
from foretoken.domain.plugins import scan_modules
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.launch.files import render
from foretoken.simulator.launch.options import (
    OptionMap,
    Options,
    argument_words,
    flatten,
    group_words,
    nest,
    split_words,
)
from foretoken.simulator.rank import even_layers
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.recompute import selected_modules
from foretoken.simulator.steps.sharding import ScenarioDegrees

# What a simulation of a step does not say, in the README of every framework.
LEARNING_REMARK = (
    "the learning rate and the number of steps are placeholders: a simulation says nothing of"
    " learning"
)
# The file that starts a node's part of the run, and where its processes meet.
SCRIPT, MASTER_PORT = "train.sh", 29500
# Names of the arrays in the script.
_ARGUMENTS, _LAUNCHER = "ARGUMENTS", "LAUNCHER"
# What is read of a script in addition to its options.
NUM_DEVICES = "num-devices"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """A scenario on nodes: `num_nodes` times `devices_per_node` processes."""

    scenario: TrainingScenario
    num_nodes: int
    devices_per_node: int


def plan_job(scenario: TrainingScenario) -> TrainingJob:
    """Return on how many whole nodes a scenario runs.

    Raises:
        InvalidRequestError: it fills no whole number of nodes.

    """
    topology = topology_of_device(scenario.device, scenario.topology)
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
    """What files of a framework say, in the words of a scenario.

    `shard_degree` is 1 without ZeRO, `expert_tp` without experts; `stage_layers` are those of every
    chunk in the order of the model.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    moe_capacity_factor: float = 0.0
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedRun(LaunchedStrategy):
    """What options are written of: the strategy, and the scenario that has it."""

    scenario: TrainingScenario

    @property
    def model(self) -> ModelArchitecture:
        """The model."""
        return self.scenario.model

    @property
    def rules(self) -> TrainerProfile:
        """What the trainer does."""
        return self.scenario.trainer.resolve()

    @property
    def waits_for_sends(self) -> bool:
        """Whether stages of an interleaved pipeline are held by what they send."""
        is_interleaved = self.virtual_stages > 1
        return is_interleaved and self.rules.transfers_between(self.virtual_stages) != "buffered"

    @classmethod
    def of(cls, scenario: TrainingScenario) -> "LaunchedRun":
        """Return what options for a scenario are written of."""
        return cls(scenario=scenario, **_list_fields(strategy_of(scenario)))


def strategy_of(scenario: TrainingScenario) -> LaunchedStrategy:
    """Return what files for a scenario have to say."""
    layout = scenario.layout
    virtual_stages = find_schedule(scenario.pipeline_schedule).virtual_stages
    virtual_stages = virtual_stages or scenario.virtual_stages
    schedule = scenario.pipeline_schedule
    if schedule == "interleaved" and virtual_stages == 1:
        schedule = "one_f_one_b"
    layers = scenario.stage_layers or even_layers(
        scenario.model.num_layers, layout.pp * virtual_stages
    )
    # The first layers of a chunk, all of them, are those of `full` without a number.
    recompute_layers = scenario.recompute_layers
    modules = selected_modules(scenario)
    return LaunchedStrategy(
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        cp=layout.cp,
        ep=layout.ep,
        expert_tp=expert_mesh(layout, scenario.expert_tp).tp
        if stack_of(scenario.model).experts
        else 1,
        has_experts=bool(stack_of(scenario.model).experts),
        virtual_stages=virtual_stages,
        stage_layers=layers,
        pipeline_schedule=schedule,
        sequence_length=scenario.sequence_length,
        micro_batch_size=scenario.micro_batch_size,
        global_batch_size=scenario.global_batch_size,
        zero_stage=scenario.zero_stage,
        shard_degree=ScenarioDegrees.of(scenario).shards,
        moe_capacity_factor=scenario.moe_capacity_factor,
        sequence_parallel=scenario.sequence_parallel and layout.tp > 1,
        context_parallel=scenario.context_parallel if layout.cp > 1 else "ring",
        weight_parallel=scenario.weight_parallel,
        recompute=scenario.recompute,
        recompute_layers=recompute_layers if recompute_layers < max(layers) else 0,
        recompute_modules=modules if scenario.recompute == "selective" else (),
        partitions_activations=scenario.partitions_activations,
        dtype=scenario.dtype,
    )


def strategy_content(strategy: LaunchedStrategy) -> dict[str, Any]:
    """Return a strategy as the content of a scenario file, without what is as by default."""
    said = _list_fields(strategy)
    layout = {axis: said.pop(axis) for axis in ("tp", "pp", "dp", "cp", "ep")}
    counts = said.pop("stage_layers")
    if counts != even_layers(sum(counts), len(counts)):
        said["stage_layers"] = counts
    if not strategy.zero_stage or strategy.shard_degree == strategy.dp * strategy.cp:
        del said["shard_degree"]
    if not said.pop("has_experts"):
        del said["expert_tp"]
    if not strategy.moe_capacity_factor:
        del said["moe_capacity_factor"]
    return {"layout": layout, **said}


def _list_fields(strategy: LaunchedStrategy) -> dict[str, Any]:
    return {item.name: getattr(strategy, item.name) for item in fields(LaunchedStrategy)}


@dataclass(slots=True)
class Refusals:
    """Collects what a framework cannot do, so that all of it is reported at once."""

    framework: str
    found: list[FieldViolation] = field(default_factory=list)

    def add_if(self, is_refused: object, name: str, reason: str) -> None:
        """Note, where the condition holds, that a field says what the framework does not have."""
        if is_refused:
            self.found.append(FieldViolation(name, f"{self.framework}: {reason}"))

    def add_common(self, scenario: TrainingScenario) -> None:
        """Note what no framework of `trainers/` has files for, whatever it can do."""
        devices = {name or scenario.device for name in scenario.stage_devices}
        self.add_if(
            devices - {scenario.device},
            "stage_devices",
            f"has no pipeline over {', '.join(sorted(devices))}; one kind of device can be written,"
            " with stage_layers where stages differ",
        )
        self.add_if(
            set(scenario.stage_topologies) - {scenario.topology, ""},
            "stage_topologies",
            "all stages run on nodes of one kind",
        )
        pp, num_micro_batches = scenario.layout.pp, scenario.num_micro_batches
        self.add_if(
            scenario.virtual_stages > 1 and num_micro_batches % pp,
            "global_batch_size",
            f"interleaved stages take micro batches in groups of pp ({pp}), not"
            f" {num_micro_batches}",
        )

    def add_lacks(self, scenario: TrainingScenario, can: TrainerCapabilities) -> None:
        """Note what of a scenario the framework's capabilities have not."""
        # The names of frameworks are in the help of commands, which waits for no numeric library.
        from foretoken.simulator.steps.strategies import Strategies, TrainerBound
        from foretoken.simulator.steps.trainer_limit import list_lacks

        bound = TrainerBound(name=self.framework, can=can)
        self.found += list_lacks(Strategies.of_scenario(scenario), bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFile:
    """A file that the program reads: its options, and nested tables of them as text."""

    name: str
    options: OptionMap
    render: Callable[[dict[str, Any]], str]
    parse: Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFramework:
    """What a module of `trainers/` has as its `TRAINER`.

    `name` is as `--framework` takes it, `release` as the `project` names it, `profiles` are the
    trainer profiles that describe it, the first its own. `options` are those of the script, whose
    blocks `script` has, for `templates/train.sh.j2`. `starts` tells whether files, of which
    `SCRIPT` is a script or a command, start it. `refuse` notes what of a scenario it has not,
    `remarks` are what a reader has to know, each with whether it applies, `find_models` returns the
    presets whose geometry is that of options.
    """

    name: str
    project: str
    release: str
    profiles: Sequence[str]
    image: str
    script: str
    options: OptionMap
    config: ConfigFile | None = None
    starts: Callable[[Mapping[str, str]], bool]
    refuse: Callable[[TrainingScenario, Refusals], None]
    remarks: Callable[[LaunchedRun], Mapping[str, object]]
    find_models: Callable[[Options], Sequence[str]]

    @property
    def can(self) -> TrainerCapabilities:
        """What the release that files are written for can do."""
        return find_trainer(self.profiles[0]).can

    def launch(self, job: TrainingJob) -> TrainingLaunch:
        """Return what starts a run.

        Raises:
            InvalidRequestError: the framework cannot do what the scenario says.

        """
        refusals = Refusals(self.name)
        refusals.add_common(job.scenario)
        refusals.add_lacks(job.scenario, self.can)
        self.refuse(job.scenario, refusals)
        if refusals.found:
            raise InvalidRequestError.of_violations(refusals.found)
        run = LaunchedRun.of(job.scenario)
        lines = [shlex.join(words) for words in argument_words(self.options.write(run))]
        about = {"job": job, "run": run, "framework": self, "port": MASTER_PORT, "arguments": lines}
        files = {SCRIPT: render(SCRIPT, about, self.script)}
        if self.config:
            files[self.config.name] = self.config.render(nest(self.config.options.write(run)))
        remarks = [remark for remark, is_said in self.remarks(run).items() if is_said]
        return TrainingLaunch(files=files, image=self.image, remarks=remarks)

    def read_options(self, files: Mapping[str, str]) -> Options:
        """Return the options in files, and the number of devices as `NUM_DEVICES`."""
        options = read_script(files[SCRIPT])
        if self.config:
            options |= flatten(self.config.parse(files[self.config.name]))
        return options

    def read(self, files: Mapping[str, str]) -> LaunchedStrategy:
        """Return what files say, read from their text alone."""
        options = self.read_options(files)
        read = self.options.read(options)[0]
        if self.config:
            read |= self.config.options.read(options)[0]
        names = {item.name for item in fields(LaunchedStrategy)}
        return LaunchedStrategy(**{name: said for name, said in read.items() if name in names})


def all_frameworks() -> Mapping[str, TrainingFramework]:
    """Return every framework by its name: one module each in `trainers/`."""
    modules: Mapping[str, TrainingFramework] = scan_modules(
        "foretoken.simulator.launch.trainers", "TRAINER"
    )
    return {trainer.name: trainer for trainer in modules.values()}


def find_framework(name: str) -> TrainingFramework:
    """Return how the framework of this name is started.

    Raises:
        UnknownPluginError: no files are written for it.

    """
    return UnknownPluginError.look_up(name, all_frameworks(), "framework", "framework")


def choose_framework(scenario: TrainingScenario, name: str = "") -> TrainingFramework:
    """Return the framework of a name, or the one that the scenario's trainer describes.

    Raises:
        UnknownPluginError: no files are written for a framework of that name.
        InvalidRequestError: none is named, and none for the trainer.

    """
    if name:
        return find_framework(name)
    profile = scenario.trainer.profile
    for framework in all_frameworks().values():
        if profile in framework.profiles:
            return framework
    raise InvalidRequestError.of_field(
        "trainer.profile",
        f"files are written for {', '.join(all_frameworks())}, not for {profile}: choose one with"
        " --framework",
    )


def list_differences(
    scenario: TrainingScenario, followed: Iterable[tuple[str, object]]
) -> Mapping[str, object]:
    """Return remarks on rules the times rest on and the framework has no option for.

    `followed` are rules of the trainer with the only value that the framework knows.
    """
    trainer = scenario.trainer.resolve()
    return {
        f"the scenario was simulated with {rule} {_text(getattr(trainer, rule))}, which the"
        f" framework cannot change: it is {_text(value)}": getattr(trainer, rule) != value
        for rule, value in followed
    }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_script(script: str) -> dict[str, Any]:
    """Return the program's options and how many processes are started, as `NUM_DEVICES`.

    Read from a script that was written here, or from a command: `torchrun ... program.py ...`.

    Raises:
        InvalidRequestError: it is neither, or a quotation is not closed.

    """
    if f"\n{_ARGUMENTS}=(" in script:
        launcher, options = read_array(script, _LAUNCHER), read_array(script, _ARGUMENTS)
    else:
        words = split_words(script)
        starts = [place for place, word in enumerate(words) if word.endswith(".py")]
        if not starts:
            raise InvalidRequestError.of_field("command", "starts no program: `torchrun x.py ...`")
        launcher = group_words(words[: starts[0]])[1]
        options = group_words(words[starts[0] + 1 :])[1]
    per_node = launcher.get("nproc-per-node", 1)
    return {**options, NUM_DEVICES: int(launcher.get("nnodes", 1)) * int(per_node)}


def read_title(script: str) -> str:
    """Return the model that a script which was written here names; empty of any other."""
    found = re.search(r"\A#![^\n]*\n# (\S+) on ", script)
    return found[1] if found else ""


def read_array(script: str, name: str) -> dict[str, Any]:
    """Return the options of an array in a script.

    Raises:
        InvalidRequestError: the script has no such array.

    """
    found = re.search(rf"^{name}=\(\n(.*?)^\)$", script, re.DOTALL | re.MULTILINE)
    if found is None:
        raise InvalidRequestError.of_field(name, "the script has no such array")
    return group_words(split_words(found[1]))[1]
