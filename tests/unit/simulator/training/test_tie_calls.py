"""Which calls to measure to tell two strategies apart."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from training_fakes import DEVICE, TOPOLOGY, RooflinePredictor, build_scenario

from foretoken.domain.measurements.estimate import LatencyQuery, LatencyReply
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.training_search import TrainingSearchRequest, TrainingSpace
from foretoken.simulator.search.training.space import resolve_space
from foretoken.simulator.search.training.step_time import StepTimer
from foretoken.simulator.search.training.ties import find_tie_calls
from foretoken.simulator.steps.strategies import Strategies


class _Doubtful:
    """The roofline, unsure of all calls of some operators, by a ratio each.

    The `slow` row of an operator's tables takes that, and nothing is unsure.
    """

    def __init__(self, ratios: Mapping[str, float], slow: int | None = None) -> None:
        self._ratios, self._slow = ratios, slow
        self._roofline = RooflinePredictor()

    def list_models(self) -> tuple[ModelVersion, ...]:
        return ()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        reply: LatencyReply = self._roofline.predict(query)
        tables = []
        for table, answer in zip(query.tables, reply.tables, strict=True):
            estimate = np.asarray(answer.latency_us)
            high = estimate * (1 + self._ratios.get(table.operator, 0.0))
            rows = np.arange(table.num_rows)
            if self._slow is not None:
                estimate = np.where(rows == self._slow, high, estimate)
                high = estimate
            tables.append(replace(answer, latency_us=estimate, low_us=estimate, high_us=high))
        return replace(reply, tables=tuple(tables))


def _pair() -> Strategies:
    """Return two degrees of tensor parallelism."""
    request = TrainingSearchRequest(
        scenario=build_scenario(
            ParallelLayout(dp=8),
            model=find_model("tiny-llama"),
            sequence_length=512,
            global_batch_size=32,
        ),
        space=TrainingSpace(
            tp=(1, 2),
            pp=(1,),
            cp=(1,),
            virtual_stages=(1,),
            micro_batch_sizes=(4,),
            recompute=("none",),
            weight_parallel=("",),
            sequence_parallel=(False,),
            zero_stages=(0,),
            overlaps=("none",),
        ),
    )
    space = resolve_space(request)
    return space.piece(0, space.num_points)


def _values(pair: Strategies) -> np.ndarray:
    timer = StepTimer(pair.source.scenario, RooflinePredictor())
    return timer.time(pair).step_us


def test_nothing_is_to_be_measured_where_nothing_is_unsure() -> None:
    pair = _pair()
    assert () == find_tie_calls(pair, _values(pair), _Doubtful({}))


def test_only_what_is_unsure_is_told_and_most_telling_first() -> None:
    pair = _pair()
    found = find_tie_calls(pair, _values(pair), _Doubtful({"all_reduce": 0.5, "rms_norm": 0.01}))
    assert {"all_reduce", "rms_norm"} >= {call.operator for call in found}
    assert "all_reduce" == found[0].operator
    ratios = [call.difference_ratio for call in found]
    assert sorted(ratios, reverse=True) == ratios
    assert all(ratio >= 0.1 * ratios[0] > 0 for ratio in ratios)


def test_a_call_moves_the_difference_as_it_does_when_it_takes_so_long() -> None:
    """Every row of the collectives' table in turn is made slow: the largest change is the first."""
    pair = _pair()
    values = _values(pair)
    moved = []
    for row in range(10):
        slow = StepTimer(pair.source.scenario, _Doubtful({"all_reduce": 0.5}, row))
        grown = slow.time(pair).step_us - values
        moved.append(abs(grown[1] - grown[0]) / values[0])
    first = find_tie_calls(pair, values, _Doubtful({"all_reduce": 0.5}))[0]
    assert max(moved) == pytest.approx(first.difference_ratio)


def test_a_call_is_told_as_it_is_planned() -> None:
    """Collectives with their links; what a device computes with its number format."""
    pair = _pair()
    values = _values(pair)
    sum_of_ranks = find_tie_calls(pair, values, _Doubtful({"all_reduce": 0.5}))[0]
    assert (DEVICE, TOPOLOGY) == (sum_of_ranks.device, sum_of_ranks.topology)
    names = {word.partition("=")[0] for word in sum_of_ranks.words.split()}
    assert {"message_bytes", "devices_per_node", "num_nodes"} == names
    product = find_tie_calls(pair, values, _Doubtful({"gemm": 0.5}))[0]
    words = dict(word.split("=") for word in product.words.split())
    assert {"m", "n", "k", "dtype"} <= set(words)
    assert ("", "bf16") == (product.topology, words["dtype"])
