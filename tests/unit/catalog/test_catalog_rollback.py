"""A merge of the log cut short in a block that it rewrites in place costs nothing."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.database_file import RollbackJournal, companions_of, rollback_of
from foretoken.domain.errors import CatalogBusyError, CorruptCatalogError

_ROWS = 300
_BLOCKS_PLACE, _BLOCK_BYTES = 12288, 262144


def _open(path: Path) -> CatalogService:
    service = CatalogService(CatalogConfig(path=str(path), num_threads=1))
    service.open()
    return service


def _num_rows(path: Path) -> dict[str, int]:
    service = _open(path)
    try:
        return {summary.run.run_id: summary.num_rows for summary in service.list_runs()}
    finally:
        service.close()


def _overwrite_half(path: Path, block: int) -> None:
    """Leave a block as a process does that is killed while it writes it."""
    with path.open("r+b") as file:
        file.seek(_BLOCKS_PLACE + block * _BLOCK_BYTES)
        file.write(b"\x5a" * (_BLOCK_BYTES // 2))


@pytest.fixture
def in_merge(catalog: CatalogService, tmp_path: Path) -> Path:
    """A copy of the files in the middle of a merge: a merged run, one in the log, a torn block."""
    list(catalog.record(run("merged"), batches(gemms(range(1, _ROWS + 1)))))
    attachment = catalog._store.attachment
    with catalog._store.cursor() as cursor:
        attachment.merge_log(cursor)
        rows = cursor.execute("SELECT block_id FROM pragma_metadata_info('store')").fetchall()
    list(catalog.record(run("logged"), batches(gemms(range(1, _ROWS + 1)))))
    source, folder = Path(attachment.name), tmp_path / "in-merge"
    folder.mkdir()
    descriptor = os.open(shutil.copy(source, folder), os.O_RDONLY)
    path = folder / source.name
    with RollbackJournal(path).keep(descriptor, [block for (block,) in rows]):
        shutil.copy(rollback_of(path), folder / "kept")
    os.close(descriptor)
    (folder / "kept").replace(rollback_of(path))
    for file in companions_of(source):
        if file.exists():
            shutil.copy(file, folder)
    _overwrite_half(path, rows[0][0])
    return path


def test_a_merge_cut_short_is_undone_at_the_next_opening(in_merge: Path) -> None:
    assert _num_rows(in_merge) == {"merged": _ROWS, "logged": _ROWS}
    assert not rollback_of(in_merge).exists()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 5000)])
def test_without_a_whole_journal_the_block_stays_torn(
    in_merge: Path, damage: Callable[[Path], None]
) -> None:
    damage(rollback_of(in_merge))
    with pytest.raises(CorruptCatalogError, match="checksum"):
        _open(in_merge)


def test_what_a_merge_wrote_that_came_to_its_end_stays(in_merge: Path, tmp_path: Path) -> None:
    """A process killed after the new header leaves a journal that is not needed any more."""
    kept = tmp_path / "kept"
    shutil.copy(rollback_of(in_merge), kept)
    assert len(_num_rows(in_merge)) == 2  # opened and merged when it was closed
    merged = in_merge.read_bytes()
    shutil.copy(kept, rollback_of(in_merge))
    RollbackJournal(in_merge).roll_back()
    assert in_merge.read_bytes() == merged
    assert not rollback_of(in_merge).exists()


def test_a_merge_at_work_is_left_alone(in_merge: Path) -> None:
    torn = in_merge.read_bytes()
    with rollback_of(in_merge).open("rb") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(CatalogBusyError, match="being merged"):
            _open(in_merge)
    assert in_merge.read_bytes() == torn


def test_a_merge_that_fails_keeps_the_blocks_of_before_it(in_merge: Path) -> None:
    """The next merge of the same process does not take torn blocks for good ones."""
    journal = RollbackJournal(in_merge)
    kept = rollback_of(in_merge).read_bytes()
    descriptor = os.open(in_merge, os.O_RDONLY)
    with pytest.raises(duckdb.Error), journal.keep(descriptor, [0, 1]):
        raise duckdb.Error
    os.close(descriptor)
    assert rollback_of(in_merge).read_bytes() == kept
