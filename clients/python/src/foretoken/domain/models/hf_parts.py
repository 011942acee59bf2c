"""Halves of layers as Hugging Face files say them, which several families share."""

from collections.abc import Sequence
from typing import Any

from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.layer import LayerKind, LayerPart, write_pattern

# Constructor arguments of a ModelArchitecture.
Fields = dict[str, Any]
# A mixer and a feed-forward half.
Halves = tuple[LayerPart | None, LayerPart | None]

# What patterns call a half, by kind; attention goes by what it sees.
_WORDS = {
    "latent": "latent",
    "pooled_latent": "pooled",
    "sparse_latent": "sparse",
    "block_sparse": "blocks",
    "gated_delta": "delta",
    "kda": "kda",
    "lightning": "lightning",
    "mamba": "mamba",
    "mamba2": "mamba",
    "shared_block": "shared",
    "short_conv": "conv",
    "mlp": "mlp",
    "experts": "experts",
}


def compose(halves: Sequence[Halves]) -> Fields:
    """Return the named layers of these halves, and their pattern."""
    kinds = list(dict.fromkeys(halves))
    taken: dict[str, int] = {}
    named: dict[Halves, str] = {}
    for half in kinds:
        word = "-".join(_word(part) for part in half if part is not None)
        taken[word] = taken.get(word, 0) + 1
        named[half] = word if taken[word] == 1 else f"{word}-{taken[word]}"
    return {
        "layers": tuple(
            LayerKind(name=named[half], mixer=half[0], feed_forward=half[1]) for half in kinds
        ),
        "pattern": write_pattern([named[half] for half in halves]),
    }


def _word(part: LayerPart) -> str:
    if part.kind in ("attention", "relative_attention"):
        reach = "window" if part["window"] else "chunk" if part["chunk"] else "full"
        return f"shared-{reach}" if part["has_shared_kv"] else reach
    if part.kind in ("compressed", "shared_compressed"):
        ratio = part["compress_ratio"]
        return f"compressed{ratio}" if ratio else "window"
    return _WORDS[part.kind]


def read_trunk(reader: ConfigReader) -> Fields:
    """Read what is of no layer."""
    return {
        "hidden": reader.integer("hidden_size"),
        "vocab": reader.integer("vocab_size"),
        "max_position": reader.integer("max_position_embeddings"),
        "activation": reader.activation("hidden_act", "hidden_activation", default="silu"),
        "has_tied_embedding": reader.flag("tie_word_embeddings", default=False),
    }


def read_attention(reader: ConfigReader, **dims: int) -> LayerPart:
    """Return attention with the heads a file has; `dims` say what it does not."""
    heads = reader.integer("num_attention_heads")
    bias = int(reader.flag("attention_bias", default=False))
    own = {
        "num_heads": heads,
        "num_kv_heads": reader.optional("num_key_value_heads", heads),
        "head_dim": reader.optional("head_dim", reader.integer("hidden_size") // heads),
        "has_qkv_bias": bias,
        "has_out_bias": bias,
    }
    return LayerPart(kind="attention", dims={**own, **dims})


def mlp_of(width: int, is_gated: bool = True) -> LayerPart:
    """Return a dense half of that width."""
    return LayerPart(kind="mlp", dims={"intermediate": width, "is_gated": int(is_gated)})


def read_experts(reader: ConfigReader, **dims: int) -> LayerPart:
    """Return the experts of a file; `dims` say what it does not."""
    if not isinstance(reader.get("moe_layer_freq"), list):
        reader.require("moe_layer_freq", default=1, allowed=1)
    num_experts = reader.integer(
        *("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    )
    reader.ignore("n_routed_experts", "num_local_experts", "num_experts", "moe_layer_freq")
    own = {
        "num_experts": num_experts,
        "top_k": reader.integer("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
        "intermediate": dims.pop("intermediate", 0) or reader.integer("moe_intermediate_size"),
    }
    return LayerPart(kind="experts", dims={**own, **read_groups(reader), **dims})


def shared_width(reader: ConfigReader) -> int:
    """Return the width of shared experts that are as wide as routed ones."""
    count = reader.optional("n_shared_experts", 0) or reader.optional("num_shared_experts", 0)
    return count * reader.integer("moe_intermediate_size", "intermediate_size")


def layers_of(
    reader: ConfigReader, kind: str, other: str, unlisted: Sequence[bool]
) -> Sequence[bool]:
    """Return of every layer whether its type is `kind`, the rest being `other`.

    As the file lists them; where it does not, as `unlisted`.
    """
    types = reader.names("layer_types", len(unlisted), (other, kind))
    return [each == kind for each in types] if types else unlisted


def dense_first(reader: ConfigReader, dense: LayerPart, experts: LayerPart) -> list[LayerPart]:
    """Return the feed-forward half of every layer: dense ones first, or as a list says."""
    num_layers = reader.integer("num_hidden_layers")
    num_dense = min(reader.optional("first_k_dense_replace", 0), num_layers)
    halves = [dense] * num_dense + [experts] * (num_layers - num_dense)
    types = reader.names("mlp_layer_types", num_layers, ("dense", "sparse"))
    if types:
        halves = [experts if kind == "sparse" else dense for kind in types]
    if isinstance(reader.get("moe_layer_freq"), list):
        freq = reader.numbers("moe_layer_freq", num_layers) or [1] * num_layers
        halves = [experts if flag else dense for flag in freq]
    return halves


def latent_dims(reader: ConfigReader) -> dict[str, int]:
    """Return the dimensions of latent attention."""
    # Every head has its own keys and values.
    reader.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    reader.require("attention_bias", default=False, allowed=False)
    return {
        "num_heads": reader.integer("num_attention_heads"),
        "q_lora_rank": reader.optional("q_lora_rank", 0),
        "kv_lora_rank": reader.integer("kv_lora_rank"),
        "qk_nope_head_dim": reader.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": reader.integer("qk_rope_head_dim"),
        "v_head_dim": reader.integer("v_head_dim"),
    }


def index_dims(reader: ConfigReader) -> dict[str, int]:
    """Return the dimensions of an indexer."""
    return {
        "index_heads": reader.integer("index_n_heads"),
        "index_head_dim": reader.integer("index_head_dim"),
        "index_topk": reader.integer("index_topk"),
    }


def read_groups(reader: ConfigReader) -> dict[str, int]:
    """Return the groups of experts that a router chooses among first; nothing for one group."""
    groups = reader.optional("n_group", 0)
    if groups <= 1:
        return {}
    return {"num_groups": groups, "top_k_groups": reader.optional("topk_group", groups)}


def prediction_heads(reader: ConfigReader, *keys: str) -> tuple[LayerPart, ...]:
    """Return the layers that predict further tokens, which the first key that says any counts."""
    counts = [reader.optional(key, 0) for key in keys]
    most = next((count for count in counts if count), 0)
    if most < 1:
        return ()
    return (LayerPart(kind="prediction_heads", dims={"num_modules": most}),)
