"""The closed form of a mixed cluster, held to the event simulator."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from placement_fakes import GROUPS, SheetPredictor, build_request
from slow_cases import slow_but

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import LatencyQuery, LatencyReply
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.placement.closed_form import answer_placements
from foretoken.simulator.search.placement.stage_memory import StageBook
from foretoken.simulator.search.placement.strategy import equal_round_counts
from foretoken.simulator.search.training.answers import Answers
from foretoken.simulator.search.training.closed_form import ClosedForm, Setting
from foretoken.simulator.search.training.search import FinalistSelection, search_training
from foretoken.simulator.training.step import simulate_training

# As many stages of the one as of the other, so that micro batches can go round them in groups.
_PAIR = tuple(replace(group, num_nodes=1) for group in GROUPS)


class CertainPredictor:
    """Answers as the data sheet, and is sure of it."""

    def list_models(self) -> Sequence[ModelVersion]:
        return ()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        reply: LatencyReply = SheetPredictor().predict(query)
        tables = [
            replace(table, low_us=table.latency_us, high_us=table.latency_us)
            for table in reply.tables
        ]
        return replace(reply, tables=tuple(tables))


def _answer(request: TrainingSearchRequest) -> ClosedForm:
    book = StageBook.of_request(request)
    return answer_placements(request, book, Setting(predictor=SheetPredictor()), lambda _: None)


def _mixed(answers: Answers, count: int) -> list[int]:
    """Return some rows whose stages are of two kinds."""
    rows = [
        row
        for row, name in enumerate(answers.strategies.placements())
        if "a100" in name and "a40" in name
    ]
    return rows[:: max(1, len(rows) // count)]


def _check_against_simulator(answers: Answers, rows: Sequence[int], rel: float) -> None:
    assert rows
    for row in rows:
        report = simulate_training(answers.strategies.scenario(row), SheetPredictor(), None)
        assert answers.step_us[row] / 1e3 == pytest.approx(report.step_time_ms, rel=rel)
        fullest = min(report.memory, key=lambda stage: stage.margin_bytes)
        assert answers.margin_bytes[row] == pytest.approx(fullest.margin_bytes, rel=1e-6)
        assert report.feasibility.is_feasible


@pytest.mark.parametrize(
    ("schedule", "rounds"),
    [("one_f_one_b", 1), ("gpipe", 1), ("zero_bubble_h1", 1), ("interleaved", 2)],
)
@pytest.mark.parametrize("profile", slow_but(["plain"], ["plain", "megatron-core"]))
def test_the_closed_form_is_near_the_event_simulator(
    schedule: str, rounds: int, profile: str
) -> None:
    """To rounding, and memory is the same."""
    request = build_request(
        node_groups=_PAIR,
        pipeline_schedules=(schedule,),
        virtual_stages=(rounds,),
        # Also schedules that the framework lacks.
        trainer=TrainerSpec(profile=profile, rules={"can": "{}"}),
        zero_stage=1,
    )
    answers = _answer(request).ranked
    assert answers is not None
    assert {rounds} == set(answers.strategies.virtual_stages.tolist())
    _check_against_simulator(answers, _mixed(answers, 3), rel=1e-9)


def test_layers_of_two_kinds_have_their_own_time_and_bytes() -> None:
    """A model that begins with dense layers before those with experts."""
    model = find_model("deepseek-v3")
    assert model.moe is not None
    moe = replace(model.moe, num_experts=8, num_dense_layers=3)
    model = replace(model, num_layers=10, moe=moe)
    request = build_request(tp=(4,), micro_batch_sizes=(1,), trainer=TrainerSpec(profile="plain"))
    scenario = replace(request.scenario, model=model, layout=ParallelLayout(ep=2), zero_stage=1)
    answers = _answer(replace(request, scenario=scenario)).ranked
    assert answers is not None
    _check_against_simulator(answers, _mixed(answers, 4), rel=1e-9)


@pytest.mark.slow
def test_rounds_of_the_pipeline_are_cut_alike() -> None:
    answers = _answer(build_request(node_groups=_PAIR, virtual_stages=(2, 4))).ranked
    assert answers is not None
    strategies = answers.strategies
    assert {2, 4} == set(strategies.virtual_stages.tolist())
    for row, text in enumerate(strategies.stage_cuts()):
        layers, pp = [int(count) for count in text.split(",")], int(strategies.pp[row])
        rounds = int(strategies.virtual_stages[row])
        assert layers[:pp] * rounds == layers
        assert sum(layers) == 32
        assert strategies.num_micro_batches[row] % pp == 0


def test_what_cannot_be_interleaved_is_counted_with_a_reason() -> None:
    """With 32 layers no 3 rounds are equal; a schedule that folds back is not cut for."""
    found = _answer(build_request(virtual_stages=(3,))).survey
    assert {"virtual_stages: unequal rounds"} <= set(found.verdicts)
    assert found.num_legal == 0
    folded = _answer(build_request(pipeline_schedules=("zero_bubble_v",))).survey
    assert ["pipeline_schedule"] == list(folded.verdicts)
    assert "schedules that go round it alone" in folded.reasons["pipeline_schedule"]


@pytest.mark.slow
def test_points_are_counted_once_whether_they_fit_or_not() -> None:
    request = build_request(has_subsets=True, tp=(4,), micro_batch_sizes=(1, 8), partition="even")
    survey = _answer(request).survey
    ruled_out = {name: count for name, (count, _) in survey.verdicts.items()}
    assert survey.num_points == survey.num_fitting + sum(ruled_out.values())
    assert survey.num_legal == survey.num_fitting + ruled_out.get("memory", 0)
    cells = [cell for cell in survey.cells if cell.row_axis == "tp"]
    assert survey.num_legal == sum(cell.num_legal for cell in cells)
    assert survey.num_fitting == sum(cell.num_fitting for cell in cells)


@pytest.mark.slow
def test_a_sure_predictor_leaves_no_ties() -> None:
    """Where every estimate is sure the first is the best; where none is, others tie with it."""
    request = build_request(node_groups=_PAIR, tp=(4,))
    book = StageBook.of_request(request)
    sure = answer_placements(request, book, Setting(predictor=CertainPredictor()), lambda _: None)
    unsure = answer_placements(request, book, Setting(predictor=SheetPredictor()), lambda _: None)
    assert sure.ranked is not None
    values = sure.ranked.step_us[sure.ties] / sure.ranked.tokens[sure.ties]
    best = sure.ranked.step_us[0] / sure.ranked.tokens[0]
    devices = sure.ranked.strategies.num_devices
    assert np.allclose(values * devices[sure.ties], best * devices[0])
    assert len(unsure.ties) > len(sure.ties)


def test_the_next_takes_the_place_of_one_that_does_not_fit_when_simulated() -> None:
    request = replace(build_request(num_finalists=2), max_candidates=10)
    form = _answer(request)
    assert form.ranked is not None
    selection = FinalistSelection(request, form.ranked, form.prices)
    assert [0, 1] == selection.next_rows()
    out = TrainingReport(feasibility=Feasibility(is_feasible=False, reason="too large"))
    selection.tell(0, out)
    selection.tell(1, TrainingReport(step_time_ms=3.0))
    assert [2] == selection.next_rows()
    selection.tell(2, TrainingReport(step_time_ms=2.0))
    assert [] == selection.next_rows()
    assert [(2, 1), (1, 2), (0, 0)] == [
        (item.candidate, item.rank) for item in selection.finalists()
    ]


@pytest.mark.slow
def test_changes_of_the_hardware_and_the_batch_are_answered() -> None:
    """Faster parts make the best no slower, more memory lets no fewer fit."""
    request = replace(
        build_request(node_groups=_PAIR, tp=(1, 2), micro_batch_sizes=(4,), recompute="none"),
        has_sensitivity=True,
    )
    report = search_training(request, SheetPredictor(), InlineContext())
    found = {item.change: item for item in report.sensitivities}
    assert {"links 2x", "memory capacity +50 %", "half the batch"} <= set(found)
    for name, item in found.items():
        if "batch" not in name:
            assert item.throughput_ratio >= 1 - 1e-9
            assert item.num_fitting >= report.num_fitting
            assert item.same_throughput_ratio <= item.throughput_ratio
            assert item.is_same_best == (item.best == report.best["throughput_per_gpu"])
    assert found["memory capacity +50 %"].num_fitting > report.num_fitting
    assert found["arithmetic 2x"].throughput_ratio > found["links 2x"].throughput_ratio


@pytest.mark.slow
def test_a_placement_that_its_framework_lacks_is_counted() -> None:
    """Megatron-Core has no GPipe; interleaved rounds divide the layers."""
    request = build_request(
        node_groups=_PAIR,
        pipeline_schedules=("gpipe", "interleaved"),
        trainer=TrainerSpec(profile="megatron-core"),
        zero_stage=1,
    )
    form = _answer(request)
    ranked = form.ranked
    assert ranked is not None
    names = np.array(ranked.strategies.source.pipeline_schedules)
    assert {"interleaved"} == set(names[ranked.strategies.pipeline_schedule].tolist())
    assert "trainer" in form.survey.verdicts
    assert "megatron-core: has no gpipe" in form.survey.reasons["trainer"]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "rounds"),
    [(12, 2, [1, 2, 3, 4, 6]), (12, 4, [1, 2, 3]), (7, 2, [1]), (12, 1, [1])],
)
def test_rounds_are_tried_that_leave_every_stage_a_layer(
    num_layers: int, num_stages: int, rounds: list[int]
) -> None:
    assert rounds == equal_round_counts(num_layers, num_stages)
