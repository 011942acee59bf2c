"""The questions the simulator answers: a serving deployment, or a training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foretoken.domain.alias import settle_devices
from foretoken.domain.cluster import ClusterSpec, LoraSpec, SpeculativeSpec
from foretoken.domain.engine import EngineSpec
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.estimate import DType
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.load import REQUIRED, ModelField, settle_model
from foretoken.domain.slo import Slo, SloClass
from foretoken.domain.trainer import TrainerSpec
from foretoken.domain.training_truth import ModuleTimes, TrainingCalibration
from foretoken.domain.workload import WorkloadSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingScenario:
    """One inference deployment under one workload.

    `model` may be given by name: a preset's, or the path or text of a Hugging Face `config.json`.

    `quantization` names how weights are stored and multiplied, as the catalog's variants do
    (`fp8`, `fp8_block`, `int8_wo`, `int4_wo`; empty: as `dtype`), `kv_dtype` the number format of
    the KV cache (unset: `dtype`). `kernels` names the kernel source of an operator (empty: the
    fastest measured). `moe_routing` is the spread of tokens over experts under which latencies were
    measured, as the catalog's `routing=` variants name it (`balanced`, `power_law_1.01`), and
    `moe_imbalance_ratio` the load of the busiest expert-parallel rank over the mean. `slo` holds
    for requests of no class.

    `device_usd_per_hour` prices a device for the cost of a million tokens (0: not priced), and
    `device_idle_w` and `device_busy_w` are its measured power for the energy (0: not measured).

    `cluster` spreads requests over pools of replicas (unset: `layout.dp` replicas behind a round
    robin). `speculative` and `lora` are what the engines do beside.
    """

    name: str = "serving"
    model: ModelField = field(default=REQUIRED)
    device: str
    topology: str = ""
    framework: str = ""
    dtype: DType = DType.BF16
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    engine: EngineSpec = field(default_factory=EngineSpec)
    workload: WorkloadSpec = field(default_factory=WorkloadSpec)
    slo: Slo = field(default_factory=Slo)
    seed: int = 0
    quantization: str = ""
    kv_dtype: DType | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    moe_routing: str = ""
    moe_imbalance_ratio: float = 1.0
    slo_classes: tuple[SloClass, ...] = ()
    device_usd_per_hour: float = 0.0
    device_idle_w: float = 0.0
    device_busy_w: float = 0.0
    cluster: ClusterSpec | None = None
    speculative: SpeculativeSpec | None = None
    lora: LoraSpec | None = None

    @property
    def num_devices(self) -> int:
        """Devices that the deployment starts with."""
        if self.cluster is None:
            return self.layout.num_devices
        return sum(
            replica_layout(pool.layout or self.layout).num_devices * pool.num_replicas
            for pool in self.cluster.pools
        )

    def __post_init__(self) -> None:
        """Refuse a seed that random generators do not take, and negative prices and powers."""
        settle_devices(self, "device")
        settle_model(self)
        checks = {
            "seed": (self.seed >= 0, "must not be negative"),
            "moe_imbalance_ratio": (self.moe_imbalance_ratio >= 1, "must be at least 1"),
            "device_usd_per_hour": (self.device_usd_per_hour >= 0, "must not be negative"),
            "device_idle_w": (self.device_idle_w >= 0, "must not be negative"),
            "device_busy_w": (
                self.device_busy_w >= self.device_idle_w,
                "must be at least device_idle_w",
            ),
            "slo_classes": (
                sum(item.share_ratio for item in self.slo_classes) <= 1 + 1e-9,
                "their shares must not add up to more than 1",
            ),
        }
        InvalidRequestError.check("scenario", checks)


def replica_layout(layout: ParallelLayout) -> ParallelLayout:
    """Return the layout of one replica: replicas are alike, unless they share experts."""
    return layout if layout.ep > 1 else replace(layout, dp=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingScenario:
    """One training configuration: a step is one optimizer update of `global_batch_size` samples.

    `model` may be given by name, as in `ServingScenario`.

    `trainer` is the framework: which kernels run, in which formats, what is hidden. `framework` is
    the software whose measurements are asked for.

    `recompute` is `none`, `selective` (the modules of `recompute_modules`, `core_attention` unless
    named) or `full` (whole layers); of each chunk of layers the first `recompute_layers` (0: all).
    With `partitions_activations` the saved inputs of layers are split over tp and gathered again.

    `pipeline_schedule` names a plug-in (`one_f_one_b`). A rank holds `virtual_stages` chunks of
    layers; `stage_layers` gives the layers of every chunk in the order of the model (empty: even,
    the first take what is over).

    `zero_stage` shards optimizer (1), gradients (2) and parameters (3) over `shard_degree` ranks of
    dp and cp (0: all of them), and replicates over the rest (HSDP). `sequence_parallel` splits what
    tensor parallelism leaves whole by tokens. `context_parallel` exchanges keys and values by
    `ring`, or heads by `all_to_all` (Ulysses). `weight_parallel` is InternEvo's: `msp`, `fsp` or
    `isp`, the last with weights split over `weight_degree` ranks (0: tp). Experts are split by
    width over `expert_tp` ranks (0: what ep leaves of tp).

    `moe_routing` is the spread of tokens over experts under which latencies were measured,
    `moe_imbalance_ratio` the load of the busiest expert-parallel rank over the mean.
    `overflow_ratio` is the share of steps that find an overflow and skip the update.
    `straggler_ratio` is the standard deviation of a rank's speed, `network_spread_ratio` that of a
    transfer's time, each over its mean; they spread the step.

    `stage_devices` and `stage_topologies` name the device and the links of every rank of the
    pipeline where they differ (empty: all are `device` and `topology`).

    `module_times` replaces the predictor's estimates of the modules it names; `calibration`
    corrects by steps measured on the user's machines.
    """

    name: str = "training"
    model: ModelField = field(default=REQUIRED)
    device: str
    topology: str = ""
    framework: str = ""
    dtype: DType = DType.BF16
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    sequence_length: int = 4096
    micro_batch_size: int = 1
    global_batch_size: int = 8
    trainer: TrainerSpec = field(default_factory=TrainerSpec)
    pipeline_schedule: str = "one_f_one_b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    recompute: str = "none"
    recompute_layers: int = 0
    recompute_modules: tuple[str, ...] = ()
    partitions_activations: bool = False
    zero_stage: int = 0
    shard_degree: int = 0
    sequence_parallel: bool = False
    context_parallel: str = "ring"
    weight_parallel: str = ""
    weight_degree: int = 0
    expert_tp: int = 0
    moe_routing: str = ""
    moe_imbalance_ratio: float = 1.0
    overflow_ratio: float = 0.0
    straggler_ratio: float = 0.0
    network_spread_ratio: float = 0.0
    stage_devices: tuple[str, ...] = ()
    stage_topologies: tuple[str, ...] = ()
    module_times: ModuleTimes | None = None
    calibration: TrainingCalibration | None = None

    def __post_init__(self) -> None:
        """Put the model in place of its name, and the devices' own names in place of others."""
        settle_devices(self, "device", "stage_devices")
        settle_model(self)

    @property
    def num_micro_batches(self) -> int:
        """Micro batches that each data-parallel replica runs in a step."""
        return self.global_batch_size // (self.layout.dp * self.micro_batch_size)
