"""A hash of a source file and of all it imports here: what code compiled from it rests on."""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

_PACKAGE = "foretoken"
_INIT, _SUFFIX = "__init__.py", ".py"
# Imports as they are written here, at the start of a line. What a text in a source has like one
# counts too: more in a hash does no harm. The syntax tree takes ten times as long, at every start.
_FROM = re.compile(r"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|.*)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+(.*)", re.MULTILINE)
_COMMENT = re.compile(r"#.*")


def compiled_name(function: Callable[..., object], *compiler: str) -> str:
    """Return the name under which machine code of a function is kept, with a hash in it.

    The hash is of every source that the function's module imports, of Python, and of what
    `compiler` says of the compiler, the libraries it knows and the processor it compiles for. Code
    without a source file keeps its name: nothing is kept of it.
    """
    path = Path(function.__code__.co_filename)
    name = function.__qualname__
    if not path.is_file():
        return name
    return f"{name}_{_hash_file(path, function.__module__, compiler)}"


@cache
def _hash_file(path: Path, module: str, compiler: tuple[str, ...]) -> str:
    return _hash(path, (sys.version, *compiler), module, _sources_of(module.partition(".")[0]))


@cache
def _sources_of(package: str) -> "_Sources":
    """Return the sources that modules of a package import, as they are when first looked at."""
    return _Sources({name: _folders_of(name) for name in (package, _PACKAGE)})


def _folders_of(package: str) -> tuple[Path, ...]:
    """Return the source roots of a package; none of a module that is in none."""
    return tuple(map(Path, getattr(sys.modules.get(package), "__path__", ())))


def hash_source(
    path: Path,
    others: Sequence[str] = (),
    folders: Mapping[str, Sequence[Path]] | None = None,
    module: str = "",
) -> str:
    """Return a hash of a file, of every module here that it imports, in turn, and of others.

    `folders` are the source roots of packages by name; those of the installed one unless given.
    `module` is the file's own name, which says where its relative imports lead; modules next to one
    without a package count, too.
    """
    return _hash(path, others, module, _Sources(folders))


def _hash(path: Path, others: Sequence[str], module: str, sources: "_Sources") -> str:
    digest = hashlib.sha256(repr(tuple(others)).encode())
    for name, source in sorted(sources.closure(path, module).items()):
        content = sources.read(source)
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def import_closure(
    path: Path, folders: Mapping[str, Sequence[Path]] | None = None, module: str = ""
) -> dict[str, Path]:
    """Return the file of every module that a file imports, in turn, by its name; its own is ''."""
    return _Sources(folders).closure(path, module)


class _Sources:
    """Source files, each read once: closures of modules next to each other are nearly the same."""

    def __init__(self, folders: Mapping[str, Sequence[Path]] | None = None) -> None:
        self._roots = folders or {_PACKAGE: _folders_of(_PACKAGE)}
        self._contents: dict[Path, bytes] = {}
        self._modules: dict[Path, Mapping[str, Path]] = {}
        self._imports: dict[tuple[str, Path, Path | None], Mapping[str, Path]] = {}

    def read(self, path: Path) -> bytes:
        """Return the content of a file."""
        if path not in self._contents:
            self._contents[path] = path.read_bytes()
        return self._contents[path]

    def closure(self, path: Path, module: str) -> dict[str, Path]:
        """Return the file of every module that one imports, in turn, by name; its own is ''."""
        is_alone = "." not in module and path.name != _INIT
        found, waiting = {"": path}, [(module, path)]
        while waiting:
            imported = self._imported(*waiting.pop(), path.parent if is_alone else None)
            waiting += [(name, file) for name, file in imported.items() if name not in found]
            found = {**imported, **found}
        return found

    def _imported(self, importer: str, source: Path, own_folder: Path | None) -> Mapping[str, Path]:
        """Return the files that one imports itself, those of its own folder too if given."""
        key = importer, source, own_folder
        if key not in self._imports:
            parent = importer if source.name == _INIT else importer.rpartition(".")[0]
            names = _imported_names(self.read(source).decode(), parent)
            files = {name: self._find(name, own_folder) for name in names - {_PACKAGE}}
            self._imports[key] = {name: file for name, file in files.items() if file is not None}
        return self._imports[key]

    def _find(self, name: str, own_folder: Path | None) -> Path | None:
        top, _, rest = name.partition(".")
        places = self._roots.get(top, ())
        if own_folder is not None and not (rest or places):
            files = (own_folder / f"{top}{_SUFFIX}", own_folder / top / _INIT)
            return next((file for file in files if file.is_file()), None)
        for root in places:
            if root not in self._modules:
                self._modules[root] = _modules_below(root)
            if found := self._modules[root].get(rest):
                return found
        return None


@cache
def _imported_names(text: str, parent: str) -> frozenset[str]:
    """Return all names that may be modules: those imported, what is taken from them, packages."""
    return frozenset(
        ".".join(parts[:length])
        for name in _import_statements(text, parent)
        for parts in (name.split("."),)
        for length in range(1, len(parts) + 1)
    )


def _import_statements(text: str, parent: str) -> Iterator[str]:
    code = _COMMENT.sub("", text)
    for dots, module, names in _FROM.findall(code):
        above = parent.split(".")[: parent.count(".") + 2 - len(dots)] if dots else []
        origin = ".".join([*above, *filter(None, [module])])
        yield from (f"{origin}.{name}" for name in _first_words(names.strip("()")))
    for names in _IMPORT.findall(code):
        yield from _first_words(names)


def _first_words(names: str) -> Iterator[str]:
    """Yield what is imported, without the names it is given here."""
    return (words[0] for name in names.split(",") if (words := name.split()))


def _modules_below(root: Path) -> Mapping[str, Path]:
    """Return the files of a package's modules by their names below it, its own by none.

    To look for each name that a source mentions takes ten times as long.
    """
    found: dict[str, Path] = {}
    for folder, _, files in os.walk(root):
        place = Path(folder)
        # A module comes before a package of its name.
        for file in sorted(files, key=_INIT.__eq__):
            if file.endswith(_SUFFIX):
                own = [] if file == _INIT else [file.removesuffix(_SUFFIX)]
                found.setdefault(".".join([*place.relative_to(root).parts, *own]), place / file)
    return found
