"""A comparison finds the error that was put into the simulation, and no other."""

from dataclasses import replace
from html import unescape

import numpy as np
import pytest
from page_structure import charts_of
from served_runs import StepCost, serve, usual_cost

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.serving_run import MeasuredRequest
from foretoken.domain.results.report import Feasibility, RequestColumns
from foretoken.simulator.report.page import render_page
from foretoken.simulator.validation.decode_steps import DecodeComparison
from foretoken.simulator.validation.serving import (
    DECODE,
    FRONT_END,
    PREFILL,
    QUEUEING,
    ServingValidation,
    validate_serving,
)
from foretoken.simulator.validation.serving_comparison import token_gaps_ms
from foretoken.simulator.validation.serving_page import validation_sections


def _slower(factor: float) -> StepCost:
    return lambda batch, context, prompt: factor * usual_cost(batch, context, prompt)


def _metric(validation: ServingValidation, name: str) -> float:
    return next(m for m in validation.metrics if m.name == name).error_ratio("mean")


def _decode(validation: ServingValidation) -> DecodeComparison:
    assert validation.decode is not None
    return validation.decode


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("has_schedule", [True, False])
def test_a_perfect_simulation_has_no_error(*, has_tokens: bool, has_schedule: bool) -> None:
    served = serve()
    run = served.as_run(has_tokens=has_tokens, has_schedule=has_schedule)
    validation = validate_serving(run, served.as_report())
    assert [0.0] * 3 == [
        pytest.approx(_metric(validation, name), abs=1e-9)
        for name in ("ttft_ms", "tpot_ms", "e2e_latency_ms")
    ]
    assert all(rate.error_ratio == pytest.approx(0.0) for rate in validation.rates)
    assert all(abs(part.error_ms) < 1e-6 for part in validation.components)
    ranges = [item for item in _decode(validation).ranges if item.feature == "batch"]
    assert all(abs(item.error_ratio) < 0.02 for item in ranges)
    assert ["all"] == [finding.component for finding in validation.findings]


def test_steps_that_are_too_fast_are_found_and_said() -> None:
    """The simulation's steps take 10 % less: so says the finding, whatever the queue made of it."""
    validation = validate_serving(serve().as_run(), serve(_slower(0.9)).as_report())
    ranges = [item for item in _decode(validation).ranges if item.feature == "batch"]
    assert all(item.error_ratio == pytest.approx(-0.1, abs=0.03) for item in ranges)
    texts = [finding.text for finding in validation.findings if finding.component == DECODE]
    assert any("faster than measured" in text for text in texts)


def test_steps_that_are_slow_at_large_batches_are_found_where_they_are() -> None:
    def cost(batch: int, context: int, prompt: int) -> float:
        return usual_cost(batch, context, prompt) + 0.3 * max(batch - 16, 0)

    busy = serve(gap_ms=25.0)
    validation = validate_serving(busy.as_run(), serve(cost, gap_ms=25.0).as_report())
    ranges = [item for item in _decode(validation).ranges if item.feature == "batch"]
    assert ranges[-1].error_ratio > 0.2
    assert ranges[-1].error_ratio > ranges[0].error_ratio


@pytest.mark.parametrize("has_schedule", [True, False])
def test_a_front_end_the_simulation_lacks_is_found(*, has_schedule: bool) -> None:
    """Also where the run does not tell when requests were scheduled: then by regression."""
    run = serve(frontend_ms=40.0, gap_ms=200.0).as_run(has_schedule=has_schedule)
    validation = validate_serving(run, serve(gap_ms=200.0).as_report())
    parts = {part.name: part for part in validation.components}
    assert parts[FRONT_END].error_ms == pytest.approx(-40.0, abs=5.0)
    assert (not has_schedule) is parts[FRONT_END].is_estimated
    assert FRONT_END in [finding.component for finding in validation.findings]


@pytest.mark.parametrize("has_schedule", [True, False])
def test_a_queue_the_simulation_lacks_is_found(*, has_schedule: bool) -> None:
    served = serve(gap_ms=12.0, max_num_seqs=16)
    validation = validate_serving(
        served.as_run(has_schedule=has_schedule),
        serve(gap_ms=12.0, max_num_seqs=20).as_report(),
    )
    parts = {part.name: part for part in validation.components}
    assert parts[QUEUEING].ttft_share_ratio > 0.8
    assert parts[QUEUEING].error_ms < 0
    text = next(f.text for f in validation.findings if f.component == QUEUEING)
    assert "of TTFT's error is queueing" in text


def test_a_prefill_that_is_too_slow_is_found() -> None:
    def cost(batch: int, context: int, prompt: int) -> float:
        return usual_cost(batch, context, prompt) + 0.05 * prompt

    run = serve(gap_ms=150.0).as_run(has_schedule=True)
    validation = validate_serving(run, serve(cost, gap_ms=150.0).as_report())
    parts = {part.name: part for part in validation.components}
    assert parts[PREFILL].error_ms > 10.0
    assert max(parts.values(), key=lambda part: part.ttft_share_ratio).name == PREFILL


def test_the_parts_add_up_to_the_latency() -> None:
    run = serve(frontend_ms=5.0).as_run(has_schedule=True)
    validation = validate_serving(run, serve(_slower(1.2)).as_report())
    e2e = next(m for m in validation.metrics if m.name == "e2e_latency_ms")
    measured = sum(part.measured_ms for part in validation.components)
    simulated = sum(part.simulated_ms for part in validation.components)
    assert (e2e.measured.mean, e2e.simulated.mean) == pytest.approx((measured, simulated))
    assert 1.0 == pytest.approx(sum(part.share_ratio for part in validation.components))


def test_per_request_errors_are_those_of_the_requests() -> None:
    validation = validate_serving(serve().as_run(), serve(_slower(1.1)).as_report())
    e2e = next(m for m in validation.metrics if m.name == "e2e_latency_ms")
    errors = np.array(
        [r.simulated_e2e_latency_ms / r.measured_e2e_latency_ms - 1 for r in validation.requests]
    )
    assert e2e.mape_ratio == pytest.approx(np.abs(errors).mean())
    assert e2e.bias_ratio == pytest.approx(errors.mean())
    assert e2e.median_ape_ratio == pytest.approx(np.median(np.abs(errors)))
    off = [abs(r.simulated_e2e_latency_ms - r.measured_e2e_latency_ms) for r in validation.worst]
    assert sorted(off, reverse=True) == off
    assert 10 == len(off)


def test_itl_is_compared_where_tokens_were_seen() -> None:
    served = serve()
    with_tokens = validate_serving(served.as_run(), served.as_report())
    without = validate_serving(served.as_run(has_tokens=False), served.as_report())
    assert "itl_ms" in [metric.name for metric in with_tokens.metrics]
    assert "itl_ms" not in [metric.name for metric in without.metrics]
    assert (True, False) == (_decode(with_tokens).has_token_times, _decode(without).has_token_times)


@pytest.mark.parametrize(
    ("num_tokens", "chunk_tokens", "gaps_ms"),
    [
        (3, (), [100.0, 200.0]),
        (4, (), [100.0, 200.0]),  # the end of the answer had no text
        (6, (), []),
        (6, (2, 2, 2), [0.0, 0.0, 0.0, 100.0, 200.0]),
    ],
)
def test_gaps_are_between_tokens_not_between_pieces(
    num_tokens: int, chunk_tokens: tuple[int, ...], gaps_ms: list[float]
) -> None:
    request = MeasuredRequest(
        arrival_s=0.0,
        num_prefill_tokens=5,
        num_decode_tokens=num_tokens,
        chunk_s=(1.0, 1.1, 1.3),
        chunk_tokens=chunk_tokens,
    )
    assert gaps_ms == sorted(token_gaps_ms([request]).round(6).tolist())


def test_what_the_server_told_is_compared() -> None:
    served = serve()
    run = replace(served.as_run(), num_kv_blocks=1250, kv_block_tokens=16, num_preemptions=7)
    texts = [f.text for f in validate_serving(run, served.as_report()).findings]
    assert "KV cache: 20,000 tokens on the server, 16,000 simulated (-20.0%)." in texts
    assert "Preemptions: 7 measured, 0 simulated." in texts


def test_a_range_of_batches_ends_with_the_batches_that_were() -> None:
    """No range is empty or begins where it ends, also where the batch never changes."""
    busy = serve(gap_ms=1.0, max_num_seqs=8)
    ranges = _decode(validate_serving(busy.as_run(), busy.as_report())).ranges
    assert all(item.low < item.high and item.share_ratio > 0 for item in ranges)
    shares = [item.share_ratio for item in ranges if item.feature == "batch"]
    assert sum(shares) > 0.9


def test_the_regression_finds_what_a_step_is_made_of() -> None:
    """With single tokens' times, parts that do not rise together are found to a few per cent."""
    validation = validate_serving(serve(gap_ms=40.0).as_run(), serve(_slower(0.5)).as_report())
    parts = {name: measured for name, measured, _ in _decode(validation).parts}
    assert parts["constant"] == pytest.approx(10.0, rel=0.1)
    simulated = sum(item[2] for item in _decode(validation).parts)
    assert simulated / sum(parts.values()) == pytest.approx(0.5, rel=0.1)


def test_estimates_that_rest_on_no_measurement_are_said() -> None:
    served = serve()
    guessed = replace(
        served.as_report(),
        step_time_ratio_by_provenance={"analytical": 0.8, "measured": 0.2},
        step_time_low_ratio=0.5,
        step_time_high_ratio=3.0,
    )
    texts = [f.text for f in validate_serving(served.as_run(), guessed).findings]
    assert "80% analytical, 20% measured, which may be off by -50% to +200%" in texts[1]
    known = replace(guessed, step_time_ratio_by_provenance={"measured": 1.0})
    assert 1 == len(validate_serving(served.as_run(), known).findings)


def test_requests_that_failed_are_left_out_and_said() -> None:
    served = serve()
    failed = MeasuredRequest(
        arrival_s=0.5, num_prefill_tokens=5, num_decode_tokens=0, error="HTTP 503"
    )
    run = served.as_run()
    run = replace(run, requests=(*run.requests, failed))
    validation = validate_serving(run, served.as_report())
    assert (150, 1) == (validation.num_compared, validation.num_failed)
    assert any("1 requests failed" in finding.text for finding in validation.findings)


def test_requests_the_simulation_did_not_finish_are_left_out() -> None:
    served = serve()
    report = served.as_report()
    finished = np.array(report.requests.finished_s)
    finished[3] = -1.0
    report = replace(report, requests=replace(report.requests, finished_s=finished))
    validation = validate_serving(served.as_run(), report)
    assert (149, 1) == (validation.num_compared, validation.num_unfinished)


def test_a_simulation_that_cannot_run_is_said() -> None:
    served = serve()
    infeasible = replace(
        served.as_report(), feasibility=Feasibility(is_feasible=False, reason="does not fit")
    )
    with pytest.raises(InvalidRequestError, match="cannot run: does not fit"):
        validate_serving(served.as_run(), infeasible)


def test_another_workload_is_refused() -> None:
    served = serve()
    with pytest.raises(InvalidRequestError, match="not the same requests"):
        validate_serving(served.as_run(), serve(num_requests=10).as_report())
    with pytest.raises(InvalidRequestError, match="num_prefill_tokens of request 0"):
        validate_serving(served.as_run(), serve(seed=1).as_report())


def test_one_request_of_one_token_can_be_compared() -> None:
    """Too little for any regression, and no gap between tokens."""
    request = MeasuredRequest(
        arrival_s=0.0,
        first_token_s=0.5,
        last_token_s=0.5,
        num_prefill_tokens=10,
        num_decode_tokens=1,
    )
    run = replace(serve(num_requests=1).as_run(), requests=(request,))
    columns = RequestColumns(
        arrival_s=[0.0],
        scheduled_s=[0.0],
        first_token_s=[0.4],
        finished_s=[0.4],
        num_prefill_tokens=[10],
        num_decode_tokens=[1],
    )
    report = replace(serve(num_requests=1).as_report(), requests=columns)
    validation = validate_serving(run, report)
    assert -0.2 == pytest.approx(_metric(validation, "ttft_ms"))
    assert validation.decode is None
    assert "A mean request" in charts_of(render_page("one", validation_sections(validation)))


def test_the_page_shows_findings_figures_and_pictures() -> None:
    validation = validate_serving(serve().as_run(), serve(_slower(0.8)).as_report())
    written = render_page("comparison", validation_sections(validation))
    page = unescape(written)
    assert all(finding.text in page for finding in validation.findings)
    charts = charts_of(written)
    assert {"A mean request", "Time to first token", "End-to-end latency"} == set(charts)
    pairs = charts["End-to-end latency"]["table"]["rows"]
    assert [item.measured_e2e_latency_ms for item in validation.requests] == [
        measured for measured, _ in pairs
    ]
    assert "Requests furthest off" in page


def test_a_batch_has_the_request_whose_step_it_is() -> None:
    """No range of batches begins below one request."""
    served, slower = serve(gap_ms=2_000.0), serve(_slower(2.0), gap_ms=2_000.0)
    findings = validate_serving(served.as_run(), slower.as_report()).findings
    texts = [item.text for item in findings if "requests in the batch" in item.text]
    assert any("at 1 to" in text for text in texts)
    assert not any("at 0 to" in text for text in texts)
