"""What a search varies where a request does not say."""

import pytest

from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest, ServingSpace
from foretoken.simulator.search.serving.space import resolve_space


@pytest.mark.parametrize(
    ("max_devices", "expected"),
    [
        (6, {(2, 1), (4, 1)}),
        (8, {(2, 1), (4, 1), (8, 1)}),
        (40, {(2, 1), (4, 1), (8, 1), (8, 2), (8, 4)}),
    ],
)
def test_what_is_larger_than_a_node_goes_over_whole_ones(
    max_devices: int, expected: set[tuple[int, int]]
) -> None:
    """As a pipeline over nodes of eight, in powers of two."""
    request = ServingSearchRequest(
        scenario=ServingScenario(model="llama-3.1-8b", device="h100_sxm"),
        space=ServingSpace(max_devices=max_devices, tp=(2, 4, 8)),
    )
    kinds = resolve_space(request).kinds
    assert expected == {(kind.layout.tp, kind.layout.pp) for kind in kinds}
