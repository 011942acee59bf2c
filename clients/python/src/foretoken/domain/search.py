"""Questions about many deployments: the highest rate of one, and the best of a space of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.alias import settle_devices
from foretoken.domain.echo import Echo
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.report import Columns, Feasibility, ServingReport
from foretoken.domain.scenario import ServingScenario
from foretoken.domain.units import Quantity

# What a limit can be about: latencies of `ServingReport`.
LIMITED_METRICS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_latency_ms")
OBJECTIVES = ("throughput_per_gpu", "cost", "num_devices", "latency")
SERVING_MODES = ("aggregated", "disaggregated")
# GPUs that throughput and cost are counted per.
COUNTED_GPUS = ("owned", "used")
_HIGHEST_PERCENTILE = 100


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
                    self.metric in LIMITED_METRICS,
                    f"must be one of {', '.join(LIMITED_METRICS)}",
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

    The SLOs are the scenario's and its classes'; `slo_attainment_ratio` 0 asks for nothing.
    """

    limits: tuple[LatencyLimit, ...] = ()
    slo_attainment_ratio: float = 0.0

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        InvalidRequestError.check(
            "targets",
            {"slo_attainment_ratio": (0 <= self.slo_attainment_ratio <= 1, "must be 0 to 1")},
        )


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
    targets: ServingTargets
    tolerance_ratio: float = 0.01
    confidence_ratio: float = 0.95
    max_rps: float = 0.0

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


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityReport:
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

    `devices` (empty: the scenario's) are those to compare, each with its price of
    `usd_per_hour` by name. A deployment has at most `max_devices`. `tp`, `pp` and `ep` are degrees
    (empty: every power of two that divides and fits a node; pp and ep 1). `modes` are of
    `SERVING_MODES` (empty: both); of a disaggregated one `prefill_replicas` to `decode_replicas`
    are the pairs that match in rate. `max_num_seqs` bounds running requests,
    `max_num_batched_tokens` the chunk of a step, `profiles` are engines (their schedulers),
    `quantizations` formats of the weights ("": as the scenario's dtype), `routers` those before the
    replicas. With `server`, one that files are written for, deployments that it cannot run are out,
    beside those that their engine cannot.
    """

    devices: tuple[str, ...] = ()
    usd_per_hour: Mapping[str, float] = field(default_factory=dict)
    max_devices: int = 8
    modes: tuple[str, ...] = ()
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    max_num_seqs: tuple[int, ...] = ()
    max_num_batched_tokens: tuple[int, ...] = ()
    profiles: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    server: str = ""

    def __post_init__(self) -> None:
        """Refuse modes there are not and counts below one."""
        settle_devices(self, "devices", "usd_per_hour")
        counts = ("tp", "pp", "dp", "ep", "max_num_seqs", "max_num_batched_tokens")
        InvalidRequestError.check(
            "space",
            {
                "max_devices": (self.max_devices >= 1, "must be at least 1"),
                "modes": (
                    set(self.modes) <= set(SERVING_MODES),
                    f"must be of {', '.join(SERVING_MODES)}",
                ),
                **{
                    name: (all(value >= 1 for value in getattr(self, name)), "must be at least 1")
                    for name in counts
                },
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSearchRequest:
    """Ask for the best deployments of a space.

    Every point is answered in closed form for a steady load; the `num_finalists` best (0: none) are
    simulated request by request at the load they are proposed for. `objective` ranks: most output
    tokens/s per GPU, least cost per token, fewest GPUs, or lowest time per token. With a
    `target_rps` each deployment is sized to carry that rate. With `has_sensitivity` the best is
    asked again with links 2x, memory bandwidth or capacity +50 %, arithmetic 2x, and prompts and
    answers half and twice as long.

    Throughput and cost count the GPUs of `counted_gpus`: all `max_devices` that are "owned", those
    that a deployment leaves idle too, or only those it has "used". A deployment that is sized for a
    target rate leaves none idle: what it does not need is not owned.
    """

    scenario: ServingScenario
    space: ServingSpace = field(default_factory=ServingSpace)
    targets: ServingTargets = field(default_factory=ServingTargets)
    objective: str = "throughput_per_gpu"
    target_rps: float = 0.0
    num_finalists: int = 5
    has_sensitivity: bool = False
    counted_gpus: str = COUNTED_GPUS[0]

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
        InvalidRequestError.check(
            "search",
            {
                "objective": (
                    self.objective in OBJECTIVES,
                    f"must be one of {', '.join(OBJECTIVES)}",
                ),
                "counted_gpus": (
                    self.counted_gpus in COUNTED_GPUS,
                    f"must be one of {', '.join(COUNTED_GPUS)}",
                ),
                "target_rps": (self.target_rps >= 0, "must not be negative; 0 is no target"),
                "num_finalists": (self.num_finalists >= 0, "must not be negative"),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CandidateColumns(Columns):
    """One entry per distinct point of a search, best first, then those that do not qualify.

    `mode` is one of `SERVING_MODES`. Degrees, `batch_size` (requests that run on a replica) and
    `num_batched_tokens` are of the decode replicas where there are two pools, with `prefill_tp`,
    `prefill_replicas` and so on beside (0: aggregated). A deployment has `num_devices` and leaves
    `num_idle_devices` of those owned; throughput and cost count `num_counted_devices`, both or the
    former alone, as asked. Throughput counts output tokens; `tps_per_user` is 1000 over TPOT. Each
    `_low` and `_high` is the bound of the predictor's interval. `verdict` is "ok", or what rules
    the point out (`memory`, `layout`, `ttft_ms`, `bound`, ...) with its `reason`. `rank` counts
    from 1 (0: does not qualify); equal ranks are ties within the error. `is_pareto_user` is on the
    front of tokens/s/GPU against tokens/s/user, `is_pareto_cost` on that of cost against latency.
    """

    name: Quantity = ()
    device: Quantity = ()
    mode: Quantity = ()
    profile: Quantity = ()
    quantization: Quantity = ()
    router: Quantity = ()
    num_devices: Quantity = ()
    num_idle_devices: Quantity = ()
    num_counted_devices: Quantity = ()
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
    all; `is_met` says whether the simulation meets the targets that the closed form said it does: a
    miss has rank 0. `report` is the simulation of one of the deployment's equal parts, whose
    configuration is its own `scenario_json` and whose `steady` window is judged; `load` and
    `scenario_json` are the whole's.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSearchReport:
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
