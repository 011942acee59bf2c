"""Tables of more devices and engines never make simulated serving much worse."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from serving_fakes import RooflinePredictor, SilentProgress

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.measurements.estimate import LatencyQuery, LatencyReply
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.estimator import Estimator
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.trainer import SeriesModel, train_series
from foretoken.predictor.training_rows import read_series
from foretoken.predictor.transfer import train_transfers
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces
from foretoken.simulator.serving.simulation import simulate_serving

_SYSTEMS = Path(__file__).parents[5] / "shared" / "data" / "aiconfigurator" / "systems"
_CONFIG = PredictorConfig(state_folder="")
# Folders of systems, engine and version; of each, products and attention.
_SOFTWARE: Sequence[tuple[str, str, str]] = (
    ("h100_sxm", "vllm", "0.24.0"),
    ("h200_sxm", "vllm", "0.24.0"),
    ("h200_sxm", "trtllm", "1.3.0rc20"),
    ("b200_sxm", "vllm", "0.24.0"),
    ("a100_sxm", "vllm", "0.14.0"),
)
_FAMILIES = ("gemm", "attention")
_OPERATORS = ("gemm", "attention_prefill", "attention_decode")
_NUM_POINTS = 600
# How much worse answers may become.
_MOST = 1.05
# Requests a second, each with so many tokens of a prompt: one at a time, and many at once.
_WORKLOADS = ((0.5, 2048), (40.0, 1024))

_Place = tuple[str, str]


class _Answers(RooflinePredictor):
    """Answers from tables."""

    def __init__(self, models: ModelSet) -> None:
        super().__init__()
        self.models = models

    def predict(self, query: LatencyQuery) -> LatencyReply:
        return Estimator(self.models).predict(query)


def _copy_tables(folder: Path) -> Path:
    """Make a folder of systems that has these tables and no others."""
    for system, engine, version in _SOFTWARE:
        (folder / f"{system}.yaml").write_bytes((_SYSTEMS / f"{system}.yaml").read_bytes())
        for family in _FAMILIES:
            place = Path("data") / system / family / engine
            copytree(_SYSTEMS / place / version, folder / place / version)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[SeriesKey, SeriesModel]:
    """Return a model of some points of every table in BF16."""
    folder = tmp_path_factory.mktemp("systems")
    catalog = CatalogService(CatalogConfig(path=str(folder / "catalog.duckdb")))
    catalog.open()
    plan = find_importer("aiconfigurator").read(ImportRequest(path=_copy_tables(folder)))
    for _ in catalog.record(plan.run, plan.batches):
        pass
    found: list[Series] = []
    for operator in _OPERATORS:
        selection = MeasurementFilter(operator=operator)
        found += read_series(catalog.read_measurements(selection))
    catalog.close()
    return {
        series.key: train_series(_thin(series), _CONFIG, 0) for series in found if _is_plain(series)
    }


def _is_plain(series: Series) -> bool:
    key = series.key
    return bool(key.framework) and (key.dtype, key.variant, key.kernel) == ("bf16", "", "")


def _thin(series: Series) -> Series:
    count = min(series.num_points, _NUM_POINTS)
    rows = np.random.default_rng(0).choice(series.num_points, count, replace=False)
    return series.take(np.sort(rows))


def _place(key: SeriesKey) -> _Place:
    return key.device, key.framework


def _simulate(models: Mapping[SeriesKey, SeriesModel], device: str) -> np.ndarray:
    """Return logarithms of what users wait for, of one request at a time and of many."""
    transfers = train_transfers([it.series for it in models.values()], _CONFIG, 0)
    answers = _Answers(ModelSet(version="more", series=models, transfers=transfers))
    found = []
    for rate_rps, prompt in _WORKLOADS:
        scenario = ServingScenario(
            model=find_model("llama-3.1-8b"),
            device=device,
            engine=EngineSpec(profile="vllm-0.20"),
            workload=WorkloadSpec(
                arrival="constant",
                rate_rps=rate_rps,
                num_requests=24,
                prefill=LengthSpec(mean=prompt),
                decode=LengthSpec(mean=64),
            ),
        )
        result = simulate_serving(
            scenario, lambda spec: fetch_surfaces(spec, answers), SilentProgress()
        )
        found += [result.report.ttft_ms.p50, result.report.tpot_ms.p50]
    return np.log(found)


@pytest.mark.slow
@pytest.mark.skipif(not _SYSTEMS.exists(), reason="the shared measurements are not there")
@pytest.mark.parametrize("held", ["h100_sxm", "h200_sxm", "b200"])
def test_no_table_makes_simulated_serving_much_worse(
    trained: Mapping[SeriesKey, SeriesModel], held: str
) -> None:
    """With all tables answers on a device left out err at most a twentieth more than without one.

    Nor more than without all of a device. The truth is what the device's own tables say. No other
    product of a B200's chip is known.
    """
    truth = _simulate(trained, held)
    others = {key: model for key, model in trained.items() if key.device != held}
    places = {_place(key) for key in others} | {(key.device, "") for key in others}

    def error(left_out: _Place) -> float:
        device, framework = left_out
        known = {
            key: model
            for key, model in others.items()
            if key.device != device or framework not in ("", key.framework)
        }
        return float(np.abs(_simulate(known, held) - truth).mean())

    with_all = error(("none", ""))
    worse = {place: with_all / error(place) for place in sorted(places)}
    assert {} == {place: ratio for place, ratio in worse.items() if ratio > _MOST}
    assert min(worse.values()) < 0.95
