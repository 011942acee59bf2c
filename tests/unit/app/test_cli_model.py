"""`foretoken model`: a preset or a file in figures."""

import json
from pathlib import Path

import pytest
from checkpoint_examples import write_index
from typer.testing import CliRunner
from web_client import TINY_CONFIG

from foretoken.app.cli.main import app
from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.description import describe_model
from foretoken.domain.models.load import load_model
from foretoken.domain.units import GIB


def test_a_model_is_shown_in_figures() -> None:
    shown = CliRunner().invoke(app, ["--output", "json", "model", "deepseek-v3"])
    figures = json.loads(shown.stdout)
    assert 671_026_404_352 == figures["num_parameters"]
    assert {"embedding", "head", "norms", "latent", "mlp", "experts", "prediction_heads"} == {
        part["part"] for part in figures["parts"]
    }
    latent = next(part for part in figures["parts"] if part["part"] == "latent")
    assert (61, 61 * 576 * 2.0) == (latent["num_layers"], latent["token_bytes"])


def test_a_table_says_which_active_parameters_are_meant() -> None:
    text = CliRunner().invoke(app, ["model", "gpt-oss-120b"]).stdout
    assert "active: 5.71e9; without the embedding 5.13e9, without the head as well 4.55e9" in text
    assert "windows of one request: 4,718,592 bytes at most" in text
    assert "approximated: attention: chunks run as windows" in text


def test_a_table_has_a_line_a_part_and_the_sizes_below() -> None:
    text = CliRunner().invoke(app, ["model", "gpt-oss-120b"], env={"COLUMNS": "120"}).stdout
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    experts = ["experts", "36", "114.71", "3.60", "56.83", "4.25 bit", "-", "-"]
    sizes = [
        "experts",
        "36",
        "num_experts 128, top_k 4, intermediate 2,880, is_gated 1, has_bias 1",
    ]
    assert [experts, sizes] == [row for row in cells if row and row[0] == "experts"]


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        # The sum of the files of openai/gpt-oss-120b.
        ("gpt-oss-120b", 65.25e9),
        # 6ms/DeepSeek-V4-Flash-MXFP4-GGUF: the official checkpoint in the formats it has.
        ("deepseek-v4-flash", 156.1e9),
        # The weight files of Meta-Llama-3.1-8B as kvplan 0.1.1 reads them.
        ("llama-3.1-8b", 14.96 * GIB),
    ],
)
def test_bytes_are_those_that_are_stored(preset: str, published: float) -> None:
    """Within 0.5 % of what is published without layers that predict further tokens."""
    figures = describe_model(find_model(preset))
    assert published == pytest.approx(figures.num_bytes, rel=0.005)
    assert figures.num_parameters == sum(part.num_parameters for part in figures.parts)


def test_what_the_files_of_a_folder_hold_is_compared(tmp_path: Path) -> None:
    """A preset of the same name has no files, nor has another `config.json`."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    counted = describe_model(load_model(tmp_path)).num_bytes
    write_index(tmp_path, {}, total_size=round(counted * 1.009))
    shown = _show(str(tmp_path))
    assert "as stored, and its files hold as much to 1 %" in shown
    assert "its files hold 0" not in shown
    write_index(tmp_path, {}, total_size=round(counted * 1.25))
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        assert "+25.0% of the" in _show(name)
    write_index(tmp_path, {}, total_size=round(counted / 2))
    assert "-50.0% of the" in _show(str(tmp_path))
    figures = json.loads(_show(str(tmp_path), "--output", "json"))
    assert round(counted / 2) == figures["checkpoint_bytes"]
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert "files" not in _show(str(tmp_path / "other.json"))
    assert "files" not in _show("llama-3.1-8b")


def test_how_weights_are_stored_may_follow_the_text_of_a_config() -> None:
    """In any order, and at once with it."""
    config = json.dumps(TINY_CONFIG)
    stored = json.dumps({"producer": {}, "quantization": {"quant_algo": "FP8"}})
    expected = load_model(config).quantization
    assert "" == expected
    assert "fp8_static" in load_model(f"{config}\n{stored}").quantization
    assert load_model(f"{config}{stored}") == load_model(f"{stored} {config}")


def _show(name: str, *options: str) -> str:
    shown = CliRunner().invoke(app, [*options, "model", name], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    return shown.stdout


def test_an_unknown_model_names_the_nearest() -> None:
    shown = CliRunner().invoke(app, ["model", "deepseek-v"])
    assert 1 == shown.exit_code
    assert "did you mean deepseek-v3" in shown.output
    assert "Traceback" not in shown.output
