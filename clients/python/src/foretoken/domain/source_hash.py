"""A hash of a source file and of all it imports here: what code compiled from it rests on."""

import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

_PACKAGE = "foretoken"
_INIT = "__init__.py"
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
    own = module.partition(".")[0]
    folders = {name: _folders_of(name) for name in (own, _PACKAGE)}
    return hash_source(path, (sys.version, *compiler), folders, module)


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
    digest = hashlib.sha256(repr(tuple(others)).encode())
    for name, source in sorted(import_closure(path, folders, module).items()):
        content = source.read_bytes()
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def import_closure(
    path: Path, folders: Mapping[str, Sequence[Path]] | None = None, module: str = ""
) -> dict[str, Path]:
    """Return the file of every module that a file imports, in turn, by its name; its own is ''."""
    roots = folders or {_PACKAGE: _folders_of(_PACKAGE)}
    is_alone = "." not in module and path.name != _INIT
    found, waiting = {"": path}, [(module, path)]
    while waiting:
        importer, source = waiting.pop()
        parent = importer if source.name == _INIT else importer.rpartition(".")[0]
        for name in _imported_names(source.read_text("utf-8"), parent):
            top, _, rest = name.partition(".")
            places = roots.get(top, ())
            if is_alone and not (rest or places):
                rest, places = top, (path.parent,)
            is_new = name not in found and name != _PACKAGE
            file = _find_module(rest, tuple(places)) if is_new else None
            if file is not None:
                found[name] = file
                waiting.append((name, file))
    return found


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


@cache
def _find_module(rest: str, roots: tuple[Path, ...]) -> Path | None:
    """Return the file of a module by its name below its package's roots."""
    relative = Path(*filter(None, rest.split(".")))
    places = (relative.with_suffix(".py") if rest else relative / _INIT, relative / _INIT)
    files = (root / place for root in roots for place in places)
    return next((file for file in files if file.is_file()), None)
