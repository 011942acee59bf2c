"""Ranks of tensor parallelism that split the KV cache they hold copies of."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec, find_engine
from foretoken.domain.hardware.device import find_device
from foretoken.domain.lowering.graph import BatchShape, DecodeShape, PrefillShape, RankContext
from foretoken.domain.lowering.lower import lower_rank
from foretoken.domain.lowering.memory import plan_serving_memory
from foretoken.domain.lowering.options import LoweringOptions, Nodes
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout

_LATENT, _GROUPED = "deepseek-v3", "llama-3.1-405b"
_DECODE = DecodeShape(num_seqs=10, kv_tokens=80_000, kv_tokens_max=12_000)


def _rank(model: str, tp: int = 16) -> RankContext:
    return RankContext(model=find_model(model), layout=ParallelLayout(tp=tp), devices_per_node=8)


def _options(degree: int, *, repeats_queries: bool = False) -> LoweringOptions:
    return LoweringOptions(
        dtype=DType.BF16,
        has_kv_cache=True,
        mla_form="operators",
        decode_context_parallel=degree,
        repeats_queries=repeats_queries,
    )


def _lower(
    model: str, degree: int, decode: DecodeShape = _DECODE, prefill: PrefillShape | None = None
) -> Nodes:
    shape = BatchShape(num_tokens=500, num_output_rows=10, decode=decode, prefill=prefill)
    return lower_rank(shape, _options(degree), _rank(model))


@pytest.mark.parametrize(("model", "degree"), [(_LATENT, 16), (_LATENT, 4), (_GROUPED, 2)])
def test_a_rank_attends_with_the_heads_of_all_over_its_own_tokens(model: str, degree: int) -> None:
    (alone,), (split,) = (
        [n for n in _lower(model, parts) if n.operator in ("attention_decode", "mla_decode")]
        for parts in (1, degree)
    )
    assert (degree * alone.dims["num_heads"], 80_000 // degree, 12_000 // degree) == (
        split.dims["num_heads"],
        split.dims["kv_tokens"],
        split.dims["kv_tokens_max"],
    )
    assert alone.repeat == split.repeat
    flops = [
        find_operator(node.operator).flops(node.dims, node.dtype.num_bytes)
        for node in (alone, split)
    ]
    assert flops[0] == flops[1]


def test_queries_are_gathered_and_results_added_up() -> None:
    nodes = {node.role: node for node in _lower(_LATENT, 4)}
    sent = {
        role.removeprefix("mla_decode_"): node.dims["message_bytes"]
        for role, node in nodes.items()
        if role.startswith("mla_decode_")
    }
    # 8 of 128 heads a rank, of four ranks 32: 512 features to attend with, 64 for the position.
    heads = 10 * 32
    assert {
        "query_all_gather": heads * (512 + 64) * 2,
        "sums_all_gather": heads * 4 * 4,
        "reduce_scatter": heads * 512 * 2,
    } == sent
    group = nodes["mla_decode_reduce_scatter"].dims
    assert (4, 1) == (group["devices_per_node"], group["num_nodes"])


def _lower_repeated(model: str, degree: int, *, repeats_queries: bool = True) -> Nodes:
    prefill = PrefillShape(**prefill_dims(1, 100, 3000))
    shape = BatchShape(num_tokens=500, num_output_rows=10, decode=_DECODE, prefill=prefill)
    options = _options(degree, repeats_queries=repeats_queries)
    return lower_rank(shape, options, _rank(model))


def test_repeated_queries_are_computed_and_results_exchanged_once() -> None:
    nodes, gathered = (
        {node.role: node for node in _lower_repeated(_LATENT, 4, repeats_queries=repeats)}
        for repeats in (True, False)
    )
    # Of 128 heads 16 ranks have 8 each, of which four make the queries of each other, too.
    assert 4 * 8 * (128 + 64) == nodes["attn_q_proj"].dims["n"]
    assert 4 * 8 == nodes["mla_query_absorb"].dims["batch"]
    assert 4 * 8 == nodes["attn_rope"].dims["num_heads"]
    assert gathered["mla_decode"].dims == nodes["mla_decode"].dims
    for own in ("mla_value_unpack", "attn_out_proj", "mlp_down_proj"):
        assert gathered[own].dims == nodes[own].dims
    sent = {role: node for role, node in nodes.items() if role.startswith("mla_decode_")}
    assert ["mla_decode_all_to_all"] == list(sent)
    # Results in 16 bits, a maximum and a sum of each head in 32.
    assert 10 * 32 * (512 * 2 + 2 * 4) == sent["mla_decode_all_to_all"].dims["message_bytes"]


def test_ranks_that_repeat_queries_hold_what_makes_them() -> None:
    more, less = (
        sum(node.weights_bytes for node in _lower_repeated(_LATENT, 4, repeats_queries=repeats))
        for repeats in (True, False)
    )
    # Queries of 8 heads from a rank of 1536, keys and values from one of 512; three times more.
    each = 1536 * 8 * (128 + 64) + 512 * 8 * (128 + 128)
    assert 61 * 3 * each * 2 == more - less


def test_queries_of_grouped_heads_are_not_repeated() -> None:
    with pytest.raises(InvalidRequestError, match="queries ranks do not repeat"):
        _lower_repeated(_GROUPED, 2)


def test_prompts_gather_the_vectors_of_what_came_before() -> None:
    prefill = PrefillShape(**prefill_dims(1, 100, 3000))
    nodes = {node.role: node for node in _lower(_LATENT, 4, prefill=prefill)}
    gathered = nodes["mla_prefill_context_all_gather"].dims["message_bytes"]
    assert 3000 * (512 + 64) * 2 == gathered


@given(st.integers(1, 300), st.integers(1, 50_000), st.data(), st.sampled_from((2, 4, 8, 16)))
def test_parts_of_contexts_are_contexts(
    num_seqs: int, longest: int, data: st.DataObject, degree: int
) -> None:
    kv_tokens = data.draw(st.integers(longest + num_seqs - 1, num_seqs * longest))
    decode = DecodeShape(num_seqs=num_seqs, kv_tokens=kv_tokens, kv_tokens_max=longest)
    for node in _lower(_LATENT, degree, decode):
        find_operator(node.operator).check_dims(node.dims)
        if node.operator == "mla_decode":
            assert (
                kv_tokens
                <= degree * node.dims["kv_tokens"]
                < kv_tokens + degree * num_seqs + longest
            )


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_the_cache_holds_as_many_times_more_tokens(degree: int) -> None:
    engine = dataclasses.replace(find_engine("vllm-0.20"), decode_context_parallel=degree)
    nodes, rank = _lower(_LATENT, degree), _rank(_LATENT)
    memory = plan_serving_memory(nodes, rank, engine, find_device("h200_sxm"))
    assert 61 * (512 + 64) * 2 / degree == memory.kv_bytes_per_token


def test_a_block_has_its_tokens_on_each_rank() -> None:
    spec = EngineSpec(profile="vllm-0.20", rules={"decode_context_parallel": "4"})
    assert 64 == spec.resolve().block_size


@pytest.mark.parametrize(
    ("model", "tp", "degree", "problem"),
    [
        (_LATENT, 8, 3, "must divide the 8 ranks"),
        (_GROUPED, 16, 4, "has no 4 copies of a key head over tp 16"),
        ("gpt-oss-120b", 16, 2, "layers that do not keep all tokens"),
    ],
)
def test_what_cannot_be_split_says_why(model: str, tp: int, degree: int, problem: str) -> None:
    shape = BatchShape(num_tokens=10, num_output_rows=10, decode=_DECODE)
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        lower_rank(shape, _options(degree), _rank(model, tp))
    assert "engine.rules.decode_context_parallel" in {
        violation.field for violation in caught.value.violations
    }
