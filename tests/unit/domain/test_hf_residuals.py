"""Models whose layers share weights, or have more around them than a residual."""

from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.graph import BatchShape, DecodeShape
from foretoken.domain.lowering.lower import lower_forward
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.description import describe_model
from foretoken.domain.models.hf_config import architecture_of_hf_config
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.models.stack import stack_of, state_of

_TRUNK = {"hidden_size": 256, "vocab_size": 1024, "max_position_embeddings": 2048}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
_LATENT = {
    "num_attention_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 512,
}
_EXPERTS = {
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
}
_HYBRID = {"layers_block_type": [*["mamba"] * 2, "hybrid", "mamba", "hybrid", "mamba", "hybrid"]}
_CONFIGS: dict[str, dict[str, Any]] = {
    "axk2": {**_TRUNK, **_LATENT, **_EXPERTS, "num_hidden_layers": 4, "gated_norm_rank": 8},
    "hy_v4": {**_TRUNK, **_LATENT, **_EXPERTS, "num_hidden_layers": 6, "hc_mult": 4},
    "zamba": {**_TRUNK, **_HYBRID, "num_hidden_layers": 7, "num_attention_heads": 8}
    | {"intermediate_size": 1024, "n_mamba_heads": 2, "mamba_dt_rank": "auto"},
    "zamba2": {**_TRUNK, **_HYBRID, "num_hidden_layers": 7, "num_attention_heads": 8}
    | {"n_mamba_heads": 8, "num_mem_blocks": 2, "use_shared_attention_adapter": True}
    | {"adapter_rank": 16},
    "glm5_next_text": {**_TRUNK, **_LATENT, **_EXPERTS, "num_hidden_layers": 6, "hc_mult": 2}
    | {"qk_rope_head_dim": 0, "index_kpool": 4, "first_k_dense_replace": 1}
    | {"linear_num_heads": 8, "linear_head_dim": 32, "linear_conv_kernel_dim": 4}
    | {"head_dim": 0},
    "deepseek_v41_text": {**_TRUNK, "num_hidden_layers": 6, "hc_mult": 2}
    | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64, "q_lora_rank": 64}
    | {"qk_rope_head_dim": 16, "o_lora_rank": 32, "o_groups": 2, "sliding_window": 64}
    | {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 512}
    | {"moe_intermediate_size": 128, "n_routed_experts": 64, "num_experts_per_tok": 4}
    | {"n_shared_experts": 2, "compress_ratios": [0, 2, 2, 1, 1, 1, 0]}
    | {"kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 5]}
    | {"candidate_source_layer_id": 3, "candidate_topk_blocks": 8, "candidate_block_size": 4}
    | {"engram_layer_ids": [0, 2], "engram_num_embeddings": [1000, 1001], "engram_n_heads": 2}
    | {"engram_max_ngram_size": 3, "engram_head_dim": 16},
    "gemma3n_text": {**_TRUNK, **_HEADS, "num_hidden_layers": 10, "num_kv_shared_layers": 4}
    | {"intermediate_size": [512] * 10, "laurel_rank": 8, "vocab_size_per_layer_input": 1000}
    | {"hidden_size_per_layer_input": 32, "activation_sparsity_pattern": [0.95] * 10},
    "inkling_text": {**_TRUNK, **_HEADS, **_EXPERTS, "num_hidden_layers": 6, "d_rel": 16}
    | {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 32},
}


def _read(model_type: str, **changed: Any) -> ModelArchitecture:
    content = {"model_type": model_type, **_CONFIGS[model_type], **changed}
    return architecture_of_hf_config(content, model_type)


# Weights that no operator has: small ones, and those of a router that each of two runs of it has.
_MAX_ERROR = {"alternating_updates": 0.01, "hyper_connections": 0.04}


@pytest.mark.parametrize("model_type", _CONFIGS)
def test_operators_have_the_weights_that_are_counted(model_type: str) -> None:
    model = _read(model_type)
    decode = DecodeShape(num_seqs=4, kv_tokens=4 * 512, kv_tokens_max=512)
    shape = BatchShape(num_tokens=4, num_output_rows=4, decode=decode)
    nodes = lower_forward(model, shape, LoweringOptions(dtype=DType.BF16))
    allowed = max((_MAX_ERROR.get(part.kind, 0.0) for part in model.extras), default=0.0) or 0.01
    held = float(sum(node.num_weights for node in nodes))
    assert pytest.approx(count_parameters(model).total, rel=allowed) == held


def test_an_indexer_of_glm_5_3_flash_has_a_key_for_a_pool() -> None:
    model = _read("glm5_next_text")
    parts = list(stack_of(model).mixers)
    assert ["kda", "pooled_latent"] == [part.kind for part in parts]
    assert [(0, 1, 2, 4, 5), (3,)] == [tuple(held) for held in stack_of(model).mixers.values()]
    state = state_of(parts[1])
    # A vector of 48, and of a key of 32 in 8 bits with its scale the fourth part.
    assert (48, (32 + 4) / 4) == (state.token_elements, state.token_bytes)
    latent = next(part for part in count_parameters(model).parts if part.part is parts[1])
    projected = 64 * (256 + 8 * 32) + 256 * 48 + 8 * 32 * 256
    assert projected == latent.weights[0].total
    pooled = 4 * (64 * 32 + 256) + 32 * (2 * 256 + 4 + 2)
    assert 48 * 8 * (32 + 32) + pooled + 64 + 48 == latent.weights[1].total


def test_glm_5_3_flash_says_its_delta_attention_in_either_way() -> None:
    section = {"num_heads": 8, "head_dim": 32, "short_conv_kernel_size": 4}
    keys = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    other = _read("glm5_next_text", linear_attn_config=section, **dict.fromkeys(keys))
    assert _read("glm5_next_text") == other


def test_layers_of_deepseek_v4_1_have_what_they_share_once() -> None:
    model = _read("deepseek_v41_text")
    layers = [layer.mixer for layer in stack_of(model).layers]
    roles = [
        (part["compress_ratio"], part["has_entries"], part["has_indexer"], part["candidates"])
        for part in layers
        if part is not None
    ]
    assert [(0, 0, 0, 0), (2, 1, 1, 0), (2, 0, 0, 0), (1, 1, 1, 0), (1, 0, 0, 0)] == roles[:5]
    # An indexer after the layer that chose candidates scores no others.
    assert (1, 0, 1, 32) == roles[5]
    states = [state_of(part) for part in layers if part is not None]
    assert [0, 32, 0, 64, 0, 0] == [state.token_elements for state in states]
    assert {64} == {state.window_elements for state in states}
    assert [0, 2 * 64 * 8, 0, 0, 0, 0] == [state.request_bytes for state in states]


def test_tables_of_n_grams_are_read_by_rows_and_stored_in_8_bits() -> None:
    model = _read("deepseek_v41_text")
    (memory,) = (part for part in count_parameters(model).parts if part.part.kind == "engram")
    table, projection, _ = memory.weights
    # Two of 2-grams and two of 3-grams of 16 features in each of two layers.
    assert (2001 * 16, 2 * 4 * 16) == (table.total, table.active)
    assert 2 * (4 * 16) * 3 * 256 == projection.total
    figures = {part.part: part for part in describe_model(model).parts}
    assert 2001 * 16 * 8.25 / 8 == pytest.approx(
        figures["engram"].num_bytes - 2 * (projection.total + 2 * 2 * 2 * 256)
    )


def test_blocks_of_zamba_are_counted_once_and_keep_tokens_everywhere() -> None:
    model = _read("zamba2")
    blocks = [part for part in stack_of(model).mixers if part.kind == "shared_block"]
    assert [1, 0] == [part["has_own_weights"] for part in blocks]
    layers = [stack_of(model).mixers[part] for part in blocks]
    # Two blocks in turn: the third layer that has one shares the first's.
    assert [2, 1] == [len(held) for held in layers]
    assert [2 * 256 * 2] * 2 == [state_of(part).token_elements for part in blocks]
    fewer = count_parameters(_read("zamba2", num_mem_blocks=1)).total
    block = blocks[0]
    width = block["num_heads"] * block["head_dim"]
    shared = 512 * 3 * width + width * 256 + 3 * 256 * block["intermediate"] + 512
    assert shared == count_parameters(model).total - fewer


def test_the_gate_of_a_x_k2_is_of_the_query_before_and_after_its_norm() -> None:
    plain = _read("axk2").extras
    assert [{"num_dense": 1, "rank": 8}] == [dict(part.dims) for part in plain]
    mixer = next(iter(stack_of(_read("axk2")).mixers))
    assert 2 == mixer["has_gate"]
    with pytest.raises(InvalidRequestError, match="only the first layers can be dense"):
        _read("axk2", mlp_layer_types=["sparse", "dense", "sparse", "sparse"])


def test_layers_of_hy_4_share_the_picks_of_every_fourth() -> None:
    parts = stack_of(_read("hy_v4")).mixers
    found = {part["has_indexer"]: layers for part, layers in parts.items()}
    assert {1: (0, 1, 5), 0: (2, 3, 4)} == found


def test_the_last_layers_of_gemma_3n_keep_nothing_of_a_token() -> None:
    parts = stack_of(_read("gemma3n_text")).mixers
    kept = {layer: bool(part["has_shared_kv"]) for part, held in parts.items() for layer in held}
    assert [False] * 6 + [True] * 4 == [kept[layer] for layer in range(10)]


def test_inkling_keeps_tokens_a_window_and_the_inputs_of_its_convolutions() -> None:
    full, windowed = sorted(stack_of(_read("inkling_text")).mixers, key=lambda part: part["window"])
    assert (2 * 2 * 32, 0) == (state_of(full).token_elements, state_of(full).window_elements)
    assert 2 * 4 * 32 == state_of(windowed).window_elements
    # Keys, values and both outputs, of the last three tokens in 16 bits.
    assert 2 * (4 * 32 + 256) * 3 * 2 == state_of(windowed).request_bytes


# The public head of Llama-3.1-8B-Instruct: 425 million parameters, without the model's table.
_HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def test_a_head_of_eagle_3_is_a_layer_with_features_of_the_model() -> None:
    head = architecture_of_hf_config(_HEAD, "head")
    assert pytest.approx(0.425e9, rel=2e-3) == count_parameters(head).total
    assert 32000 == head.vocab
    alone = {key: value for key, value in _HEAD.items() if key != "draft_vocab_size"}
    plain = count_parameters(architecture_of_hf_config({**alone, "vocab_size": 32000}, "plain"))
    # Three features merged to one, the layer's other half of its input with a norm; one table.
    merged = 3 * 4096 * 4096 + (32 + 16) * 128 * 4096 + 4096
    assert merged - 32000 * 4096 == count_parameters(head).total - plain.total
    with pytest.raises(InvalidRequestError, match="num_hidden_layers"):
        architecture_of_hf_config({**_HEAD, "num_hidden_layers": 2}, "head")


def test_of_a_file_whose_text_alone_is_read_it_is_said() -> None:
    text = {"model_type": "gemma3n_text", **_CONFIGS["gemma3n_text"]}
    with pytest.raises(InvalidRequestError, match="its text model 'gemma3n_text' alone is"):
        architecture_of_hf_config(
            {"model_type": "a_model_that_sees", "text_config": text}, "gemma3n"
        )
