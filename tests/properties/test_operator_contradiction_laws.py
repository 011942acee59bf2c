"""Dimensions that no batch can have are refused, and nothing that a batch has is."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec, all_engines
from foretoken.domain.measurements.estimate import OperatorTable
from foretoken.domain.models.architecture import all_models
from foretoken.domain.models.stack import stack_of
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.form import SurfaceForm
from foretoken.simulator.cost.latency_surfaces import replica_ranks, surface_spec
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.step_time import grid_axes

_HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
_LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_MODULE = {**_LATENT, "num_heads": 16, "hidden": 2048, "q_lora_rank": 512, "kv_lora_rank": 512}
# What else a call of each kind of attention has.
_DECODES = {
    "attention_decode": _HEADS,
    "attention_decode_window": _HEADS,
    "mla_decode": {"num_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "mla_decode_module": _MODULE,
}
_PREFILLS = {
    "attention_prefill": _HEADS,
    "attention_prefill_window": _HEADS,
    "mla_prefill": {"num_heads": 16, **_LATENT},
    "mla_prefill_module": _MODULE,
}
_lengths = st.lists(st.integers(1, 5_000), min_size=1, max_size=12)
_windows = st.integers(1, 4_096)


def _decode_of(kv_lens: Sequence[int]) -> dict[str, int]:
    return {"num_seqs": len(kv_lens), "kv_tokens": sum(kv_lens), "kv_tokens_max": max(kv_lens)}


def _prefill_of(sequences: Sequence[tuple[int, int]], window: int) -> dict[str, int]:
    """Return the sums over sequences of new tokens after cached ones; a window of 0 is none."""
    pairs = seen = 0
    for new, cached in sequences:
        pairs += sum(min(cached + place, window or cached + place) for place in range(1, new + 1))
        seen += new + min(cached, window - 1 if window else cached)
    return {
        "num_seqs": len(sequences),
        "q_tokens": sum(new for new, _ in sequences),
        "kv_tokens": seen,
        "score_pairs": pairs,
    }


@pytest.mark.parametrize("operator", _DECODES)
@given(kv_lens=_lengths, window=_windows)
def test_every_decoding_batch_can_be_asked_about(
    operator: str, kv_lens: list[int], window: int
) -> None:
    dims = {**_decode_of(kv_lens), **_DECODES[operator]}
    if operator.endswith("_window"):
        dims |= {"window": window, "visible_tokens": sum(min(n, window) for n in kv_lens)}
    find_operator(operator).check_call(dims)


@pytest.mark.parametrize("operator", _PREFILLS)
@given(
    sequences=st.lists(
        st.tuples(st.integers(1, 300), st.one_of(st.just(0), st.integers(0, 3_000))),
        min_size=1,
        max_size=8,
    ),
    window=_windows,
)
def test_every_prefilling_batch_can_be_asked_about(
    operator: str, sequences: list[tuple[int, int]], window: int
) -> None:
    width = window if operator.endswith("_window") else 0
    dims = {**_prefill_of(sequences, width), **_PREFILLS[operator]}
    find_operator(operator).check_call({**dims, "window": width} if width else dims)


@given(kv_lens=_lengths, prefill_lens=_lengths)
def test_every_mixed_batch_can_be_asked_about(kv_lens: list[int], prefill_lens: list[int]) -> None:
    dims = _prefill_of([(min(length, 300), length) for length in prefill_lens], 0)
    decodes = _decode_of(kv_lens)
    dims |= {f"decode_{name}": decodes[name] for name in ("kv_tokens", "kv_tokens_max")}
    dims |= {"num_decode_seqs": len(kv_lens), **_HEADS}
    find_operator("attention_mixed").check_call(dims)


@pytest.mark.parametrize("operator", [name for name in _DECODES if "window" not in name])
def test_exactly_the_decoding_batches_there_are_can_be_asked_about(operator: str) -> None:
    """Of up to four sequences of up to five tokens all are tried, one by one and as columns."""
    spec, longest = find_operator(operator), 5
    batches = {
        (count, sum(kv_lens), max(kv_lens))
        for count in range(1, 5)
        for kv_lens in combinations_with_replacement(range(1, longest + 1), count)
    }
    grid = np.array(
        [
            (count, tokens, most)
            for count in range(1, 5)
            for tokens in range(1, 4 * longest + 1)
            for most in range(1, longest + 1)
        ]
    )
    names = ("num_seqs", "kv_tokens", "kv_tokens_max")
    for row in grid.tolist():
        dims = {**dict(zip(names, row, strict=True)), **_DECODES[operator]}
        can_be = tuple(row) in batches
        assert can_be == (spec.find_contradictions(dims) == [])
        columns = {name: np.array([value, value]) for name, value in dims.items()}
        assert can_be == (spec.find_contradictions(columns) == [])


@pytest.mark.parametrize(
    ("operator", "change", "problem"),
    [
        ("attention_decode", {"kv_tokens": 401}, "kv_tokens: 401 is more than 400, num_seqs times"),
        ("mla_decode", {"kv_tokens": 102}, "kv_tokens: 102 is less than 103, kv_tokens_max and a"),
        ("mla_decode_module", {"kv_tokens_max": 399}, "kv_tokens: 400 is less than 402"),
        (
            "attention_decode_window",
            {"visible_tokens": 201},
            "201 is more than 200, what",
        ),
        (
            "attention_decode_window",
            {"visible_tokens": 199},
            "199 is less than 200, the least",
        ),
        ("attention_prefill", {"kv_tokens": 99}, "q_tokens: 100 is more than the 99 of kv_tokens"),
        ("mla_prefill", {"score_pairs": 9_803}, "score_pairs: 9803 is more than 9802, all that"),
        ("mla_prefill_module", {"score_pairs": 2_549}, "score_pairs: 2549 is less than 2550, the"),
        ("attention_prefill_window", {"score_pairs": 5_001}, "5001 is more than 5000, q_tokens"),
        ("attention_prefill_window", {"kv_tokens": 199}, "199 is more than 198, the new tokens"),
        ("attention_prefill_window", {"score_pairs": 99}, "99 is less than 100, one of each token"),
    ],
)
def test_sums_that_no_batch_has_are_refused(
    operator: str, change: Mapping[str, int], problem: str
) -> None:
    """Four contexts of 100 tokens, or two prompts of 50 with nothing before them."""
    if operator in _DECODES:
        dims = {**_decode_of((100,) * 4), **_DECODES[operator]}
        window = {"window": 50, "visible_tokens": 200}
    else:
        dims = {**_prefill_of([(50, 0)] * 2, 0), **_PREFILLS[operator]}
        window = {"window": 50}
    dims |= window if operator.endswith("_window") else {}
    spec = find_operator(operator)
    spec.check_call(dims)
    with pytest.raises(InvalidRequestError, match=problem):
        spec.check_call({**dims, **change})


def test_columns_too_large_for_64_bits_are_compared_all_the_same() -> None:
    most = 2**53
    columns = {
        "num_seqs": np.array([most]),
        "kv_tokens": np.array([most]),
        "kv_tokens_max": np.array([1]),
        **{name: np.array([value]) for name, value in _HEADS.items()},
    }
    spec = find_operator("attention_decode")
    assert spec.find_contradictions(columns) == []
    columns["kv_tokens_max"] = np.array([most])
    (violation,) = spec.find_contradictions(columns)
    assert "kv_tokens" == violation.field


@st.composite
def _scenarios(draw: st.DrawFn) -> ServingScenario:
    model = all_models()[draw(st.sampled_from(sorted(all_models())))]
    if model.layers:
        pattern = " ".join(layer.name for layer in model.layers)
        model = replace(model, num_layers=0, pattern=pattern)
    else:
        model = replace(model, num_layers=model.moe.num_dense_layers + 2 if model.moe else 2)
    has_experts = bool(stack_of(model).experts)
    spread = (ParallelLayout(tp=2, ep=2), ParallelLayout(dp=8, ep=8)) if has_experts else ()
    return ServingScenario(
        model=model,
        device="b200_sxm",
        layout=draw(st.sampled_from((ParallelLayout(), *spread))),
        engine=EngineSpec(
            profile=draw(st.sampled_from(sorted(all_engines()))),
            max_num_seqs=draw(st.integers(1, 512)),
            max_num_batched_tokens=draw(st.integers(1, 16_384)),
        ),
        moe_imbalance_ratio=draw(st.floats(1.0, 8.0)),
        moe_routing=draw(st.sampled_from(("", "power_law_1.2"))),
    )


def _tables(scenario: ServingScenario, max_context: int) -> list[OperatorTable]:
    """Return what a simulation and a search ask about a deployment."""
    spec = surface_spec(scenario, max_context)
    ranks = replica_ranks(spec)
    load = LoadProfile(
        prefill_mean=max_context / 2,
        decode_mean=max_context / 4,
        prefill_second_ratio=1.5,
        context_mean=max_context * 0.7,
        raggedness=(1.0,),
        longest=max_context,
        is_even=False,
    )
    forms = (SurfaceForm(spec, ranks), SurfaceForm(spec, ranks, grid_axes(spec, load, (1, 3, 64))))
    return [table for form in forms for table in form.questions().tables]


@given(scenario=_scenarios(), max_context=st.integers(2, 40_000))
def test_nothing_that_the_simulator_asks_contradicts_itself(
    scenario: ServingScenario, max_context: int
) -> None:
    for table in _tables(scenario, max_context):
        columns = {name: np.asarray(column) for name, column in table.columns.items()}
        assert find_operator(table.operator).find_contradictions(columns) == [], table.operator
