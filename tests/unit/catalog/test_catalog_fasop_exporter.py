"""FASOP's tables, back from the catalog as they came, or composed of operators."""

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from foretoken.catalog.exporters.fasop.composed import LayerPlan
from foretoken.catalog.exporting import ExportReport, ExportRequest, find_exporter
from foretoken.catalog.importers.fasop.profile_rows import COLUMNS
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.wire.arrow import STORED_SCHEMA, rows_to_table

_MODEL, _SEQ_LEN = "llama-3.1-8b", 16
_COMPOSE = {"model": _MODEL, "seq_len": str(_SEQ_LEN)}
_COLUMNS = [column.name for column in COLUMNS]


def _stored(table: pa.Table, run_id: str = "run") -> pa.Table:
    size = table.num_rows
    now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC).replace(tzinfo=None)
    columns = {
        "run_id": [run_id] * size,
        "batch_index": [0] * size,
        "row_index": list(range(size)),
        "recorded_at": [now] * size,
    }
    for name in table.schema.names:
        columns[name] = table[name].to_pylist()
    return pa.table(columns, schema=STORED_SCHEMA)


def _imported(folder: Path, seq_len: int = _SEQ_LEN) -> pa.Table:
    request = ImportRequest(path=folder, options={"seq_len": str(seq_len)})
    plan = find_importer("fasop").read(request)
    table = pa.concat_tables([pa.table(batch.rows) for batch in plan.batches])
    return _stored(table, plan.run.run_id)


def _write(table: pa.Table, folder: Path, **options: str) -> ExportReport:
    request = ExportRequest(path=folder, options=options)
    return find_exporter("fasop").write(table.to_reader(), request)


def _profile(folder: Path, name: str = "llama70b_A40_2.npz", num_rows: int = 3) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    data = np.random.default_rng(7).uniform(0.01, 300.0, (num_rows, 10))
    np.savez(folder / name, data=data)
    return data


def _plain_rows(*, tp: int = 1, micro_batches: tuple[int, ...] = (1, 2)) -> list[dict[str, Any]]:
    """Return a row for every point of a layer, the i-th wanted taking i µs."""
    plan = LayerPlan(model=find_model(_MODEL), seq_len=_SEQ_LEN, dtype=DType.BF16)
    points: dict[Any, None] = {}
    for shape, micro_batch in plan.shapes():
        if shape.tp == tp and micro_batch in micro_batches:
            for parts in plan.parts_by_column(shape, micro_batch).values():
                # The first way each part can be measured.
                points.update(dict.fromkeys(call.point for part in parts for call in part[0]))
    return [
        {
            "operator": operator,
            "phase": "forward",
            "dtype": "bf16",
            "dims": dict(zip(find_operator(operator).dim_names, dims, strict=True)),
            "device": "h100_sxm",
            "status": "ok",
            "latency_us_median": float(place),
        }
        for place, (operator, dims) in enumerate(points, 1)
    ]


def _time_us(rows: list[dict[str, Any]], operator: str, **dims: int) -> float:
    [row] = [r for r in rows if r["operator"] == operator and dims.items() <= r["dims"].items()]
    return float(row["latency_us_median"])


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    data = _profile(tmp_path / "in")
    report = _write(_imported(tmp_path / "in"), tmp_path / "out")
    assert ("llama70b_A40_2.npz",) == report.files
    assert 30 == report.num_rows
    with np.load(tmp_path / "out" / report.files[0], allow_pickle=False) as found:
        assert ["data"] == list(found)
        assert np.float64 == found["data"].dtype
        np.testing.assert_allclose(found["data"], data, rtol=4e-16)


def test_a_gap_comes_back_as_a_gap(tmp_path: Path) -> None:
    data = _profile(tmp_path / "in")
    data[1, 2] = np.nan
    np.savez(tmp_path / "in" / "llama70b_A40_2.npz", data=data)
    report = _write(_imported(tmp_path / "in"), tmp_path / "out")
    with np.load(tmp_path / "out" / report.files[0], allow_pickle=False) as found:
        assert np.isnan(found["data"][1, 2])
        assert 1 == np.isnan(found["data"]).sum()


def test_flagged_rows_are_asked_for_and_without_them_nothing_is_written(tmp_path: Path) -> None:
    selection = find_exporter("fasop").narrow(MeasurementFilter(device="a40"))
    assert MeasurementFilter(device="a40", include_flagged=True, include_failed=True) == selection
    _profile(tmp_path / "in")
    rows = _imported(tmp_path / "in")
    plain = rows.filter(pa.compute.is_null(rows["flags"]))
    with pytest.raises(InvalidRequestError, match="its composite rows are not in the selection"):
        _write(plain, tmp_path / "out")


def test_two_profiles_of_one_table_are_averaged_and_must_agree(tmp_path: Path) -> None:
    data = _profile(tmp_path / "a")
    np.savez(tmp_path / "a" / "llama70b_A40_2.npz", data=data)
    (tmp_path / "b").mkdir()
    np.savez(tmp_path / "b" / "llama70b_A40_2.npz", data=3 * data)
    both = pa.concat_tables([_imported(tmp_path / "a"), _imported(tmp_path / "b")])
    report = _write(both, tmp_path / "out")
    with np.load(tmp_path / "out" / report.files[0], allow_pickle=False) as found:
        np.testing.assert_allclose(found["data"], 2 * data)
    assert any("30 cells are means of several times" in note for note in report.notes)
    other = pa.concat_tables([_imported(tmp_path / "a"), _imported(tmp_path / "b", 32)])
    with pytest.raises(InvalidRequestError, match="choose one with a narrower selection"):
        _write(other, tmp_path / "again")


def test_profiles_of_modules_fill_what_a_table_lacks(tmp_path: Path) -> None:
    data = _profile(tmp_path / "in", num_rows=1)
    rows = _imported(tmp_path / "in")
    larger = rows.to_pylist()
    for row in larger:
        row["dims"] = [(n, 2 * v if n in {"m", "num_tokens"} else v) for n, v in row["dims"]]
        row["latency_us_mean"] = 5000.0
    profiles = [
        {**row, "source_file": "profile_a.json"}
        for row in (
            *larger,
            *larger,
            *({**row, "latency_us_mean": 1.0} for row in rows.to_pylist()),
        )
    ]
    both = pa.concat_tables([rows, pa.Table.from_pylist(profiles, schema=STORED_SCHEMA)])
    report = _write(both, tmp_path / "out")
    with np.load(tmp_path / "out" / report.files[0], allow_pickle=False) as found:
        np.testing.assert_allclose(found["data"], [data[0], [5.0] * 10], rtol=4e-16)


def test_doubted_cells_are_written_and_remarked_on(tmp_path: Path) -> None:
    _profile(tmp_path / "in")
    rows = _imported(tmp_path / "in")
    flags = [[*(found or ()), "too_fast: impossible"] for found in rows["flags"].to_pylist()]
    place = rows.schema.get_field_index("flags")
    doubted = rows.set_column(place, rows.schema.field(place), pa.array(flags))
    report = _write(doubted, tmp_path / "out")
    assert "llama70b_A40_2.npz: times that the catalog flags are in the table" in report.notes


def test_rows_of_no_profile_are_counted_by_operator(tmp_path: Path) -> None:
    """What goes to no table is said, and how it could."""
    _profile(tmp_path / "in")
    plain = _plain_rows(micro_batches=(1,))
    both = pa.concat_tables([_imported(tmp_path / "in"), _stored(rows_to_table(plain))])
    report = _write(both, tmp_path / "out")
    [note] = [note for note in report.notes if "rows left out" in note]
    num_gemms = sum(row["operator"] == "gemm" for row in plain)
    assert note.startswith(f"{len(plain)} rows left out, of no FASOP profile")
    assert f": gemm {num_gemms}, " in note
    other = [{**plain[0], "dtype": "fp32"}]
    composed = _write(_stored(rows_to_table([*plain, *other])), tmp_path / "composed", **_COMPOSE)
    assert f"1 rows left out, no part of {_MODEL}'s tables: {plain[0]['operator']} 1" in (
        composed.notes
    )


def test_a_layer_is_composed_of_operators(tmp_path: Path) -> None:
    rows = _plain_rows()
    report = _write(_stored(rows_to_table(rows)), tmp_path / "out", **_COMPOSE)
    assert (f"{_MODEL}_H100_1.npz",) == report.files
    with np.load(tmp_path / "out" / report.files[0], allow_pickle=False) as found:
        data = found["data"]
    assert (2, 10) == data.shape
    tokens = _SEQ_LEN
    norm = _time_us(rows, "add_rms_norm", num_tokens=tokens)
    expected_us = {
        "embed": _time_us(rows, "embedding", num_tokens=tokens),
        "attn_q": norm + _time_us(rows, "gemm", m=tokens, n=4096, k=4096),
        "attn_k": _time_us(rows, "gemm", m=tokens, n=1024),
        "attn_o": _time_us(rows, "rope", num_tokens=tokens)
        + _time_us(rows, "attention_prefill", num_seqs=1)
        + _time_us(rows, "gemm", m=tokens, n=4096, k=4096),
        "mlp_gate": norm + _time_us(rows, "gemm", m=tokens, n=14336),
        "mlp_act_fn": _time_us(rows, "silu_mul", num_tokens=tokens),
        "mlp_down": _time_us(rows, "gemm", m=tokens, k=14336),
        "lm_head": norm + _time_us(rows, "gemm", m=tokens, n=128256),
    }
    row = dict(zip(_COLUMNS, data[0], strict=True))
    for column, time_us in expected_us.items():
        assert pytest.approx(time_us / 1000) == row[column], column
    assert any("it has no host gaps" in note for note in report.notes)


def test_ranks_that_share_a_layer_sum_before_each_norm(tmp_path: Path) -> None:
    rows = _plain_rows(tp=2, micro_batches=(1,))
    _write(_stored(rows_to_table(rows)), tmp_path / "out", **_COMPOSE)
    with np.load(tmp_path / "out" / f"{_MODEL}_H100_2.npz", allow_pickle=False) as found:
        gate_ms = found["data"][0, 5]
    parts_us = (
        _time_us(rows, "all_reduce", message_bytes=_SEQ_LEN * 4096 * 2, devices_per_node=2),
        _time_us(rows, "add_rms_norm", num_tokens=_SEQ_LEN),
        _time_us(rows, "gemm", n=7168),
    )
    assert pytest.approx(sum(parts_us) / 1000) == gate_ms


def test_fused_projections_count_by_their_widths(tmp_path: Path) -> None:
    rows = [row for row in _plain_rows(micro_batches=(1,)) if row["dims"].get("n") != 1024]
    fused = next(row for row in rows if row["operator"] == "gemm")
    dims = {"m": _SEQ_LEN, "n": 4096 + 2 * 1024, "k": 4096}
    rows.append({**fused, "dims": dims, "latency_us_median": 600.0})
    _write(_stored(rows_to_table(rows)), tmp_path / "out", **_COMPOSE)
    with np.load(tmp_path / "out" / f"{_MODEL}_H100_1.npz", allow_pickle=False) as found:
        assert pytest.approx([0.1, 0.1]) == found["data"][0, 2:4].tolist()


@pytest.mark.parametrize(
    "change",
    [{"variant": "quant=fp8"}, {"flags": ["odd: x"]}, {"dtype": "fp16"}, {"phase": "backward"}],
)
def test_rows_that_are_not_plain_compose_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    rows = [
        {**row, **change} if row["operator"] == "embedding" else row
        for row in _plain_rows(micro_batches=(1,))
    ]
    with pytest.raises(InvalidRequestError, match="micro batch 1 lacks embed"):
        _write(_stored(rows_to_table(rows)), tmp_path / "out", **_COMPOSE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": _MODEL}, "model and seq_len go together"),
        ({**_COMPOSE, "seq_len": "0"}, "'0' is no count"),
        ({**_COMPOSE, "dtype": "fp7"}, "'FP7' is no number format"),
        ({**_COMPOSE, "model": "gpt2-xl"}, "gpt2-xl has no dense gated MLP"),
        ({}, "options model and seq_len compose tables"),
    ],
)
def test_options_that_make_no_table_are_refused(
    options: dict[str, str], message: str, tmp_path: Path
) -> None:
    table = _stored(rows_to_table(_plain_rows(micro_batches=(1,))))
    with pytest.raises(InvalidRequestError, match=message):
        _write(table, tmp_path / "out", **options)


def test_the_shared_tables_come_back_as_they_were(tmp_path: Path, shared_data: Path) -> None:
    known_cost = shared_data / "fasop" / "known_cost"
    report = _write(_imported(known_cost), tmp_path / "out")
    assert sorted(path.name for path in known_cost.glob("*.npz")) == sorted(report.files)
    for name in report.files:
        with np.load(known_cost / name) as before, np.load(tmp_path / "out" / name) as after:
            np.testing.assert_allclose(after["data"], before["data"], rtol=4e-16)
