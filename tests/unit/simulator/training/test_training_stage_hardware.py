"""Pipelines whose stages are on different devices and links."""

from dataclasses import replace

import pytest
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError, UnknownTopologyError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.stage_hardware import StageHardware
from foretoken.simulator.training.efficiency import count_step_flops
from foretoken.simulator.training.step import simulate_training

_A100, _A40 = ("a100_sxm_80", "a100_dgx"), ("a40", "a40_pcie")


def _simulate(scenario: TrainingScenario) -> TrainingReport:
    return simulate_training(scenario, RooflinePredictor(), None)


def _mixed(*stages: tuple[str, str], **changes: object) -> TrainingScenario:
    """Return a pipeline of stages of 8 devices, each of a node."""
    fields: dict[str, object] = {
        "stage_devices": tuple(device for device, _ in stages),
        "stage_topologies": tuple(topology for _, topology in stages),
        "global_batch_size": 64,
        **changes,
    }
    return build_scenario(ParallelLayout(tp=8, pp=len(stages)), **fields)


def _plain(hardware: tuple[str, str], num_stages: int) -> TrainingScenario:
    scenario = build_scenario(ParallelLayout(tp=8, pp=num_stages), global_batch_size=64)
    return replace(scenario, device=hardware[0], topology=hardware[1])


def _component(report: TrainingReport, name: str, stage: int) -> float:
    return next(
        part.time_ms for part in report.components if (part.name, part.stage) == (name, stage)
    )


def test_stages_named_alike_are_those_of_the_whole() -> None:
    plain = _simulate(_plain(_A40, 4))
    named = _simulate(replace(_mixed(*[_A40] * 4), device="a40", topology="a40_pcie"))
    assert replace(plain, scenario_json="", notes=(), spans=named.spans) == replace(
        named, scenario_json="", notes=()
    )


@pytest.mark.parametrize("name", ["stage_fwd", "stage_bwd", "update"])
def test_a_stage_computes_as_it_does_among_its_like(name: str) -> None:
    mixed = _simulate(_mixed(_A100, _A100, _A40, _A40))
    for stage, hardware in enumerate((_A100, _A100, _A40, _A40)):
        alike = _simulate(_plain(hardware, 4))
        assert _component(alike, name, stage) == pytest.approx(_component(mixed, name, stage))


def test_transfers_to_other_hardware_take_the_slower_links() -> None:
    times_ms = [_component(_simulate(_plain(item, 2)), "pp_p2p", 0) for item in (_A100, _A40)]
    expected_ms = pytest.approx(max(times_ms))
    assert times_ms[0] < times_ms[1]
    assert expected_ms == _component(_simulate(_mixed(_A100, _A40)), "pp_p2p", 0)
    assert expected_ms == _component(_simulate(_mixed(_A40, _A100)), "pp_p2p", 0)


def test_neighbours_that_differ_share_no_node() -> None:
    """Two stages of two devices fit on a node of eight if they are alike."""
    layout = ParallelLayout(tp=2, pp=3)
    devices, topologies = zip(_A100, _A40, _A40, strict=True)
    scenario = build_scenario(layout, stage_devices=devices, stage_topologies=topologies)
    rank = chunk_ranks(scenario)[0]
    hardware = StageHardware.of_scenario(scenario)
    pairs = [hardware.pair(stage, stage + 1, rank).dims for stage in range(2)]
    assert [
        {"devices_per_node": 1, "num_nodes": 2},
        {"devices_per_node": 2, "num_nodes": 1},
    ] == pairs


def test_every_stage_has_the_memory_of_its_device() -> None:
    report = _simulate(_mixed(_A100, _A40))
    expected = [find_device(device).memory_bytes for device, _ in (_A100, _A40)]
    assert expected == [stage.device_bytes for stage in report.memory]
    assert min(expected) == report.device_memory_bytes


def test_utilisation_is_of_the_peak_of_every_device() -> None:
    scenario = _mixed(_A100, _A40)
    report = _simulate(scenario)
    peak = 8 * sum(find_device(name).peak_flops(scenario.dtype) for name, _ in (_A100, _A40))
    expected = count_step_flops(scenario) / (peak * report.step_time_ms / 1e3)
    assert pytest.approx(expected) == report.mfu_ratio


def test_the_predictor_is_asked_once_for_each_hardware() -> None:
    predictor = RooflinePredictor()
    simulate_training(_mixed(_A100, _A40, _A100), predictor, None)
    assert [_A100, _A40] == [(query.device, query.topology) for query in predictor.queries]


def test_the_parts_of_a_mixed_step_add_up() -> None:
    for schedule in ("one_f_one_b", "gpipe", "zero_bubble_h1", "interleaved"):
        chunks = 2 if schedule == "interleaved" else 1
        report = _simulate(_mixed(_A40, _A100, pipeline_schedule=schedule, virtual_stages=chunks))
        assert pytest.approx(report.step_time_ms) == sum(report.step_time_ms_by_group.values())
        assert pytest.approx(1.0) == sum(report.step_time_ratio_by_provenance.values())
        assert 0 < report.mfu_ratio < 1


def test_topologies_alone_change_the_links_alone() -> None:
    slow = build_scenario(
        ParallelLayout(tp=8, pp=2),
        global_batch_size=64,
        stage_topologies=("a100_dgx", "a100_roce_4x"),
    )
    report = _simulate(slow)
    plain = [_simulate(_plain(("a100_sxm_80", name), 2)) for name in ("a100_dgx", "a100_roce_4x")]
    expected_ms = max(_component(one, "pp_p2p", 0) for one in plain)
    assert pytest.approx(expected_ms) == _component(report, "pp_p2p", 0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"stage_devices": ("a40",)}, "stage_devices: has 1 entries"),
        ({"stage_topologies": ("a40_pcie",) * 3}, "stage_topologies: has 3 entries"),
        ({"pipeline_schedule": "dualpipe"}, "hold the same layers"),
    ],
)
def test_hardware_that_does_not_suit_the_pipeline_is_refused(
    changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        _simulate(_mixed(_A100, _A40, **changes))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownDeviceError):
        _simulate(_mixed(("a41", ""), _A40))
    with pytest.raises(UnknownTopologyError):
        _simulate(_mixed(("a40", "a41_pcie"), _A40))
