"""`search internevo`: InternEvo's words in, its terms and the counts out."""

import csv
import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

Run = Callable[..., Result]
_QUESTION = ("--model", "tiny-llama", "--device", "a100_sxm_80", "--seq_len", 512)


@pytest.fixture
def run(home_path: str) -> Run:
    def invoke(*words: object) -> Result:
        return CliRunner().invoke(
            app, ["--home", home_path, *map(str, words)], env={"COLUMNS": "200"}
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

    InternEvo's simulator keeps the one micro batch of its first point, and so refuses pp 1, sp 2
    with one sample a micro batch, which are two.
    """
    size = ("--world-size", 2, "--global-batch-size", 2 * 512)
    table = tmp_path / "all.csv"
    result = run("search", "internevo", *size, *_QUESTION, "--finalists", 0, "--export", table)
    assert result.exit_code == 0, result.output
    num_points = 2 * ((3 + 2 + 2) + 2 * (3 + 1 + 1) + (1 + 1 + 1))
    assert (
        f"{num_points} tried: {num_points} can run, {num_points} have the memory" in result.output
    )
    num_refused = 2 * (3 + 1 + 1)
    own = rf"InternEvo's simulator +│ +{num_points} +│ +{num_points - num_refused} +│"
    assert re.search(own, result.output)
    assert f"refuses {num_refused} points that InternEvo accepts" in result.output
    assert "the lowest tgs as the best" in result.output
    for word in ("algo", "micro_bsz", "micro_num", "ckpt", "tgs", "best of each"):
        assert word in result.output
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == num_points
    assert {row["weight_parallel"] for row in rows} == {"isp", "msp", "fsp"}


def test_a_model_that_its_simulator_does_not_know_is_answered_without_it(run: Run) -> None:
    question = ("--model", "mixtral-8x7b", "--device", "a100_sxm_80", "--seq_len", 512)
    size = ("--world-size", 16, "--global-batch-size", 16 * 512)
    result = run("search", "internevo", *size, *question, "--finalists", 0)
    assert result.exit_code == 0, result.output
    assert "no counts of InternEvo's simulator" in result.output
    assert "can run" in result.output


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
    own = answer["internevo"]
    assert own["num_tried"] == answer["counts"]["num_tried"]
    assert own["num_legal"] + own["num_refused"] == answer["counts"]["num_legal"]
    assert own["num_fitting"] <= own["num_fitting_unrefused"]
    best = answer["best"][0]
    dp = 4 // (best["pp"] * best["sp"])
    assert best["micro_bsz"] * best["micro_num"] * dp == 16
    assert best["algo"] in ("isp", "msp", "fsp")


def test_the_best_strategy_is_drawn(run: Run, tmp_path: Path) -> None:
    picture, page = tmp_path / "traffic.svg", tmp_path / "report.html"
    result = _ask(run, "--finalists", 1, "--heat-map", picture, "--page", page)
    assert result.exit_code == 0, result.output
    assert "sending device" in picture.read_text(encoding="utf-8")
    written = html.unescape(page.read_text(encoding="utf-8"))
    assert "tiny-llama on 4 a100_sxm_80" in written
    assert "Counted by InternEvo's simulator" in written


def test_without_a_finalist_there_is_no_heat_map(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "traffic.svg"
    result = _ask(run, "--finalists", 0, "--heat-map", picture)
    assert result.exit_code == 0, result.output
    assert "no heat map" in result.output
    assert not picture.exists()


@pytest.mark.parametrize(("option", "ending"), [("--heat-map", ".html"), ("--page", ".pdf")])
def test_an_ending_that_cannot_be_written_is_refused_before_the_search(
    run: Run, tmp_path: Path, option: str, ending: str
) -> None:
    result = _ask(run, option, tmp_path / f"picture{ending}")
    assert result.exit_code == 2
    assert "must end in" in result.output
    assert "tried" not in result.output


def test_a_batch_that_is_no_multiple_is_refused(run: Run) -> None:
    result = run("search", "internevo", "--world_size", 4, "--global_batch_size", 1000, *_QUESTION)
    assert result.exit_code == 1
    assert "no multiple of the sequence length, 512" in result.output
