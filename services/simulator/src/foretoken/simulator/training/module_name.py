"""What profiles call the modules of a transformer, and which operators those are."""

import re
from dataclasses import dataclass

from foretoken.domain.lowering.graph import Section

# Where a name says which layer it is of: `model.layers.3.mlp`, `model_layers_3_mlp`, `h.3.attn`.
_LAYER = re.compile(r"(?:^|_)(?:layers?|h|blocks?)_(\d+)(?:_|$)")
_CONTAINERS = (
    "model_",
    "module_",
    "transformer_",
    "gpt_neox_",
    "decoder_",
    "language_model_",
    "layers_",
)
_PARENTS = ("self_attn_", "self_attention_", "attention_", "attn_", "mlp_", "feed_forward_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A module by the roles of its operators: of `section`, from `begins` to `ends`.

    Either lists the roles it may begin or end with; empty, it reaches to the section's end. With a
    `piece` it is one of several modules that one operator of ours does together: `attn_q` is of
    the projection of queries, keys and values.
    """

    section: Section
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    piece: str = ""


# Modules that together are one operator. Without a gate, `up` is alone.
_WHOLES = (frozenset({"q", "k", "v"}), frozenset({"gate", "up"}))


def missing_pieces(pieces: frozenset[str], has_gate: bool) -> frozenset[str]:
    """Return the pieces that lack to the operator of which these are some."""
    whole = next((whole for whole in _WHOLES if pieces & whole), frozenset[str]())
    return whole - pieces - (frozenset() if has_gate else frozenset({"gate"}))


def split_layer(name: str) -> tuple[str, int]:
    """Return a module's name without its layer and the containers around, and the layer (-1)."""
    flat = name.replace(".", "_")
    match = _LAYER.search(flat)
    if match:
        return flat[match.end() :] or "layer", int(match[1])
    while True:
        container = next((word for word in _CONTAINERS if flat.startswith(word)), "")
        if not container:
            return flat, -1
        flat = flat.removeprefix(container)


def find_module(name: str) -> Module | None:
    """Return the module of that name, its layer taken off; none where nothing is known of it."""
    if name in _MODULES:
        return _MODULES[name]
    parent = next((word for word in _PARENTS if name.startswith(word)), "")
    return _MODULES.get(name.removeprefix(parent))


def role_module(role: str, section: Section) -> Module:
    """Return the module that is one operator, by its role in the lowered graph."""
    return Module(section=section, begins=(role,), ends=(role,))


def _operator(role: str, piece: str = "") -> Module:
    return Module(section=Section.LAYER, begins=(role,), ends=(role,), piece=piece)


def _outside(section: Section, role: str) -> Module:
    return Module(section=section, begins=(role,), ends=(role,))


_QKV, _OUT, _UP, _DOWN = "attn_qkv_proj", "attn_out_proj", "mlp_up_proj", "mlp_down_proj"
_ATTENTION = Module(
    section=Section.LAYER,
    begins=(_QKV, "attn_down_proj", "attn_q_proj", "mla_prefill_module"),
    ends=(_OUT, "mla_prefill_module"),
)
_MLP = Module(
    section=Section.LAYER,
    begins=(_UP, "moe_router"),
    ends=(_DOWN, "moe_experts", "moe_unpermute", "shared_down_proj"),
)
_EXPERTS = Module(
    section=Section.LAYER, begins=("moe_router",), ends=("moe_experts", "moe_unpermute")
)
_LAYER_MODULE = Module(section=Section.LAYER)
_EMBEDDING = Module(section=Section.EMBEDDING)

# FASOP's columns, names of Hugging Face's modules (Llama, GPT-2, GPT-NeoX) and Megatron-Core's.
_MODULES = {
    **dict.fromkeys(("attn_q", "q_proj"), _operator(_QKV, "q")),
    **dict.fromkeys(("attn_k", "k_proj"), _operator(_QKV, "k")),
    **dict.fromkeys(("attn_v", "v_proj"), _operator(_QKV, "v")),
    **dict.fromkeys(("qkv_proj", "query_key_value", "attn_c_attn", "linear_qkv"), _operator(_QKV)),
    **dict.fromkeys(
        ("attn_o", "o_proj", "attention_dense", "attn_c_proj", "linear_proj"), _operator(_OUT)
    ),
    **dict.fromkeys(("mlp_gate", "gate_proj"), _operator(_UP, "gate")),
    **dict.fromkeys(("mlp_up", "up_proj"), _operator(_UP, "up")),
    **dict.fromkeys(("gate_up_proj", "dense_h_to_4h", "mlp_c_fc", "linear_fc1"), _operator(_UP)),
    **dict.fromkeys(("mlp_act_fn", "act_fn", "act"), _operator("mlp_activation")),
    **dict.fromkeys(
        ("mlp_down", "down_proj", "dense_4h_to_h", "mlp_c_proj", "linear_fc2"), _operator(_DOWN)
    ),
    **dict.fromkeys(("input_layernorm", "ln_1"), _operator("input_norm")),
    **dict.fromkeys(
        ("post_attention_layernorm", "pre_mlp_layernorm", "ln_2"),
        _operator("post_attention_norm"),
    ),
    **dict.fromkeys(("self_attn", "self_attention", "attention", "attn"), _ATTENTION),
    **dict.fromkeys(("mlp", "feed_forward"), _MLP),
    **dict.fromkeys(("moe", "block_sparse_moe", "experts"), _EXPERTS),
    **dict.fromkeys(("layer", "transformer_layer", "encoder"), _LAYER_MODULE),
    **dict.fromkeys(
        ("embed", "embedding", "embed_tokens", "embed_in", "wte", "embedding_layer"), _EMBEDDING
    ),
    **dict.fromkeys(
        ("norm", "final_layernorm", "final_layer_norm", "ln_f"),
        _outside(Section.HEAD, "final_norm"),
    ),
    **dict.fromkeys(("lm_head", "embed_out", "output_layer"), _outside(Section.HEAD, "lm_head")),
    "loss": _outside(Section.HEAD, "loss"),
    **dict.fromkeys(("head", "post_process"), Module(section=Section.HEAD)),
}
