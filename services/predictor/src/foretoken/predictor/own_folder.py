"""Folders that the predictor made itself: these, and no others, it may remove.

Each carries a file that says so. Its name begins with a dot, which no name from outside does.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

MARKER = ".made-by-foretoken"
# What the names of folders end in that are not whole yet.
PARTIAL = ".partial"


@contextmanager
def open_scratch(parent: Path) -> Iterator[Path]:
    """Give a folder of one's own in another; gone at the end, unless it got another name."""
    with TemporaryDirectory(dir=parent, suffix=PARTIAL, ignore_cleanup_errors=True) as path:
        folder = Path(path)
        (folder / MARKER).touch()
        yield folder


def remove_folder(folder: Path) -> bool:
    """Remove a folder that the predictor made, and say whether it is one; another stays."""
    is_own = not folder.is_symlink() and (folder / MARKER).is_file()
    if is_own:
        shutil.rmtree(folder, ignore_errors=True)
    return is_own
