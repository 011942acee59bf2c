"""A hash of source files, so that what one version of the code left is not taken for another's."""

import hashlib
from collections.abc import Sequence
from pathlib import Path


def hash_sources(folder: Path, patterns: Sequence[str]) -> str:
    """Return a hash of the files of a folder that match, in the order of their paths."""
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
