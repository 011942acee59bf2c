"""Attention of grouped heads: over all tokens before, over a window of them, or inside chunks."""

from collections.abc import Iterator, Mapping

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.dims import HEADS, local_heads
from foretoken.domain.models.kinds.spec.kind import (
    Dims,
    KindDim,
    KindSpec,
    Place,
    RequestState,
    Weights,
)

# Of `qk_norm`: none, one weight for the features of a head, one for those of all heads.
_HEAD_NORM, _LAYER_NORM = 1, 2


def value_dim(d: Dims) -> int:
    """Return the features of a value head."""
    return d["v_head_dim"] or d["head_dim"]


def _weights(d: Dims, model: ModelArchitecture) -> Iterator[Weights]:
    q_width = d["num_heads"] * d["head_dim"]
    k_width, v_width = d["num_kv_heads"] * d["head_dim"], d["num_kv_heads"] * value_dim(d)
    num_values = 0 if d["has_value_of_key"] else v_width
    out_width = d["num_heads"] * value_dim(d)
    gate_width = {0: 0, 1: out_width, 2: d["num_heads"]}[d["gate"]]
    widths = q_width + k_width + num_values
    yield Weights(total=model.hidden * (widths + gate_width + out_width), part="attention")
    others = widths if d["has_qkv_bias"] else 0
    others += model.hidden if d["has_out_bias"] else 0
    others += {0: 0, _HEAD_NORM: 2 * d["head_dim"], _LAYER_NORM: q_width + k_width}[d["qk_norm"]]
    yield Weights(total=others + d["has_sinks"] * d["num_heads"])


def _state(d: Dims, tp: int) -> RequestState:
    width = local_heads(d["num_kv_heads"], tp) * (d["head_dim"] + value_dim(d))
    reach = d["window"] or d["chunk"]
    if reach:
        return RequestState(window_elements=width, window_tokens=reach)
    return RequestState(token_elements=width)


def _check(d: Dims) -> Mapping[str, tuple[bool, str]]:
    return {
        "num_kv_heads": (
            d["num_heads"] % d["num_kv_heads"] == 0,
            f"{d['num_kv_heads']} must divide the {d['num_heads']} heads",
        ),
        "window": (not (d["window"] and d["chunk"]), "a layer has a window or chunks, not both"),
        "qk_norm": (d["qk_norm"] <= _LAYER_NORM, "must be 0, 1 or 2"),
        "gate": (d["gate"] <= 2, "must be 0, 1 or 2"),  # noqa: PLR2004 - the kinds of gate
    }


KIND = KindSpec(
    name="attention",
    place=Place.MIXER,
    summary="softmax attention of grouped heads, over all tokens, a window or a chunk",
    source="Ainslie et al., GQA, 2023; Mistral 7B, 2023 (windows); Llama 4's modelling file in"
    " transformers 5 (chunks, layers without positions); Gemma 4's (keys that are values)",
    dims=(
        *HEADS,
        KindDim("v_head_dim", "features of a value head; 0: as a key's", 0),
        KindDim("window", "tokens a query sees, itself included; 0: all", 0),
        KindDim("chunk", "a query sees its own chunk of so many tokens; 0: all", 0),
        KindDim("has_rope", "1: queries and keys turn with their position", 1),
        KindDim("rotary_dim", "features of a head that turn; 0: all", 0),
        KindDim("has_qkv_bias", "1: queries, keys and values have a bias", 0),
        KindDim("has_out_bias", "1: the output projection has a bias", 0),
        KindDim("qk_norm", "norm of queries and keys; 1: by head, 2: over all heads", 0),
        KindDim("gate", "gate of the output; 1: of every feature, 2: of every head", 0),
        KindDim("has_value_of_key", "1: values are the keys, without a projection", 0),
        KindDim("has_sinks", "1: a learned logit for each head joins the softmax", 0),
    ),
    weights=_weights,
    state=_state,
    check=_check,
    approximated="chunks run as windows of half a chunk, what a query sees of one on average;"
    " sinks, output gates and partial rotation take no time of their own",
    has_backward=True,
    varying=("window", "chunk", "has_rope", "has_sinks"),
    matrices={"attention": ("self_attn.q_proj", "self_attn.o_proj")},
)
