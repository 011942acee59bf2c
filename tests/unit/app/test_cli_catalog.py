"""`foretoken catalog`: artifacts, pictures of what was measured, and recovery."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.commit import Recorded
from foretoken.catalog.storage.database_file import log_of
from foretoken.catalog.storage.store import Store
from foretoken.domain.measurements.measurement import Artifact

_HASH = hashlib.sha256(b"content").hexdigest()
Run = Callable[..., Result]
_EXAMPLE = ("docs/examples/collectives.csv", "--option")
_MAPPING = "mapping=docs/examples/collectives-mapping.yaml"


@pytest.fixture
def home(tmp_path: Path, catalog_path: str) -> Path:
    """A home whose catalog keeps a file of each of two kinds, one active."""
    service = CatalogService(CatalogConfig(path=catalog_path, num_threads=1))
    service.open()
    for kind in ("latency_models", "corrections"):
        artifact = Artifact(
            kind=kind,
            name="v1",
            content_hash=_HASH,
            num_bytes=7,
            created_at="2026-01-02T03:04:05Z",
        )
        service.store_artifact(artifact, [b"content"])
    service.activate_artifact("latency_models", "v1")
    service.close()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((), ["corrections", "latency_models"]),
        (("latency_models",), ["latency_models"]),
        (("none",), []),
    ],
)
def test_all_kinds_or_one_are_listed(words: tuple[str, ...], kinds: list[str], home: Path) -> None:
    command = ["--home", str(home), "--output", "json", "catalog", "artifacts", *words]
    outcome = CliRunner().invoke(app, command, catch_exceptions=False)
    expected = [
        {
            "name": "v1",
            "kind": kind,
            "bytes": 7,
            "created": "2026-01-02T03:04:05Z",
            "active": kind == "latency_models",
            "content": _HASH,
        }
        for kind in kinds
    ]
    assert expected == json.loads(outcome.stdout)


@pytest.fixture
def run_on_example(home_path: str) -> Run:
    """Return a command's caller, with the example's five measurements in the catalog."""

    def invoke(*words: object) -> Result:
        return CliRunner().invoke(
            app, ["--home", home_path, *map(str, words)], env={"COLUMNS": "200"}
        )

    imported = invoke("catalog", "import", "generic", *_EXAMPLE, _MAPPING)
    assert imported.exit_code == 0, imported.output
    return invoke


def test_measured_and_fitted_are_drawn_and_compared(run_on_example: Run, tmp_path: Path) -> None:
    page, picture = tmp_path / "curves.html", tmp_path / "curves.svg"
    result = run_on_example(
        *("catalog", "plot", "--operator", "all_reduce", "--page", page, "--picture", picture)
    )
    assert result.exit_code == 0, result.output
    # Nothing is trained here: what lies between measurements is learned when it is asked for.
    for text in ("all_reduce", "Measured and fitted", "interpolated"):
        assert text in result.output
    assert "all_reduce on " in page.read_text(encoding="utf-8")
    assert "message (bytes)" in picture.read_text(encoding="utf-8")


def test_what_was_not_measured_is_said(run_on_example: Run) -> None:
    result = run_on_example("catalog", "plot", "--operator", "gemm", "--device", "a30")
    assert result.exit_code == 1
    assert "nothing was measured of gemm on a30" in result.output


def test_a_picture_has_the_ending_of_one(run_on_example: Run, tmp_path: Path) -> None:
    result = run_on_example(
        "catalog", "plot", "--operator", "gemm", "--picture", tmp_path / "curves.html"
    )
    assert (2, True) == (result.exit_code, "must end in" in result.output)


def test_a_picture_is_of_one_operator(run_on_example: Run, tmp_path: Path) -> None:
    result = run_on_example(
        *("catalog", "plot", "--operator", "all_reduce", "--operator", "all_gather"),
        *("--picture", tmp_path / "curves.svg"),
    )
    assert result.exit_code == 1
    assert "use --page for several" in result.output


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def invoke(*words: str) -> Result:
        return CliRunner().invoke(app, ["--home", str(tmp_path), *words])

    return invoke


@pytest.fixture
def cut_short(run: Run, tmp_path: Path) -> Path:
    """The file of a catalog whose newest batch went with the end of its log."""
    assert 0 == run("catalog", "runs").exit_code
    (path,) = tmp_path.glob("*.duckdb")
    store = Store(CatalogConfig(path=str(path)))
    store.open()
    with store.transaction():
        store.note(Recorded(num_batches=1, num_rows=5, newest_batch="batch 0 of run lost"))
    content, log = path.read_bytes(), log_of(path).read_bytes()
    store.close()
    path.write_bytes(content)
    log_of(path).write_bytes(log[:-1])
    return path


def test_a_whole_catalog_is_said_to_be_whole(run: Run) -> None:
    run("catalog", "runs")
    found = run("catalog", "recover")
    assert (0, True) == (found.exit_code, "holds all that it acknowledged" in found.stderr)


def test_a_loss_is_said_and_changes_nothing_until_it_is_accepted(run: Run, cut_short: Path) -> None:
    log = log_of(cut_short).read_bytes()
    for command in ("runs", "recover"):
        refused = run("catalog", command)
        assert 1 == refused.exit_code
        for words in ("lacks 5 rows in 1 batch", "batch 0 of run lost", "--accept-loss"):
            assert words in " ".join(refused.stderr.split())
    assert log == log_of(cut_short).read_bytes()
    accepted = run("catalog", "recover", "--accept-loss")
    assert (0, True) == (accepted.exit_code, "accepted:" in accepted.stderr)
    assert 0 == run("catalog", "runs").exit_code
    losses = run("catalog", "sql", "SELECT newest_batch FROM losses")
    assert "batch 0 of run lost" in losses.stdout
