"""Results in a catalog: found by id, beginning or age, read, exported and deleted."""

import dataclasses
import hashlib
import io
import json
import zipfile
from dataclasses import replace
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from artifact_shelf import ArtifactShelf

from foretoken.client.results import (
    delete_result,
    export_result,
    find_result,
    list_results,
    open_result,
    read_result,
)
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownJobError
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.ports import CatalogPort
from foretoken.domain.results.result import RESULT_ARTIFACT, KeptResult
from foretoken.domain.results.training_report import SpanColumns, TrafficColumns, TrainingReport
from foretoken.wire.result_file import pack_report, unpack_report

_REPORT = TrainingReport(
    step_time_ms=12.5,
    spans=SpanColumns(
        stage=(0,), chunk=(0,), micro_batch=(0,), kind=(1,), start_ms=(0.0,), end_ms=(2.0,)
    ),
)
_IDS = ("training-0a1b", "training-0a2c", "serving-ffff")


def _catalog(*job_ids: str, kind: str = "training") -> CatalogPort:
    """Return a catalog with results of these ids, each a minute after the one before."""
    shelf = ArtifactShelf()
    content = pack_report(_REPORT)
    for place, job_id in enumerate(job_ids):
        created_at = f"2026-01-01T00:{place:02}:00+00:00"
        known = KeptResult(job_id=job_id, kind=kind, title="t", created_at=created_at)
        artifact = Artifact(
            kind=RESULT_ARTIFACT,
            name=job_id,
            content_hash=hashlib.sha256(content).hexdigest(),
            num_bytes=len(content),
            created_at=created_at,
            metadata_json=json.dumps(schema.encode(known)),
        )
        shelf.store_artifact(artifact, (content,))
    return cast("CatalogPort", shelf)


def test_the_newest_is_first() -> None:
    assert [result.job_id for result in list_results(_catalog(*_IDS))] == list(reversed(_IDS))


@pytest.mark.parametrize(
    ("name", "job_id"),
    [
        ("training-0a1b", "training-0a1b"),
        ("training-0a1", "training-0a1b"),
        ("0a2", "training-0a2c"),
        ("s", "serving-ffff"),
        ("latest", "serving-ffff"),
        ("latest~2", "training-0a1b"),
    ],
)
def test_a_result_is_found_by_what_only_it_has(name: str, job_id: str) -> None:
    """The id, its beginning, that of its last part, or its age."""
    assert find_result(_catalog(*_IDS), name).job_id == job_id


def test_a_whole_id_is_not_the_beginning_of_another() -> None:
    assert find_result(_catalog("a-1", "a-12"), "a-1").job_id == "a-1"


def test_a_common_beginning_names_those_that_have_it() -> None:
    with pytest.raises(InvalidRequestError, match=r"'training' begins 2 results: .*0a2c, .*0a1b"):
        find_result(_catalog(*_IDS), "training")


@pytest.mark.parametrize("name", ["training-9", ""])
def test_an_unknown_result_names_the_nearest(name: str) -> None:
    with pytest.raises(UnknownJobError, match=r"unknown result .*training-0a1b"):
        find_result(_catalog(*_IDS), name)


def test_an_empty_catalog_says_what_to_do() -> None:
    with pytest.raises(UnknownJobError, match="simulate something first"):
        find_result(_catalog(), "training-1")


@pytest.mark.parametrize(("ids", "kept"), [(("a-1",), "one is kept"), (("a", "b"), "2 are kept")])
def test_there_is_none_so_old(ids: tuple[str, ...], kept: str) -> None:
    with pytest.raises(UnknownJobError, match=f"there is no latest~2: {kept}"):
        find_result(_catalog(*ids), "latest~2")


def test_a_report_is_read_whole() -> None:
    result, report = read_result(_catalog(*_IDS), "0a1b")
    assert (result.job_id, report) == ("training-0a1b", _REPORT)


def test_an_exported_file_says_what_it_is() -> None:
    """It opens to the same result, without the catalog."""
    catalog = _catalog(*_IDS)
    exported = export_result(catalog, "0a1b")
    assert open_result(exported) == read_result(catalog, "0a1b")


@pytest.mark.parametrize("content", [b"", b"no zip", pack_report(_REPORT)])
def test_other_files_are_refused(content: bytes) -> None:
    """Also a report that does not say what it is of."""
    with pytest.raises(InvalidRequestError, match="not an exported result"):
        open_result(content)


def test_a_result_of_an_earlier_version_is_read() -> None:
    """Without a table and a column that came later, which are empty."""
    table = io.BytesIO()
    pq.write_table(pa.table({"stage": [0], "start_ms": [1.5]}), table)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("report.json", '{"step_time_ms": 12.5, "gone": 1}')
        archive.writestr("spans.parquet", table.getvalue())
    report = unpack_report(file.getvalue(), TrainingReport)
    expected = TrainingReport(
        step_time_ms=12.5, spans=SpanColumns(stage=(0,), start_ms=(1.5,)), traffic=TrafficColumns()
    )
    assert report == expected


def test_a_kind_of_a_later_version_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a kind that this version does not read"):
        read_result(_catalog("x-1", kind="inference-2"), "latest")


@pytest.mark.parametrize("text", ["{}", '{"job_id": "x-1", "kind": "training", "later": 1}'])
def test_a_result_of_another_version_hides_no_others(text: str) -> None:
    """What it does not say is empty, what only it says is left out."""
    catalog = _catalog(*_IDS)
    other = Artifact(
        kind=RESULT_ARTIFACT,
        name="x-1",
        content_hash="0",
        num_bytes=0,
        created_at="2026-02-01T00:00:00+00:00",
        metadata_json=text,
    )
    catalog.store_artifact(other, ())
    first, *others = list_results(catalog)
    assert (first.job_id, first.title, first.created_at) == ("x-1", "", other.created_at)
    assert len(others) == len(_IDS)


@pytest.mark.parametrize("text", ["[]", "null", '{"title": 5}', "{", "[" * 100_000])
def test_an_artifact_that_is_no_result_hides_no_others(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = _catalog(*_IDS)
    known = catalog.list_artifacts(RESULT_ARTIFACT)[0]
    catalog.store_artifact(replace(known, name="other", metadata_json=text), ())
    assert sorted(_IDS) == sorted(result.job_id for result in list_results(catalog))
    assert "left out name='other'" in caplog.text


def test_a_result_is_what_its_artifact_is_whatever_that_says() -> None:
    catalog = _catalog(*_IDS)
    known = catalog.list_artifacts(RESULT_ARTIFACT)[0]
    catalog.store_artifact(replace(known, name="other"), ())
    assert "other" in {result.job_id for result in list_results(catalog)}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("report.json", b" " * (100 * 2**20)),
        ("spans.parquet", b"no table"),
        ("../../report.json", b"{}"),
    ],
)
def test_a_file_that_does_harm_is_no_result(name: str, content: bytes) -> None:
    """It unpacks to far more than it is, is no table, or climbs."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        if name != "report.json":
            archive.writestr("report.json", "{}")
        archive.writestr(name, content)
    with pytest.raises(InvalidRequestError, match="not a result"):
        unpack_report(file.getvalue(), TrainingReport)


def test_a_table_that_unpacks_to_far_more_than_it_is_is_refused() -> None:
    table = io.BytesIO()
    zeros = pa.table({"stage": np.zeros(20_000_000, np.int64)})
    pq.write_table(zeros, table, compression="zstd", use_dictionary=False)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("report.json", "{}")
        archive.writestr("spans.parquet", table.getvalue())
    with pytest.raises(InvalidRequestError, match="claims more bytes"):
        unpack_report(file.getvalue(), TrainingReport)


def test_a_deleted_result_is_gone() -> None:
    catalog = _catalog(*_IDS)
    deleted = delete_result(catalog, "latest")
    assert deleted.job_id == "serving-ffff"
    assert deleted not in list_results(catalog)
    assert {dataclasses.astuple(one)[0] for one in list_results(catalog)} == set(_IDS[:2])
