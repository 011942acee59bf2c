"""Strategies of several searches have the same name where they are the same."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foretoken.simulator.report.compare_sections import name_alike


def _row(name: str, **values: Any) -> dict[str, Any]:
    plain = {"device": "a30", "num_devices": 16.0, "global_batch_size": 256.0, "placement": ""}
    return {**plain, **values, "name": name}


def _names(*searches: dict[str, Any]) -> list[str]:
    rows = {str(place): [row] for place, row in enumerate(searches)}
    return [found[0]["name"] for found in name_alike(rows).values()]


def test_what_one_search_names_all_do() -> None:
    """The number of devices, the device and the batch, each in its place."""
    plain = _row("tp1 pp1 dp16 mbs2 zero2")
    assert (
        _names(plain, _row("16 devices tp1 pp1 dp16 mbs2 zero2"))
        == ["16 devices tp1 pp1 dp16 mbs2 zero2"] * 2
    )
    assert _names(plain, _row("a30 tp1 pp1 dp16 mbs2 zero2")) == ["a30 tp1 pp1 dp16 mbs2 zero2"] * 2
    assert (
        _names(plain, _row("tp1 pp1 dp16 mbs2 gbs256 zero2"))
        == ["tp1 pp1 dp16 mbs2 gbs256 zero2"] * 2
    )


def test_what_no_search_names_stays_away() -> None:
    """So that a strategy is the same on another device."""
    other = _row("tp1 pp1 dp16 mbs2", device="h100_sxm", global_batch_size=512.0)
    assert _names(_row("tp1 pp1 dp16 mbs2"), other) == ["tp1 pp1 dp16 mbs2"] * 2


def test_placed_stages_have_no_device_of_their_own() -> None:
    """Their name tells all devices at its end."""
    placed = _row("tp1 pp2 dp1 mbs1 on a30,h100_sxm", placement="a30,h100_sxm")
    assert _names(placed, _row("a30 tp1 pp1 dp16 mbs2")) == [
        "tp1 pp2 dp1 mbs1 on a30,h100_sxm",
        "a30 tp1 pp1 dp16 mbs2",
    ]


@given(st.booleans(), st.booleans(), st.booleans())
def test_names_are_told_once(has_device: bool, has_count: bool, has_batch: bool) -> None:
    """To name them alike again changes nothing."""
    first = [*(["a30"] if has_device else []), *(["16 devices"] if has_count else [])]
    name = " ".join([*first, "tp1 pp1 dp16 mbs2", *(["gbs256"] if has_batch else [])])
    (once, full) = _names(_row(name), _row("a30 16 devices tp1 pp1 dp16 mbs2 gbs256"))
    assert once == full == "a30 16 devices tp1 pp1 dp16 mbs2 gbs256"
