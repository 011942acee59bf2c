"""Export measurements in the layout of Vidur's `data/profiling` folder.

What Vidur reads of it (SklearnExecutionTimePredictor): of mlp.csv the rows whose n_head, n_kv_head,
n_embd, n_expanded_embd, use_gated_mlp, vocab_size and num_tensor_parallel_workers are the model's;
of attention.csv those with its n_embd, n_q_head, n_kv_head, num_tensor_parallel_workers and
block_size; of each op the median, in ms, of one layer. Source: https://github.com/microsoft/vidur.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from foretoken.catalog.exporters.vidur.layer_tables import (
    Row,
    Written,
    shapes_of,
    tabulate_attention,
    tabulate_mlp,
)
from foretoken.catalog.exporters.vidur.measured import STATISTICS, measure_operator
from foretoken.catalog.exporting import Exporter, ExportReport, ExportRequest
from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.estimate import DType
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.models.architecture import ModelArchitecture, find_model

_COLLECTIVES = ("all_reduce", "send_recv")
_LAYER_OPERATORS = (
    "embedding",
    "rms_norm",
    "layer_norm",
    "gemm",
    "rope",
    "silu_mul",
    "gelu",
    "residual_add",
    "attention_prefill",
    "attention_decode",
    "kv_cache_write",
)
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
    export = _Export(request.path)
    usable = _usable_rows(rows, dtype, export)
    for device in pc.unique(usable["device"]).to_pylist():
        of_device = usable.filter(pc.equal(usable["device"], device))
        for model in _models_of(of_device, request, export):
            export.write_model(of_device, device, model, int(block_size))
        for topology in pc.unique(of_device["topology"].drop_null()).to_pylist():
            export.write_network(of_device.filter(pc.equal(of_device["topology"], topology)))
    return export.report(rows.num_rows)


def _usable_rows(rows: pa.Table, dtype: str, export: "_Export") -> pa.Table:
    """Return plain forward rows of one number format that have a time; say how many are not."""
    is_usable = pc.and_(
        pc.and_(pc.equal(rows["phase"], "forward"), pc.equal(rows["status"], "ok")),
        pc.and_(pc.equal(rows["dtype"], dtype), pc.is_null(rows["variant"])),
    )
    usable = rows.filter(is_usable)
    if usable.num_rows < rows.num_rows:
        export.notes.append(
            f"{rows.num_rows - usable.num_rows} rows are not plain forward rows in {dtype} with a"
            " time; choose another format with --option dtype=NAME"
        )
    return usable


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
        self._num_used = 0
        self.notes: list[str] = []

    def write_model(
        self, rows: pa.Table, device: str, model: ModelArchitecture, block_size: int
    ) -> None:
        """Write the two files of a model from its rows and those that name no model."""
        is_own = pc.or_kleene(pc.is_null(rows["model"]), pc.equal(rows["model"], model.name))
        own = rows.filter(is_own)
        measured = {operator: measure_operator(own, operator) for operator in _LAYER_OPERATORS}
        shapes = shapes_of(model, measured)
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
                written.use(operator, place)
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

    def report(self, num_rows: int) -> ExportReport:
        """Return what was written.

        Raises:
            InvalidRequestError: nothing was.

        """
        if not self._files:
            reasons = "; ".join(self.notes) or "no rows of a model with a preset"
            raise InvalidRequestError.of_field("path", f"nothing fits Vidur's files: {reasons}")
        if self._num_used < num_rows:
            self.notes.append(f"{num_rows - self._num_used} of {num_rows} rows have no place")
        return ExportReport(
            files=tuple(self._files), num_rows=self._num_used, notes=tuple(self.notes)
        )

    def _write(self, name: str, written: Written) -> None:
        if not written.rows:
            self.notes.append(f"{name} is not written: no rows fit it")
            return
        self.notes.extend(f"{name}: {note}" for note in written.notes)
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        options = csv.WriteOptions(quoting_style="none", quoting_header="none")
        csv.write_csv(_table_of(written.rows), path, options)
        self._files.append(name)
        self._num_used += written.num_used


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
