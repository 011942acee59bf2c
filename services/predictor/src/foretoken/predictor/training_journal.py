"""The models of a training as they are done, in a file of its job, for the process that goes on.

One after another: a line of JSON, then as many bytes as it says. What a crash tore off, and what
another version of the program wrote, is left out.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from foretoken.domain.errors import StorageFullError
from foretoken.predictor.model_store import STORE_REVISION


class TrainingJournal:
    """Keeps packed models by the identity of their training."""

    def __init__(self, path: Path) -> None:
        """Keep where they lie; nothing needs to be there yet."""
        self._path = path

    def read(self) -> Mapping[str, bytes]:
        """Return the models that are whole, and drop what follows them."""
        content = self._path.read_bytes() if self._path.exists() else b""
        found: dict[str, bytes] = {}
        whole_bytes = 0
        for head, packed, end in _read_entries(content):
            whole_bytes = end
            if head["revision"] == STORE_REVISION:
                found[str(head["content_hash"])] = packed
        if whole_bytes < len(content):
            self._path.write_bytes(content[:whole_bytes])
        return found

    def append(self, content_hash: str, packed: bytes) -> None:
        """Add a model.

        Raises:
            StorageFullError: the disk is full.

        """
        head = {
            "content_hash": content_hash,
            "num_bytes": len(packed),
            "checksum": zlib.crc32(packed),
            "revision": STORE_REVISION,
        }
        try:
            with self._path.open("ab") as file:
                file.write(json.dumps(head).encode() + b"\n" + packed)
        except OSError as err:
            raise StorageFullError(
                f"a model could not be kept in {self._path.parent}: {err.strerror}; make room and"
                " train again"
            ) from err


def _read_entries(content: bytes) -> Iterator[tuple[dict[str, object], bytes, int]]:
    """Yield what each entry says, its model, and where it ends, up to the first that is torn."""
    start = 0
    while (stop := content.find(b"\n", start)) >= 0:
        try:
            head = json.loads(content[start:stop])
            start = stop + 1 + head["num_bytes"]
            packed = content[stop + 1 : start]
            is_whole = zlib.crc32(packed) == head["checksum"] and len(packed) == head["num_bytes"]
        except (ValueError, KeyError, TypeError):
            return
        if not is_whole:
            return
        yield head, packed, start
