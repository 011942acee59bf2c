"""What the columns of a FASOP profile hold.

A column is the time from the end of one module to the end of the next, so it holds everything that
runs between them, whether or not it belongs to a module. Source: `ModuleProfiler` in
`fasop/make_profiledb/profile_fx.py` of https://github.com/ai-computing/aicomp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.domain.models.architecture import ModelArchitecture

Dims = Mapping[str, Any]

# What the catalog calls the code behind a column.
KERNEL_PREFIX = "fasop:"


@dataclass(frozen=True, slots=True)
class RankShape:
    """One of `tp` ranks of a model, and the tokens it is given (an int or a column of them)."""

    model: ModelArchitecture
    tp: int
    tokens: Any

    def gemm(self, n: int, k: int) -> Dims:
        """Return the dims of a linear layer."""
        return {"m": self.tokens, "n": n, "k": k}

    @property
    def q_width(self) -> int:
        """Features of the queries of a rank."""
        return self.model.num_heads * self.model.head_dim // self.tp

    @property
    def kv_width(self) -> int:
        """Features of the keys of a rank, and of its values."""
        return self.model.num_kv_heads * self.model.head_dim // self.tp

    @property
    def intermediate(self) -> int:
        """Features inside the MLP of a rank."""
        return self.model.intermediate // self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column: the operator nearest to it, and what else its times hold (empty: nothing).

    `module` is the name it has in a profile JSON.
    """

    name: str
    module: str
    operator: str
    dims: Callable[[RankShape], Dims]
    holds: str = ""

    @property
    def flag(self) -> str:
        """The flag that its rows carry: they are not times of the operator alone."""
        return f"composite: holds {self.holds}" if self.holds else ""

    @property
    def kernel(self) -> str:
        """The kernel that its rows carry."""
        return f"{KERNEL_PREFIX}{self.name}"


def _embedding_dims(shape: RankShape) -> Dims:
    model = shape.model
    return {"num_tokens": shape.tokens, "hidden": model.hidden, "vocab": model.vocab}


def _head_dims(shape: RankShape) -> Dims:
    # Every rank computes the whole vocabulary.
    return shape.gemm(shape.model.vocab, shape.model.hidden)


def _kv_dims(shape: RankShape) -> Dims:
    return shape.gemm(shape.kv_width, shape.model.hidden)


def _up_dims(shape: RankShape) -> Dims:
    return shape.gemm(shape.intermediate, shape.model.hidden)


_BEFORE_A_NORM = "the all-reduce before it, the residual sum, the norm"

COLUMNS = (
    Column(
        name="embed",
        module="embedding",
        operator="embedding",
        dims=_embedding_dims,
        holds="all from the start of the stage, host gaps included",
    ),
    Column(
        name="attn_q",
        module="self_attn_q_proj",
        operator="gemm",
        dims=lambda shape: shape.gemm(shape.q_width, shape.model.hidden),
        holds=_BEFORE_A_NORM,
    ),
    Column(name="attn_k", module="self_attn_k_proj", operator="gemm", dims=_kv_dims),
    Column(name="attn_v", module="self_attn_v_proj", operator="gemm", dims=_kv_dims),
    Column(
        name="attn_o",
        module="self_attn_o_proj",
        operator="gemm",
        dims=lambda shape: shape.gemm(shape.model.hidden, shape.q_width),
        holds="rotary embedding and attention",
    ),
    Column(
        name="mlp_gate",
        module="mlp_gate_proj",
        operator="gemm",
        dims=_up_dims,
        holds=_BEFORE_A_NORM,
    ),
    Column(
        name="mlp_act_fn",
        module="mlp_act_fn",
        operator="silu",
        dims=lambda shape: {"num_tokens": shape.tokens, "intermediate": shape.intermediate},
    ),
    Column(name="mlp_up", module="mlp_up_proj", operator="gemm", dims=_up_dims),
    Column(
        name="mlp_down",
        module="mlp_down_proj",
        operator="gemm",
        dims=lambda shape: shape.gemm(shape.model.hidden, shape.intermediate),
        holds="the product of gate and up",
    ),
    Column(
        name="lm_head",
        module="lm_head",
        operator="gemm",
        dims=_head_dims,
        holds=_BEFORE_A_NORM,
    ),
)

# The parts of a legacy profile, one after another.
LEGACY_EMBEDDING = Column(
    name="embedding_layer",
    module="",
    operator="embedding",
    dims=_embedding_dims,
    holds="all that runs before the first layer",
)
LEGACY_LAYER = Column(
    name="transformer_layer",
    module="",
    operator="gemm",
    dims=_up_dims,
    holds="a whole transformer layer",
)
LEGACY_HEAD = Column(
    name="post_process",
    module="",
    operator="gemm",
    dims=_head_dims,
    holds="all that runs after the last layer",
)
