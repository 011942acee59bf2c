"""Names from outside are data: one alphabet for them, and one way for them to become paths.

From outside is what comes over the wire, out of a catalog, an archive or a manifest, whoever wrote
it. A name under which something is stored keeps to the alphabet where it enters a service, and
whatever becomes a path is joined here, so that it stays in its folder.
"""

import re
from pathlib import Path

from foretoken.domain.errors import InvalidRequestError

MAX_NAME_CHARS = 128

_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")
_NOT_OF_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
# No file system has them in the names of files, or not all: C0 controls, DEL, Windows' separator.
_NOT_OF_FILES = re.compile(r"[\x00-\x1f\x7f\\]")
# Of one file or folder. Source: NAME_MAX of Linux.
_MAX_FILE_NAME_BYTES = 255
# Enough of a wrong name to find it again.
_SHOWN_CHARS = 60


def is_name(text: str) -> bool:
    """Whether a text keeps to the alphabet of names.

    Letters and digits of ASCII, `.`, `_` and `-`, at most 128 of them, the first no dot.
    """
    return _NAME.fullmatch(text) is not None


def check_name(text: str, field: str) -> str:
    """Return a name that keeps to the alphabet.

    Raises:
        InvalidRequestError: it does not; names the field.

    """
    if not is_name(text):
        raise InvalidRequestError.of_field(
            field,
            f"{_show(text)} is no name: it needs 1 to {MAX_NAME_CHARS} letters, digits, dots,"
            " underscores or hyphens (A-Z a-z 0-9 . _ -), the first no dot",
        )
    return text


def text_to_name(text: str) -> str:
    """Return a text as a name that leaves room for more: what is not of the alphabet is a hyphen.

    At most 64 characters.
    """
    return _NOT_OF_NAMES.sub("-", text).lstrip(".")[: MAX_NAME_CHARS // 2] or "-"


def path_inside(folder: Path, name: str, field: str = "path") -> Path:
    """Return the path of a file in a folder; `name` may lead through folders below, by `/`.

    Raises:
        InvalidRequestError: it leads elsewhere, also through a link, or no file can have that
            name; names the field.

    """
    parts = name.split("/")
    is_plain = not _NOT_OF_FILES.search(name) and all(map(_is_file_name, parts))
    path = folder / name
    # Links lie on the disk, and are followed only where the name itself is sound.
    if not is_plain or not path.resolve().is_relative_to(folder.resolve()):
        raise InvalidRequestError.of_field(field, f"{_show(name)} leads out of its folder")
    return path


def _is_file_name(part: str) -> bool:
    is_there = part not in ("", ".", "..")
    return is_there and len(part.encode(errors="replace")) <= _MAX_FILE_NAME_BYTES


def _show(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")
