"""What a training simulation answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.results.echo import Echo
from foretoken.domain.results.methods import ResultMethods
from foretoken.domain.results.report import Columns, Feasibility, Percentiles
from foretoken.domain.units import Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Peak bytes on one device of a pipeline stage, by what occupies them at that moment.

    A stage is one rank of the pipeline with all its chunks of layers. `reserved_bytes` is what the
    allocator takes from the device for `total_bytes`, `headroom_bytes` what driver, context and
    communicators hold outside of it, and `device_bytes` what the device has. `peak_ms` is when in
    the step the peak is, `largest` names what dominates it (`activations: mlp_activation`),
    `num_in_flight` counts the micro batches whose activations it holds then. `advice` says what
    would help most where it does not fit.
    """

    stage: int
    weights_bytes: float = 0.0
    gradients_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    activations_bytes: float = 0.0
    temporary_bytes: float = 0.0
    reserved_bytes: float = 0.0
    headroom_bytes: float = 0.0
    device_bytes: float = 0.0
    peak_ms: float = 0.0
    num_in_flight: float = 0.0
    largest: str = ""
    advice: str = ""

    @property
    def total_bytes(self) -> float:
        """Sum of all parts: what tensors occupy."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.temporary_bytes
        )

    @property
    def margin_bytes(self) -> float:
        """What is left on the device; negative where the stage does not fit."""
        return self.device_bytes - self.headroom_bytes - self.reserved_bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpanColumns(Columns):
    """What every stage did when, as columns of one length, in the order of stages and times.

    `stage` is the rank of the pipeline, `chunk` the run of layers, `micro_batch` -1 where a span
    belongs to no micro batch. `kind` is the number of a name in `SPAN_KINDS`. Compute and
    communication are streams of their own, which overlap; times are ms from the step's start.
    """

    stage: Quantity = ()
    chunk: Quantity = ()
    micro_batch: Quantity = ()
    kind: Quantity = ()
    start_ms: Quantity = ()
    end_ms: Quantity = ()


# What a span can be, by its number in `SpanColumns.kind`. Those of the second line are
# communication, and run concurrent with the first line's.
SPAN_KINDS = (
    *("forward", "backward", "backward_input", "backward_weight", "optimizer", "host"),
    *("send_forward", "send_backward", "gradient_reduction", "parameter_gather", "exchange"),
)
NUM_COMPUTE_KINDS = 6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryColumns(Columns):
    """Allocated bytes of every stage over the step: `bytes` hold from `time_ms` on."""

    stage: Quantity = ()
    time_ms: Quantity = ()
    bytes: Quantity = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrafficColumns(Columns):
    """Bytes that devices send to each other in a step, summed over its collectives and transfers.

    Devices are numbered with tp fastest, then cp, dp and pp, and put together to cells of
    `num_devices`: `source` and `target` are the first of theirs. What the devices of a cell send
    each other has both alike. `axis` is the layout's that they communicate along.
    """

    axis: Quantity = ()
    source: Quantity = ()
    target: Quantity = ()
    num_devices: Quantity = ()
    bytes: Quantity = ()


# Tables that can be read in addition to a report, and exported.
TRAINING_TABLES = ("spans", "memory", "traffic")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentTime:
    """One part of a step on one stage, in ms: the mean of its `num_calls` occurrences.

    Names are those of measured training steps: `encoder_fwd`, `encoder_bwd` (one layer of one micro
    batch, recomputation included), `stage_fwd`, `stage_bwd` (all of a stage's), `mp_allreduce`,
    `pp_p2p`, `dp_allreduce`, `dp_allgather`, `optimizer` (overflow check, update and the gathering
    of parameters that is waited for) and `update` (its kernels alone).
    """

    name: str
    stage: int
    time_ms: float
    num_calls: int = 1


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TrainingReport(ResultMethods):
    """Outcome of a training simulation; times of one optimizer step.

    `step_time_ms` is the median step, with the calibration where the scenario has one;
    `step_time_raw_ms` is without. `step_time_low_ms` and `step_time_high_ms` are its 90 %
    interval by the errors of operators, `step_spread_ms` how steps differ among each other by
    stragglers, the network and skipped updates. `step_time_ms_by_group` splits the critical stage's
    time by operator group, bubble included; `communication_ms_by_axis` is all it communicates,
    `exposed_ms_by_axis` what of that no computation hides.
    `echo` is the question, and what the answer rests on.
    """

    feasibility: Feasibility = field(default_factory=Feasibility)
    step_time_ms: float = 0.0
    step_time_low_ms: float = 0.0
    step_time_high_ms: float = 0.0
    step_time_raw_ms: float = 0.0
    step_spread_ms: Percentiles = field(default_factory=Percentiles)
    mfu_ratio: float = 0.0
    hfu_ratio: float = 0.0
    bubble_ratio: float = 0.0
    exposed_communication_ratio: float = 0.0
    tokens_per_s: float = 0.0
    tokens_per_s_per_gpu: float = 0.0
    num_devices: int = 0
    num_micro_batches: int = 0
    step_time_ms_by_group: Mapping[str, float] = field(default_factory=dict)
    step_time_ratio_by_provenance: Mapping[str, float] = field(default_factory=dict)
    communication_ms_by_axis: Mapping[str, float] = field(default_factory=dict)
    exposed_ms_by_axis: Mapping[str, float] = field(default_factory=dict)
    components: tuple[ComponentTime, ...] = ()
    memory: tuple[StageMemory, ...] = ()
    device_memory_bytes: float = 0.0
    spans: SpanColumns = field(default_factory=SpanColumns)
    memory_timeline: MemoryColumns = field(default_factory=MemoryColumns)
    traffic: TrafficColumns = field(default_factory=TrafficColumns)
    notes: tuple[str, ...] = ()
    model_version: str = ""
    scenario_json: str = ""
    job_id: str = ""
    echo: Echo = field(default_factory=Echo)
