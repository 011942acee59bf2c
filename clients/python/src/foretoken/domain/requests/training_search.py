"""The question which of very many training strategies is best, and its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.alias import settle_devices
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.option import check_options, describe, flag, option
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.echo import Echo
from foretoken.domain.results.methods import ResultMethods
from foretoken.domain.results.report import Columns
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import Quantity

TRAINING_OBJECTIVES = ("throughput_per_gpu", "step_time", "cost", "memory_headroom")
# What a trainer hides: nothing, what data-parallel ranks exchange, or tensor parallelism's too.
OVERLAPS = ("none", "data", "all")
WEIGHT_PARALLELS = ("", "msp", "fsp", "isp")
# How layers are cut to the stages of a pipeline whose devices differ.
PARTITIONS = ("even", "min_max", "dynamic", "ilp", "brute_force")
# Which points a space has: every combination of its axes, or those InternEvo's simulator tries.
ENUMERATIONS = ("grid", "internevo")
# Headings of options.
_ASKED, _EFFORT = "What is trained", "What ranks, and how much is computed"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Equal nodes of a cluster: `num_nodes` of `devices_per_node` devices (0: the topology's).

    `topology` tells of their links (empty: the device's first). `usd_per_hour` is what a device
    costs (0: what the search's prices say).
    """

    device: str
    num_nodes: int = 1
    devices_per_node: int = 0
    topology: str = ""
    usd_per_hour: float = 0.0

    def __post_init__(self) -> None:
        """Refuse groups without nodes."""
        settle_devices(self, "device")
        InvalidRequestError.check(
            "node_groups",
            {
                "num_nodes": (self.num_nodes >= 1, "must be at least 1"),
                "devices_per_node": (self.devices_per_node >= 0, "must not be negative"),
                "usd_per_hour": (self.usd_per_hour >= 0, "must not be negative"),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpace:
    """What may vary; an empty tuple tries all that is sensible.

    dp is what the degrees leave of the devices. `recompute` is of the scenario's modes (`selective`
    with its modules), `weight_degrees` are for `isp`, and `pipeline_schedules` are plug-ins.

    With `node_groups` the stages of a pipeline are placed on devices of several types, on every
    subset of the groups' nodes with `has_subsets`; `partition` of `PARTITIONS` cuts the layers.

    `enumeration` of `ENUMERATIONS`: `internevo` takes the points that InternEvo's simulator tries,
    whatever the axes say. With `framework`, one that files are written for, strategies that it
    cannot run are out, as are those that the scenario's trainer cannot.
    """

    devices: tuple[str, ...] = option(
        (),
        "Devices to compare, several with commas: see `foretoken list devices`.",
        names=("--devices", "--device"),
        syntax="devices",
        axis=("device",),
    )
    num_devices: tuple[int, ...] = option(
        (),
        "How many of them: `128`, or clusters to compare, `64,128` or `64:512` doubling. Default:"
        " those of the scenario's layout.",
        minimum=1,
        names=("--gpus",),
        axis=("num_devices",),
    )
    usd_per_hour: Mapping[str, float] = option(
        {}, "USD an hour of a device: `h100_sxm=2.5`. Repeatable.", minimum=0, names=("--price",)
    )
    global_batch_sizes: tuple[int, ...] = option(
        (),
        "The same in samples: `1024`, `512,1024`. Default: the scenario's.",
        minimum=1,
        names=("--global-batch",),
        group=_ASKED,
        axis=("global_batch_size",),
    )
    tp: tuple[int, ...] = option((), "Tensor-parallel degrees.", minimum=1, axis=("tp",))
    pp: tuple[int, ...] = option((), "Pipeline stages.", minimum=1, axis=("pp",))
    virtual_stages: tuple[int, ...] = option(
        (), "Chunks of layers of a rank.", minimum=1, axis=("virtual_stages", "vpp")
    )
    cp: tuple[int, ...] = option((), "Context-parallel degrees.", minimum=1, axis=("cp",))
    ep: tuple[int, ...] = option((), "Expert-parallel degrees.", minimum=1, axis=("ep",))
    micro_batch_sizes: tuple[int, ...] = option(
        (), "Samples of a micro batch.", minimum=1, axis=("micro_batch_size",)
    )
    sequence_parallel: tuple[bool, ...] = option(
        (), "Whether what tensor parallelism leaves whole is split.", axis=("sequence_parallel",)
    )
    zero_stages: tuple[int, ...] = option((), "Stages of ZeRO, 0 to 3.", axis=("zero_stage",))
    overlaps: tuple[str, ...] = option(
        (), "What is hidden: {choices}.", choices=OVERLAPS, axis=("overlap",)
    )
    recompute: tuple[str, ...] = option((), "Modes of recomputation.", axis=("recompute",))
    weight_parallel: tuple[str, ...] = option(
        (), "InternEvo's algorithms.", choices=WEIGHT_PARALLELS, axis=("weight_parallel",)
    )
    weight_degrees: tuple[int, ...] = option(
        (), "Ranks that weights are split over.", minimum=1, axis=("weight_degree",)
    )
    pipeline_schedules: tuple[str, ...] = option(
        (), "Pipeline schedules: see `foretoken list schedules`.", axis=("pipeline_schedule",)
    )
    node_groups: tuple[NodeGroup, ...] = option(
        (),
        "Nodes of one type in a cluster of several: `a100_sxm_80=4x8` is four nodes of eight."
        " Repeatable; stages of the pipeline are placed on them.",
        names=("--nodes",),
        syntax="nodes",
    )
    has_subsets: bool = flag(
        "With --nodes: also compare clusters of fewer of these nodes.",
    )
    partition: str = option(
        "dynamic",
        "With --nodes: how layers are cut to stages: {choices}.",
        choices=PARTITIONS,
    )
    enumeration: str = "grid"
    framework: str = ""

    def __post_init__(self) -> None:
        """Refuse names there are not and degrees below one."""
        settle_devices(self, "devices", "usd_per_hour")
        check_options(
            self,
            "space",
            {
                "zero_stages": (set(self.zero_stages) <= {0, 1, 2, 3}, "must be of 0, 1, 2, 3"),
                "enumeration": (
                    self.enumeration in ENUMERATIONS,
                    f"must be one of {', '.join(ENUMERATIONS)}",
                ),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSearchRequest:
    """Ask for the best strategies of a space.

    Every legal point is answered in closed form, time and memory; the `num_finalists` best (0:
    none) are simulated event by event. `objective` ranks: most tokens/s per GPU, shortest step,
    least cost per token, or most free memory. The `max_candidates` best of those that fit are
    listed, then what is best by another objective or on a front. With `has_sensitivity` the whole
    space is also answered with better links, memory and arithmetic, and with another batch.
    """

    scenario: TrainingScenario
    space: TrainingSpace = field(
        default_factory=TrainingSpace, metadata=describe("What it runs on")
    )
    objective: str = option(
        TRAINING_OBJECTIVES[0],
        "What ranks: {choices}.",
        choices=TRAINING_OBJECTIVES,
        group=_EFFORT,
    )
    num_finalists: int = option(
        5, "How many of the best to simulate event by event.", minimum=0, group=_EFFORT
    )
    max_candidates: int = option(
        1000,
        "How many of those that fit are listed in the report and exported, best first.",
        minimum=1,
        group=_EFFORT,
    )
    has_sensitivity: bool = flag(
        "Also tell what is best, and how fast, with links 2x, memory bandwidth or capacity +50 %,"
        " arithmetic 2x, half and twice the batch.",
        group=_EFFORT,
    )

    def __post_init__(self) -> None:
        """Refuse objectives there are not."""
        check_options(self, "search")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StrategyColumns(Columns):
    """One entry per strategy that fits, best first by the estimates: `rank` counts from 1.

    Each `_low` and `_high` is the bound of the predictor's interval. `reserved_bytes` is of the
    fullest device, `margin_bytes` what that has left. `placement` names the devices of every stage
    and `stage_layers` its layers where they differ (`8,8,7,9`), else both are empty. Money is 0
    where nothing is priced. `is_pareto_cost` is on the front of cost against throughput,
    `is_pareto_memory` on that of throughput against free memory.
    """

    name: Quantity = ()
    device: Quantity = ()
    num_devices: Quantity = ()
    tp: Quantity = ()
    pp: Quantity = ()
    virtual_stages: Quantity = ()
    dp: Quantity = ()
    cp: Quantity = ()
    ep: Quantity = ()
    micro_batch_size: Quantity = ()
    num_micro_batches: Quantity = ()
    global_batch_size: Quantity = ()
    sequence_parallel: Quantity = ()
    zero_stage: Quantity = ()
    shard_degree: Quantity = ()
    overlap: Quantity = ()
    recompute: Quantity = ()
    weight_parallel: Quantity = ()
    weight_degree: Quantity = ()
    pipeline_schedule: Quantity = ()
    placement: Quantity = ()
    stage_layers: Quantity = ()
    step_time_ms: Quantity = ()
    step_time_low_ms: Quantity = ()
    step_time_high_ms: Quantity = ()
    tokens_per_s: Quantity = ()
    tokens_per_s_per_gpu: Quantity = ()
    mfu_ratio: Quantity = ()
    bubble_ratio: Quantity = ()
    exposed_communication_ratio: Quantity = ()
    reserved_bytes: Quantity = ()
    margin_bytes: Quantity = ()
    usd_per_step: Quantity = ()
    usd_per_billion_tokens: Quantity = ()
    rank: Quantity = ()
    is_pareto_cost: Quantity = ()
    is_pareto_memory: Quantity = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyFinalist:
    """A strategy that was simulated event by event.

    `candidate` is its entry in the columns, `rank` its place by the simulation (0: it does not fit
    there), `closed_form_ms` what the formula said; `scenario_json` its resolved configuration.
    """

    candidate: int
    name: str
    rank: int = 0
    closed_form_ms: float = 0.0
    report: TrainingReport = field(default_factory=TrainingReport)
    scenario_json: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySensitivity:
    """What the best answer becomes when one thing changes: `change` in words.

    Ratios are tokens/s per GPU over those of the best today (0: none fits today):
    `throughput_ratio` of what is best then, `same_throughput_ratio` of what is best today, kept (0:
    it cannot run then or does not fit, or has no estimate).
    """

    change: str
    best: str
    step_time_ms: float = 0.0
    tokens_per_s_per_gpu: float = 0.0
    throughput_ratio: float = 1.0
    num_fitting: int = 0
    is_same_best: bool = True
    same_throughput_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TieCall:
    """A call whose error may change which of two strategies is better.

    `words` are its dimensions and circumstances as `foretoken plan` takes them, on `device` and,
    for a collective, over the links `topology`. With the call at its upper bound what is compared
    changes by `difference_ratio` of the better one's.
    """

    operator: str
    words: str
    device: str
    topology: str = ""
    difference_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RuledOut:
    """Why strategies are out: how many, by which rule, and one of them with its reason in full.

    `verdict` is `memory`, or names the rule of the layout that is broken.
    """

    verdict: str
    num_strategies: int
    example: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceCell:
    """The strategies of a space where values of two of its axes meet, and the best of them.

    `row_axis` and `column_axis` name columns of `StrategyColumns`, `row` and `column` their values
    as text. `num_legal` can run, `num_fitting` of them have the memory; `best` has the most
    tokens/s per GPU (empty: none fits).
    """

    row_axis: str
    column_axis: str
    row: str
    column: str
    num_legal: int = 0
    num_fitting: int = 0
    best: str = ""
    tokens_per_s_per_gpu: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TrainingSearchReport(ResultMethods):
    """The ranked strategies of a space; every point of it is counted.

    Of `num_points`, `num_legal` can run, all of which were answered in closed form, and
    `num_fitting` have the memory; `ruled_out` counts the others by reason. `num_shapes` are the
    groups of strategies whose layers run the same operators. `best` names the first of each of
    `TRAINING_OBJECTIVES`, `ties` those that are behind the request's by less than the error of the
    difference, best first; measuring `tie_calls`, most telling first, is what tells the first of
    them from the best. `cells` say of all strategies how good they are by tp and pp, and by micro
    batch size and recomputation. `candidates` travel apart, as a table.
    """

    num_points: int = 0
    num_legal: int = 0
    num_fitting: int = 0
    num_simulated: int = 0
    num_shapes: int = 0
    ruled_out: tuple[RuledOut, ...] = ()
    best: Mapping[str, str] = field(default_factory=dict)
    ties: tuple[str, ...] = ()
    finalists: tuple[StrategyFinalist, ...] = ()
    sensitivities: tuple[StrategySensitivity, ...] = ()
    cells: tuple[SpaceCell, ...] = ()
    candidates: StrategyColumns = field(default_factory=StrategyColumns)
    closed_form_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    num_workers: int = 0
    model_version: str = ""
    notes: tuple[str, ...] = ()
    request_json: str = ""
    job_id: str = ""
    tie_calls: tuple[TieCall, ...] = ()
    echo: Echo = field(default_factory=Echo)
