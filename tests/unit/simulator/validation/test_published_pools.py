"""Published runs with prompts and answers on pools of their own: read, and as scenarios."""

from dataclasses import replace
from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.validation.published_launch import disaggregated_launches
from foretoken.simulator.validation.published_pools import (
    CLIENT_SEED,
    RESUME_S,
    PooledRun,
    read_pooled,
    scenario_of_pooled,
)

_COLUMNS = (
    "id,backend,model_path,precision,system,mode,isl,osl,prefill_num_workers,decode_batch_size,"
    "decode_num_workers,decode_tp_size,decode_attention_dp_size,decode_moe_ep_size,"
    "silicon_ttft_ms,silicon_tpot_ms"
)
_ROWS = (
    "a_c36_x,trtllm,deepseek-ai/DeepSeek-V3,fp8,h200_sxm,disagg,1024,1024,1,4,9,8,1,8,673,13.4",
    "b_c128_x,trtllm,deepseek-ai/DeepSeek-V3,fp8,h200_sxm,disagg,8192,1024,1,16,1,1,8,8,7691,36.3",
    "c_c96_x,trtllm,deepseek-ai/DeepSeek-V3,fp8,b200_sxm,disagg,8192,1024,1,16,6,8,1,1,2538,12.7",
    "d,trtllm,deepseek-ai/DeepSeek-V3,fp8,h200_sxm,disagg,8192,1024,,3,,1,8,1,9,9",
    "e_c8_x,trtllm,deepseek-ai/DeepSeek-V3,fp8,h200_sxm,agg,1024,1024,,,,,,,9,9",
)
_RUNS = read_pooled("\n".join([_COLUMNS, *_ROWS]).encode())
_SHORT, _LONG, _B200 = _RUNS[:3]


def test_disaggregated_rows_are_read_with_their_pools() -> None:
    """Where attention is replicated and no rank is said of experts, all split every expert."""
    assert ["a_c36_x", "b_c128_x", "c_c96_x", "d"] == [run.name for run in _RUNS]
    assert [(1, 9), (1, 1), (1, 6), (1, 1)] == [(run.num_prefill, run.num_decode) for run in _RUNS]
    assert [36, 128, 96, 3] == [run.concurrency for run in _RUNS]
    assert [
        ParallelLayout(tp=8, ep=8),
        ParallelLayout(dp=8, ep=8),
        ParallelLayout(tp=8),
        ParallelLayout(dp=8, attention_dp=True),
    ] == [run.decode for run in _RUNS]


@pytest.mark.parametrize(
    ("run", "layout", "num_prompts", "step_tokens", "num_answers"),
    [
        (_SHORT, ParallelLayout(dp=8, ep=8), 8, 8192, 36),
        (_LONG, ParallelLayout(tp=8, ep=8), 2, 16640, 128),
        (replace(_LONG, concurrency=768), ParallelLayout(tp=8, ep=8), 2, 16640, 512),
        (_B200, ParallelLayout(dp=8, attention_dp=True), 1, 8320, 16),
    ],
)
def test_pools_are_started_as_their_recipe_says(
    run: PooledRun,
    layout: ParallelLayout,
    num_prompts: int,
    step_tokens: int,
    num_answers: int,
) -> None:
    """Prompts without graphs and one step after the other; of answers as many as are sent."""
    cluster = scenario_of_pooled(run).cluster
    assert cluster is not None
    prompts, answers = cluster.pools
    assert prompts.engine is not None
    assert answers.engine is not None
    assert (layout, run.decode) == (prompts.layout, answers.layout)
    assert (num_prompts, step_tokens) == (
        prompts.engine.max_num_seqs,
        prompts.engine.max_num_batched_tokens,
    )
    assert num_answers == answers.engine.max_num_seqs
    assert ("none", None) == tuple(
        pool.engine.rules.get("graph_mode") for pool in cluster.pools if pool.engine
    )
    assert (run.num_prefill, run.num_decode) == (prompts.num_replicas, answers.num_replicas)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "sglang"},
        {"precision": "fp4"},
        {"device": "gb300"},
        {"input_tokens": 4000},
        {"model": "qwen3-32b"},
    ],
)
def test_a_run_without_a_recipe_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="no recipe"):
        scenario_of_pooled(replace(_SHORT, **changes))


def test_experts_run_in_the_kernel_that_the_recipe_names() -> None:
    assert {} == scenario_of_pooled(_LONG).kernels
    assert "trtllm" in scenario_of_pooled(_B200).kernels["moe_experts"]
    assert ("trtllm 1.3.0rc20", "") == tuple(
        scenario_of_pooled(run).framework for run in (_LONG, _B200)
    )


def test_a_recipe_of_one_load_is_not_that_of_another() -> None:
    """Of H100 and B200 a server was started for each number of requests and replicas."""
    assert _B200.find_launch() is not None
    assert replace(_B200, concurrency=32).find_launch() is None
    assert replace(_B200, num_decode=4).find_launch() is None


def test_a_recipe_may_be_of_one_layout_for_answers_alone() -> None:
    run = replace(_SHORT, model="gpt-oss-120b", precision="fp4", device="gb200", concurrency=16)
    assert replace(run, decode=ParallelLayout(tp=4)).find_launch() is not None
    assert replace(run, decode=ParallelLayout(tp=2)).find_launch() is None


def test_the_client_warms_up_with_the_first_prompts_of_those_that_count() -> None:
    workload = scenario_of_pooled(_SHORT).workload
    sent = [request.num_prefill_tokens for request in workload.trace_requests]
    assert 12 * 36 == len(sent)
    assert sent[:72] == sent[72:144]
    assert {"concurrency": "36", "num_warmup": "72", "resume_s": str(RESUME_S)}.items() <= dict(
        workload.arrival_options
    ).items()


def test_another_seed_draws_other_lengths_of_the_same_range() -> None:
    own, other = (
        scenario_of_pooled(_SHORT, seed).workload.trace_requests for seed in (CLIENT_SEED, 1)
    )
    assert own != other
    lengths = [request.num_prefill_tokens for request in (*own, *other)]
    assert 819 <= min(lengths) < max(lengths) <= 1024


def test_every_launch_is_found_by_a_run_that_it_names() -> None:
    """None is hidden by one before it."""
    for launch in disaggregated_launches():
        run = replace(
            _SHORT,
            model=launch.model,
            precision=launch.precision,
            device=launch.device,
            input_tokens=launch.input_tokens,
            concurrency=next(iter(launch.concurrencies), 1),
            num_decode=launch.num_decode or 1,
            decode=launch.decode.layout or _SHORT.decode,
        )
        assert launch is run.find_launch()
