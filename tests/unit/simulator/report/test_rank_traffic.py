"""The heat map of who sends how much to whom."""

from dataclasses import replace
from pathlib import Path

import pytest
from training_examples import build_training

from foretoken.domain.results.training_report import TrafficColumns, TrainingReport
from foretoken.domain.units import GIB
from foretoken.page.section import Section
from foretoken.simulator.report.page import result_sections
from foretoken.simulator.report.rank_traffic import (
    traffic_map,
    traffic_section,
    write_traffic_figure,
)

# Two cells of four devices; what goes along tp stays in the first.
_TRAFFIC = TrafficColumns(
    axis=("pp", "tp", "pp"),
    source=(0, 0, 4),
    target=(4, 0, 0),
    num_devices=(4, 4, 4),
    bytes=(GIB, 8 * GIB, 3 * GIB),
)


@pytest.fixture(scope="module")
def section() -> Section:
    report = replace(build_training(), num_devices=8, traffic=_TRAFFIC)
    found = traffic_section(report)
    assert found is not None
    return found


def test_cells_are_found_again() -> None:
    num_devices, sent = traffic_map(_TRAFFIC, 8)
    assert num_devices == 4
    assert list(sent) == ["all", "tp", "pp"]
    assert sent["all"].tolist() == [[8 * GIB, GIB], [3 * GIB, 0.0]]


def test_the_table_counts_bytes_by_axis(section: Section) -> None:
    table = section.table
    assert table is not None
    assert table.texts() == [
        ["tp", "8", "1", "8", "1"],
        ["pp", "4", "0.5", "3", "2"],
        ["all", "12", "1.5", "8", "3"],
    ]


def test_the_section_draws_all_and_each_axis(section: Section) -> None:
    whole, tp, pp = section.pictures
    assert "4 neighbours share a cell" in whole.caption
    assert "What 4 devices together send in one step" == whole.title
    assert [(0, 0, 8.0), (0, 4, 1.0), (4, 0, 3.0)] == list(whole.table.rows)
    assert tp.title.endswith("along tp")
    assert [(0, 4, 1.0), (4, 0, 3.0)] == list(pp.table.rows)


def test_one_axis_is_drawn_once() -> None:
    one = TrafficColumns(axis=("dp",), source=(0,), target=(1,), num_devices=(1,), bytes=(5.0,))
    found = traffic_section(replace(build_training(), num_devices=2, traffic=one))
    assert found is not None
    (chart,) = found.pictures
    assert "What each device sends in one step" == chart.title


def test_a_step_on_one_device_has_no_such_section() -> None:
    assert traffic_section(replace(build_training(), traffic=TrafficColumns())) is None


def test_a_page_has_the_section() -> None:
    step = TrainingReport(num_devices=8, step_time_ms=1.0, traffic=_TRAFFIC)
    assert "Traffic between devices" in [item.title for item in result_sections(step)]


def test_a_picture_of_its_own_is_written(tmp_path: Path) -> None:
    path = tmp_path / "traffic.svg"
    write_traffic_figure(path, replace(build_training(), num_devices=8, traffic=_TRAFFIC))
    assert "sending device" in path.read_text(encoding="utf-8")
