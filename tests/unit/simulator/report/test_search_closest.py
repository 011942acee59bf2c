"""What came closest where nothing qualifies."""

from typing import Any

from foretoken.simulator.report.search_candidates import find_closest


def _row(name: str, verdict: str, **values: Any) -> dict[str, Any]:
    degrees = {"tp": 1, "pp": 1, "ep": 1, "batch_size": 1, "num_devices": 1}
    figures = {"ttft_ms": 0.0, "tpot_ms": 0.0, "rank": 0, "reason": f"why {name}"}
    return degrees | figures | {"name": name, "verdict": verdict} | values


def test_each_reason_has_its_nearest_and_latencies_come_before_what_never_ran() -> None:
    rows = [
        _row("small", "memory", tp=2),
        _row("large", "memory", tp=4, batch_size=2),
        _row("largest", "memory", tp=4),
        _row("not computed", "tpot_ms"),
        _row("slow", "tpot_ms", tpot_ms=50.0),
        _row("less slow", "tpot_ms", tpot_ms=40.0),
        _row("many", "devices", num_devices=16),
        _row("fewer", "devices", num_devices=12),
        _row("impossible", "layout", tp=3),
    ]
    found = find_closest(rows)
    assert ["less slow", "fewer", "largest"] == [closest["name"] for closest in found]
    assert ["why less slow", "why fewer", "why largest"] == [closest["reason"] for closest in found]
    assert all(closest["remedy"] for closest in found)


def test_a_reason_that_is_not_known_is_told_without_a_remedy() -> None:
    (found,) = find_closest([_row("odd", "moonphase")])
    assert ("odd", "moonphase", "") == (found["name"], found["verdict"], found["remedy"])


def test_what_qualifies_is_not_close() -> None:
    assert [] == find_closest([_row("fine", "ok", rank=1)])
