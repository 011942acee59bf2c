"""Warm-ups: a question of a form is answered before it is asked, once, and never in the way."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foretoken.app.web.calls import OfferedServices
from foretoken.app.web.views.ask import SERVING_QUESTION, TRAINING_QUESTION
from foretoken.app.web.warm_ups import WarmUps
from foretoken.domain.errors import InvalidRequestError

_PATIENCE_S = 60
_SERVING = SERVING_QUESTION.read(SERVING_QUESTION.example, {})
_TRAINING = TRAINING_QUESTION.read(TRAINING_QUESTION.example, {})


def _of_device(name: str) -> Any:
    return replace(_SERVING, space=replace(_SERVING.space, devices=(name,)))


class _Simulator:
    """Warms up when it is let go; keeps what it was asked."""

    def __init__(self) -> None:
        self.warmed_up: list[Any] = []
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()

    def warm_up(self, request: Any) -> None:
        self.begun.release()
        assert self.may_end.wait(_PATIENCE_S)
        self.warmed_up.append(request)
        raise InvalidRequestError("the question says it, too")


class _Ports:
    def __init__(self, simulator: object) -> None:
        self.simulator = simulator


@pytest.fixture
def simulator() -> _Simulator:
    return _Simulator()


@pytest.fixture
def warm_ups(simulator: _Simulator) -> Iterator[WarmUps]:
    found = WarmUps()
    yield found
    simulator.may_end.set()
    found.close()


def _offer(simulator: object) -> OfferedServices:
    return OfferedServices(("simulator",), _Ports(simulator))


def test_a_question_is_warmed_up_once_whatever_its_numbers(
    simulator: _Simulator, warm_ups: WarmUps
) -> None:
    offered = _offer(simulator)
    simulator.may_end.set()
    for request in (_SERVING, _TRAINING):
        warm_ups.begin(offered, request)
        assert simulator.begun.acquire(timeout=_PATIENCE_S)
        warm_ups.begin(offered, replace(request, num_finalists=1))
    warm_ups.close()
    assert [_SERVING, _TRAINING] == simulator.warmed_up


def test_what_the_form_said_in_between_is_not_warmed_up(
    simulator: _Simulator, warm_ups: WarmUps
) -> None:
    offered = _offer(simulator)
    warm_ups.begin(offered, _SERVING)
    assert simulator.begun.acquire(timeout=_PATIENCE_S)
    between, last = _of_device("h200_sxm"), _of_device("b200_sxm")
    warm_ups.begin(offered, between)
    warm_ups.begin(offered, last)
    simulator.may_end.set()
    warm_ups.close()
    assert between not in simulator.warmed_up


def test_who_asks_waits_for_what_runs_and_not_for_what_is_queued(
    simulator: _Simulator, warm_ups: WarmUps
) -> None:
    offered, queued = _offer(simulator), _of_device("h200_sxm")
    warm_ups.begin(offered, _SERVING)
    assert simulator.begun.acquire(timeout=_PATIENCE_S)
    warm_ups.begin(offered, queued)
    # Returns though nothing was let go.
    warm_ups.settle(queued, 2 * _PATIENCE_S)
    asking = threading.Thread(target=lambda: warm_ups.settle(_SERVING, _PATIENCE_S))
    asking.start()
    simulator.may_end.set()
    asking.join()
    warm_ups.close()
    assert [_SERVING] == simulator.warmed_up


def test_a_simulator_elsewhere_and_none_at_all_are_left_alone(warm_ups: WarmUps) -> None:
    for offered in (_offer(object()), OfferedServices((), _Ports(None))):
        warm_ups.begin(offered, _SERVING)
        warm_ups.settle(_SERVING, _PATIENCE_S)
        warm_ups.begin(offered, _TRAINING)
