"""The files of an import, read one at a time: a folder's, one alone, or a ZIP archive's.

A wheel is a ZIP archive.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from foretoken.catalog.sources.file import SourceFile, current_budget, read_source_file, refuse
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.text_file import DEFLATE_RATIO_MAX, Archive, UnpackBudget

_ARCHIVES = (".whl", ".zip")
# What files unpack to together is no matter: one at a time is in memory, within its budget.
_BUDGET = UnpackBudget(max_files=100_000, max_bytes=64 * 2**30, max_ratio=DEFLATE_RATIO_MAX)


@dataclass(frozen=True, slots=True)
class SourceTree:
    """Files by name, relative to the path that was named, in order; `links` are not among them.

    `archive_hash` is the SHA-256 of the archive, empty where there is none.
    """

    root: Path
    names: tuple[str, ...]
    links: tuple[str, ...] = ()
    archive: Archive | None = None
    archive_hash: str = ""

    @classmethod
    def open(cls, root: Path) -> Self:
        """List the files under a path.

        Raises:
            InvalidRequestError: a link leads out of the path, or it is no archive that can be read.

        """
        if root.is_dir():
            return cls._of_folder(root)
        if root.suffix not in _ARCHIVES or not root.is_file():
            return cls(root, (root.name,))
        try:
            with root.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            archive = Archive.open(root, _BUDGET)
        except (InvalidRequestError, OSError) as err:
            refuse(root, str(err))
        return cls(root, tuple(sorted(archive)), (), archive, digest)

    @classmethod
    def _of_folder(cls, root: Path) -> Self:
        names: list[str] = []
        links: list[str] = []
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted((*folders, *files)):
                path = Path(folder) / name
                place = path.relative_to(root).as_posix()
                if path.is_symlink():
                    if not path.resolve().is_relative_to(root.resolve()):
                        refuse(path, f"leads out of {root}; copy what it names there")
                    links.append(place)
                elif name in files:
                    names.append(place)
        return cls(root, tuple(names), tuple(links))

    def path(self, name: str) -> Path:
        """Return what errors call a file."""
        return self.root if self.root.name == name and self.root.is_file() else self.root / name

    def read(self, name: str) -> SourceFile:
        """Read a file.

        Raises:
            InvalidRequestError: as `read_source_file`, or it is damaged in the archive.

        """
        path = self.path(name)
        if self.archive is None:
            return read_source_file(path, self.root)
        current_budget().spend(self.archive.num_bytes_of(name), path)
        try:
            content = self.archive[name]
        except InvalidRequestError as err:
            refuse(path, err.message)
        return SourceFile(name, hashlib.sha256(content).hexdigest(), content)
