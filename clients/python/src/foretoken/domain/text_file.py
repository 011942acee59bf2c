"""Read text, JSON and archives that people, other programs and strangers made.

Nothing is unpacked before the archive's directory was checked, and no file to more bytes than the
directory says.
"""

import json
import mmap
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Self

from foretoken.domain.errors import InvalidRequestError

# Every entry of an archive's directory starts so.
_ENTRY = b"PK\x01\x02"
# Deflate compresses no further than this. Source: the technical details of zlib.net.
DEFLATE_RATIO_MAX = 1032
_DRIVE = re.compile("[A-Za-z]:")
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_ENCRYPTED = 0x1
# zlib, struct and the decoding of names have errors of their own.
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpackBudget:
    """What an archive may unpack to, all of its files together.

    At most `max_ratio` times its own bytes, where that is more than `free_bytes`: a small archive
    of much the same is harmless.
    """

    max_files: int = 10_000
    max_bytes: int = 8 * 2**30
    max_ratio: int = 200
    free_bytes: int = 64 * 2**20

    def allowed_bytes(self, num_packed_bytes: int) -> int:
        """Return what an archive of that many bytes may unpack to."""
        return min(self.max_bytes, max(self.free_bytes, self.max_ratio * num_packed_bytes))


class Archive(Mapping[str, bytes]):
    """The files of an archive by name, unpacked as each is asked for. Folders are left out.

    Reading a file raises `InvalidRequestError` where it is damaged.
    """

    def __init__(self, archive: zipfile.ZipFile, files: Mapping[str, zipfile.ZipInfo]) -> None:
        self._archive = archive
        self._files = files

    @classmethod
    def open(cls, content: bytes | Path, budget: UnpackBudget | None = None) -> Self:
        """Read the directory of an archive, in memory or a file that stays open, and nothing else.

        Raises:
            InvalidRequestError: it is no zip archive, damaged or encrypted, has a file twice or
                one whose name leads out of a folder, or unpacks to more than its budget.

        """
        budget = budget or UnpackBudget()
        try:
            num_bytes, num_entries = _measure(content)
            # Before the directory is loaded.
            if num_entries > budget.max_files:
                raise InvalidRequestError(f"more than {budget.max_files} members")
            archive = zipfile.ZipFile(content if isinstance(content, Path) else BytesIO(content))
        except _UNREADABLE as err:
            raise _unreadable(err) from err
        members = [info for info in archive.infolist() if not info.filename.endswith("/")]
        for info in members:
            _check_member(info)
        files = {info.filename: info for info in members}
        if len(files) < len(members):
            raise InvalidRequestError("a member is there twice")
        # Many files may share the same bytes: what counts is what they unpack to.
        allowed_bytes = budget.allowed_bytes(num_bytes)
        if sum(info.file_size for info in members) > allowed_bytes:
            raise InvalidRequestError(
                f"a ZIP file of {num_bytes} bytes that unpacks to more than {allowed_bytes}"
            )
        return cls(archive, files)

    @property
    def num_bytes(self) -> int:
        """What all files unpack to."""
        return sum(info.file_size for info in self._files.values())

    def num_bytes_of(self, name: str) -> int:
        """Return what a file unpacks to, at most."""
        return self._files[name].file_size

    def __getitem__(self, name: str) -> bytes:
        """Return the content of a file."""
        info = self._files[name]
        try:
            # No more than the directory says, whatever the file would unpack to.
            return self._archive.read(info)
        except _UNREADABLE as err:
            raise _unreadable(err) from err

    def __iter__(self) -> Iterator[str]:
        """Yield the names, in the order of the archive."""
        return iter(self._files)

    def __len__(self) -> int:
        """How many files there are."""
        return len(self._files)


def _measure(content: bytes | Path) -> tuple[int, int]:
    """Return the size of an archive, and at most how many entries its directory has."""
    if isinstance(content, bytes):
        return len(content), content.count(_ENTRY)
    with content.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return len(view), sum(1 for _ in re.finditer(re.escape(_ENTRY), view))


def _check_member(info: zipfile.ZipInfo) -> None:
    name = info.filename
    parts = name.replace("\\", "/").split("/")
    if ".." in parts or parts[0] == "" or _DRIVE.match(name):
        raise InvalidRequestError(f"the member {name!r} has no name, or leads out of the archive")
    if info.flag_bits & _ENCRYPTED or info.compress_type not in _METHODS:
        raise InvalidRequestError(f"the member {name!r} is encrypted, or packed in a rare way")
    if info.file_size > DEFLATE_RATIO_MAX * max(info.compress_size, 1):
        raise InvalidRequestError(f"the member {name!r} claims more bytes than it can unpack to")


def _unreadable(err: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"not a ZIP file that can be read: {err}")


def is_there(path: Path) -> bool:
    """Return whether there is a file or folder; none is there by a name that no file can have."""
    try:
        return path.exists()
    except OSError:
        return False


def find_named_file(folder: Path, name: str, field: str) -> Path:
    """Return the path that a file in a folder names: `~` is a home, the rest relative to it.

    Raises:
        InvalidRequestError: it is in the home of nobody.

    """
    try:
        return folder / Path(name).expanduser()
    except RuntimeError as err:
        raise InvalidRequestError.of_field(field, f"{name}: {err}") from err


def read_text(path: Path, field: str) -> str:
    """Return a file's text in UTF-8; `field` is what an error is about.

    Raises:
        InvalidRequestError: it cannot be read, or is in something else; names the byte.

    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise InvalidRequestError.of_field(
            field, f"{path} is not UTF-8 text: {err.reason} at byte {err.start}"
        ) from err
    except (OSError, ValueError) as err:  # a null in the name is a ValueError
        reason = err.strerror if isinstance(err, OSError) else ""
        raise InvalidRequestError.of_field(field, f"cannot read {path}: {reason or err}") from err


def parse_json(text: str | bytes, field: str, origin: str = "") -> Any:
    """Return the value in a JSON text; `origin` says where it is from, as a file's name does.

    Raises:
        InvalidRequestError: it is no JSON, not UTF-8, or nested too deep.

    """
    with _naming(field, origin):
        return json.loads(text)


def parse_json_texts(text: str, field: str, origin: str = "") -> list[Any]:
    """Return the values of JSON texts that stand one after the other.

    Raises:
        InvalidRequestError: as `parse_json`.

    """
    decoder, values, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        with _naming(field, origin):
            value, end = decoder.raw_decode(rest)
        values.append(value)
        rest = rest[end:].lstrip()
    return values


@contextmanager
def _naming(field: str, origin: str) -> Iterator[None]:
    """Say of what a decoder refuses which field it is, and where the text is from."""
    place = f"{origin} " if origin else ""
    try:
        yield
    except RecursionError as err:
        raise InvalidRequestError.of_field(field, f"{place}is JSON nested too deep") from err
    except ValueError as err:
        raise InvalidRequestError.of_field(field, f"{place}is not JSON: {err}") from err


def read_json(path: Path, field: str) -> Any:
    """Return the value in a JSON file; `field` is what an error is about.

    Raises:
        InvalidRequestError: as `read_text` and `parse_json`.

    """
    return parse_json(read_text(path, field), field, str(path))
