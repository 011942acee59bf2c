"""What a simulation answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from foretoken.domain.results.echo import Echo
from foretoken.domain.results.methods import ResultMethods
from foretoken.domain.units import Quantity


def describe_shares(shares: Mapping[str, float]) -> str:
    """Return the shares, largest first: "70% interpolated, 30% analytical"."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{share:.0%} {name}" for name, share in ordered if share > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """Summary of a distribution, in the unit its name carries; all 0 when nothing was observed."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """How often values fell into ranges; those of the i-th are in `edges[i]` to `edges[i + 1]`.

    `shares` add up to 1; both are empty when nothing was observed. The last range contains its
    upper edge, every other one does not.
    """

    edges: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()


def _summaries_of_nothing(record: Any) -> tuple[str, ...]:
    """Return the names of the summaries of a record of which nothing was observed."""
    nothing = Percentiles()
    return tuple(item.name for item in fields(record) if getattr(record, item.name) == nothing)


class Columns:
    """Columns of one length: arrays or sequences, equal where their entries are."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Compare entry by entry; what holds a column does not matter."""
        if type(other) is not type(self):
            return NotImplemented
        names = [item.name for item in fields(cast("Any", self))]
        return all(list(getattr(self, name)) == list(getattr(other, name)) for name in names)

    # Columns may be arrays, which have no hash.
    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RequestColumns(Columns):
    """One entry per request in arrival order; times in s from the start, -1 where never reached.

    `arrival_s` is when the client sent it, `queued_s` when the engine's scheduler could first see
    it, `scheduled_s` when it was first in a step. Of its prompt, and of what it had to compute
    again, `num_cached_tokens` were found in the prefix cache, `num_loaded_tokens` of them below the
    device's memory. `engine` is the replica it ran on, counted through all pools, `slo_class` the
    name of its class or nothing, `outcome` one of `REQUEST_OUTCOMES`. Where prompts are computed
    elsewhere, `prefill_engine` (-1: nowhere else) is the replica that did, at `prefilled_s`, and
    its KV cache was on the decode replica, which hands the first token out, at `transferred_s`. It
    began anew `num_retries` times, its replica having failed. Columns are arrays or tuples.
    """

    arrival_s: Quantity = ()
    queued_s: Quantity = ()
    scheduled_s: Quantity = ()
    first_token_s: Quantity = ()
    finished_s: Quantity = ()
    num_prefill_tokens: Quantity = ()
    num_decode_tokens: Quantity = ()
    num_preemptions: Quantity = ()
    num_cached_tokens: Quantity = ()
    num_loaded_tokens: Quantity = ()
    engine: Quantity = ()
    slo_class: Quantity = ()
    outcome: Quantity = ()
    prefill_engine: Quantity = ()
    prefilled_s: Quantity = ()
    transferred_s: Quantity = ()
    num_retries: Quantity = ()

    @property
    def prompt_end_s(self) -> Quantity:
        """Return when prompts were computed; of older results, which lack that, the first token."""
        return self.prefilled_s if len(self.prefilled_s) else self.first_token_s


# Why a request is not served: refused on arrival for one of two reasons, rejected by a full router,
# or lost with its replica once too often.
REFUSALS: Mapping[str, str] = {
    "context_too_long": "prompt and answer are longer than the model's context",
    "exceeds_kv_cache": "prompt and answer are larger than the whole KV cache",
    "rejected": "every replica was full, and so was the queue before them",
    "lost": "their replicas failed, more often than a request may begin anew",
}
# How a request can end, by the number the engines keep: cut off by the end of the run, with all
# its tokens, or not served.
REQUEST_OUTCOMES = ("unfinished", "completed", *REFUSALS)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SeriesColumns(Columns):
    """One entry per interval of time, a second each or a multiple where the run is very long.

    Requests that arrived, got their first token, completed; prompt tokens computed and output
    tokens that left; means over the interval of requests running and waiting, of the share of KV
    blocks in use, of the requests in a step, and of the share of time that the devices were busy;
    mean power of all devices in W, 0 where the scenario gives none; mean number of replicas that
    serve. Columns are arrays or tuples.
    """

    start_s: Quantity = ()
    num_arrivals: Quantity = ()
    num_first_tokens: Quantity = ()
    num_completions: Quantity = ()
    num_prefill_tokens: Quantity = ()
    num_output_tokens: Quantity = ()
    running_mean: Quantity = ()
    waiting_mean: Quantity = ()
    kv_utilization_ratio: Quantity = ()
    batch_size_mean: Quantity = ()
    utilization_ratio: Quantity = ()
    power_w: Quantity = ()
    replicas_mean: Quantity = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Feasibility:
    """Whether a configuration can run at all; an infeasible one is a result with a reason."""

    is_feasible: bool = True
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassReport:
    """How the requests of one SLO class fared; `name` is empty for those of no class.

    `is_limited` says whether the class limits anything; where it does not, every completed request
    attains.
    """

    name: str
    num_requests: int = 0
    num_completed: int = 0
    is_limited: bool = False
    goodput_rps: float = 0.0
    slo_attainment_ratio: float = 0.0
    ttft_ms: Percentiles = field(default_factory=Percentiles)
    tpot_ms: Percentiles = field(default_factory=Percentiles)
    e2e_latency_ms: Percentiles = field(default_factory=Percentiles)

    def unobserved(self) -> tuple[str, ...]:
        """Return the names of the summaries that no request is in."""
        return () if self.num_completed else _summaries_of_nothing(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """How much of a pipeline stage of an engine was used, as means over the whole run."""

    stage: int
    utilization_ratio: float = 0.0
    mfu_ratio: float = 0.0
    mbu_ratio: float = 0.0


# What the devices of a replica were held for.
REPLICA_STATES = ("starting", "running", "restarting")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPhase:
    """A time in s during which a replica was in one of `REPLICA_STATES`."""

    state: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """What one replica did. Ratios are means over the time that its devices were held.

    `pool` is the one it belongs to, `running_s` how long it served and `phases` when it did what,
    in order; all are empty outside a cluster.
    """

    engine: int
    num_requests: int = 0
    num_serving_steps: int = 0
    num_preemptions: int = 0
    kv_utilization_ratio_mean: float = 0.0
    kv_utilization_ratio_max: float = 0.0
    stages: tuple[StageReport, ...] = ()
    pool: str = ""
    num_failures: int = 0
    running_s: float = 0.0
    phases: tuple[ReplicaPhase, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolReport:
    """What the replicas of one pool did together.

    Of `num_engines` that there can be, on `num_devices`, `running_engines_mean` ran on average;
    `device_s` is the time that its devices were held, starting and restarting too, and what
    `cost_usd` counts. `num_requests` is those that any of its replicas took: one that is prefilled
    in another pool counts in both. `sent_bytes_per_s` and `port_utilization_ratio` are of the KV
    caches that left (of role prefill) or reached it (decode). Means of ratios are over the time
    that its devices were held. Each replica has `num_kv_blocks` of `kv_block_size` tokens.
    """

    name: str
    role: str = "aggregated"
    device: str = ""
    num_engines: int = 0
    num_devices: int = 0
    running_engines_mean: float = 0.0
    num_requests: int = 0
    num_failures: int = 0
    num_scale_ups: int = 0
    num_scale_downs: int = 0
    utilization_ratio: float = 0.0
    kv_utilization_ratio_mean: float = 0.0
    batch_size_mean: float = 0.0
    sent_bytes_per_s: float = 0.0
    port_utilization_ratio: float = 0.0
    num_adapter_loads: int = 0
    device_s: float = 0.0
    cost_usd: float = 0.0
    mfu_ratio: float = 0.0
    mbu_ratio: float = 0.0
    num_kv_blocks: int = 0
    kv_block_size: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingStageMemory:
    """Bytes on one device of a pipeline stage, by what occupies them; `device_bytes` is all it has.

    `usable_bytes` is what the engine may take. `kv_bytes` is the room of the KV cache. `pool` is
    that of a cluster.
    """

    stage: int
    device_bytes: float = 0.0
    usable_bytes: float = 0.0
    weights_bytes: float = 0.0
    activations_bytes: float = 0.0
    graphs_bytes: float = 0.0
    reserved_bytes: float = 0.0
    kv_bytes: float = 0.0
    pool: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadyWindow:
    """The run without its warm-up and its end: all 0 where nothing is left between them.

    From a tenth after the first arrival to a tenth before the last one, or before the last
    completion where all arrive at once; of a search's finalist without the rounds in which it warms
    up. Latencies are those of the requests that arrived in it, rates count tokens and completions
    in it; of a finalist's closed loop they are what is under way over how long a request is.
    """

    start_s: float = 0.0
    end_s: float = 0.0
    num_requests: int = 0
    request_throughput_rps: float = 0.0
    output_throughput_tps: float = 0.0
    ttft_ms: Percentiles = field(default_factory=Percentiles)
    tpot_ms: Percentiles = field(default_factory=Percentiles)
    e2e_latency_ms: Percentiles = field(default_factory=Percentiles)

    def unobserved(self) -> tuple[str, ...]:
        """Return the names of the summaries that no request is in."""
        return () if self.num_requests else _summaries_of_nothing(self)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ServingReport(ResultMethods):
    """Outcome of a serving simulation; docs/reference/serving-metrics.md defines every number.

    A deployment that serves none of the requests that came is infeasible, as one that does not fit.
    Rates count from the first arrival to the last completion. `step_time_s_by_group` splits the
    busy time by operator group; `step_time_ratio_by_provenance` says what share of it rests on
    measured, interpolated, extrapolated, transferred or analytical estimates.
    `step_time_low_ratio` and `step_time_high_ratio` are the busy time at the operators' lower and
    upper bounds, over the busy time at their estimates. `itl_ms_quantiles` are the token gaps at
    `ITL_QUANTILES`. Energy and money are 0 where the scenario gives no power or price.
    `scenario_json` is the resolved configuration, `job_id` the job whose tables can be read.
    `pools` are those of a cluster (empty: replicas behind a round robin), `transfer_ms` the time
    from a request's first token to its KV cache on the decode replica, `num_retries` how often
    requests began anew, `tokens_per_decode_mean` what a decoding sequence gets in a step (above 1
    where it is speculative). `notes` are remarks: whose measurements stand in for the engine's own.
    `echo` is the question, and what the answer rests on. `session_latency_ms` is from the first
    arrival to the last token of sessions of several requests that completed whole.
    """

    feasibility: Feasibility = field(default_factory=Feasibility)
    ttft_ms: Percentiles = field(default_factory=Percentiles)
    itl_ms: Percentiles = field(default_factory=Percentiles)
    tpot_ms: Percentiles = field(default_factory=Percentiles)
    e2e_latency_ms: Percentiles = field(default_factory=Percentiles)
    queueing_ms: Percentiles = field(default_factory=Percentiles)
    ttft_queued_ms: Percentiles = field(default_factory=Percentiles)
    e2e_latency_ms_per_token: Percentiles = field(default_factory=Percentiles)
    service_ms: Percentiles = field(default_factory=Percentiles)
    prefill_ms: Percentiles = field(default_factory=Percentiles)
    prefill_ms_per_token: Percentiles = field(default_factory=Percentiles)
    decode_ms: Percentiles = field(default_factory=Percentiles)
    execution_ms: Percentiles = field(default_factory=Percentiles)
    preempted_ms: Percentiles = field(default_factory=Percentiles)
    interarrival_ms: Percentiles = field(default_factory=Percentiles)
    prompt_tokens: Percentiles = field(default_factory=Percentiles)
    answer_tokens: Percentiles = field(default_factory=Percentiles)
    request_preemptions: Percentiles = field(default_factory=Percentiles)
    batch_size: Percentiles = field(default_factory=Percentiles)
    batch_tokens: Percentiles = field(default_factory=Percentiles)
    step_ms: Percentiles = field(default_factory=Percentiles)
    running: Percentiles = field(default_factory=Percentiles)
    waiting: Percentiles = field(default_factory=Percentiles)
    itl_ms_quantiles: tuple[float, ...] = ()
    batch_size_histogram: Histogram = field(default_factory=Histogram)
    batch_tokens_histogram: Histogram = field(default_factory=Histogram)
    num_requests: int = 0
    num_completed: int = 0
    num_serving_steps: int = 0
    num_preemptions: int = 0
    num_refused_by_reason: Mapping[str, int] = field(default_factory=dict)
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_devices: int = 0
    duration_s: float = 0.0
    offered_rps: float = 0.0
    request_throughput_rps: float = 0.0
    input_throughput_tps: float = 0.0
    output_throughput_tps: float = 0.0
    request_throughput_rps_per_gpu: float = 0.0
    input_throughput_tps_per_gpu: float = 0.0
    output_throughput_tps_per_gpu: float = 0.0
    goodput_rps: float = 0.0
    slo_attainment_ratio: float = 0.0
    utilization_ratio: float = 0.0
    mfu_ratio: float = 0.0
    mbu_ratio: float = 0.0
    prefix_cache_hit_ratio: float = 0.0
    num_kv_blocks: int = 0
    kv_block_size: int = 0
    kv_utilization_ratio_mean: float = 0.0
    kv_utilization_ratio_max: float = 0.0
    batch_size_mean: float = 0.0
    energy_wh: float = 0.0
    energy_j_per_output_token: float = 0.0
    power_w_mean: float = 0.0
    cost_usd: float = 0.0
    usd_per_million_output_tokens: float = 0.0
    usd_per_million_tokens: float = 0.0
    step_time_s_by_group: Mapping[str, float] = field(default_factory=dict)
    step_time_ratio_by_provenance: Mapping[str, float] = field(default_factory=dict)
    step_time_low_ratio: float = 1.0
    step_time_high_ratio: float = 1.0
    classes: tuple[ClassReport, ...] = ()
    engines: tuple[EngineReport, ...] = ()
    memory: tuple[ServingStageMemory, ...] = ()
    steady: SteadyWindow = field(default_factory=SteadyWindow)
    requests: RequestColumns = field(default_factory=RequestColumns)
    series: SeriesColumns = field(default_factory=SeriesColumns)
    model_version: str = ""
    scenario_json: str = ""
    job_id: str = ""
    pools: tuple[PoolReport, ...] = ()
    transfer_ms: Percentiles = field(default_factory=Percentiles)
    num_retries: int = 0
    tokens_per_decode_mean: float = 1.0
    notes: tuple[str, ...] = ()
    echo: Echo = field(default_factory=Echo)
    session_latency_ms: Percentiles = field(default_factory=Percentiles)

    @property
    def was_simulated(self) -> bool:
        """Whether requests came to engines, be it that these refused all: there are tables then."""
        return self.num_devices > 0

    def unobserved(self) -> tuple[str, ...]:
        """Return the names of the summaries that no request is in."""
        return () if self.num_completed else _summaries_of_nothing(self)


# Percents at which `ServingReport.itl_ms_quantiles` are: finer towards the end, where tails are.
ITL_QUANTILES = (*range(100), *(99 + tenth / 10 for tenth in range(1, 10)), 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitScore:
    """How a model did on one kind of points left out of training.

    `split` is "inside", "gap", "new configuration" or "beyond". `error_quantiles_ratio` are 21
    quantiles, from the least to the greatest, of estimate over truth less one.
    """

    split: str
    num_held_out: int
    mape_ratio: float
    p90_ratio: float
    interval_coverage_ratio: float
    error_quantiles_ratio: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutCase:
    """One point left out of training, and what the model said of it."""

    split: str
    dims: Mapping[str, int]
    measured_us: float
    estimate_us: float
    low_us: float
    high_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTrainingReport:
    """How well the latency model of one operator predicts rows it was not trained on.

    The three ratios are over all splits. `member_weights` is each way of estimating's share in the
    answers inside the grid, `worst` the points furthest off, worst first.
    """

    operator: str
    device: str
    num_rows: int
    num_held_out: int
    held_out_mape_ratio: float
    held_out_p90_ratio: float
    interval_coverage_ratio: float
    splits: tuple[SplitScore, ...] = ()
    member_weights: Mapping[str, float] = field(default_factory=dict)
    worst: tuple[HeldOutCase, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PredictorTrainingReport(ResultMethods):
    """Outcome of training the predictor on one snapshot of the catalog.

    `num_reused` of the models were kept from before: neither their rows nor parameters changed.
    """

    model_version: str = ""
    snapshot_hash: str = ""
    num_rows: int = 0
    cpu_s: float = 0.0
    operators: tuple[OperatorTrainingReport, ...] = ()
    created_at: str = ""
    num_reused: int = 0
