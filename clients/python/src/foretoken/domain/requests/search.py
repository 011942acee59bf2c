"""Questions about many deployments: the highest rate of one, and the best of a space of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.alias import settle_devices
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.requests.option import check_options, describe, flag, option
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.echo import Echo
from foretoken.domain.results.methods import ResultMethods
from foretoken.domain.results.report import Columns, Feasibility, ServingReport
from foretoken.domain.units import Quantity

OBJECTIVES = ("throughput_per_gpu", "cost", "num_devices", "latency")
SERVING_MODES = ("aggregated", "disaggregated")
# GPUs that throughput and cost are counted per.
COUNTED_GPUS = ("owned", "used")
_HIGHEST_PERCENTILE = 100
_TARGETS, _EFFORT = "What a deployment has to meet", "How much is computed"


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyLimit:
    """A percentile of a latency over all requests (`itl_ms`: all token gaps) is at most a limit.

    `percentile` 0 stands for the mean.
    """

    metric: str
    percentile: float
    limit_ms: float

    def __post_init__(self) -> None:
        """Refuse metrics there are not and limits nobody meets."""
        InvalidRequestError.check(
            "limit",
            {
                "metric": (
                    self.metric in LIMITED,
                    f"must be one of {', '.join(LIMITED)}",
                ),
                "percentile": (
                    0 <= self.percentile <= _HIGHEST_PERCENTILE,
                    "must be between 0 (the mean) and 100",
                ),
                "limit_ms": (self.limit_ms > 0, "must be positive"),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingTargets:
    """What a deployment has to meet, all of it: limits, and the share of requests in their SLOs.

    The SLOs are the scenario's and its classes'; `slo_attainment_ratio` 0 requires nothing.
    """

    limits: tuple[LatencyLimit, ...] = option(
        (),
        "A limit to meet, as `METRIC STATISTIC TIME`: `ttft p99 2s`, `itl p99.9 200ms`, `e2e mean"
        " 20s`. Metrics: ttft, tpot, itl, e2e. Statistics: mean, p50 to p100. Repeatable; all must"
        " hold.",
        names=("--limit",),
        syntax="limits",
    )
    slo_attainment_ratio: float = option(
        0.0,
        "Least share of requests in their SLO, the scenario's or their class's (0-1).",
        minimum=0,
        maximum=1,
        names=("--attainment",),
    )

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        check_options(self, "targets")


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRequest:
    """Ask for the highest rate at which a deployment meets the targets.

    The workload keeps its requests and lengths; synthetic arrivals and traces alike are stretched
    in time, the same random numbers at every rate. The answer is bracketed to
    `tolerance_ratio`. Of its confidence interval at `confidence_ratio` the bounds come from
    drawing the requests anew and from the predictor's own interval. No rate above `max_rps` (0: no
    limit) is tried.
    """

    scenario: ServingScenario
    targets: ServingTargets = field(metadata=describe("What a deployment has to meet"))
    tolerance_ratio: float = option(
        0.01,
        "The answer is bracketed to this ratio.",
        minimum=1e-4,
        maximum=0.5,
        group="How closely",
    )
    confidence_ratio: float = option(
        0.95, "Confidence of its interval.", minimum=0.5, maximum=0.999, group="How closely"
    )
    max_rps: float = option(
        0.0,
        "Try no rate above this (1/s; 0: no limit).",
        minimum=0,
        names=("--max-rate",),
        group="How closely",
    )

    def __post_init__(self) -> None:
        """Refuse tolerances and confidences that cannot be."""
        InvalidRequestError.check(
            "capacity",
            {
                "targets": (
                    bool(self.targets.limits) or self.targets.slo_attainment_ratio > 0,
                    "give at least one limit or an attainment",
                ),
                "tolerance_ratio": (0 < self.tolerance_ratio < 1, "must be between 0 and 1"),
                "confidence_ratio": (0 < self.confidence_ratio < 1, "must be between 0 and 1"),
                "max_rps": (self.max_rps >= 0, "must not be negative; 0 is no limit"),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitOutcome:
    """What a run had of a limit; `is_met` where it is within. Attainment is the metric "slo"."""

    metric: str
    percentile: float = 0.0
    limit: float = 0.0
    value: float = 0.0
    is_met: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityProbe:
    """One run at a rate. One that was `is_cut_short` had a queue that only grew."""

    rate_rps: float
    is_met: bool
    is_cut_short: bool = False
    num_requests: int = 0
    output_throughput_tps: float = 0.0
    outcomes: tuple[LimitOutcome, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CapacityReport(ResultMethods):
    """The highest rate that meets the targets, and how it was found.

    `capacity_rps` is the highest rate that was seen to meet them, `first_miss_rps` the lowest above
    it that was seen not to (0: none was). `low_rps` and `high_rps` bound it at the request's
    confidence, of which `sampling_low_rps` and `sampling_high_rps` is the part of the workload's
    chance alone. `limiting` names what fails first. 0 requests per second where not even the lowest
    rate meets them: `feasibility` says why. `probes` are in the order they were run. `notes` say
    what makes the answer less sure, such as a workload too short to show a queue that grows.
    `echo` is the question, and what the answer rests on.
    """

    feasibility: Feasibility = field(default_factory=Feasibility)
    capacity_rps: float = 0.0
    first_miss_rps: float = 0.0
    low_rps: float = 0.0
    high_rps: float = 0.0
    sampling_low_rps: float = 0.0
    sampling_high_rps: float = 0.0
    limiting: str = ""
    capacity_rps_per_gpu: float = 0.0
    num_devices: int = 0
    usd_per_million_output_tokens: float = 0.0
    probes: tuple[CapacityProbe, ...] = ()
    at_capacity: ServingReport = field(default_factory=ServingReport)
    cpu_s: float = 0.0
    model_version: str = ""
    scenario_json: str = ""
    job_id: str = ""
    notes: tuple[str, ...] = ()
    echo: Echo = field(default_factory=Echo)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSpace:
    """What may vary; every empty tuple keeps what the scenario has, or tries what is sensible.

    `devices` empty are the scenario's, `tp` every power of two that divides and fits a node. Of a
    disaggregated mode `prefill_replicas` to `decode_replicas` are the pairs that match in rate. A
    format of weights "" is the scenario's dtype. With `server`, one that files are written for,
    deployments that it cannot run are out, as are those that their engine cannot.
    """

    devices: tuple[str, ...] = option(
        (),
        "Devices to compare, several with commas: see `foretoken list devices`.",
        names=("--devices", "--device"),
        syntax="devices",
    )
    usd_per_hour: Mapping[str, float] = option(
        {}, "USD an hour of a device: `h200_sxm=3.5`. Repeatable.", names=("--price",)
    )
    max_devices: int = option(
        8, "GPUs you have: the most of a deployment.", minimum=1, names=("--gpus",)
    )
    modes: tuple[str, ...] = option(
        (),
        "`aggregated`, `disaggregated` (prompts and answers on replicas of their own) or `both`."
        " Default: both.",
        choices=SERVING_MODES,
        names=("--mode",),
        syntax="modes",
    )
    tp: tuple[int, ...] = option(
        (), "Tensor-parallel degrees: `1,2,4,8`. Default: every sensible one.", minimum=1
    )
    pp: tuple[int, ...] = option(
        (),
        "Pipeline stages: `1,2`. Default: 1, and over whole nodes 2, 4 and so on.",
        minimum=1,
    )
    dp: tuple[int, ...] = option(
        (), "Data-parallel degrees of a replica: `1,8`. Default: 1.", minimum=1
    )
    ep: tuple[int, ...] = option((), "Expert-parallel degrees: `1,8`. Default: 1.", minimum=1)
    max_num_seqs: tuple[int, ...] = option(
        (),
        "Requests that run at once on a replica: `32,64,128`, `1:512` doubling.",
        minimum=1,
        names=("--batch",),
    )
    max_num_batched_tokens: tuple[int, ...] = option(
        (), "Tokens that a step computes at most: `2048,8192`.", minimum=1, names=("--chunk",)
    )
    profiles: tuple[str, ...] = option(
        (),
        "Engines, several with commas: `vllm-0.28`; see `foretoken list engines`.",
        names=("--engine", "--profile"),
    )
    quantizations: tuple[str, ...] = option(
        (),
        "Formats of the weights, with commas; `none` is the dtype: `none,fp8`; without it the"
        " checkpoint's own.",
        names=("--quantization",),
    )
    routers: tuple[str, ...] = option(
        (), "Routers before the replicas, several with commas.", names=("--router",)
    )
    server: str = ""
    speculations: tuple[str, ...] = option(
        (),
        "Speculation, with commas: a method and how many tokens it drafts, `none,ngram:3,layers:2`;"
        " accepted as the scenario's `speculative` says. Default: the scenario's.",
        names=("--speculation",),
    )
    rules: tuple[str, ...] = option(
        (),
        "Rules of the engine to compare, with commas: `none,expert_exchange=deepep_low_latency`;"
        " several at once as `a=1+b=2`. Default: the scenario's.",
        names=("--rules",),
    )
    encoders: tuple[int, ...] = option(
        (),
        "Devices that encode images apart: `0,1,2` (0: engines do). Default: 0, 1, 2 and 4 where"
        " the workload has images.",
        minimum=0,
    )
    kv_tiers: tuple[str, ...] = option(
        (),
        "Memory below the devices' for KV blocks, with commas, as name:bytes:bytes_per_s: a GPU's"
        " part of its host, `cpu:64e9:25e9`, a store of all replicas, `store:2e12:25e9:shared`, or"
        " `none`. Default: the scenario's.",
        names=("--kv-tiers",),
    )

    def __post_init__(self) -> None:
        """Refuse modes there are not and counts below one."""
        settle_devices(self, "devices", "usd_per_hour")
        check_options(self, "space")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSearchRequest:
    """Ask for the best deployments of a space.

    Every point is answered in closed form for a steady load; the `num_finalists` best (0: none) are
    simulated request by request at the load they are proposed for, and of these the `num_curves`
    best at other loads too, where there are several to compare. `objective` ranks: most output
    tokens/s per GPU, least cost per token, fewest GPUs, or lowest time per token. With a
    `target_rps` each deployment is sized to carry that rate. With `has_sensitivity` the best is
    asked again with links 2x, memory bandwidth or capacity +50 %, arithmetic 2x, and prompts and
    answers half and twice as long.

    Throughput and cost count the GPUs of `counted_gpus`: all `max_devices` that are "owned", those
    that a deployment leaves idle too, or only those it has "used". A deployment that is sized for a
    target rate leaves none idle: what it does not need is not owned.
    """

    scenario: ServingScenario
    space: ServingSpace = field(default_factory=ServingSpace, metadata=describe("What may vary"))
    targets: ServingTargets = field(default_factory=ServingTargets, metadata=describe(_TARGETS))
    objective: str = option(
        OBJECTIVES[0], "What ranks: {choices}.", choices=OBJECTIVES, group=_TARGETS
    )
    target_rps: float = option(
        0.0,
        "Size every deployment to carry this many requests/s (0: --gpus).",
        minimum=0,
        group=_TARGETS,
    )
    num_finalists: int = option(
        5, "How many of the best to simulate request by request.", minimum=0, group=_EFFORT
    )
    has_sensitivity: bool = flag(
        "Also tell what links 2x, memory bandwidth or capacity +50 %, arithmetic 2x and other"
        " lengths change.",
        group=_EFFORT,
    )
    counted_gpus: str = option(
        COUNTED_GPUS[0],
        "GPUs that throughput and cost are per: `owned` (all of --gpus, idle ones too) or `used`."
        " With --target-rps always those used.",
        choices=COUNTED_GPUS,
        names=("--count-gpus",),
        group=_TARGETS,
    )
    num_curves: int = option(
        2,
        "How many of the finalists to simulate at other loads too, for a curve of each.",
        minimum=0,
        group=_EFFORT,
    )

    @property
    def num_owned_devices(self) -> int:
        """Devices there are whether or not a deployment uses them; 0 where it is sized."""
        return 0 if self.target_rps else self.space.max_devices

    @property
    def counts_idle(self) -> bool:
        """Whether devices that a deployment leaves idle count in its throughput and its cost."""
        return self.counted_gpus == "owned" and not self.target_rps

    def __post_init__(self) -> None:
        """Refuse objectives there are not."""
        check_options(self, "search")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CandidateColumns(Columns):
    """One entry per distinct point of a search, best first, then those that do not qualify.

    `mode` is one of `SERVING_MODES`. Degrees, `batch_size` (requests that run on a replica) and
    `num_batched_tokens` are of the decode replicas where there are two pools, with `prefill_tp`,
    `prefill_replicas` and so on in addition (0: aggregated); `encoders` encode images apart. A
    deployment has `num_devices` and leaves `num_idle_devices` of those owned; throughput and cost
    count `num_counted_devices`, both or the former alone, as asked. Throughput counts output
    tokens; `tps_per_user` is 1000 over TPOT. Each `_low` and `_high` is the bound of the
    predictor's interval. `verdict` is "ok", or
    what rules the point out (`memory`, `layout`, `ttft_ms`, `bound`, ...) with its `reason`. `rank`
    counts from 1 (0: does not qualify); equal ranks are ties within the error. `is_pareto_user` is
    on the front of tokens/s/GPU against tokens/s/user, `is_pareto_cost` on that of cost against
    latency.
    """

    name: Quantity = ()
    device: Quantity = ()
    mode: Quantity = ()
    profile: Quantity = ()
    quantization: Quantity = ()
    speculation: Quantity = ()
    rules: Quantity = ()
    kv_tiers: Quantity = ()
    router: Quantity = ()
    num_devices: Quantity = ()
    num_idle_devices: Quantity = ()
    num_counted_devices: Quantity = ()
    encoders: Quantity = ()
    replicas: Quantity = ()
    tp: Quantity = ()
    pp: Quantity = ()
    dp: Quantity = ()
    ep: Quantity = ()
    batch_size: Quantity = ()
    num_batched_tokens: Quantity = ()
    prefill_replicas: Quantity = ()
    prefill_tp: Quantity = ()
    prefill_pp: Quantity = ()
    prefill_ep: Quantity = ()
    prefill_batch_size: Quantity = ()
    ttft_ms: Quantity = ()
    ttft_low_ms: Quantity = ()
    ttft_high_ms: Quantity = ()
    tpot_ms: Quantity = ()
    tpot_low_ms: Quantity = ()
    tpot_high_ms: Quantity = ()
    request_throughput_rps: Quantity = ()
    output_throughput_tps: Quantity = ()
    output_throughput_tps_per_gpu: Quantity = ()
    tps_per_gpu_low: Quantity = ()
    tps_per_gpu_high: Quantity = ()
    tps_per_user: Quantity = ()
    usd_per_million_output_tokens: Quantity = ()
    usd_per_hour: Quantity = ()
    kv_utilization_ratio: Quantity = ()
    verdict: Quantity = ()
    reason: Quantity = ()
    rank: Quantity = ()
    is_pareto_user: Quantity = ()
    is_pareto_cost: Quantity = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finalist:
    """A candidate that was simulated request by request, with its load-latency curve.

    `candidate` is its entry in the columns; `scenario_json` its resolved configuration, seed and
    all but for a trace, which the request has (`simulated_answer.read_finalist`); `is_met` says
    whether the simulation meets the targets that the closed form said it does: a miss has rank 0.
    `report` is the simulation of one of the deployment's equal parts, whose configuration is its
    own `scenario_json` and whose `steady` window is judged; `load` and `scenario_json` are the
    whole's.
    """

    candidate: int
    name: str
    rank: int = 0
    is_met: bool = True
    report: ServingReport = field(default_factory=ServingReport)
    outcomes: tuple[LimitOutcome, ...] = ()
    load: tuple[CapacityProbe, ...] = ()
    scenario_json: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """What the best answer becomes when one thing changes: `change` in words."""

    change: str
    best: str
    output_throughput_tps_per_gpu: float = 0.0
    throughput_ratio: float = 1.0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    is_same_best: bool = True


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ServingSearchReport(ResultMethods):
    """The ranked deployments of a space.

    `num_points` were enumerated, of which `num_distinct` differ; `num_ruled_out_by_verdict` counts
    what rules points out, `num_evaluated` were answered in closed form and `num_simulated` request
    by request. `num_near` points are over a limit on TTFT by no more than the closed form may be
    wrong: `num_near_simulated` of them were simulated before they were ruled out, which ruled
    `num_near_ruled_in` of them in and `num_near_ruled_out` out. `best` names the first; `ties`
    those within the error of it. `min_devices` is the least number of GPUs, and `min_usd_per_hour`
    the least price, that carries the target rate (0: none asked or possible), by the candidates of
    those names. `candidates` travel apart, as a table.
    """

    num_points: int = 0
    num_distinct: int = 0
    num_evaluated: int = 0
    num_simulated: int = 0
    num_near: int = 0
    num_near_simulated: int = 0
    num_near_ruled_in: int = 0
    num_near_ruled_out: int = 0
    num_ruled_out_by_verdict: Mapping[str, int] = field(default_factory=dict)
    best: str = ""
    ties: tuple[str, ...] = ()
    min_devices: int = 0
    min_devices_by: str = ""
    min_usd_per_hour: float = 0.0
    min_usd_per_hour_by: str = ""
    finalists: tuple[Finalist, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    candidates: CandidateColumns = field(default_factory=CandidateColumns)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    num_workers: int = 0
    model_version: str = ""
    request_json: str = ""
    job_id: str = ""
    echo: Echo = field(default_factory=Echo)
