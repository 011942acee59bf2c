"""Impossible rows fail, implausible rows are flagged with a reason, good rows stay as they are."""

from typing import Any

import pyarrow as pa
import pytest
from catalog_rows import gemms, row, table

from foretoken.catalog.dims import split_by_operator
from foretoken.catalog.quality import Judged, judge
from foretoken.domain.errors import (
    InvalidRequestError,
    UnknownDeviceError,
    UnknownTopologyError,
)

# 2 * 4096^3 FLOPs take an A30 833 us in fp16, twice that in tf32.
_CHUNKS = ((400.0, "fp16"), (1000.0, "bf16"), (1000.0, "tf32"))


def _judge(*rows: dict[str, Any]) -> Judged:
    return judge(*split_by_operator(table(*rows)))


def _flags(judged: Judged) -> list[list[str]]:
    found = judged.table.column("flags").to_pylist()
    return [[flag.split(":")[0] for flag in flags or ()] for flags in found]


def _all_reduce(message_bytes: int = 2**20, **changes: Any) -> dict[str, Any]:
    dims = {"message_bytes": message_bytes, "devices_per_node": 8, "num_nodes": 1}
    topology = {"device": "a100_sxm_80", "topology": "a100_dgx"}
    return row(**{"operator": "all_reduce", "dims": dims, **topology, **changes})


def test_good_rows_stay_as_they_are() -> None:
    rows = gemms([16, 32, 64, 128])
    judged = judge(*split_by_operator(rows))
    assert (0, 0) == (judged.num_flagged, judged.num_failed)
    assert rows.to_pylist() == judged.table.to_pylist()


@pytest.mark.parametrize(
    ("latency_us", "reason"),
    [
        (float("nan"), "latency of nan us"),
        (float("inf"), "latency of inf us"),
        (0.0, "latency of 0.0 us"),
        (-1.0, "latency of -1.0 us"),
        (None, "the latency is missing"),
    ],
)
def test_an_impossible_latency_fails_the_row(latency_us: float | None, reason: str) -> None:
    bad = row(latency_us_median=latency_us, latency_us_mean=7.0)
    judged = _judge(row(), bad)
    assert 1 == judged.num_failed
    found = judged.table.to_pylist()[1]
    assert ("failed", reason) == (found["status"], found["status_reason"])
    assert (None, None) == (found["latency_us_median"], found["latency_us_mean"])


def test_a_failed_row_keeps_its_reason_and_loses_its_times() -> None:
    judged = _judge(row(status="failed", status_reason="out of memory", latency_us_median=3.0))
    found = judged.table.to_pylist()[0]
    assert ("out of memory", None) == (found["status_reason"], found["latency_us_median"])


def test_faster_than_the_device_can_is_flagged() -> None:
    """2 * 4096^3 FLOPs at 165 TFLOP/s take 833 us."""
    judged = _judge(row(m=4096, latency_us_median=400.0), row(m=4096, latency_us_median=900.0))
    assert [["faster_than_physics"], []] == _flags(judged)
    flag = judged.table.column("flags")[0].as_py()[0]
    assert "faster_than_physics: 400 us where a30 needs at least 833" in flag


def test_a_peak_that_is_not_known_is_no_limit() -> None:
    """2 * 4096^3 FLOPs take 139 us at an H200's BF16 peak; its file has none of INT4."""
    fast = {"device": "h200_sxm", "m": 4096, "latency_us_median": 100.0}
    judged = _judge(row(**fast, dtype="bf16"), row(**fast, dtype="int4"))
    assert [["faster_than_physics"], []] == _flags(judged)


def test_what_fits_the_cache_need_not_come_from_memory() -> None:
    """12 MB take 13 us from the A30's memory, and less from its 24 MB cache."""
    norm = {"operator": "residual_add", "dims": {"num_tokens": 500, "hidden": 4096}}
    assert [[]] == _flags(_judge(row(**norm, latency_us_median=4.0)))
    large = {"operator": "residual_add", "dims": {"num_tokens": 50000, "hidden": 4096}}
    assert [["faster_than_physics"]] == _flags(_judge(row(**large, latency_us_median=4.0)))


def test_a_collective_faster_than_its_links_is_flagged() -> None:
    slow, fast = _all_reduce(2**30), _all_reduce(2**30, latency_us_median=500.0)
    judged = _judge({**slow, "latency_us_median": 9000.0}, fast)
    assert [[], ["faster_than_physics"]] == _flags(judged)


def test_a_collective_needs_a_topology() -> None:
    with pytest.raises(InvalidRequestError, match="row 1: all_reduce needs a topology"):
        _judge(row(), _all_reduce(topology=None))


def test_a_row_that_comes_flagged_keeps_its_flag() -> None:
    judged = _judge(row(), row(flags=["mine: odd"], latency_us_median=1.0), row(flags=["x: y"]))
    assert [[], ["mine", "faster_than_physics"], ["x"]] == _flags(judged)
    assert 2 == judged.num_flagged


@pytest.mark.parametrize(
    ("statistics", "said"),
    [
        ({"min": 50.0, "median": 40.0}, "min of 50 us above median of 40 us"),
        ({"p10": 60.0, "p90": 55.0, "median": 58.0}, "p10 of 60 us above median of 58 us"),
        ({"p10": 60.0, "p90": 55.0, "median": 60.0}, "median of 60 us above p90 of 55 us"),
        ({"mean": 90.0, "max": 80.0, "median": 70.0}, "mean of 90 us above max of 80 us"),
        ({"std": -1.0}, "std of -1 us is negative"),
    ],
)
def test_statistics_that_contradict_each_other_are_flagged(
    statistics: dict[str, float], said: str
) -> None:
    changes = {f"latency_us_{name}": value for name, value in statistics.items()}
    judged = _judge(row(), row(**changes))
    flags = judged.table.column("flags").to_pylist()
    assert [None, [f"inconsistent_statistics: {said}"]] == flags


def test_statistics_in_order_or_rounded_are_not_flagged() -> None:
    statistics = {"min": 99.0, "p10": 100.0, "mean": 104.0, "p90": 110.0, "max": 120.0, "std": 0.0}
    changes = {f"latency_us_{name}": value for name, value in statistics.items()}
    rounded = {"latency_us_min": 104.0004, "latency_us_max": 104.0}
    assert 0 == _judge(row(**changes), row(latency_us_median=104.0, **rounded)).num_flagged


def test_narrow_weights_move_fewer_bytes() -> None:
    """2 x 65536^2 weights of 2 bytes take 18 ms from the A30's memory, of half a byte 4.6 ms."""
    dims = {"m": 1, "n": 65536, "k": 131072}
    plain = row(dims=dims, latency_us_median=6000.0)
    assert [["faster_than_physics"], []] == _flags(
        _judge(plain, {**plain, "variant": "lane=eager;quant=int4_wo"})
    )


def test_rows_of_several_batches_in_one_table_are_judged_alike() -> None:
    """A chunked table, with other words and devices in each chunk."""
    chunks = [gemms([4096], latency_us_median=time, dtype=dtype) for time, dtype in _CHUNKS]
    judged = judge(*split_by_operator(pa.concat_tables(chunks)))
    assert [["faster_than_physics"], [], ["faster_than_physics"]] == _flags(judged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "fine"}, "row 1: 'fine' is not one of ok, failed"),
        ({"dtype": "bf17"}, "row 1: 'bf17' is not one of fp32"),
        ({"phase": "sideways"}, "row 1: 'sideways' is not one of forward"),
    ],
)
def test_unknown_words_name_their_row(changes: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _judge(row(), row(**changes))


def test_an_unknown_device_or_topology_is_said() -> None:
    with pytest.raises(UnknownDeviceError, match="a31"):
        _judge(row(device="a31"))
    with pytest.raises(UnknownTopologyError, match="a100_dgxx"):
        _judge(_all_reduce(topology="a100_dgxx"))
