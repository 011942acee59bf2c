"""What the wire costs: plain columns against Arrow, a remote call against a direct one.

Prints medians of repeated calls on a loopback connection.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from foretoken.api.types.v1 import scenario_pb2
from foretoken.catalog import servicer as catalog_servicer
from foretoken.client.services import CatalogClient, PredictorClient
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.predictor import servicer as predictor_servicer
from foretoken.wire import codec, columns

sys.path.append(str(Path(__file__).resolve().parents[1] / "contract"))

from contract_fakes import FakeCatalog, FakePredictor
from contract_scenarios import SERVING
from loopback import serve

NUM_DIMS = 6


def time_ms(call: Callable[[], object], num_calls: int = 15) -> float:
    """Return the median time of a call in ms, after two to warm up."""
    times_ms = []
    for _ in range(num_calls + 2):
        start_s = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return statistics.median(times_ms[2:])


def make_query(num_rows: int) -> LatencyQuery:
    """Return a query of one table with that many rows."""
    rng = np.random.default_rng(0)
    dims = {f"d{index}": rng.integers(1, 2**16, num_rows) for index in range(NUM_DIMS)}
    table = OperatorTable(operator="gemm", dtype=DType.BF16, columns=dims)
    return LatencyQuery(device="a30", tables=(table,))


def compare_forms(client: PredictorClient) -> None:
    """Print the time of a query as plain columns and as Arrow, by its rows."""
    _write(f"{'rows':>8} {'plain ms':>9} {'arrow ms':>9} {'plain/arrow':>11}")
    chosen = columns.ARROW_ROWS
    for num_rows in (1, 10, 100, 300, 1_000, 3_000, 10_000):
        query = make_query(num_rows)
        times_ms = []
        for threshold in (num_rows + 1, 0):
            columns.ARROW_ROWS = threshold
            times_ms.append(time_ms(lambda query=query: client.predict(query)))
        ratio = times_ms[0] / times_ms[1]
        _write(f"{num_rows:8} {times_ms[0]:9.2f} {times_ms[1]:9.2f} {ratio:11.2f}")
    columns.ARROW_ROWS = chosen


def compare_remote(direct: FakePredictor, client: PredictorClient) -> None:
    """Print what a loopback call costs over a direct one."""
    query = make_query(1)
    direct_ms = time_ms(lambda: direct.predict(query), 200)
    remote_ms = time_ms(lambda: client.predict(query), 200)
    times = f"direct {direct_ms * 1e3:.0f} µs, remote {remote_ms * 1e3:.0f} µs"
    _write(f"one row: {times}, ratio {remote_ms / direct_ms:.0f}")


def record_rows(client: CatalogClient) -> None:
    """Print rows/s of a recording into a catalog that keeps them in memory."""
    for num_rows in (1_000, 10_000, 100_000):
        rows = pa.table({f"c{index}": np.arange(num_rows) for index in range(25)})
        batches = [MeasurementBatch(batch_index=index, rows=rows) for index in range(10)]
        run = Run(run_id=f"run-{num_rows}", kind=RunKind.PROFILE, tool="bench")
        start_s = time.perf_counter()
        num_receipts = sum(1 for _ in client.record(run, batches))
        rate = num_receipts * num_rows / (time.perf_counter() - start_s)
        _write(f"record: {num_rows} rows of 200 bytes a batch, {rate:,.0f} rows/s")


def translate_trace() -> None:
    """Print the time to translate a scenario that brings its trace."""
    requests = tuple(
        Request(arrival_s=index * 0.1, num_prefill_tokens=512, num_decode_tokens=128)
        for index in range(20_000)
    )
    scenario = ServingScenario(
        model=SERVING.model, device="a30", workload=WorkloadSpec(trace_requests=requests)
    )
    message = codec.encode(scenario, scenario_pb2.ServingScenario)
    encode_ms = time_ms(lambda: codec.encode(scenario, scenario_pb2.ServingScenario), 5)
    decode_ms = time_ms(lambda: codec.decode(message, ServingScenario), 5)
    size_mib = message.ByteSize() / 2**20
    _write(f"trace of 20,000 requests: encode {encode_ms:.0f} ms, decode {decode_ms:.0f} ms")
    _write(f"  {size_mib:.2f} MiB")


def main() -> None:
    """Run all."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    predictor = FakePredictor(Path(os.devnull))
    with (
        serve(predictor_servicer.register, predictor) as options,
        PredictorClient.connect(options) as client,
    ):
        compare_forms(client)
        compare_remote(predictor, client)
    with (
        serve(catalog_servicer.register, FakeCatalog()) as options,
        CatalogClient.connect(options) as catalog,
    ):
        record_rows(catalog)
    translate_trace()


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
