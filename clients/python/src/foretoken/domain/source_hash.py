"""A hash of a source file and of all it imports here: what code compiled from it rests on."""

import ast
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import foretoken

_PACKAGE = "foretoken"


def compiled_name(function: Callable[..., object], *compiler: str) -> str:
    """Return the name under which machine code of a function is kept, with a hash in it.

    The hash is of every source that the function's module imports, of Python, and of what
    `compiler` says of the compiler, the libraries it knows and the processor it compiles for. Code
    without a source file keeps its name: nothing is kept of it.
    """
    path = Path(function.__code__.co_filename)
    name = function.__qualname__
    return f"{name}_{_hash_file(path, compiler)}" if path.is_file() else name


@cache
def _hash_file(path: Path, compiler: tuple[str, ...]) -> str:
    return hash_source(path, (sys.version, *compiler))


def hash_source(path: Path, others: Sequence[str] = (), folders: Sequence[Path] = ()) -> str:
    """Return a hash of a file, of every module of this package it imports, in turn, and of others.

    `folders` are the package's source roots; those of the installed one unless given.
    """
    digest = hashlib.sha256(repr(tuple(others)).encode())
    for name, source in sorted(import_closure(path, folders).items()):
        content = source.read_bytes()
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def import_closure(path: Path, folders: Sequence[Path] = ()) -> dict[str, Path]:
    """Return the file of every module that a file imports, in turn, by its name; its own is ''."""
    roots = tuple(folders) or tuple(Path(folder) for folder in foretoken.__path__)
    found, waiting = {"": path}, [path]
    while waiting:
        for name in _imported_names(waiting.pop().read_text("utf-8")):
            source = None if name in found else _find_module(name, roots)
            if source is not None:
                found[name] = source
                waiting.append(source)
    return found


@cache
def _imported_names(text: str) -> frozenset[str]:
    """Return all names that may be modules: those imported, what is taken from them, packages."""
    return frozenset(
        ".".join(parts[:length])
        for name in _import_statements(text)
        if (parts := name.split("."))[0] == _PACKAGE
        for length in range(2, len(parts) + 1)
    )


def _import_statements(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _find_module(name: str, roots: tuple[Path, ...]) -> Path | None:
    relative = Path(*name.split(".")[1:])
    places = (relative.with_suffix(".py"), relative / "__init__.py")
    files = (root / place for root in roots for place in places)
    return next((file for file in files if file.is_file()), None)
