"""What Vidur's op names mean for a model on one of several ranks: an operator and dimensions."""

from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.domain.models.architecture import ModelArchitecture

# Degrees of tensor parallelism that Vidur profiles, and those beyond.
DEGREES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Op:
    """One column of mlp.csv: rows of an operator with these dimensions, by token count."""

    operator: str
    tokens: str
    dims: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RankShape:
    """A model on one of `tp` ranks. `vocab` is that of the model as it was measured."""

    model: ModelArchitecture
    tp: int
    vocab: int

    @property
    def is_whole(self) -> bool:
        """Whether the ranks have equal shares."""
        model = self.model
        return model.num_heads % self.tp == 0 == model.intermediate % self.tp

    @property
    def heads(self) -> Mapping[str, int]:
        """Dimensions of the heads of a rank; fewer key heads than ranks means a copy each."""
        return {"num_heads": self.model.num_heads // self.tp, **self.kv_heads}

    @property
    def kv_heads(self) -> Mapping[str, int]:
        """Dimensions of the key and value heads of a rank."""
        model = self.model
        return {"num_kv_heads": max(model.num_kv_heads // self.tp, 1), "head_dim": model.head_dim}

    def ops(self) -> Mapping[str, Op]:
        """Return the ops of mlp.csv in the order Vidur writes them."""
        model, hidden = self.model, self.model.hidden
        q_width = self.heads["num_heads"] * model.head_dim
        qkv_width = q_width + 2 * self.kv_heads["num_kv_heads"] * model.head_dim
        intermediate = model.intermediate // self.tp
        activation = "silu_mul" if model.is_gated else "gelu"
        up_width = (2 if model.is_gated else 1) * intermediate
        norm = Op(model.norm, "num_tokens", {"hidden": hidden})
        return {
            "emb": Op(
                "embedding", "num_tokens", {"hidden": hidden, "vocab": self.vocab // self.tp}
            ),
            "input_layernorm": norm,
            "attn_pre_proj": Op("gemm", "m", {"n": qkv_width, "k": hidden}),
            "attn_rope": Op("rope", "num_tokens", self.heads),
            "attn_post_proj": Op("gemm", "m", {"n": hidden, "k": q_width}),
            "post_attention_layernorm": norm,
            "mlp_up_proj": Op("gemm", "m", {"n": up_width, "k": hidden}),
            "mlp_act": Op(activation, "num_tokens", {"intermediate": intermediate}),
            "mlp_down_proj": Op("gemm", "m", {"n": hidden, "k": intermediate}),
            "add": Op("residual_add", "num_tokens", {"hidden": hidden}),
        }


# Ops whose times change with the degree: a degree without any of them was not measured.
SHARDED_OPS = (
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
)
# What Vidur does without an op: it counts these as 0, and stops without one of the others.
# Source: _load_compute_df and _train_compute_models of its SklearnExecutionTimePredictor.
EFFECT_OF_MISSING = {
    "emb": "does not read it",
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "add"), "takes it as 0"),
}
