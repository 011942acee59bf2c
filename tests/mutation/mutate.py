"""Change a module in random places, one at a time, and show which changes its own tests let pass.

A module's own tests are the fast files below `tests/unit` and `tests/properties` that import it or
bear its name or its folder's; where there is none, those that import what imports it. Mutants are
Cosmic Ray's, one for each place drawn. Without a change the tests have to pass. Nothing in the
working tree changes: all is in a copy.
"""

import argparse
import ast
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = ("tests/unit", "tests/properties")
# They give the same program nearly always (`==` and `is` of small numbers), or one that no test can
# tell from the first but by its speed (a cache).
_EQUIVALENT = ("Eq_Is", "NotEq_IsNot", "RemoveDecorator")
# A mutant that takes so many times as long as no change hangs; others are slow as the machine is.
_SLACK = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A change of a module, in the order it was drawn."""

    module: str
    mutation: MutationSpec
    tests: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    """Draw mutants of the modules, run their tests, print those that survived."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        roots = _copy_tree(copy)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = os.pathsep.join(str(copy / root) for root in roots)
        modules = dict(_find_modules(copy, roots))
        tests = {test: _imports(test) for top in _TESTS for test in Path(top).rglob("test_*.py")}
        mutants = list(_draw(options, modules, tests))
        _compile(*roots, "tests")
        return _judge(mutants, options)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", nargs="+", help="module or package, foretoken.predictor.transfer")
    parser.add_argument("--sample", type=int, default=20, help="mutants in all (20)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (1)")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="least seconds before one mutant's tests hang"
    )
    parser.add_argument("--tests", nargs="*", help="test files instead of the modules' own")
    parser.add_argument("--only", type=int, nargs="*", help="these numbers of the draw alone")
    parser.add_argument("--list", action="store_true", help="name the modules' own tests, run none")
    return parser.parse_args(arguments)


def _copy_tree(copy: Path) -> tuple[str, ...]:
    """Copy what git knows; return the roots of its sources."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=_ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (_ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_ROOT / name, copy / name)
    services = sorted(str(path.relative_to(copy)) for path in copy.glob("services/*/src"))
    return ("clients/python/gen", "clients/python/src", *services)


def _compile(*folders: str) -> None:
    """Compile sources, to be checked by hash: two changes may lie within a tick of the clock."""
    compiling = (sys.executable, "-m", "compileall", "-qq", "--invalidation-mode", "checked-hash")
    subprocess.run([*compiling, *folders], check=True)


def _find_modules(copy: Path, roots: Iterable[str]) -> Iterator[tuple[str, Path]]:
    for root in roots:
        for path in (copy / root).rglob("*.py"):
            relative = path.relative_to(copy / root).with_suffix("")
            yield ".".join(relative.parts).removesuffix(".__init__"), path.relative_to(copy)


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return the names a file imports, of modules and of what is in them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(node.module)
    return frozenset(found)


def _own_tests(
    module: str, modules: Mapping[str, Path], tests: Mapping[Path, frozenset[str]]
) -> tuple[str, ...]:
    _, service, *folders, name = module.split(".")
    words = [f"_{part}_" for part in (name, *folders[1:][-1:])]
    places = {service, "properties"}
    named, seen = {module}, {module}
    while named:
        own = [
            test
            for test, imports in tests.items()
            if imports & named
            or (places & {*test.parts} and any(word in f"{test.stem}_" for word in words))
        ]
        if own:
            return tuple(sorted(map(str, own), reverse=True))  # the laws take longest
        named = {other for other, path in modules.items() if _imports(path) & named} - seen
        seen |= named
    return ()


def _draw(
    options: argparse.Namespace,
    modules: Mapping[str, Path],
    tests: Mapping[Path, frozenset[str]],
) -> Iterator[Mutant]:
    """Draw places of all the modules alike, then one mutation for each."""
    chosen = sorted(
        name
        for name in modules
        if any(name == asked or name.startswith(f"{asked}.") for asked in options.module)
    )
    if not chosen:
        sys.exit(f"no module {' or '.join(options.module)}")
    own = {name: tuple(options.tests or _own_tests(name, modules, tests)) for name in chosen}
    if options.list:
        for name, files in own.items():
            print(f"{name}: {' '.join(files) or 'none'}")
        sys.exit()
    rng = random.Random(options.seed)  # noqa: S311 - a draw that anyone can repeat
    places: dict[tuple[str, tuple[int, int]], list[MutationSpec]] = {}
    for name in chosen:
        for mutation in _mutations(modules[name]):
            places.setdefault((name, mutation.start_pos), []).append(mutation)
    for name, start in rng.sample(sorted(places), min(options.sample, len(places))):
        yield Mutant(module=name, mutation=rng.choice(places[name, start]), tests=own[name])


def _mutations(path: Path) -> Iterator[MutationSpec]:
    """Yield the changes of a module but those of annotations and decorators: of no behaviour."""
    spans = _inert_spans(path)
    with use_db(":memory:", WorkDB.Mode.create) as session:
        init([path], session, {})
        for item in session.work_items:
            (mutation,) = item.mutations
            start = tuple(mutation.start_pos)
            if mutation.operator_name.endswith(_EQUIVALENT):
                continue
            if not any(first <= start < last for first, last in spans):
                yield mutation


def _inert_spans(path: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    spans = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts = [getattr(node, name, None) for name in ("annotation", "returns")]
        parts += getattr(node, "decorator_list", [])
        for part in (item for item in parts if isinstance(item, ast.expr)):
            end = (part.end_lineno or part.lineno, part.end_col_offset or part.col_offset)
            spans.append(((part.lineno, part.col_offset), end))
    return spans


def _command(mutant: Mutant) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m"]
    return [*command, "not slow and not gpu", *mutant.tests]


def _time_unchanged(mutant: Mutant) -> float:
    """Return the seconds that the tests take without a change; end where they fail so."""
    began_s = time.monotonic()
    done = subprocess.run(_command(mutant), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"without a change its tests fail:\n{done.stdout[-2_000:]}{done.stderr[-2_000:]}")
    return time.monotonic() - began_s


def _judge(mutants: Sequence[Mutant], options: argparse.Namespace) -> int:
    survived = []
    limits_s: dict[tuple[str, ...], float] = {}
    chosen = options.only or range(1, len(mutants) + 1)
    for number in chosen:
        mutant, killed = mutants[number - 1], False
        if mutant.tests:
            if mutant.tests not in limits_s:
                limits_s[mutant.tests] = max(options.timeout, _SLACK * _time_unchanged(mutant))
            text = shlex.join(_command(mutant))
            result = mutate_and_test([mutant.mutation], text, limits_s[mutant.tests])
            killed = result.test_outcome is not TestOutcome.SURVIVED
        line, column = mutant.mutation.start_pos
        verdict = "killed" if killed else "SURVIVED" if mutant.tests else "NO TESTS"
        operator = mutant.mutation.operator_name.removeprefix("core/")
        print(f"{number:4} {verdict:8} {mutant.module}:{line}:{column} {operator}", flush=True)
        if not killed:
            survived.append(number)
            print(result.diff if mutant.tests else "", flush=True)
    num_killed = len(chosen) - len(survived)
    print(f"{num_killed} of {len(chosen)} mutants killed ({num_killed / len(chosen):.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
