"""A catalog's process ends in the middle of an import and is started again."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import CatalogClient
from foretoken.domain.measurements.measurement import (
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunKind,
)
from foretoken.wire.arrow import rows_to_table

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_NUM_BATCHES = 200
_NUM_ROWS = 20
_RUN = Run(run_id="restarted", kind=RunKind.IMPORT, tool="tests", content_hash="abc")


class _Process:
    """A catalog that can be ended and started again where it was."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._home = home
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "foretoken.app", "--home", str(self._home),
                "serve", "catalog", "--port", str(self.port), "--metrics-port", "-1",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("serving ")

    def restart(self, by: signal.Signals) -> None:
        self.end(by)
        self.start()

    def end(self, by: signal.Signals) -> None:
        with self._process as process:
            process.send_signal(by)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[_Process]:
    process = _Process(tmp_path)
    yield process
    process.end(signal.SIGTERM)


def _batch(index: int) -> MeasurementBatch:
    rows = [
        {
            "operator": "gemm",
            "phase": "forward",
            "dtype": "bf16",
            "dims": {"m": 1 + index * _NUM_ROWS + place, "n": 4096, "k": 4096},
            "device": "a30",
            "latency_us_median": 50.0 + 0.3 * (index * _NUM_ROWS + place),
            "status": "ok",
        }
        for place in range(_NUM_ROWS)
    ]
    last = _NUM_BATCHES - 1
    return MeasurementBatch(batch_index=index, rows=rows_to_table(rows), is_last=index == last)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("at", [100, _NUM_BATCHES - 1], ids=["middle", "end"])
def test_an_import_goes_on_where_the_catalog_ended(
    by: signal.Signals, at: int, process: _Process
) -> None:
    """Every batch has one receipt, in order, and no row is lost or there twice."""
    restart = threading.Thread(target=process.restart, args=(by,))

    def send() -> Iterator[MeasurementBatch]:
        for index in range(_NUM_BATCHES):
            if index == at:
                restart.start()
            yield _batch(index)

    options = ChannelOptions(address=f"127.0.0.1:{process.port}")
    with CatalogClient.connect(options) as client:
        receipts = list(client.record(_RUN, send()))
        restart.join()
        rows = pa.table(client.read_measurements(MeasurementFilter(include_flagged=True)))
    assert list(range(_NUM_BATCHES)) == [receipt.batch_index for receipt in receipts]
    expected = list(range(1, _NUM_BATCHES * _NUM_ROWS + 1))
    assert expected == [dict(dims)["m"] for dims in rows.column("dims").to_pylist()]
