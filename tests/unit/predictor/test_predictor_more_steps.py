"""Tables of an engine, imported next to the starter, leave a trainer's steps where they are."""

from collections.abc import Callable
from pathlib import Path

import pytest
from predictor_fakes import FakeCatalog, Rows, gemm_rows

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.service import PredictorService
from foretoken.simulator.training.step import simulate_training

_DATA = Path(__file__).resolve().parents[3] / "starter" / "src" / "foretoken_starter" / "data"
# How much a table of an engine may move a step that another software runs.
_MOST = 1.05
# A tenth and more faster than what PyTorch reaches there.
_ENGINE_EFFICIENCY = 0.95


def _step_ms(folder: Path, rows: Rows, train: Callable[..., object], trainer: str) -> float:
    config = PredictorConfig(state_folder=str(folder), starter=str(_DATA))
    service = PredictorService(config, FakeCatalog(rows))
    service.open()
    if rows:
        train(service)
    scenario = TrainingScenario(
        name="more",
        model=find_model("llama-2-7b"),
        device="a100_sxm_80",
        dtype=DType.BF16,
        layout=ParallelLayout(dp=8),
        micro_batch_size=1,
        global_batch_size=8,
        sequence_length=4096,
        zero_stage=3,
        trainer=TrainerSpec(profile=trainer),
    )
    report = simulate_training(scenario, service, None)
    service.close()
    return report.step_time_ms


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["megatron-core", "torchtitan"])
def test_an_engines_products_do_not_move_a_trainers_step(
    tmp_path: Path, train: Callable[..., object], trainer: str
) -> None:
    rows = gemm_rows(
        lambda _: 1.0 / _ENGINE_EFFICIENCY,
        device="a100_sxm_80",
        dtype="bf16",
        framework="vllm",
        framework_version="0.14.0",
    )
    fewer_ms = _step_ms(tmp_path, [], train, trainer)
    more_ms = _step_ms(tmp_path, rows, train, trainer)
    assert fewer_ms / _MOST <= more_ms <= fewer_ms * _MOST
