"""The dimensions of a decoder-only transformer."""

from dataclasses import dataclass
from functools import cache

from foretoken.domain import schema
from foretoken.domain.alias import canonical_model
from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownModelError
from foretoken.domain.plugins import scan_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """A mixture-of-experts MLP: `top_k` of `num_experts`, plus experts every token visits."""

    num_experts: int
    top_k: int
    expert_intermediate: int
    num_shared_experts: int = 0
    num_dense_layers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaSpec:
    """Multi-head latent attention: ranks of the compressed projections and split head sizes."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArchitecture:
    """Everything about a model that decides which operators it runs.

    `activation` is `silu` or `gelu`; `is_gated` MLPs have gate and up projections.
    `norm` is `rms_norm` or `layer_norm`. `position` is `rope` or `learned`.
    `has_parallel_residual` adds attention and MLP to the same residual (GPT-NeoX, phi-2).
    With a `sliding_window` every `full_attention_period`-th layer still sees all tokens (0: none).
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    activation: str = "silu"
    is_gated: bool = True
    norm: str = "rms_norm"
    position: str = "rope"
    has_tied_embedding: bool = False
    has_qkv_bias: bool = False
    has_bias: bool = False
    has_qk_norm: bool = False
    has_parallel_residual: bool = False
    sliding_window: int = 0
    full_attention_period: int = 0
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what no operator could be lowered from."""
        violations = [
            FieldViolation(name, "must be at least 1")
            for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "vocab")
            if getattr(self, name) < 1
        ]
        if self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads:
            violations.append(FieldViolation("num_kv_heads", "must divide num_heads"))
        for field, allowed in _ALLOWED.items():
            if getattr(self, field) not in allowed:
                violations.append(FieldViolation(field, f"must be one of {', '.join(allowed)}"))
        if violations:
            raise InvalidRequestError.of_violations(violations, f"model {self.name}")


_ALLOWED = {
    "activation": ("silu", "gelu"),
    "norm": ("rms_norm", "layer_norm"),
    "position": ("rope", "learned"),
}


@cache
def all_models() -> dict[str, ModelArchitecture]:
    """Return every preset by name: one file each in `presets/`."""
    return {
        stem: schema.decode(ModelArchitecture, {"name": stem, **content}, f"presets/{stem}.yaml")
        for stem, content in scan_yaml("foretoken.domain.models", "presets")
    }


def find_model(name: str) -> ModelArchitecture:
    """Return the preset of that name or alias, ignoring case (`meta-llama/Meta-Llama-3-8B`).

    Raises:
        UnknownModelError: there is none; the message names the nearest.

    """
    models = all_models()
    own_name = canonical_model(name)
    if own_name not in models:
        raise UnknownModelError.named(name, models)
    return models[own_name]
