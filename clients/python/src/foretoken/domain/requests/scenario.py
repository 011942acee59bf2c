"""The questions the simulator answers: a serving deployment, or a training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foretoken.domain.alias import settle_devices
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.frameworks.engine import EngineProfile, EngineSpec
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.training_truth import ModuleTimes, TrainingCalibration
from foretoken.domain.models.load import REQUIRED, ModelField, settle_model
from foretoken.domain.models.quantization import settle_quantization
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.cluster import ClusterSpec, LoraSpec, SpeculativeSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.option import describe, flag, option
from foretoken.domain.requests.slo import Slo, SloClass
from foretoken.domain.requests.workload import WorkloadSpec

# How the ranks of cp exchange; each is a pass of `parallelism/`.
CONTEXT_PARALLELS = ("ring", "all_to_all", "hierarchical")
# Latent attention to chosen tokens, a kind of layer.
_SPARSE = "sparse_latent"
# More than anybody trains on at once: every micro batch and chunk of layers takes some time here.
_MOST_IN_TRAINING = {
    "sequence_length": 2**31,
    "micro_batch_size": 2**24,
    "global_batch_size": 2**24,
    "virtual_stages": 2**16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingScenario:
    """One inference deployment under one workload.

    `model` may be given by name: a preset's, or the path or text of a Hugging Face `config.json`.

    `moe_routing` is named as the catalog's `routing=` variants are (`balanced`, `power_law_1.01`),
    or `lognormal_S` where tokens draw their experts (see `lowering/drawn_routing.py`).
    Without a `cluster`, `layout.dp` replicas are behind a round robin.
    """

    name: str = option("serving", "the scenario's name")
    model: ModelField = field(
        default=REQUIRED,
        metadata=describe(
            "a preset, or the path of a `config.json` or a GGUF file", example="llama-3-8b"
        ),
    )
    device: str = field(metadata=describe("`foretoken list devices`", example="h100_sxm"))
    topology: str = option("", "links between devices; empty: the usual one of the device")
    framework: str = option(
        "", "only measurements of this software; empty: the engine's own first, then others'"
    )
    dtype: DType = option(DType.BF16, "fp32 tf32 fp16 bf16 fp8 int8 int4")
    layout: ParallelLayout = field(
        default_factory=ParallelLayout, metadata=describe("degrees of parallelism")
    )
    engine: EngineSpec = field(
        default_factory=EngineSpec,
        metadata=describe("the engine: a profile, and what differs from it"),
    )
    workload: WorkloadSpec = field(default_factory=WorkloadSpec, metadata=describe("what is asked"))
    slo: Slo = field(
        default_factory=Slo, metadata=describe("limits of requests of no class; 0: no limit")
    )
    seed: int = option(0, "decides arrivals, lengths and all else that is random")
    quantization: str = option(
        "",
        "how weights are stored and multiplied: fp8, fp8_block, int4_wo, or by part"
        " attention=fp8+experts=nvfp4; empty: as the model's checkpoint; none: as dtype."
        " Formats the device lacks are refused, unless the engine emulates them",
    )
    kv_dtype: DType | None = option(
        None,
        "number format of the KV cache; null: what the checkpoint has scales for where the engine"
        " goes by them, or dtype",
    )
    kernels: Mapping[str, str] = option(
        {}, "kernel source of an operator (moe_experts: marlin); empty: the fastest measured"
    )
    moe_routing: str = option(
        "",
        "spread of tokens over experts: as latencies were measured (power_law_1.01), or drawn by"
        " popularity (lognormal_1.35); empty: as was counted of the model, else drawn uniformly",
    )
    moe_imbalance_ratio: float = option(
        1.0, "load of the busiest expert-parallel rank over the mean"
    )
    slo_classes: tuple[SloClass, ...] = option(
        (),
        "requests with limits of their own: [{name: chat, share_ratio: 0.7,"
        " slo: {ttft_ms: 500}, priority: 1}]",
    )
    device_usd_per_hour: float = option(0.0, "price of a device; 0: costs are not reported")
    device_idle_w: float = option(0.0, "measured power; 0: energy is not reported")
    device_busy_w: float = option(0.0, "the same where every device computes")
    power_limit_w: float = option(
        0.0, "power that each device is limited to, in W; 0: what it is sold with"
    )
    cluster: ClusterSpec | None = option(
        None, "pools of replicas, routers, autoscaling, failures: see clusters"
    )
    speculative: SpeculativeSpec | None = option(
        None, "drafts that a step verifies: see speculative decoding"
    )
    lora: LoraSpec | None = option(None, "adapters that requests ask for: see clusters")
    correction: str = option(
        "", "correction of operators' or steps' times: `foretoken list corrections`"
    )

    @property
    def num_devices(self) -> int:
        """Devices that the deployment starts with."""
        if self.cluster is None:
            return self.layout.num_devices + self._ffn_devices(self.engine)
        return sum(
            pool.num_replicas
            * (
                replica_layout(pool.layout_in(self.layout)).num_devices
                + (self._ffn_devices(pool.engine or self.engine) if pool.role != "encoder" else 0)
            )
            for pool in self.cluster.pools
        )

    def _ffn_devices(self, engine: EngineSpec) -> int:
        """Return the devices that a replica has for experts alone."""
        return engine.resolve(find_device(self.device), self.layout.tp).ffn_devices

    @property
    def busy_power_w(self) -> float:
        """Power of a device that computes: as measured, at most what it is limited to."""
        most_w = self.power_limit_w or self.device_busy_w
        return max(self.device_idle_w, min(self.device_busy_w, most_w))

    def __post_init__(self) -> None:
        """Refuse a seed that random generators do not take, and negative prices and powers."""
        settle_devices(self, "device")
        settle_model(self)
        self._settle_checkpoint()
        checks = {
            "seed": (self.seed >= 0, "must not be negative"),
            "moe_imbalance_ratio": (self.moe_imbalance_ratio >= 1, "must be at least 1"),
            "device_usd_per_hour": (self.device_usd_per_hour >= 0, "must not be negative"),
            "device_idle_w": (self.device_idle_w >= 0, "must not be negative"),
            "power_limit_w": (self.power_limit_w >= 0, "must not be negative"),
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

    def resolve_engine(self) -> EngineProfile:
        """Return the engine's rules on the scenario's device.

        Raises:
            UnknownDeviceError, UnknownPluginError: no such device or engine.
            InvalidRequestError: a rule there is not, or a value it cannot have.

        """
        return self.engine.resolve(find_device(self.device), self.layout.tp)

    def _settle_checkpoint(self) -> None:
        """Settle the formats of weights and KV cache where the scenario names none.

        The weights' is the checkpoint's. So is the cache's where the engine goes by it; else it is
        the engine's own.
        """
        stored = self.model.quantization
        scheme = settle_quantization(self.quantization, stored, self.dtype)
        object.__setattr__(self, "quantization", scheme)
        if self.kv_dtype is None:
            object.__setattr__(self, "kv_dtype", self._find_cache_format())

    def _find_cache_format(self) -> DType | None:
        """Return the engine's format of the KV cache of such a checkpoint; None: the scenario's.

        Engines and devices that there are not are refused where they are used.
        """
        is_as_stored = bool(self.quantization) and self.quantization == self.model.quantization
        of_checkpoint = self.model.kv_dtype if is_as_stored else None
        is_sparse = any(kind.name == _SPARSE for kind in stack_of(self.model).kinds)
        if of_checkpoint is None and not is_sparse:
            return None
        try:
            engine = self.engine.resolve()
            if of_checkpoint is not None and engine.follows_kv_scales:
                return of_checkpoint
            architecture = find_device(self.device).architecture
        except ForetokenError:
            return None
        return engine.sparse_kv_dtypes.get(architecture) if is_sparse else None


def replica_layout(layout: ParallelLayout) -> ParallelLayout:
    """Return the layout of one replica: replicas are alike, unless they share experts."""
    return layout if layout.shares_experts else replace(layout, dp=1, attention_dp=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingScenario:
    """One training configuration: a step is one optimizer update of `global_batch_size` samples.

    `model` may be given by name, as in `ServingScenario`.

    Of each of the `virtual_stages` chunks of layers of a rank the first `recompute_layers` are
    recomputed. Keys and values are exchanged by `ring`, heads by `all_to_all` (Ulysses).

    `module_times` replaces the predictor's estimates of the modules it names; `calibration`
    corrects by steps measured on the user's machines.
    """

    name: str = option("training", "the scenario's name")
    model: ModelField = field(
        default=REQUIRED,
        metadata=describe(
            "a preset, or the path of a `config.json` or a GGUF file", example="llama-2-7b"
        ),
    )
    device: str = field(metadata=describe("`foretoken list devices`", example="a100_sxm_80"))
    topology: str = option("", "links between devices; empty: the usual one of the device")
    framework: str = option(
        "", "only measurements of this software; empty: the trainer's own first, then others'"
    )
    dtype: DType = option(DType.BF16, "fp32 tf32 fp16 bf16 fp8")
    layout: ParallelLayout = field(
        default_factory=ParallelLayout,
        metadata=describe("degrees of parallelism", example={"tp": 2, "pp": 2, "dp": 2}),
    )
    sequence_length: int = option(4096, "tokens of a sample")
    micro_batch_size: int = option(1, "samples of a micro batch")
    global_batch_size: int = option(8, "samples per optimizer step", example=32)
    trainer: TrainerSpec = field(
        default_factory=TrainerSpec,
        metadata=describe("the framework: a profile, and what differs from it"),
    )
    pipeline_schedule: str = option("one_f_one_b", "`foretoken list schedules`")
    virtual_stages: int = option(1, "runs of layers on each rank of the pipeline")
    stage_layers: tuple[int, ...] = option(
        (),
        "layers of every run, in the order of the model; empty: as even as can be,"
        " the embedding and the head counted as one each where that makes runs alike",
    )
    recompute: str = option("none", "what is computed again: none selective full")
    recompute_layers: int = option(
        0, "layers of every run that recompute, at most those of the largest; 0: all"
    )
    recompute_modules: tuple[str, ...] = option(
        (),
        "what selective recomputes; empty: the trainer's own"
        " (core_attention; torchtitan: every_other_matmul)",
    )
    partitions_activations: bool = flag("saved inputs of layers are split over tp")
    zero_stage: int = option(
        0, "what is sharded over dp and cp: 1 optimizer, 2 + gradients, 3 + parameters"
    )
    shard_degree: int = option(
        0, "ranks it is sharded over, replicated over the rest (HSDP); 0: all"
    )
    sequence_parallel: bool = flag("what tensor parallelism leaves whole is split by tokens")
    context_parallel: str = option(
        "ring", f"how context-parallel ranks exchange: {' '.join(CONTEXT_PARALLELS)}"
    )
    weight_parallel: str = option("", "InternEvo's: msp fsp isp")
    weight_degree: int = option(0, "ranks that weights are split over for isp; 0: as tp")
    expert_tp: int = option(0, "ranks that split each expert by width; 0: what ep leaves of tp")
    moe_routing: str = option(
        "", "spread of tokens over experts that latencies were measured under"
    )
    moe_imbalance_ratio: float = option(
        1.0, "load of the busiest expert-parallel rank over the mean"
    )
    moe_capacity_factor: float = option(
        0.0, "tokens of a rank beyond so many times an even share are dropped by experts; 0: none"
    )
    overflow_ratio: float = option(0.0, "share of steps that find an overflow and skip the update")
    straggler_ratio: float = option(0.0, "spread of the ranks' speed, standard deviation over mean")
    network_spread_ratio: float = option(0.0, "spread of transfer times")
    power_limit_w: float = option(
        0.0, "power that each device is limited to, in W; 0: what it is sold with"
    )
    stage_devices: tuple[str, ...] = option(
        (), "the device of every rank of the pipeline where they differ; empty: all are `device`"
    )
    stage_topologies: tuple[str, ...] = option((), 'its links; empty or "": the device\'s first')
    module_times: ModuleTimes | None = option(
        None, "measured times of modules that replace estimates"
    )
    calibration: TrainingCalibration | None = option(None, "correction by measured steps")

    def __post_init__(self) -> None:
        """Put the model in place of its name, and the devices' own names in place of others."""
        settle_devices(self, "device", "stage_devices")
        settle_model(self)
        InvalidRequestError.check(
            "training",
            {
                name: (getattr(self, name) <= most, f"may be {most:,} at most")
                for name, most in _MOST_IN_TRAINING.items()
            },
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro batches that each data-parallel replica runs in a step."""
        return self.global_batch_size // (self.layout.dp * self.micro_batch_size)
