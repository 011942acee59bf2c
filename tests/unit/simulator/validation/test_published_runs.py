"""Runs that others published: read, simulated as closed loops, scored by model, engine, device."""

from dataclasses import replace

import pytest

from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.results.report import Feasibility, Percentiles, ServingReport
from foretoken.simulator.validation.published_comparison import (
    compare_published,
    draw_runs,
    scenario_of_published,
    score_published,
)
from foretoken.simulator.validation.published_run import AskedRun, find_nearest, read_published

_COLUMNS = (
    "id,backend,backend_version,model_path,system,mode,isl,osl,gemm_quant_mode,moe_quant_mode,"
    "batch_size,tp_size,pp_size,attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,"
    "silicon_tpot_ms"
)
_ROWS = (
    "a_c64_,vllm,0.19.0,meta-llama/Llama-3.1-8B,h200_sxm,agg,4000,1000,fp8,fp8,64,2,1,,1,1,200,20",
    "b,trtllm,1.0.0rc6,openai/gpt-oss-120b,h200_sxm,agg,1024,1024,x,w4a16_mxfp4,8,1,1,,1,1,90,5",
    "c_c8_,sglang,0.5.9,deepseek-ai/DeepSeek-V3,h200_sxm,agg,1024,1024,fp8,fp8,1,8,1,8,1,8,9,9",
    "d,vllm,0.19.0,meta-llama/Llama-3.1-8B,h200_sxm,disagg,4000,1000,fp8,fp8,64,2,1,,1,1,200,20",
)
_RUNS = read_published("\n".join([_COLUMNS, *_ROWS]).encode())


def test_rows_are_read_with_their_layouts() -> None:
    """Attention replicas share the ranks of the experts; disaggregated rows are left out."""
    assert ["a_c64_", "b", "c_c8_"] == [run.name for run in _RUNS]
    assert [(2, 1, 1), (1, 1, 1), (1, 8, 8)] == [(run.tp, run.dp, run.ep) for run in _RUNS]
    assert [64, 8, 8] == [run.concurrency for run in _RUNS]
    assert [2, 1, 8] == [run.num_devices for run in _RUNS]
    assert ("llama-3.1-8b", "gpt-oss-120b") == (_RUNS[0].model, _RUNS[1].model)


def test_requests_of_many_replicas_are_counted_for_one() -> None:
    """416 at a time on all, of which a batch of 13 ran on each; 26 with two ranks of attention."""
    row = _ROWS[0].replace("a_c64_", "a_c416_").replace("fp8,fp8,64", "fp8,fp8,13")
    two = row.replace("13,2,1,,1,1,200", "13,2,1,2,1,1,201")
    one_of_many, of_two_ranks = read_published(f"{_COLUMNS}\n{row}\n{two}".encode())
    assert (13, 1) == (one_of_many.concurrency, one_of_many.dp)
    assert 2 * 13 == of_two_ranks.concurrency


def test_a_batch_is_of_the_ranks_that_a_row_names() -> None:
    """An export has 64 ranks of attention where eight were, and their requests one by one."""
    row = "e_c64_,trtllm,1.1.0,gpt,b200_sxm,agg,1024,1024,fp8,fp8,1,1,1,64,8,8,102,15"
    (run,) = read_published(f"{_COLUMNS}\n{row}".encode())
    assert (1, 8, 8, 64) == (run.tp, run.dp, run.ep, run.concurrency)


def test_ranks_of_experts_are_no_replicas_of_attention_under_vllm() -> None:
    """Four GPUs that hold experts apart, which exports have as sixteen; two engines of two stay."""
    row = "f_c8_,vllm,0.18.0,m,h100_sxm,agg,1024,1024,fp8,fp8,2,4,1,4,1,16,94,12"
    (run,) = read_published(f"{_COLUMNS}\n{row}".encode())
    assert (4, 1, 4, 8, 4) == (run.tp, run.dp, run.ep, run.concurrency, run.num_devices)
    (other,) = read_published(f"{_COLUMNS}\n{row.replace('1,16,94', '1,4,94')}".encode())
    assert (1, 4, 4) == (other.tp, other.dp, other.ep)


def test_ranks_may_split_experts_both_ways() -> None:
    """Eight GPUs by two and four, but where an export has all eight twice, and 64 altogether."""
    row = "g_c96_,trtllm,1.3.0rc1,m,b200_sxm,agg,4000,1000,nvfp4,nvfp4,12,8,1,,2,4,531,89"
    (run,) = read_published(f"{_COLUMNS}\n{row}".encode())
    assert (8, 1, 4, 8) == (run.tp, run.dp, run.ep, run.num_devices)
    header, source = f"{_COLUMNS},silicon_data_source", "source_file=2026-04-06.csv"
    exported = row.replace("12,8,1,,2,4", "12,64,1,,8,8")
    (run,) = read_published(f"{header}\n{exported},{source}".encode())
    assert (8, 1, 8) == (run.tp, run.dp, run.ep)


def test_runs_that_may_have_drafted_tokens_are_left_out() -> None:
    """An export without drafts tells which of another's figures were measured without them."""
    row = "g_c4_,trtllm,1.1.0,deepseek-ai/DeepSeek-R1,h200_sxm,agg,1024,1024,fp8,fp8,4,8,1,1,1,8"
    rows = [
        f"{row},313.2779273,13.820446,db-dump/2026-04-27",
        f"{row},313.278,13.82,source_file=2026-04-06.csv",
        f"{row},493.98,8.58,source_file=2026-04-06.csv",
        f"{row.replace('trtllm', 'sglang')},259.1,10.3,source_file=2026-04-06.csv",
    ]
    runs = read_published("\n".join([f"{_COLUMNS},silicon_data_source", *rows]).encode())
    assert [("trtllm", 13.820446), ("sglang", 10.3)] == [(run.engine, run.tpot_ms) for run in runs]


def test_throughput_is_that_of_a_full_loop() -> None:
    """64 requests at a time, each 200 + 999 x 20 ms, on two GPUs."""
    assert 64 * 1000 / (0.2 + 999 * 0.02) / 2 == pytest.approx(_RUNS[0].output_tps_per_gpu)


@pytest.mark.parametrize(
    ("model", "formats", "preset", "quantization"),
    [
        # Blocks that a row calls by their width, and experts alone.
        ("minimax-m2.5", ("fp8", "fp8"), "minimax-m2.5", "fp8_block"),
        ("kimi-k2.5-int4", ("int4_wo", "int4_wo"), "kimi-k2.5-int4", "experts=int4_wo_g32"),
        ("gpt-oss-120b", ("nvfp4", "nvfp4"), "gpt-oss-120b", "mxfp4"),
        # Checkpoints in other formats that have presets.
        ("kimi-k2.5-int4", ("nvfp4", "nvfp4"), "kimi-k2.5-nvfp4", "nvfp4"),
        ("minimax-m2.5", ("nvfp4", "nvfp4"), "minimax-m2.5-nvfp4", "experts=nvfp4"),
        ("glm-5", ("fp8", "fp8_block"), "glm-5-fp8", "fp8_block"),
        # Those that have none, and models stored in 16 bits.
        ("deepseek-v3", ("nvfp4", "nvfp4"), "deepseek-v3", "nvfp4"),
        ("qwen3-32b", ("fp8", "fp8"), "qwen3-32b", "fp8"),
        ("llama-3.1-70b", ("", ""), "llama-3.1-70b", ""),
    ],
)
def test_servers_run_checkpoints_as_they_are_stored(
    model: str, formats: tuple[str, str], preset: str, quantization: str
) -> None:
    scenario = scenario_of_published(replace(_RUNS[0], model=model, formats=formats))
    assert (find_model(preset), quantization) == (scenario.model, scenario.quantization)


@pytest.mark.parametrize(
    ("source", "shortest"),
    [
        ("source_file=2026-04-06.csv; silicon_concurrency=64", (3200, 800)),
        ("db-dump/2026-03-25", (3200, 800)),
        ("source_file=kimi-k2.5-gap-analysis.csv; model=Kimi-K2.5", (3200, 800)),
        ("source_file=/data/gap-analysis.csv", (4000, 1000)),
    ],
)
def test_lengths_are_drawn_where_the_client_of_a_run_drew_them(
    source: str, shortest: tuple[int, int]
) -> None:
    table = f"{_COLUMNS},silicon_data_source\n{_ROWS[0]},{source}"
    (run,) = read_published(table.encode())
    workload = scenario_of_published(run).workload
    assert shortest == (workload.prefill.minimum, workload.decode.minimum)
    assert (4000, 1000) == (workload.prefill.maximum, workload.decode.maximum)


def test_the_nearest_run_is_alike_in_lengths_first() -> None:
    asked = AskedRun(
        model="llama-3.1-8b", device="h200_sxm", input_tokens=4000, output_tokens=1000, tp=8
    )
    longer = replace(_RUNS[0], name="longer", input_tokens=8000, tp=8)
    assert _RUNS[0] is find_nearest([longer, _RUNS[0]], asked)
    assert find_nearest(_RUNS, replace(asked, input_tokens=100.0)) is None
    assert find_nearest(_RUNS, replace(asked, device="b200")) is None


def test_a_run_of_the_model_in_another_format_is_alike() -> None:
    """The checkpoint that is asked for comes first where both were measured alike."""
    asked = AskedRun(
        model="llama-3.1-8b-fp8", device="h200_sxm", input_tokens=4000, output_tokens=1000
    )
    assert _RUNS[0] is find_nearest(_RUNS, asked)
    own = replace(_RUNS[0], model="llama-3.1-8b-fp8")
    assert own is find_nearest([_RUNS[0], own], asked)


def test_a_run_without_a_version_is_of_the_release_of_its_day() -> None:
    """Its day is what the export says; where it says none, the engine's name has to do."""
    run = replace(_RUNS[0], version="", day="2025-10-29")
    assert scenario_of_published(run).engine.profile == "vllm-0.11"
    nightly = replace(_RUNS[0], version="nightly-5b8c30d62b754b57", day="2026-04-06")
    assert scenario_of_published(nightly).engine.profile == "vllm-0.19"


def test_a_run_is_simulated_as_it_was_launched() -> None:
    scenario = scenario_of_published(_RUNS[0])
    assert ("llama-3.1-8b-fp8", "fp8_static", "vllm-0.19.0", 2) == (
        scenario.model.name,
        scenario.quantization,
        scenario.engine.profile,
        scenario.layout.tp,
    )
    assert ("closed_loop", "64") == (
        scenario.workload.arrival,
        scenario.workload.arrival_options["concurrency"],
    )


def test_scores_are_means_by_model_engine_and_device() -> None:
    """What cannot be simulated is counted, with the reason; equal settings are simulated once."""
    asked: list[ServingScenario] = []

    def simulate(scenario: ServingScenario) -> ServingReport:
        asked.append(scenario)
        if scenario.model.name == "gpt-oss-120b":
            return ServingReport(feasibility=Feasibility(is_feasible=False, reason="too large"))
        times = {"ttft_ms": Percentiles(mean=220.0), "tpot_ms": Percentiles(mean=18.0)}
        return ServingReport(feasibility=Feasibility(is_feasible=True), **times)

    again = replace(_RUNS[0], name="again", tpot_ms=15.0)
    scores = score_published(compare_published([_RUNS[0], again, _RUNS[1]], simulate))
    assert 2 == len(asked)
    refused, llama = scores
    assert ("gpt-oss-120b", 0, 1, "too large") == (
        refused.model,
        refused.num_runs,
        refused.num_left_out,
        refused.reason,
    )
    assert (0.15, 0.05) == pytest.approx((llama.tpot_mape_ratio, llama.tpot_bias_ratio))
    assert 0.1 == pytest.approx(llama.ttft_mape_ratio)


def test_few_runs_are_drawn_evenly_from_every_group() -> None:
    many = [replace(_RUNS[0], name=str(number)) for number in range(10)]
    drawn = draw_runs([*many, _RUNS[1]], 2)
    assert ["0", "5", "b"] == [run.name for run in drawn]
