"""An export is what AIConfigurator's reader expects, and imports to the rows it was made of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from aiconfigurator_tables import (
    ALL_REDUCE,
    ATTENTION,
    GEMM,
    MLA,
    MLA_MODULE,
    MOE,
    NCCL,
    plan_table,
    read_plan,
    write_table,
)
from pyarrow import parquet

from foretoken.catalog.dims import split_by_operator
from foretoken.catalog.exporters.aiconfigurator import EXPORTER
from foretoken.catalog.exporting import ExportReport, ExportRequest
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import all_devices
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.wire.arrow import rows_to_table

_TEXTS = (
    "operator",
    "phase",
    "dtype",
    "device",
    "topology",
    "framework",
    "framework_version",
    "kernel",
    "variant",
    "model",
    "status",
)
_OURS = {
    "operator": "gemm",
    "phase": "forward",
    "dtype": "bf16",
    "dims": {"m": 4, "n": 8, "k": 16},
    "device": "a30",
    "framework": "vllm",
    "framework_version": "0.24.0",
    "kernel": "torch.mm",
    "latency_us_median": 500.0,
    "status": "ok",
}
_TABLES = {
    "gemm_perf": [GEMM, {**GEMM, "gemm_dtype": "fp8_block"}, {**GEMM, "latency": 0.7}],
    "context_attention_perf": [ATTENTION, {**ATTENTION, "window_size": 3, "kv_cache_dtype": "fp8"}],
    "generation_attention_perf": [
        {**ATTENTION, "isl": 1, "step": 19},
        {**ATTENTION, "isl": 1, "step": 19, "window_size": 3, "num_key_value_heads": 4},
    ],
    "context_mla_perf": [{**MLA, "tp_size": 1}],
    "generation_mla_perf": [{**MLA, "tp_size": 1, "isl": 1, "step": 19, "kv_cache_dtype": "fp8"}],
    "mla_context_module_perf": [{**MLA_MODULE, "tp_size": 1, "gemm_type": "fp8_block"}],
    "mla_generation_module_perf": [{**MLA_MODULE, "tp_size": 1, "isl": 1, "step": 19}],
    "moe_perf": [
        MOE,
        {**MOE, "moe_tp_size": 4, "distribution": "power_law_1.2", "moe_dtype": "int4_wo"},
        {**MOE, "moe_tp_size": 2, "moe_ep_size": 16},
    ],
    "nccl_perf": [NCCL, {**NCCL, "op_name": "alltoall", "nccl_dtype": "int8", "num_gpus": 16}],
    "custom_allreduce_perf": [
        {
            **ALL_REDUCE,
            "op_name": "all_reduce",
            "kernel_source": f"vLLM_custom_{lane}",
            "backend": f"vllm_{lane}",
        }
        for lane in ("eager", "graph")
    ],
}


def _export(rows: pa.Table, path: Path, **options: str) -> ExportReport:
    return EXPORTER.write(rows, ExportRequest(path=path, options=options))


def _points(rows: pa.Table) -> list[tuple[Any, ...]]:
    """Return every row's identity and time, in an order of their own."""
    rows, groups = split_by_operator(rows)
    texts = {name: rows[name].to_pylist() for name in _TEXTS}
    times_us = rows["latency_us_median"].to_pylist()
    found = []
    for group in groups:
        dims = np.column_stack(list(group.columns.values())).tolist()
        for row, values in zip(group.indices.tolist(), dims, strict=True):
            # Two conversions of a unit may change the last bit.
            time_us = float(f"{times_us[row]:.12g}")
            found.append((*(str(texts[name][row]) for name in _TEXTS), *values, time_us))
    return sorted(found)


def _folder(table: str) -> str:
    family = {"gemm": "gemm", "moe": "moe", "nccl": "comm", "custom": "comm"}.get(
        table.split("_", maxsplit=1)[0], "mla" if "mla" in table else "attention"
    )
    return f"data/h200_sxm/{family}/{'nccl' if table == 'nccl_perf' else 'vllm'}/0.24.0"


@pytest.mark.parametrize(("table", "rows"), _TABLES.items())
def test_a_table_comes_back_with_its_columns(
    tmp_path: Path, table: str, rows: Sequence[Mapping[str, Any]]
) -> None:
    """The same cells under the same names, in the same place; only labels may differ."""
    path = write_table(tmp_path / "in" / _folder(table) / f"{table}.parquet", *rows)
    _export(plan_table(read_plan(tmp_path / "in")), tmp_path / "out")
    before = parquet.read_table(path)
    after = parquet.read_table(tmp_path / "out" / _folder(table) / f"{table}.parquet")
    labels = {"framework", "op_name"}
    for name in before.schema.names:
        if name not in labels:
            assert (name, before[name].to_pylist()) == (name, after[name].to_pylist())
    assert set(before.schema.names) == set(after.schema.names)


def test_everything_at_once_round_trips(tmp_path: Path, catalog: CatalogService) -> None:
    """Through the catalog, with flagged rows and without loss."""
    for table, rows in _TABLES.items():
        write_table(tmp_path / "in" / _folder(table) / f"{table}.parquet", *rows)
    plan = read_plan(tmp_path / "in")
    list(catalog.record(plan.run, plan.batches))
    stored = catalog.read_measurements(MeasurementFilter(include_flagged=True))
    report = EXPORTER.write(stored, ExportRequest(path=tmp_path / "out"))
    assert plan.num_rows == report.num_rows
    expected = plan_table(read_plan(tmp_path / "in"))
    assert _points(expected) == _points(plan_table(read_plan(tmp_path / "out")))


@pytest.mark.parametrize(
    "path",
    [
        "a100_sxm/attention/vllm/0.14.0",
        "a100_sxm/comm",
        "a100_sxm/gemm/trtllm/1.0.0",
        "a100_sxm/mla",
        "a100_sxm/moe/vllm/0.14.0",
        "h200_sxm/comm",
        "h200_sxm/mla",
    ],
)
def test_the_shared_tables_round_trip(shared_data: Path, tmp_path: Path, path: str) -> None:
    rows = plan_table(read_plan(shared_data / "aiconfigurator" / "systems" / "data" / path))
    report = _export(rows, tmp_path / "out")
    assert rows.num_rows == report.num_rows
    assert _points(rows) == _points(plan_table(read_plan(tmp_path / "out")))


def test_a_system_file_has_what_the_reader_asks_for(tmp_path: Path) -> None:
    """Peaks, memory and links of our own files; the corrections are noted as theirs."""
    write_table(tmp_path / "in" / "nccl_perf.parquet", {**NCCL, "version": "2.29.2"})
    report = _export(plan_table(read_plan(tmp_path / "in")), tmp_path / "out")
    system = yaml.safe_load((tmp_path / "out" / "h200_sxm.yaml").read_text())
    assert "data/h200_sxm" == system["data_dir"]
    assert "2.29.2" == system["misc"]["nccl_version"]
    assert {
        "mem_bw": 4_800_000_000_000,
        "mem_capacity": 150_754_820_096,
        "bfloat16_tc_flops": 989_400_000_000_000,
        "sm_version": 90,
    }.items() <= system["gpu"].items()
    assert {"num_gpus_per_node": 8, "intra_node_bw": 450_000_000_000}.items() <= system[
        "node"
    ].items()
    assert ["h200_sxm.yaml"] == [note.split(":")[0] for note in report.notes]


def test_every_table_is_listed_beside_it(tmp_path: Path) -> None:
    """Without the list the reader refuses a table when it is strict about provenance."""
    _export(rows_to_table([_OURS]), tmp_path / "out")
    meta = yaml.safe_load(
        (tmp_path / "out/data/a30/gemm/vllm/0.24.0/collection_meta.yaml").read_text()
    )
    assert {"framework": "vllm", "version": "0.24.0"} == meta["runtime"]
    assert {"gemm_perf": {"status": "complete"}} == meta["tables"]


@pytest.mark.parametrize("device", sorted(set(all_devices()) - {"cpu"}))
def test_rows_of_every_device_come_back(tmp_path: Path, device: str) -> None:
    rows = rows_to_table([{**_OURS, "device": device, "power_w": 300.0}])
    _export(rows, tmp_path / "out")
    (found,) = plan_table(read_plan(tmp_path / "out")).to_pylist()
    assert (device, 500.0, 300.0) == (
        found["device"],
        found["latency_us_median"],
        found["power_w"],
    )


def test_rows_of_other_engines_need_a_name_to_go_by(tmp_path: Path) -> None:
    """They are left out, or written as those of the engine that is named."""
    rows = rows_to_table([_OURS, {**_OURS, "framework": "torch", "dtype": "fp16"}])
    report = _export(rows, tmp_path / "without")
    assert 1 == report.num_rows
    assert (
        "1 rows left out, of none of its engines (--option backend=E --option version=V names one):"
        " gemm of torch 1"
    ) == report.notes[0]
    report = _export(rows, tmp_path / "with", backend="trtllm", version="1.0")
    assert 2 == report.num_rows
    (path,) = (tmp_path / "with").rglob("trtllm/1.0/gemm_perf.parquet")
    assert ["bfloat16"] == parquet.read_table(path)["gemm_dtype"].to_pylist()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"operator": "rms_norm", "dims": {"num_tokens": 4, "hidden": 8}},
            "no table holds such: rms_norm (bf16) 1",
        ),
        ({"phase": "backward"}, "no table holds such: gemm (bf16, backward) 1"),
        ({"dtype": "fp32"}, "no table holds such: gemm (fp32) 1"),
        ({"variant": "lane=eager"}, "no table holds such: gemm (bf16, lane=eager) 1"),
        ({"status": "failed", "latency_us_median": None}, "failed: gemm 1"),
        (
            {
                "operator": "attention_decode",
                "dims": {
                    "num_seqs": 2,
                    "kv_tokens": 5,
                    "kv_tokens_max": 4,
                    "num_heads": 8,
                    "num_kv_heads": 8,
                    "head_dim": 64,
                },
            },
            (
                "sequences of unequal lengths, prefill after cached tokens, or other widths:"
                " attention_decode 1"
            ),
        ),
    ],
)
def test_rows_without_a_place_are_counted(
    tmp_path: Path, changes: Mapping[str, Any], reason: str
) -> None:
    report = _export(rows_to_table([_OURS, {**_OURS, **changes}]), tmp_path / "out")
    assert 1 == report.num_rows
    assert f"1 rows left out, {reason}" == report.notes[0]


def test_rows_without_a_version_need_one_to_go_by(tmp_path: Path) -> None:
    """The note names the option that brings them in, and that option does."""
    unsaid = {"framework_version": None}
    reduced = {"message_bytes": 1024, "devices_per_node": 1, "num_nodes": 2}
    rows = rows_to_table(
        [
            _OURS,
            {**_OURS, "framework": "vllm", **unsaid},
            {
                **_OURS,
                "framework": "nccl",
                **unsaid,
                "operator": "all_gather",
                "dims": reduced,
                "dtype": "fp16",
                "topology": "a30_single_gpu",
            },
        ]
    )
    report = _export(rows, tmp_path / "without")
    assert (
        (
            "1 rows left out, of no version (--option backend=vllm --option version=V names it):"
            " gemm of vllm 1"
        ),
        (
            "1 rows left out, of no NCCL version (--option nccl_version=V names it):"
            " all_gather of nccl 1"
        ),
    ) == report.notes[:2]
    other = _export(rows, tmp_path / "other", backend="sglang", version="1.0")
    assert 1 == other.num_rows
    options = {"backend": "vllm", "version": "0.24.0", "nccl_version": "2.29.2"}
    assert 3 == _export(rows, tmp_path / "with", **options).num_rows


def test_an_export_without_rows_is_refused(tmp_path: Path) -> None:
    rows = rows_to_table([{**_OURS, "dtype": "fp32"}])
    with pytest.raises(InvalidRequestError, match="no row fits AIConfigurator's tables: 1 rows"):
        _export(rows, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"backend": "torch", "version": "1"}, "options.backend"),
        ({"backend": "vllm"}, "options.version"),
        ({"backend": "vllm", "version": "../x"}, "options.version"),
        ({"nccl_version": ".."}, "options.nccl_version"),
    ],
)
def test_impossible_options_are_named(tmp_path: Path, options: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        _export(rows_to_table([_OURS]), tmp_path / "out", **options)
    assert [field] == [violation.field for violation in caught.value.violations]


def test_a_version_that_is_no_folder_is_left_out(tmp_path: Path) -> None:
    """What rows say of themselves never leads out of the export."""
    rows = rows_to_table([_OURS, {**_OURS, "framework_version": "../../x"}])
    assert 1 == _export(rows, tmp_path / "out").num_rows
