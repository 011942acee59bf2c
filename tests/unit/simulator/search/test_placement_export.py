"""Strategies written with the columns of FASOP."""

import csv
import json
from pathlib import Path

import pytest
from placement_fakes import SheetPredictor, build_request

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.placement.export import COLUMNS, write_fasop
from foretoken.simulator.search.training.search import search_training


@pytest.fixture(scope="module")
def report() -> TrainingSearchReport:
    request = build_request(has_subsets=True, tp=(4,), micro_batch_sizes=(1,))
    return search_training(request, SheetPredictor(), InlineContext())


def test_columns_are_those_of_fasop(shared_data: Path) -> None:
    path = shared_data / "fasop" / "results" / "llama70b.csv"
    with path.open(encoding="utf-8") as file:
        assert list(COLUMNS) == next(csv.reader(file))


def test_rows_hang_together(report: TrainingSearchReport, tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    tokens = 1000.5 * 32 * 4096
    write_fasop(report, path, num_tokens=tokens)
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(report.candidates.name) == len(rows)
    assert [str(place) for place in range(1, len(rows) + 1)] == [row["rank"] for row in rows]
    speeds = [float(row["throughput(samples/s)"]) for row in rows]
    assert sorted(speeds, reverse=True) == speeds
    for row in rows:
        step_s = float(row["step_time(s)"])
        index = int(row["index"])
        assert row["iterations"] == "1001"
        assert float(row["total_time(s)"]) == pytest.approx(1001 * step_s)
        assert float(row["total_time(h)"]) == pytest.approx(1001 * step_s / 3600)
        assert float(row["cost($)"]) == pytest.approx(1001 * float(row["price_per_step($)"]))
        assert float(row["throughput(samples/s)"]) == pytest.approx(32 / step_s)
        assert len(json.loads(row["partition_layers"])) == int(row["pp"])
        assert step_s == pytest.approx(report.candidates.step_time_ms[index] / 1e3)
        nodes = dict(item.split(":") for item in row["gpu_cluster"].split(","))
        assert report.candidates.num_devices[index] == 8 * sum(map(int, nodes.values()))
        assert set(row["partition"]) <= set("[], 0123456789")


def test_json_lines_begin_with_how_many_follow(
    report: TrainingSearchReport, tmp_path: Path
) -> None:
    path = tmp_path / "result.jsonl"
    write_fasop(report, path)
    meta, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert meta == {
        "type": "meta",
        "total_count": len(lines),
        "gbs": 32,
        "cluster": {"a100_sxm_80": 1, "a40": 2},
    }
    assert len(report.candidates.name) == len(lines)
    for line in lines:
        assert line["iterations"] == 1
        assert line["total_time_seconds"] == line["step_time"]
        assert line["cost"] == line["price_per_step"]
        assert line["is_oom"] is False


def test_an_empty_report_is_a_header(tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    write_fasop(TrainingSearchReport(), path)
    assert path.read_text(encoding="utf-8").split() == [",".join(COLUMNS)]


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"\.csv or \.jsonl"):
        write_fasop(TrainingSearchReport(), tmp_path / "result.xlsx")
