"""The dimensions of a model of layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from foretoken.domain import schema
from foretoken.domain.alias import canonical_model
from foretoken.domain.errors import (
    Checks,
    InvalidRequestError,
    UnknownModelError,
    at_least,
    find_violations,
    one_of,
)
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.kinds.spec.kind import Place, find_kind
from foretoken.domain.models.layer import LayerKind, LayerPart, read_pattern
from foretoken.domain.models.quantization import find_quantization
from foretoken.domain.plugins import scan_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """A mixture-of-experts MLP: `top_k` of `num_experts`, plus experts every token visits.

    A router picks `top_k_groups` of `num_groups` first (0: among all experts at once).
    """

    num_experts: int
    top_k: int
    expert_intermediate: int
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    num_groups: int = 0
    top_k_groups: int = 0

    def __post_init__(self) -> None:
        """Refuse experts that no token can visit."""
        InvalidRequestError.check(
            "experts",
            {
                **at_least(self, 1, "num_experts", "top_k", "expert_intermediate"),
                **at_least(self, 0, "num_shared_experts", "num_dense_layers"),
                **at_least(self, 0, "num_groups", "top_k_groups"),
            },
        )
        InvalidRequestError.check(
            "experts",
            {
                "top_k": (
                    self.top_k <= self.num_experts,
                    f"{self.top_k} is more than the {self.num_experts} experts",
                )
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaSpec:
    """Multi-head latent attention: ranks of the compressed projections and split head sizes."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        """Refuse ranks and sizes that are none."""
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        InvalidRequestError.check(
            "latent attention",
            {**at_least(self, 1, *sizes), **at_least(self, 0, "q_lora_rank")},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArchitecture:
    """Everything about a model that decides which operators it runs.

    Its layers are alike, but for those of `moe.num_dense_layers` and of `full_attention_period`, or
    they are those of `layers` in the order of `pattern` (see `models/layer.py`), which then say all
    that is of layers. `extras` stand outside the layers: encoders, streams, further embeddings.
    `models/stack.py` has the layers of either.

    `activation` is `silu`, `gelu` or `relu2`; `is_gated` MLPs have gate and up projections.
    `norm` is `rms_norm` or `layer_norm`. `position` is `rope` or `learned`.
    `has_parallel_residual` adds attention and MLP to the same residual (GPT-NeoX, phi-2).
    With a `sliding_window` every `full_attention_period`-th layer still sees all tokens (0: none).
    `quantization` is the scheme that its checkpoint is stored in (empty: none), `kv_dtype` the
    format that the checkpoint has scales of the KV cache for (None: none).
    """

    name: str
    num_layers: int = 0
    hidden: int
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
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
    layers: tuple[LayerKind, ...] = ()
    pattern: str = ""
    extras: tuple[LayerPart, ...] = ()
    quantization: str = ""
    kv_dtype: DType | None = None
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what no operator could be lowered from: with all that is wrong."""
        find_quantization(self.quantization)
        if self.layers or self.pattern:
            self._settle_layers()
        counted = _COUNTED if self.layers else (*_COUNTED, *_COUNTED_OF_LAYERS)
        violations = find_violations(
            {
                **at_least(self, 1, *counted),
                **at_least(self, 0, "intermediate", "sliding_window", "full_attention_period"),
                **one_of(self, **_ALLOWED),
            }
        )
        named = {violation.field for violation in violations}
        violations += [
            violation
            for violation in find_violations(self._contradictions())
            if violation.field not in named
        ]
        if violations:
            raise InvalidRequestError.of_violations(violations, f"model {self.name}")

    def _settle_layers(self) -> None:
        """Count the layers of the pattern; refuse what layers do not have or say a second time."""
        names = read_pattern(self.pattern)
        known = [layer.name for layer in self.layers]
        missing = sorted({*names} ^ {*known})
        wrong = [
            f"{part.kind} is no {place.name.lower()}"
            for layer in self.layers
            for part, place in (
                (layer.mixer, Place.MIXER),
                (layer.feed_forward, Place.FEED_FORWARD),
            )
            if part is not None and find_kind(part.kind).place is not place
        ]
        checks: dict[str, tuple[bool, str]] = {
            "pattern": (
                not missing,
                f"layers and pattern must name the same; one of them has not {', '.join(missing)}",
            ),
            "layers": (
                not wrong and len(set(known)) == len(known),
                "; ".join(wrong) or "have a name twice",
            ),
            "num_layers": (
                self.num_layers in (0, len(names)),
                f"{self.num_layers} are not the {len(names)} of the pattern",
            ),
            "has_parallel_residual": (
                not self.has_parallel_residual
                or all(
                    layer.mixer is not None
                    and layer.feed_forward is not None
                    and layer.feed_forward.kind == "mlp"
                    for layer in self.layers
                ),
                "is of layers that have a mixer and a dense half",
            ),
            **{
                field: (not getattr(self, field), "is for the layers to say")
                for field in _OF_LAYERS
            },
        }
        InvalidRequestError.check(f"model {self.name}", checks)
        object.__setattr__(self, "num_layers", len(names))

    def _contradictions(self) -> Checks:
        """Return what must hold between dimensions that are legal by themselves."""
        checks: dict[str, tuple[bool, str]] = {
            "extras": (
                all(find_kind(part.kind).place is Place.MODEL for part in self.extras),
                "stand outside the layers; a half of a layer belongs to `layers`",
            )
        }
        return checks if self.layers else {**checks, **self._contradictions_of_layers()}

    def _contradictions_of_layers(self) -> Checks:
        heads = f"the {self.num_heads} heads (num_heads)"
        num_dense = self.moe.num_dense_layers if self.moe else self.num_layers
        checks: dict[str, tuple[bool, str]] = {
            "num_layers": (self.num_layers <= MAX_LAYERS, f"is more than {MAX_LAYERS:,}"),
            "num_kv_heads": (
                self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0,
                f"{self.num_kv_heads} must divide {heads}"
                if self.num_kv_heads <= self.num_heads
                else f"{self.num_kv_heads} are more than {heads}",
            ),
            "intermediate": (self.intermediate >= 1 or not num_dense, "must be at least 1"),
            "moe.num_dense_layers": (
                num_dense <= self.num_layers,
                f"{num_dense} are more than the {self.num_layers} layers (num_layers)",
            ),
        }
        if self.mla is not None:
            checks["head_dim"] = (
                self.head_dim == self.mla.v_head_dim,
                f"{self.head_dim} contradicts mla.v_head_dim, {self.mla.v_head_dim}",
            )
        elif self.position == "rope":
            checks["head_dim"] = (
                self.head_dim % 2 == 0,
                f"{self.head_dim} is odd: rotary positions turn pairs",
            )
        return checks


# Eighty times those of the deepest model that is published (126 of Llama 3.1 405B): each is an
# object here, so that a number of any size would take any memory.
MAX_LAYERS = 10_000
_COUNTED = ("num_layers", "hidden", "vocab", "max_position")
_COUNTED_OF_LAYERS = ("num_heads", "num_kv_heads", "head_dim")
# What a pattern's layers say of themselves.
_OF_LAYERS = (
    *(*_COUNTED_OF_LAYERS, "intermediate", "has_qkv_bias", "has_bias", "has_qk_norm"),
    *("sliding_window", "full_attention_period", "moe", "mla"),
)
_ALLOWED = {
    "activation": ("silu", "gelu", "relu2"),
    "norm": ("rms_norm", "layer_norm"),
    "position": ("rope", "learned"),
}


# What a preset says of the model that another is a form of: it has all but names and format.
_LIKE = "like"
_OWN = ("aliases", "quantization", "kv_dtype")


@cache
def all_models() -> dict[str, ModelArchitecture]:
    """Return every preset by name: one file each in `presets/`.

    A file that is `like` another has what that has, but for the format and the aliases.
    """
    files = dict(scan_yaml("foretoken.domain.models", "presets"))
    return {
        stem: schema.decode(
            ModelArchitecture, {"name": stem, **_complete(content, files)}, f"presets/{stem}.yaml"
        )
        for stem, content in files.items()
    }


def list_forms(name: str) -> tuple[str, ...]:
    """Return the presets that differ from the one of that name in format alone, itself included.

    The first is in 16 bits where one is, then comes what has the shortest name.
    """
    bare = _all_bare()
    found = [stem for stem in bare if bare[stem] == bare.get(name)] or [name]
    return tuple(sorted(found, key=lambda it: (bool(_stored_as(it)), len(it), it)))


def _stored_as(name: str) -> str:
    return all_models()[name].quantization if name in all_models() else ""


@cache
def _all_bare() -> Mapping[str, ModelArchitecture]:
    """Return every preset without what its checkpoint is called and stored in."""
    return {
        stem: replace(model, name="", aliases=(), quantization="", kv_dtype=None)
        for stem, model in all_models().items()
    }


def _complete(
    content: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    if _LIKE not in content:
        return content
    same = {name: value for name, value in files[content[_LIKE]].items() if name not in _OWN}
    return {**same, **{name: value for name, value in content.items() if name != _LIKE}}


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
