"""What a page says of a training step, and that large ones stay readable."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_structure import without_scripts
from training_examples import build_training, span_columns

from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.training_report import SPAN_KINDS, TrainingReport
from foretoken.page.block import Chart
from foretoken.page.section import Section
from foretoken.simulator.report.page import render_page, result_sections
from foretoken.simulator.report.palette import OF_MEMORY
from foretoken.simulator.report.question import list_remarks, scenario_section
from foretoken.simulator.report.training_sections import components, memory, pipeline
from foretoken.simulator.training.stream_spans import (
    assign_lanes,
    measure_streams,
    pick_stages,
    span_arrays,
)


@pytest.fixture(scope="module")
def sections() -> Mapping[str, Section]:
    """What a page has, by title."""
    return {section.title: section for section in result_sections(build_training())}


@pytest.fixture(scope="module")
def page(sections: Mapping[str, Section]) -> str:
    return render_page("llama-2-7b on 2 a100", list(sections.values()))


def test_a_page_has_every_section(sections: Mapping[str, Section]) -> None:
    builders = (pipeline, memory)
    drawn = [build({"": build_training()}) for build in builders]
    assert drawn == [sections[section.title] for section in drawn]
    assert [
        "Training step",
        "Pipeline",
        "Where the time goes",
        "Memory",
        "Memory by part",
        "Components",
        "Remarks",
        "Configuration",
    ] == list(sections)


def test_a_page_names_interval_spread_use_and_provenance(page: str) -> None:
    for text in (
        "72 to 117 ms",
        "100% analytical",
        "41.2%",
        "52.3% HFU",
        "calibration: +11.1%",
        "half 90 ms, nine of ten 93 ms",
        "11 of 17 ms on the critical stage",
        "No measurements of this interconnect.",
    ):
        assert text in page


def test_a_page_names_memory_with_its_limit_and_margin(
    page: str, sections: Mapping[str, Section]
) -> None:
    assert without_scripts(page).count('"value":"device: 80 GiB"') == 2
    table = sections["Memory"].table
    assert table is not None
    row = dict(zip([column.title for column in table.columns], table.rows[1], strict=True))
    names = ("stage", "allocated (GiB)", "reserved (GiB)", "margin (GiB)", "largest part")
    assert [row[name] for name in names] == ["1", "24.00", "30.00", "50.00", "activations"]
    parts = sections["Memory by part"].table
    assert parts is not None
    assert [column.title for column in parts.columns] == ["stage", *OF_MEMORY]
    assert parts.rows[0] == ("0", "2.00", "4.00", "12.00", "9.00", "1.00")


def test_a_stage_that_does_not_fit_stands_out() -> None:
    report = build_training()
    full = replace(report.memory[0], reserved_bytes=90 * 2**30)
    table = memory({"": replace(report, memory=(full,))}).table
    assert table is not None
    assert "-10.00, too little" in [str(cell) for cell in table.rows[0]]


def test_components_have_a_column_for_each_stage(sections: Mapping[str, Section]) -> None:
    table = sections["Components"].table
    assert table is not None
    assert ["component", "per step", "stage 0 (ms)", "stage 1 (ms)"] == [
        column.title for column in table.columns
    ]
    assert ["encoder_fwd", "12", "1.5", "1.5"] == table.rows[0]


def _spans(report: TrainingReport) -> Chart:
    (chart,) = pipeline({"": report}).pictures
    return chart


def test_a_span_of_the_pipeline_says_what_it_is() -> None:
    rows = {(row[0], row[3], row[4]): row[1:3] for row in _spans(build_training()).table.rows}
    assert (70.0, 79.0) == rows["stage 1", "backward", 1]


def test_spans_are_those_of_the_report() -> None:
    spans = [
        (0, 0, 711, "forward", 0.0, 50.0),
        (0, 0, 722, "forward", 50.0, 50.1),
        (1, 1, 733, "send_forward", 50.0, 100.0),
    ]
    report = replace(build_training(), spans=span_columns(spans))
    assert [
        ("stage 0", 0.0, 50.0, "forward", 711, 0),
        ("stage 0", 50.0, 50.1, "forward", 722, 0),
        ("stage 1, communication", 50.0, 100.0, "send forward", 733, 1),
    ] == list(_spans(report).table.rows)


def test_a_long_pipeline_shows_its_beginning_and_says_so() -> None:
    chart = _spans(build_training(num_micro_batches=3000))
    assert "the Chrome trace has all" in chart.caption
    assert "Drawn are the first 6,000 of" in chart.caption
    assert 6000 == len(chart.table.rows)


def test_remarks_have_advice_once_and_what_is_between_backticks_is_code() -> None:
    report = build_training()
    full = replace(report.memory[0], advice="`recompute: full` helps most")
    told = replace(report, memory=(full, full), notes=("a < b",))
    page = render_page("title", result_sections(told))
    assert page.count("<code>recompute: full</code> helps most") == 1
    assert "a &lt; b" in page
    reason = Feasibility(is_feasible=False, reason="too much; `recompute: full` helps most")
    assert list_remarks(replace(told, feasibility=reason)) == ["a < b"]


def test_the_configuration_names_what_differs_from_a_plain_scenario() -> None:
    scenario = {
        "model": {"name": "llama-2-7b"},
        "layout": {"tp": 2, "cp": 4},
        "context_parallel": "ring",
        "moe_imbalance_ratio": 1.0,
        "expert_tp": 0,
        "straggler_ratio": 0.02,
        "calibration": {"source": "steps.csv", "step_factor": 1.1},
    }
    report = replace(build_training(), scenario_json=json.dumps(scenario))
    table = scenario_section(report.scenario_json).table
    assert table is not None
    assert table.rows == [
        ["model", "llama-2-7b"],
        ["layout", "tp 2, cp 4"],
        ["context parallel", "ring"],
        ["straggler ratio", "0.02"],
        ["calibration", "steps.csv"],
    ]


def test_of_many_stages_some_have_bars_and_the_table_has_all() -> None:
    report = build_training(num_stages=80, num_micro_batches=2)
    assert 80 <= len(set(_spans(report).table.values("row")))
    held = memory({"": report})
    captions = [item.caption for item in held.pictures]
    assert ["16 of 80" in captions[0], "7 of 80" in captions[1]] == [True, True]
    table = held.table
    assert table is not None
    assert 80 == len(table.rows)
    assert "8 of 80 stages" in components(report).intro


def test_the_parts_of_a_stage_fill_the_step() -> None:
    spans = span_arrays(
        span_columns(
            [
                (0, 0, 0, "forward", 0.0, 4.0),
                (0, 0, 0, "send_forward", 3.0, 6.0),
                (0, 0, 0, "backward", 8.0, 9.0),
                (1, 1, 0, "forward", 6.0, 10.0),
            ]
        )
    )
    assert {
        0: {"forward": 4.0, "backward": 1.0, "exposed communication": 2.0, "waiting": 3.0},
        1: {"forward": 4.0, "waiting": 6.0},
    } == measure_streams(spans)


@given(
    spans=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(SPAN_KINDS),
            st.floats(0, 100, allow_subnormal=False),
            st.floats(0.001, 50),
        ),
        min_size=1,
    )
)
def test_the_parts_of_every_stage_add_up_to_the_step(
    spans: list[tuple[int, str, float, float]],
) -> None:
    """Whatever overlaps; and no thread of a stage does two things at once."""
    columns = span_columns(
        [(stage, stage, 0, kind, start, start + time) for stage, kind, start, time in spans]
    )
    arrays = span_arrays(columns)
    for parts in measure_streams(arrays).values():
        assert arrays.end_of_all_ms == pytest.approx(sum(parts.values()))
    until: dict[tuple[int, bool, int], float] = {}
    for index, lane in enumerate(assign_lanes(arrays)):
        thread = (int(arrays.stage[index]), bool(arrays.is_compute[index]), lane)
        assert until.get(thread, 0.0) <= arrays.start_ms[index] + 1e-3
        until[thread] = float(arrays.end_ms[index])


def test_passes_that_run_together_share_their_time() -> None:
    """DualPipe runs a forward and a backward pass at once."""
    spans = span_columns([(0, 0, 1, "forward", 0.0, 9.0), (0, 3, 0, "backward", 0.0, 9.0)])
    streams = measure_streams(span_arrays(spans))
    assert {0: {"forward": 4.5, "backward": 4.5, "waiting": 0.0}} == streams
    chart = _spans(TrainingReport(step_time_ms=9.0, spans=spans))
    assert ["forward", "backward"] == chart.table.values("kind")


def test_few_stages_are_all_picked_and_many_evenly() -> None:
    assert [0, 1, 2] == pick_stages([0, 1, 2], 3)
    assert [0, 21, 42, 63] == pick_stages(range(64), 4)
