"""What a catalog lacks of what it acknowledged, in words."""

from dataclasses import dataclass
from pathlib import Path

from foretoken.catalog.storage import database_file
from foretoken.catalog.storage.acknowledged import Note
from foretoken.catalog.storage.commit import Commit
from foretoken.domain.errors import IncompleteCatalogError


@dataclass(frozen=True, slots=True)
class Loss:
    """The note says that `note.commit` was acknowledged; the newest that is there is `found`."""

    path: Path
    note: Note
    found: Commit

    @property
    def num_commits(self) -> int:
        """How many write transactions are missing."""
        return self.note.commit.number - self.found.number

    @property
    def num_batches(self) -> int:
        """How many batches of measurements are missing."""
        return self.note.commit.num_batches - self.found.num_batches

    @property
    def num_rows(self) -> int:
        """How many rows are missing."""
        return self.note.commit.num_rows - self.found.num_rows

    def describe(self) -> str:
        """Say what is missing, and of which file."""
        return (
            f"the catalog {self.path} lacks {_count(self.num_rows, 'row')} in "
            f"{_count(self.num_batches, 'batch', 'batches')} that it acknowledged "
            f"({_count(self.num_commits, 'write')}): acknowledged up to "
            f"{_name(self.note.commit)}, found up to {_name(self.found)}; {self._describe_files()}"
        )

    def as_error(self) -> IncompleteCatalogError:
        """Return the error to refuse the catalog with."""
        return IncompleteCatalogError(
            f"{self.describe()}. Put the missing file back, or restore a backup (foretoken catalog "
            "restore --replace), or go on without what is missing: foretoken catalog recover "
            "--accept-loss",
            num_missing_rows=str(self.num_rows),
            num_missing_batches=str(self.num_batches),
            num_missing_writes=str(self.num_commits),
        )

    def _describe_files(self) -> str:
        if not self.path.exists():
            return "the file is gone"
        log = database_file.log_of(self.path)
        had, has = self.note.log_bytes, database_file.log_bytes(self.path)
        now = f"has {has:,}" if log.exists() else "is gone"
        return (
            f"its log {log.name} had {had:,} bytes then and {now} now: the log was lost or "
            f"damaged, or {self.path.name} is an older copy"
        )


def _name(commit: Commit) -> str:
    if not commit.newest_batch:
        return f"{commit.recorded_at} (write {commit.number})" if commit.recorded_at else "nothing"
    return f"{commit.newest_batch}, recorded {commit.recorded_at} (write {commit.number})"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
