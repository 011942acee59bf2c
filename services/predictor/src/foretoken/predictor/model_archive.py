"""One model version as one file: the same models give the same bytes, and its name is their hash.

The archive is a zip of what `model_store` writes: JSON, LightGBM's text and plain numpy arrays.
"""

import hashlib
import io
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

# What the names of folders end in that are not whole yet.
PARTIAL = ".partial"

_VERSION_LENGTH = 16


def pack_folder(folder: Path) -> bytes:
    """Return the archive of a folder's files; equal files give equal bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            # Without a date and with one permission, whenever and by whomever it is written.
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def unpack_folder(content: bytes, folder: Path) -> None:
    """Write an archive's files beside others; the folder appears whole or not at all.

    Several may do so at once: the first stays.
    """
    # A write that fails half way, for want of space, leaves nothing behind.
    with TemporaryDirectory(dir=folder.parent, suffix=PARTIAL, ignore_cleanup_errors=True) as path:
        partial = Path(path)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist():
                (partial / Path(name).name).write_bytes(archive.read(name))
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
