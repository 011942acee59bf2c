"""A damaged or unreadable file: the error says what it is and what to do; nothing is changed."""

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import CorruptCatalogError, ForetokenError, InvalidRequestError
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.wire.arrow import read_table

_HEADER_BYTES = 3 * 4096
_NOBODY = 65534


@pytest.fixture
def crashed(catalog: CatalogService, tmp_path: Path) -> Path:
    """The files of a catalog as a crash leaves them: rows in the file, more in its log."""
    list(catalog.record(run("merged"), batches(gemms(range(1, 8000)))))
    catalog.close()
    catalog.open()
    list(catalog.record(run("logged"), batches(gemms(range(1, 900)), gemms(range(1, 900)))))
    folder = tmp_path / "crashed"
    folder.mkdir()
    for name in ("catalog.duckdb", "catalog.duckdb.wal", "catalog.duckdb.acknowledged"):
        shutil.copy(tmp_path / name, folder)
    return folder / "catalog.duckdb"


def _error_of_use(path: Path) -> ForetokenError:
    service = CatalogService(CatalogConfig(path=str(path), num_threads=1))

    def use() -> None:
        service.open()
        read_table(service.read_measurements(MeasurementFilter(include_flagged=True)))

    with pytest.raises(ForetokenError) as caught:
        use()
    service.close()
    return caught.value


def _scribble(file: Path, start: int) -> None:
    content = bytearray(file.read_bytes())
    content[start : start + 64] = random.Random(start).randbytes(64)  # noqa: S311 - damage
    file.write_bytes(content)


def _truncate(file: Path, keep: float) -> None:
    os.truncate(file, int(file.stat().st_size * keep))


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: _scribble(file, 0),
        lambda file: _scribble(file, 4096),
        lambda file: _scribble(file, _HEADER_BYTES + 100),
        lambda file: _truncate(file, 0.3),
        lambda file: _truncate(file, 0.6),
    ],
    ids=["first header", "second header", "middle", "a third left", "end lost"],
)
def test_a_damaged_file_is_to_be_restored(damage: Callable[[Path], None], crashed: Path) -> None:
    damage(crashed)
    error = _error_of_use(crashed)
    assert isinstance(error, CorruptCatalogError)
    assert "restore it from a backup" in error.message


@pytest.fixture
def locked_folder() -> Iterator[Path]:
    """A folder for all to read, while this process is nobody in particular."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        is_root = os.geteuid() == 0
        (folder / "catalog.duckdb").write_bytes(b"")
        (folder / "catalog.duckdb").chmod(0o444)
        folder.chmod(0o555)
        if is_root:
            os.seteuid(_NOBODY)
        try:
            yield folder
        finally:
            if is_root:
                os.seteuid(0)
            folder.chmod(0o755)


@pytest.mark.parametrize("name", ["catalog.duckdb", "other.duckdb", "deeper/catalog.duckdb"])
def test_a_file_that_cannot_be_written_is_said(name: str, locked_folder: Path) -> None:
    error = _error_of_use(locked_folder / name)
    assert isinstance(error, InvalidRequestError)
    assert "ermission denied" in error.message
