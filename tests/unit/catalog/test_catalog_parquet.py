"""Datasets as folders of Parquet files: read by others, and back by us unchanged."""

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from catalog_rows import batches, gemms, row, table
from pyarrow import dataset, parquet

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dataset import MANIFEST_NAME, list_dims
from foretoken.catalog.exporters.parquet import _DatasetWriter, _with_places, _writing_to
from foretoken.catalog.exporting import ExportReport, ExportRequest, find_exporter
from foretoken.catalog.importing import ImportPlan, ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import InvalidRequestError, StorageFullError
from foretoken.domain.measurements.measurement import MeasurementFilter, Run, RunKind
from foretoken.domain.operators.spec.operator import all_operators
from foretoken.wire.arrow import LATER_COLUMNS, STORED_SCHEMA, read_table

_ALL = MeasurementFilter(include_failed=True, include_flagged=True)
_MESSAGE = {"message_bytes": 4096, "devices_per_node": 4, "num_nodes": 1}
_COLLECTIVE = {
    "operator": "all_reduce",
    "dims": _MESSAGE,
    "device": "a100_sxm_80",
    "topology": "a100_dgx",
}
_PROFILE = Run(
    run_id="profile-1",
    kind=RunKind.PROFILE,
    tool="foretoken-profiler",
    source="our lab",
    licence="Apache-2.0",
    environment={"driver": "550", "host": "one"},
)
_IMPORT = Run(
    run_id="import-1",
    kind=RunKind.IMPORT,
    tool="vidur",
    content_hash="abc",
    source="https://example.org",
    licence="MIT",
    environment={"driver": "550"},
)


@pytest.fixture(scope="module")
def source(
    tmp_path_factory: pytest.TempPathFactory, make_catalog_path: Callable[[Path], str]
) -> Iterator[CatalogService]:
    """A catalog with two runs, two devices, four operators, failures, flags and odd values.

    Tests only read it.
    """
    path = make_catalog_path(tmp_path_factory.mktemp("source"))
    catalog = CatalogService(CatalogConfig(path=path, num_threads=1))
    catalog.open()
    mixed = table(
        row(1, kernel="", variant="kv=fp8", model="llama-3.1-8b", latency_us_std=0.1 + 0.2),
        row(2, device="a40", num_samples=2**53 + 1),
        row(3, status="failed", status_reason="out of memory", latency_us_median=None),
        row(4096, latency_us_median=2.0, source_file="gemm.csv", source_row=7, source_hash="ff"),
        row(5, flags=["mine: odd, with a comma", "another: ü"]),
        row(dims={"num_tokens": 8, "hidden": 4096}, operator="rms_norm"),
        row(**_COLLECTIVE),
    )
    list(catalog.record(_PROFILE, batches(mixed)))
    list(catalog.record(_IMPORT, batches(gemms([7, 8], source_file="x/mlp.csv", source_row=1))))
    with catalog._store.transaction() as cursor:
        cursor.execute("INSERT INTO review VALUES (3, '', '', '', 0, '2026-01-01')")
        cursor.execute("INSERT INTO doubt VALUES (2, 0, 'late: doubt', 3, NULL)")
    yield catalog
    catalog.close()


@pytest.fixture
def target(tmp_path: Path, make_catalog_path: Callable[[Path], str]) -> Iterator[CatalogService]:
    path = make_catalog_path(tmp_path / "target")
    service = CatalogService(CatalogConfig(path=path, num_threads=1))
    service.open()
    yield service
    service.close()


def _export(
    catalog: CatalogService, path: Path, selection: MeasurementFilter = _ALL, **options: str
) -> ExportReport:
    runs = [summary.run for summary in catalog.list_runs()]
    request = ExportRequest(path=path, selection=selection, runs=runs, options=options)
    return find_exporter("parquet").write(catalog.read_measurements(selection), request)


def _import(path: Path, **fields: Any) -> ImportPlan:
    return find_importer("parquet").read(ImportRequest(path=path, **fields))


def _manifest(path: Path) -> Any:
    return json.loads((path / MANIFEST_NAME).read_text())


def test_a_round_trip_has_the_same_content(
    source: CatalogService, target: CatalogService, tmp_path: Path
) -> None:
    report = _export(source, tmp_path / "set")
    plan = _import(tmp_path / "set")
    list(target.record(plan.run, plan.batches))
    expected = source.describe_snapshot(_ALL)
    found = target.describe_snapshot(_ALL)
    assert (9, 9) == (report.num_rows, plan.num_rows)
    assert (expected.content_hash, 9) == (found.content_hash, found.num_rows)
    assert expected.content_hash == _manifest(tmp_path / "set")["content_hash"]
    again = _export(target, tmp_path / "again")
    assert expected.content_hash == _manifest(tmp_path / "again")["content_hash"]
    assert report.files == again.files


def test_rows_keep_the_judgement_they_come_with(
    catalog: CatalogService, target: CatalogService, tmp_path: Path
) -> None:
    """A slip that was not judged yet; a review of the whole run would flag it."""
    slip = [row(m, latency_us_median=3e5 if m == 8 else 1e5) for m in range(1, 16)]
    list(catalog.record(_PROFILE, batches(table(*slip), is_complete=False)))
    _export(catalog, tmp_path / "set")
    plan = _import(tmp_path / "set")
    list(target.record(plan.run, plan.batches))
    expected = catalog.describe_snapshot(_ALL)
    assert expected.content_hash == target.describe_snapshot(_ALL).content_hash
    list(catalog.record(_IMPORT, plan.batches))
    assert {"profile-1": 1, "import-1": 1} == {
        run.run.run_id: run.num_flagged for run in catalog.list_runs()
    }


def test_an_import_says_where_its_rows_were_measured(
    source: CatalogService, target: CatalogService, tmp_path: Path
) -> None:
    _export(source, tmp_path / "set")
    plan = _import(tmp_path / "set")
    list(target.record(plan.run, plan.batches))
    assert ("our lab; https://example.org", "Apache-2.0; MIT") == (
        plan.run.source,
        plan.run.licence,
    )
    environment = dict(plan.run.environment)
    profile = {
        "kind": "profile",
        "tool": "foretoken-profiler",
        "source": "our lab",
        "licence": "Apache-2.0",
        "environment": {"host": "one"},
    }
    assert ("550", profile) == (environment["driver"], json.loads(environment["profile-1"]))
    rows = read_table(target.read_measurements(_ALL)).to_pylist()
    origins = {(r["source_file"], r["source_row"]) for r in rows}
    expected = {("profile-1", None), ("profile-1/gemm.csv", 7), ("import-1/x/mlp.csv", 1)}
    assert expected == origins


def test_the_same_dataset_is_the_same_run(source: CatalogService, tmp_path: Path) -> None:
    _export(source, tmp_path / "set")
    first, again = (_import(tmp_path / "set").run for _ in range(2))
    narrowed = _import(tmp_path / "set", device="a40").run
    assert first == again
    assert first.run_id != narrowed.run_id


@pytest.mark.parametrize(
    ("narrow", "expected"),
    [({"device": "a40"}, 1), ({"topology": "a100_dgx"}, 1), ({"model": "llama-3.1-8b"}, 1)],
)
def test_an_import_is_narrowed(
    narrow: dict[str, str], expected: int, source: CatalogService, tmp_path: Path
) -> None:
    _export(source, tmp_path / "set")
    plan = _import(tmp_path / "set", **narrow)
    assert expected == plan.num_rows == sum(pa.table(b.rows).num_rows for b in plan.batches)


def _expected_rows(catalog: CatalogService) -> list[dict[str, Any]]:
    rows = read_table(catalog.read_measurements(_ALL)).to_pylist()
    plain = [{**dict.fromkeys(list_dims()), **r, **dict(r["dims"])} for r in rows]
    for found in plain:
        del found["dims"], found["recorded_at"]
    return _sorted(plain)


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda r: (r["run_id"], r["batch_index"], r["row_index"]))


def test_duckdb_reads_the_folder_as_one_table(source: CatalogService, tmp_path: Path) -> None:
    _export(source, tmp_path / "set")
    with duckdb.connect() as connection:
        files = f"read_parquet('{tmp_path}/set/**/*.parquet', hive_partitioning=true)"
        found = connection.sql(f"FROM {files}").to_arrow_table()
        kinds = connection.sql(f"DESCRIBE FROM {files}").fetchall()
    assert _expected_rows(source) == _sorted(found.drop_columns(["recorded_at"]).to_pylist())
    assert "TIMESTAMP WITH TIME ZONE" == {kind[0]: kind[1] for kind in kinds}["recorded_at"]


def test_pyarrow_reads_the_folder_as_pandas_does(source: CatalogService, tmp_path: Path) -> None:
    _export(source, tmp_path / "set")
    found = dataset.dataset(tmp_path / "set", format="parquet", partitioning="hive")
    rows = found.to_table().drop_columns(["recorded_at"]).to_pylist()
    assert _expected_rows(source) == _sorted(rows)
    assert pa.timestamp("us", tz="UTC") == found.schema.field("recorded_at").type


def test_one_operator_is_read_from_its_folder_alone(source: CatalogService, tmp_path: Path) -> None:
    report = _export(source, tmp_path / "set")
    assert "device=a40/operator=gemm/part-0.parquet" in report.files
    columns = parquet.read_table(
        tmp_path / "set/device=a40/operator=gemm/part-0.parquet", partitioning=None
    )
    assert [(2, 4096, 4096)] == list(
        zip(*(columns.column(name).to_pylist() for name in ("m", "n", "k")), strict=True)
    )


def test_the_manifest_says_what_the_folder_holds(source: CatalogService, tmp_path: Path) -> None:
    selection = MeasurementFilter(device="a40")
    report = _export(source, tmp_path / "set", selection)
    found = _manifest(tmp_path / "set")
    path = tmp_path / "set" / report.files[0]
    expected = {
        "path": "device=a40/operator=gemm/part-0.parquet",
        "num_rows": 1,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    assert ([expected], "a40", 2) == (
        found["files"],
        found["selection"]["device"],
        found["version"],
    )
    assert ["profile-1"] == [run["run_id"] for run in found["runs"]]


def _edit_manifest(path: Path, change: Callable[[Any], Any]) -> None:
    found = _manifest(path)
    change(found)
    (path / MANIFEST_NAME).write_text(json.dumps(found))


_PART = "device=a40/operator=gemm/part-0.parquet"


def _flip_byte(path: Path) -> None:
    content = bytearray((path / _PART).read_bytes())
    content[len(content) // 2] ^= 1
    (path / _PART).write_bytes(content)


def _make_link(path: Path) -> None:
    (path / _PART).rename(path / "elsewhere")
    (path / _PART).symlink_to(path / "elsewhere")


def _replace_rows(path: Path) -> None:
    """Change a row and the file's hash with it, but not that of the content."""
    found = parquet.read_table(path / _PART, partitioning=None)
    position = found.schema.get_field_index("latency_us_median")
    found = found.set_column(position, found.schema.field(position), pa.array([1e3]))
    parquet.write_table(found, path / _PART)
    digest = hashlib.sha256((path / _PART).read_bytes()).hexdigest()
    _edit_manifest(path, lambda m: m["files"][0].update(sha256=digest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_byte, f"{_PART}: has changed since it was written"),
        (lambda path: (path / _PART).unlink(), f"{_PART}: is missing"),
        (lambda path: (path / "x.parquet").write_bytes(b""), "x.parquet: is not in"),
        (_make_link, f"{_PART}: is a link"),
        (_replace_rows, "its rows are not those"),
        (lambda path: (path / MANIFEST_NAME).unlink(), f"has no {MANIFEST_NAME}"),
        (lambda path: (path / MANIFEST_NAME).write_text("[]"), "version None"),
        (lambda path: _edit_manifest(path, lambda m: m.update(version=3)), "version 3"),
        (lambda path: _edit_manifest(path, lambda m: m.update(more=2)), "more"),
        (lambda path: _edit_manifest(path, lambda m: m["files"].append(m["files"][0])), "twice"),
        (
            lambda path: _edit_manifest(path, lambda m: m["files"][0].update(path="../x.parquet")),
            "no place in a dataset",
        ),
        (
            lambda path: _edit_manifest(path, lambda m: m["files"][0].update(num_rows=2)),
            f"{_PART}: has 1 rows where {MANIFEST_NAME} says 2",
        ),
    ],
)
def test_a_dataset_that_is_not_as_it_was_written_is_refused(
    damage: Callable[[Path], Any], message: str, source: CatalogService, tmp_path: Path
) -> None:
    _export(source, tmp_path / "set", MeasurementFilter(device="a40"))
    damage(tmp_path / "set")
    with pytest.raises(InvalidRequestError, match=message.replace("(", "\\(")):
        _import(tmp_path / "set")


def _make_first_version(path: Path) -> None:
    """Write a dataset as it was before its files had the later columns."""
    found = parquet.read_table(path / _PART, partitioning=None).drop_columns(list(LATER_COLUMNS))
    parquet.write_table(found, path / _PART)
    digest = hashlib.sha256((path / _PART).read_bytes()).hexdigest()
    _edit_manifest(path, lambda m: m["files"][0].update(sha256=digest))
    _edit_manifest(path, lambda m: m.update(version=1))


def test_a_dataset_of_the_first_version_is_read(
    source: CatalogService, target: CatalogService, tmp_path: Path
) -> None:
    _export(source, tmp_path / "set", MeasurementFilter(device="a40"))
    _make_first_version(tmp_path / "set")
    plan = _import(tmp_path / "set")
    list(target.record(plan.run, plan.batches))
    found = read_table(target.read_measurements(MeasurementFilter(device="a40")))
    assert [[None]] * 3 == [found[name].to_pylist() for name in LATER_COLUMNS]


def test_a_dataset_has_columns_for_the_dimensions_of_the_operators_it_is_said_to_have(
    source: CatalogService, target: CatalogService, tmp_path: Path
) -> None:
    """The rows are the same; those of another operator have no place, and nothing is left."""
    gemms_only = MeasurementFilter(operator="gemm")
    _export(source, tmp_path / "all", gemms_only)
    _export(source, tmp_path / "set", gemms_only, operators="gemm", level="19")
    dims = {name: set(_manifest(tmp_path / name)["dims"]) for name in ("all", "set")}
    assert {"all": set(list_dims()), "set": {"m", "n", "k"}} == dims
    found = [_manifest(tmp_path / name)["content_hash"] for name in ("all", "set")]
    assert found[0] == found[1]
    assert (tmp_path / "set" / _PART).stat().st_size < (tmp_path / "all" / _PART).stat().st_size
    plan = _import(tmp_path / "set")
    list(target.record(plan.run, plan.batches))
    assert found[0] == target.describe_snapshot(gemms_only).content_hash
    with pytest.raises(InvalidRequestError, match=r"options\.operators: there are rows of"):
        _export(source, tmp_path / "other", operators="gemm")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("level", ["0", "23", "-1", "high", ""])
def test_a_level_that_zstd_does_not_have_is_refused(
    level: str, source: CatalogService, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=r"options\.level: from 1 to 22"):
        _export(source, tmp_path / "set", level=level)


def test_a_file_changed_after_it_was_checked_is_not_recorded(
    source: CatalogService, target: CatalogService, tmp_path: Path
) -> None:
    _export(source, tmp_path / "set", MeasurementFilter(device="a40"))
    plan = _import(tmp_path / "set")
    _flip_byte(tmp_path / "set")
    with pytest.raises(InvalidRequestError, match="has changed"):
        list(target.record(plan.run, plan.batches))
    assert 0 == read_table(target.read_measurements(_ALL)).num_rows


def test_a_text_that_repeats_beyond_all_memory_is_refused(
    source: CatalogService, tmp_path: Path
) -> None:
    """A megabyte a thousand times over packs into a few kilobytes."""
    _export(source, tmp_path / "set", MeasurementFilter(device="a40"))
    path = tmp_path / "set" / _PART
    one = parquet.read_table(path, partitioning=None)
    many = one.take(pa.array([0] * 1000))
    position = many.schema.get_field_index("kernel")
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1000), pa.array(["x" * 2**20]))
    many = many.set_column(position, pa.field("kernel", texts.type), texts)
    content = io.BytesIO()
    parquet.write_table(
        many, content, compression="zstd", dictionary_pagesize_limit=2**22, store_schema=False
    )
    path.write_bytes(content.getvalue())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    _edit_manifest(path.parents[2], lambda m: m["files"][0].update(sha256=digest, num_rows=1000))
    assert path.stat().st_size < 100_000
    with pytest.raises(InvalidRequestError, match=f"{_PART}: .*(unpacks|bytes)"):
        _import(tmp_path / "set")


def test_nothing_is_left_of_an_export_that_failed(tmp_path: Path) -> None:
    stored = {"run_id": "run-1", "batch_index": 0, "row_index": 0, "recorded_at": 0}
    constants = [pa.array([stored[f.name]], f.type) for f in STORED_SCHEMA if f.name in stored]
    (first,) = gemms([1]).to_batches()

    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays([*constants, *first.columns], schema=STORED_SCHEMA)
        raise ValueError("the catalog went away")

    stream = pa.RecordBatchReader.from_batches(STORED_SCHEMA, rows())
    with pytest.raises(Exception, match="the catalog went away"):
        find_exporter("parquet").write(stream, ExportRequest(path=tmp_path / "set"))
    assert not (tmp_path / "set").exists()


def test_an_export_that_failed_removes_what_it_wrote_and_nothing_else(tmp_path: Path) -> None:
    """Somebody put a file of his own there meanwhile."""
    stored = {"run_id": "run-1", "batch_index": 0, "row_index": 0, "recorded_at": 0}
    constants = [pa.array([stored[f.name]], f.type) for f in STORED_SCHEMA if f.name in stored]
    (first,) = gemms([1]).to_batches()

    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays([*constants, *first.columns], schema=STORED_SCHEMA)
        (tmp_path / "set" / "own").mkdir(parents=True)
        (tmp_path / "set" / "own" / "notes.txt").write_text("mine")
        raise ValueError("the catalog went away")

    stream = pa.RecordBatchReader.from_batches(STORED_SCHEMA, rows())
    with pytest.raises(Exception, match="the catalog went away"):
        find_exporter("parquet").write(stream, ExportRequest(path=tmp_path / "set"))
    left = [path.relative_to(tmp_path) for path in (tmp_path / "set").rglob("*")]
    assert [Path("set/own"), Path("set/own/notes.txt")] == sorted(left)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageFullError, match="make room"), _writing_to(tmp_path):
        Path("/dev/full").write_text("rows")


def test_an_export_writes_through_no_link_that_lies_in_its_folder(
    source: CatalogService, tmp_path: Path
) -> None:
    (rows,) = read_table(source.read_measurements(_ALL)).combine_chunks().to_batches()
    other = tmp_path / "other.parquet"
    other.write_text("somebody's")
    folder = tmp_path / "set" / "device=a30/operator=gemm"
    folder.mkdir(parents=True)
    (folder / "part-0.parquet").symlink_to(other)
    writer = _DatasetWriter(tmp_path / "set", list_dims())
    writer.add(_with_places(rows.slice(0, 1)))
    with pytest.raises(InvalidRequestError, match="leads out of its folder"):
        writer.close()
    assert "somebody's" == other.read_text()


def test_nothing_selected_is_nothing_to_export(catalog: CatalogService, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="selects no rows"):
        _export(catalog, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_more_partitions_than_files_may_be_open_go_into_more_parts(
    catalog: CatalogService, tmp_path: Path
) -> None:
    list(catalog.record(_PROFILE, batches(gemms([1, 2]), gemms([3], device="a40"))))
    (rows,) = read_table(catalog.read_measurements(_ALL)).combine_chunks().to_batches()
    writer = _DatasetWriter(tmp_path, list_dims(), row_group_rows=1, max_open_files=1)
    for start in range(3):
        writer.add(_with_places(rows.slice(start, 1)))
    writer.add(_with_places(rows.slice(0, 1)))
    writer.close()
    expected = [
        "device=a30/operator=gemm/part-0.parquet",
        "device=a40/operator=gemm/part-0.parquet",
        "device=a30/operator=gemm/part-1.parquet",
    ]
    assert expected == writer.names
    counts = [parquet.ParquetFile(tmp_path / name).metadata.num_rows for name in expected]
    assert [2, 1, 1] == counts


def test_no_dimension_has_the_name_of_another_column() -> None:
    names = {name for spec in all_operators().values() for name in spec.dim_names}
    assert set() == names & set(STORED_SCHEMA.names)


@pytest.mark.parametrize("column", ["kernel", "status_reason", "run_id"])
def test_texts_that_are_not_utf8_are_named(
    source: CatalogService, tmp_path: Path, column: str
) -> None:
    """In a file that is as its manifest says."""
    folder = tmp_path / "set"
    _export(source, folder)
    path = folder / _PART
    found = parquet.ParquetFile(path).read()
    buffers = pa.array([b"\xff\xfe"] * len(found)).buffers()
    spoilt = pa.Array.from_buffers(pa.string(), len(found), buffers)
    place = found.schema.get_field_index(column)
    parquet.write_table(found.set_column(place, found.schema.field(place), spoilt), path)

    def change(manifest: Any) -> None:
        entry = next(one for one in manifest["files"] if one["path"] == _PART)
        entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()

    _edit_manifest(folder, change)
    with pytest.raises(InvalidRequestError, match=f"{_PART}: column '{column}' cannot be read"):
        list(_import(folder).batches)
