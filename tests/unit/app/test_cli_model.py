"""`foretoken model`: a preset or a file in figures."""

import json

from typer.testing import CliRunner

from foretoken.app.cli.main import app
from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.description import describe_model
from foretoken.domain.models.parameters import count_parameters


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


def test_bytes_are_those_that_are_stored() -> None:
    """gpt-oss-120b is published in 65.3 GB: MXFP4 experts, the rest in 16 bits."""
    figures = describe_model(find_model("gpt-oss-120b"))
    assert 0.005 > abs(figures.num_bytes / 65.25e9 - 1)
    assert figures.num_parameters == sum(part.num_parameters for part in figures.parts)
    plain = describe_model(find_model("llama-3-8b"))
    assert 2 * count_parameters(find_model("llama-3-8b")).total == plain.num_bytes


def test_an_unknown_model_names_the_nearest() -> None:
    shown = CliRunner().invoke(app, ["model", "deepseek-v"])
    assert 0 != shown.exit_code
