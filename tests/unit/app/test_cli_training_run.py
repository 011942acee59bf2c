"""`simulate run`, `list prices` and `list datasets`: what they print and what they write."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

_SCENARIO = """\
model: tiny-llama
device: a100_sxm_80
topology: a100_dgx
layout: {dp: 2}
sequence_length: 128
global_batch_size: 16
"""

Run = Callable[..., Result]


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(_SCENARIO)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def invoke(*words: object) -> Result:
        return CliRunner().invoke(app, ["--home", str(tmp_path / "home"), *map(str, words)])

    return invoke


def test_a_run_prints_days_money_and_a_target(run: Run, scenario: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    result = run(
        *("simulate", "run", scenario, "--tokens", "1e12", "--price-list", "coreweave", "--spot"),
        *("--set", "failures.device_mtbf_hours=100", "--set", "failures.checkpoint_s=10"),
        *("--set", "layout.dp=4", "--target-days", "1", "--html", page),
    )
    assert result.exit_code == 3, result.output
    for text in (
        "1,000 billion tokens on",
        "tokens/s per GPU, in a step",
        "days, expected",
        "cost (USD)",
        "coreweave",
        "spot",
        "steps done again",
        "1 days",
    ):
        assert text in result.output
    written = page.read_text()
    for text in ("Where the days go", "Checkpoints", "More or fewer devices", "coreweave"):
        assert text in written


def test_json_has_what_options_and_changes_say(run: Run, scenario: Path) -> None:
    """8,192 tokens are two steps of 2 sites x 16 samples x 128 tokens."""
    result = run(
        *("--output", "json", "simulate", "run", scenario, "--tokens", "8192"),
        *("--set", "sites.num_sites=2", "--set", "sites.bytes_per_s=1e9"),
        *("--set", "prices.usd_per_hour=2"),
    )
    report = json.loads(result.stdout)
    assert (report["num_steps"], report["num_devices"], report["usd_per_hour"]) == (2, 4, 2)
    request = json.loads(report["request_json"])
    assert request["sites"]["bytes_per_s"] == 1e9
    assert request["scenario"]["layout"]["dp"] == 2


def test_a_file_may_be_the_whole_request(run: Run, scenario: Path, tmp_path: Path) -> None:
    """And the request of a report is one: it is answered alike."""
    request = tmp_path / "run.yaml"
    request.write_text(
        f"scenario: {scenario.name}\nnum_tokens: 1e9\n"
        "failures: {device_mtbf_hours: 100, checkpoint_s: 5}\nprices: {usd_per_hour: 2}\n"
    )
    words = ("--set", "failures.checkpoint_s=7", "--target-days", "30")
    first = json.loads(run("--output", "json", "simulate", "run", request, *words).stdout)
    again = tmp_path / "again.yaml"
    again.write_text(first["request_json"])
    second = json.loads(run("--output", "json", "simulate", "run", again).stdout)
    assert (first["checkpoint_s"], first["usd_per_hour"]) == (7, 2)
    assert first["target_devices"] > 0
    own = {"request_json": "", "job_id": ""}
    assert {**second, **own} == {**first, **own}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "by one of them: --tokens 1e12, or --dataset slimpajama"),
        (("--tokens", "1e9", "--dataset", "pile"), "by one of them: --tokens 1e12"),
        (("--tokens", "-1"), "--tokens: must be positive"),
        (("--dataset", "piel"), "did you mean pile"),
        (("--tokens", "1e9", "--price-list", "lamda"), "did you mean lambda"),
        (("--tokens", "1e9", "--price-list", "gcp"), "gcp has no price of a100_sxm_80"),
        (("--tokens", "1e9", "--set", "failures.mtbf=1"), "failures.mtbf: unknown key"),
        (("--tokens", "1e9", "--set", "layout.tq=2"), "layout.tq: unknown key"),
        (("--tokens", "1e9", "--set", "sites.num_sites=2"), "several sites need a link"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    run: Run, scenario: Path, words: tuple[str, ...], message: str
) -> None:
    result = run("simulate", "run", scenario, *words)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


def test_lists_have_prices_and_datasets_with_their_sources(run: Run) -> None:
    prices = json.loads(run("--output", "json", "list", "prices").stdout)
    assert {"lambda", "aws", "gcp"} <= {row["list"] for row in prices}
    datasets = json.loads(run("--output", "json", "list", "datasets").stdout)
    assert {"pile", "llama-3"} <= {row["dataset"] for row in datasets}
    assert all(row["source"] for row in (*prices, *datasets))
