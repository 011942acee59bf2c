"""Import FASOP's profile database: times of the modules of a transformer, forward, in fp32.

`{model}_{gpu}_{tp}.npz` are tables by micro batch size, `profile_*.json` the measurements that
tables are made of, `{model}_{gpu}_{tp}.npy` legacy profiles of whole layers. CSV files next to them
hold no times of operators, which is said of them. Source: https://github.com/ai-computing/aicomp,
folder `fasop`.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from foretoken.catalog.importers.fasop import profile_file
from foretoken.catalog.importers.fasop.profile_rows import Assumptions, Profile
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    build_plan,
)
from foretoken.catalog.sources.content import parse_source_json
from foretoken.catalog.sources.file import SourceFile, read_source_file
from foretoken.catalog.sources.table import SourceTable, parse_csv

_PLAN_COLUMNS = ("mbs", "tp", "dp", "pp", "step_time(s)", "is_oom")
_SWEEP_COLUMNS = ("micro_batch_size", "tp", "pp", "dp", "status", "elapsed_sec")


def describe_results(source: SourceFile, path: Path) -> str:
    """Return what a CSV file of FASOP holds.

    Raises:
        InvalidRequestError: it is no CSV file, or a time in it is not a number.

    """
    table = parse_csv(source, path)
    if all(table.has(column) for column in _PLAN_COLUMNS):
        return (
            f"no rows: {table.num_rows} plans of FASOP's search with the step times it "
            f"estimates, {_range(table, 'step_time(s)')}; nothing in it was measured"
        )
    if all(table.has(column) for column in _SWEEP_COLUMNS):
        statuses = Counter(table.texts("status").tolist())
        counts = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
        return (
            f"no rows: a list of {table.num_rows} profiling runs ({counts}) and how long each "
            f"took in all, {_range(table, 'elapsed_sec')}, start and warm-up included"
        )
    return "not a file of this format"


def _range(table: SourceTable, column: str) -> str:
    times_s = table.numbers(column)
    return f"{times_s.min():.4g} to {times_s.max():.4g} s"


# A legacy profile may name another model at its end than the one FASOP is given.
_TABLE = re.compile(r"(?P<model>[^_]+)_(?P<gpu>[^_]+)_(?P<tp>[1-9]\d{0,3})(?:_(?P<other>[^_]+))?")
_ENDINGS = (".csv", ".json", ".npy", ".npz")
_OPTIONS = {
    "seq_len": "tokens of a sequence, which no file says",
    "dtype": "number format of the model, which no file says; fp32 unless said",
}


def _load(request: ImportRequest) -> ImportPlan:
    notes = ImportNotes()
    found = list(_read(request, Assumptions.of(request), notes))
    sources, tables = [source for source, _ in found], [rows for _, rows in found]
    return build_plan("fasop", request, sources, tables, notes=notes)


def _read(
    request: ImportRequest, assumed: Assumptions, notes: ImportNotes
) -> Iterator[tuple[SourceFile, pa.Table]]:
    root = request.path
    paths = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    for path in paths:
        name = path.relative_to(root).as_posix() if path != root else path.name
        if path.suffix not in _ENDINGS:
            notes.add(name, "not a file of this format")
            continue
        source = read_source_file(path, root)
        rows = _read_file(path, source, assumed, notes)
        if rows is not None:
            yield source, rows


def _read_file(
    path: Path, source: SourceFile, assumed: Assumptions, notes: ImportNotes
) -> pa.Table | None:
    if path.suffix == ".csv":
        notes.add(source.name, describe_results(source, path))
        return None
    if path.suffix == ".json":
        return _read_json(path, source, assumed, notes)
    match = _TABLE.fullmatch(path.stem)
    if match is None:
        notes.add(source.name, "not read: not named {model}_{gpu}_{tp}")
        return None
    profile = Profile(
        path=path,
        source=source,
        device=assumed.resolve_device(match["gpu"], path),
        model=assumed.resolve_model(match["other"] or match["model"], path),
        tp=int(match["tp"]),
        assumed=assumed,
    )
    if not profile.is_wanted:
        notes.add(source.name, f"not read: it is of {profile.model.name} on {profile.device}")
        return None
    if path.suffix == ".npz":
        return profile_file.read_table(profile)
    return profile_file.read_legacy(profile)


def _read_json(
    path: Path, source: SourceFile, assumed: Assumptions, notes: ImportNotes
) -> pa.Table | None:
    content = parse_source_json(source, path)
    if not profile_file.is_profile(content):
        notes.add(source.name, "not a profile of FASOP")
        return None
    profile = Profile(
        path=path,
        source=source,
        device=assumed.resolve_device("", path),
        model=assumed.resolve_model(profile_file.model_name(content, path), path),
        tp=profile_file.read_setting(content, "tp_size", path),
        assumed=assumed,
    )
    if not profile.is_wanted:
        notes.add(source.name, f"not read: it is of {profile.model.name}")
        return None
    if "per_rank_timing" in content:
        notes.add(source.name, "per_rank_timing is not read: the combined times hold it")
    return profile_file.read_profile(content, profile)


IMPORTER = Importer(
    name="fasop",
    summary="FASOP's profiles: {model}_{gpu}_{tp}.npz or .npy, and profile_*.json",
    load=_load,
    options=_OPTIONS,
)
