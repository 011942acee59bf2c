"""What commands print for programs: stable keys, errors as JSON, the time that is left."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from foretoken.app.cli.data_output import TimeLeft, key_of
from foretoken.app.cli.main import app
from foretoken.domain.metrics.registry import METRICS


def _invoke(home: str, *words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["--home", home, "--no-starter", *words])
    return done.exit_code, done.stdout, done.stderr


def test_keys_are_those_of_the_registry_else_names() -> None:
    titles = [metric.title for metric in METRICS.values()]
    alone = {name: one.title for name, one in METRICS.items() if titles.count(one.title) == 1}
    assert list(alone) == [key_of(title) for title in alone.values()]
    words = ("already there", "before (MiB)", "took (µs)", "90 % interval")
    found = [key_of(text) for text in words]
    assert ["already_there", "before_mib", "took_us", "90_percent_interval"] == found


def test_a_list_is_csv_with_a_row_each(tmp_path: str) -> None:
    status, text, _ = _invoke(str(tmp_path), "--output", "csv", "list", "devices")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert (0, True) == (status, "h100_sxm" in {next(iter(row.values())) for row in rows})


def test_single_values_of_a_result_are_one_row(home_path: str) -> None:
    asked = ("--output", "csv", "predict", "gemm", "m=64", "n=64", "k=64", "--device", "h100_sxm")
    status, text, _ = _invoke(home_path, *asked)
    (row,) = csv.DictReader(io.StringIO(text))
    assert (0, True) == (status, float(row["latency_us"]) > 0)
    assert "gemm" in row["echo.question"]


@pytest.mark.parametrize("output", ["json", "csv"])
def test_an_error_is_json_where_results_are_data(home_path: str, output: str) -> None:
    asked = ("--output", output, "predict", "gemm", "m=64", "--device", "h100_sxm")
    status, text, said = _invoke(home_path, *asked)
    problem = json.loads(said)
    assert (1, "", "INVALID_REQUEST") == (status, text, problem["reason"])
    assert {"field", "detail"} == set(problem["errors"][0])
    assert "error (invalid_request)" in _invoke(home_path, *asked[2:])[2]


def test_the_time_left_is_told_from_what_was_done_here() -> None:
    left = TimeLeft()
    told = [left.describe(ratio, now_s) for ratio, now_s in ((0.5, 0.0), (0.51, 1.0), (0.6, 10.0))]
    assert ["", "", "about 40 s left"] == told
    assert "about 5 min left" == _left_at(0.1, 33.0)
    assert "about 2.5 h left" == _left_at(0.1, 1000.0)
    assert "" == _left_at(1.0, 5.0)


def _left_at(ratio: float, after_s: float) -> str:
    left = TimeLeft()
    left.describe(0.0, 0.0)
    return left.describe(ratio, after_s)
