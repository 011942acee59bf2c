"""What a model is lowered for: a framework's options, a rank, a batch; a pass along one axis."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from foretoken.domain.cluster import LoraSpec
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.estimate import DType
from foretoken.domain.graph import BatchShape, OperatorNode, RankContext
from foretoken.domain.trainer import TrainerProfile

Nodes = tuple[OperatorNode, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """How a training framework cuts and runs a layer; see `TrainingScenario` for each field."""

    trainer: TrainerProfile
    micro_batch_size: int
    sequence_length: int
    sequence_parallel: bool = False
    context_parallel: str = "ring"
    weight_parallel: str = ""
    weight_degree: int = 1
    expert_tp: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringOptions:
    """What the framework that runs the model decides.

    `has_kv_cache` and `has_sampler` are serving; `has_loss` is training. With
    `fuses_add_norm` the residual addition and the norm after it are one kernel.

    `quantization` names how weights are stored (see `domain/quantization.py`), `kv_dtype` the
    format of the KV cache (None: `dtype`). `mla_form` asks for latent attention as one `module`
    from hidden state to hidden state, or as `operators`.

    Under expert parallelism the busiest rank has `moe_imbalance_ratio` times the mean load; engines
    in lock step hand tokens to experts by `expert_exchange`: `all_gather` (and reduce-scatter) or
    `all_to_all`. `moe_routing` is the distribution of tokens under which latencies were measured.

    `lora` adds low-rank adapters to the linear layers of a served model.

    `training` says how a framework trains; without it operators are those of serving engines.
    """

    dtype: DType
    has_kv_cache: bool = False
    has_sampler: bool = False
    has_loss: bool = False
    fuses_add_norm: bool = False
    quantization: str = ""
    kv_dtype: DType | None = None
    mla_form: str = "module"
    moe_imbalance_ratio: float = 1.0
    moe_routing: str = "balanced"
    expert_exchange: str = "all_gather"
    lora: LoraSpec | None = None
    training: TrainingOptions | None = None

    def __post_init__(self) -> None:
        """Refuse forms there are not."""
        violations = [
            FieldViolation(name, f"must be one of {', '.join(allowed)}")
            for name, allowed in _FORMS.items()
            if getattr(self, name) not in allowed
        ]
        if violations:
            raise InvalidRequestError.of_violations(violations, "lowering options")


_FORMS = {"mla_form": ("module", "operators"), "expert_exchange": ("all_gather", "all_to_all")}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPass:
    """Cut a graph along one axis.

    `check` yields why a model cannot be cut that way, under options where they are known; `rewrite`
    returns the rank's graph.
    """

    axis: str
    check: Callable[[RankContext, LoweringOptions | None], Iterator[str]]
    rewrite: Callable[[Nodes, "Lowering"], Nodes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """What a graph is lowered for: a rank, the batch of its engine, and what the framework does."""

    rank: RankContext
    shape: BatchShape
    options: LoweringOptions
