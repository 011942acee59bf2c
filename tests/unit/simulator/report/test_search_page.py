"""Pages of searches: self-contained, well-formed, every answer with its interval and reason."""

import re
from dataclasses import replace

import pytest
from page_structure import charts_of, check_self_contained, parse_page, without_scripts
from search_reports import build_capacity, build_no_capacity, build_search

from foretoken.domain.requests.search import (
    CandidateColumns,
    CapacityProbe,
    LimitOutcome,
    ServingSearchReport,
)
from foretoken.simulator.report.page import render_page, result_sections
from foretoken.simulator.report.search_candidates import (
    best_of_layouts,
    candidate_rows,
    curve_of,
    describe_batch,
    describe_deployment,
    describe_replicas,
    missed_outcomes,
    ranked_rows,
    steady_figures,
)

_HOSTILE = ' <b>&"$x$'
_TWO_POOLS = (
    "2 replicas for prompts, up to 16 requests at once on each; 1 for answers, up to 8 requests at"
    " once on each."
)


def _page(report: ServingSearchReport) -> str:
    return without_scripts(render_page("llama", result_sections(report)))


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {
        "search": _page(build_search()),
        "hostile": _page(build_search(_HOSTILE)),
        "capacity": without_scripts(render_page("llama", result_sections(build_capacity()))),
    }


@pytest.mark.parametrize("name", ["search", "hostile", "capacity"])
def test_a_page_fetches_nothing_and_is_well_formed(pages: dict[str, str], name: str) -> None:
    check_self_contained(pages[name])


def test_a_page_says_how_many_devices_are_idle(pages: dict[str, str]) -> None:
    """The ranking has a column of them, and the best says whether they count."""
    report = build_search()
    num = len(report.candidates.name)
    idle = replace(report.candidates, num_idle_devices=(2,) * num)
    counted = replace(idle, num_counted_devices=tuple(n + 2 for n in idle.num_devices))

    told = [_page(replace(report, candidates=columns)) for columns in (idle, counted)]

    assert "idle GPUs" not in pages["search"]
    assert all("<th" in page and "idle GPUs" in page for page in told)
    assert "2 idle, not counted per GPU" in told[0]
    assert "2 idle, counted per GPU" in told[1]


def test_figures_of_a_simulation_are_per_device_that_counts() -> None:
    """With a quarter of the devices idle and counted, each yields three quarters as much."""
    report = build_search()
    columns, finalist = report.candidates, report.finalists[0]
    more = tuple(int(n * 4 / 3) for n in columns.num_devices)

    each, *latencies = steady_figures(finalist, columns)
    of_all, *same = steady_figures(finalist, replace(columns, num_counted_devices=more))

    ratio = columns.num_devices[finalist.candidate] / more[finalist.candidate]
    assert of_all == pytest.approx(each * ratio)
    assert latencies == same


def test_a_page_answers_first_and_keeps_the_request_last(pages: dict[str, str]) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", pages["search"])
    expected = [
        "The best deployment",
        "Ranking",
        "Throughput, speed and cost",
        "Simulated request by request",
        "Load and latency of the finalists",
        "Where points failed",
        "Cost",
        "What if",
        "Request",
        "Scenarios of the finalists",
    ]
    assert expected == titles
    assert "Seed 7, predictor v1" in pages["search"]


def test_every_finalist_tie_and_reason_is_there(pages: dict[str, str]) -> None:
    report = build_search()
    text = parse_page(pages["search"]).text
    for finalist in report.finalists:
        assert finalist.name in text
    assert f"It ties, within the error of the estimates, with {report.ties[1]}." in text
    assert "misses TTFT p99 2,455 > 2,000 ms" in text
    for words in (
        "beyond a bound",
        "out of memory",
        "TTFT over the limit",
        "TPOT over the limit",
        "weights of 131 GiB do not fit",
    ):
        assert words in text
    assert "another layout" in text


def test_names_are_text_and_nothing_else(pages: dict[str, str]) -> None:
    """A name with tags, ampersands or dollars reads as it stands, in tables and pictures."""
    report = build_search(_HOSTILE)
    page = pages["hostile"]
    assert "<b>" not in page
    text = parse_page(page).text
    # Once at least in tables, and in those of the charts.
    assert text.count(report.best) >= 3


def test_each_candidate_with_figures_is_a_mark_with_its_details(pages: dict[str, str]) -> None:
    report = build_search()
    chart = charts_of(pages["search"])["Throughput of a GPU against speed for a user"]
    names = [column["name"] for column in chart["table"]["columns"]]
    told = {row[0]: dict(zip(names, row, strict=True)) for row in chart["table"]["rows"]}
    rows = candidate_rows(report.candidates)
    slowest = min(row["tps_per_user"] for row in rows if row["rank"])
    # What is ruled out is drawn as far as it is at least half as fast.
    shown = [row for row in rows if row["tps_per_user"] >= slowest / 2]
    assert {row["name"] for row in shown} == set(told)
    assert len(shown) < sum(row["tps_per_user"] > 0 for row in rows)
    for row in shown:
        details = told[row["name"]]
        assert row["tps_per_user"] == details["tps_per_user"]
        assert row["output_throughput_tps_per_gpu"] == details["output_throughput_tps_per_gpu"]
        assert row["place"] == details["rank"]
        assert describe_batch(row) == details["batch"]
        assert row["reason"] in details["why_not"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "1 replica of 1 GPU; up to 8 requests at once on it."),
        (
            {"replicas": 3, "num_devices": 12},
            "3 replicas of 4 GPUs; up to 8 requests at once on each.",
        ),
        (
            {"replicas": 3, "num_devices": 13, "encoders": 1},
            "3 replicas and 1 encoder; up to 8 requests at once on each.",
        ),
        (
            {"prefill_replicas": 2, "prefill_batch_size": 16},
            _TWO_POOLS,
        ),
    ],
)
def test_a_deployment_is_said_in_words(changes: dict[str, int], expected: str) -> None:
    row = {"replicas": 1, "num_devices": 1, "encoders": 0, "prefill_replicas": 0, "batch_size": 8}
    assert expected == describe_deployment({**row, **changes})


def test_nothing_qualifies_is_said_and_the_reasons_stay() -> None:
    report = build_search()
    rows = [row for row in candidate_rows(report.candidates) if row["rank"] == 0]
    names = CandidateColumns.__dataclass_fields__
    left = CandidateColumns(**{name: [row[name] for row in rows] for name in names})
    empty = replace(report, candidates=left, finalists=(), sensitivities=(), best="", ties=())
    sections = result_sections(empty)
    assert "No deployment of this space meets the targets" in sections[0].warning
    titles = [section.title for section in sections]
    expected = ["The best deployment", "Throughput, speed and cost", "Where points failed"]
    assert [*expected, "Request"] == titles


def test_a_search_of_nothing_is_a_page() -> None:
    titles = [section.title for section in result_sections(ServingSearchReport())]
    assert ["The best deployment", "Request"] == titles


def test_the_same_report_gives_the_same_page(pages: dict[str, str]) -> None:
    assert pages["search"] == _page(build_search())


def test_replicas_and_batches_name_prefill_first() -> None:
    aggregated = {"replicas": 4, "tp": 2, "pp": 1, "dp": 1, "ep": 1, "batch_size": 96}
    none = {f"prefill_{name}": 0 for name in ("replicas", "tp", "pp", "ep", "batch_size")}
    row = {**aggregated, **none, "encoders": 0}
    assert ("4 x tp2", "96") == (describe_replicas(row), describe_batch(row))
    some = {
        "prefill_replicas": 3,
        "prefill_tp": 1,
        "prefill_pp": 2,
        "prefill_ep": 1,
        "prefill_batch_size": 8,
    }
    split = row | some | {"ep": 8}
    assert "3 x tp1 pp2 + 4 x tp2 ep8" == describe_replicas(split)
    assert "8 + 96" == describe_batch(split)
    assert "2 x encoder + 4 x tp2" == describe_replicas(row | {"encoders": 2})


def test_equal_ranks_are_marked_as_ties_and_come_in_order() -> None:
    columns = CandidateColumns(name=("a", "b", "c", "d"), rank=(3, 0, 1, 1))
    assert [("c", "=1"), ("d", "=1"), ("a", "3")] == [
        (row["name"], row["place"]) for row in ranked_rows(candidate_rows(columns))
    ]


def test_of_each_layout_the_best_is_kept() -> None:
    """Whatever the batch and the number of replicas; another degree is another layout."""
    columns = CandidateColumns(
        name=("a", "b", "c", "d"),
        rank=(1, 2, 3, 4),
        tp=(2, 2, 4, 2),
        replicas=(4, 2, 2, 4),
        batch_size=(96, 64, 96, 96),
        prefill_tp=(0, 0, 0, 8),
    )
    found = best_of_layouts(ranked_rows(candidate_rows(columns)))
    assert ["a", "c", "d"] == [row["name"] for row in found]


def test_absent_columns_are_empty() -> None:
    (row,) = candidate_rows(CandidateColumns(name=("a",)))
    assert ("a", "", 0, "") == (row["name"], row["device"], row["tp"], row["reason"])


def test_a_curve_has_one_limit_in_order_of_the_runs() -> None:
    def probe(rate: float, value: float) -> CapacityProbe:
        outcomes = (
            LimitOutcome(metric="ttft_ms", percentile=99, value=value),
            LimitOutcome(metric="ttft_ms", percentile=50, value=-1.0),
        )
        return CapacityProbe(rate_rps=rate, is_met=True, outcomes=outcomes)

    probes = (probe(1, 10.0), probe(4, 40.0), probe(2, float("nan")), probe(3, 90.0))
    points = curve_of(probes, "ttft_ms", 99)
    assert [(1, 10.0), (4, 40.0), (3, 90.0)] == [(probe.rate_rps, value) for probe, value in points]


def test_what_is_missed_is_said_with_value_and_limit() -> None:
    outcomes = (
        LimitOutcome(metric="ttft_ms", percentile=99, limit=2000, value=2310, is_met=False),
        LimitOutcome(metric="tpot_ms", limit=30, value=29),
        LimitOutcome(metric="slo", limit=0.99, value=0.95, is_met=False),
    )
    expected = ["TTFT p99 2,310 > 2,000 ms", "SLO attainment 95.0% < 99.0%"]
    assert expected == missed_outcomes(outcomes)


def test_a_capacity_says_the_rate_its_bounds_and_every_run(pages: dict[str, str]) -> None:
    report = build_capacity()
    text = parse_page(pages["capacity"]).text
    assert "met at 10 requests/s and missed at 12. ttft p99 fails first." in text
    assert "9 to 11" in text
    assert "9.6 to 10.4" in text
    assert text.count("meets the targets") == sum(probe.is_met for probe in report.probes)
    assert "the queue only grew; cut short; TTFT p99" in text


def test_a_capacity_warns_of_its_notes() -> None:
    report = replace(build_capacity(), notes=("the workload is short",))
    text = parse_page(render_page("llama", result_sections(report))).text
    assert "The workload is short." in text


def test_no_capacity_says_why() -> None:
    sections = result_sections(build_no_capacity())
    assert "There is no rate: the model needs 140 GiB of 80 GiB." == sections[0].warning
    assert ["Capacity", "Configuration"] == [section.title for section in sections]
