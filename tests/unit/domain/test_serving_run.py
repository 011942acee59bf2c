import json
from typing import Any

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.serving_run import (
    MeasuredRequest,
    ServingRun,
    decode_run,
    encode_run,
)


def _request(**changes: Any) -> MeasuredRequest:
    fields: dict[str, Any] = {
        "arrival_s": 1.0,
        "first_token_s": 1.5,
        "last_token_s": 2.0,
        "num_prefill_tokens": 10,
        "num_decode_tokens": 3,
    }
    return MeasuredRequest(**{**fields, **changes})


def test_a_file_holds_all_of_a_run() -> None:
    run = ServingRun(
        name="mine",
        model="llama",
        requests=(
            _request(chunk_s=(1.5, 2.0), chunk_tokens=(1, 2), block_hashes=(4, 5)),
            _request(arrival_s=0.0, error="HTTP 500", first_token_s=-1.0, last_token_s=-1.0),
        ),
        hash_block_tokens=16,
        num_preemptions=4,
        settings={"api": "chat"},
    )
    assert run == decode_run(json.loads(encode_run(run)))


def test_a_file_has_a_line_for_each_request_without_what_is_not_known() -> None:
    text = encode_run(ServingRun(requests=(_request(), _request(arrival_s=0.0))))
    lines = [line for line in text.splitlines() if "arrival_s" in line]
    assert 2 == len(lines)
    assert "error" not in lines[0]
    assert "chunk_s" not in lines[0]


def test_a_run_without_requests_can_be_written() -> None:
    assert () == decode_run(json.loads(encode_run(ServingRun(requests=())))).requests


@pytest.mark.parametrize(
    "changes",
    [
        {"arrival_s": -1.0},
        {"first_token_s": 0.5},
        {"last_token_s": 1.2},
        {"num_decode_tokens": -1},
        {"chunk_s": (1.5, 2.0), "chunk_tokens": (1,)},
        {"first_token_s": float("nan")},
    ],
    ids=str,
)
def test_requests_that_contradict_themselves_are_refused(changes: Any) -> None:
    with pytest.raises(InvalidRequestError):
        _request(**changes)


@pytest.mark.parametrize(
    "changes",
    [{"error": "x"}, {"num_decode_tokens": 0}, {"last_token_s": -1.0}, {"first_token_s": -1.0}],
    ids=str,
)
def test_only_answered_requests_are_complete(changes: Any) -> None:
    assert _request().is_complete
    assert not _request(**changes).is_complete


def test_completed_requests_come_by_arrival() -> None:
    run = ServingRun(requests=(_request(), _request(arrival_s=0.5), _request(error="x")))
    assert [0.5, 1.0] == [request.arrival_s for request in run.completed]
    assert 1 == run.num_failed


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, "format: expected foretoken.serving_run"),
        ({"format": "foretoken.serving_run", "version": 9}, "reads versions 1 to"),
        ({"format": "foretoken.serving_run", "version": "1"}, "reads versions 1 to"),
        ({"format": "foretoken.serving_run", "version": 1}, "requests: required key is missing"),
    ],
)
def test_other_content_is_refused(content: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        decode_run(content)
