"""The registry of metrics: every number of a report is in it once, and pages and docs follow."""

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.metrics.metric import Metric, figures_of, title_of
from foretoken.domain.metrics.reference import reference_page
from foretoken.domain.metrics.registry import METRICS, describe_limit, list_figures, shown_at
from foretoken.domain.metrics.request import LATENCIES, LIMITED, Instants
from foretoken.domain.metrics.serving import RunTotals, rates_of
from foretoken.domain.metrics.training import StepTotals, mfu_ratio, tokens_per_s_per_gpu
from foretoken.domain.requests.search import CapacityReport
from foretoken.domain.requests.slo import Slo
from foretoken.domain.requests.training_run import TrainingRunReport
from foretoken.domain.results.report import (
    ClassReport,
    Percentiles,
    PoolReport,
    ServingReport,
    SteadyWindow,
)
from foretoken.domain.results.training_report import TrainingReport

_REPORTS = (
    *(ServingReport, PoolReport, ClassReport, CapacityReport, TrainingReport, TrainingRunReport),
)
_TIMES = st.integers(0, 10**12)
_SUMMARY = Percentiles(mean=2.0, p50=1.0, p90=3.0, p95=4.0, p99=5.0, max=6.0)


@pytest.mark.parametrize("report", _REPORTS)
def test_every_number_of_a_report_is_registered(report: type) -> None:
    """By its field, or by a field of it."""
    registered = {name.partition(".")[0] for name in METRICS}
    numbers = [item.name for item in fields(report) if item.type in {int, float, Percentiles}]
    assert [] == [name for name in numbers if name not in registered]


@pytest.mark.parametrize("report", _REPORTS)
@pytest.mark.parametrize("place", ["terminal", "page", "comparison", "pool", "percentiles"])
def test_a_label_says_one_thing(report: type, place: str) -> None:
    """No two rows of a table have the same heading."""
    record = report(name="") if report in {PoolReport, ClassReport} else report()
    counts = Counter(metric.label for metric in shown_at(place, record))  # type: ignore[arg-type]
    assert [] == [label for label, count in counts.items() if count > 1]


def test_limits_are_those_of_an_slo() -> None:
    limits = [item.name for item in fields(Slo) if item.name != "itl_percentile"]
    assert sorted(limits) == sorted(LIMITED)
    assert [Slo().is_limited, *(Slo(**{name: 1.0}).is_limited for name in limits)] == [  # type: ignore[arg-type]
        False,
        *(True for _ in limits),
    ]


@given(_TIMES, _TIMES, _TIMES, st.integers(2, 10**6), st.integers(1, 10**6))
def test_latencies_add_up(wait: int, prefill: int, decode: int, answer: int, prompt: int) -> None:
    """Of one request, in whole units of time."""
    times = Instants(
        arrival=0,
        queued=wait // 2,
        scheduled=wait,
        prefilled=wait + prefill,
        first_token=wait + prefill,
        finished=wait + prefill + decode,
        num_prefill_tokens=prompt,
        num_decode_tokens=answer,
    )
    found = {
        metric.name: metric.formula(times)
        for metric in LATENCIES
        if metric.formula and metric.name not in {"execution_ms", "preempted_ms", "transfer_ms"}
    }
    assert found["e2e_latency_ms"] == found["ttft_ms"] + found["decode_ms"]
    assert found["e2e_latency_ms"] == found["queueing_ms"] + found["service_ms"]
    assert found["ttft_ms"] == found["ttft_queued_ms"] + wait // 2
    assert found["tpot_ms"] == decode / (answer - 1)
    assert found["prefill_ms_per_token"] == prefill / prompt


def test_a_request_of_one_token_has_no_tpot() -> None:
    """Nor one that did not complete."""
    defined = METRICS["tpot_ms"].is_defined
    assert defined is not None
    one, two = (Instants(finished=5, num_decode_tokens=num) for num in (1, 2))
    assert [defined(one), defined(two), defined(replace(two, finished=-1))] == [0, 1, 0]


def test_time_in_steps_that_overlap_is_no_preemption() -> None:
    formula = METRICS["preempted_ms"].formula
    assert formula is not None
    times = Instants(scheduled=10, finished=110, execution=70)
    assert [formula(times), formula(replace(times, execution=130))] == [30, 0]


def test_rates_are_of_what_a_run_came_to() -> None:
    totals = RunTotals(
        duration_s=10.0,
        num_devices=4,
        num_requests=50,
        num_completed=40,
        num_attaining=20,
        num_output_tokens=8000,
        num_input_tokens=2000,
        cost_usd=0.5,
        energy_j=4000,
    )
    expected = {
        "request_throughput_rps": 4.0,
        "goodput_rps": 2.0,
        "slo_attainment_ratio": 0.4,
        "output_throughput_tps_per_gpu": 200.0,
        "usd_per_million_output_tokens": 62.5,
        "usd_per_million_tokens": 50.0,
        "energy_j_per_output_token": 0.5,
        "power_w_mean": 400.0,
    }
    assert expected == rates_of(totals, *expected)
    assert set(rates_of(RunTotals(), *expected).values()) == {0.0}


def test_rates_of_steps() -> None:
    step = StepTotals(
        step_us=2e6, num_tokens=4000, num_devices=8, flops=3e15, peak_flops_per_s=3e15
    )
    assert (tokens_per_s_per_gpu(step), mfu_ratio(step)) == (250.0, 0.5)


def test_a_summary_has_a_row_per_statistic() -> None:
    """Dashes where no request had the latency, or nothing ran."""
    served = ServingReport(num_completed=1, ttft_ms=_SUMMARY)
    nothing = ServingReport(num_requests=1)
    figures = figures_of(METRICS["ttft_ms"], [served, nothing, None])
    assert [figure.title for figure in figures] == [
        *("TTFT mean (ms)", "TTFT p50 (ms)", "TTFT p90 (ms)", "TTFT p99 (ms)")
    ]
    assert figures[3].texts() == ("5", "-", "-")


def test_what_plays_no_part_has_no_row() -> None:
    """Prices of what has none; a mapping has a row per part, the largest first."""
    report = ServingReport(step_time_s_by_group={"gemm": 1.0, "attention": 2.0, "moe": 0.0})
    names = {figure.metric.name for figure in list_figures("page", [report])}
    assert not names & {"usd_per_million_tokens", "transfer_ms", "num_retries"}
    labels = [figure.label for figure in list_figures("comparison", [report])]
    assert labels[-2:] == ["attention in all steps", "gemm in all steps"]


def test_values_are_written_by_their_unit() -> None:
    """Shares in per cent, counts whole, long latencies of pages in s."""
    assert METRICS["mfu_ratio"].text(0.4567) == "45.7%"
    assert METRICS["num_requests"].text(12345) == "12,345"
    assert METRICS["goodput_rps"].text(1234.5, digits=4, decimals=1) == "1,234.5"
    long = METRICS["e2e_latency_ms"].on_page()
    assert (long.title, long.statistic(_SUMMARY, "p99")) == ("end-to-end latency (s)", 0.005)
    assert METRICS["margin_bytes"].words({"margin_bytes": 3 * 2**30}) == "3"


def test_units_are_not_said_twice() -> None:
    assert title_of("output tokens/s", "tokens/s") == "output tokens/s"
    assert describe_limit("tpot_ms", 99.9) == "TPOT p99.9"
    assert describe_limit("itl_ms", 0) == "ITL mean"
    assert describe_limit("slo", 0) == "SLO attainment"


def test_an_added_metric_is_one_entry() -> None:
    """It has a row in the tables of its places, and its place in the reference."""
    added = Metric(
        "num_loaded_tokens",
        "loaded tokens",
        "",
        "",
        "tokens of a lower tier",
        neutral=0.0,
        shown=("terminal",),
    )
    reports = [ServingReport(num_loaded_tokens=7), ServingReport()]
    (figure,) = figures_of(added, reports)
    assert (figure.title, *figure.texts()) == ("loaded tokens", "7", "0")


def test_the_reference_page_is_current() -> None:
    """`make metrics-reference` writes it."""
    page = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
    assert page.read_text(encoding="utf-8") == reference_page()


def test_a_steady_window_has_the_rates_of_its_run() -> None:
    """Under the same names, so with the same labels."""
    names = {item.name for item in fields(SteadyWindow)} & METRICS.keys()
    assert {"request_throughput_rps", "output_throughput_tps", "ttft_ms", "tpot_ms"} <= names
