"""Latent attention as its operators, and as one module."""

import dataclasses

from foretoken.domain.lowering.graph import (
    BatchShape,
    DecodeShape,
    OperatorNode,
    PrefillShape,
    RankContext,
    Section,
)
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.options import LoweringOptions, Nodes
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout

_MODEL = find_model("deepseek-v3")
_MODULE = LoweringOptions(dtype=DType.BF16, has_kv_cache=True, has_sampler=True)
_OPERATORS = dataclasses.replace(_MODULE, mla_form="operators")
_PREFILL = PrefillShape(**prefill_dims(1, 128, 64))
_DECODE = DecodeShape(num_seqs=4, kv_tokens=4000, kv_tokens_max=2000)
_MIXED = BatchShape(num_tokens=132, num_output_rows=5, prefill=_PREFILL, decode=_DECODE)


def _lower(options: LoweringOptions, shape: BatchShape = _MIXED, **degrees: int) -> Nodes:
    layout = ParallelLayout(**degrees)
    return lower_rank(shape, options, RankContext(model=_MODEL, layout=layout, devices_per_node=8))


def _by_role(nodes: Nodes) -> dict[str, OperatorNode]:
    return {node.role: node for node in nodes}


def test_projections_go_through_a_low_rank() -> None:
    nodes = _by_role(_lower(_OPERATORS))
    assert {"m": 132, "n": 1536 + 512 + 64, "k": 7168} == nodes["attn_down_proj"].dims
    assert {"m": 132, "n": 128 * 192, "k": 1536} == nodes["attn_q_proj"].dims
    assert {"m": 132, "n": 7168, "k": 128 * 128} == nodes["attn_out_proj"].dims


def test_a_prefill_unpacks_its_whole_context_and_decoding_absorbs_the_queries() -> None:
    nodes = _by_role(_lower(_OPERATORS))
    assert {"m": 192, "n": 128 * 256, "k": 512} == nodes["attn_kv_proj"].dims
    assert {"batch": 128, "m": 4, "n": 512, "k": 128} == nodes["mla_query_absorb"].dims
    assert {"batch": 128, "m": 4, "n": 128, "k": 512} == nodes["mla_value_unpack"].dims
    assert (512, 64) == (
        nodes["mla_decode"].dims["kv_lora_rank"],
        nodes["mla_decode"].dims["qk_rope_head_dim"],
    )


def test_operators_of_a_part_are_there_only_with_it() -> None:
    alone = _by_role(_lower(_OPERATORS, BatchShape(num_tokens=8, num_output_rows=8)))
    assert not {"mla_prefill", "mla_decode", "attn_kv_proj", "mla_query_absorb"} & set(alone)
    assert not [
        n for n in _lower(_MODULE, BatchShape(num_tokens=8, num_output_rows=8)) if "mla" in n.role
    ]


def test_a_module_holds_the_projections() -> None:
    nodes = _by_role(_lower(_MODULE))
    roles = {"mla_prefill_module", "mla_decode_module"}
    assert roles <= set(nodes)
    assert not {"attn_down_proj", "attn_out_proj", "kv_cache_write"} & set(nodes)
    assert 7168 == nodes["mla_decode_module"].dims["hidden"]


def test_queries_without_compression_have_no_module() -> None:
    assert _MODEL.mla is not None
    plain = dataclasses.replace(_MODEL, mla=dataclasses.replace(_MODEL.mla, q_lora_rank=0))
    rank = RankContext(model=plain, layout=ParallelLayout(), devices_per_node=8)
    nodes = _by_role(lower_rank(_MIXED, _MODULE, rank))
    assert {"m": 132, "n": 128 * 192, "k": 7168} == nodes["attn_q_proj"].dims
    assert "q_latent_norm" not in nodes


def test_both_forms_hold_the_models_parameters() -> None:
    """The module leaves out the two norms of a low rank: a ten-millionth."""
    total = count_parameters(_MODEL).total
    for options in (_MODULE, _OPERATORS):
        for shape in (_MIXED, dataclasses.replace(_MIXED, prefill=None)):
            held = sum(int(node.num_weights) for node in _lower(options, shape))
            assert abs(held / total - 1) < 1e-6


def test_tensor_parallelism_splits_the_heads_and_repeats_the_low_rank() -> None:
    nodes = _by_role(_lower(_OPERATORS, tp=8))
    assert 16 == nodes["mla_decode"].dims["num_heads"] == nodes["mla_query_absorb"].dims["batch"]
    assert (16, 1) == (
        nodes["attn_rope"].dims["num_heads"],
        nodes["attn_rope"].dims["num_kv_heads"],
    )
    assert 1536 + 512 + 64 == nodes["attn_down_proj"].dims["n"]
    expected = {"message_bytes": 132 * 7168 * 2, "devices_per_node": 8, "num_nodes": 1}
    assert expected == nodes["attn_out_proj_all_reduce"].dims
    module = _by_role(_lower(_MODULE, tp=8))
    assert 16 == module["mla_prefill_module"].dims["num_heads"]
    assert expected == module["attn_out_proj_all_reduce"].dims


def test_variants_are_those_of_the_catalog() -> None:
    options = dataclasses.replace(_MODULE, quantization="fp8_block", kv_dtype=DType.FP8)
    module = _by_role(_lower(options))["mla_decode_module"]
    assert (DType.FP8, "attn=bf16;kv=fp8;quant=fp8_block") == (module.dtype, module.variant)
    assert DType.BF16 is module.written_dtype
    decode = _by_role(_lower(dataclasses.replace(options, mla_form="operators")))["mla_decode"]
    assert (DType.BF16, "kv=fp8") == (decode.dtype, decode.variant)


def test_every_operator_has_legal_whole_dimensions() -> None:
    for options in (_MODULE, _OPERATORS):
        for node in _lower(options, tp=4):
            find_operator(node.operator).check_dims(node.dims)
            assert all(isinstance(value, int) for value in node.dims.values()), node
            assert node.section is not Section.LAYER or node.repeat in (61, 58, 3)
