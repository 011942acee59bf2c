"""Traces of models: what is called, whose gradient it has, which module and operator it is."""

from collections import Counter

import pytest
import torch
from graph_models import CONFIGS, config_json, graph_request, trace_of
from slow_cases import slow_but

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.profiler.graph.call_operator import operator_calls
from foretoken.profiler.graph.model import read_model_config, shorten
from foretoken.profiler.graph.module_fold import fold_calls, module_times
from foretoken.profiler.graph.tensor_split import SplitError
from foretoken.profiler.graph.trace import TracedCall, find_integers
from foretoken.profiler.graph.whole_pass import pass_bytes

_GATED = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_gate", "mlp_act_fn", "mlp_up", "mlp_down")
_FUSED = ("qkv_proj", "attn_o", "mlp_up", "mlp_act_fn", "mlp_down")
_EXPERTS = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp")
_UNGATED = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_up", "mlp_act_fn", "mlp_down")
_COLUMNS = {
    "phi3": ("qkv_proj", "attn_o", "gate_up_proj", "mlp_act_fn", "mlp_down"),
    "gpt2": _FUSED,
    "gpt_neox": _FUSED,
    "opt": _UNGATED,
    "phi": _UNGATED,
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
}
# Their layers are split as those of a llama.
_LIKE_LLAMA = {"mistral", "qwen2", "gemma", "gemma2"}
# Queries, keys and values of a rank: features in all of the model's heads.
_NUM_TOKENS = 16


def _count(_call: TracedCall) -> tuple[float, float]:
    return 1.0, 0.0


def _operators(family: str, num_ranks: int = 1) -> list[OperatorCall]:
    calls = trace_of(family, num_ranks).calls
    return [
        operator
        for call in calls
        for phase, operator in operator_calls(call, DType.FP32).items()
        if phase is Phase.FORWARD
    ]


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "mixtral"], sorted(CONFIGS)))
def test_calls_fold_to_columns(family: str) -> None:
    """Every call is in one column, and layers have the modules of their family in order."""
    calls = trace_of(family).calls
    sums = fold_calls(calls, _count)
    assert len(calls) == sum(found.forward_us for found in sums.values())
    expected = _COLUMNS.get(family, _GATED)
    for layer in (0, 1):
        found = {column for where, column in sums if where == layer}
        assert set(expected) == found
    assert {"embed", "lm_head"} == {column for where, column in sums if where < 0}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(CONFIGS) - _LIKE_LLAMA))
def test_half_a_model(family: str) -> None:
    """Two ranks have half of the products in layers each, and the whole head."""
    whole, half = (
        [operator.dims for operator in _operators(family, ranks) if operator.operator == "gemm"]
        for ranks in (1, 2)
    )
    assert len(whole) == len(half)
    assert whole[-1] == half[-1]
    work = [sum(d["m"] * d["n"] * d["k"] for d in dims[:-1]) for dims in (whole, half)]
    # Routers are whole on each rank.
    routers = sum(d["m"] * d["n"] * d["k"] for d in whole[:-1] if d["n"] == 4)
    assert work[0] - routers == 2 * (work[1] - routers)


def test_operators_of_a_llama() -> None:
    """The products, attention, activation and sums of a layer are operators of exact dimensions."""
    found = Counter(
        (operator.operator, operator.variant, tuple(operator.dims.values()))
        for operator in _operators("llama")
    )
    expected = {
        ("embedding", "", (_NUM_TOKENS, 64, 96)): 1,
        ("gemm", "", (_NUM_TOKENS, 64, 64)): 4,
        ("gemm", "", (_NUM_TOKENS, 32, 64)): 4,
        ("attention_prefill", "", (2, 16, 16, 72, 4, 2, 16)): 2,
        ("residual_add", "", (_NUM_TOKENS, 64)): 4,
        ("gemm", "", (_NUM_TOKENS, 128, 64)): 4,
        ("silu", "", (_NUM_TOKENS, 128)): 2,
        ("product", "", (_NUM_TOKENS, 128)): 2,
        ("gemm", "", (_NUM_TOKENS, 64, 128)): 2,
        ("gemm", "", (_NUM_TOKENS, 96, 64)): 1,
    }
    assert expected == dict(found)


def test_biases_are_a_variant() -> None:
    """A product that adds a bias, or whose weight lies the other way, is no plain product."""
    variants = {operator.variant for operator in _operators("gpt2") if operator.operator == "gemm"}
    assert {"epilogue=bias;layout=nn", ""} == variants


def test_windows_keep_their_mask() -> None:
    """Attention with a window shorter than the sequence is not taken for plain attention."""
    plain, windowed = (
        trace_of("mistral", sliding_window=window, use_sliding_window=True).calls
        for window in (None, 4)
    )
    counts = [
        sum("attention_prefill" == operator.operator for call in calls for operator in _of(call))
        for calls in (plain, windowed)
    ]
    assert [2, 0] == counts


def _of(call: TracedCall) -> list[OperatorCall]:
    found = operator_calls(call, DType.FP32)
    return [found[Phase.FORWARD]] if found else []


def test_layers_share_calls() -> None:
    """A layer more brings no call that is not known from the others."""
    keys = [{call.key for call in trace.calls} for trace in (trace_of("llama"), trace_of("llama"))]
    assert keys[0] == keys[1]
    by_layer = [
        {call.key for call in trace_of("llama").calls if f"layers.{layer}." in call.module}
        for layer in (0, 1)
    ]
    assert by_layer[0] == by_layer[1]


def test_gradients_stop_at_positions() -> None:
    """Rotations depend on no parameter, so nothing of theirs is run back; projections are."""
    calls = trace_of("llama").calls
    by_module = {
        name: {call.is_differentiable for call in calls if call.module.endswith(name)}
        for name in ("rotary_emb", "q_proj")
    }
    assert {"rotary_emb": {False}, "q_proj": {True}} == by_module


def test_forks_have_readers() -> None:
    """The result of a norm is read by three projections: two sums of gradients follow."""
    calls = trace_of("llama").calls
    norms = [call for call in calls if call.module == "model.layers.0.input_layernorm"]
    assert 3 == norms[-1].num_readers


def test_integers_are_real() -> None:
    """Indices are those of the run: rows that tables have."""
    trace = trace_of("gpt2")
    tokens = torch.arange(16).reshape(2, 8)
    found = find_integers(trace, tokens)
    tables = [call for call in trace.calls if str(call.target) == "aten.embedding.default"]
    positions = found[tables[1].name][0].flatten().tolist()
    assert list(range(8)) == sorted(set(positions))


def test_backward_keeps_more() -> None:
    """With a backward pass all results are held, without only those still read."""
    trace = trace_of("llama")
    forward, both = (pass_bytes(trace, has_backward=has_backward) for has_backward in (False, True))
    logits = 2 * 8 * 96 * 4
    assert logits <= forward < both


def test_layers_alike_are_told_once() -> None:
    """Layers of equal times are one entry; those that differ have one each."""
    calls = trace_of("llama").calls
    alike = list(module_times(fold_calls(calls, _count), 2, is_split=True))
    assert {-1} == {item.layer for item in alike}
    assert ["lm_head"] == [item.module for item in alike if item.is_whole]

    def uneven(call: TracedCall) -> tuple[float, float]:
        return (2.0 if "layers.1.mlp.down_proj" in call.module else 1.0), 0.0

    told = list(module_times(fold_calls(calls, uneven), 2, is_split=False))
    assert {0, 1} == {item.layer for item in told if item.module == "mlp_down"}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": "vit"}, "no causal LM"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_unknown_models_are_refused(changes: dict[str, object], what: str) -> None:
    """What transformers cannot build as a causal LM is refused with its name."""
    text = config_json("llama", **changes)
    with pytest.raises(InvalidRequestError, match=what):
        read_model_config(graph_request("llama", config_json=text))


def test_code_of_repositories_is_not_run() -> None:
    """A configuration that names code of its own is built by the library's class, or not at all."""
    text = config_json("llama", auto_map={"AutoModelForCausalLM": "modeling_x.Model"})
    config = read_model_config(graph_request("llama", config_json=text))
    assert "LlamaConfig" == type(config).__name__
    assert not hasattr(config, "auto_map")


@pytest.mark.parametrize(
    "facts",
    [
        {"sequence_length": 0},
        {"micro_batch_size_max": 0},
        {"tp_sizes": (0,)},
        {"num_layers": 3},
        {"num_layers": -1},
        {"dtype": DType.FP8},
        {"time_cap_s": -1.0},
        {"config_json": "{"},
        {"config_json": "[]"},
    ],
)
def test_bad_requests_are_refused(facts: dict[str, object]) -> None:
    """What cannot be met is refused before anything is built."""
    with pytest.raises(InvalidRequestError):
        read_model_config(graph_request("llama", **facts))


def test_shortened_models_keep_their_first_layers() -> None:
    """What a configuration says of each layer is said of those that are left."""
    kinds = ["sliding_attention", "full_attention"]
    text = config_json("gemma2", layer_types=kinds)
    config = read_model_config(graph_request("gemma2", config_json=text))
    assert kinds[:1] == shorten(config, 1).layer_types


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_uneven_splits_are_refused(num_ranks: int) -> None:
    """Heads that do not divide by the ranks cannot be split."""
    with pytest.raises(SplitError, match="does not divide"):
        trace_of("llama", num_ranks)
