"""The closed form of a replica says what simulating it request by request says."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from foretoken.domain.frameworks.engine import EngineProfile, find_engine
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.units import NS_PER_S, US_PER_S
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.search.serving.closed_form import (
    ReplicaForm,
    SteadyState,
    closed_form_rules,
)
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.step_time import NUM_VARIANTS, MixedSteps
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import plan_requests

Floats = NDArray[np.float64]

_STEP_US, _TOKEN_US = 1000.0, 10.0
_PROMPT, _ANSWER = 400, 60
# So that the lengths drawn have about their mean.
_ROUNDS, _NUM_MORE = 12, 300


class _FlatTimes:
    """The times of `flat_tables`: so much a step, and so much a token."""

    def decode_us(self, num_decodes: Floats, raggedness: Floats, num_group: Floats) -> Floats:
        del raggedness, num_group
        return self._us(num_decodes)

    def mixed_us(self, steps: MixedSteps) -> Floats:
        return self._us(steps.num_decodes + steps.num_prefills * steps.piece_tokens)

    def _us(self, num_tokens: Floats) -> Floats:
        return np.broadcast_to(
            _STEP_US + _TOKEN_US * num_tokens, (NUM_VARIANTS, 1, len(num_tokens))
        )


def _load() -> LoadProfile:
    return LoadProfile(
        prefill_mean=_PROMPT,
        decode_mean=_ANSWER,
        # That of lengths between half and one and a half times the mean, all as likely.
        prefill_second_ratio=1 + 1 / 12,
        context_mean=_PROMPT + _ANSWER / 2,
        raggedness=(1.0,) * 13,
        longest=_PROMPT + _ANSWER,
        is_even=False,
    )


def _answer(profile: EngineProfile, batch: float, limit: float) -> SteadyState:
    rules = closed_form_rules(profile, ParallelLayout())
    form = ReplicaForm(_FlatTimes(), rules, _load())
    return form.aggregated(np.array([batch]), np.array([limit]))


def _simulate(
    profile: EngineProfile, batch: int, limit: int, each_us: float
) -> tuple[float, float, float]:
    """Return mean TTFT and TPOT in µs and requests/s, without the first three rounds.

    The first requests come evenly over the time that one takes.
    """
    num = _ROUNDS * batch + _NUM_MORE
    rng = np.random.default_rng(5)
    prompts, answers = (
        rng.integers(mean // 2, mean * 3 // 2 + 1, num) for mean in (_PROMPT, _ANSWER)
    )
    gap_ns = int(1000 * each_us / batch)
    ramp_ns = np.minimum(np.arange(num), batch - 1) * gap_ns
    plan = plan_requests(ramp_ns, prompts, answers)
    plan = replace(plan, concurrency=batch)

    rules = replace(
        profile,
        max_num_seqs=batch,
        max_num_batched_tokens=limit,
        has_prefix_caching=False,
    )
    setup = DeploymentSetup(profile=rules, num_kv_blocks=100_000)
    record = run_deployment(plan, setup, flat_tables(_STEP_US, _TOKEN_US), lambda _: None)
    requests = record.requests
    late = np.arange(num) >= 3 * batch
    first, last = np.asarray(requests.first_token_ns)[late], np.asarray(requests.finished_ns)[late]
    arrival = np.asarray(requests.arrival_ns)[late]
    e2e_s = float((last - arrival).mean()) / NS_PER_S
    tpot_us = float((last - first).mean()) / (_ANSWER - 1) / 1000
    return float((first - arrival).mean()) / 1000, tpot_us, batch / e2e_s


def _in_process(profile: str) -> EngineProfile:
    """Return an engine without a server in front of it."""
    rules = find_engine(profile)
    return replace(rules, frontend_ms=0.0, frontend_us_per_token=0.0, executor_us_per_token=0.0)


def _compare_with_simulation(
    rules: EngineProfile, batch: int, limit: int, error_ratio: float
) -> tuple[float, float]:
    """Hold rate and TPOT to a simulated closed loop's within an error, and TTFT within 30 %.

    Return how many requests there are by Little's law, and how many a second were simulated.
    """
    found = _answer(rules, batch, limit)
    each_us = float(found.ttft_us[0, 0] + (_ANSWER - 1) * found.tpot_us[0, 0])

    ttft_us, tpot_us, rate_rps = _simulate(rules, batch, limit, each_us)

    assert found.rate_rps[0, 0] == pytest.approx(rate_rps, rel=error_ratio)
    assert found.tpot_us[0, 0] == pytest.approx(tpot_us, rel=error_ratio)
    assert found.ttft_us[0, 0] == pytest.approx(ttft_us, rel=0.30)
    return float(found.rate_rps[0, 0]) * each_us / US_PER_S, rate_rps


@pytest.mark.parametrize("profile", ["vllm-0.20", "sglang-0.5", "trtllm-1.0"])
@pytest.mark.parametrize(("batch", "limit"), [(4.0, 512.0), (16.0, 2048.0)])
def test_the_steps_of_requests_fill_the_time(profile: str, batch: float, limit: float) -> None:
    """A request's parts of all steps take the time between two requests, and hold its tokens."""
    rules = replace(
        closed_form_rules(find_engine(profile), ParallelLayout()), step_us=0.0, step_us_per_seq=0.0
    )
    times, size = _FlatTimes(), (np.array([batch]), np.array([limit]))
    form = ReplicaForm(times, rules, _load())
    pools = (
        (form.aggregated_mix(*size), form.aggregated(*size).rate_rps, _PROMPT, _ANSWER),
        (form.prefill_mix(*size), form.prefill(*size).full_rps, _PROMPT, 0),
        (form.decode_mix(size[0]), form.decode(size[0]).rate_rps, 0, _ANSWER),
    )
    for mix, rate_rps, prompt, answer in pools:
        prompts, decodes = mix.prompts_per_request[0], mix.decodes_per_request[0]
        time_us = prompts * times.mixed_us(mix.prompts)[0, 0, 0]
        time_us += decodes * times.decode_us(*mix.decodes)[0, 0, 0]
        computed = prompts * (mix.prompts.num_prefills * mix.prompts.piece_tokens)[0]
        decoded = prompts * mix.prompts.num_decodes[0] + decodes * mix.decodes.num_decodes[0]
        assert time_us * rate_rps[0, 0] / US_PER_S == pytest.approx(1.0, rel=0.05)
        assert computed == pytest.approx(prompt, rel=0.01)
        assert decoded == pytest.approx(max(answer - 1, 0), rel=0.1)


@pytest.mark.parametrize("profile", ["vllm-0.20", "sglang-0.5", "trtllm-1.0"])
@pytest.mark.parametrize(("batch", "limit"), [(1, 512), (4, 512), (8, 512), (16, 2048)])
def test_steady_state_is_that_of_the_simulation(profile: str, batch: int, limit: int) -> None:
    """Rate and TPOT are within 4 % of a simulated closed loop, TTFT within 30 %."""
    # What stands in front of an engine is in no step of it.
    _compare_with_simulation(_in_process(profile), batch, limit, 0.04)


@pytest.mark.parametrize("output_us_per_seq", [30.0, 60.0, 150.0])
def test_what_the_output_server_cannot_hand_out_waits_for_it(output_us_per_seq: float) -> None:
    """Below its limit nothing changes but its own time; above, answers leave as fast as it goes."""
    rules = replace(_in_process("vllm-0.20"), output_us_per_seq=output_us_per_seq)
    _, simulated_rps = _compare_with_simulation(rules, 16, 2048, 0.05)
    assert simulated_rps <= 1.02 * US_PER_S / (output_us_per_seq * _ANSWER)


def test_what_an_answers_tokens_add_to_each_next_is_in_both() -> None:
    """Half of what the output server takes is for tokens before."""
    us_per_past_token = 120.0 / _ANSWER
    rules = replace(
        _in_process("vllm-0.20"),
        output_us_per_seq=60.0,
        output_us_per_past_token=us_per_past_token,
    )
    _, simulated_rps = _compare_with_simulation(rules, 16, 2048, 0.05)
    # A long answer's tokens are more, and each takes longer.
    assert simulated_rps <= 1.02 * US_PER_S / (120.0 * _ANSWER)


@pytest.mark.parametrize("server", ["frontend_us_per_token", "executor_us_per_token"])
@pytest.mark.parametrize("us_per_token", [1.0, 10.0, 40.0])
def test_what_a_front_end_cannot_take_waits_for_it(server: str, us_per_token: float) -> None:
    """Below its limit nothing changes but its own time; above, requests come as fast as it goes."""
    rules = replace(_in_process("vllm-0.20"), **{server: us_per_token}, frontend_ms=5.0)  # type: ignore[arg-type]
    found_num, simulated_rps = _compare_with_simulation(rules, 16, 2048, 0.05)
    assert simulated_rps <= 1.02 * US_PER_S / (us_per_token * _PROMPT)
    assert 16 == pytest.approx(found_num, rel=0.01)


def test_what_joins_a_step_takes_the_hosts_time_in_both() -> None:
    """The host's time of those that join is a fifth of all here."""
    _compare_with_simulation(
        replace(_in_process("vllm-0.11"), admission_us_per_token=3.0), 16, 2048, 0.05
    )


def test_one_request_alone_takes_its_own_steps() -> None:
    """Alone a request takes its prompt's step and one more for each token."""
    found = _answer(_in_process("vllm-0.20"), 1, 8192)

    prompt_us = _STEP_US + _TOKEN_US * _PROMPT
    token_us = _STEP_US + _TOKEN_US
    assert found.ttft_us[0, 0] == pytest.approx(prompt_us)
    assert found.tpot_us[0, 0] == pytest.approx(token_us)
    expected_s = (prompt_us + (_ANSWER - 1) * token_us) / US_PER_S
    assert found.rate_rps[0, 0] == pytest.approx(1 / expected_s)


def test_prompts_of_lengths_that_differ_wait_for_what_is_compiled_for_each() -> None:
    """All of the time of a model with linear attention, and nothing where prompts are alike."""
    profile, size = find_engine("sglang-0.5"), (np.array([1.0]), np.array([512.0]))
    model = find_model("qwen3.5-397b-a17b")
    rules = closed_form_rules(profile, ParallelLayout(), None, model)
    of_alike = replace(_load(), prefill_second_ratio=1.0)

    drawn, alike, other = (
        ReplicaForm(_FlatTimes(), its, load).aggregated(*size)
        for its, load in (
            (rules, _load()),
            (rules, of_alike),
            (closed_form_rules(profile, ParallelLayout()), _load()),
        )
    )

    compile_us = profile.compile_us["gated_delta"]
    assert drawn.ttft_us[0, 0] == pytest.approx(other.ttft_us[0, 0] + compile_us)
    assert alike.ttft_us[0, 0] == pytest.approx(other.ttft_us[0, 0])
    assert drawn.tpot_us[0, 0] == pytest.approx(other.tpot_us[0, 0])


def test_rate_latency_and_concurrency_obey_littles_law() -> None:
    """Requests on a replica are the rate times how long each is there, at any batch."""
    profile = _in_process("vllm-0.20")
    batches = np.array([1.0, 3.0, 10.0, 40.0])
    form = ReplicaForm(_FlatTimes(), closed_form_rules(profile, ParallelLayout()), _load())

    found = form.aggregated(batches, np.full(4, 512.0))

    each_s = (found.ttft_us[0] + (_ANSWER - 1) * found.tpot_us[0]) / US_PER_S
    assert (found.rate_rps[0] * each_s).tolist() == pytest.approx(batches.tolist())


def test_prefill_replicas_compute_prompts_at_the_rate_of_their_steps() -> None:
    """Two prompts share a step; one alone takes its own, and several where it is longer."""
    profile = _in_process("vllm-0.20")
    form = ReplicaForm(_FlatTimes(), closed_form_rules(profile, ParallelLayout()), _load())

    found = form.prefill(np.array([2.0, 1.0]), np.array([8192.0, 100.0]))

    pair_us, piece_us = _STEP_US + _TOKEN_US * 800, _STEP_US + _TOKEN_US * 100
    alone_us = _STEP_US + _TOKEN_US * 400
    assert found.alone_us[0].tolist() == pytest.approx([alone_us, 4 * piece_us])
    assert found.single_us[0].tolist() == pytest.approx([alone_us, 4 * piece_us])
    expected = [2 * US_PER_S / pair_us, US_PER_S / (4 * piece_us)]
    assert found.full_rps[0].tolist() == pytest.approx(expected)


def test_decode_replicas_emit_the_tokens_of_all_they_hold() -> None:
    """Each of so many requests gets a token a step, and is done after all but its first."""
    profile = _in_process("vllm-0.20")
    form = ReplicaForm(_FlatTimes(), closed_form_rules(profile, ParallelLayout()), _load())
    batches = np.array([1.0, 4.0, 64.0])

    found = form.decode(batches)

    step_us = _STEP_US + _TOKEN_US * batches
    assert found.tpot_us[0].tolist() == pytest.approx(step_us.tolist())
    expected = batches / (step_us * (_ANSWER - 1)) * US_PER_S
    assert found.rate_rps[0].tolist() == pytest.approx(expected.tolist())
