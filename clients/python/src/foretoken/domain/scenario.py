"""The questions the simulator answers: a serving deployment, or a training step."""

from dataclasses import dataclass, field

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.estimate import DType
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.slo import Slo
from foretoken.domain.workload import WorkloadSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """The serving engine's rules and limits.

    `num_kv_blocks` overrides the capacity computed from device memory (0: compute it).
    `host_gap_us` is CPU time between steps that the device waits for. With `fuses_add_norm` the
    engine adds the residual inside the norm kernel, as vLLM and SGLang do.
    """

    scheduler: str = "chunked_prefill"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    memory_utilization_ratio: float = 0.9
    num_kv_blocks: int = 0
    host_gap_us: float = 0.0
    fuses_add_norm: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingScenario:
    """One inference deployment under one workload."""

    name: str = "serving"
    model: ModelArchitecture
    device: str
    topology: str = ""
    framework: str = ""
    dtype: DType = DType.BF16
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    engine: EngineSpec = field(default_factory=EngineSpec)
    workload: WorkloadSpec = field(default_factory=WorkloadSpec)
    slo: Slo = field(default_factory=Slo)
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a seed that random generators do not take."""
        if self.seed < 0:
            raise InvalidRequestError.of_field("seed", "must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingScenario:
    """One training configuration: a step is one optimizer update of `global_batch_size` samples.

    `recompute` is `none` or `full`; `zero_stage` shards optimizer (1), gradients (2) and
    parameters (3) over dp. `pipeline_schedule` names a plug-in (`one_f_one_b`).
    """

    name: str = "training"
    model: ModelArchitecture
    device: str
    topology: str = ""
    framework: str = ""
    dtype: DType = DType.BF16
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    sequence_length: int = 4096
    micro_batch_size: int = 1
    global_batch_size: int = 8
    pipeline_schedule: str = "one_f_one_b"
    recompute: str = "none"
    zero_stage: int = 0
