"""What was learned when questions needed it: a folder with a file per series.

Files are named by the identity of the training, as the members of a version are. They appear whole,
so processes share them without a lock. What nobody read for long, such as models of rows that the
catalog no longer has, is removed when something new is kept: who needs it after all makes it anew.
"""

import logging
import os
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from foretoken.predictor.packed_model import STORE_REVISION, pack_model, unpack_model
from foretoken.predictor.packing import write_whole
from foretoken.predictor.series import SeriesHead
from foretoken.predictor.trainer import SeriesModel

_log = logging.getLogger(__name__)

_MEMBER = "series"
# A file is removed that nobody wrote or read for so long, so not one that another process is about
# to read. When it was read is noted no more often than this.
_UNREAD_S, _NOTED_S = 7 * 86_400.0, 3_600.0


class LearnedFolder(Mapping[str, bytes]):
    """The packed models of series by the identity of their training, a file each."""

    def __init__(self, folder: Path, now_s: Callable[[], float] = time.time) -> None:
        """Use the part of a folder that is for models as this release writes them.

        `now_s` is in seconds since 1970, as the times of files are.
        """
        self.path = folder / "-".join(map(str, STORE_REVISION))
        self._now_s = now_s

    def __getitem__(self, content_hash: str) -> bytes:
        """Return one that was kept."""
        try:
            path = self._file(content_hash)
            packed = zlib.decompress(path.read_bytes())
        except FileNotFoundError as err:
            raise KeyError(content_hash) from err
        self.note_read(path)
        return packed

    def __iter__(self) -> Iterator[str]:
        """Yield the identities."""
        return (path.stem for path in self.path.glob(f"*.{_MEMBER}"))

    def __len__(self) -> int:
        """How many there are."""
        return sum(1 for _ in self)

    def keep(self, content_hash: str, packed: bytes) -> None:
        """Keep one; whoever reads meanwhile finds it whole or not at all."""
        self.write(self._file(content_hash), zlib.compress(packed))

    def write(self, path: Path, content: bytes) -> None:
        """Write a file of the folder, and remove those that nobody read for long.

        Those in the format of other releases, too.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
        oldest_s = self._now_s() - _UNREAD_S
        for other in self.path.parent.glob("*/*"):
            # Another process may have removed it.
            with suppress(FileNotFoundError):
                if other.is_file() and other.stat().st_mtime < oldest_s:
                    other.unlink()

    def note_read(self, path: Path) -> None:
        """Note that a file is in use."""
        now_s = self._now_s()
        # It may be gone by now, or of another user.
        with suppress(OSError):
            if path.stat().st_mtime < now_s - _NOTED_S:
                os.utime(path, (now_s, now_s))

    def load(self, head: SeriesHead, train: Callable[[], SeriesModel]) -> SeriesModel:
        """Return a model as it was kept; one that was not is trained, and kept."""
        content_hash = head.content_hash
        try:
            return unpack_model(head, self[content_hash])
        except KeyError:
            pass
        except Exception as err:  # noqa: BLE001 - what is damaged can fail anywhere
            _log.warning("trained anew: a model of %s cannot be read: %r", head.key.operator, err)
        model = train()
        try:
            self.keep(content_hash, pack_model(model))
        except OSError as err:  # without it the next process trains again
            _log.warning("the model is not kept: %s", err)
        return replace(model, content_hash=content_hash)

    def forget(self, heads: Collection[SeriesHead]) -> None:
        """Remove those that a version has now."""
        for head in heads:
            self._file(head.content_hash).unlink(missing_ok=True)

    def _file(self, content_hash: str) -> Path:
        return self.path / f"{content_hash}.{_MEMBER}"
