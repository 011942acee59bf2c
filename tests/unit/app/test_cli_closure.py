"""`profile closure`, and `validate steps` on what it wrote."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app
from foretoken.app.cli.profile_model import parse_step, read_model_config
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.measurements.profiling import ClosureStep, ProfileRequest

pytest.importorskip("transformers")

_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("closure")
    (path / "small.json").write_text(json.dumps(_CONFIG))
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    def invoke(*words: object) -> Result:
        return CliRunner().invoke(app, ["--home", str(folder / "home"), *map(str, words)])

    return invoke


@pytest.fixture(scope="module")
def profiled(folder: Path, run: Run) -> Result:
    steps = ("--step", "prefill:1x8", "--step", "decode:2x8", "--step", "decode:2x8:graph")
    out = folder / "out.json"
    return run("profile", "closure", folder / "small.json", *steps, "--quick", "--out", out)


def test_measured_steps_are_listed_and_failed_ones_say_why(profiled: Result) -> None:
    """The table names steps as the option does."""
    assert 0 == profiled.exit_code, profiled.output
    for text in ("small on cpu (2 layers, fp32", "prefill:1x8", "decode:2x8:graph"):
        assert text in profiled.output
    assert "graphs are captured on CUDA devices alone" in profiled.output


def test_the_file_and_the_catalog_hold_the_same_report(
    profiled: Result, folder: Path, run: Run
) -> None:
    """Either can be named to compare with."""
    written = json.loads((folder / "out.json").read_text())
    assert 0 == profiled.exit_code
    by_file = run("--output", "json", "validate", "steps", folder / "out.json")
    by_name = run("--output", "json", "validate", "steps", written["name"])
    of_all = run("--output", "json", "validate", "steps")
    assert 0 == by_file.exit_code, by_file.output
    (compared,) = json.loads(by_file.stdout)
    assert [compared] == json.loads(by_name.stdout) == json.loads(of_all.stdout)
    kinds = [step["measured"]["step"]["kind"] for step in compared["steps"]]
    assert ["prefill", "decode"] == kinds


def test_predictions_are_printed_beside_measurements_and_on_a_page(
    profiled: Result, folder: Path, run: Run
) -> None:
    """Every step has its error, what it rests on, and the host's times are asked for."""
    assert 0 == profiled.exit_code
    page = folder / "steps.html"
    result = run("validate", "steps", folder / "out.json", "--html", page)
    assert 0 == result.exit_code, result.output
    assert "errors of 2 steps: median" in result.output
    assert "foretoken profile host --device cpu" in " ".join(result.output.split())
    assert "small on cpu: what steps consist of" in page.read_text()


def test_the_operators_of_the_steps_can_be_profiled_by_a_request(
    profiled: Result, folder: Path, run: Run
) -> None:
    """Each call stands in it once, the failed steps' included."""
    assert 0 == profiled.exit_code
    path = folder / "request.json"
    result = run("validate", "steps", folder / "out.json", "--request", path)
    assert 0 == result.exit_code, result.output
    request = schema.decode(ProfileRequest, json.loads(path.read_text()))
    named = [(call.operator, call.variant, *sorted(call.dims.items())) for call in request.calls]
    assert len(set(named)) == len(named)
    operators = {name for name, *_ in named}
    assert {"gemm", "attention_prefill", "attention_decode", "rope", "rms_norm"} <= operators
    assert "cpu" == request.device


def test_a_report_that_is_nowhere_is_refused(profiled: Result, run: Run) -> None:
    """The message names those there are."""
    assert 0 == profiled.exit_code
    result = run("validate", "steps", "nowhere")
    assert 1 == result.exit_code
    assert "nowhere is no file" in result.output
    assert "small-cpu-" in result.output


def test_an_empty_catalog_says_what_to_run(tmp_path: Path) -> None:
    """There is nothing to compare yet."""
    words = ["--home", str(tmp_path), "validate", "steps"]
    result = CliRunner().invoke(app, words)
    assert 1 == result.exit_code
    assert "run `foretoken profile closure` first" in result.output


def test_steps_are_written_as_kind_sequences_tokens_and_mode() -> None:
    """Eager is what is meant without a mode."""
    assert ClosureStep(kind="decode", batch_size=8, num_tokens=1024) == parse_step("decode:8x1024")
    compiled = ClosureStep(kind="training", batch_size=2, num_tokens=256, mode="compiled")
    assert compiled == parse_step("training:2x256:compiled")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("decode", "is not KIND:SEQUENCESxTOKENS"),
        ("decode:8", "is not KIND:SEQUENCESxTOKENS"),
        ("decode:axb", "is not KIND:SEQUENCESxTOKENS"),
        ("serve:8x8", "must be one of prefill, decode, training"),
        ("decode:8x8:fast", "must be one of eager, compiled, graph"),
        ("decode:0x8", "must be at least 1"),
    ],
)
def test_words_that_name_no_step_are_refused(word: str, message: str) -> None:
    """The message shows how one is written."""
    with pytest.raises(InvalidRequestError, match=message):
        parse_step(word)


def test_a_number_format_goes_by_its_name(folder: Path, run: Run) -> None:
    refused = run("profile", "closure", folder / "small.json", "--dtype", "half")
    assert (1, True) == (refused.exit_code, "half" in refused.output)


def test_models_are_presets_or_files(folder: Path) -> None:
    """A preset has a config written for it, a file gives its own text and its name."""
    name, text = read_model_config("tiny-llama")
    assert ("tiny-llama", 8) == (name, json.loads(text)["num_hidden_layers"])
    name, text = read_model_config(str(folder / "small.json"))
    assert ("small", _CONFIG) == (name, json.loads(text))
    with pytest.raises(UnknownModelError):
        read_model_config("no-such-model")
