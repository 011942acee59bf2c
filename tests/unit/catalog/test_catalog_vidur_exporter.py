"""Vidur's folder, written from the catalog, holds the rows that an import of it brings."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foretoken.catalog.exporting import ExportReport, ExportRequest, find_exporter
from foretoken.catalog.importing import ImportPlan, ImportRequest, find_importer
from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.operators.attention_prefill import prefill_dims
from foretoken.wire.arrow import STORED_SCHEMA, rows_to_table

# tiny-llama as Vidur would profile it on one rank of two: 4 query heads, 2 key heads of 64.
_HIDDEN, _INTERMEDIATE, _VOCAB = 512, 704, 4000
_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
_QKV = (4 + 2 * 2) * 64
_LAYER = [
    ("embedding", {"num_tokens": 16, "hidden": _HIDDEN, "vocab": _VOCAB}),
    ("rms_norm", {"num_tokens": 16, "hidden": _HIDDEN}),
    ("gemm", {"m": 16, "n": _QKV, "k": _HIDDEN}),
    ("rope", {"num_tokens": 16, **_HEADS}),
    ("gemm", {"m": 16, "n": _HIDDEN, "k": 4 * 64}),
    ("gemm", {"m": 16, "n": 2 * _INTERMEDIATE, "k": _HIDDEN}),
    ("silu_mul", {"num_tokens": 16, "intermediate": _INTERMEDIATE}),
    ("gemm", {"m": 16, "n": _HIDDEN, "k": _INTERMEDIATE}),
    ("residual_add", {"num_tokens": 16, "hidden": _HIDDEN}),
]


def _stored(table: pa.Table) -> pa.Table:
    """As the catalog hands rows out: with what it adds."""
    added = {
        "run_id": pa.array(["run"] * table.num_rows),
        "batch_index": pa.array([0] * table.num_rows, pa.int64()),
        "row_index": pa.array(range(table.num_rows), pa.int64()),
        "recorded_at": pa.array([datetime(2026, 1, 1)] * table.num_rows, pa.timestamp("us")),  # noqa: DTZ001
    }
    columns = [
        added.get(name, table[name] if name not in added else None) for name in STORED_SCHEMA.names
    ]
    return pa.table(columns, schema=STORED_SCHEMA)


def _row(operator: str, dims: Mapping[str, int], **changes: Any) -> dict[str, Any]:
    return {
        "operator": operator,
        "phase": "forward",
        "dtype": "fp16",
        "dims": dims,
        "device": "a100_sxm_80",
        "model": "tiny-llama",
        "latency_us_median": 250.0,
        "status": "ok",
        **changes,
    }


def _layer(**changes: Any) -> list[dict[str, Any]]:
    return [_row(operator, dims, **changes) for operator, dims in _LAYER]


def _export(root: Path, rows: Sequence[Mapping[str, Any]], **options: str) -> ExportReport:
    request = ExportRequest(path=root / "out", options=options)
    return find_exporter("vidur").write(_stored(rows_to_table(rows)), request)


def _csv(root: Path, name: str) -> list[dict[str, str]]:
    with (root / "out" / name).open() as file:
        return list(csv.DictReader(file))


def _mlp(root: Path, report: ExportReport) -> list[dict[str, str]]:
    [name] = [name for name in report.files if name.endswith("mlp.csv")]
    return _csv(root, name)


def test_a_layer_becomes_one_row(tmp_path: Path) -> None:
    report = _export(tmp_path, _layer())
    [row] = _mlp(tmp_path, report)
    about = {
        "n_head": "8",
        "n_kv_head": "4",
        "n_embd": "512",
        "n_expanded_embd": "1408",
        "vocab_size": "8000",
        "use_gated_mlp": "True",
        "num_tensor_parallel_workers": "2",
        "num_tokens": "16",
    }
    assert about == {name: row[name] for name in about}
    medians = {name: cell for name, cell in row.items() if name.endswith(".median")}
    assert {"0.25"} == set(medians.values())
    assert 10 == len(medians)
    assert 9 == report.num_rows


def test_a_device_of_a_hostile_name_is_not_written_elsewhere(tmp_path: Path) -> None:
    """The catalog may be another's, and its rows what somebody sent it."""
    with pytest.raises(InvalidRequestError, match="leads out of its folder"):
        _export(tmp_path / "below", _layer(device="../../../climbed"))
    assert [] == list(tmp_path.rglob("*.csv"))


def test_both_norms_share_the_rows_there_are(tmp_path: Path) -> None:
    norms = [
        _row("rms_norm", {"num_tokens": 16, "hidden": _HIDDEN}, latency_us_median=time)
        for time in (1000.0, 3000.0)
    ]
    [row] = _mlp(tmp_path, _export(tmp_path, [*_layer()[:1], *norms, *_layer()[2:]]))
    ops = ("input_layernorm", "post_attention_layernorm")
    assert ["1", "3"] == [row[f"time_stats.{op}.median"] for op in ops]


def test_a_row_that_lacks_an_op_is_left_out(tmp_path: Path) -> None:
    """Vidur trains every op on all rows of a degree and stops at an empty one."""
    more = [
        _row(operator, {**dims, next(iter(dims)): 32})
        for operator, dims in _LAYER
        if "k" not in dims
    ]
    report = _export(tmp_path, [*_layer(), *more])
    assert ["16"] == [row["num_tokens"] for row in _mlp(tmp_path, report)]
    reason = (
        "of another shape than the models', or at token counts that another op of mlp.csv lacks"
    )
    [note] = [note for note in report.notes if note.startswith("5 rows left out")]
    assert {f"{row['operator']} 1" for row in more} == set(
        note.removeprefix(f"5 rows left out, {reason}: ").split(", ")
    )


@pytest.mark.parametrize(
    ("operator", "note"),
    [
        ("rope", "no rope for attn_rope at tp=2: Vidur stops"),
        ("residual_add", "no residual_add for add at tp=2: Vidur takes it as 0"),
        ("embedding", "no embedding for emb at tp=2: Vidur does not read it"),
    ],
)
def test_an_op_that_was_never_measured_is_said(operator: str, note: str, tmp_path: Path) -> None:
    report = _export(tmp_path, [row for row in _layer() if row["operator"] != operator])
    assert any(note in found for found in report.notes)
    assert 1 == len(_mlp(tmp_path, report))


def test_batches_of_equal_sequences_are_written(tmp_path: Path) -> None:
    decode = {"num_seqs": 4, "kv_tokens": 4 * 101, "kv_tokens_max": 101, **_HEADS}
    ragged = {**decode, "kv_tokens": 350}
    prefill = {**prefill_dims(1, 64, 32), **_HEADS}
    write = {"num_kv_heads": 2, "head_dim": 64}
    rows = [
        _row("attention_prefill", prefill, kernel="flashinfer"),
        _row("attention_prefill", {**prefill, "score_pairs": prefill["score_pairs"] - 1}),
        _row("attention_decode", decode),
        _row("attention_decode", ragged),
        _row("kv_cache_write", {"num_tokens": 64, **write}, kernel="flashinfer"),
        _row("kv_cache_write", {"num_tokens": 4, **write}, latency_us_median=3.0),
    ]
    report = _export(tmp_path, rows, block_size="32")
    found = _csv(tmp_path, "compute/a100/tiny-llama/attention.csv")
    columns = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill", "block_size")
    assert [("1", "64", "32", "True", "32"), ("4", "0", "100", "False", "32")] == [
        tuple(row[name] for name in columns) for row in found
    ]
    ops = ("attn_prefill", "attn_decode", "attn_kv_cache_save", "attn_input_reshape")
    assert [["0.25", "0", "0.25", "0"], ["0", "0.25", "0.003", "0"]] == [
        [row[f"time_stats.{op}.median"] for op in ops] for row in found
    ]
    assert ["AttentionBackend.FLASHINFER", ""] == [row["attention_backend"] for row in found]
    assert 4 == report.num_rows


def test_collectives_are_written_by_topology(tmp_path: Path) -> None:
    dims = {"message_bytes": 2048, "devices_per_node": 4, "num_nodes": 2}
    report = _export(tmp_path, [_row("all_reduce", dims, topology="a100_dgx", model=None)])
    assert ("network/a100_dgx/all_reduce.csv",) == report.files
    [row] = _csv(tmp_path, report.files[0])
    columns = ("num_workers", "size", "collective", "devices_per_node", "max_devices_per_node")
    assert ("8", "2048", "all_reduce", "4", "8") == tuple(row[name] for name in columns)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "bf16"}, "not in fp16"),
        ({"phase": "backward"}, "not of the forward pass"),
        ({"variant": "quant=fp8"}, "of a variant"),
        ({"status": "failed"}, "failed"),
        ({"model": "org/model"}, "of no model that is written"),
        ({"operator": "softmax", "dims": {"num_rows": 4, "width": 8}}, "no file of Vidur's"),
    ],
)
def test_rows_that_vidur_could_not_tell_apart_are_left_out(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """The report says of which operator they are and why they have no place."""
    row = {**_layer()[1], **changes}
    report = _export(tmp_path, [*_layer(), row])
    assert 9 == report.num_rows
    [note] = [note for note in report.notes if note.startswith("1 rows left out, ")]
    assert note.startswith(f"1 rows left out, {reason}")
    assert note.endswith(f": {row['operator']} 1")


def test_another_number_format_is_chosen(tmp_path: Path) -> None:
    report = _export(tmp_path, [*_layer(), *_layer(dtype="bf16")], dtype="bf16")
    assert (9, 1) == (report.num_rows, len(_mlp(tmp_path, report)))


def test_rows_without_a_model_serve_the_one_asked_for(tmp_path: Path) -> None:
    rows = _layer(model=None)
    with pytest.raises(InvalidRequestError, match="of no model that is written"):
        _export(tmp_path, rows)
    assert 1 == len(_mlp(tmp_path, _export(tmp_path, rows, model="tiny-llama")))
    with pytest.raises(UnknownModelError, match="tiny-llama"):
        _export(tmp_path / "other", rows, model="tiny-lama")


@pytest.mark.parametrize(
    ("model", "note"),
    [("org/model", "without a preset"), ("mixtral-8x7b", "experts"), ("qwen3-32b", "add up")],
)
def test_a_model_that_does_not_fit_is_said(model: str, note: str, tmp_path: Path) -> None:
    report = _export(tmp_path, [*_layer(), *_layer(model=model)])
    assert any(f"{model} is left out" in found and note in found for found in report.notes)


@pytest.mark.parametrize("options", [{"dtype": "fp17"}, {"block_size": "0"}, {"block_size": "x"}])
def test_an_option_that_cannot_be_used_is_named(options: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=rf"options\.{next(iter(options))}"):
        _export(tmp_path, _layer(), **options)


def _rows_but_for_the_file(plan: ImportPlan) -> Counter[str]:
    table = pa.concat_tables([pa.table(batch.rows) for batch in plan.batches])
    dropped = {"source_file", "source_hash", "source_row"}
    return Counter(map(str, table.drop_columns(list(dropped)).to_pylist()))


@pytest.mark.parametrize(
    ("device", "folder"), [("a30", "a30_clean"), ("a100", "a100"), ("h100", "h100")]
)
def test_a_profile_comes_back_the_same(
    device: str, folder: str, shared_data: Path, tmp_path: Path
) -> None:
    """Every number of every row: on one rank and on eight, with tokens that are there twice."""
    request = ImportRequest(
        path=shared_data / "vidur" / "profiling", device=device, options={"folder": folder}
    )
    plan = find_importer("vidur").read(request)
    rows = _stored(pa.concat_tables([pa.table(batch.rows) for batch in plan.batches]))
    out = tmp_path / "out"
    report = find_exporter("vidur").write(rows, ExportRequest(path=out))
    again = find_importer("vidur").read(ImportRequest(path=out))
    assert plan.num_rows == again.num_rows == report.num_rows
    assert _rows_but_for_the_file(plan) == _rows_but_for_the_file(again)


def test_the_written_columns_are_those_of_the_profile(shared_data: Path, tmp_path: Path) -> None:
    root = shared_data / "vidur" / "profiling"
    request = ImportRequest(path=root, device="a30", options={"folder": "a30_clean"})
    plan = find_importer("vidur").read(request)
    rows = _stored(pa.concat_tables([pa.table(batch.rows) for batch in plan.batches]))
    find_exporter("vidur").write(rows, ExportRequest(path=tmp_path / "out"))
    names = ("compute/a30/Qwen/Qwen-2-7B/mlp.csv", "compute/a30/Qwen/Qwen-2-7B/attention.csv")
    for name in (*names, "network/a30_single_gpu/send_recv.csv"):
        with (root / name).open() as file:
            expected = set(next(csv.reader(file)))
        with (tmp_path / "out" / name).open() as file:
            assert expected == set(next(csv.reader(file)))
