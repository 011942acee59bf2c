"""Layers that see a window of the tokens before, mixed with layers that see all."""

import dataclasses

import pytest

from foretoken.domain.lowering.graph import (
    BatchShape,
    DecodeShape,
    OperatorNode,
    PrefillShape,
    RankContext,
)
from foretoken.domain.lowering.lower import lower_forward, lower_rank
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.domain.operators.attention_prefill_window import window_prefill_dims
from foretoken.domain.requests.layout import ParallelLayout

_OPTIONS = LoweringOptions(dtype=DType.BF16, has_kv_cache=True, has_sampler=True)
_GPT_OSS = find_model("gpt-oss-20b")


def _lower(
    q_len: int, context: int, model: ModelArchitecture = _GPT_OSS
) -> dict[str, OperatorNode]:
    shape = BatchShape(
        num_tokens=q_len + 4,
        num_output_rows=5,
        prefill=PrefillShape(**prefill_dims(1, q_len, context)),
        decode=DecodeShape(num_seqs=4, kv_tokens=4000, kv_tokens_max=1500),
    )
    return {node.role: node for node in lower_forward(model, shape, _OPTIONS)}


def test_every_other_layer_has_a_window() -> None:
    nodes = _lower(300, 0)
    places = {
        role: (nodes[role].first_layer, nodes[role].layer_stride, nodes[role].repeat)
        for role in ("attention_decode", "attention_decode_window")
    }
    assert {"attention_decode": (1, 2, 12), "attention_decode_window": (0, 2, 12)} == places


def test_decoding_sees_the_window_of_every_sequence() -> None:
    window = _lower(300, 0)["attention_decode_window"].dims
    assert (512, 128, 4000) == (window["visible_tokens"], window["window"], window["kv_tokens"])


@pytest.mark.parametrize("q_len", [1, 100, 128, 300])
def test_a_prefill_without_context_is_the_operators_own(q_len: int) -> None:
    dims = _lower(q_len, 0)["attention_prefill_window"].dims
    expected = window_prefill_dims(1, q_len, 128)
    # A token sees those of its own prefill only.
    assert expected == {name: dims[name] for name in expected}


@pytest.mark.parametrize(("q_len", "context"), [(1, 500), (50, 100), (200, 60), (7, 127)])
def test_pairs_are_those_inside_the_window(q_len: int, context: int) -> None:
    dims = _lower(q_len, context)["attention_prefill_window"].dims
    pairs = sum(min(context + place, 128) for place in range(1, q_len + 1))
    assert (pairs, q_len + min(context, 127)) == (dims["score_pairs"], dims["kv_tokens"])


def test_a_window_may_be_in_every_layer_or_in_most() -> None:
    always = dataclasses.replace(_GPT_OSS, full_attention_period=0)
    assert "attention_decode" not in _lower(8, 0, always)
    assert 24 == _lower(8, 0, always)["attention_decode_window"].repeat
    mostly = dataclasses.replace(_GPT_OSS, full_attention_period=6, num_layers=26)
    shape = BatchShape(
        num_tokens=1,
        num_output_rows=1,
        decode=DecodeShape(num_seqs=1, kv_tokens=9, kv_tokens_max=9),
    )
    nodes = lower_forward(mostly, shape, _OPTIONS)
    repeats = [n.repeat for n in nodes if n.operator == "attention_decode_window"]
    assert ([22], [4]) == (
        repeats,
        [n.repeat for n in nodes if n.operator == "attention_decode"],
    )


@pytest.mark.parametrize("pp", [1, 2, 5, 24])
def test_stages_share_the_layers_of_both_kinds(pp: int) -> None:
    shape = BatchShape(
        num_tokens=1,
        num_output_rows=1,
        decode=DecodeShape(num_seqs=1, kv_tokens=9, kv_tokens_max=9),
    )
    layout = ParallelLayout(pp=pp)
    counts = {"attention_decode": 0, "attention_decode_window": 0}
    for stage in range(pp):
        rank = RankContext(model=_GPT_OSS, layout=layout, devices_per_node=8, stage=stage)
        nodes = lower_rank(shape, _OPTIONS, rank)
        found = {n.role: n.repeat for n in nodes if n.role in counts}
        assert rank.num_stage_layers == sum(found.values())
        counts = {role: count + found.get(role, 0) for role, count in counts.items()}
    assert {"attention_decode": 12, "attention_decode_window": 12} == counts


def test_training_sees_everything() -> None:
    training = LoweringOptions(dtype=DType.BF16, has_loss=True)
    shape = BatchShape(
        num_tokens=300,
        num_output_rows=300,
        prefill=PrefillShape(**prefill_dims(1, 300, 0)),
    )
    nodes = {node.role: node for node in lower_forward(_GPT_OSS, shape, training)}
    assert (24, 1) == (
        nodes["attention_prefill"].repeat,
        nodes["attention_prefill"].layer_stride,
    )


@pytest.mark.parametrize(("window", "period"), [(0, 2), (128, 1)])
def test_without_a_window_or_with_all_layers_full_nothing_is_narrow(
    window: int, period: int
) -> None:
    model = dataclasses.replace(_GPT_OSS, sliding_window=window, full_attention_period=period)
    nodes = _lower(300, 0, model)
    assert (24, 24) == (nodes["attention_decode"].repeat, nodes["attention_prefill"].repeat)
    assert "attention_decode_window" not in nodes
