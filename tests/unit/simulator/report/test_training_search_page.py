"""Pages of training searches: self-contained, well-formed, every strategy counted."""

import re
from dataclasses import replace

import pytest
from page_structure import charts_of, check_self_contained, parse_page, without_scripts
from training_search_reports import build_placed_search, build_training_search

from foretoken.domain.metrics.number_text import describe_step
from foretoken.domain.requests.training_search import (
    SpaceCell,
    StrategyColumns,
    StrategyFinalist,
    StrategySensitivity,
    TrainingSearchReport,
)
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.report.fronts import training_fronts_section
from foretoken.simulator.report.page import render_page, result_sections
from foretoken.simulator.report.search_candidates import list_rows, ranked_rows
from foretoken.simulator.report.training_search_rows import (
    best_by_objective,
    best_of_layouts,
    best_table,
    closed_form_error,
    describe_choices,
    describe_devices,
    describe_search,
    describe_verdict,
    figure_bounds,
    find_best,
    other_ties,
    report_rows,
    split_step,
    strategies_per_s,
)
from foretoken.simulator.report.training_search_space import maps_section, placed_stages

_HOSTILE = ' <b>&"$x$'


def _page(report: TrainingSearchReport) -> str:
    return without_scripts(render_page("llama", result_sections(report)))


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {
        "search": _page(build_training_search()),
        "hostile": _page(build_training_search(_HOSTILE)),
        "placed": _page(build_placed_search()),
    }


@pytest.mark.parametrize("name", ["search", "hostile", "placed"])
def test_a_page_fetches_nothing_and_is_well_formed(pages: dict[str, str], name: str) -> None:
    check_self_contained(pages[name])


def test_a_page_answers_first_and_keeps_the_request_last(pages: dict[str, str]) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", pages["search"])
    expected = [
        "The best strategy",
        "Every strategy, counted",
        "Ranking",
        "The best by each measure",
        "Ties",
        "Throughput, memory and cost",
        "Where the best are",
        "Simulated event by event",
        "What if",
        "Remarks",
        "Request",
        "Scenarios of the finalists",
    ]
    assert expected == titles
    placed = re.findall(r"<h2>(.*?)</h2>", pages["placed"])
    assert [*expected[:4], "Placements", *expected[4:]] == placed


def test_every_count_tie_finalist_and_reason_is_there(pages: dict[str, str]) -> None:
    report = build_training_search()
    text = " ".join(parse_page(pages["search"]).text.split())
    for words in (
        "Of 1,000 strategies 66 can run, 51 have the memory and 3 were simulated event by event",
        f"It ties, within the error of the estimates, with {report.ties[1]}.",
        "tp 64 does not divide the 32 heads",
        "stage 0 needs 94.1 GiB of 80 GiB",
        "stage 0 needs 81.0 GiB of 80 GiB",
        "another layout",
        "no measurements of this interconnect",
    ):
        assert words in text
    for finalist in report.finalists:
        assert finalist.name in text
    left = charts_of(pages["search"])["What is left of the space"]["table"]["rows"]
    assert ["points of the space", 1000, 1.0] == left[0]
    assert ["can run", 66, 0.066] == left[1]


def test_names_are_text_and_nothing_else(pages: dict[str, str]) -> None:
    """A name with tags, ampersands or dollars reads as it stands, in tables and pictures."""
    page = pages["hostile"]
    assert "<b>" not in page
    best = build_training_search(_HOSTILE).best["throughput_per_gpu"]
    # In the overview, a table, the ties and the finalists' bars at least.
    assert parse_page(page).text.count(best) >= 4


def test_each_listed_strategy_is_a_mark_of_both_fronts(pages: dict[str, str]) -> None:
    report = build_training_search()
    for title in ("Throughput against free memory", "Throughput of the cluster against cost"):
        rows = charts_of(pages["search"])[title]["table"]["rows"]
        assert {row[0] for row in rows} == set(report.candidates.name)


def test_what_is_not_priced_has_no_cost() -> None:
    report = build_training_search()
    free = (0.0,) * len(report.candidates.name)
    candidates = replace(report.candidates, usd_per_step=free, usd_per_billion_tokens=free)
    page = _page(replace(report, candidates=candidates))
    assert "Throughput of the cluster against cost" not in page
    text = parse_page(page[: page.index("<h2>Request</h2>")]).text
    assert "USD" not in text
    assert "least cost" not in text


def test_nothing_fits_is_said_and_the_reasons_stay() -> None:
    report = replace(
        build_training_search(),
        num_fitting=0,
        candidates=StrategyColumns(),
        finalists=(),
        sensitivities=(),
        cells=(),
        best={},
        ties=(),
        notes=(),
    )
    sections = result_sections(report)
    assert "No strategy of this space can run and has the memory" in sections[0].warning
    titles = [section.title for section in sections]
    assert titles == ["The best strategy", "Every strategy, counted", "Request"]


def test_a_change_that_has_nothing_to_compare_with_is_listed_and_not_drawn() -> None:
    """What fits on more memory alone is no loss against the nothing of today."""
    changed = StrategySensitivity(
        change="memory capacity +50 %", best="tp1 pp8", throughput_ratio=0.0, num_fitting=1
    )
    report = build_training_search()
    drawn, listed = (
        next(section for section in result_sections(each) if section.title == "What if")
        for each in (report, replace(report, sensitivities=(changed,)))
    )
    assert (1, 0) == (len(drawn.pictures), len(listed.pictures))
    assert listed.table is not None
    assert [("memory capacity +50 %", "")] == [tuple(row[:2]) for row in listed.table.rows]


def test_a_search_of_nothing_is_a_page() -> None:
    titles = [section.title for section in result_sections(TrainingSearchReport())]
    assert titles == ["The best strategy", "Every strategy, counted", "Request"]


def test_the_same_report_gives_the_same_page(pages: dict[str, str]) -> None:
    assert pages["search"] == _page(build_training_search())


def test_parts_of_a_step_add_up_to_it() -> None:
    report = TrainingReport(
        step_time_ms=100.0,
        step_time_ms_by_group={"gemm": 50.0, "optimizer": 8.0, "bubble": 12.0, "collective": 30.0},
        exposed_ms_by_axis={"tp": 20.0, "dp": 10.0},
    )
    parts = {
        "computation": 50.0,
        "exposed communication": 30.0,
        "bubble": 12.0,
        "optimizer": 8.0,
    }
    assert parts == split_step(report)


def test_bounds_of_throughput_come_from_those_of_the_step() -> None:
    """Twice as long a step is half the throughput."""
    row = {
        "tokens_per_s_per_gpu": 1000.0,
        "step_time_ms": 50.0,
        "step_time_low_ms": 25.0,
        "step_time_high_ms": 100.0,
    }
    assert figure_bounds(row) == (500.0, 2000.0)
    assert figure_bounds(row | {"step_time_low_ms": 0.0}) == (1000.0, 1000.0)


def test_the_closed_form_is_held_to_the_simulation() -> None:
    report = TrainingReport(step_time_ms=200.0)
    finalist = StrategyFinalist(candidate=0, name="a", closed_form_ms=190.0, report=report)
    assert closed_form_error(finalist) == pytest.approx(-0.05)
    assert closed_form_error(replace(finalist, report=TrainingReport())) == 0.0


def test_a_row_that_is_the_best_by_several_measures_is_there_once() -> None:
    columns = StrategyColumns(name=("a", "b"), rank=(1, 2), usd_per_step=(0.0, 1.0))
    rows = ranked_rows(list_rows(columns))
    best = {"throughput_per_gpu": "a", "step_time": "a", "cost": "b", "memory_headroom": "lost"}
    found = best_by_objective(TrainingSearchReport(best=best), rows)
    assert [("tokens/s per GPU, shortest step", "a"), ("least cost per token", "b")] == [
        (measures, row["name"]) for measures, row in found
    ]


def test_what_has_no_rank_is_left_out_and_the_others_are_in_order() -> None:
    columns = StrategyColumns(name=("a", "b", "c", "d"), rank=(0, 1, 1, 3))
    found = ranked_rows(list_rows(replace(columns, rank=(0, 3, 1, 1))))
    assert [("c", 1), ("d", 1), ("b", 3)] == [(row["name"], row["rank"]) for row in found]
    assert ["b", "c", "d"] == [row["name"] for row in ranked_rows(list_rows(columns))]


def test_the_best_is_what_the_simulation_says() -> None:
    """It may be another of the ties than that which the closed form has first."""
    columns = StrategyColumns(name=("a", "b", "c"), rank=(1, 2, 3))
    report = TrainingSearchReport(
        best={"step_time": "b"},
        ties=("a",),
        candidates=columns,
        request_json='{"objective": "step_time"}',
    )
    rows = report_rows(report)
    assert ["=1", "=2", "3"] == [row["place"] for row in rows]
    best = find_best(report, rows)
    assert (best["name"], other_ties(report, best)) == ("b", ["a"])
    assert find_best(TrainingSearchReport(), rows)["name"] == "a"


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("memory", "out of memory"),
        ("redundant: zero_stage", "the same as another: zero stage"),
        ("heads", "heads not divided"),
        ("global_batch_size", "batch not divided"),
        ("a_new_rule", "a new rule"),
    ],
)
def test_verdicts_are_told_in_words(verdict: str, words: str) -> None:
    assert words == describe_verdict(verdict)


def test_of_each_layout_the_best_is_kept() -> None:
    """Whatever the micro batch and the recomputation; another degree is another layout."""
    columns = StrategyColumns(
        name=("a", "b", "c", "d"),
        rank=(1, 2, 3, 4),
        tp=(2, 2, 4, 2),
        micro_batch_size=(1, 2, 1, 1),
        recompute=("none", "full", "none", "none"),
        placement=("", "", "", "a30,a30"),
    )
    assert ["a", "c", "d"] == [
        row["name"] for row in best_of_layouts(ranked_rows(list_rows(columns)))
    ]


def test_choices_are_told_where_there_are_any() -> None:
    (row,) = list_rows(
        StrategyColumns(
            name=("a",),
            rank=(1,),
            pp=(4,),
            virtual_stages=(2,),
            micro_batch_size=(2,),
            num_micro_batches=(1,),
            sequence_parallel=(True,),
            zero_stage=(3,),
            shard_degree=(8,),
            overlap=("data",),
            recompute=("full",),
            weight_parallel=("isp",),
            weight_degree=(4,),
            pipeline_schedule=("interleaved",),
        )
    )
    expected = (
        "1 micro batch of 2, 2 chunks a rank, interleaved, sequence parallel, ZeRO 3 over 8 ranks,"
        " overlap data, recompute full, isp over 4 ranks"
    )
    assert expected == describe_choices(row)


def test_a_whole_run_is_of_whole_steps() -> None:
    report = build_training_search()
    of_step = {"global_batch_size": 10, "step_time_ms": 86_400.0, "usd_per_step": 0.5}
    rows = [{**row, **of_step} for row in report_rows(report)]
    # Two steps of ten samples of 4,096 tokens, and one begun.
    table = best_table(report, rows, 2.0 * 10 * 4096 + 1)
    figures = [table.values(name) for name in ("num_steps", "days", "usd")]
    assert {(3, 0.003, 1.5)} == set(zip(*figures, strict=True))
    page = render_page("run", result_sections(report, num_tokens=2.0e9))
    text = parse_page(page).text
    # 2e9 / (64 * 4096) and one begun.
    assert "7,630" in text
    assert "USD in all" in text


def test_colours_tell_clusters_apart_while_they_are_few() -> None:
    """More clusters than colours are distinguished by device, more devices not at all."""

    def legend(num_clusters: int, num_devices: int) -> list[object]:
        names = [f"s{place}" for place in range(num_clusters)]
        columns = StrategyColumns(
            name=names,
            rank=range(1, num_clusters + 1),
            device=[f"d{place % num_devices}" for place in range(num_clusters)],
            num_devices=[8 * (place + 1) for place in range(num_clusters)],
            margin_bytes=[2.0**30] * num_clusters,
            tokens_per_s_per_gpu=[1000.0] * num_clusters,
        )
        rows = report_rows(TrainingSearchReport(candidates=columns))
        (chart,) = training_fronts_section(rows, num_clusters).pictures
        return sorted(set(chart.table.values("group")))

    assert legend(2, 1) == ["16 d0", "8 d0"]
    assert legend(9, 3) == ["d0", "d1", "d2"]
    assert legend(9, 9) == ["strategies"]


def test_long_steps_are_told_in_seconds() -> None:
    assert ("9,999 ms", "12 s") == (describe_step(9999.0), describe_step(12_000.0))


def test_devices_of_a_placement_are_counted_in_nodes() -> None:
    columns = StrategyColumns(
        name=("a", "b"),
        rank=(1, 2),
        device=("a30", "2 a30 + 1 a100"),
        num_devices=(1024, 24),
        placement=("", "2 x a30,1 x a100"),
    )
    expected = ["1,024 a30", "24 devices in nodes: 2 a30 + 1 a100"]
    assert expected == [describe_devices(row) for row in ranked_rows(list_rows(columns))]


def test_strategies_are_counted_by_the_second_of_the_closed_form() -> None:
    assert strategies_per_s(TrainingSearchReport(num_points=3000, closed_form_s=1.5)) == 2000.0
    assert strategies_per_s(TrainingSearchReport(num_points=3000)) == 0.0


def test_a_search_is_named_by_model_and_cluster() -> None:
    assert describe_search(build_training_search()) == "llama-2-7b on 16 a100_sxm_80"
    placed = describe_search(build_placed_search())
    assert placed == "llama-2-7b on 2 x 4 a100_sxm_80 + 1 x 8 h100_sxm"


@pytest.mark.parametrize(
    ("placement", "layers", "stages"),
    [
        ("2 x a,b", "8,9,15", [("a", 8), ("a", 9), ("b", 15)]),
        # Two chunks a rank go round the ranks.
        ("a,b", "4,5,6,7", [("a", 10), ("b", 12)]),
        ("a,b", "", [("a", 1), ("b", 1)]),
    ],
)
def test_placed_stages_are_as_wide_as_their_layers(
    placement: str, layers: str, stages: list[tuple[str, int]]
) -> None:
    assert stages == placed_stages({"placement": placement, "stage_layers": layers})


def test_boxes_have_the_best_of_what_fits_in_order() -> None:
    """Where none fits a box has no number; where none can run there is no box."""
    cell = SpaceCell(row_axis="tp", column_axis="pp", row="2", column="10", num_legal=3)
    cells = (
        replace(cell, row="16", tokens_per_s_per_gpu=30.0, num_fitting=2, best="by b"),
        replace(cell, tokens_per_s_per_gpu=10.0, num_fitting=1, best="by a"),
        replace(cell, row="2", column="2"),
        replace(cell, row="4", num_legal=0),
    )
    (chart,) = maps_section(replace(build_training_search(), cells=cells)).pictures
    assert [
        ("2", "2", None, 0, 3, ""),
        ("2", "10", 10.0, 1, 3, "by a"),
        ("16", "10", 30.0, 2, 3, "by b"),
    ] == list(chart.table.rows)
