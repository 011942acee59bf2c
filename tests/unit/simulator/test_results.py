"""Results in the catalog: whole, listed newest first, never the reason for a job to fail."""

import dataclasses
import json
from pathlib import Path

import pytest

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.facade import Foretoken
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.result import RESULT_ARTIFACT
from foretoken.domain.results.training_report import TrainingReport
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.service import PredictorService
from foretoken.simulator.config import SimulatorConfig
from foretoken.simulator.service import SimulatorService
from foretoken.wire.result_file import pack_report, unpack_report

_SCENARIO = TrainingScenario(
    name="small", model=find_model("tiny-llama"), device="a30", sequence_length=128
)


def _simulate(folder: Path, catalog: CatalogService, scenarios: int, max_kept: int) -> list[str]:
    """Return the job ids of as many training steps, simulated with a catalog."""
    predictor = PredictorService(PredictorConfig(state_folder=str(folder / "p")), catalog)
    predictor.open()
    config = SimulatorConfig(state_folder=str(folder / "s"), max_kept_results=max_kept)
    simulator = SimulatorService(config, predictor, catalog)
    simulator.open()
    try:
        port = Foretoken(simulator=simulator)
        return [port.simulate_training(_SCENARIO).job_id for _ in range(scenarios)]
    finally:
        simulator.close()
        predictor.close()


@pytest.fixture
def config(tmp_path: Path) -> CatalogConfig:
    return CatalogConfig(path=str(tmp_path / "c.duckdb"), state_folder=str(tmp_path / "c"))


def test_a_result_comes_back_whole_from_the_catalog(tmp_path: Path, config: CatalogConfig) -> None:
    catalog = CatalogService(config)
    catalog.open()
    (job_id,) = _simulate(tmp_path, catalog, 1, max_kept=10)
    (artifact,) = catalog.list_artifacts(RESULT_ARTIFACT)
    content = b"".join(catalog.read_artifact(RESULT_ARTIFACT, job_id))
    catalog.close()
    report = unpack_report(content, TrainingReport)
    assert isinstance(report, TrainingReport)
    assert len(report.spans.stage) > 0
    known = json.loads(artifact.metadata_json)
    assert {"job_id": job_id, "kind": "training", "title": "small: tiny-llama on 1 a30"} == {
        key: known[key] for key in ("job_id", "kind", "title")
    }
    assert report == unpack_report(pack_report(report), TrainingReport)


def test_only_the_newest_are_kept(tmp_path: Path, config: CatalogConfig) -> None:
    catalog = CatalogService(config)
    catalog.open()
    job_ids = _simulate(tmp_path, catalog, 3, max_kept=2)
    kept = {artifact.name for artifact in catalog.list_artifacts(RESULT_ARTIFACT)}
    catalog.close()
    assert set(job_ids[1:]) == kept


def test_a_catalog_that_refuses_fails_no_job(tmp_path: Path, config: CatalogConfig) -> None:
    """A catalog that takes no file of that size: the job still has its result."""
    small = CatalogService(dataclasses.replace(config, max_artifact_bytes=10))
    small.open()
    (job_id,) = _simulate(tmp_path, small, 1, max_kept=2)
    kept = small.list_artifacts(RESULT_ARTIFACT)
    small.close()
    assert (True, ()) == (bool(job_id), kept)


def test_another_file_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not a result"):
        unpack_report(b"something else", TrainingReport)
