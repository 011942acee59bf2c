"""`search internevo`: InternEvo's words in, its terms and the counts out."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

Run = Callable[..., Result]
_QUESTION = ("--model", "tiny-llama", "--device", "a100_sxm_80", "--seq_len", 512)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def invoke(*words: object) -> Result:
        return CliRunner().invoke(
            app, ["--home", str(tmp_path / "home"), *map(str, words)], env={"COLUMNS": "200"}
        )

    return invoke


def _ask(run: Run, *words: object) -> Result:
    size = ("--world_size", 4, "--global_batch_size", 16 * 512)
    return run("search", "internevo", *size, *_QUESTION, *words)


def test_every_point_is_counted_and_the_best_is_said_in_its_terms(run: Run, tmp_path: Path) -> None:
    """Two ranks, one micro batch size each: counted by hand.

    Two samples on two ranks. pp 1, sp 1: one sample a rank; isp has wp 1 with zo 1 and 2, wp 2
    with zo 1; msp and fsp have zo 1 and 2. pp 1, sp 2: two samples, so two sizes; isp as before,
    msp and fsp zo 1. pp 2, sp 1: sizes of one sample alone, all with one rank. Twice with
    recomputation.
    """
    size = ("--world-size", 2, "--global-batch-size", 2 * 512)
    table = tmp_path / "all.csv"
    result = run("search", "internevo", *size, *_QUESTION, "--finalists", 0, "--export", table)
    assert result.exit_code == 0, result.output
    num_points = 2 * ((3 + 2 + 2) + 2 * (3 + 1 + 1) + (1 + 1 + 1))
    assert (
        f"{num_points} tried: {num_points} can run, {num_points} have the memory" in result.output
    )
    for word in ("algo", "micro_bsz", "micro_num", "ckpt", "tgs", "best of each"):
        assert word in result.output
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == num_points
    assert {row["weight_parallel"] for row in rows} == {"isp", "msp", "fsp"}


def test_json_has_counts_and_terms(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        [
            *("--home", str(tmp_path / "home"), "--output", "json", "search", "internevo"),
            *("--world_size", "4", "--global_batch_size", str(16 * 512), "--finalists", "0"),
            *map(str, _QUESTION),
        ],
    )
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["counts"]["num_tried"] >= answer["counts"]["num_legal"]
    best = answer["best"][0]
    dp = 4 // (best["pp"] * best["sp"])
    assert best["micro_bsz"] * best["micro_num"] * dp == 16
    assert best["algo"] in ("isp", "msp", "fsp")


def test_the_best_strategy_is_drawn(run: Run, tmp_path: Path) -> None:
    picture, page = tmp_path / "traffic.svg", tmp_path / "report.html"
    result = _ask(run, "--finalists", 1, "--heat-map", picture, "--page", page)
    assert result.exit_code == 0, result.output
    assert "sending device" in picture.read_text(encoding="utf-8")
    assert "tiny-llama on 4 a100_sxm_80" in page.read_text(encoding="utf-8")


def test_without_a_finalist_there_is_no_heat_map(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "traffic.svg"
    result = _ask(run, "--finalists", 0, "--heat-map", picture)
    assert result.exit_code == 0, result.output
    assert "no heat map" in result.output
    assert not picture.exists()


def test_a_batch_that_is_no_multiple_is_refused(run: Run) -> None:
    result = run("search", "internevo", "--world_size", 4, "--global_batch_size", 1000, *_QUESTION)
    assert result.exit_code == 1
    assert "no multiple of the sequence length, 512" in result.output
