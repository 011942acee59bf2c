"""What a quantisation does to the operators and the weights of a model."""

import dataclasses
from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.graph import BatchShape, DecodeShape, OperatorNode, RankContext
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.quantization import (
    PARTS,
    UNQUANTIZED,
    all_quantizations,
    executed_quantization,
    find_quantization,
)
from foretoken.domain.operators.spec.variant import parse_variant, stored_dtype
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario

_BATCH = BatchShape(
    num_tokens=64,
    num_output_rows=64,
    decode=DecodeShape(num_seqs=64, kv_tokens=6400, kv_tokens_max=200),
)


def _lower(model: str, quantization: str, tp: int = 1, **options: Any) -> dict[str, OperatorNode]:
    rank = RankContext(model=find_model(model), layout=ParallelLayout(tp=tp), devices_per_node=8)
    chosen = LoweringOptions(
        dtype=DType.BF16, has_kv_cache=True, has_sampler=True, quantization=quantization, **options
    )
    return {node.role: node for node in lower_rank(_BATCH, chosen, rank)}


@pytest.mark.parametrize(
    ("quantization", "dtype", "variant"),
    [
        ("", DType.BF16, ""),
        ("fp8", DType.FP8, ""),
        ("fp8_block", DType.FP8, "quant=fp8_block"),
        ("int4_wo", DType.BF16, "quant=int4_wo"),
        ("nvfp4", DType.FP4, "quant=nvfp4"),
        ("mxfp4", DType.BF16, ""),
    ],
)
def test_projections_are_asked_for_as_the_catalog_has_them(
    quantization: str, dtype: DType, variant: str
) -> None:
    nodes = _lower("llama-3-8b", quantization)
    for role in ("attn_qkv_proj", "attn_out_proj", "mlp_up_proj", "mlp_down_proj"):
        assert (dtype, variant) == (nodes[role].dtype, nodes[role].variant)
        assert DType.BF16 is nodes[role].written_dtype


def test_head_embedding_router_and_norms_stay_as_they_are() -> None:
    for quantization in all_quantizations():
        nodes = _lower("qwen3-30b-a3b", quantization)
        for role in ("lm_head", "embedding", "moe_router", "input_norm", "sampler"):
            assert (DType.BF16, "", 0) == (
                nodes[role].dtype,
                nodes[role].variant,
                nodes[role].weight_bits,
            )


def test_experts_have_a_scheme_and_a_routing() -> None:
    block = _lower("qwen3-30b-a3b", "fp8_block")["moe_experts"]
    assert (DType.FP8, "quant=fp8_block;routing=balanced") == (block.dtype, block.variant)
    four = _lower("gpt-oss-20b", "mxfp4")["moe_experts"]
    assert (DType.BF16, "quant=w4a16_mxfp4;routing=balanced") == (four.dtype, four.variant)
    assert "" == _lower("gpt-oss-20b", "mxfp4")["attn_qkv_proj"].variant


def test_weights_shrink_to_what_is_stored_with_its_scales() -> None:
    whole = _lower("llama-3-8b", "")["mlp_up_proj"].weights_bytes
    ratios = {
        name: _lower("llama-3-8b", name)["mlp_up_proj"].weights_bytes / whole
        for name in ("fp8", "fp8_block", "int4_wo", "nvfp4", "mxfp4")
    }
    expected = {"fp8": 0.5, "fp8_block": 0.5001, "int4_wo": 0.2598, "nvfp4": 0.28125, "mxfp4": 1}
    assert pytest.approx(expected, abs=1e-4) == ratios


def test_sums_over_ranks_move_what_products_write() -> None:
    plain = _lower("llama-3-8b", "", tp=2)["mlp_down_proj_all_reduce"]
    assert plain == _lower("llama-3-8b", "fp8", tp=2)["mlp_down_proj_all_reduce"]


def test_a_narrow_cache_is_a_variant_of_what_reads_and_writes_it() -> None:
    nodes = _lower("llama-3-8b", "", kv_dtype=DType.FP8)
    assert ("kv=fp8", "kv=fp8") == (
        nodes["attention_decode"].variant,
        nodes["kv_cache_write"].variant,
    )
    assert DType.BF16 is nodes["attention_decode"].dtype
    assert "" == _lower("llama-3-8b", "", kv_dtype=DType.BF16)["attention_decode"].variant


def test_every_scheme_is_one_the_catalog_knows() -> None:
    for scheme in all_quantizations().values():
        for weight in map(scheme.weight_of, PARTS):
            assert not weight.variant or stored_dtype(weight.variant) is not None
            assert {} == parse_variant("") or weight.bits >= 4


def test_an_unknown_scheme_names_the_nearest() -> None:
    with pytest.raises(UnknownPluginError, match="fp8_block"):
        find_quantization("fp8_blok")


def test_latent_attention_keeps_its_format_under_four_bits() -> None:
    options = LoweringOptions(
        dtype=DType.BF16, has_kv_cache=True, quantization="nvfp4", mla_form="operators"
    )
    rank = RankContext(model=find_model("deepseek-v3"), layout=ParallelLayout(), devices_per_node=8)
    shape = dataclasses.replace(_BATCH, prefill=None)
    nodes = {node.role: node for node in lower_rank(shape, options, rank)}
    assert DType.BF16 is nodes["attn_q_proj"].dtype
    assert DType.FP4 is nodes["mlp_up_proj"].dtype


def test_each_part_of_a_layer_is_stored_in_its_own_scheme() -> None:
    nodes = _lower("qwen3-30b-a3b", "attention=fp8_block+experts=nvfp4")
    assert "quant=fp8_block" == nodes["attn_qkv_proj"].variant
    assert "quant=fp8_block" == nodes["attn_out_proj"].variant
    assert 4.5 == nodes["moe_experts"].weight_bits
    experts = _lower("deepseek-v3", "shared_experts=int4_wo_g32")
    assert 4.5 == experts["shared_up_proj"].weight_bits
    others = ("mlp_up_proj", "moe_experts", "mla_decode_module")
    assert [0, 0, 0] == [experts[role].weight_bits for role in others]


@pytest.mark.parametrize("name", ["attn=fp8", "attention=fp8+nvfp4", "attention=mxfp4"])
def test_a_part_that_is_none_or_that_a_scheme_leaves_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="quantization"):
        find_quantization(name)


def test_what_a_device_lacks_is_emulated_part_by_part() -> None:
    executed = executed_quantization(
        "attention=fp8_block+experts=int4_wo", find_device("a100_sxm_80"), "vllm"
    )
    assert "attention=int8_wo+experts=int4_wo" == executed.name
    with pytest.raises(InvalidRequestError, match="no kernel that emulates it"):
        executed_quantization(
            "attention=fp8_block+experts=w4afp8", find_device("a100_sxm_80"), "vllm"
        )


@pytest.mark.parametrize(
    ("name", "engine", "device", "expected"),
    [
        ("mxfp4", "trtllm", "b200", "w4a8_mxfp4_mxfp8"),
        ("attention=fp8+experts=mxfp4", "trtllm", "b200", "attention=fp8+experts=w4a8_mxfp4_mxfp8"),
        ("mxfp4", "trtllm", "h200_sxm", "mxfp4"),
        ("mxfp4", "vllm", "b200", "mxfp4"),
        ("w4a16_mxfp4", "trtllm", "b200", "w4a16_mxfp4"),
    ],
)
def test_an_engine_chooses_the_activations_of_a_scheme_by_device(
    name: str, engine: str, device: str, expected: str
) -> None:
    executed = executed_quantization(name, find_device(device), engine)
    assert expected == executed.name
    assert (name != expected) == (f"{engine} runs {name} on {device}" in executed.remark)


def test_a_scenario_takes_the_checkpoints_format_unless_it_names_one() -> None:
    stored = ServingScenario(model="gpt-oss-120b", device="h200_sxm")
    assert "mxfp4" == stored.quantization
    assert UNQUANTIZED == dataclasses.replace(stored, quantization=UNQUANTIZED).quantization
    assert "fp8" == dataclasses.replace(stored, quantization="fp8").quantization
    assert (
        UNQUANTIZED
        == ServingScenario(model=stored.model, device="h200_sxm", dtype=DType.FP8).quantization
    )
    plain = ServingScenario(model="llama-3-8b", device="h200_sxm", quantization=UNQUANTIZED)
    assert "" == plain.quantization


def test_the_kv_cache_has_the_checkpoints_format_with_the_checkpoints_weights() -> None:
    model = dataclasses.replace(find_model("llama-3-8b"), quantization="fp8", kv_dtype=DType.FP8)
    scenario = ServingScenario(model=model, device="h200_sxm")
    assert DType.FP8 is scenario.kv_dtype
    assert (
        DType.BF16 is ServingScenario(model=model, device="h200_sxm", kv_dtype=DType.BF16).kv_dtype
    )
    assert (
        ServingScenario(model=model, device="h200_sxm", quantization=UNQUANTIZED).kv_dtype is None
    )


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("vllm-0.28", DType.FP8),
        ("vllm-0.14", DType.FP8),
        ("vllm-0.12", None),
        ("sglang-0.5", DType.FP8),
        ("trtllm-1.0", DType.FP8),
        ("orca", None),
    ],
)
def test_releases_take_the_format_of_the_kv_cache_from_a_checkpoint_or_not(
    profile: str, expected: DType | None
) -> None:
    engine = EngineSpec(profile=profile)
    scenario = ServingScenario(model="deepseek-v3.1-nvfp4", device="b200_sxm", engine=engine)
    assert expected is scenario.kv_dtype


@pytest.mark.parametrize(
    ("model", "device", "engine", "expected"),
    [
        ("glm-5", "b200", "sglang-0.5", DType.FP8),
        ("glm-5", "rtx_pro_6000", "sglang-0.5.20", DType.FP8),
        ("glm-5", "h200_sxm", "sglang-0.5", None),
        ("glm-5", "b200", "vllm-0.28", None),
        ("deepseek-v3", "b200", "sglang-0.5", None),
    ],
)
def test_an_engine_keeps_the_cache_of_chosen_tokens_in_a_format_of_the_device(
    model: str, device: str, engine: str, expected: DType | None
) -> None:
    scenario = ServingScenario(model=model, device=device, engine=EngineSpec(profile=engine))
    assert expected == scenario.kv_dtype
    assert DType.BF16 == dataclasses.replace(scenario, kv_dtype=DType.BF16).kv_dtype
