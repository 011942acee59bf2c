"""Whatever number a request has that nothing is computed with, it is refused by its name."""

import math
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from hostile_walk import FieldPath, put, walk_fields
from sound_requests import PARTS, sound_request

from foretoken.api.simulator.v1 import simulator_service_pb2
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.numbers import check_numbers
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.search import ServingSearchRequest
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.wire import codec

_SERVICE = simulator_service_pb2.DESCRIPTOR.services_by_name["SimulatorService"]
_NONE = (math.nan, math.inf, -math.inf, 1e308, -1e300, 5e-324)


@pytest.mark.parametrize(
    ("rpc", "at", "cls"),
    [
        ("CreateServingSimulation", "scenario", ServingScenario),
        ("CreateTrainingSimulation", "scenario", TrainingScenario),
        ("CreateServingSearch", "request", ServingSearchRequest),
        ("CreateTrainingSearch", "request", TrainingSearchRequest),
    ],
)
def test_no_number_is_taken_that_nothing_is_computed_with(rpc: str, at: str, cls: type) -> None:
    method = _SERVICE.methods_by_name[rpc]
    asked: Any = getattr(sound_request(method), at)
    check_numbers(codec.decode(asked, cls))
    paths = list(walk_fields(asked.DESCRIPTOR, kind=FieldDescriptor.TYPE_DOUBLE))
    assert len(paths) > 10
    taken = [
        f"{'.'.join(path)}={value}"
        for path in paths
        for value in _NONE
        if not _is_refused(asked, path, value, cls)
    ]
    assert [] == taken


def _is_refused(sound: Any, path: FieldPath, value: float, cls: type) -> bool:
    message = json_format.ParseDict(
        json_format.MessageToDict(sound, preserving_proto_field_name=True), type(sound)()
    )
    put(message, path, value, PARTS)
    try:
        check_numbers(codec.decode(message, cls))
    except InvalidRequestError as err:
        return any(violation.field for violation in err.violations)
    return False
