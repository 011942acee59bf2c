"""Who sends how much to whom in a step."""

from collections import defaultdict

import numpy as np
import pytest
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrafficColumns
from foretoken.simulator.training.rank_traffic import cell_size
from foretoken.simulator.training.step import simulate_training

_BF16 = 2
_FP32 = 4
_LENGTH = 256


def _traffic(layout: ParallelLayout, **changes: object) -> TrafficColumns:
    fields: dict[str, object] = {"sequence_length": _LENGTH, "global_batch_size": 8, **changes}
    scenario: TrainingScenario = build_scenario(layout, **fields)
    report = simulate_training(scenario, RooflinePredictor(), None)
    assert report.feasibility.reason == "" or report.step_time_ms > 0
    return report.traffic


def _matrix(traffic: TrafficColumns, axis: str, num_devices: int) -> np.ndarray:
    """Return the bytes from device to device along an axis."""
    matrix = np.zeros((num_devices, num_devices))
    rows = zip(traffic.axis, traffic.source, traffic.target, traffic.bytes, strict=True)
    for name, source, target, num_bytes in rows:
        if name == axis:
            matrix[source, target] += num_bytes
    return matrix


def test_one_device_sends_nothing() -> None:
    assert len(_traffic(ParallelLayout()).bytes) == 0


def test_gradients_go_round_a_ring_of_replicas() -> None:
    """A ring all-reduce moves 2 (n - 1) / n of the gradients from each rank to the next."""
    model = find_model("llama-2-7b")
    # Gradients of the plain profile are summed in fp32; a norm of four bytes is not asked for.
    matrix = _matrix(_traffic(ParallelLayout(dp=4)), "dp", 4)
    expected = 2 * 3 / 4 * count_parameters(model).total * _FP32
    assert matrix[[0, 1, 2, 3], [1, 2, 3, 0]] == pytest.approx([expected] * 4, rel=1e-6)
    assert np.count_nonzero(matrix) == 4


def test_a_pipeline_sends_activations_forth_and_gradients_back() -> None:
    """Each boundary sees every micro batch once each way."""
    model = find_model("llama-2-7b")
    matrix = _matrix(_traffic(ParallelLayout(pp=4)), "pp", 4)
    expected = 8 * _LENGTH * model.hidden * _BF16
    for stage in range(3):
        assert matrix[stage, stage + 1] == pytest.approx(expected, abs=100)
        assert matrix[stage + 1, stage] == pytest.approx(expected, abs=100)
    assert matrix[0, 2] == 0


def test_interleaved_stages_close_the_ring() -> None:
    """With two chunks a rank the last one sends to the first, and gets gradients from it."""
    model = find_model("llama-2-7b")
    traffic = _traffic(ParallelLayout(pp=4), virtual_stages=2, pipeline_schedule="interleaved")
    matrix = _matrix(traffic, "pp", 4)
    expected = 8 * _LENGTH * model.hidden * _BF16
    # Both directions of three boundaries are passed by both chunks, the last one by one of them.
    assert matrix[0, 1] == pytest.approx(2 * expected, abs=100)
    assert matrix[3, 0] == pytest.approx(expected, abs=100)
    assert matrix[0, 3] == pytest.approx(expected, abs=100)


def test_tensor_parallelism_stays_in_its_groups() -> None:
    """Each layer sums four times its activations, twice forward and twice backward."""
    model = find_model("llama-2-7b")
    matrix = _matrix(_traffic(ParallelLayout(tp=2, dp=2)), "tp", 4)
    layers = 4 * 2 * 1 / 2 * _LENGTH * model.hidden * _BF16 * model.num_layers * 4
    assert matrix[0, 1] == pytest.approx(layers, rel=0.05)
    assert matrix[0, 1] > layers
    assert np.count_nonzero(matrix[:2, 2:]) == 0
    assert np.array_equal(matrix, matrix.T)


def test_experts_are_reached_from_every_rank_alike() -> None:
    traffic = _traffic(ParallelLayout(dp=4, ep=4), model=find_model("mixtral-8x7b"))
    matrix = _matrix(traffic, "ep", 4)
    off_diagonal = matrix[~np.eye(4, dtype=bool)]
    assert np.ptp(off_diagonal) == 0
    assert off_diagonal[0] > 0
    assert np.trace(matrix) == 0


def test_a_tied_embedding_is_summed_by_the_first_and_the_last_stage() -> None:
    model = find_model("gpt2-xl")
    traffic = _traffic(ParallelLayout(pp=4), model=model, sequence_length=128)
    matrix = _matrix(traffic, "pp", 4)
    # Two ranks of a ring send each other the whole.
    expected = model.vocab * model.hidden * _FP32
    assert matrix[0, 3] == pytest.approx(expected, rel=1e-3)
    assert matrix[3, 0] == pytest.approx(expected, rel=1e-3)


def test_cells_keep_every_byte() -> None:
    """256 devices are 32 cells of a node of eight, with the bytes of ranks that send alike."""
    assert cell_size(128, 8) == 1
    assert cell_size(256, 8) == 8
    assert cell_size(2048, 8) == 16
    few = _traffic(ParallelLayout(dp=64), global_batch_size=256)
    many = _traffic(ParallelLayout(dp=256), global_batch_size=256)
    assert set(many.num_devices) == {8}
    assert max(many.source) == 248
    sent: defaultdict[str, float] = defaultdict(float)
    for name, traffic in (("few", few), ("many", many)):
        sent[name] = sum(
            num_bytes
            for axis, num_bytes in zip(traffic.axis, traffic.bytes, strict=True)
            if axis == "dp"
        )
    # 2 (n - 1) times the gradients, over all ranks.
    assert sent["many"] / sent["few"] == pytest.approx(255 / 63, rel=1e-6)
