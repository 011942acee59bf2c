"""What a model is lowered for: a framework's options, a rank, a batch; a pass along one axis."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.frameworks.engine import EXPERT_EXCHANGES
from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.communication import expert_width
from foretoken.domain.lowering.graph import BatchShape, OperatorNode, RankContext
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.cluster import LoraSpec
from foretoken.domain.requests.limit import Limit
from foretoken.domain.units import Quantity

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

    `quantization` names how weights are stored (see `models/quantization.py`), `kv_dtype` the
    format of the KV cache (None: `dtype`). `mla_form` states latent attention as one `module`
    from hidden state to hidden state, or as `operators`.

    Under expert parallelism the busiest rank has `moe_imbalance_ratio` times the mean load; in
    training it drops what is beyond `moe_capacity_factor` (0: nothing, see `ExpertCapacity`);
    engines in lock step hand tokens to experts by `expert_exchange` (see `EngineProfile`).
    `moe_routing` is the distribution of tokens under which latencies were measured;
    `has_expert_balancing` places experts by their load, with `num_redundant_experts` copies of
    some.

    With `ffn_devices` experts lie on so many devices of their own (see `parallelism/ffn.py`).

    Ranks of tensor parallelism that hold the same keys split them by tokens in
    `decode_context_parallel` parts; with `repeats_queries` each computes the queries of all of
    them, else they gather them.

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
    moe_capacity_factor: float = 0.0
    moe_routing: str = "balanced"
    expert_exchange: str = "all_gather"
    has_expert_balancing: bool = False
    num_redundant_experts: int = 0
    ffn_devices: int = 0
    decode_context_parallel: int = 1
    repeats_queries: bool = False
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


_FORMS = {"mla_form": ("module", "operators"), "expert_exchange": EXPERT_EXCHANGES}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutCases:
    """A way to cut a model as the limits of axes read it: one layout, or columns of them.

    `training` has what all of them share; `splits_tokens` tells where sequence parallelism splits
    tokens over tp, `is_isp` where weights are InternEvo's shares over `weight_degree` ranks.
    """

    model: ModelArchitecture
    tp: Quantity
    pp: Quantity
    dp: Quantity
    cp: Quantity
    ep: Quantity
    layers_by_stage: tuple[int, ...] = ()
    training: TrainingOptions | None = None
    micro_batch_size: Quantity = 1
    splits_tokens: Quantity = False
    is_isp: Quantity = False
    weight_degree: Quantity = 1
    num_redundant_experts: int = 0
    attention_dp: Quantity = False
    decode_context_parallel: int = 1
    repeats_queries: bool = False
    ffn_devices: int = 0
    expert_exchange: str = "all_gather"

    @classmethod
    def of_rank(cls, rank: RankContext, options: LoweringOptions | None) -> Self:
        """Return the one case that a graph is lowered for."""
        layout, training = rank.layout, options.training if options else None
        form = training.weight_parallel if training else ""
        return cls(
            model=rank.model,
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            cp=layout.cp,
            ep=layout.ep,
            layers_by_stage=rank.layers_by_stage,
            training=training,
            micro_batch_size=training.micro_batch_size if training else 1,
            splits_tokens=training is not None
            and (training.sequence_parallel or form in ("msp", "fsp")),
            is_isp=form == "isp",
            weight_degree=training.weight_degree if training else 1,
            num_redundant_experts=options.num_redundant_experts if options else 0,
            attention_dp=layout.attention_dp,
            decode_context_parallel=options.decode_context_parallel if options else 1,
            repeats_queries=options.repeats_queries if options else False,
            ffn_devices=options.ffn_devices if options else 0,
            expert_exchange=options.expert_exchange if options else "all_gather",
        )

    @property
    def stage_ranks(self) -> Quantity:
        """Ranks of a stage of the pipeline."""
        return self.tp * self.cp * self.dp

    @property
    def expert_width(self) -> Quantity:
        """Ranks that split an expert."""
        return expert_width(self.tp, self.ep, self.training.expert_tp if self.training else 0)


def _find_no_limits(_cases: LayoutCases) -> Iterator[Limit]:
    yield from ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPass:
    """Cut a graph along one axis.

    `limits` yields what cannot be cut that way; `rewrite` returns the rank's graph.
    """

    axis: str
    rewrite: Callable[[Nodes, "Lowering"], Nodes]
    limits: Callable[[LayoutCases], Iterator[Limit]] = _find_no_limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """What a graph is lowered for: a rank, the batch of its engine, and what the framework does."""

    rank: RankContext
    shape: BatchShape
    options: LoweringOptions
