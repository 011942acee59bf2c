"""`foretoken catalog recover`: what a catalog lacks, and how to go on without it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.app.cli.main import app
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.storage.commit import Recorded
from foretoken.catalog.storage.database_file import log_of
from foretoken.catalog.storage.store import Store

Run = Callable[..., Result]


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
