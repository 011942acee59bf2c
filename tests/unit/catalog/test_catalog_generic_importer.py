"""Any table becomes rows as a mapping says; what does not fit names the key or the line."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from import_plans import list_rows
from pyarrow import parquet

from foretoken.catalog.importing import ImportPlan, ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import (
    InvalidRequestError,
    UnknownDeviceError,
    UnknownOperatorError,
    UnknownTopologyError,
)

_EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
_GEMM: dict[str, Any] = {
    "files": "*.csv",
    "operator": "gemm",
    "dims": {"m": {"column": "tokens"}, "n": 8, "k": {"column": "k", "scale": 2}},
    "latency": {"median": {"column": "ms", "unit": "ms"}},
    "dtype": "fp16",
    "device": "a30",
}
_REDUCE: dict[str, Any] = {
    "files": "*.csv",
    "operator": "all_reduce",
    "dims": {
        "message_bytes": {"column": "size", "unit": "bytes"},
        "devices_per_node": 8,
        "num_nodes": 1,
    },
    "latency": {"median": {"column": "t", "unit": "us"}},
    "dtype": "fp16",
    "device": "h100_sxm",
    "topology": "h100_dgx",
}


def _read(folder: Path, table: Mapping[str, Any], **changes: Any) -> ImportPlan:
    mapping = folder / "mapping.yaml"
    mapping.write_text(yaml.safe_dump({"tables": [table]}))
    options = {"mapping": str(mapping)}
    request = ImportRequest(path=folder, **{"options": options, **changes})
    return find_importer("generic").read(request)


def _of_text(folder: Path, text: str, table: Mapping[str, Any], **changes: Any) -> list[Any]:
    (folder / "a.csv").write_text(text)
    return list_rows(_read(folder, table, **changes))


def test_columns_become_dimensions_and_times(tmp_path: Path) -> None:
    rows = _of_text(tmp_path, "k,tokens,ms\n4,16,0.5\n5,32,\n", _GEMM)
    assert [{"m": 16, "n": 8, "k": 8}, {"m": 32, "n": 8, "k": 10}] == [r["dims"] for r in rows]
    assert [(500.0, "ok"), (None, "failed")] == [
        (row["latency_us_median"], row["status"]) for row in rows
    ]
    names = ("operator", "phase", "dtype", "device", "source_file", "source_row")
    assert ("gemm", "forward", "fp16", "a30", "a.csv", 1) == tuple(rows[0][name] for name in names)


@pytest.mark.parametrize(
    ("unit", "dtype", "expected"),
    [
        ("bytes", "fp16", 48),
        ("KB", "fp16", 48_000),
        ("KiB", "fp16", 48 * 1024),
        ("MiB", "fp16", 48 << 20),
        ("elements", "fp32", 192),
        ("elements", "int4", 24),
    ],
)
def test_sizes_become_bytes(unit: str, dtype: str, expected: int, tmp_path: Path) -> None:
    dims = {**_REDUCE["dims"], "message_bytes": {"column": "size", "unit": unit}}
    [row] = _of_text(tmp_path, "size,t\n48,1\n", {**_REDUCE, "dims": dims, "dtype": dtype})
    assert expected == row["dims"]["message_bytes"]


@pytest.mark.parametrize(("unit", "expected"), [("ns", 0.5), ("us", 500), ("ms", 5e5), ("s", 5e8)])
def test_times_become_microseconds(unit: str, expected: float, tmp_path: Path) -> None:
    latency = {name: {"column": "ms", "unit": unit} for name in ("median", "p90")}
    [row] = _of_text(tmp_path, "k,tokens,ms\n4,16,500\n", {**_GEMM, "latency": latency})
    times = row["latency_us_median"], row["latency_us_p90"]
    assert pytest.approx((expected, expected)) == times


def test_a_column_splits_rows_into_operators(tmp_path: Path) -> None:
    names = {"column": "op", "values": {"AR": "all_reduce", "AG": "all_gather"}}
    text = "op,size,t\nAR,8,1\nAG,8,2\nAR,16,3\n"
    rows = _of_text(tmp_path, text, {**_REDUCE, "operator": names})
    found = [(row["operator"], row["source_row"]) for row in rows]
    assert [("all_gather", 2), ("all_reduce", 1), ("all_reduce", 3)] == found


def test_the_name_of_a_file_can_be_the_operator(tmp_path: Path) -> None:
    names = {"file_name": True, "values": {"a": "all_gather"}}
    [row] = _of_text(tmp_path, "size,t\n8,1\n", {**_REDUCE, "operator": names})
    assert "all_gather" == row["operator"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"column": "size", "min": 1}, [2, 3, 4]),
        ({"column": "size", "max": 8}, [1, 2]),
        ({"column": "size", "min": 8, "max": 16}, [2, 3]),
        ({"column": "kind", "is_in": ["a", "c"]}, [1, 2, 4]),
        ({"column": "kind", "is_not": ["a"]}, [3, 4]),
    ],
)
def test_rows_are_chosen(where: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    dims = {**_REDUCE["dims"], "message_bytes": {"column": "size", "scale": 1}}
    text = "size,kind,t\n0,a,1\n8,a,1\n16,b,1\n32,c,1\n"
    (tmp_path / "a.csv").write_text(text)
    table = {**_REDUCE, "dims": dims, "where": [where]}
    if 1 in expected:
        with pytest.raises(InvalidRequestError, match="line 2: all_reduce: message_bytes is 0"):
            _read(tmp_path, table)
        return
    plan = _read(tmp_path, table)
    assert expected == [row["source_row"] for row in list_rows(plan)]
    assert (f"a.csv: {4 - len(expected)} rows are left out by `where`",) == plan.notes


def test_all_that_a_row_can_carry_is_kept(tmp_path: Path) -> None:
    more = {
        "phase": "backward",
        "framework": "vllm",
        "framework_version": "0.19",
        "kernel": {"column": "kernel"},
        "variant": "quant=fp8;kv=fp8",
        "model": "meta-llama/Meta-Llama-3-8B",
        "num_samples": 7,
    }
    [row] = _of_text(tmp_path, "k,tokens,ms,kernel\n4,16,1,cutlass\n", {**_GEMM, **more})
    expected = ("backward", "vllm", "0.19", "cutlass", "kv=fp8;quant=fp8", "llama-3-8b", 7)
    assert expected == tuple(row[name] for name in more)


def test_a_parquet_file_is_a_table_too(tmp_path: Path) -> None:
    names = pa.array(["x", "y"]).dictionary_encode()
    for index, kernels in enumerate(
        (names, names.cast(pa.string()), names.cast(pa.large_string()))
    ):
        columns = {"tokens": pa.array([16, 32], pa.int32()), "k": [4, 5], "ms": [0.5, None]}
        parquet.write_table(pa.table({**columns, "kernel": kernels}), tmp_path / f"{index}.parquet")
    rows = list_rows(
        _read(tmp_path, {**_GEMM, "files": "*.parquet", "kernel": {"column": "kernel"}})
    )
    assert [("x", 16, "ok"), ("y", 32, "failed")] * 3 == [
        (row["kernel"], row["dims"]["m"], row["status"]) for row in rows
    ]


def test_the_command_says_what_the_mapping_does_not(tmp_path: Path) -> None:
    table = {key: item for key, item in _REDUCE.items() if key not in ("device", "topology")}
    text = "size,t\n8,1\n"
    with pytest.raises(InvalidRequestError, match=r"line 2: device: .* --device"):
        _of_text(tmp_path, text, table)
    with pytest.raises(InvalidRequestError, match="topology: all_reduce needs one"):
        _of_text(tmp_path, text, table, device="h100")
    [row] = _of_text(tmp_path, text, table, device="h100", topology="h100_dgx")
    assert ("h100_sxm", "h100_dgx") == (row["device"], row["topology"])
    with pytest.raises(InvalidRequestError, match="h100_dgx is made of h100_sxm"):
        _of_text(tmp_path, text, table, device="a30", topology="h100_dgx")


def test_the_command_narrows_what_the_mapping_says(tmp_path: Path) -> None:
    table = {**_GEMM, "device": {"column": "gpu"}}
    text = "k,tokens,ms,gpu\n4,16,1,a30\n4,16,1,a40\n"
    assert ["a40"] == [row["device"] for row in _of_text(tmp_path, text, table, device="a40")]
    with pytest.raises(InvalidRequestError, match="nothing to import"):
        _of_text(tmp_path, text, table, device="b200")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operater": "gemm"}, r"tables\[0\].operater: unknown key"),
        ({"operator": None}, r"tables\[0\].operator: give one of value, column, file_name"),
        ({"operator": {"value": "a", "column": "b"}}, r"tables\[0\].operator: give one of"),
        (
            {"dtype": {"value": "a", "values": {}, "colum": "b"}},
            r"tables\[0\].dtype.colum: unknown",
        ),
        ({"dims": {"m": {"column": "a", "unit": "kbit"}}}, r"dims.m.unit: 'kbit' is not one of"),
        ({"dims": {"m": {}}}, r"tables\[0\].dims.m: give one of value, column"),
        ({"latency": {}}, r"tables\[0\].latency.median: required key is missing"),
        ({"latency": {"p50": {"column": "a", "unit": "us"}}}, "latency.p50: is not one of"),
        ({"latency": {"median": {"column": "a"}}}, "latency.median.unit: required key"),
        ({"files": "../*.csv"}, r"tables\[0\].files: must be a pattern inside the folder"),
        ({"files": "/etc/*"}, r"tables\[0\].files: must be a pattern inside the folder"),
        ({"files": "*.npz"}, r"tables\[0\].files: .*no file matches"),
        ({"files": "*.yaml"}, r"mapping.yaml is neither .csv nor .parquet"),
        ({"num_samples": "many"}, r"tables\[0\].num_samples: expected int"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _of_text(tmp_path, "k,tokens,ms\n4,16,1\n", {**_GEMM, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dims": {**_GEMM["dims"], "q": 1}}, InvalidRequestError, "q: gemm has no such dim"),
        ({"dims": {"m": 1}}, InvalidRequestError, "k: missing"),
        (
            {"dims": {**_GEMM["dims"], "n": {"column": "ms"}}},
            InvalidRequestError,
            "no whole number",
        ),
        ({"dims": {**_GEMM["dims"], "n": {"column": "x"}}}, InvalidRequestError, "'x' is missing"),
        ({"dims": {**_GEMM["dims"], "n": 0}}, InvalidRequestError, "line 2: gemm: n is 0"),
        ({"dtype": "fp17"}, InvalidRequestError, "line 2: dtype: 'fp17' is not one of fp32"),
        ({"phase": "sideways"}, InvalidRequestError, "line 2: phase: 'sideways'"),
        ({"variant": "fp8"}, InvalidRequestError, "'fp8' is not key=value"),
        ({"operator": "gem"}, UnknownOperatorError, "did you mean gemm"),
        ({"device": "a3000"}, UnknownDeviceError, "a3000"),
        ({"topology": "a30_ring"}, UnknownTopologyError, "a30_ring"),
        (
            {"device": {"column": "k", "values": {"5": "a30"}}},
            InvalidRequestError,
            "line 2: device: '4' is not among the mapping's values",
        ),
    ],
)
def test_a_cell_that_cannot_be_used_is_named(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        _of_text(tmp_path, "k,tokens,ms\n4,16,1.5\n", {**_GEMM, **changes})


def test_a_mapping_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"options.mapping: give the mapping file"):
        find_importer("generic").read(ImportRequest(path=tmp_path))
    options = {"mapping": str(tmp_path / "nowhere.yaml")}
    with pytest.raises(InvalidRequestError, match=r"nowhere.yaml: No such file"):
        find_importer("generic").read(ImportRequest(path=tmp_path, options=options))


def test_a_column_that_makes_every_row_its_own_kind_is_refused(tmp_path: Path) -> None:
    text = "k,tokens,ms\n" + "".join(f"4,16,{index}\n" for index in range(20_001))
    with pytest.raises(InvalidRequestError, match="more than 20000 kinds of rows"):
        _of_text(tmp_path, text, {**_GEMM, "kernel": {"column": "ms"}})


def test_another_mapping_is_another_run(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("k,tokens,ms\n4,16,1\n")
    first, second = (_read(tmp_path, {**_GEMM, "dtype": dtype}) for dtype in ("fp16", "bf16"))
    assert first.run.run_id != second.run.run_id
    assert first.run.run_id == _read(tmp_path, _GEMM).run.run_id


def test_apex_collectives_are_read_by_the_example_mapping(
    catalog: CatalogService, shared_data: Path
) -> None:
    """Size 0 is a launch, not a message; of the V100 the rows are left out whose columns moved."""
    request = ImportRequest(
        path=shared_data / "apex" / "op_profile_comm",
        options={"mapping": str(_EXAMPLES / "apex-mapping.yaml")},
    )
    plan = find_importer("generic").read(request)
    assert 1345 == sum(receipt.num_rows for receipt in catalog.record(plan.run, plan.batches))
    counts = Counter((row["operator"], row["device"]) for row in list_rows(plan))
    kinds = ("all_gather", "all_reduce", "all_to_all")
    found = {"h100_sxm": (111, 111, 37), "h200_sxm": (54, 54, 18), "v100_pcie_16": (152, 136, 38)}
    expected = {
        (operator, device): num_rows
        for device, (num_each, num_scatters, num_pairs) in found.items()
        for operator, num_rows in (
            *((kind, num_each) for kind in kinds),
            ("reduce_scatter", num_scatters),
            ("send_recv", num_pairs),
        )
    }
    assert expected == counts
    (note,) = (note for note in plan.notes if note.startswith("V100"))
    assert "V100-PCIE-16GB/reduce_scatter.csv: 16 rows are left out by `where`" == note


@pytest.mark.parametrize("column", ["kernel", "of_no_use"])
def test_texts_of_a_parquet_file_that_are_not_utf8_are_named(tmp_path: Path, column: str) -> None:
    columns = {"tokens": [16], "k": [4], "ms": [0.5], "kernel": ["x"], "of_no_use": ["x"]}
    spoilt = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    parquet.write_table(pa.table({**columns, column: spoilt}), tmp_path / "a.parquet")
    with pytest.raises(InvalidRequestError, match=f"a.parquet: column '{column}' cannot be read"):
        _read(tmp_path, {**_GEMM, "files": "*.parquet", "kernel": {"column": "kernel"}})
