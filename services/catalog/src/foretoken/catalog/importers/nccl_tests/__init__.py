"""Import what nccl-tests print (`all_reduce_perf` and its siblings).

A path is a log or a folder of logs; a log may hold several runs. The list of devices says which
product, how many ranks and nodes. What sizes and times mean is in `doc/PERFORMANCE.md` of
https://github.com/NVIDIA/nccl-tests.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from foretoken.catalog.importers.nccl_tests.log import parse_log
from foretoken.catalog.importers.nccl_tests.run_rows import OPERATORS, Site, build_run_rows
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    build_plan,
)
from foretoken.catalog.sources.file import SourceFile, read_source_file
from foretoken.domain.errors import InvalidRequestError

_ENDINGS = frozenset({"", ".log", ".out", ".stdout", ".txt"})
_OPTIONS = {
    "collective": f"the collective of logs that do not name it: {', '.join(sorted(OPERATORS))}",
    "devices_per_node": "ranks on a node, for logs without a list of devices",
    "num_nodes": "nodes, for logs without a list of devices; 1 unless said",
}


def _load(request: ImportRequest) -> ImportPlan:
    notes = ImportNotes()
    site = Site.of(request)
    sources: list[SourceFile] = []
    tables: list[pa.Table] = []
    for path in _find_logs(request.path, notes):
        source = read_source_file(path, request.path)
        runs = parse_log(source, path)
        if not runs:
            notes.add(source.name, "has no table of nccl-tests")
            continue
        sources.append(source)
        for run in runs:
            tables.extend(build_run_rows(run, source, path, site, notes))
    return build_plan("nccl_tests", request, sources, tables, notes=notes)


def _find_logs(root: Path, notes: ImportNotes) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    found = False
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        if path.suffix in _ENDINGS:
            found = True
            yield path
        else:
            notes.add(path.relative_to(root).as_posix(), "not read: no log by its ending")
    if not found:
        raise InvalidRequestError.of_field(
            "path", f"{root} has no file that ends in {', '.join(sorted(_ENDINGS - {''}))}"
        )


IMPORTER = Importer(
    name="nccl_tests",
    summary="logs of NVIDIA nccl-tests: all_reduce_perf, all_gather_perf, sendrecv_perf, ...",
    load=_load,
    options=_OPTIONS,
)
