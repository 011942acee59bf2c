"""A catalog that lacks what it acknowledged is refused, unchanged, until that is accepted."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.database_file import (
    companions_of,
    log_bytes,
    log_of,
    note_of,
    rollback_of,
)
from foretoken.catalog.upkeep.backup import restore_backup
from foretoken.catalog.upkeep.recovery import Recovery, recover_catalog
from foretoken.domain.errors import CorruptCatalogError, IncompleteCatalogError
from foretoken.domain.measurements.measurement import PruneRequest, SqlQuery
from foretoken.wire.arrow import read_table

_NOW = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
_RECORDED = datetime(2026, 1, 2, tzinfo=UTC)
_ROWS = 300
_NUM_LOGGED = 4


@contextmanager
def _opened(
    path: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> Iterator[CatalogService]:
    service = CatalogService(CatalogConfig(path=str(path), num_threads=1), clock)
    service.open()
    try:
        yield service
    finally:
        service.close()


def _num_rows(path: Path) -> dict[str, int]:
    with _opened(path) as service:
        return {summary.run.run_id: summary.num_rows for summary in service.list_runs()}


def _copy(source: Path, folder: Path) -> Path:
    """Copy the files of a catalog, as a crash would leave them."""
    folder.mkdir()
    for file in (source, *companions_of(source)):
        if file.exists():
            shutil.copy(file, folder)
    return folder / source.name


def _contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a batch in the file, and one of four, each a commit of its own, in the log."""
    folder = tmp_path_factory.mktemp("logged")
    path = folder / "catalog.duckdb"
    with _opened(path, lambda: _RECORDED) as service:
        list(service.record(run("merged"), batches(gemms(range(1, _ROWS + 1)))))
    with _opened(path, lambda: _RECORDED) as service:
        tables = [gemms(range(1, _ROWS + 1))] * _NUM_LOGGED
        list(service.record(run("logged"), batches(*tables, is_complete=False)))
        return _copy(path, folder / "crashed")


@pytest.fixture
def crashed(logged: Path, tmp_path: Path) -> Path:
    """A copy of that catalog's files."""
    return _copy(logged, tmp_path / "crashed")


def _refusal(path: Path) -> CorruptCatalogError:
    """Return how a catalog is refused; its files are as they were."""
    before = _contents(path)
    with pytest.raises(CorruptCatalogError) as caught, _opened(path):
        pass
    assert before == _contents(path)
    return caught.value


def _cut(share: float) -> Callable[[Path], None]:
    return lambda log: os.truncate(log, int(log.stat().st_size * share))


def _zero(first: float) -> Callable[[Path], None]:
    def damage(log: Path) -> None:
        content = log.read_bytes()
        start = int(len(content) * first)
        log.write_bytes(content[:start] + bytes(len(content) - start))

    return damage


def _flip(place: float) -> Callable[[Path], None]:
    def damage(log: Path) -> None:
        content = bytearray(log.read_bytes())
        content[int((len(content) - 1) * place)] ^= 0xFF
        log.write_bytes(content)

    return damage


def _cut_by(num_bytes: int) -> Callable[[Path], None]:
    return lambda log: os.truncate(log, log.stat().st_size - num_bytes)


_SILENT_LOSSES = {
    "removed": Path.unlink,
    "emptied": _cut(0.0),
    "a few bytes left": lambda log: os.truncate(log, 10),
    "its header left": lambda log: os.truncate(log, 60),
    "a third left": _cut(0.33),
    "half left": _cut(0.5),
    "end lost": _cut(0.97),
    "last byte lost": _cut_by(1),
    "zeroed": _zero(0.0),
}
_DAMAGES = {
    "zeroed from the middle": _zero(0.5),
    "zeroed at the end": _zero(0.99),
    "flipped in the middle": _flip(0.5),
    "flipped at the end": _flip(1.0),
}


@pytest.mark.parametrize("damage", _SILENT_LOSSES.values(), ids=_SILENT_LOSSES.keys())
def test_a_catalog_without_what_it_acknowledged_is_refused(
    damage: Callable[[Path], None], crashed: Path
) -> None:
    """DuckDB would open all of these without a word."""
    damage(log_of(crashed))
    error = _refusal(crashed)
    assert isinstance(error, IncompleteCatalogError)
    missing = int(error.details["num_missing_batches"])
    assert 1 <= missing <= _NUM_LOGGED
    assert str(missing * _ROWS) == error.details["num_missing_rows"]
    for words in (
        f"lacks {missing * _ROWS:,} rows in {missing}",
        f"batch {_NUM_LOGGED - 1} of run logged",
        "catalog.duckdb.wal",
        "foretoken catalog recover --accept-loss",
    ):
        assert words in error.message


@pytest.mark.parametrize("damage", _DAMAGES.values(), ids=_DAMAGES.keys())
def test_a_damaged_log_is_refused_and_says_how_to_go_on(
    damage: Callable[[Path], None], crashed: Path
) -> None:
    damage(log_of(crashed))
    message = _refusal(crashed).message
    assert "has a damaged log" in message
    assert "foretoken catalog recover --accept-loss" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    (_SILENT_LOSSES | _DAMAGES).values(),
    ids=(_SILENT_LOSSES | _DAMAGES).keys(),
)
def test_an_accepted_loss_is_recorded_and_its_rows_can_be_sent_again(
    damage: Callable[[Path], None], crashed: Path
) -> None:
    damage(log_of(crashed))
    recovered = recover_catalog(crashed, _NOW, is_accepting_loss=True)
    assert "lacks" in recovered.description
    with _opened(crashed) as service:
        (summary,) = (s for s in service.list_runs() if s.run.run_id == "merged")
        assert _ROWS == summary.num_rows
        with service._store.cursor() as cursor:
            (loss,) = cursor.sql("FROM losses").to_arrow_table().to_pylist()
        assert _NOW.replace(tzinfo=None) == loss["accepted_at"]
        assert f"batch {_NUM_LOGGED - 1} of run logged" == loss["newest_batch"]
        assert loss["num_batches"] * _ROWS == loss["num_rows"] > 0
        tables = [gemms(range(1, _ROWS + 1))] * _NUM_LOGGED
        receipts = list(service.record(run("logged"), batches(*tables)))
    new = [receipt for receipt in receipts if not receipt.was_duplicate]
    assert loss["num_batches"] == len(new)
    assert {"merged": _ROWS, "logged": _NUM_LOGGED * _ROWS} == _num_rows(crashed)


@pytest.mark.slow
def test_of_a_damaged_log_all_before_the_damage_is_kept(crashed: Path) -> None:
    log = log_of(crashed)
    _zero(0.99)(log)
    damaged = log.read_bytes()
    recovered = recover_catalog(crashed, _NOW, is_accepting_loss=True)
    kept = log.with_name("catalog.duckdb.wal.damaged")
    assert (kept, damaged) == (recovered.kept_log, kept.read_bytes())
    assert {"merged": _ROWS, "logged": (_NUM_LOGGED - 1) * _ROWS} == _num_rows(crashed)
    with _opened(crashed) as service:
        losses = read_table(service.query_sql(SqlQuery(text="SELECT num_rows FROM losses")))
    assert [{"num_rows": _ROWS}] == losses.to_pylist()


def test_recovery_changes_nothing_unless_the_loss_is_accepted(crashed: Path) -> None:
    _cut(0.5)(log_of(crashed))
    before = _contents(crashed)
    with pytest.raises(IncompleteCatalogError, match="lacks"):
        recover_catalog(crashed, _NOW, is_accepting_loss=False)
    assert before == _contents(crashed)


@pytest.mark.parametrize("is_accepting_loss", [False, True])
def test_a_whole_catalog_needs_no_recovery(crashed: Path, is_accepting_loss: bool) -> None:
    assert Recovery() == recover_catalog(crashed, _NOW, is_accepting_loss=is_accepting_loss)
    assert {"merged": _ROWS, "logged": _NUM_LOGGED * _ROWS} == _num_rows(crashed)


def test_a_log_put_back_after_a_refusal_is_used(crashed: Path) -> None:
    log = log_of(crashed)
    elsewhere = log.rename(log.with_name("elsewhere"))
    _refusal(crashed)
    elsewhere.rename(log)
    assert {"merged": _ROWS, "logged": _NUM_LOGGED * _ROWS} == _num_rows(crashed)


def test_a_crash_before_the_note_is_no_loss(catalog: CatalogService, tmp_path: Path) -> None:
    """A commit without its note was never acknowledged: it may be there, or torn."""
    path = tmp_path / "catalog.duckdb"
    rows = gemms(range(1, _ROWS + 1))
    list(catalog.record(run(), batches(rows, is_complete=False)))
    note = note_of(path).read_bytes()
    list(catalog.record(run(), batches(rows, rows, is_complete=False)))
    there, torn = (_copy(path, tmp_path / name) for name in ("there", "torn"))
    for copy in (there, torn):
        note_of(copy).write_bytes(note)
    _cut_by(1)(log_of(torn))
    assert ({"run-1": 2 * _ROWS}, {"run-1": _ROWS}) == (_num_rows(there), _num_rows(torn))


@pytest.mark.parametrize("place", [0, 1])
def test_a_note_torn_as_it_was_written_leaves_the_one_before(place: int, crashed: Path) -> None:
    note = note_of(crashed)
    content = bytearray(note.read_bytes())
    content[place * 1024 + 20 : place * 1024 + 30] = bytes(10)
    note.write_bytes(content)
    assert {"merged": _ROWS, "logged": _NUM_LOGGED * _ROWS} == _num_rows(crashed)


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(2048), b'12345678 {"number": 1}'])
def test_a_catalog_whose_note_is_damaged_is_refused(content: bytes, crashed: Path) -> None:
    """Nothing says whether it lacks something."""
    note_of(crashed).write_bytes(content)
    assert "catalog.duckdb.acknowledged is damaged" in _refusal(crashed).message
    recovered = recover_catalog(crashed, _NOW, is_accepting_loss=True)
    assert "catalog.duckdb.acknowledged is damaged" in recovered.description
    assert {"merged": _ROWS, "logged": _NUM_LOGGED * _ROWS} == _num_rows(crashed)


def test_a_file_without_a_note_opens_and_gets_one(crashed: Path) -> None:
    note_of(crashed).unlink()
    assert {"merged": _ROWS, "logged": _NUM_LOGGED * _ROWS} == _num_rows(crashed)
    assert note_of(crashed).exists()


def test_a_catalog_that_is_gone_is_not_made_anew(crashed: Path) -> None:
    log_of(crashed).unlink()
    crashed.unlink()
    error = _refusal(crashed)
    assert "the file is gone" in error.message
    assert str((1 + _NUM_LOGGED) * _ROWS) == error.details["num_missing_rows"]
    recover_catalog(crashed, _NOW, is_accepting_loss=True)
    assert {} == _num_rows(crashed)


def test_an_older_copy_of_the_file_is_refused(catalog: CatalogService, tmp_path: Path) -> None:
    path = tmp_path / "catalog.duckdb"
    list(catalog.record(run("old"), batches(gemms([1]))))
    catalog.close()
    older = path.read_bytes()
    with _opened(path) as service:
        list(service.record(run("new"), batches(gemms([2]))))
    path.write_bytes(older)
    assert "1 row in 1 batch" in _refusal(path).message


@pytest.mark.slow
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_backup_takes_the_place_of_what_lost_its_log(is_gone: bool, crashed: Path) -> None:
    backup = crashed.with_name("backup")
    with _opened(_copy(crashed, crashed.parent / "whole")) as service:
        backup.write_bytes(b"".join(service.backup()))
        list(service.record(run("later"), batches(gemms([1]))))
    log_of(crashed).unlink()
    if is_gone:
        crashed.unlink()
    restore_backup(backup, crashed, is_replacing=True)
    assert {"merged": _ROWS, "logged": _NUM_LOGGED * _ROWS} == _num_rows(crashed)
    assert note_of(crashed.with_name("catalog.duckdb.old")).exists()


@pytest.mark.slow
def test_what_was_pruned_and_compacted_is_not_missing(crashed: Path) -> None:
    with _opened(crashed) as service:
        service.prune(PruneRequest(older_than_days=0, tool="test"))
        service.compact()
        list(service.record(run("new"), batches(gemms([1, 2]))))
        copy = _copy(crashed, crashed.parent / "pruned")
    assert {"new": 2} == _num_rows(copy)
    with _opened(copy) as service:
        list(service.record(run("more"), batches(gemms([1]), is_complete=False)))
        more = _copy(copy, copy.parent / "more")
    _cut_by(1)(log_of(more))
    assert "1 row in 1 batch" in _refusal(more).message


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"max_log_age_s": 0.01}, {"max_log_bytes": 1}])
def test_the_log_is_merged_while_the_catalog_is_open(
    settings: dict[str, float], tmp_path: Path
) -> None:
    """By age and by size: nothing rests on it any more, so that nothing is lost with it."""
    path = tmp_path / "catalog.duckdb"
    service = CatalogService(CatalogConfig(path=str(path), num_threads=1, **settings))  # type: ignore[arg-type]
    service.open()
    list(service.record(run("kept"), batches(gemms([1]))))
    while log_bytes(path) or rollback_of(path).exists():
        time.sleep(0.001)
    copy = _copy(path, tmp_path / "copy")
    log_of(copy).unlink(missing_ok=True)
    assert {"kept": 1} == _num_rows(copy)
    service.close()
