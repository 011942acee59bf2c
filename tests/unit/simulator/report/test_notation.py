"""Parts of names are explained where the names are shown, in the order of names."""

import pytest

from foretoken.simulator.report.search_candidates import explain_names


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (["2 x tp4 pp2 b64"], ["tp", "pp", "b"]),
        (["1 x tp1 b4 + 2 x tp2 ep8 b96", "4 x tp2 b1"], ["tp", "ep", "b"]),
        (["tp2 pp4 vpp2 dp8 mbs1 zero1 gbs64"], ["tp", "pp", "vpp", "dp", "mbs", "gbs", "zero"]),
        (["h100_sxm", "none"], []),
    ],
)
def test_what_names_have_is_explained(names: list[str], parts: list[str]) -> None:
    told = explain_names(names)
    assert parts == [term.split("`")[1] for term in told.split("; ") if term]
