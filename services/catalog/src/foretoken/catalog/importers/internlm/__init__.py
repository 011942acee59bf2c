"""Import the InternLM simulator's `data.pt`.

It holds curves of speed against work: `linear` in FLOP/s against the FLOP of one square linear
layer, `<collective>_intra_<devices per node>_inter_<nodes>` in bytes/s against bytes. Source:
internlm/simulator/profiler of https://github.com/InternLM/InternEvo.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Floats, Integers
from foretoken.catalog.importers.internlm.curves import Curve, read_curves
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    build_plan,
)
from foretoken.catalog.sources.file import SourceFile, read_source_file
from foretoken.catalog.sources.row import RowFacts, build_rows
from foretoken.catalog.sources.table import SourceTable
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.units import US_PER_S

_FILE = "data.pt"
_LINEAR = "linear"
_COLLECTIVE = re.compile(r"(\w+)_intra_([1-9]\d{0,5})_inter_([1-9]\d{0,5})")
_OPERATORS = {
    "all2all": "all_to_all",
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
}
# The bytes of an all-reduce count twice, once to reduce and once to gather.
# Source: coll_bus_bw in the simulator's gen_perf module.
_COUNTED_TWICE = frozenset({"all_reduce"})
_DTYPE = "bf16"
# The sizes the profiler sweeps, sequence lengths in the outer loop; of sizes with equal work it
# keeps the first. Source: profiler/benchmark/linear.py, run_cal_profile in profiler/profiler.py.
_SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_HIDDENS = (512, 1024, 2048, 4096, 5120, 6144, 8192, 9216, 10240, 11264, 12288)
# Timings behind every point. Source: the defaults of run_cal_profile and run_comm_profile.
_LINEAR_SAMPLES = 5
_COLLECTIVE_SAMPLES = 20
# The profiler writes 1e9 s where the memory did not suffice. Source: simulator/common.py.
_LONGEST_S = 1e8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Site:
    """What the file does not say: where it was measured, and the width of its linear layers."""

    device: str
    topology: str
    hidden: int | None


@dataclass(frozen=True, slots=True)
class _NamedCurve:
    """A curve, and the places of its points among all points of the file."""

    name: str
    points: Curve
    rows: Integers

    def times_us(self) -> Floats:
        """Return the time of every point, NaN where there was none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds = self.points.x / self.points.y
        is_time = (seconds > 0) & (seconds < _LONGEST_S)
        return np.where(is_time, seconds * US_PER_S, np.nan)


def _load(request: ImportRequest) -> ImportPlan:
    site = _read_site(request)
    path = request.path / _FILE if request.path.is_dir() else request.path
    source = read_source_file(path, request.path)
    curves = read_curves(source, path)
    origin = _tabulate(source, path, curves)
    notes = ImportNotes()
    tables: list[pa.Table] = []
    first_row = 0
    for name, points in curves.items():
        curve = _NamedCurve(name, points, np.arange(first_row, first_row + len(points.x)))
        first_row += len(points.x)
        match = _COLLECTIVE.fullmatch(name)
        if name == _LINEAR:
            tables.append(_rows_of_linear(origin, curve, site, notes))
        elif match and match[1] in _OPERATORS:
            tables.append(_rows_of_collective(origin, curve, site, match))
        else:
            kind = match[1] if match else name
            notes.add(source.name, f"curves named {kind} are left out: no operator here is such")
    return build_plan("internlm", request, [source], tables, notes=notes)


def _read_site(request: ImportRequest) -> _Site:
    missing = [
        FieldViolation(name, f"the file does not say it; give --{name}")
        for name in ("device", "topology")
        if not getattr(request, name)
    ]
    hidden = request.options.get("hidden", "")
    if hidden and not (hidden.isascii() and hidden.isdigit() and int(hidden) > 0):
        missing.append(FieldViolation("options.hidden", f"{hidden!r} is not a number of features"))
    if missing:
        raise InvalidRequestError.of_violations(missing, "import internlm")
    device, topology = find_device(request.device).name, find_topology(request.topology)
    if topology.device != device:
        raise InvalidRequestError.of_field(
            "topology", f"{topology.name} is made of {topology.device}, not of {device}"
        )
    return _Site(device=device, topology=topology.name, hidden=int(hidden) if hidden else None)


def _tabulate(source: SourceFile, path: Path, curves: Mapping[str, Curve]) -> SourceTable:
    """Return all points in the order of the file, so that every one has a number."""
    x = np.concatenate([np.empty(0), *(curve.x for curve in curves.values())])
    return SourceTable(source, path, pa.table({"x": x}), has_lines=False)


def _rows_of_linear(
    origin: SourceTable, curve: _NamedCurve, site: _Site, notes: ImportNotes
) -> pa.Table:
    """Return square layers: x is 2 * seq_len * hidden^2, from which both follow."""
    hiddens = _find_hiddens(curve.points.x, site.hidden)
    is_known = hiddens > 0
    if not is_known.all():
        notes.add(
            origin.source.name,
            f"{(~is_known).sum()} points of linear are left out: no layer of the profiler's sizes"
            " has that much work; name the width with --option hidden=N",
        )
    hidden = hiddens[is_known]
    seq_len = (curve.points.x[is_known] / (2 * hidden * hidden)).astype(np.int64)
    facts = RowFacts(
        operator="gemm",
        dtype=_DTYPE,
        device=site.device,
        framework="pytorch",
        num_samples=_LINEAR_SAMPLES,
    )
    dims = {"m": seq_len, "n": hidden, "k": hidden}
    times_us = curve.times_us()[is_known]
    return build_rows(facts, origin, curve.rows[is_known], dims, _statistics(times_us))


def _find_hiddens(work: Floats, hidden: int | None) -> Integers:
    """Return the width of the layer behind every amount of work, 0 where there is none."""
    if hidden is None:
        first: dict[int, int] = {}
        for seq_len in _SEQ_LENS:
            for width in _HIDDENS:
                first.setdefault(2 * seq_len * width * width, width)
        return np.array([first.get(flop, 0) for flop in work.tolist()], dtype=np.int64)
    seq_lens = work / (2 * hidden * hidden)
    return np.where((seq_lens >= 1) & (seq_lens == np.floor(seq_lens)), hidden, 0)


def _rows_of_collective(
    origin: SourceTable, curve: _NamedCurve, site: _Site, match: re.Match[str]
) -> pa.Table:
    op, per_node, num_nodes = match.groups()
    message_bytes = curve.points.x / (2 if op in _COUNTED_TWICE else 1)
    is_whole = message_bytes == np.floor(message_bytes)
    if not is_whole.all():
        row = int(curve.rows[np.argmin(is_whole)])
        raise origin.fault(row, f"{curve.name}: not a whole number of bytes")
    facts = RowFacts(
        operator=_OPERATORS[op],
        dtype=_DTYPE,
        device=site.device,
        topology=site.topology,
        framework="nccl",
        num_samples=_COLLECTIVE_SAMPLES,
    )
    dims = {
        "message_bytes": message_bytes.astype(np.int64),
        "devices_per_node": int(per_node),
        "num_nodes": int(num_nodes),
    }
    return build_rows(facts, origin, curve.rows, dims, _statistics(curve.times_us()))


def _statistics(times_us: Floats) -> Mapping[str, Floats]:
    """Return the one time there is, a mean of a few timings, as median and mean."""
    return {"median": times_us, "mean": times_us}


IMPORTER = Importer(
    name="internlm",
    summary="the InternLM simulator's data.pt; needs --device and --topology",
    load=_load,
    options={"hidden": "the width of the linear layers, where it is none of the profiler's sizes"},
)
