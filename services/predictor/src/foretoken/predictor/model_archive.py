"""One model version as one file: the same models give the same bytes, and its name is their hash.

The archive is a zip of what `model_store` writes: JSON, LightGBM's text and plain numpy arrays.
"""

import hashlib
import io
import zipfile
from pathlib import Path

from foretoken.domain.archive import Archive
from foretoken.domain.name import check_name, path_inside
from foretoken.predictor.own_folder import MARKER, open_scratch

_VERSION_LENGTH = 16


def pack_folder(folder: Path) -> bytes:
    """Return the archive of a folder's files; equal files give equal bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            if path.name != MARKER:
                # Without a date and with one permission, whenever and by whomever it is written.
                member = zipfile.ZipInfo(path.name)
                archive.writestr(member, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def unpack_folder(content: bytes, folder: Path) -> None:
    """Write an archive's files next to others; the folder appears whole or not at all.

    Several may do so at once: the first stays.

    Raises:
        InvalidRequestError: it is no archive, a member's name is none, or all unpack to more than
            an archive of its size may.

    """
    archive = Archive.open(content)
    # A write that fails half way, for want of space, leaves nothing behind.
    with open_scratch(folder.parent) as partial:
        for name in archive:
            path_inside(partial, check_name(name, "member")).write_bytes(archive[name])
        try:
            partial.replace(folder)
        except OSError:
            if not folder.exists():
                raise


def hash_content(content: bytes) -> str:
    """Return the SHA-256 of an archive."""
    return hashlib.sha256(content).hexdigest()


def version_of(content_hash: str) -> str:
    """Return the version that an archive's hash names."""
    return content_hash[:_VERSION_LENGTH]
