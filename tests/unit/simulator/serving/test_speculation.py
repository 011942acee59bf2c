"""Speculative decoding: what a verification yields, costs and needs, computed by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from serving_fakes import RooflinePredictor, build_scenario, plain_engine, simulate

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineProfile, EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.cluster import ClusterSpec, ReplicaPool, SpeculativeSpec
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.slo import Slo
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.feasibility import judge_feasibility, plan_memories
from foretoken.simulator.serving.metrics import count_token_gaps, place_runs
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.scenario_check import check_scenario
from foretoken.simulator.serving.service_level import find_attaining
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import prepare_deployment, run_deployment
from foretoken.simulator.serving.speculation import Speculation, draw_yields
from foretoken.simulator.workload.request_plan import plan_requests

# A target of 1000 µs a step and 10 µs a token, a draft of 100 µs and 1 µs.
_TARGET, _DRAFT = flat_tables(1000.0, 10.0), flat_tables(100.0, 1.0)
_NGRAM = SpeculativeSpec(method="ngram", num_draft_tokens=3, acceptance_ratio=0.7)
_LAYERS = replace(_NGRAM, method="layers")
_MODEL = replace(_NGRAM, method="draft_model", draft_model=find_model("qwen2-0.5b"))
_SCHEDULERS = ("chunked_prefill", "sglang", "trtllm")
_WORKLOAD = WorkloadSpec(
    num_requests=20,
    rate_rps=4.0,
    prefill=LengthSpec(kind="uniform", minimum=32, maximum=256),
    decode=LengthSpec(kind="uniform", minimum=8, maximum=64),
)


def _run(
    speculation: Speculation | None, prompt: int, answer: int, **changes: Any
) -> ServingRecord:
    """Return what one request does on an engine without a host."""
    rules = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **changes}
    profile = EngineProfile(name="drawn", engine="drawn", **rules)
    setup = DeploymentSetup(profile=profile, num_kv_blocks=100, speculation=speculation)
    one = np.ones(1, dtype=np.int64)
    return run_deployment(
        plan_requests(0 * one, prompt * one, answer * one), setup, _TARGET, lambda _: None
    )


def _scenario(**changes: Any) -> ServingScenario:
    return build_scenario(
        **{"engine": plain_engine(max_num_seqs=16), "workload": _WORKLOAD, **changes}
    )


@pytest.mark.parametrize("scheduler", _SCHEDULERS)
def test_where_no_draft_is_accepted_a_step_yields_one_token(scheduler: str) -> None:
    """It still computes and samples from all four."""
    speculation = Speculation(acceptance_ratios=(0.0,) * 3)
    (steps,) = _run(speculation, 30, 6, scheduler=scheduler).steps
    assert steps.num_output_tokens is not None
    assert steps.num_output_tokens.tolist() == [1] * 6
    assert steps.num_tokens.tolist() == [30, 4, 4, 4, 4, 4]
    assert steps.num_rows.tolist() == [1, 4, 4, 4, 4, 4]
    assert steps.decode_kv_tokens.tolist() == [0, 34, 35, 36, 37, 38]


@pytest.mark.parametrize("scheduler", _SCHEDULERS)
@pytest.mark.parametrize("is_async", [False, True])
def test_where_all_drafts_are_accepted_a_step_yields_one_more(
    scheduler: str, *, is_async: bool
) -> None:
    """After the first token, from the prompt, come 4, 4 and what is left of the answer: 2."""
    speculation = Speculation(acceptance_ratios=(1.0,) * 3)
    record = _run(speculation, 30, 11, scheduler=scheduler, has_async_scheduling=is_async)
    (steps,) = record.steps
    assert steps.num_output_tokens is not None
    assert steps.num_output_tokens.tolist() == [1, 4, 4, 2]
    assert steps.decode_kv_tokens.tolist() == [0, 34, 38, 42]
    assert record.tokens.stride.tolist() == [1, 0, 0, 0]
    assert record.tokens.count.tolist() == [1, 4, 4, 2]


def test_a_budget_too_small_for_all_drafts_verifies_fewer() -> None:
    speculation = Speculation(acceptance_ratios=(1.0,) * 7)
    (steps,) = _run(speculation, 4, 11, max_num_batched_tokens=4).steps
    assert steps.num_tokens.tolist() == [4, 4, 4, 4]
    assert steps.num_output_tokens is not None
    assert steps.num_output_tokens.tolist() == [1, 4, 4, 2]


def test_a_draft_adds_as_many_passes_as_it_proposes_tokens() -> None:
    """The first over all tokens of the step, prompts too; each other over one of every sequence.

    Prompt: 1000 + 30 * 10, and 100 + 30, 100 + 1, 100 + 1. Verification: 1000 + 4 * 10, and
    100 + 4, 100 + 1, 100 + 1.
    """
    speculation = Speculation(acceptance_ratios=(1.0,) * 3, draft=_DRAFT)
    (steps,) = _run(speculation, 30, 5).steps
    assert steps.end_ns.tolist() == [1_632_000, 1_632_000 + 1_346_000]


def test_proposals_from_the_text_take_no_time() -> None:
    """1000 + 30 * 10, then 1000 + 4 * 10."""
    speculation = Speculation(acceptance_ratios=(1.0,) * 3)
    (steps,) = _run(speculation, 30, 5).steps
    assert steps.end_ns.tolist() == [1_300_000, 2_340_000]


def test_a_request_holds_slots_for_what_is_verified_and_what_will_be() -> None:
    """In blocks of one token: 30 of the prompt; then 30, and 1 + 3 verified, and 3 proposed."""
    speculation = Speculation(acceptance_ratios=(0.0,) * 3, num_lookahead_tokens=3)
    (steps,) = _run(speculation, 30, 4, block_size=1).steps
    assert steps.num_used_blocks.tolist() == [30, 37, 38, 39]


def test_tokens_that_leave_together_have_gaps_of_nothing() -> None:
    """One gap of a step before the four, three of 0 among them, for the mean of one token."""
    speculation = Speculation(acceptance_ratios=(1.0,) * 3)
    record = _run(speculation, 30, 9)
    runs = place_runs(record)
    gaps_ns, counts = count_token_gaps(runs)
    assert sorted(np.repeat(gaps_ns, counts).tolist()) == [0] * 6 + [1_040_000] * 2
    # Three in four gaps are 0, so a limit below a step holds for P70 and not for P99.
    attains = [
        find_attaining(record.requests, runs, [Slo(itl_ms=0.5, itl_percentile=percentile)])[0]
        for percentile in (70.0, 99.0)
    ]
    assert attains == [True, False]


@pytest.mark.parametrize("spec", [_NGRAM, _LAYERS, _MODEL])
def test_busy_time_is_that_of_the_steps_with_their_drafts(spec: SpeculativeSpec) -> None:
    """What the report accounts for, group by group, is what the clock of the run saw."""
    scenario = _scenario(speculative=spec, device="a100_sxm_80")
    source = RooflinePredictor()
    deployment = prepare_deployment(scenario, lambda s: fetch_surfaces(s, source), 400)
    assert deployment.setup is not None
    (cost,) = deployment.costs
    plan = plan_requests(np.zeros(5, dtype=int), np.full(5, 100), np.full(5, 40))
    record = deployment.run(plan, lambda _: None)
    (steps,) = record.steps
    account = cost.account(steps)
    clock_s = float((steps.end_ns - steps.start_ns).sum()) / 1e9
    assert pytest.approx(clock_s, rel=1e-6) == account.busy_s
    assert pytest.approx(account.busy_s) == sum(account.time_s_by_provenance.values())
    assert pytest.approx(0.8 * account.busy_s) == account.low_s
    assert pytest.approx(account.busy_s) == account.stage_busy_s[0]
    assert (spec.method != "ngram") == ("draft" in account.time_s_by_group)
    in_steps_us = sum(cost.breakdown(steps).values())
    assert pytest.approx((steps.end_ns - steps.start_ns) / 1e3, abs=0.002) == in_steps_us


def test_engines_in_lock_step_draft_together() -> None:
    """Drafts share experts as the model does, so a step ends when the slower engine has its own.

    What both take together is in the account of each.
    """
    scenario = _scenario(
        model=find_model("mixtral-8x7b"),
        device="h100_sxm",
        layout=ParallelLayout(tp=2, dp=2, ep=4),
        speculative=_LAYERS,
    )
    source = RooflinePredictor()
    deployment = prepare_deployment(scenario, lambda s: fetch_surfaces(s, source), 400)
    (cost,) = deployment.costs
    plan = plan_requests(np.zeros(3, dtype=int), np.array([100, 50, 20]), np.full(3, 40))
    engines = deployment.run(plan, lambda _: None).steps
    times_us = [sum(cost.breakdown(steps).values()) for steps in engines]
    for steps in engines:
        clock_us = (steps.end_ns - steps.start_ns) / 1e3
        assert pytest.approx(clock_us, abs=0.002) == np.maximum(*times_us)


def test_the_report_counts_tokens_by_decode_and_by_second() -> None:
    """Prompts' own tokens are not those of decoding sequences; all leave some second."""
    plain, drafted = simulate(_scenario()), simulate(_scenario(speculative=_NGRAM))
    assert plain.tokens_per_decode_mean == 1.0
    # (1 - 0.7^4) / (1 - 0.7), less what the ends of answers cut off.
    assert 2.2 < drafted.tokens_per_decode_mean < 2.533
    assert drafted.series is not None
    assert sum(drafted.series.num_output_tokens) == sum(plain.series.num_output_tokens)
    assert drafted.tpot_ms.mean < plain.tpot_ms.mean


def test_a_draft_takes_memory_that_the_cache_would_have() -> None:
    """Qwen2 0.5B and its rotations in 16 bits; keys and values of 24 layers of 2 heads of 64."""
    scenario = _scenario(speculative=_MODEL)
    engine = scenario.engine.resolve()
    (own,) = plan_memories(replace(scenario, speculative=None), engine)
    (both,) = plan_memories(scenario, engine)
    assert both.draft_kv_bytes_per_token == 24 * 2 * 2 * 64 * 2
    assert both.kv_bytes_per_token == own.kv_bytes_per_token + both.draft_kv_bytes_per_token
    assert both.weights_bytes == own.weights_bytes + both.draft_bytes
    assert both.draft_bytes == pytest.approx(2 * (0.494e9 + 131072 * 64), rel=0.002)


def test_layers_of_the_model_bring_no_head_of_their_own() -> None:
    """One layer of Qwen2 7B: attention of 28 + 2 * 4 heads of 128 and its output, and the MLP.

    In addition the rotation of every position.
    """
    scenario = _scenario(speculative=_LAYERS)
    (memory,) = plan_memories(scenario, scenario.engine.resolve())
    hidden, width, mlp = 3584, (28 + 2 * 4) * 128, 18944
    num_weights = hidden * width + hidden * 28 * 128 + 3 * hidden * mlp
    assert memory.draft_bytes == pytest.approx(2 * (num_weights + 131072 * 128), rel=0.001)


def test_a_draft_that_does_not_fit_is_named() -> None:
    spec = replace(_MODEL, draft_model=find_model("qwen2-7b"))
    scenario = _scenario(speculative=spec)
    _, reason = judge_feasibility(scenario, scenario.engine.resolve())
    assert "draft 14." in reason
    sharing = _scenario(device="a100_sxm_80", layout=ParallelLayout(tp=4), speculative=_MODEL)
    _, reason = judge_feasibility(sharing, sharing.engine.resolve())
    assert reason.startswith("the draft: ")


def test_answers_are_speculated_on_decode_replicas_only() -> None:
    """Prefill replicas run the draft over prompts, whose cache moves with the model's."""
    pools = (ReplicaPool(name="p", role="prefill"), ReplicaPool(name="d", role="decode"))
    scenario = _scenario(speculative=_MODEL, device="a100_sxm_80", cluster=ClusterSpec(pools=pools))
    report = simulate(scenario)
    assert report.num_completed == _WORKLOAD.num_requests
    assert 2.0 < report.tokens_per_decode_mean < 2.533
    assert "draft" in report.step_time_s_by_group


def test_each_place_has_an_acceptance_of_its_own() -> None:
    """As vLLM logs it: of all steps 80 % keep the first draft, 60 % the second, 15 % the third."""
    spec = replace(_NGRAM, acceptance_by_position=(0.8, 0.6, 0.15))
    assert pytest.approx((0.8, 0.75, 0.25)) == spec.conditional_ratios
    drawn = draw_yields(np.full(400, 500), Speculation(acceptance_ratios=spec.conditional_ratios))
    shares = [np.mean(drawn > place) for place in (1, 2, 3)]
    assert pytest.approx([0.8, 0.6, 0.15], abs=0.01) == shares


def test_one_ratio_for_all_places_is_that_of_each() -> None:
    spec = replace(_NGRAM, acceptance_by_position=(0.5, 0.25, 0.125))
    assert replace(_NGRAM, acceptance_ratio=0.5).conditional_ratios == spec.conditional_ratios


@pytest.mark.parametrize("ratios", [(0.5, 0.6, 0.1), (0.5, 0.4), (1.1, 0.5, 0.1)])
def test_places_that_cannot_be_are_refused(ratios: tuple[float, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="a ratio for each draft token"):
        replace(_NGRAM, acceptance_by_position=ratios)


def test_an_engine_that_never_evicts_speculates() -> None:
    """TensorRT-LLM has the blocks of all drafts of an answer before its request starts."""
    engine = EngineSpec(profile="trtllm-1.0", max_num_seqs=16)
    report = simulate(_scenario(speculative=_LAYERS, engine=engine, device="a100_sxm_80"))
    assert report.num_completed == _WORKLOAD.num_requests
    assert 2.0 < report.tokens_per_decode_mean < 2.533


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": EngineSpec(profile="sarathi")}, "take vllm-0.28, sglang-0.5"),
        ({"layout": ParallelLayout(pp=2)}, "the method ngram works on several stages"),
        ({"engine": plain_engine(max_num_batched_tokens=3)}, "must be below"),
    ],
)
def test_what_is_not_simulated_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        check_scenario(_scenario(speculative=_LAYERS, **changes))


def test_proposals_from_the_text_wait_for_the_tokens() -> None:
    """Nothing is scheduled while a step runs: steps do not follow each other without a host gap."""
    engine = EngineSpec(profile="plain", rules={"has_async_scheduling": "true", "host_us": "50"})
    gaps_us = []
    for spec in (_NGRAM, _LAYERS):
        scenario = _scenario(speculative=spec, engine=engine)
        source = RooflinePredictor()
        deployment = prepare_deployment(scenario, lambda s: fetch_surfaces(s, source), 400)  # noqa: B023
        one = np.ones(1, dtype=np.int64)
        (steps,) = deployment.run(plan_requests(0 * one, 50 * one, 40 * one), lambda _: None).steps
        gaps_us.append(set(((steps.start_ns[1:] - steps.end_ns[:-1]) // 1000).tolist()))
    assert gaps_us == [{50}, {0}]
