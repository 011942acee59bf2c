"""Versions of the latency models, shared by predictors through their catalog."""

import hashlib
import io
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from predictor_fakes import FakeCatalog, gemm_rows

from foretoken.domain.errors import (
    CorruptCatalogError,
    NotTrainedError,
    ServiceUnavailableError,
    UnknownModelVersionError,
)
from foretoken.domain.job import JobState
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import MeasurementFilter, Snapshot
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.model_store import StoredSeries, read_models
from foretoken.predictor.service import PredictorService

_CALL = {"m": [600], "n": [4096], "k": [4096]}


class LostCatalog(FakeCatalog):
    """A catalog that answers nothing."""

    def list_artifacts(self, kind: str) -> tuple[()]:
        """Fail as a connection does."""
        raise ServiceUnavailableError(f"no catalog to ask for {kind}")


class CountingCatalog(FakeCatalog):
    """A catalog that counts how often an artifact was read."""

    num_reads: int = 0

    def read_artifact(self, kind: str, name: str) -> Iterator[bytes]:
        """Count, and read."""
        self.num_reads += 1
        return super().read_artifact(kind, name)


class UnholdingCatalog(FakeCatalog):
    """A catalog that cannot hold a snapshot for anybody."""

    def create_snapshot(self, selection: MeasurementFilter, holder: str = "") -> Snapshot:
        """Fail where there is a holder."""
        if holder:
            raise ServiceUnavailableError("no answer")
        return super().create_snapshot(selection, holder)


@pytest.fixture
def start(tmp_path: Path) -> Callable[[FakeCatalog, str], PredictorService]:
    """Return what starts a predictor on a catalog, in a folder of that name."""

    def start(catalog: FakeCatalog, name: str) -> PredictorService:
        config = PredictorConfig(state_folder=str(tmp_path / name), refresh_s=0.02)
        service = PredictorService(config, catalog)
        service.open()
        return service

    return start


def _train(service: PredictorService, seed: int = 0) -> str:
    job = service.create_training(TrainRequest(seed=seed))
    *_, last = service.watch_job(job.job_id)
    assert JobState.SUCCEEDED is last.state
    return service.get_training_report(job.job_id).model_version


def _ask(service: PredictorService, version: str = "") -> tuple[str, float]:
    columns: Mapping[str, Sequence[int]] = _CALL
    table = OperatorTable(operator="gemm", dtype=DType.FP16, columns=columns)
    reply = service.predict(LatencyQuery(device="a30", tables=(table,), model_version=version))
    return reply.model_version, float(reply.tables[0].latency_us[0])


Start = Callable[[FakeCatalog, str], PredictorService]


def test_a_version_trained_by_one_predictor_answers_in_another(start: Start) -> None:
    catalog = FakeCatalog(gemm_rows())
    one, other = start(catalog, "one"), start(catalog, "other")
    version = _train(one)
    _wait_for(lambda: _ask(other)[0] == version)
    assert _ask(one) == _ask(other)
    one.close()
    other.close()


def test_what_was_pinned_answers_after_another_version_is_active(start: Start) -> None:
    service = start(FakeCatalog(gemm_rows()), "one")
    first = _train(service, seed=0)
    before = _ask(service)
    second = _train(service, seed=1)
    assert second == _ask(service)[0]
    assert before == _ask(service, first)
    assert before == _ask(service, first[:6])
    service.close()


def test_more_versions_than_are_held_in_memory_can_be_pinned(start: Start) -> None:
    service = start(FakeCatalog(gemm_rows()), "one")
    versions = [_train(service, seed) for seed in range(4)]
    for version in (*versions, *versions):
        assert version == _ask(service, version)[0]
    service.close()


def test_an_older_version_can_be_made_to_answer_again(start: Start) -> None:
    catalog = FakeCatalog(gemm_rows())
    one, other = start(catalog, "one"), start(catalog, "other")
    first = _train(one, seed=0)
    second = _train(one, seed=1)
    model = one.activate_model(first)
    assert (first, True) == (model.version, model.is_active)
    assert first == _ask(one)[0]
    _wait_for(lambda: _ask(other)[0] == first)
    assert {first: True, second: False} == {m.version: m.is_active for m in other.list_models()}
    one.close()
    other.close()


def test_an_unknown_version_is_an_error_that_names_those_there_are(start: Start) -> None:
    service = start(FakeCatalog(gemm_rows()), "one")
    version = _train(service)
    with pytest.raises(UnknownModelVersionError, match=version):
        _ask(service, "0123456789")
    with pytest.raises(UnknownModelVersionError):
        service.activate_model("")
    service.close()


def test_a_predictor_starts_without_its_catalog_from_its_copy(start: Start) -> None:
    service = start(FakeCatalog(gemm_rows()), "one")
    version = _train(service)
    before = _ask(service)
    service.close()
    again = start(LostCatalog(), "one")
    assert (version, before) == (_ask(again)[0], _ask(again))
    again.close()


def test_the_same_rows_and_seed_are_the_same_bytes(start: Start) -> None:
    """Trained twice, by processes that know nothing of each other."""
    versions, contents = [], []
    for name in ("one", "other"):
        catalog = FakeCatalog(gemm_rows())
        service = start(catalog, name)
        versions.append(_train(service))
        (artifact,) = catalog.list_artifacts("latency_models")
        contents.append(b"".join(catalog.read_artifact("latency_models", artifact.name)))
        service.close()
    assert versions[0] == versions[1]
    assert contents[0] == contents[1]


def test_a_predictor_starts_without_catalog_and_copy_as_if_nothing_was_trained(
    start: Start,
) -> None:
    service = start(LostCatalog(), "one")
    assert "" == _ask(service)[0]
    service.close()


def test_a_damaged_copy_is_copied_anew(start: Start, tmp_path: Path) -> None:
    catalog = CountingCatalog(gemm_rows())
    service = start(catalog, "one")
    version = _train(service)
    before = _ask(service)
    service.close()
    (tmp_path / "one" / "models" / f"{version}.models").write_text('{"revision"')
    again = start(catalog, "one")
    assert (1, before) == (catalog.num_reads, _ask(again))
    again.close()


def test_a_copy_damaged_in_a_series_is_copied_anew(start: Start, tmp_path: Path) -> None:
    """Series are read when they are asked for, but a copy is looked at as a whole."""
    catalog = CountingCatalog(gemm_rows())
    service = start(catalog, "one")
    version = _train(service)
    before = _ask(service)
    service.close()
    path = tmp_path / "one" / "models" / f"{version}.models"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    again = start(catalog, "one")
    assert (1, before) == (catalog.num_reads, _ask(again))
    again.close()


def test_what_cannot_be_read_of_the_version_in_use_is_trained_anew(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Else nothing would ever answer again: the advice is to train."""
    catalog = FakeCatalog(gemm_rows())
    service = start(catalog, "one")
    version = _train(service)
    answer = _ask(service)[1]
    artifact, content = catalog.artifacts["latency_models", version]
    junk = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as sound, zipfile.ZipFile(junk, "w") as archive:
        for name in sound.namelist():
            kept = sound.read(name) if name in ("index.json", "transfers") else b"junk"
            archive.writestr(name, kept)
    digest = hashlib.sha256(junk.getvalue()).hexdigest()
    catalog.store_artifact(
        replace(artifact, name="junk", content_hash=digest, is_active=False), [junk.getvalue()]
    )
    service.activate_model("junk")
    with pytest.raises(CorruptCatalogError, match="train again"):
        _ask(service)
    assert (version, answer) == (_train(service), _ask(service)[1])
    assert "trained anew: the model of gemm on a30 cannot be read" in caplog.text
    service.close()


def test_a_version_damaged_in_the_catalog_is_an_error_and_leaves_what_answers(
    start: Start,
) -> None:
    catalog = FakeCatalog(gemm_rows())
    service = start(catalog, "one")
    version = _train(service)
    damaged = b"no archive"
    artifact = replace(
        catalog.artifacts["latency_models", version][0],
        name="damaged",
        content_hash=hashlib.sha256(damaged).hexdigest(),
        num_bytes=len(damaged),
        is_active=False,
    )
    catalog.store_artifact(artifact, [damaged])
    catalog.store_artifact(replace(artifact, name="changed", content_hash="0" * 64), [damaged])
    for name in ("damaged", "changed"):
        with pytest.raises(CorruptCatalogError, match=name):
            _ask(service, name)
        with pytest.raises(CorruptCatalogError, match=name):
            service.activate_model(name)
    catalog.activate_artifact("latency_models", "damaged")
    other = start(catalog, "other")
    assert (version, "") == (_ask(service)[0], _ask(other)[0])
    service.activate_model(version)
    _wait_for(lambda: _ask(other)[0] == version)
    service.close()
    other.close()


@pytest.mark.parametrize("name", ["/abs", "../x", "..", "a/b", "", "a b"])
def test_a_version_whose_name_would_be_another_path_is_none(
    start: Start, tmp_path: Path, name: str
) -> None:
    """The catalog of an earlier release took any name."""
    name = str(tmp_path / "precious") if name == "/abs" else name
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    catalog = FakeCatalog(gemm_rows())
    service = start(catalog, "one")
    version = _train(service)
    content = catalog.artifacts["latency_models", version][1]
    artifact = replace(catalog.artifacts["latency_models", version][0], name=name)
    catalog.store_artifact(artifact, [content])
    catalog.activate_artifact("latency_models", name)
    assert [version] == [model.version for model in service.list_models()]
    if name:
        with pytest.raises(CorruptCatalogError, match="no model version"):
            service.activate_model(name)
    again = start(catalog, "one")
    service.close()
    again.close()
    assert version == (tmp_path / "one" / "models" / "active").read_text()
    assert {"models", "jobs"} == {path.name for path in (tmp_path / "one").iterdir()}
    found = {path.name for path in (tmp_path / "one/models").iterdir()}
    assert {f"{version}.models", "active"} == found
    assert ["mine"] == [path.read_text() for path in (tmp_path / "precious").iterdir()]


@pytest.mark.parametrize("text", ["{}", "[]", "null", "5", '{"snapshot_hash": 1, "num_rows": "x"}'])
def test_an_artifact_that_says_nothing_of_itself_is_left_out_of_the_versions(
    start: Start, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = FakeCatalog(gemm_rows())
    service = start(catalog, "one")
    version = _train(service)
    artifact, content = catalog.artifacts["latency_models", version]
    # Begins like the sound one, which keeps its name.
    other = replace(artifact, name=f"{version}x", metadata_json=text, is_active=False)
    catalog.store_artifact(other, [content])
    for _ in range(3):
        assert [version] == [model.version for model in service.list_models()]
    assert 1 == caplog.text.count("left out of the model versions")
    assert version == _ask(service, version)[0]
    with pytest.raises(CorruptCatalogError, match="is no model version"):
        service.activate_model(other.name)
    service.close()


def test_an_archive_that_unpacks_to_too_much_is_not_kept(start: Start, tmp_path: Path) -> None:
    catalog = FakeCatalog(gemm_rows())
    service = start(catalog, "one")
    version = _train(service)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(100 * 2**20))
    bomb = content.getvalue()
    artifact = replace(
        catalog.artifacts["latency_models", version][0],
        name="bomb",
        content_hash=hashlib.sha256(bomb).hexdigest(),
        is_active=False,
    )
    catalog.store_artifact(artifact, [bomb])
    with pytest.raises(CorruptCatalogError, match="unpacks to more than"):
        service.activate_model("bomb")
    assert not (tmp_path / "one" / "models" / "bomb.models").exists()
    service.close()


def test_a_series_is_loaded_when_it_is_first_asked_for(start: Start, tmp_path: Path) -> None:
    service = start(FakeCatalog([*gemm_rows(), *gemm_rows(device="a100_sxm_80")]), "one")
    version = _train(service)
    service.close()
    models = read_models(tmp_path / "one" / "models" / f"{version}.models")
    one, other = models.series
    loaded = models.series[one]
    assert loaded is models.series[one]
    assert loaded.series.num_points == next(h for h in models.heads if h.key == one).num_points
    damaged = StoredSeries(
        {head.key: head for head in models.heads},
        {head.content_hash: b"{}" for head in models.heads},
    )
    assert other in damaged
    with pytest.raises(CorruptCatalogError, match="train again"):
        damaged[other]


def test_what_did_not_change_is_neither_trained_nor_packed_again(start: Start) -> None:
    catalog = FakeCatalog(gemm_rows())
    service = start(catalog, "one")
    first = _train(service)
    catalog.rows += gemm_rows(dtype="bf16")
    job = service.create_training(TrainRequest())
    *_, last = service.watch_job(job.job_id)
    assert JobState.SUCCEEDED is last.state
    report = service.get_training_report(job.job_id)
    old, new = (_members(catalog, version) for version in (first, report.model_version))
    assert (1, 1) == (len(old), report.num_reused)
    assert old.items() < new.items()
    service.close()


def _members(catalog: FakeCatalog, version: str) -> dict[str, bytes]:
    """Return what a version's file has of each series."""
    content = b"".join(catalog.read_artifact("latency_models", version))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = set(archive.namelist()) - {"index.json", "transfers"}
        return {name: archive.read(name) for name in names}


def test_models_of_another_release_are_not_read(start: Start, tmp_path: Path) -> None:
    """Their features mean something else: the answers would be wrong, not absent."""
    service = start(FakeCatalog(gemm_rows()), "one")
    path = tmp_path / "one" / "models" / f"{_train(service)}.models"
    service.close()
    for index in ({"index.json": '{"revision": [0, 0]}'}, {"manifest.json": "{}"}):
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in index.items():
                archive.writestr(name, text)
        with pytest.raises(NotTrainedError, match="another release"):
            read_models(path)


def test_a_version_whose_rows_cannot_be_held_does_not_answer(start: Start) -> None:
    service = start(UnholdingCatalog(gemm_rows()), "one")
    *_, last = service.watch_job(service.create_training(TrainRequest()).job_id)
    assert (JobState.FAILED, "") == (last.state, _ask(service)[0])
    service.close()


def test_the_beginning_of_a_version_is_not_loaded_again_each_time(
    start: Start, tmp_path: Path
) -> None:
    """Asked for once, its copy is not needed any more."""
    service = start(FakeCatalog(gemm_rows()), "one")
    first, second = _train(service, seed=0), _train(service, seed=1)
    before = _ask(service, first[:6])
    for version in (first, second):
        (tmp_path / "one" / "models" / f"{version}.models").unlink()
    assert (before, second) == (_ask(service, first[:6]), _ask(service, second[:6])[0])
    service.close()


def _wait_for(is_true: Callable[[], bool]) -> None:
    """Wait for the next looks at the catalog, which come every few hundredths of a second."""
    for _ in range(500):
        if is_true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true within 5 s")
