"""Tests of adapters in the operator graph: their bytes by hand, what they cost and where."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.graph import BatchShape, OperatorNode, RankContext
from foretoken.domain.lowering.lora import adapter_bytes, expected_active, is_adapter_node
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.cluster import LoraSpec
from foretoken.domain.requests.layout import ParallelLayout

_LORA = LoraSpec(num_adapters=4, rank=8, max_loaded=2)
_OPTIONS = LoweringOptions(dtype=DType.BF16, has_kv_cache=True, has_sampler=True)
_SHAPE = BatchShape(num_tokens=64, num_output_rows=4)


def _model(name: str) -> ModelArchitecture:
    return find_model(name)


def _lower(
    name: str, layout: ParallelLayout, lora: LoraSpec | None, stage: int = 0
) -> tuple[OperatorNode, ...]:
    rank = RankContext(model=_model(name), layout=layout, devices_per_node=8, stage=stage)
    return lower_rank(_SHAPE, replace(_OPTIONS, lora=lora), rank)


def _bytes(name: str, layout: ParallelLayout, lora: LoraSpec = _LORA, stage: int = 0) -> float:
    return adapter_bytes(_lower(name, layout, lora, stage), lora)


def test_the_bytes_of_an_adapter_by_hand() -> None:
    """Rank x (in + out) of every linear layer, q, k, v, gate and up each for itself, of 2 bytes."""
    model = _model("llama-3.1-8b")
    hidden, kv, width = 4096, 1024, 14336
    assert (hidden, width, 32) == (model.hidden, model.intermediate, model.num_layers)
    of_layer = (
        (hidden + hidden) + 2 * (hidden + kv) + (hidden + hidden)  # q, k and v, out
        + 2 * (hidden + width) + (width + hidden)  # gate and up, down
    )  # fmt: skip
    assert 2 * 8 * 32 * of_layer == _bytes("llama-3.1-8b", ParallelLayout())


def test_tensor_parallelism_splits_one_of_the_two_matrices() -> None:
    """What goes into a column split and out of a row split is whole on every rank."""
    hidden, kv, width = 4096, 1024, 14336
    whole = (3 * hidden + hidden) + (2 * hidden + hidden)  # A of qkv, B of out; A of up, B of down
    split = (hidden + 2 * kv + hidden) + (2 * width + width)
    expected = 2 * 8 * 32 * (whole + split / 4)
    assert expected == _bytes("llama-3.1-8b", ParallelLayout(tp=4))


def test_pipeline_stages_hold_all_of_an_adapter_between_them() -> None:
    """Each stage has the adapters of its own layers."""
    layout = ParallelLayout(pp=4)
    stages = [_bytes("llama-3.1-8b", layout, stage=stage) for stage in range(4)]
    assert _bytes("llama-3.1-8b", ParallelLayout()) == sum(stages)


def test_every_expert_has_adapters() -> None:
    """Qwen3-30B-A3B: 128 experts of width 768 in 48 layers, besides its attention."""
    hidden, q, kv, width, num = 2048, 4096, 512, 768, 128
    attention = (hidden + q) + 2 * (hidden + kv) + (q + hidden)
    experts = num * (2 * (hidden + width) + (width + hidden))
    expected = 2 * 8 * 48 * (attention + experts)
    assert expected == _bytes("qwen3-30b-a3b", ParallelLayout())
    assert 2 * 8 * 48 * (attention + experts / 4) > _bytes(
        "qwen3-30b-a3b", ParallelLayout(tp=4, ep=4)
    )


def test_adapters_of_attention_alone() -> None:
    """What is left of an expert model's adapter are q, k, v and out."""
    lora = replace(_LORA, targets="attention")
    hidden, q, kv = 2048, 4096, 512
    expected = 2 * 8 * 48 * ((hidden + q) + 2 * (hidden + kv) + (q + hidden))
    assert expected == _bytes("qwen3-30b-a3b", ParallelLayout(), lora)
    with pytest.raises(InvalidRequestError, match="all, attention"):
        replace(_LORA, targets="mlp")


def test_modules_of_latent_attention_have_the_adapters_of_their_projections() -> None:
    """The same bytes whether attention is asked for as a module or as operators."""
    rank = RankContext(model=_model("deepseek-v3"), layout=ParallelLayout(tp=8), devices_per_node=8)
    options = replace(_OPTIONS, lora=_LORA)
    module = lower_rank(_SHAPE, options, rank)
    operators = lower_rank(_SHAPE, replace(options, mla_form="operators"), rank)
    assert adapter_bytes(operators, _LORA) == adapter_bytes(module, _LORA)
    roles = {node.role for node in module if is_adapter_node(node)}
    assert {"attn_down_proj_lora_shrink", "attn_out_proj_lora_expand"} <= roles


def test_without_adapters_nothing_is_added() -> None:
    """What is left without the adapters' operators is the graph without adapters."""
    layout = ParallelLayout(tp=2)
    with_lora = _lower("llama-3.1-8b", layout, _LORA)
    rest = tuple(node for node in with_lora if not is_adapter_node(node))
    assert _lower("llama-3.1-8b", layout, None) == rest
    assert 8 * 32 == sum(node.repeat for node in with_lora if is_adapter_node(node))
    assert {"lora"} == {node.group for node in with_lora if is_adapter_node(node)}


@given(rank=st.integers(1, 256), num_loaded=st.integers(1, 64))
def test_work_and_bytes_grow_with_the_rank_and_room_with_the_slots(
    rank: int, num_loaded: int
) -> None:
    """Twice the rank is twice the FLOPs and the bytes; each slot takes one adapter more."""
    spec = LoraSpec(num_adapters=64, rank=rank, max_loaded=num_loaded)
    layout = ParallelLayout()

    def measure(lora: LoraSpec) -> tuple[float, float, float]:
        nodes = [n for n in _lower("llama-3.1-8b", layout, lora) if is_adapter_node(n)]
        operator = find_operator("lora_gemm")
        flops = sum(operator.flops(node.dims, 2) * node.repeat for node in nodes)
        held = sum(node.weights_bytes for node in nodes)
        return flops, adapter_bytes(nodes, lora), held

    flops, size, held = measure(spec)
    assert num_loaded * size == pytest.approx(held)
    twice = measure(replace(spec, rank=2 * rank))
    assert (2 * flops, 2 * size, 2 * held) == twice


@given(
    num_draws=st.integers(1, 6),
    num_adapters=st.integers(1, 4),
    spread=st.sampled_from([0.0, 1.0]),
)
def test_the_number_of_different_adapters_is_the_expected_one(
    num_draws: int, num_adapters: int, spread: float
) -> None:
    """Against the mean over every way in which requests can ask."""
    spec = LoraSpec(num_adapters=num_adapters, max_loaded=num_adapters, popularity_spread=spread)
    weights = [1 / number**spread for number in range(1, num_adapters + 1)]
    mean = sum(
        len(set(drawn)) * np.prod([weights[adapter] / sum(weights) for adapter in drawn])
        for drawn in itertools.product(range(num_adapters), repeat=num_draws)
    )
    # In whole numbers: of halves either is near enough.
    assert abs(mean - expected_active(num_draws, spec)) <= 0.5 + 1e-9


def test_a_batch_never_hits_more_adapters_than_are_loaded() -> None:
    """Columns of batches; many rows hit all that fit, one hits one."""
    spec = LoraSpec(num_adapters=100, max_loaded=8)
    hit = expected_active(np.array([1, 4, 1000, 100_000]), spec)
    assert [1, 4, 8, 8] == hit.tolist()


@given(
    active=st.integers(1, 64),
    m=st.integers(1, 8192),
    n=st.integers(1, 4096),
    k=st.integers(1, 4096),
)
def test_the_product_that_stands_in_is_as_much_work(active: int, m: int, n: int, k: int) -> None:
    """A dense product of about as many FLOPs and bytes: to rounding, which small ones feel."""
    operator, gemm = find_operator("lora_gemm"), find_operator("gemm")
    dims = {"num_slots": active, "num_active": active, "m": m, "n": n, "k": k}
    assert operator.proxy_operator is not None
    name, proxy = operator.proxy_operator(dims)
    assert "gemm" == name
    smallest = min(proxy["m"], proxy["n"])
    if smallest >= 8:
        tolerance = 1 / smallest
        assert operator.flops(dims, 2) == pytest.approx(gemm.flops(proxy, 2), rel=tolerance)
        assert operator.moved_bytes(dims, 2) == pytest.approx(
            gemm.moved_bytes(proxy, 2), rel=tolerance
        )
    columns = {key: np.array([value, value]) for key, value in dims.items()}
    name, several = operator.proxy_operator(columns)
    assert all((several[key] == proxy[key]).all() for key in proxy)
    if active == 1:
        assert {"m": m, "n": n, "k": k} == proxy
