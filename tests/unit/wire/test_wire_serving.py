"""Pages of lists, and registration by descriptor."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from foretoken.api.simulator.v1 import simulator_service_pb2 as simulator_pb2
from foretoken.domain.errors import InvalidRequestError
from foretoken.wire.serving import register_service, take_page


def _pages(names: list[str], size: int) -> list[list[str]]:
    pages, token = [], ""
    while True:
        page, token = take_page(names, str, size, token)
        pages.append(list(page))
        if not token:
            return pages


@pytest.mark.parametrize(
    ("names", "size", "expected"),
    [
        ([], 2, [[]]),
        (["c"], 2, [["c"]]),
        (["d", "c"], 2, [["d", "c"]]),
        (["e", "d", "c"], 2, [["e", "d"], ["c"]]),
    ],
)
def test_pages_hold_everything_once(names: list[str], size: int, expected: list[list[str]]) -> None:
    assert expected == _pages(names, size)


def test_the_default_page_has_a_hundred() -> None:
    assert [100, 100, 50] == [len(page) for page in _pages([str(n) for n in range(250)], 0)]


def test_a_page_has_a_thousand_at_most() -> None:
    assert [1_000, 500] == [len(page) for page in _pages([str(n) for n in range(1_500)], 10**9)]


def test_what_comes_in_front_between_two_pages_repeats_nothing() -> None:
    """Lists are newest first, so new items move the old ones back."""
    _, token = take_page(["c", "b", "a"], str, 2, "")
    assert (["a"], "") == take_page(["d", "c", "b", "a"], str, 2, token)


@pytest.mark.parametrize(
    ("size", "token", "field"), [(-1, "", "page_size"), (1, "x", "page_token")]
)
def test_a_page_that_cannot_be_is_refused(size: int, token: str, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        take_page(["b", "a"], str, size, token)
    assert [field] == [violation.field for violation in caught.value.violations]


def test_a_servicer_that_lacks_an_rpc_cannot_be_registered() -> None:
    """Else its callers would be the first to notice."""
    server = grpc.server(ThreadPoolExecutor(1))
    service = simulator_pb2.DESCRIPTOR.services_by_name["SimulatorService"]
    with pytest.raises(AttributeError, match="create_serving_simulation"):
        register_service(server, service, object())
