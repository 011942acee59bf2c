"""Hugging Face files of Zamba and Zamba2: Mamba, and a block that some layers share.

Source: the configuration and modelling files of these models in transformers 5.
"""

from collections.abc import Callable, Mapping

from foretoken.domain.models.hf_hybrids import read_mamba, read_mamba2
from foretoken.domain.models.hf_parts import Fields, Halves, compose, read_trunk
from foretoken.domain.models.hf_reader import ConfigReader
from foretoken.domain.models.layer import LayerPart, every_nth

# What both call layers without the shared block, and those with it.
_KINDS = ("mamba", "linear_attention", "hybrid")
# Positions that a default of transformers gives Zamba2's layers the block in.
_BEFORE_BLOCK = (6, 5, 5, 5, 5, 5, 5, 4, 3)


def _compose(
    reader: ConfigReader, types: list[str], mamba: LayerPart, block: LayerPart, num_blocks: int
) -> Fields:
    """Return the layers; the block is one of its own before the Mamba that adds its output."""
    halves: list[Halves] = []
    placed = 0
    for kind in types:
        if kind == "hybrid":
            halves.append((block.changed(has_own_weights=int(placed < num_blocks)), None))
            placed += 1
        halves.append((mamba, None))
    return {**read_trunk(reader), **compose(halves)}


def _block(reader: ConfigReader, head_dim: int, **dims: int) -> LayerPart:
    heads = reader.integer("num_attention_heads")
    own = {
        "num_heads": heads,
        "num_kv_heads": reader.optional("num_key_value_heads", heads),
        "head_dim": head_dim or 2 * reader.integer("hidden_size") // heads,
        "intermediate": reader.optional("intermediate_size", 4 * reader.integer("hidden_size")),
    }
    return LayerPart(kind="shared_block", dims={**own, **dims})


def _zamba(reader: ConfigReader) -> Fields:
    """Read Zamba: Mamba, and one shared block.

    Its Mamba's heads, each with a way into its state, have as many weights as one of all features.
    """
    num_layers, hidden = reader.integer("num_hidden_layers"), reader.integer("hidden_size")
    reader.assume({"tie_word_embeddings": True, "hidden_act": "gelu"})
    reader.require("attention_hidden_size", default=2 * hidden, allowed=2 * hidden)
    reader.require("mamba_proj_bias", default=False, allowed=False)
    reader.ignore("hidden_mamba_act", "n_mamba_heads", "use_associative_scan", "layer_types")
    period = max(reader.optional("attn_layer_period", 6), 1)
    offset = reader.optional("attn_layer_offset", 4)
    types = reader.names("layers_block_type", num_layers, _KINDS)
    if types is None:
        later = ["hybrid" if flag else "mamba" for flag in every_nth(num_layers, period, offset)]
        types = ["mamba", "mamba", "hybrid", *later][:num_layers]
    mamba = read_mamba(reader, 0)
    block = _block(reader, reader.optional("attention_head_dim", 0))
    return _compose(reader, types, mamba, block, 1)


def _zamba2(reader: ConfigReader) -> Fields:
    """Read Zamba2: Mamba2, and some blocks in turn, each with additions in every layer it is in."""
    num_layers = reader.integer("num_hidden_layers")
    reader.assume({"tie_word_embeddings": True, "hidden_act": "gelu"})
    reader.require("add_bias_linear", default=False, allowed=False)
    reader.require("use_conv_bias", default=True, allowed=True)
    # What says sizes again, which kernels run, and the form of additions that all files have.
    reader.ignore("attention_hidden_size", "attention_head_dim", "chunk_size", "ffn_hidden_size")
    reader.ignore("hybrid_layer_ids", "kv_channels", "layer_types", "mamba_headdim")
    reader.ignore("num_query_groups", "use_long_context", "use_mem_eff_path", "lora_rank")
    reader.ignore("use_shared_mlp_adapter", "use_shared_block_lora", "head_dim")
    default = [kind for count in _BEFORE_BLOCK for kind in [*["mamba"] * count, "hybrid"]]
    types = reader.names("layers_block_type", num_layers, _KINDS)
    if types is None:
        types = (default + ["mamba"] * num_layers)[:num_layers]
    reader.rename({"n_mamba_heads": "mamba_n_heads", "mamba_ngroups": "mamba_n_groups"})
    reader.assume({"mamba_n_heads": 8, "mamba_d_state": 64, "mamba_d_conv": 4})
    mamba = read_mamba2(reader)
    adapts = reader.flag("use_shared_attention_adapter", default=False)
    block = _block(
        reader,
        0,
        has_rope=int(reader.flag("use_mem_rope", default=False)),
        adapter_rank=reader.optional("adapter_rank", 128),
        adapts_attention=int(adapts),
    )
    return _compose(reader, types, mamba, block, reader.optional("num_mem_blocks", 1))


ZAMBA: Mapping[str, Callable[[ConfigReader], Fields]] = {"zamba": _zamba, "zamba2": _zamba2}
