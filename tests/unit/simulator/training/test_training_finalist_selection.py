"""Strategies that are simulated: who takes the place of one that does not fit, and who wins."""

from dataclasses import replace

import numpy as np
import pytest
from training_fakes import DEVICE, TOPOLOGY, RooflinePredictor

from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest, TrainingSpace
from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.training_report import StageMemory, TrainingReport
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.closed_form import (
    ClosedForm,
    Setting,
    answer_in_closed_form,
)
from foretoken.simulator.search.training.outcome import make_report, with_finalists
from foretoken.simulator.search.training.search import FinalistSelection

_REQUEST = TrainingSearchRequest(
    scenario=TrainingScenario(
        model=find_model("tiny-llama"),
        device=DEVICE,
        topology=TOPOLOGY,
        layout=ParallelLayout(dp=8),
        sequence_length=512,
        global_batch_size=32,
    ),
    space=TrainingSpace(tp=(1, 2), pp=(1, 2), cp=(1,), overlaps=("none",), recompute=("none",)),
    num_finalists=2,
)
_NO_ROOM = TrainingReport(feasibility=Feasibility(is_feasible=False, reason="too large"))


def _simulated(tokens_per_s: float, margin_bytes: float = 0.0) -> TrainingReport:
    stage = StageMemory(stage=0, device_bytes=margin_bytes)
    return TrainingReport(
        step_time_ms=1e6 / tokens_per_s, tokens_per_s_per_gpu=tokens_per_s, memory=(stage,)
    )


@pytest.fixture(scope="module")
def form() -> ClosedForm:
    setting = Setting(predictor=RooflinePredictor())
    return answer_in_closed_form(_REQUEST, setting, lambda _: None)


def _ranked(form: ClosedForm) -> Answers:
    assert form.ranked is not None
    return form.ranked


def _select(form: ClosedForm, objective: str = "throughput_per_gpu") -> FinalistSelection:
    request = replace(_REQUEST, objective=objective)
    return FinalistSelection(request, _ranked(form), np.ones(1))


def test_the_next_takes_the_place_of_one_that_does_not_fit(form: ClosedForm) -> None:
    selection = _select(form)
    assert [0, 1] == selection.next_rows()
    selection.tell(0, _NO_ROOM)
    selection.tell(1, _simulated(10.0))
    assert [2] == selection.next_rows()
    selection.tell(2, _simulated(20.0))
    assert [] == selection.next_rows()
    finalists = selection.finalists()
    assert [(2, 1), (1, 2), (0, 0)] == [(item.candidate, item.rank) for item in finalists]


def test_four_tries_for_each_finalist_are_enough(form: ClosedForm) -> None:
    selection = _select(form)
    while rows := selection.next_rows():
        for row in rows:
            selection.tell(row, _NO_ROOM)
    assert 8 == selection.num_simulated
    assert all(item.rank == 0 for item in selection.finalists())


@pytest.mark.parametrize(
    ("objective", "first"),
    [("throughput_per_gpu", 1), ("step_time", 1), ("cost", 1), ("memory_headroom", 0)],
)
def test_places_are_by_the_objective(form: ClosedForm, objective: str, first: int) -> None:
    selection = _select(form, objective)
    selection.tell(0, _simulated(10.0, margin_bytes=9.0))
    selection.tell(1, _simulated(20.0, margin_bytes=5.0))
    assert first == selection.finalists()[0].candidate


def test_what_does_not_fit_loses_its_rank_and_is_counted(form: ClosedForm) -> None:
    """Those after it move up, and the first that fits is the best."""
    before = make_report(form)
    selection = _select(form)
    selection.tell(0, _NO_ROOM)
    selection.tell(1, _simulated(10.0))
    selection.tell(2, _simulated(20.0))
    after = with_finalists(before, form, selection.finalists())
    assert before.num_fitting - 1 == after.num_fitting
    assert ("memory, simulated", 1, "too large") == (
        after.ruled_out[-1].verdict,
        after.ruled_out[-1].num_strategies,
        after.ruled_out[-1].reason,
    )
    rank = np.asarray(after.candidates.rank)
    assert 0 == rank[0]
    assert 1 == rank[1]
    assert (np.diff(rank[1:]) >= 0).all()
    assert before.candidates.name[2] == after.best["throughput_per_gpu"]
    assert before.candidates.name[0] not in (*after.best.values(), *after.ties)
    assert 3 == after.num_simulated
