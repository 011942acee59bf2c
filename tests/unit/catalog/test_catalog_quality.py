"""Impossible rows fail, doubtful rows are flagged with the reason, good rows stay as they are."""

from typing import Any

import pytest
from catalog_rows import gemms, row, table

from foretoken.catalog.dims import split_by_operator
from foretoken.catalog.quality import Judged, judge
from foretoken.domain.errors import (
    InvalidRequestError,
    UnknownDeviceError,
    UnknownTopologyError,
)


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
    assert "faster_than_physics: 400 us where the device needs at least 833" in flag


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


def test_a_row_off_its_line_is_flagged() -> None:
    rows = [row(m) for m in range(100, 1000, 100)]
    rows[4]["latency_us_median"] *= 2
    judged = _judge(*rows)
    assert [[], [], [], [], ["local_outlier"], [], [], [], []] == _flags(judged)
    assert 1 == judged.num_flagged


def test_rows_of_another_kernel_are_another_line() -> None:
    rows = [row(m, kernel="a") for m in range(100, 1000, 100)]
    rows[4] |= {"kernel": "b", "latency_us_median": rows[4]["latency_us_median"] * 2}
    assert 0 == _judge(*rows).num_flagged


def test_of_repeats_that_disagree_those_far_from_the_median_are_flagged() -> None:
    times = (100.0, 101.0, 130.0)
    judged = _judge(*[row(latency_us_median=time) for time in times])
    assert [[], [], ["duplicate_disagrees"]] == _flags(judged)


def test_differences_below_the_timer_resolution_are_none() -> None:
    """1 us against 2 us in a table of whole microseconds."""
    dims = {"num_tokens": 1, "hidden": 256}
    rows = [row(operator="rms_norm", dims=dims, latency_us_median=t) for t in (1.0, 2.0, 1.0)]
    assert 0 == _judge(*rows).num_flagged


def test_a_row_that_comes_flagged_keeps_its_flag_and_is_no_neighbour() -> None:
    rows = [row(m) for m in range(100, 1000, 100)]
    rows[3] |= {"flags": ["mine: a doubt"], "latency_us_median": 1.0}
    judged = _judge(*rows)
    assert [[], [], [], ["mine", "faster_than_physics"], [], [], [], [], []] == _flags(judged)


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
