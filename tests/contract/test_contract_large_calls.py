"""A predictor that computes large tables answers small questions: these find a thread."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from contract_fakes import FakePredictor
from loopback import serve

from foretoken.app.config import ServerConfig
from foretoken.app.lane import LargeCalls, LargeLimits
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import PredictorClient
from foretoken.domain.errors import ServerBusyError, ServiceUnavailableError
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
)
from foretoken.predictor import servicer

_LONG_S = 60.0
_LARGE = 1_000
_LIMITS = LargeLimits(min_rows=10, num_at_once=1, max_present=2, retry_after_s=0.5)


class _HeldPredictor(FakePredictor):
    """Answers large queries when it may."""

    def __init__(self, folder: object) -> None:
        super().__init__(folder)  # type: ignore[arg-type]
        self.may_answer = threading.Event()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        if query.tables[0].num_rows >= _LARGE:
            assert self.may_answer.wait(_LONG_S)
        return super().predict(query)


@pytest.fixture
def predictor(tmp_path: object) -> Iterator[_HeldPredictor]:
    predictor = _HeldPredictor(tmp_path)
    yield predictor
    predictor.may_answer.set()


def _query(num_rows: int) -> LatencyQuery:
    sizes = np.arange(1, num_rows + 1)
    table = OperatorTable(
        operator="gemm", dtype=DType.BF16, columns={"m": sizes, "n": sizes, "k": sizes}
    )
    return LatencyQuery(device="a30", tables=(table,))


def _ask(options: ChannelOptions, num_rows: int) -> int:
    with PredictorClient.connect(options) as client:
        return len(client.predict(_query(num_rows)).tables[0].latency_us)


def _ask_until_refused(options: ChannelOptions) -> ServerBusyError:
    """Return the refusal; a query that was quicker than others has their place, and no answer."""
    while True:
        try:
            _ask(options, 2 * _LARGE)
        except ServerBusyError as err:
            return err
        except ServiceUnavailableError:
            continue


def test_large_queries_hold_half_of_the_threads_and_small_ones_are_answered(
    predictor: _HeldPredictor,
) -> None:
    """With four threads two large ones are there; the third hears when to come again."""
    config = ServerConfig(budgets={"Predict": 4}, max_queued_calls=0, retry_after_s=0.05)
    answered: list[int] = []
    with serve(servicer.register, predictor, config) as options:
        asking = [
            threading.Thread(target=lambda: answered.append(_ask(options, 2 * _LARGE)))
            for _ in range(3)
        ]
        for one in asking:
            one.start()
        refused = _ask_until_refused(replace(options, deadline_s=0.3))
        assert "rows and more are there already" in refused.message
        assert 5 == _ask(options, 5)
        predictor.may_answer.set()
        for one in asking:
            one.join()
    assert [2 * _LARGE] * 3 == answered


def test_all_are_alike_where_none_is_large(predictor: _HeldPredictor) -> None:
    config = ServerConfig(budgets={"Predict": 1}, large_call_rows=0)
    predictor.may_answer.set()
    with serve(servicer.register, predictor, config) as options:
        assert 2 * _LARGE == _ask(options, 2 * _LARGE)


def test_a_large_call_waits_for_its_place_as_long_as_it_is_wanted() -> None:
    refused: list[int] = []
    calls = LargeCalls(int, _LIMITS, lambda: refused.append(1))
    with calls.admit(10, lambda: True):
        with (
            pytest.raises(ServiceUnavailableError, match="had a place"),
            calls.admit(10, lambda: False),
        ):
            pass
        waiting = threading.Thread(target=lambda: calls.admit(10, lambda: True).__enter__())
        waiting.start()
        while not refused:
            try:
                with calls.admit(10, lambda: False):
                    pass
            except (ServerBusyError, ServiceUnavailableError):
                continue
        with calls.admit(9, lambda: False):
            pass
    waiting.join()
