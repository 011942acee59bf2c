"""What holds for speculative decoding, whatever is drawn and however tight the cache is."""

from dataclasses import replace

import numpy as np
import pytest
from cluster_strategies import ClusterCase, cluster_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_strategies import Case, cases, speculations

from foretoken.simulator.cluster.engine_pool import PoolRole
from foretoken.simulator.serving.record import RequestOutcome, ServingRecord, StepRecord
from foretoken.simulator.serving.speculation import Speculation, draw_yields

_SCHEDULERS = ("chunked_prefill", "sglang")
_SETTINGS = settings(suppress_health_check=[HealthCheck.too_slow])


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    case = draw(cases(draw(st.sampled_from(_SCHEDULERS))))
    return replace(case, setup=replace(case.setup, speculation=draw(speculations())))


@st.composite
def _clusters(draw: st.DrawFn) -> ClusterCase:
    """Draw a cluster all of whose pools speculate alike, one scheduler in each."""
    case, speculation = draw(cluster_cases()), draw(speculations())
    pools = []
    for pool in case.setup.pools:
        scheduler = draw(st.sampled_from(_SCHEDULERS))
        profile = replace(pool.engines.profile, scheduler=scheduler)
        engines = replace(pool.engines, profile=profile, speculation=speculation)
        pools.append(replace(pool, engines=engines))
    return replace(case, setup=replace(case.setup, pools=tuple(pools)))


def _run(case: Case) -> ServingRecord:
    return case.run()


def _count_left(steps: StepRecord) -> int:
    assert steps.num_output_tokens is not None
    return int(steps.num_output_tokens.sum())


@_SETTINGS
@given(case=_cases())
def test_every_request_with_room_gets_its_answer(case: Case) -> None:
    """Drafts are kept in slots beyond the answer, which a request needs, too."""
    requests = _run(case).requests
    speculation = case.setup.speculation
    assert speculation is not None
    num_beyond = speculation.num_draft_tokens + speculation.num_lookahead_tokens
    num_kept = requests.num_prefill_tokens + requests.num_decode_tokens - 1
    num_slots = num_kept + np.where(requests.num_decode_tokens > 1, num_beyond, 0)
    fits = num_slots <= case.setup.num_kv_blocks * case.setup.profile.block_size
    fits &= num_kept < case.setup.max_context
    assert ((requests.outcome == RequestOutcome.COMPLETED) == fits).all()


@_SETTINGS
@given(case=_cases())
def test_tokens_are_conserved(case: Case) -> None:
    """As many leave as were asked for, those of a step together, and none from a refused draft."""
    record = _run(case)
    tokens = record.tokens
    num_tokens = np.zeros(case.plan.num_requests, dtype=np.int64)
    np.add.at(num_tokens, tokens.request, tokens.count)
    is_done = record.requests.outcome == RequestOutcome.COMPLETED
    assert (num_tokens == np.where(is_done, case.plan.num_decode_tokens, 0)).all()
    assert sum(map(_count_left, record.steps)) == num_tokens.sum()
    assert ((tokens.stride > 0) | (tokens.count > 1)).all()
    is_same = np.diff(tokens.request) == 0
    last_step = tokens.first_step + (tokens.count - 1) * tokens.stride
    assert (tokens.first_step[1:][is_same] > last_step[:-1][is_same]).all()


@_SETTINGS
@given(case=_cases())
def test_no_step_is_over_a_limit(case: Case) -> None:
    """Drafts count against the budget of tokens, and their slots against the cache."""
    rules = case.setup.profile
    for steps in _run(case).steps:
        assert (steps.num_tokens <= rules.max_num_batched_tokens).all()
        assert (steps.num_used_blocks <= case.setup.num_kv_blocks).all()
        assert (steps.num_running <= rules.max_num_seqs).all()
        assert steps.num_output_tokens is not None
        assert (steps.num_output_tokens <= steps.num_rows).all()
        assert (steps.num_rows <= steps.num_tokens).all()


@_SETTINGS
@given(case=_clusters())
def test_a_cluster_conserves_requests_and_tokens(case: ClusterCase) -> None:
    """Also where answers are decoded elsewhere; replicas of prompts never verify a draft."""
    record, cluster = case.run()
    assert cluster.num_done == case.plan.num_requests
    num_tokens = np.zeros(case.plan.num_requests, dtype=np.int64)
    np.add.at(num_tokens, record.tokens.request, record.tokens.count)
    is_done = record.requests.outcome == RequestOutcome.COMPLETED
    assert (num_tokens == np.where(is_done, case.plan.num_decode_tokens, 0)).all()
    for pool, setup in zip(record.pools, case.setup.pools, strict=True):
        for steps in record.steps[pool.first_engine :][: pool.num_engines]:
            assert (steps.num_used_blocks <= setup.engines.num_kv_blocks).all()
            assert _count_left(steps) <= steps.num_rows.sum()
            if setup.role is PoolRole.PREFILL:
                assert _count_left(steps) == steps.num_rows.sum()


@given(
    acceptance_ratio=st.integers(0, 100).map(lambda percent: percent / 100),
    num_drafts=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_the_mean_yield_is_that_of_a_truncated_geometric(
    acceptance_ratio: float, num_drafts: int, seed: int
) -> None:
    """Verifications one after the other through a long answer, within 6 standard errors."""
    speculation = Speculation(acceptance_ratios=(acceptance_ratio,) * num_drafts, seed=seed)
    yields = draw_yields(np.array([20_000]), speculation)
    drawn, place = [], 0
    while place < 20_000 - num_drafts:
        drawn.append(yields[place])
        place += int(yields[place])
    ratio = acceptance_ratio
    expected = num_drafts + 1 if ratio == 1 else (1 - ratio ** (num_drafts + 1)) / (1 - ratio)
    # Even where no draft of a sample is accepted the standard error is that of the model.
    chances = ratio ** np.arange(num_drafts + 1)
    spread = np.sqrt(sum((2 * i + 1) * chance for i, chance in enumerate(chances)) - expected**2)
    error = 6 * spread / np.sqrt(len(drawn)) + 6 / len(drawn)
    assert pytest.approx(expected, abs=error) == np.mean(drawn)


@given(
    answers=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    num_drafts=st.integers(1, 6),
    ratios=st.lists(st.floats(0, 1), min_size=7, max_size=7),
    seed=st.integers(0, 1000),
)
def test_more_drafts_or_a_better_one_never_yield_less(
    answers: list[int], num_drafts: int, ratios: list[float], seed: int
) -> None:
    """The same tokens can be guessed, so common random numbers compare like with like."""
    lengths = np.array(answers)
    less = Speculation(acceptance_ratios=tuple(ratios[:num_drafts]), seed=seed)
    more = replace(less, acceptance_ratios=tuple(ratios[: num_drafts + 1]))
    better = replace(
        less, acceptance_ratios=tuple((1 + ratio) / 2 for ratio in ratios[:num_drafts])
    )
    yields = draw_yields(lengths, less)
    assert (yields <= draw_yields(lengths, more)).all()
    assert (yields <= draw_yields(lengths, better)).all()
    left = np.concatenate([np.arange(length, 0, -1) for length in answers])
    assert ((yields >= 1) & (yields <= left) & (yields <= num_drafts + 1)).all()
