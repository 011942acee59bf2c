"""What a simulation answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
class RequestColumns:
    """One entry per request in arrival order; times in s from the start, -1 where never reached."""

    arrival_s: tuple[float, ...] = ()
    scheduled_s: tuple[float, ...] = ()
    first_token_s: tuple[float, ...] = ()
    finished_s: tuple[float, ...] = ()
    num_prefill_tokens: tuple[int, ...] = ()
    num_decode_tokens: tuple[int, ...] = ()
    num_preemptions: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Feasibility:
    """Whether a configuration can run at all; an infeasible one is a result with a reason."""

    is_feasible: bool = True
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingReport:
    """Outcome of a serving simulation.

    Rates count from the first arrival to the last completion. `step_time_s_by_group` splits the
    busy time by operator group; `step_time_ratio_by_provenance` says what share of it rests on
    measured, interpolated, extrapolated, transferred or analytical estimates.
    `step_time_low_ratio` and `step_time_high_ratio` are the busy time at the operators' lower and
    upper bounds, over the busy time at their estimates. `scenario_json` is the resolved
    configuration.
    """

    feasibility: Feasibility = field(default_factory=Feasibility)
    ttft_ms: Percentiles = field(default_factory=Percentiles)
    itl_ms: Percentiles = field(default_factory=Percentiles)
    tpot_ms: Percentiles = field(default_factory=Percentiles)
    e2e_latency_ms: Percentiles = field(default_factory=Percentiles)
    queueing_ms: Percentiles = field(default_factory=Percentiles)
    num_requests: int = 0
    num_completed: int = 0
    num_serving_steps: int = 0
    num_preemptions: int = 0
    duration_s: float = 0.0
    request_throughput_rps: float = 0.0
    input_throughput_tps: float = 0.0
    output_throughput_tps: float = 0.0
    output_throughput_tps_per_gpu: float = 0.0
    goodput_rps: float = 0.0
    slo_attainment_ratio: float = 0.0
    utilization_ratio: float = 0.0
    mfu_ratio: float = 0.0
    num_kv_blocks: int = 0
    kv_utilization_ratio_mean: float = 0.0
    kv_utilization_ratio_max: float = 0.0
    batch_size_mean: float = 0.0
    step_time_s_by_group: Mapping[str, float] = field(default_factory=dict)
    step_time_ratio_by_provenance: Mapping[str, float] = field(default_factory=dict)
    step_time_low_ratio: float = 1.0
    step_time_high_ratio: float = 1.0
    requests: RequestColumns = field(default_factory=RequestColumns)
    model_version: str = ""
    scenario_json: str = ""

    @property
    def offered_rps(self) -> float:
        """Rate at which the requests arrived, in requests/s; 0 where they are too few to tell."""
        arrivals = self.requests.arrival_s
        span_s = max(arrivals, default=0.0) - min(arrivals, default=0.0)
        return (len(arrivals) - 1) / span_s if span_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Peak bytes on one device of a pipeline stage, by what occupies them."""

    stage: int
    weights_bytes: float = 0.0
    gradients_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    activations_bytes: float = 0.0
    temporary_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Sum of all parts."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.temporary_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSpan:
    """One box of the pipeline picture: what a stage did when, in ms from the step's start."""

    stage: int
    micro_batch: int
    kind: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingReport:
    """Outcome of a training simulation; times of one optimizer step.

    `step_time_low_ms` and `step_time_high_ms` are the step at the operators' bounds.
    `step_time_ms_by_group` splits the critical stage's time by operator group, bubble included.
    """

    feasibility: Feasibility = field(default_factory=Feasibility)
    step_time_ms: float = 0.0
    step_time_low_ms: float = 0.0
    step_time_high_ms: float = 0.0
    mfu_ratio: float = 0.0
    bubble_ratio: float = 0.0
    tokens_per_s: float = 0.0
    tokens_per_s_per_gpu: float = 0.0
    num_devices: int = 0
    num_micro_batches: int = 0
    step_time_ms_by_group: Mapping[str, float] = field(default_factory=dict)
    step_time_ratio_by_provenance: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[StageMemory, ...] = ()
    device_memory_bytes: float = 0.0
    pipeline: tuple[PipelineSpan, ...] = ()
    model_version: str = ""
    scenario_json: str = ""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorTrainingReport:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileReport:
    """Outcome of a profiling run."""

    run_id: str = ""
    device: str = ""
    num_planned: int = 0
    num_measured: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    wall_s: float = 0.0
