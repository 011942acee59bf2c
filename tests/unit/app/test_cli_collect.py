"""`foretoken collect` and `validate` as a shell sees them, against a real server."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from streaming_server import Behaviour, StreamingServer
from typer.testing import CliRunner

from foretoken.app.cli.main import app
from foretoken.app.cli.request_options import with_option_groups
from foretoken.domain.requests.option import describe, option
from foretoken.simulator.validation.measured_run import load_run


def _invoke(*words: str) -> Any:
    return CliRunner().invoke(app, words)


def _collect(server: StreamingServer, out: Path, *words: str) -> Any:
    return _invoke(
        *("--output", "json", "collect", "--url", server.url, "--model", "tiny"),
        *("--out", str(out), *words),
    )


def test_a_rate_is_collected_and_read_back(tmp_path: Path) -> None:
    words = ("--rate", "100", "--num-requests", "4", "--input-tokens", "9", "--output-tokens", "3")
    with StreamingServer() as server:
        outcome = _collect(server, tmp_path / "run.json", *words)
        lengths = [len(body["prompt"]) for body in server.bodies]
    assert 0 == outcome.exit_code, outcome.stderr
    assert (4, 0) == tuple(
        json.loads(outcome.stdout)[name] for name in ("num_completed", "num_failed")
    )
    # One more for the warm-up, which is not recorded.
    assert [9] * 5 == lengths
    run = load_run(tmp_path / "run.json")
    assert [(9, 3)] * 4 == [(r.num_prefill_tokens, r.num_decode_tokens) for r in run.completed]
    assert server.url not in (tmp_path / "run.json").read_text()


def test_a_closed_loop_is_collected(tmp_path: Path) -> None:
    with StreamingServer(behaviours=[Behaviour(delay_s=0.002)]) as server:
        words = ("--concurrency", "2", "--num-requests", "6", "--output-tokens", "3")
        outcome = _collect(server, tmp_path / "run.json", *words)
        assert 2 == server.num_under_way_max
    assert 0 == outcome.exit_code, outcome.stderr
    assert 2 == load_run(tmp_path / "run.json").concurrency


def test_a_trace_is_collected(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,2\n0.02,7,3\n")
    with StreamingServer() as server:
        outcome = _collect(server, tmp_path / "run.json", "--trace", str(trace))
    assert 0 == outcome.exit_code, outcome.stderr
    run = load_run(tmp_path / "run.json")
    assert [(5, 2), (7, 3)] == [(r.num_prefill_tokens, r.num_decode_tokens) for r in run.completed]


def test_a_trace_may_name_classes_that_nobody_knows(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens,slo_class\n0,5,2,chat\n0,7,3,\n")
    with StreamingServer() as server:
        outcome = _collect(server, tmp_path / "run.json", "--trace", str(trace))
    assert 0 == outcome.exit_code, outcome.stderr
    run = load_run(tmp_path / "run.json")
    assert 2 == len(run.completed)
    assert "trace.csv" == run.settings["trace"]
    assert not {"rate", "concurrency", "input_tokens"} & run.settings.keys()


def test_turns_after_a_failed_one_are_told(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens,session\n0,5,2,a\n,9,2,a\n0.2,5,2,\n")
    behaviours = [Behaviour(status=500), Behaviour()]
    with StreamingServer(behaviours=behaviours) as server:
        words = ("--trace", str(trace), "--warm-up", "0")
        outcome = _collect(server, tmp_path / "run.json", *words)
    assert 0 == outcome.exit_code, outcome.stderr
    assert "1 turns were not sent" in outcome.stderr


def test_the_workload_of_a_scenario_is_collected(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        "model: llama-3.1-8b\ndevice: a30\n"
        "workload: {rate_rps: 200, num_requests: 3, prefill: {mean: 4}, decode: {mean: 2}}\n"
    )
    with StreamingServer() as server:
        words = (str(scenario), "--set", "workload.num_requests=2")
        outcome = _collect(server, tmp_path / "run.json", *words)
    assert 0 == outcome.exit_code, outcome.stderr
    assert 2 == len(load_run(tmp_path / "run.json").completed)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "give one of SCENARIO, --trace, --rate, --concurrency; found none"),
        (("--rate", "1", "--concurrency", "2"), "found --rate, --concurrency"),
        (("--rate", "0"), "--rate: must be positive"),
        (("--rate", "nan"), "--rate: must be positive"),
        (("--rate", "1", "--num-requests", "0"), "num_requests: must be from 1 to"),
        (("--concurrency", "0"), "concurrency: must be positive"),
        (("--rate", "1", "--output-tokens", "-3"), "mean"),
        (("--rate", "1", "--set", "seed=1"), "none is given"),
        (("--rate", "1", "--server", "triton"), "must be one of vllm"),
    ],
)
def test_what_cannot_be_collected_is_said(
    tmp_path: Path, words: Sequence[str], problem: str
) -> None:
    with StreamingServer() as server:
        outcome = _collect(server, tmp_path / "run.json", *words)
        assert [] == server.bodies
    assert 1 == outcome.exit_code
    assert problem in outcome.stderr
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("option", ["--warm-up", "--max-in-flight", "--seed"])
def test_counts_below_zero_are_refused(tmp_path: Path, option: str) -> None:
    with StreamingServer() as server:
        outcome = _collect(server, tmp_path / "run.json", "--rate", "1", option, "-1")
        assert [] == server.bodies
    assert 2 == outcome.exit_code
    assert option in outcome.stderr


def test_answers_that_end_early_are_told(tmp_path: Path) -> None:
    with StreamingServer(behaviours=[Behaviour(num_tokens=2)]) as server:
        words = ("--rate", "100", "--num-requests", "2", "--output-tokens", "8")
        outcome = _collect(server, tmp_path / "run.json", *words)
    assert "answers hold 4 of 16 tokens" in outcome.stderr


def test_a_key_comes_from_the_environment_and_stays_out_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret-value")
    with StreamingServer(api_key="secret-value") as server:
        words = ("--rate", "100", "--num-requests", "1", "--api-key-variable", "MY_KEY")
        outcome = _collect(server, tmp_path / "run.json", *words)
    assert 0 == outcome.exit_code, outcome.stderr
    assert "secret-value" not in (tmp_path / "run.json").read_text()


@dataclass(frozen=True, kw_only=True)
class _Group:
    size: int = field(metadata=describe("How large."))
    name: str = option("x", "Its name.", names=("--called",))
    limit: float | None = option(None, "How much.")
    wait_s: float = option(90.0, "How long.", names=("--wait",), syntax="duration")


def test_the_fields_of_a_group_are_options_of_their_own() -> None:
    seen: list[object] = []

    @with_option_groups
    def command(place: Annotated[str, typer.Argument()], group: _Group) -> None:
        seen.append((place, group))

    program = typer.Typer()
    program.command()(command)
    for words in (["--called", "y"], ["--limit", "2", "--wait", "2min"]):
        outcome = CliRunner().invoke(program, ["here", "--size", "3", *words])
        assert 0 == outcome.exit_code, outcome.output
    groups = [_Group(size=3, name="y"), _Group(size=3, limit=2.0, wait_s=120.0)]
    assert [("here", group) for group in groups] == seen
    assert "1.5min" in CliRunner().invoke(program, ["--help"]).output
    assert 2 == CliRunner().invoke(program, ["here"]).exit_code
