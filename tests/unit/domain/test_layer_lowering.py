"""Layers of every kind as operators: weights, what ranks hold, what is kept of a request."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.frameworks.trainer import find_trainer
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.graph import (
    BatchShape,
    DecodeShape,
    OperatorNode,
    PrefillShape,
    RankContext,
    place,
)
from foretoken.domain.lowering.lower import lower_forward, lower_rank
from foretoken.domain.lowering.memory import ServingMemory, plan_serving_memory
from foretoken.domain.lowering.options import LoweringOptions, TrainingOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import Place, all_kinds
from foretoken.domain.models.layer import LayerKind, LayerPart
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout

_OPTIONS = LoweringOptions(
    dtype=DType.BF16, has_kv_cache=True, has_sampler=True, fuses_add_norm=True
)
_SHAPE = BatchShape(
    num_tokens=40,
    num_output_rows=9,
    prefill=PrefillShape(num_seqs=1, q_tokens=32, kv_tokens=5000, score_pairs=159_504),
    decode=DecodeShape(num_seqs=8, kv_tokens=80_000, kv_tokens_max=20_000),
)
_LATENT = {
    "num_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_INDEX = {"index_heads": 32, "index_head_dim": 128, "index_topk": 2048}
_GROUPED = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128}
_COMPRESSED = {
    "num_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "window": 128,
    "compress_ratio": 4,
    **_INDEX,
}
# A part of each kind, large enough that what lowering leaves out does not show.
_PARTS: Mapping[str, Mapping[str, int]] = {
    "attention": {**_GROUPED, "qk_norm": 1, "gate": 1},
    "block_sparse": {**_GROUPED, **_INDEX, "index_topk": 16, "block_size": 128},
    "compressed": _COMPRESSED,
    "experts": {
        "num_experts": 64,
        "top_k": 8,
        "intermediate": 1536,
        "shared_intermediate": 3072,
        "is_gated": 0,
        "latent": 1024,
    },
    "gated_delta": {
        "num_key_heads": 16,
        "key_head_dim": 128,
        "num_value_heads": 64,
        "value_head_dim": 128,
    },
    "kda": {"num_heads": 32, "head_dim": 128, "has_full_gate": 1},
    "latent": {**_LATENT, "has_gate": 1, "has_rope": 0},
    "lightning": {"num_heads": 64, "head_dim": 128},
    "mamba": {"channels": 8192, "step_rank": 256, "norm": 2},
    "mamba2": {"num_heads": 128, "head_dim": 64, "state_dim": 128, "num_groups": 8},
    "mlp": {"intermediate": 16384, "is_gated": 0},
    "pooled_latent": {
        **{name: size for name, size in _LATENT.items() if name != "qk_rope_head_dim"},
        **_INDEX,
        "index_pool": 4,
    },
    "relative_attention": {
        **_GROUPED,
        "hidden": 4096,
        "distance_dim": 16,
        "max_distance": 1024,
    },
    "shared_block": {**_GROUPED, "head_dim": 64, "intermediate": 16384, "adapter_rank": 128},
    "shared_compressed": {**_COMPRESSED, "has_entries": 1, "has_indexer": 1},
    "short_conv": {"channels": 4096, "conv_kernel": 3},
    "sparse_latent": {**_LATENT, **_INDEX},
}
# DeepSeek-V4.1's is timed as V4's module, whose indexer compresses tokens of its own.
_ANOTHERS_MODULE = {"shared_compressed": 0.05}


def _model(*names: str, pattern: str = "", **changes: Any) -> ModelArchitecture:
    kinds = all_kinds()
    layers = []
    for name in names:
        part = LayerPart(kind=name, dims=_PARTS[name])
        is_mixer = kinds[name].place is Place.MIXER
        half: dict[str, LayerPart] = {"mixer" if is_mixer else "feed_forward": part}
        layers.append(LayerKind(name=name, **half))
    return ModelArchitecture(
        **{
            "name": "model",
            "hidden": 4096,
            "vocab": 32000,
            "max_position": 65536,
            "layers": tuple(layers),
            "pattern": pattern or " ".join(names),
            **changes,
        }
    )


def _lower(model: ModelArchitecture, **degrees: int) -> tuple[OperatorNode, ...]:
    rank = RankContext(model=model, layout=ParallelLayout(**degrees), devices_per_node=8)
    return lower_rank(_SHAPE, _OPTIONS, rank)


def _memory(model: ModelArchitecture, **degrees: int) -> ServingMemory:
    rank = RankContext(model=model, layout=ParallelLayout(**degrees), devices_per_node=8)
    nodes = lower_rank(_SHAPE, _OPTIONS, rank)
    return plan_serving_memory(nodes, rank, find_engine("vllm-0.20"), find_device("h200_sxm"))


def test_every_kind_of_half_is_lowered() -> None:
    kinds = {name for name, kind in all_kinds().items() if kind.place is not Place.MODEL}
    assert kinds == set(_PARTS)


@pytest.mark.parametrize("name", sorted(_PARTS))
def test_lowering_holds_the_weights_that_are_counted(name: str) -> None:
    """Two ways to the same number, but for biases and norms, which lowering leaves out."""
    model = _model(name, pattern=f"8*{name}")
    lowered = sum(node.num_weights for node in lower_forward(model, _SHAPE, _OPTIONS))
    error_ratio = _ANOTHERS_MODULE.get(name, 2e-3)
    assert pytest.approx(count_parameters(model).total, rel=error_ratio) == lowered


def test_embeddings_for_layers_hold_the_weights_that_are_counted_and_add_to_every_layer() -> None:
    table = LayerPart(kind="layer_embeddings", dims={"vocab": 9000, "width": 64})
    plain = _model("attention", "mlp", pattern="4*(attention mlp)")
    model = dataclasses.replace(plain, extras=(table,))
    nodes = {node.role: node for node in lower_forward(model, _SHAPE, _OPTIONS)}
    assert 8 == nodes["layer_gate_proj"].repeat == nodes["layer_out_proj"].repeat
    assert 8 * 64 == nodes["layer_embedding"].dims["hidden"]
    own = sum(node.num_weights for role, node in nodes.items() if role.startswith("layer_"))
    counted = count_parameters(model).total - count_parameters(plain).total
    assert pytest.approx(counted, rel=2e-2) == own
    extra = _memory(model).weights_bytes - _memory(plain).weights_bytes
    assert pytest.approx(2 * counted, rel=2e-2) == extra


def test_layers_that_share_keys_and_values_write_and_keep_none() -> None:
    part = LayerPart(kind="attention", dims={**_PARTS["attention"], "has_shared_kv": 1})
    layers = (LayerKind(name="attention", mixer=part),)
    nodes = _lower(dataclasses.replace(_model("attention"), layers=layers), tp=2)
    roles = {node.role: node for node in nodes}
    own = {node.role: node for node in _lower(_model("attention"), tp=2)}
    assert "kv_cache_write" in own
    assert "kv_cache_write" not in roles
    heads, dim = _PARTS["attention"]["num_heads"], _PARTS["attention"]["head_dim"]
    # Queries and their gate, of half of the heads.
    assert 2 * heads * dim // 2 == roles["attn_qkv_proj"].dims["n"]
    assert own["attn_qkv_proj"].dims["n"] > heads * dim
    assert own["attention_decode"].dims == roles["attention_decode"].dims


def test_ranks_of_mamba_sum_steps_and_states_before_the_output() -> None:
    nodes = _lower(_model("mamba"), tp=4)
    rows = next(node.dims["m"] for node in nodes if node.role == "recurrent_x_proj")
    summed = [node for node in nodes if node.operator == "all_reduce" and node.layers]
    assert [2 * rows * (256 + 2 * 16), 2 * rows * 4096] == [
        node.dims["message_bytes"] for node in summed
    ]
    scans = [node for node in nodes if node.operator in ("mamba_prefill", "mamba_decode")]
    assert [8192 // 4] * len(scans) == [node.dims["channels"] for node in scans]
    assert scans


@pytest.mark.parametrize(("is_full", "num_columns"), [(0, 3), (1, 5)])
def test_full_gates_of_delta_attention_are_columns_of_one_product(
    is_full: int, num_columns: int
) -> None:
    """Those of low rank are two products for both gates."""
    gates = {"has_full_gate": is_full, "has_full_forget_gate": is_full}
    part = LayerPart(kind="kda", dims={**_PARTS["kda"], **gates})
    layers = (LayerKind(name="kda", mixer=part),)
    model = dataclasses.replace(_model("kda"), layers=layers)
    nodes = {node.role: node for node in _lower(model)}
    assert num_columns * 32 * 128 + 32 == nodes["recurrent_in_proj"].dims["n"]
    low = {"recurrent_gate_down_proj", "recurrent_gate_up_proj"}
    assert (set() if is_full else low) == low & set(nodes)
    lowered = sum(node.num_weights for node in lower_forward(model, _SHAPE, _OPTIONS))
    assert pytest.approx(count_parameters(model).total, rel=2e-3) == lowered


@pytest.mark.parametrize("name", sorted(_PARTS))
def test_every_call_has_the_dimensions_of_its_operator(name: str) -> None:
    for degrees in ({}, {"tp": 8}):
        for node in _lower(_model(name), **degrees):
            find_operator(node.operator).check_call(node.call.dims)


@pytest.mark.parametrize("name", sorted(_PARTS))
def test_ranks_sum_up_what_they_split(name: str) -> None:
    """Every half of a layer ends in one sum over the ranks; Mamba and shared blocks have two."""
    nodes = _lower(_model(name, pattern=f"3*{name}"), tp=8)
    sums = [node for node in nodes if node.operator == "all_reduce" and node.layers]
    twice = name in ("mamba", "shared_block")
    assert [(0, 1, 2)] * (1 + twice) == [tuple(node.layers) for node in sums]


@pytest.mark.parametrize("name", sorted(_PARTS))
def test_eight_ranks_hold_little_more_than_one(name: str) -> None:
    """Replicated are latent projections of the input, routers and indexers."""
    model = _model(name, pattern=f"8*{name}")
    alone = sum(node.num_weights for node in _lower(model))
    held = 8 * sum(node.num_weights for node in _lower(model, tp=8))
    assert alone <= held < 2.4 * alone


def test_layers_that_are_no_progression_keep_their_places() -> None:
    model = _model("mamba2", "attention", "mlp", pattern="mamba2 2*attention mlp attention")
    kernels = [node for node in _lower(model) if node.operator == "attention_decode"]
    assert [(1, 2, 4)] == [tuple(node.layers) for node in kernels]
    assert {"repeat": 2, "first_layer": 1, "layer_stride": 3, "places": ()} == place([1, 4])
    stages = [
        lower_rank(
            _SHAPE,
            _OPTIONS,
            RankContext(model=model, layout=ParallelLayout(pp=2), devices_per_node=8, stage=stage),
        )
        for stage in range(2)
    ]
    found = [
        [tuple(node.layers) for node in nodes if node.operator == "attention_decode"]
        for nodes in stages
    ]
    assert [[(1, 2)], [(4,)]] == found


def test_windows_chunks_and_positions_vary_within_attention() -> None:
    attention = LayerPart(kind="attention", dims={**_GROUPED, "chunk": 8192})
    full = attention.changed(chunk=0, has_rope=0)
    model = _model(
        "attention",
        layers=(LayerKind(name="chunk", mixer=attention), LayerKind(name="full", mixer=full)),
        pattern="4*(3*chunk full)",
    )
    nodes = {node.role: node for node in _lower(model)}
    assert 16 == nodes["attn_qkv_proj"].repeat
    assert (12, 4096) == (
        nodes["attention_decode_window"].repeat,
        nodes["attention_decode_window"].dims["window"],
    )
    assert (3, 7, 11, 15) == tuple(nodes["attention_decode"].layers)
    assert 12 == nodes["attn_rope"].repeat


def test_streams_are_mixed_around_every_half() -> None:
    streams = LayerPart(kind="hyper_connections", dims={"num_streams": 4})
    model = _model("compressed", "experts", extras=(streams,))
    mixes = [node.role for node in _lower(model) if node.role.startswith("mhc")]
    assert ["mhc_pre", "mhc_post"] * 2 == mixes


def test_recurrent_layers_keep_a_state_for_every_request() -> None:
    model = _model("mamba2", "attention", pattern="3*mamba2 attention")
    memory, split = _memory(model), _memory(model, tp=8)
    conv = (8192 + 2 * 8 * 128) * 3 * 2
    assert 3 * (128 * 64 * 128 * 4 + conv) == memory.state_bytes_per_request
    assert memory.state_bytes_per_request == 8 * split.state_bytes_per_request
    assert 2 * 8 * 128 * 2 == memory.kv_bytes_per_token == 8 * split.kv_bytes_per_token
    seqs = find_engine("vllm-0.20").max_num_seqs
    assert seqs * memory.state_bytes_per_request == memory.state_bytes
    other = _memory(_model("attention"))
    assert 0 == other.state_bytes


def test_compressed_and_sparse_layers_keep_entries_and_keys_of_an_indexer() -> None:
    compressed = _memory(_model("compressed"))
    assert (512 * 2 + 128 + 4) / 4 == compressed.kv_bytes_per_token
    assert 512 * 2 == compressed.window_bytes_per_token
    sparse = _memory(_model("sparse_latent"), tp=8)
    assert 576 * 2 + 128 + 4 == sparse.kv_bytes_per_token
    blocks = _memory(_model("block_sparse"), tp=8)
    assert (2 * 128 + 128) * 2 == blocks.kv_bytes_per_token


def test_an_encoder_is_held_where_the_embedding_is() -> None:
    encoder = LayerPart(
        kind="encoder",
        dims={
            "num_layers": 24,
            "hidden": 1024,
            "num_heads": 16,
            "intermediate": 4096,
            "patch_features": 1536,
        },
    )
    plain, seeing = _model("attention"), _model("attention", extras=(encoder,))
    weights = count_parameters(seeing).total - count_parameters(plain).total
    assert 24 * 12 * 1024**2 < weights
    held = _memory(seeing).weights_bytes - _memory(plain).weights_bytes
    assert 2 * weights == held
    assert count_parameters(plain).active_total == count_parameters(seeing).active_total


def test_heads_that_a_degree_does_not_divide_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="16 does not divide the 24 heads"):
        _lower(
            _model(
                "gated_delta",
                layers=(
                    LayerKind(
                        name="delta",
                        mixer=LayerPart(
                            kind="gated_delta",
                            dims={**_PARTS["gated_delta"], "num_value_heads": 24},
                        ),
                    ),
                ),
                pattern="delta",
            ),
            tp=16,
        )


def test_training_refuses_what_has_no_backward_pass_by_name() -> None:
    training = TrainingOptions(
        trainer=find_trainer("transformers"), micro_batch_size=1, sequence_length=32
    )
    options = dataclasses.replace(_OPTIONS, has_kv_cache=False, training=training)
    why = "compressed, which can be served only: its compressors and attention are one kernel"
    with pytest.raises(InvalidRequestError, match=why):
        lower_forward(_model("compressed"), dataclasses.replace(_SHAPE, decode=None), options)
