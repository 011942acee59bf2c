"""`cpu_overhead.csv`: the parts of a step on the host, by batch size and degree."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from foretoken.catalog.dims import Floats, Integers
from foretoken.catalog.importers.vidur.folders import is_model
from foretoken.catalog.importers.vidur.layer_file import join_rows
from foretoken.catalog.importing import ImportNotes, name_model
from foretoken.catalog.sources.file import SourceFile
from foretoken.catalog.sources.row import RowFacts, build_rows
from foretoken.catalog.sources.table import SourceTable, parse_csv
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.units import US_PER_MS

# The parts that Vidur adds up to a step's time on the host. Source: its predictor's
# _train_cpu_overhead_models. The file has others too, which these hold or which run on the device.
_PARTS = (
    "schedule",
    "sampler_e2e",
    "prepare_inputs_e2e",
    "process_model_outputs",
    "ray_comm_time",
)
_COLUMNS = ("batch_size", "tensor_parallel_degree")
_MODEL_COLUMN = "model_name"
_STATISTICS = ("median", "mean")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFile:
    """A file and where it was measured; its rows say the model, else `model` does."""

    source: SourceFile
    path: Path
    device: str
    topology: str | None = None
    model: str | None = None


def read_host(file: HostFile, wanted: str, notes: ImportNotes) -> tuple[SourceTable, pa.Table]:
    """Read a file; rows of other models than `wanted` (a name as rows carry it) are left out.

    Old versions write the columns in capitals. Where a part has one statistic, a mean, it stands
    for the median too.

    Raises:
        InvalidRequestError: the file lacks a column, or a cell cannot be used.

    """
    origin = _lower_names(parse_csv(file.source, file.path))
    models = _read_models(origin, file.model)
    num_seqs, num_ranks = (origin.integers(name) for name in _COLUMNS)
    pieces = []
    for model in dict.fromkeys(models.tolist()):
        if wanted and not is_model(model, wanted):
            continue
        rows = np.flatnonzero(models == model)
        dims = {"num_seqs": num_seqs[rows], "num_ranks": num_ranks[rows]}
        for part in _PARTS:
            facts = RowFacts(
                operator="host_step",
                dtype="fp16",
                device=file.device,
                topology=file.topology,
                framework="sarathi",
                variant=f"part={part}",
                model=model or None,
            )
            if latency_us := _read_times(origin, part, rows):
                pieces.append(build_rows(facts, origin, rows, dims, latency_us))
    others = sorted(_list_parts(origin) - set(_PARTS))
    if others:
        notes.add(origin.source.name, f"parts that Vidur does not read: {', '.join(others)}")
    return origin, join_rows(pieces)


def _lower_names(origin: SourceTable) -> SourceTable:
    names = [name.lower() for name in origin.table.schema.names]
    if len(set(names)) < len(names):
        raise InvalidRequestError.of_field("path", f"{origin.path}: columns twice but for capitals")
    return replace(origin, table=origin.table.rename_columns(names))


def _read_models(origin: SourceTable, of_folder: str | None) -> npt.NDArray[np.str_]:
    if not origin.has(_MODEL_COLUMN):
        return np.full(origin.num_rows, of_folder or "")
    own = origin.texts(_MODEL_COLUMN)
    names = {name: name_model(name) for name in np.unique(own).tolist()}
    return np.array([names[name] for name in own.tolist()])


def _read_times(origin: SourceTable, part: str, rows: Integers) -> dict[str, Floats]:
    """Return the statistics there are, by name; none where the part was not measured."""
    found = {
        statistic: origin.numbers(f"{part}_{statistic}")[rows] * US_PER_MS
        for statistic in _STATISTICS
        if origin.has(f"{part}_{statistic}")
    }
    if found:
        found.setdefault("median", found.get("mean", np.empty(0)))
    return found


def _list_parts(origin: SourceTable) -> set[str]:
    names = [name.rpartition("_") for name in origin.table.schema.names]
    return {part for part, _, statistic in names if statistic in _STATISTICS}
