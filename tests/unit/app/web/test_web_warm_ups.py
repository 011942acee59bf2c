"""Rehearsals: a question of a form is answered before it is asked, once, and never in the way."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foretoken.app.web.calls import OfferedServices
from foretoken.app.web.rehearsals import Rehearsals
from foretoken.app.web.views.ask import SERVING_QUESTION, TRAINING_QUESTION
from foretoken.domain.errors import InvalidRequestError

_PATIENCE_S = 10
_SERVING = SERVING_QUESTION.read(SERVING_QUESTION.example, {})
_TRAINING = TRAINING_QUESTION.read(TRAINING_QUESTION.example, {})


def _of_device(name: str) -> Any:
    return replace(_SERVING, space=replace(_SERVING.space, devices=(name,)))


class _Simulator:
    """Rehearses when it is let go; keeps what it rehearsed."""

    def __init__(self) -> None:
        self.rehearsed: list[Any] = []
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()

    def rehearse(self, request: Any) -> None:
        self.begun.release()
        assert self.may_end.wait(_PATIENCE_S)
        self.rehearsed.append(request)
        raise InvalidRequestError("the question says it, too")


class _Ports:
    def __init__(self, simulator: object) -> None:
        self.simulator = simulator


@pytest.fixture
def simulator() -> _Simulator:
    return _Simulator()


@pytest.fixture
def rehearsals(simulator: _Simulator) -> Iterator[Rehearsals]:
    found = Rehearsals()
    yield found
    simulator.may_end.set()
    found.close()


def _offer(simulator: object) -> OfferedServices:
    return OfferedServices(("simulator",), _Ports(simulator))


def test_a_question_is_rehearsed_once_whatever_its_numbers(
    simulator: _Simulator, rehearsals: Rehearsals
) -> None:
    offered = _offer(simulator)
    simulator.may_end.set()
    for request in (_SERVING, _TRAINING):
        rehearsals.begin(offered, request)
        assert simulator.begun.acquire(timeout=_PATIENCE_S)
        rehearsals.begin(offered, replace(request, num_finalists=1))
    rehearsals.close()
    assert [_SERVING, _TRAINING] == simulator.rehearsed


def test_what_the_form_said_in_between_is_not_rehearsed(
    simulator: _Simulator, rehearsals: Rehearsals
) -> None:
    offered = _offer(simulator)
    rehearsals.begin(offered, _SERVING)
    assert simulator.begun.acquire(timeout=_PATIENCE_S)
    between, last = _of_device("h200_sxm"), _of_device("b200_sxm")
    rehearsals.begin(offered, between)
    rehearsals.begin(offered, last)
    simulator.may_end.set()
    rehearsals.close()
    assert between not in simulator.rehearsed


def test_who_asks_waits_for_what_runs_and_not_for_what_is_queued(
    simulator: _Simulator, rehearsals: Rehearsals
) -> None:
    offered, queued = _offer(simulator), _of_device("h200_sxm")
    rehearsals.begin(offered, _SERVING)
    assert simulator.begun.acquire(timeout=_PATIENCE_S)
    rehearsals.begin(offered, queued)
    # Returns though nothing was let go.
    rehearsals.settle(queued, 2 * _PATIENCE_S)
    asking = threading.Thread(target=lambda: rehearsals.settle(_SERVING, _PATIENCE_S))
    asking.start()
    simulator.may_end.set()
    asking.join()
    rehearsals.close()
    assert [_SERVING] == simulator.rehearsed


def test_a_simulator_elsewhere_and_none_at_all_are_left_alone(rehearsals: Rehearsals) -> None:
    for offered in (_offer(object()), OfferedServices((), _Ports(None))):
        rehearsals.begin(offered, _SERVING)
        rehearsals.settle(_SERVING, _PATIENCE_S)
        rehearsals.begin(offered, _TRAINING)
