"""`catalog plot`: pictures of what was measured, with the fitted curve."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app

Run = Callable[..., Result]
_EXAMPLE = ("docs/examples/collectives.csv", "--option")
_MAPPING = "mapping=docs/examples/collectives-mapping.yaml"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a command's caller, with the example's five measurements in the catalog."""

    def invoke(*words: object) -> Result:
        return CliRunner().invoke(
            app, ["--home", str(tmp_path / "home"), *map(str, words)], env={"COLUMNS": "200"}
        )

    imported = invoke("catalog", "import", "generic", *_EXAMPLE, _MAPPING)
    assert imported.exit_code == 0, imported.output
    return invoke


def test_measured_and_fitted_are_drawn_and_compared(run: Run, tmp_path: Path) -> None:
    page, picture = tmp_path / "curves.html", tmp_path / "curves.svg"
    result = run(
        *("catalog", "plot", "--operator", "all_reduce", "--page", page, "--picture", picture)
    )
    assert result.exit_code == 0, result.output
    # Nothing is trained here: what is not measured comes from the data sheet.
    for text in ("all_reduce", "Measured and fitted", "analytical"):
        assert text in result.output
    assert "all_reduce on " in page.read_text(encoding="utf-8")
    assert "message (bytes)" in picture.read_text(encoding="utf-8")


def test_what_was_not_measured_is_said(run: Run) -> None:
    result = run("catalog", "plot", "--operator", "gemm", "--device", "a30")
    assert result.exit_code == 1
    assert "nothing was measured of gemm on a30" in result.output


def test_a_picture_has_the_ending_of_one(run: Run, tmp_path: Path) -> None:
    result = run("catalog", "plot", "--operator", "gemm", "--picture", tmp_path / "curves.html")
    assert (2, True) == (result.exit_code, "must end in" in result.output)


def test_a_picture_is_of_one_operator(run: Run, tmp_path: Path) -> None:
    result = run(
        *("catalog", "plot", "--operator", "all_reduce", "--operator", "all_gather"),
        *("--picture", tmp_path / "curves.svg"),
    )
    assert result.exit_code == 1
    assert "use --page for several" in result.output
