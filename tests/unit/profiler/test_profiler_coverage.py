"""What counts as measured: of which device, software, kernel, special case and profile."""

from dataclasses import replace
from typing import Any

import pytest
from profiler_fakes import FakeCatalog

from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.profiler.planning.coverage import (
    CoverageQuery,
    KnownRows,
    name_profile,
    point_of_call,
    read_coverage,
)
from foretoken.profiler.recording.batches import RowBuilder
from foretoken.profiler.timing.timer import summarize
from foretoken.wire.arrow import rows_to_table

CALL = OperatorCall(
    operator="gemm", dtype=DType.BF16, dims={"k": 3, "m": 1, "n": 2}, kernel="torch.mm"
)
REDUCE = OperatorCall(
    operator="all_reduce",
    dtype=DType.BF16,
    dims={"message_bytes": 8, "devices_per_node": 2, "num_nodes": 1},
)
QUERY = CoverageQuery(
    device="cpu", framework="torch", framework_version="9.9", topology="pair", name="mine"
)


@pytest.fixture
def catalog() -> FakeCatalog:
    return FakeCatalog()


def put(
    catalog: FakeCatalog,
    call: OperatorCall = CALL,
    *,
    profile: str = "other",
    shard: str = "0/1",
    version: str = "9.9",
    **columns: Any,
) -> None:
    """Record one row in a run of its own."""
    environment = {"device": "cpu", "profile": profile, "shard": shard}
    run = Run(
        run_id=f"r{len(catalog.runs)}",
        kind=RunKind.PROFILE,
        tool="test",
        environment=environment,
    )
    row = RowBuilder("cpu", "torch", version).measured(call, call.kernel, summarize([7.0]))
    batch = MeasurementBatch(batch_index=0, rows=rows_to_table([{**row, **columns}]))
    list(catalog.record(run, (batch,)))


def read(catalog: FakeCatalog, query: CoverageQuery = QUERY) -> KnownRows:
    return read_coverage(catalog, query)


def test_point_does_not_depend_on_the_order_of_dimensions(catalog: FakeCatalog) -> None:
    put(catalog)
    assert read(catalog).covered == {point_of_call(CALL)}


@pytest.mark.parametrize(
    "other",
    [
        replace(CALL, dims={"m": 2, "n": 2, "k": 3}),
        replace(CALL, kernel="cublaslt"),
        replace(CALL, variant="cache=warm"),
        replace(CALL, dtype=DType.FP16),
        replace(CALL, phase=Phase.BACKWARD),
    ],
)
def test_another_kernel_case_format_pass_or_size_is_not_covered(
    catalog: FakeCatalog, other: OperatorCall
) -> None:
    put(catalog, other)
    assert point_of_call(CALL) not in read(catalog).covered
    assert point_of_call(other) in read(catalog).covered


def test_other_software_covers_nothing(catalog: FakeCatalog) -> None:
    put(catalog, version="9.8")
    assert read(catalog) == KnownRows()


def test_failed_and_doubted_rows_of_others_cover_nothing(catalog: FakeCatalog) -> None:
    put(catalog, status="failed", latency_us_median=None)
    put(catalog, flags=["drift: 9 %"])
    assert read(catalog).covered == set()
    put(catalog, profile="mine")  # makes the catalog return them, too
    assert read(catalog).covered == set()


def test_failed_and_doubted_rows_of_the_same_profile_count(catalog: FakeCatalog) -> None:
    put(catalog, profile="mine", status="failed", latency_us_median=None)
    put(catalog, profile="mine", flags=["drift: 9 %"])
    known = read(catalog)
    assert known.own == {point_of_call(CALL): 2}
    assert known.medians_us == {point_of_call(CALL): [7.0]}
    assert known.covered == set()


def test_rows_of_other_shares_do_not_count_and_those_of_another_cut_do(
    catalog: FakeCatalog,
) -> None:
    put(catalog, profile="mine", shard="1/4")
    query = replace(QUERY, shard_index=0, num_shards=4)
    assert read(catalog, query) == KnownRows()
    known = read(catalog, replace(QUERY, shard_index=0, num_shards=2))
    assert known.earlier == {point_of_call(CALL): 1}


def test_collective_is_covered_on_the_same_links_alone(catalog: FakeCatalog) -> None:
    put(catalog, REDUCE, topology="other")
    assert read(catalog).covered == set()
    put(catalog, REDUCE, topology="pair", kernel="torch.distributed(gloo)")
    assert read(catalog).covered == {point_of_call(REDUCE)}


def test_catalog_is_asked_once(catalog: FakeCatalog) -> None:
    put(catalog)
    put(catalog, REDUCE, topology="pair")
    read(catalog)
    assert catalog.num_reads == 1


def test_name_is_that_of_what_is_asked_for() -> None:
    request = ProfileRequest(device="cpu", quick=True)
    assert name_profile(request) == name_profile(replace(request, time_cap_s=5.0))
    assert name_profile(request) != name_profile(replace(request, seed=1))
    assert name_profile(replace(request, name="mine")) == "mine"


def test_measuring_again_is_another_profile_each_time() -> None:
    request = ProfileRequest(device="cpu", skip_covered=False)
    assert name_profile(request) != name_profile(request)
    assert name_profile(replace(request, name="mine")) == "mine"
