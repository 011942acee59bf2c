"""A search over training strategies: every point counted, the best found, the first simulated."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from training_fakes import DEVICE, TOPOLOGY, RooflinePredictor

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    TRAINING_OBJECTIVES,
    TrainingSearchReport,
    TrainingSearchRequest,
    TrainingSpace,
)
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.training.canonical import find_redundant
from foretoken.simulator.search.training.closed_form import Setting, answer_in_closed_form
from foretoken.simulator.search.training.search import count_points, search_training
from foretoken.simulator.search.training.space import resolve_space
from foretoken.simulator.steps.legality import LEGAL, judge_legality
from foretoken.simulator.training.step import simulate_training

_SCENARIO = TrainingScenario(
    model=find_model("tiny-llama"),
    device=DEVICE,
    topology=TOPOLOGY,
    layout=ParallelLayout(dp=8),
    sequence_length=512,
    global_batch_size=32,
)
_SPACE = TrainingSpace(
    tp=(1, 2),
    pp=(1, 2, 3),
    cp=(1,),
    micro_batch_sizes=(2, 4),
    recompute=("none", "full"),
    weight_parallel=("",),
    zero_stages=(0, 1),
    overlaps=("none", "data"),
    usd_per_hour={DEVICE: 2.0},
)
_REQUEST = TrainingSearchRequest(scenario=_SCENARIO, space=_SPACE, num_finalists=3)


def _search(request: TrainingSearchRequest) -> TrainingSearchReport:
    return search_training(request, RooflinePredictor(), InlineContext())


@pytest.fixture(scope="module")
def report() -> TrainingSearchReport:
    return _search(_REQUEST)


def _with_space(**changes: object) -> TrainingSearchRequest:
    return replace(_REQUEST, space=replace(_SPACE, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "num_devices", "least"),
    [("llama-2-7b", 128, 142_536), ("llama-2-70b", 1024, 126_384)],
)
def test_the_space_of_a_large_cluster_is_large(model: str, num_devices: int, least: int) -> None:
    """4,194,304 tokens a step: no fewer points than others count in theirs."""
    scenario = replace(
        _SCENARIO,
        model=find_model(model),
        layout=ParallelLayout(dp=num_devices),
        sequence_length=4096,
        global_batch_size=1024,
    )
    assert least <= count_points(TrainingSearchRequest(scenario=scenario))


def test_every_point_is_counted_once(report: TrainingSearchReport) -> None:
    ruled_out = Counter({item.verdict: item.num_strategies for item in report.ruled_out})
    assert report.num_points == count_points(_REQUEST)
    assert report.num_points == report.num_fitting + sum(ruled_out.values())
    assert report.num_legal == report.num_fitting + ruled_out["memory"]
    # Three stages do not divide eight devices; layers and ends are cut into 3 or 6 chunks.
    # Of tp, micro batches, sequence parallelism, ZeRO, overlap and recomputation two each.
    assert 2 * 2**6 == ruled_out["devices"]
    assert all(item.example and item.reason for item in report.ruled_out)


def test_the_cells_of_each_pair_of_axes_count_all_that_can_run(
    report: TrainingSearchReport,
) -> None:
    totals: Counter[tuple[str, str]] = Counter()
    for cell in report.cells:
        totals[cell.row_axis, cell.column_axis] += cell.num_legal
    assert dict.fromkeys(totals, report.num_legal) == totals
    best = max(report.cells, key=lambda cell: cell.tokens_per_s_per_gpu)
    assert np.max(report.candidates.tokens_per_s_per_gpu) == best.tokens_per_s_per_gpu


@pytest.mark.parametrize(
    ("num_layers", "asked", "left_out"),
    [
        (12, (1, 2, 4), {(2, 4), (4, 2)}),
        (12, (2, 4), set()),
        (14, (1, 2, 3, 4), {(2, 3), (3, 2), (3, 3), (3, 4), (4, 3)}),
    ],
)
def test_chunks_of_unequal_layers_are_left_out_unless_asked_for(
    num_layers: int, asked: tuple[int, ...], left_out: set[tuple[int, int]]
) -> None:
    """Of 12 layers 8 chunks are unequal, of two stages or four; 16 are more than there are.

    Of 14 they are alike with the embedding and the head, and so are 4 and 16.
    """
    model = replace(_SCENARIO.model, num_layers=num_layers)
    request = replace(
        _REQUEST,
        scenario=replace(_SCENARIO, model=model),
        space=TrainingSpace(
            num_devices=(12,),
            tp=(1,),
            pp=(2, 3, 4),
            cp=(1,),
            virtual_stages=asked,
            global_batch_sizes=(144,),
            micro_batch_sizes=(1,),
            sequence_parallel=(False,),
            zero_stages=(0,),
            overlaps=("none",),
            recompute=("none",),
            weight_parallel=("",),
        ),
        num_finalists=0,
    )
    space = resolve_space(request)
    points = space.piece(0, space.num_points)
    legal = points.take(np.flatnonzero(judge_legality(points) == LEGAL))
    found = find_redundant(legal, space)["virtual_stages: unequal chunks"]
    rows = np.flatnonzero(found)
    assert left_out == {(int(legal.pp[row]), int(legal.virtual_stages[row])) for row in rows}


@pytest.mark.parametrize(
    ("model", "pp", "tried"),
    [
        ("gpt3-175b", 8, {1, 2, 3, 4, 6, 12}),
        ("gpt-530b", 35, {1, 3}),
        # Eight chunks on each of 16 ranks are 128: 126 layers, the embedding and the head.
        ("llama-3.1-405b", 16, {1, 2, 4, 8}),
        # 80 layers and the ends are 82.
        ("llama-2-70b", 2, {1, 2, 4, 5, 8, 10, 20, 40, 41}),
        ("llama-2-7b", 1, {1}),
    ],
)
def test_chunks_are_tried_that_cut_the_layers_evenly(model: str, pp: int, tried: set[int]) -> None:
    """NVIDIA published three chunks a rank for GPT of 175 and 530 billion parameters."""
    scenario = replace(_SCENARIO, model=find_model(model), layout=ParallelLayout(pp=pp))
    space = resolve_space(TrainingSearchRequest(scenario=scenario))
    assert tried == {count for degree, _, count in space.rows_of("virtual_stages") if degree == pp}


@pytest.mark.slow
def test_what_a_framework_lacks_is_counted_and_not_proposed() -> None:
    """Of all weights and ZeRO stages that are open, cut from the space or broken by a strategy."""
    request = _with_space(
        zero_stages=(), weight_parallel=(), overlaps=(), pp=(1, 2), micro_batch_sizes=(2,)
    )
    trainer = TrainerSpec(profile="megatron-core")
    bounded = replace(request, scenario=replace(request.scenario, trainer=trainer))
    free = replace(trainer, rules={"can": "{}"})
    everything = replace(request, scenario=replace(request.scenario, trainer=free))
    report = _search(bounded)
    out = {item.verdict: item for item in report.ruled_out}
    assert count_points(everything) == count_points(bounded) == report.num_points
    assert report.num_points == report.num_fitting + sum(
        item.num_strategies for item in report.ruled_out
    )
    assert "trainer" not in {item.verdict for item in _search(everything).ruled_out}
    assert "megatron-core: has no" in out["trainer"].reason
    columns = report.candidates
    assert {""} == set(columns.weight_parallel)
    is_fsdp = np.isin(columns.zero_stage, (2, 3))
    assert is_fsdp.any()
    assert not (is_fsdp & (np.array(columns.pp) > 1)).any()


def test_a_framework_bounds_a_search_by_other_rules() -> None:
    """Times by the rules of no framework, and the answer one that torchtitan can run."""
    request = _with_space(zero_stages=(), framework="torchtitan", tp=(1, 2), num_devices=(8,))
    report = _search(replace(request, num_finalists=0))
    assert {2, 3} >= set(report.candidates.zero_stage) - {0}
    assert 1 not in report.candidates.zero_stage
    (out,) = (item for item in report.ruled_out if item.verdict == "trainer")
    assert out.reason.startswith("zero_stage: torchtitan: has no 1")


def test_a_space_of_nothing_that_a_framework_has_says_so() -> None:
    request = _with_space(weight_parallel=("isp",))
    trainer = TrainerSpec(profile="gpt-neox")
    report = _search(replace(request, scenario=replace(request.scenario, trainer=trainer)))
    (out,) = report.ruled_out
    assert ("trainer", count_points(request)) == (out.verdict, out.num_strategies)
    assert "weight_parallel: gpt-neox: has no isp" in out.reason
    assert any("no strategy of the space can run" in note for note in report.notes)


def test_overlaps_that_hide_the_same_are_tried_once() -> None:
    """FSDP2 hides what data-parallel ranks exchange whatever is asked."""
    trainer = TrainerSpec(profile="torchtitan")
    request = _with_space(overlaps=(), zero_stages=(3,), weight_parallel=())
    space = resolve_space(replace(request, scenario=replace(_SCENARIO, trainer=trainer)))
    assert ((0,), (2,)) == space.rows_of("overlap")
    points = space.piece(0, space.num_points)
    hidden = {points.scenario(0).trainer.resolve().overlaps_gradient_reduction}
    assert {True} == hidden


@pytest.mark.slow
def test_the_best_is_the_best_of_all_simulations() -> None:
    """All of them are simulated, in a space that is small."""
    request = _with_space(tp=(1,), pp=(1, 2), micro_batch_sizes=(2,), zero_stages=(1,))
    space = resolve_space(request)
    points = space.piece(0, space.num_points)
    points = points.take(judge_legality(points) == LEGAL)
    reports = [
        simulate_training(points.scenario(row), RooflinePredictor(), None)
        for row in range(len(points))
        if points.pp[row] > 1 or points.virtual_stages[row] == 1
    ]
    fastest = max(item.tokens_per_s_per_gpu for item in reports if item.feasibility.is_feasible)
    assert fastest == _search(request).finalists[0].report.tokens_per_s_per_gpu


def test_the_first_of_the_table_are_simulated(report: TrainingSearchReport) -> None:
    """The places of finalists are by their simulations."""
    assert 3 == report.num_simulated
    assert {0, 1, 2} == {item.candidate for item in report.finalists}
    assert [1, 2, 3] == [item.rank for item in report.finalists]
    speeds = [item.report.tokens_per_s_per_gpu for item in report.finalists]
    assert sorted(speeds, reverse=True) == speeds
    for item in report.finalists:
        assert report.candidates.name[item.candidate] == item.name
        assert report.candidates.step_time_ms[item.candidate] == item.closed_form_ms
        assert item.closed_form_ms == pytest.approx(item.report.step_time_ms, rel=0.02)


def test_ranks_are_by_the_estimates_ties_or_not(report: TrainingSearchReport) -> None:
    """The predictor here is sure to 0.8 and 1.5 of its estimates: others may be as good."""
    columns = report.candidates
    assert list(range(1, len(columns.name) + 1)) == list(columns.rank)
    assert (np.diff(columns.step_time_ms) >= 0).all()
    rows = [list(columns.name).index(name) for name in report.ties]
    assert rows
    assert 0 not in rows
    # Those that tie are within the interval of the first, which is wider than the difference's.
    assert all(columns.step_time_ms[row] <= columns.step_time_high_ms[0] for row in rows)


def test_every_objective_has_a_best_among_the_listed() -> None:
    """Also where one strategy is to be listed."""
    few = _search(replace(_REQUEST, max_candidates=1, num_finalists=0))
    all_of_them = _search(replace(_REQUEST, num_finalists=0))
    assert set(TRAINING_OBJECTIVES) == set(few.best)
    assert few.best == all_of_them.best
    assert set(few.best.values()) <= set(few.candidates.name)
    assert len(few.candidates.name) < len(all_of_them.candidates.name)
    places = dict(zip(all_of_them.candidates.name, all_of_them.candidates.rank, strict=True))
    for name, rank in zip(few.candidates.name, few.candidates.rank, strict=True):
        # Equals have one place where they are listed for something else.
        assert rank <= places[name]


def test_a_space_in_pieces_is_the_space() -> None:
    """However small the pieces are: the same counts, and steps as good in the same order."""
    request = replace(_REQUEST, max_candidates=20)
    forms = [
        answer_in_closed_form(
            request, Setting(predictor=RooflinePredictor(), piece=piece), lambda _: None
        )
        for piece in (7, 100_000)
    ]
    small, whole = forms
    for name in ("num_points", "num_legal", "num_fitting"):
        assert getattr(small.survey, name) == getattr(whole.survey, name)
    for cell, other in zip(small.survey.cells, whole.survey.cells, strict=True):
        speed = pytest.approx(other.tokens_per_s_per_gpu)
        assert cell == replace(other, tokens_per_s_per_gpu=cell.tokens_per_s_per_gpu)
        assert cell.tokens_per_s_per_gpu == speed
    assert small.ranked is not None
    assert whole.ranked is not None
    np.testing.assert_allclose(small.ranked.step_us[:20], whole.ranked.step_us[:20])


def test_names_tell_strategies_apart(report: TrainingSearchReport) -> None:
    assert len(report.candidates.name) == len(set(report.candidates.name))


def test_money_needs_prices() -> None:
    unpriced = _with_space(usd_per_hour={})
    assert "cost" not in _search(replace(unpriced, num_finalists=0)).best
    with pytest.raises(InvalidRequestError, match="price a100_sxm_80"):
        _search(replace(unpriced, objective="cost"))


def test_costs_are_of_all_devices_and_the_step(report: TrainingSearchReport) -> None:
    """Eight devices at $2 an hour."""
    columns = report.candidates
    expected = 16.0 / 3600 / 1000 * columns.step_time_ms[0]
    assert expected == pytest.approx(columns.usd_per_step[0])
    tokens = 32 * 512
    assert expected / tokens * 1e9 == pytest.approx(columns.usd_per_billion_tokens[0])
    assert columns.tokens_per_s[0] == pytest.approx(tokens / columns.step_time_ms[0] * 1000)


def test_a_cheaper_device_wins_by_cost() -> None:
    request = replace(
        _with_space(
            devices=(DEVICE, "v100_pcie_16"), usd_per_hour={DEVICE: 4.0, "v100_pcie_16": 0.01}
        ),
        objective="cost",
        num_finalists=1,
    )
    report = _search(request)
    assert report.best["cost"].startswith("v100_pcie_16 ")
    assert report.best["throughput_per_gpu"].startswith(f"{DEVICE} ")
    assert any(report.candidates.is_pareto_cost)


def test_a_space_that_fits_nowhere_is_an_answer() -> None:
    """With the fastest that has too little memory, and what it needs."""
    scenario = replace(_SCENARIO, model=find_model("llama-2-70b"), sequence_length=4096)
    report = _search(
        TrainingSearchRequest(scenario=scenario, space=replace(_SPACE, tp=(1,), pp=(1,)))
    )
    assert (0, {}) == (report.num_fitting, report.best)
    memory = next(item for item in report.ruled_out if item.verdict == "memory")
    assert report.num_legal == memory.num_strategies > 0
    assert "GiB per device" in memory.reason
    assert any("more devices" in note for note in report.notes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"stage_layers": (8,)}, InvalidRequestError, "stage_layers"),
        ({"sequence_length": 0}, InvalidRequestError, "sequence_length"),
        ({"moe_imbalance_ratio": 2.0}, InvalidRequestError, "no experts"),
        ({"trainer": TrainerSpec(profile="megatrn")}, UnknownPluginError, "megatr"),
    ],
)
def test_a_scenario_that_no_strategy_mends_is_refused(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    scenario = replace(_SCENARIO, **changes)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        count_points(replace(_REQUEST, scenario=scenario))


def test_what_internevo_tries_is_counted_too() -> None:
    report = _search(
        replace(_with_space(enumeration="internevo"), num_finalists=0, max_candidates=5)
    )
    ruled_out = sum(item.num_strategies for item in report.ruled_out)
    assert report.num_points == report.num_fitting + ruled_out > 0
    assert not [item for item in report.ruled_out if item.verdict.startswith("redundant")]
