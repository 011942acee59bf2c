"""Series that repeat others are in a version as points, and trained when a question needs them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from predictor_fakes import FakeCatalog, Rows, Train, columns_of, gemm_rows

from foretoken.domain.measurements.estimate import DType, LatencyQuery, LatencyReply, OperatorTable
from foretoken.predictor.config import BoosterConfig, PredictorConfig
from foretoken.predictor.learned_folder import LearnedFolder
from foretoken.predictor.series import Series
from foretoken.predictor.service import PredictorService
from foretoken.predictor.trainer import train_series
from foretoken.predictor.training_rows import read_series
from foretoken.wire.arrow import rows_to_table

_BETWEEN = {"m": 600, "n": 4096, "k": 4096}

Open = Callable[[], PredictorService]


def _rows() -> Rows:
    """Return what two frameworks measured, each a part of the grid, neither the default one."""
    first = gemm_rows(framework="sglang", framework_version="0.5.0")[:48]
    return [*first, *gemm_rows(lambda _: 3.0, framework="trtllm", framework_version="1.0.0")[16:]]


def _config(folder: Path) -> PredictorConfig:
    return PredictorConfig(state_folder=str(folder), booster=BoosterConfig(num_trees=20))


@pytest.fixture
def open_again(tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens one more predictor on the same files and catalog."""
    catalog = FakeCatalog(_rows())
    with ExitStack() as opened:

        def make() -> PredictorService:
            service = PredictorService(_config(tmp_path), catalog)
            service.open()
            opened.callback(service.close)
            return service

        yield make


@pytest.fixture
def union() -> Series:
    """Return the series that unites both frameworks."""
    found = read_series(rows_to_table(_rows()))
    return next(series for series in found if not series.key.framework)


def _ask(service: PredictorService, **query: str) -> LatencyReply:
    table = OperatorTable(operator="gemm", dtype=DType.FP16, columns=columns_of(_BETWEEN))
    return service.predict(LatencyQuery(device="a30", tables=(table,), **query))  # type: ignore[arg-type]


def _learned(folder: Path) -> list[str]:
    return sorted(LearnedFolder(folder / "learned"))


def test_a_question_about_one_framework_trains_nothing(
    open_again: Open, tmp_path: Path, train: Train
) -> None:
    service = open_again()
    train(service)
    assert _ask(service, framework="sglang").tables[0].latency_us[0] > 0
    assert [] == _learned(tmp_path)


def test_a_question_about_all_software_is_answered_by_all_points(
    open_again: Open, tmp_path: Path, train: Train, union: Series
) -> None:
    service = open_again()
    train(service)
    reply = _ask(service)
    expected = train_series(union, _config(tmp_path), 0)
    assert f"{union.num_points} points of gemm on a30 (fp16)" == reply.tables[0].basis
    assert [expected.content_hash] == _learned(tmp_path)


def test_the_next_process_finds_what_was_trained(
    open_again: Open, tmp_path: Path, train: Train
) -> None:
    service = open_again()
    train(service)
    before = _ask(service)
    file = next((tmp_path / "learned").rglob("*.series"))
    written = file.stat()
    after = _ask(open_again())
    assert before.tables[0].latency_us.tolist() == after.tables[0].latency_us.tolist()
    assert (written.st_ino, written.st_mtime_ns) == (file.stat().st_ino, file.stat().st_mtime_ns)


def test_a_damaged_file_is_trained_anew(open_again: Open, tmp_path: Path, train: Train) -> None:
    service = open_again()
    train(service)
    before = _ask(service)
    file = next((tmp_path / "learned").rglob("*.series"))
    file.write_bytes(b"not a model")
    after = _ask(open_again())
    assert before.tables[0].latency_us.tolist() == after.tables[0].latency_us.tolist()
    assert file.stat().st_size > len(b"not a model")


def test_what_was_asked_in_between_makes_no_other_version(
    open_again: Open, tmp_path: Path, train: Train
) -> None:
    service = open_again()
    first = train(service)
    _ask(service)
    again = train(service)
    assert first.model_version == again.model_version
    assert (0, 3) == (first.num_reused, again.num_reused)
    assert 1 == len(_learned(tmp_path))


def test_a_version_waits_for_a_question_where_there_is_a_newer_one(
    tmp_path: Path, train: Train
) -> None:
    """Another training leaves what was learned of it alone."""
    rows = [
        row
        for version in ("1.3.0rc9", "1.3.0rc10", "dev-1aa0e9")
        for row in gemm_rows(framework="trtllm", framework_version=version)
    ]
    service = PredictorService(_config(tmp_path), FakeCatalog(rows))
    service.open()
    report = train(service)
    assert [64] == [operator.num_rows for operator in report.operators]
    assert _ask(service, framework="trtllm 1.3.0rc10").tables[0].latency_us[0] > 0
    assert [] == _learned(tmp_path)
    assert _ask(service, framework="trtllm 1.3.0rc9").tables[0].latency_us[0] > 0
    (learned,) = _learned(tmp_path)
    train(service)
    assert [learned] == _learned(tmp_path)
    service.close()
