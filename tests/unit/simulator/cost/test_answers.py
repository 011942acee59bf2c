"""How what was measured decides which answers make up a step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Provenance,
)
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.models.architecture import all_models, find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.form import SurfaceForm
from foretoken.simulator.cost.latency_surfaces import replica_ranks, surface_spec
from foretoken.simulator.cost.tables import CostTables, StepShape, stage_us
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.step_time import fetch_grids, grid_axes
from foretoken.simulator.serving.step_cost import SurfaceCost

_Latency = Callable[[OperatorTable], object]
_PLAIN = EngineSpec(profile="plain")


def _tables(scenario: ServingScenario, measured: Mapping[str, _Latency]) -> CostTables:
    """Return tables in which only these operators take time, and only they were measured."""
    spec = surface_spec(scenario, 4096)
    form = SurfaceForm(spec, replica_ranks(spec))
    questions = form.questions()
    query = LatencyQuery(device=spec.device, tables=questions.tables)
    reply = LatencyReply(
        model_version="fake", tables=tuple(_answer(table, measured) for table in query.tables)
    )
    return SurfaceCost(form.surfaces(questions.match(reply.tables), "fake")).tables


def _answer(table: OperatorTable, measured: Mapping[str, _Latency]) -> LatencyColumns:
    names = (f"{table.operator}/{table.kernel or table.variant}", table.operator)
    name = names[0] if table.kernel or table.variant else table.operator
    latency = measured.get(name)
    times_us = np.zeros(table.num_rows) + (latency(table) if latency else 0.0)  # type: ignore[operator]
    provenance = Provenance.MEASURED if latency else Provenance.ANALYTICAL
    return LatencyColumns(
        latency_us=times_us,
        low_us=times_us,
        high_us=times_us,
        provenance=np.full(table.num_rows, provenance.value),
    )


def _one_layer(name: str = "llama-3.1-8b", **changes: object) -> ServingScenario:
    model = replace(find_model(name), num_layers=1)
    return ServingScenario(model=model, device="h100_sxm", engine=_PLAIN, **changes)  # type: ignore[arg-type]


def _mixed_us(tables: CostTables, prefills: list[int], num_decodes: int) -> float:
    shape = StepShape(
        sum(prefills) + num_decodes, 1, num_decodes, num_decodes * 100, 100, len(prefills)
    )
    tokens = np.array(prefills, dtype=np.int64)
    return stage_us(tables, 0, shape, tokens, 0 * tokens)


def _queries(table: OperatorTable) -> object:
    return table.columns["q_tokens"]


def _mixed(table: OperatorTable) -> object:
    return table.columns["q_tokens"] + 3.0 * table.columns["num_decode_seqs"]


_KERNELS: dict[str, _Latency] = {
    "attention_prefill": _queries,
    "attention_decode": lambda table: table.columns["num_seqs"],
}


def test_decodes_beside_prefills_cost_what_they_add_to_one_kernel() -> None:
    tables = _tables(_one_layer(), {**_KERNELS, "attention_mixed": _mixed})
    assert _mixed_us(tables, [256], 8) == pytest.approx(256 + 3 * 8)


def test_decodes_beside_prefills_run_alone_where_no_such_kernel_was_measured() -> None:
    assert _mixed_us(_tables(_one_layer(), _KERNELS), [256], 8) == pytest.approx(256 + 8)


def test_prefills_fill_a_device_together() -> None:
    """The one that takes longest alone pays that, others what a batch of them takes each more."""

    def latency(table: OperatorTable) -> object:
        return np.maximum(100.0, table.columns["q_tokens"])

    tables = _tables(_one_layer(), {**_KERNELS, "attention_prefill": latency})
    assert _mixed_us(tables, [8], 0) == pytest.approx(100)
    # Eight of 8 tokens take no longer than one, eight of 512 eight times as long.
    assert _mixed_us(tables, [8, 8, 8], 0) == pytest.approx(100)
    assert _mixed_us(tables, [512, 512, 8], 0) == pytest.approx(2 * 512)


@pytest.mark.parametrize(("is_measured", "expected"), [(True, 50.0), (False, 0.0)])
def test_a_cache_write_counts_only_where_it_was_measured_apart(
    *, is_measured: bool, expected: float
) -> None:
    writes = {"kv_cache_write": lambda _: 50.0} if is_measured else {}
    tables = _tables(_one_layer(), {**_KERNELS, **writes})
    assert tables.tokens_us[0, 0, 1] == expected


@pytest.mark.parametrize(
    ("model", "num_experts", "num_products"), [("qwen3-30b-a3b", 128, 2), ("minimax-m2.5", 256, 3)]
)
def test_tables_of_experts_hold_a_router_but_for_one_in_a_format_of_its_own(
    model: str, num_experts: int, num_products: int
) -> None:
    """Nobody measured the router; the attention has two products."""
    scenario = ServingScenario(
        model=find_model(model), device="h100_sxm", engine=_PLAIN, quantization="none"
    )
    spec = surface_spec(scenario, 4096)
    form = SurfaceForm(spec, replica_ranks(spec))
    questions = form.questions()
    measured = {"gemm": lambda _: 10.0, "moe_experts": lambda _: 100.0}
    answers = [
        replace(answer, provenance=np.full(table.num_rows, Provenance.ANALYTICAL.value))
        if (table.columns.get("n", np.array([0])) == num_experts).all()
        else answer
        for table, answer in ((each, _answer(each, measured)) for each in questions.tables)
    ]
    tables = SurfaceCost(form.surfaces(questions.match(answers), "fake")).tables
    layer_us = 100.0 + 10.0 * num_products
    assert tables.tokens_us[0, 0, 1] == pytest.approx(spec.model.num_layers * layer_us)


@pytest.mark.parametrize(
    ("profile", "kernel"),
    [("vllm-0.19", "vllm_custom"), ("sglang-0.5", "sglang_customallreduce")],
)
def test_engines_sum_small_tensors_by_their_own_kernel(profile: str, kernel: str) -> None:
    kernels: dict[str, _Latency] = {
        "all_reduce": lambda _: 1.0,
        f"all_reduce/{kernel}_graph": lambda _: 100.0,
        f"all_reduce/{kernel}_eager": lambda _: 200.0,
    }
    scenario = _one_layer(layout=ParallelLayout(tp=2))
    changed = EngineSpec(profile=profile, max_num_batched_tokens=2048)
    plain = _tables(scenario, kernels)
    own = _tables(replace(scenario, engine=changed), kernels)
    num_sums = 3  # after the embedding, the attention and the MLP
    assert plain.tokens_us[0, 0, 16] == num_sums * 1.0
    # Inside a graph, and outside.
    assert own.tokens_us[0, 0, 16] == num_sums * 100.0
    # Of 4096 features of two bytes, 1024 tokens are the first that are not below 8 MiB.
    assert own.tokens_us[0, 1, 1008] == num_sums * 200.0
    assert own.tokens_us[0, 1, 1024] == num_sums * 1.0


@pytest.mark.parametrize(("scale_us", "expected"), [(4.0, 4 * 6.0), (9.0, 4 * 10.0 * 4.4 / 11.9)])
def test_a_product_whose_scale_is_known_saves_the_finding(scale_us: float, expected: float) -> None:
    """Of the four products of a layer, at most 7.5 of 11.9 parts."""
    measured = {"gemm": lambda _: 10.0, "quantize/part=scale": lambda _: scale_us}
    tables = _tables(_one_layer(quantization="fp8_static"), measured)
    assert tables.tokens_us[0, 0, 1] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("convert_us", "kv_dtype", "expected"),
    [
        (2.0, DType.FP8, 4 * 6.0 - 2 * 2.0),
        (2.0, None, 4 * 6.0 - 2.0),
        # At most 2.1 of the 4.4 parts that are left.
        (9.0, DType.FP8, 2 * 6.0 + 2 * 6.0 * (1 - 2.1 / 4.4)),
    ],
)
def test_a_product_whose_input_is_converted_before_it_saves_that(
    convert_us: float, kv_dtype: DType | None, expected: float
) -> None:
    """After attention with a cache in FP8, and after the activation."""
    measured = {
        "gemm": lambda _: 10.0,
        "quantize/part=scale": lambda _: 4.0,
        "quantize/part=convert": lambda _: convert_us,
    }
    scenario = _one_layer(quantization="fp8_static", kv_dtype=kv_dtype)
    fuses = EngineSpec(profile="plain", rules={"fuses_static_quantize": "true"})
    tables = _tables(replace(scenario, engine=fuses), measured)
    assert tables.tokens_us[0, 0, 1] == pytest.approx(expected)


def test_a_product_whose_scale_is_known_is_its_own_measurement() -> None:
    measured = {"gemm": lambda _: 10.0, "gemm/quant=fp8_static": lambda _: 7.0}
    tables = _tables(_one_layer(quantization="fp8_static"), measured)
    assert tables.tokens_us[0, 0, 1] == pytest.approx(4 * 7.0)


def test_experts_without_a_gate_are_told_by_those_of_their_own_width() -> None:
    model = find_model("nemotron-3-nano-30b-a3b")
    layers = tuple(layer for layer in model.layers if layer.name == "experts")
    model = replace(model, num_layers=0, layers=layers, pattern="experts")
    scenario = ServingScenario(model=model, device="h100_sxm", engine=_PLAIN)
    experts = {
        "moe_experts/mlp=ungated;routing=balanced": lambda table: table.columns["intermediate"],
        "moe_experts/routing=balanced": lambda _: 1.0,
    }
    assert _tables(scenario, experts).tokens_us[0, 0, 1] == 1856


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b"])
def test_engines_choose_what_mxfp4_weights_are_multiplied_with(model: str) -> None:
    experts = {"moe_experts/quant=w4a8_mxfp4_mxfp8;routing=balanced": lambda _: 30.0}
    assert _tables(_one_layer(model), experts).tokens_us[0, 0, 1] == 30.0


def test_only_formats_of_the_device_are_asked_for() -> None:
    """A query of which one table is in a format that the device lacks is refused as a whole."""
    device, engine = find_device("a100_sxm_80"), EngineSpec(profile="vllm-0.28")
    asked: dict[str, set[DType]] = {}
    for name, model in all_models().items():
        scenario = ServingScenario(model=model, device=device.name, engine=engine)
        with suppress(InvalidRequestError):  # A checkpoint in a format that the engine lacks here.
            spec = surface_spec(scenario, 1024)
            tables = SurfaceForm(spec, replica_ranks(spec)).questions().tables
            asked[name] = {table.dtype for table in tables}
    lacking = {dtype for dtype in DType if device.find_missing_format(dtype)}
    assert DType.FP8 in lacking
    assert "gpt-oss-20b" in asked
    assert {} == {name: found & lacking for name, found in asked.items() if found & lacking}


def test_experts_that_are_drawn_are_told_by_balanced_ones_that_are_as_many() -> None:
    name = "moe_experts/quant=w4a16_mxfp4;routing="
    balanced = {f"{name}balanced": lambda table: table.columns["num_active_experts"]}
    skewed = {**balanced, f"{name}power_law_1.01": lambda _: 1000.0}
    scenario = _one_layer("gpt-oss-120b")
    even = replace(scenario, moe_routing="balanced")
    assert [37, 51] == [_tables(case, balanced).tokens_us[0, 0, 16] for case in (scenario, even)]
    assert 1000.0 == _tables(scenario, skewed).tokens_us[0, 0, 16]


def test_a_ranks_experts_are_told_by_those_of_a_device_that_holds_all() -> None:
    experts = {"moe_experts": lambda table: table.columns["num_tokens"]}
    layout = ParallelLayout(dp=2, ep=2)
    scenario = _one_layer("mixtral-8x7b", layout=layout, moe_routing="balanced")
    # Half of the pairs of 512 tokens and their two experts are a rank's.
    assert _tables(scenario, experts).shared[0, 0, 512] == pytest.approx(256)
    # One of two ranks has some more of those that tokens draw.
    drawn = _tables(replace(scenario, moe_routing=""), experts).shared[0, 0]
    assert [3, 261] == drawn[[4, 512]].tolist()


def test_vllm_also_goes_through_the_pairs_of_other_ranks() -> None:
    experts = {"moe_experts": lambda table: table.columns["num_tokens"]}
    engine = EngineSpec(profile="vllm-0.19", max_num_batched_tokens=2048)
    layout = ParallelLayout(dp=2, ep=2)
    scenario = _one_layer("mixtral-8x7b", layout=layout, moe_routing="balanced")
    scenario = replace(scenario, engine=engine)
    # Zeros for both products, the activation and the sum over experts, of 512 pairs.
    moved = 2 * 512 * (5 * 14336 + 2 * 4096)
    bandwidth = find_device("h100_sxm").memory_bandwidth_bytes_per_s
    expected = 256 + 1e6 * moved / bandwidth
    assert _tables(scenario, experts).shared[0, 0, 512] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("profile", "device", "layout", "expected"),
    [
        ("vllm-0.16", "h200_sxm", ParallelLayout(tp=2), 70.0),
        ("vllm-0.17", "h200_sxm", ParallelLayout(tp=2), 30.0),
        ("vllm-0.16", "b200", ParallelLayout(tp=2), 30.0),
        ("vllm-0.16", "h200_sxm", ParallelLayout(tp=2, ep=2), 50.0),
    ],
)
def test_two_releases_of_vllm_split_experts_in_blocks_of_fp8_in_a_kernel_of_another_engine(
    profile: str, device: str, layout: ParallelLayout, expected: float
) -> None:
    scenario = _one_layer("qwen3-30b-a3b-fp8", layout=layout)
    scenario = replace(scenario, device=device, engine=EngineSpec(profile=profile))
    experts = {
        "moe_experts/moe_torch_flow_cutlass": lambda _: 70.0,
        "moe_experts/quant=fp8_block;routing=balanced": lambda _: 30.0,
        "moe_local_experts/quant=fp8_block;routing=balanced": lambda _: 50.0,
    }
    assert _tables(scenario, experts).tokens_us[0, 0, 1] == expected


_MARLIN_MXFP4 = "vllm_compressedtensorsw4a4mxfp4moe_marlin_marlinexperts_situ_as_silu"
_MARLIN_INT4 = "vllm_compressedtensorswna16marlinmoe_marlin_marlinexperts"


@pytest.mark.parametrize(
    ("provenance", "int4_high_us", "expected_us"),
    [
        # Both are as sure: 100 and 25 us.
        (Provenance.EXTRAPOLATED, 50.0, 50.0),
        # The second's interval is twice as wide in log units: a fifth of the way.
        (Provenance.EXTRAPOLATED, 25.0 * 2.0**3, 100.0 * 0.25**0.2),
        (Provenance.INTERPOLATED, 50.0, 100.0),
    ],
)
def test_marlin_experts_of_a_layer_nobody_timed_are_between_the_formats_of_4_bit(
    provenance: Provenance, int4_high_us: float, expected_us: float
) -> None:
    kernels = {"moe_experts": _MARLIN_MXFP4}
    scenario = _one_layer("gpt-oss-120b", kernels=kernels, quantization="w4a16_mxfp4")
    spec = surface_spec(scenario, 4096)
    form = SurfaceForm(spec, replica_ranks(spec))
    questions = form.questions()

    def answer(table: OperatorTable) -> LatencyColumns:
        is_int4 = table.kernel == _MARLIN_INT4
        if is_int4:
            assert "quant=int4_wo" in table.variant
        us = 25.0 if is_int4 else 100.0
        counts = np.ones(table.num_rows) * (table.kernel in (_MARLIN_MXFP4, _MARLIN_INT4))
        return LatencyColumns(
            latency_us=us * counts,
            low_us=0.5 * us * counts,
            high_us=(int4_high_us if is_int4 else 2.0 * us) * counts,
            provenance=np.full(
                table.num_rows, (provenance if counts.any() else Provenance.ANALYTICAL).value
            ),
        )

    tables = [answer(table) for table in questions.tables]
    surfaces = form.surfaces(questions.match(tables), "fake")
    place = surfaces.groups.index("moe")
    assert surfaces.tokens.values[0, place] == pytest.approx(expected_us)


@pytest.mark.parametrize(
    ("profile", "kernel", "hidden", "intermediate"),
    [
        ("vllm-0.18", "marlin_experts", 3072, 1536),
        ("vllm-0.18", "triton", 2880, 1440),
        ("trtllm-1.0", "marlin_experts", 2880, 1440),
    ],
)
def test_vllm_pads_mxfp4_experts_for_marlin(
    profile: str, kernel: str, hidden: int, intermediate: int
) -> None:
    kernels = {"moe_experts": kernel}
    scenario = _one_layer("gpt-oss-120b", layout=ParallelLayout(tp=2), kernels=kernels)
    measured = {
        f"moe_experts/{kernel}": lambda table: (
            table.columns["hidden"] + table.columns["intermediate"] / 10_000
        )
    }
    tables = _tables(replace(scenario, engine=EngineSpec(profile=profile)), measured)
    assert hidden + intermediate / 10_000 == pytest.approx(tables.tokens_us[0, 0, 1], rel=1e-9)


@pytest.mark.parametrize("layout", [ParallelLayout(tp=2), ParallelLayout(tp=2, ep=2)])
def test_only_what_the_scenario_names_must_have_been_measured(layout: ParallelLayout) -> None:
    """Substitutes are tried: that nobody measured them is no reason to refuse the scenario."""
    named = {"moe_experts": "marlin", "moe_local_experts": "marlin"}
    scenario = _one_layer("qwen3-30b-a3b", layout=layout, kernels=named)
    spec = surface_spec(replace(scenario, engine=EngineSpec()), 4096)
    assert "vllm 0.28-0.31" == spec.software
    tables = SurfaceForm(spec, replica_ranks(spec)).questions().tables
    plain = {(t.operator, t.kernel) for t in tables if t.kernel and not t.tentative}
    [(operator, kernel)] = plain
    assert kernel == named[operator]
    lanes = {t.kernel or t.variant for t in tables if t.tentative and t.operator == "all_reduce"}
    assert {"lane=graph", "lane=eager", "vllm_custom_graph", "vllm_custom_eager"} == lanes


def test_a_search_prefers_the_same_software_as_a_simulation() -> None:
    scenario = replace(_one_layer(), engine=EngineSpec(profile="sglang-0.5"))
    load = LoadProfile(
        prefill_mean=100.0,
        decode_mean=10.0,
        prefill_second_ratio=1.0,
        context_mean=105.0,
        raggedness=(1.0,),
        longest=110,
        is_even=True,
    )
    spec = surface_spec(scenario, 4096)
    preferred = []

    class Predictor:
        def predict(self, query: LatencyQuery) -> LatencyReply:
            preferred.append(query.preferred_framework)
            answers = tuple(_answer(table, {}) for table in query.tables)
            return LatencyReply(model_version="fake", tables=answers)

        def list_models(self) -> Sequence[ModelVersion]:
            return ()

    fetch_grids([(spec, grid_axes(spec, load, (1, 2)))], Predictor())
    assert {"sglang 0.5"} == set(preferred)
