"""Export measurements in the layout of Vidur's `data/profiling` folder.

What Vidur reads of it (SklearnExecutionTimePredictor): of mlp.csv the rows whose n_head, n_kv_head,
n_embd, n_expanded_embd, use_gated_mlp, vocab_size and num_tensor_parallel_workers are the model's;
of attention.csv those with its n_embd, n_q_head, n_kv_head, num_tensor_parallel_workers and
block_size; of each op the median, in ms, of one layer. Source: https://github.com/microsoft/vidur.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from foretoken.catalog.exporters.vidur.layer_tables import (
    STATISTICS,
    Row,
    Written,
    measure_operator,
    shapes_of,
    tabulate_attention,
    tabulate_mlp,
)
from foretoken.catalog.exporting import Exporter, ExportReport, ExportRequest, LeftOut
from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.name import path_inside

_COLLECTIVES = ("all_reduce", "send_recv")
# The operators of a layer, and which of their rows the files have no room for.
_MLP_REST = "of another shape than the models', or at token counts that another op of mlp.csv lacks"
_ATTENTION_REST = "of another shape than the models', or of sequences of unequal lengths"
_REST_OF_OPERATOR = {
    **dict.fromkeys(
        (
            "embedding",
            "rms_norm",
            "layer_norm",
            "gemm",
            "rope",
            "silu_mul",
            "gelu",
            "residual_add",
        ),
        _MLP_REST,
    ),
    "attention_prefill": _ATTENTION_REST,
    "attention_decode": _ATTENTION_REST,
    "kv_cache_write": "of as many tokens as no batch of attention.csv",
}
# Vidur's short names of products, and its names of models where ours have several.
_FOLDER_OF_DEVICE = {"a100_sxm_80": "a100", "h100_sxm": "h100"}
_VIDUR_MODELS = frozenset(
    {
        "codellama/CodeLlama-34b-Instruct-hf",
        "internlm/internlm-20b",
        "internlm/internlm2-20b",
        "meta-llama/Llama-2-7b-hf",
        "meta-llama/Llama-2-70b-hf",
        "meta-llama/Meta-Llama-3-8B",
        "meta-llama/Meta-Llama-3-70B",
        "microsoft/phi-2",
        "Qwen/Qwen-2-7B",
        "Qwen/Qwen-72B",
    }
)
# Vidur's default number of tokens in a block of its cache.
_BLOCK_SIZE = "16"


def _save(reader: pa.RecordBatchReader, request: ExportRequest) -> ExportReport:
    dtype = request.options.get("dtype", "fp16").lower()
    if dtype.upper() not in DType.__members__:
        raise InvalidRequestError.of_field("options.dtype", f"{dtype!r} is no number format")
    block_size = request.options.get("block_size", _BLOCK_SIZE)
    if not (block_size.isascii() and block_size.isdigit() and int(block_size)):
        raise InvalidRequestError.of_field("options.block_size", f"{block_size!r} is no count")
    rows = reader.read_all()
    rows = rows.append_column("order", pa.array(np.arange(rows.num_rows)))
    export = _Export(request.path)
    usable = _usable_rows(rows, dtype, export.left_out)
    for device in pc.unique(usable["device"]).to_pylist():
        of_device = usable.filter(pc.equal(usable["device"], device))
        for model in _models_of(of_device, request, export):
            export.write_model(of_device, device, model, int(block_size))
        for topology in pc.unique(of_device["topology"].drop_null()).to_pylist():
            export.write_network(of_device.filter(pc.equal(of_device["topology"], topology)))
    export.leave_out_unused(usable)
    return export.report()


def _usable_rows(rows: pa.Table, dtype: str, left_out: LeftOut) -> pa.Table:
    """Return plain forward rows of one number format that have a time; count the others."""
    is_usable: Mapping[str, Callable[[pa.Table], pa.ChunkedArray]] = {
        "no file of Vidur's holds such": lambda rest: pc.is_in(
            rest["operator"], pa.array([*_REST_OF_OPERATOR, *_COLLECTIVES])
        ),
        "failed": lambda rest: pc.equal(rest["status"], "ok"),
        "not of the forward pass": lambda rest: pc.equal(rest["phase"], "forward"),
        "of a variant": lambda rest: pc.is_null(rest["variant"]),
        f"not in {dtype} (--option dtype=NAME chooses)": lambda rest: pc.equal(
            rest["dtype"], dtype
        ),
    }
    for reason, check in is_usable.items():
        is_taken = check(rows)
        _leave_out(left_out, reason, rows.filter(pc.invert(is_taken)))
        rows = rows.filter(is_taken)
    return rows


def _models_of(
    rows: pa.Table, request: ExportRequest, export: "_Export"
) -> Iterator[ModelArchitecture]:
    """Yield the models whose layers were measured, or the one asked for."""
    asked = request.options.get("model", "")
    measured = pc.unique(rows["model"].drop_null()).to_pylist()
    for name in [asked] if asked else measured:
        try:
            model = find_model(name)
        except UnknownModelError:
            if asked:
                raise
            export.notes.append(f"{name} is left out: without a preset its heads are not known")
            continue
        if model.moe or model.head_dim * model.num_heads != model.hidden:
            reason = "experts" if model.moe else "heads that do not add up to its width"
            export.notes.append(f"{model.name} is left out: Vidur's files cannot hold {reason}")
        else:
            yield model


class _Export:
    """Files written so far, and what went into them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: list[str] = []
        self._used: set[int] = set()
        self._models: set[str] = set()
        self.left_out = LeftOut()
        self.notes: list[str] = []

    def write_model(
        self, rows: pa.Table, device: str, model: ModelArchitecture, block_size: int
    ) -> None:
        """Write the two files of a model from its rows and those that name no model."""
        is_own = pc.or_kleene(pc.is_null(rows["model"]), pc.equal(rows["model"], model.name))
        own = rows.filter(is_own)
        measured = {operator: measure_operator(own, operator) for operator in _REST_OF_OPERATOR}
        shapes = shapes_of(model, measured)
        self._models.add(model.name)
        place = f"compute/{_FOLDER_OF_DEVICE.get(device, device)}/{_vidur_name(model)}"
        self._write(f"{place}/mlp.csv", tabulate_mlp(shapes, measured))
        self._write(f"{place}/attention.csv", tabulate_attention(shapes, measured, block_size))

    def write_network(self, rows: pa.Table) -> None:
        """Write a file for every collective of one topology."""
        topology = find_topology(rows["topology"][0].as_py())
        for operator in _COLLECTIVES:
            found = measure_operator(rows, operator)
            written = Written()
            for place in range(found.num_rows):
                per_node = int(found.dims["devices_per_node"][place])
                times = {f"time_stats.{operator}.{s}": found.times_ms[s][place] for s in STATISTICS}
                written.use(found, place)
                written.rows.append(
                    {
                        "": place,
                        **times,
                        "rank": 0,
                        "num_workers": per_node * int(found.dims["num_nodes"][place]),
                        "size": int(found.dims["message_bytes"][place]),
                        "collective": operator,
                        "devices_per_node": per_node,
                        "max_devices_per_node": topology.devices_per_node,
                    }
                )
            self._write(f"network/{topology.name}/{operator}.csv", written)

    def leave_out_unused(self, rows: pa.Table) -> None:
        """Count the rows that no file holds though their kind has one."""
        rest = rows.filter(pc.invert(pc.is_in(rows["order"], pa.array(self._used, pa.int64()))))
        is_own = pc.or_kleene(
            pc.is_in(rest["model"], pa.array(sorted(self._models), pa.string())),
            pc.and_(pc.is_null(rest["model"]), bool(self._models)),
        )
        reason = "of no model that is written (--option model=NAME takes rows that name none)"
        _leave_out(self.left_out, reason, rest.filter(pc.invert(is_own)))
        rest = rest.filter(is_own)
        for reason in dict.fromkeys(_REST_OF_OPERATOR.values()):
            operators = [name for name, said in _REST_OF_OPERATOR.items() if said == reason]
            is_such = pc.is_in(rest["operator"], pa.array(operators))
            _leave_out(self.left_out, reason, rest.filter(is_such))

    def report(self) -> ExportReport:
        """Return what was written.

        Raises:
            InvalidRequestError: nothing was.

        """
        notes = (*self.notes, *self.left_out.lines())
        if not self._files:
            reasons = "; ".join(notes) or "no rows of a model with a preset"
            raise InvalidRequestError.of_field("path", f"nothing fits Vidur's files: {reasons}")
        return ExportReport(files=tuple(self._files), num_rows=len(self._used), notes=notes)

    def _write(self, name: str, written: Written) -> None:
        if not written.rows:
            self.notes.append(f"{name} is not written: no rows fit it")
            return
        self.notes.extend(f"{name}: {note}" for note in written.notes)
        path = path_inside(self._root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        options = csv.WriteOptions(quoting_style="none", quoting_header="none")
        csv.write_csv(_table_of(written.rows), path, options)
        self._files.append(name)
        self._used |= written.used


def _leave_out(left_out: LeftOut, reason: str, rows: pa.Table) -> None:
    for counted in pc.value_counts(rows["operator"]).to_pylist():
        left_out.add(reason, counted["values"], counted["counts"])


def _table_of(rows: Sequence[Row]) -> pa.Table:
    """Return rows as a table of all their columns, empty where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return pa.table({name: _column_of(values) for name, values in columns.items()})


def _column_of(values: list[object]) -> pa.Array:
    if any(isinstance(value, bool) for value in values):
        return pa.array([str(value) for value in values])  # as pandas writes them
    return pa.array(values, from_pandas=True)


def _vidur_name(model: ModelArchitecture) -> str:
    """Return the folder by which Vidur knows a model, else as its owner calls it."""
    owned = [alias for alias in model.aliases if "/" in alias]
    return next((alias for alias in owned if alias in _VIDUR_MODELS), next(iter(owned), model.name))


EXPORTER = Exporter(
    name="vidur",
    summary="Vidur's data/profiling folder: compute/<device>/<model>/ and network/<topology>/",
    save=_save,
    options={
        "dtype": "the number format to write, fp16 unless said; the files cannot name it",
        "model": "write this model, also from rows that name no model",
        "block_size": f"the cache's block size to write, {_BLOCK_SIZE} unless said",
    },
)
