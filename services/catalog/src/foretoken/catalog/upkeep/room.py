"""What an operator watches of a catalog's files: room on their volume, the age of its backup."""

import logging
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_log = logging.getLogger(__name__)
_NOTE = "last_backup"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskUsage:
    """A volume, in bytes; `free` is what this process may still write."""

    total: int
    free: int


def disk_usage(path: Path) -> DiskUsage:
    """Return the usage of the volume that a file lies on, or will lie on."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    found = shutil.disk_usage(folder)
    return DiskUsage(total=found.total, free=found.free)


class BackupNote:
    """When the last backup was read to its end, kept in the catalog's folder over restarts."""

    def __init__(self, folder: Path) -> None:
        """Keep where the note lies."""
        self._path = folder / _NOTE

    def note(self, moment: datetime) -> None:
        """Keep the moment of a backup that ended. One that cannot be kept fails no backup."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(moment.isoformat(), encoding="ascii")
        except OSError as err:
            _log.warning("the time of the backup is not kept in %s: %s", self._path, err.strerror)

    def last_s(self) -> float:
        """Return that moment in s since 1970; 0 where there is no note of one."""
        try:
            return datetime.fromisoformat(self._path.read_text(encoding="ascii")).timestamp()
        except (OSError, ValueError):
            return 0.0
