"""The program as a shell sees it: what goes where, and with which status it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

_ROOT = Path(__file__).resolve().parents[3]
_EXAMPLES = _ROOT / "docs" / "examples"
_PROGRAM = (sys.executable, "-W", "error", "-m", "foretoken.app")


def _run(home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_PROGRAM, *words],
        env={**os.environ, "FORETOKEN_HOME": str(home), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _invoke(home: Path, *words: str) -> Result:
    """Run a command in this process: the program itself takes a second to start."""
    return CliRunner().invoke(app, ["--home", str(home), *words])


@pytest.mark.parametrize(
    "words",
    [
        "predict gemm m=64 n=4096 k=4096 --device a30",
        pytest.param("list devices", marks=pytest.mark.slow),
        pytest.param("catalog coverage", marks=pytest.mark.slow),
        pytest.param(
            "simulate serving serving.yaml --set workload.num_requests=5", marks=pytest.mark.slow
        ),
        pytest.param("simulate training training.yaml", marks=pytest.mark.slow),
        pytest.param(
            "search training training.yaml --gpus 2 --vary weight_parallel=none --finalists 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_standard_output_is_the_result_alone(tmp_path: Path, words: str) -> None:
    """Notes and progress go elsewhere, so that a program can read it; NaN is not JSON."""

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} in the output")

    paths = [str(_EXAMPLES / word) if word.endswith(".yaml") else word for word in words.split()]
    outcome = _run(tmp_path, "--output", "json", *paths)
    assert outcome.returncode == 0, outcome.stderr
    assert isinstance(json.loads(outcome.stdout, parse_constant=refuse), dict | list)


def test_an_error_is_one_line_and_a_status(tmp_path: Path) -> None:
    outcome = _invoke(tmp_path, "predict", "gem", "m=1", "n=1", "k=1", "--device", "a30")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("error (unknown_operator): unknown operator 'gem'; did you")
    assert len(outcome.stderr.splitlines()) == 1


def test_wrong_usage_is_json_where_results_are(tmp_path: Path) -> None:
    outcome = _invoke(tmp_path, "--output", "json", "search", "serving", "--gpus", "x")
    said = json.loads(outcome.stderr)
    assert (2, "", "INVALID_REQUEST") == (outcome.exit_code, outcome.stdout, said["reason"])
    assert "--gpus" in said["detail"]
    missing = _invoke(tmp_path, "--output", "csv", "search", "servin")
    assert (2, True) == (missing.exit_code, "servin" in json.loads(missing.stderr)["detail"])


def test_an_option_of_all_commands_is_said_to_stand_before_them(tmp_path: Path) -> None:
    outcome = _invoke(tmp_path, "search", "serving", "--output", "json")
    assert 2 == outcome.exit_code
    assert "--output stands before the command" in outcome.stderr


def test_a_format_shows_what_its_commands_take(tmp_path: Path) -> None:
    """Options are named before they are needed; a wrong name is an error in one line."""
    outcome = _invoke(tmp_path, "--output", "json", "catalog", "formats", "vidur")
    found = {(row["command"], row["option"]) for row in json.loads(outcome.stdout)}
    expected = {("import", "folder"), ("import", "model"), ("import", "source")}
    assert {*expected, ("export", "dtype"), ("export", "block_size")} <= found
    wrong = _invoke(tmp_path, "catalog", "formats", "vidru")
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "error (unknown_plugin): unknown plug-in 'vidru'; did you mean vidur?\n" == wrong.stderr


def test_a_profile_is_printed_whole_with_the_file_of_each_value(tmp_path: Path) -> None:
    """An engine also by one of its versions; a wrong name is an error in one line."""
    outcome = _invoke(tmp_path, "--output", "json", "list", "trainers", "megatron-core")
    found = {row["rule"]: row for row in json.loads(outcome.stdout)["values"]}
    assert ("buffered", "megatron-core") == (
        found["interleaved_transfers"]["value"],
        found["interleaved_transfers"]["set_by"],
    )
    table = _invoke(tmp_path, "list", "engines", "vllm-0.22")
    assert ("vllm-0.20" in table.stdout, "vllm-0.8: vLLM 0.9.2 source" in table.stdout) == (1, 1)
    wrong = _invoke(tmp_path, "list", "engines", "vlmm-0.20")
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "did you mean vllm-0.20" in wrong.stderr


def test_a_path_that_holds_something_else_is_told_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("no measurements")
    outcome = _invoke(tmp_path, "catalog", "import", "aiconfigurator", str(tmp_path / "notes.md"))
    assert outcome.exit_code == 1
    assert "no file with rows in this format (AIConfigurator's systems folder" in outcome.stderr


def test_wrong_usage_has_a_status_of_its_own(tmp_path: Path) -> None:
    assert _invoke(tmp_path, "train", "--gently").exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "serving", str(_EXAMPLES / "serving.yaml"), "--html"),
        ("simulate", "serving", str(_EXAMPLES / "serving.yaml"), "--trace"),
        ("simulate", "training", str(_EXAMPLES / "training.yaml"), "--trace"),
        ("demo", "--report"),
    ],
    ids=lambda words: words[-1],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    outcome = _invoke(tmp_path, *words, str(tmp_path / "absent" / "out"))
    assert outcome.exit_code == 2
    assert "no folder" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_causes_no_traceback(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        outcome = subprocess.run(
            [*_PROGRAM, "--home", str(tmp_path), "--output", "json", "list", "models"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("scenario", "words", "reason"),
    [
        ("serving-trace.yaml", ("--rate", "2"), "a trace has its own arrivals"),
        ("serving.yaml", ("--rate", "0"), "--rate: must be positive"),
        (
            "serving.yaml",
            ("--rate", "1", "--rate", "2", "--table", "requests=requests.csv"),
            "give one rate",
        ),
    ],
)
def test_options_that_contradict_the_scenario_are_refused(
    tmp_path: Path, scenario: str, words: tuple[str, ...], reason: str
) -> None:
    outcome = _invoke(tmp_path, "simulate", "serving", str(_EXAMPLES / scenario), *words)
    assert outcome.exit_code == 1
    assert reason in outcome.stderr


@pytest.mark.slow
def test_an_interruption_says_so_and_ends_with_its_status(tmp_path: Path) -> None:
    scenario = str(_EXAMPLES / "serving.yaml")
    command = [
        *_PROGRAM, "--home", str(tmp_path), "simulate", "serving", scenario,
        "--set", "workload.num_requests=1000000",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # Said as the simulation begins.
        assert process.stderr.readline() == "simulate at 2/s\n"
        process.send_signal(signal.SIGINT)
        *before, last = process.stderr.read().splitlines()
        assert last == "interrupted"
        # What was being written just then may be written again.
        assert set(before) <= {"simulate at 2/s"}
        # Shells say 130 of both. CPython ends by the signal where it came inside of `exec` of a
        # text, as when a dataclass is made, whatever became of it (run_eval_code_obj).
        assert process.wait(timeout=120) in {130, -signal.SIGINT}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("duckdb", ("predict", "gemm", "m=1", "n=1", "k=1", "dtype=bf16", "--device", "a30")),
        ("prometheus_client", ("serve", "catalog")),
    ],
)
def test_what_services_need_and_is_not_installed_is_named(
    tmp_path: Path, absent: str, words: tuple[str, ...]
) -> None:
    """As in an image with the command line alone, where nobody said where services are."""
    program = (
        f"import sys; sys.modules[{absent!r}] = None\n"
        f"sys.argv[1:] = {['--home', str(tmp_path), *words]!r}\n"
        "from foretoken.app.cli.main import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (1, "") == (ended.returncode, ended.stdout)
    assert f"{absent} is not installed here" in ended.stderr
    assert "--endpoint catalog=HOST:PORT" in ended.stderr
    assert "Traceback" not in ended.stderr
