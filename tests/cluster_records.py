"""The record of a small cluster, written by hand: what every report of it must say can be counted.

Two pools on a clock in ms. `first` (engine 0) computes prompts, fails at 250 and is back at 300;
`rest` (engines 1 and 2) computes answers, and engine 2 is there from 200 on, held since 100.
Request 0 moves over, request 1 has an answer of one token, request 2 is lost with the failure,
request 3 was rejected, and request 4 began anew once before it moved over.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.cluster import ClusterSpec, ReplicaPool
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.slo import Slo
from foretoken.simulator.serving.record import (
    Ints,
    PoolRecord,
    ReplicaSpan,
    RequestOutcome,
    RequestRecord,
    ServingRecord,
    StepRecord,
    TokenRuns,
)

MS = 1_000_000

SCENARIO = ServingScenario(
    model=find_model("llama-3-8b"),
    device="h100_sxm",
    slo=Slo(ttft_ms=150),
    device_usd_per_hour=3.6,
    device_idle_w=100,
    device_busy_w=700,
    cluster=ClusterSpec(
        pools=(
            ReplicaPool(name="first", role="prefill"),
            ReplicaPool(
                name="rest",
                role="decode",
                num_replicas=2,
                layout=ParallelLayout(tp=2),
                device_usd_per_hour=7.2,
            ),
        )
    ),
)


def build_record() -> ServingRecord:
    """Return the record."""
    return ServingRecord(
        requests=_requests(),
        tokens=TokenRuns(
            request=_column([0, 0, 1, 4, 4]),
            first_step=_column([0, 0, 1, 3, 0]),
            stride=_column([1, 1, 1, 1, 1]),
            count=_column([1, 2, 1, 1, 1]),
            engine=_column([0, 1, 0, 0, 2]),
        ),
        steps=[
            _steps([(0, 100), (100, 200), (200, 240), (300, 400)], prefills=[0, 1, 2, 4]),
            _steps([(120, 150), (150, 180)]),
            _steps([(450, 500)]),
        ],
        num_kv_blocks=0,
        block_size=16,
        pools=[
            PoolRecord(
                name="first",
                first_engine=0,
                num_engines=1,
                num_kv_blocks=100,
                block_size=16,
                spans=[_span(0, 0, 250), _span(0, 250, 300, is_ready=False), _span(0, 300, 600)],
                num_failures=1,
                sent_bytes=1_000_000,
                port_busy_ns=50 * MS,
            ),
            PoolRecord(
                name="rest",
                first_engine=1,
                num_engines=2,
                num_kv_blocks=200,
                block_size=32,
                spans=[
                    # It drains from 400 on, and serves as before.
                    _span(1, 0, 400),
                    _span(1, 400, 600),
                    _span(2, 100, 200, is_ready=False),
                    _span(2, 200, 600),
                ],
                num_scale_ups=1,
                sent_bytes=1_000_000,
                port_busy_ns=45 * MS,
            ),
        ],
    )


def _requests() -> RequestRecord:
    done, lost, rejected = (
        RequestOutcome.COMPLETED,
        RequestOutcome.LOST,
        RequestOutcome.REJECTED,
    )
    times_ms: Mapping[str, Sequence[int]] = {
        "arrival_ns": [0, 100, 150, 160, 300],
        "queued_ns": [0, 100, 150, -1, 300],
        "scheduled_ns": [0, 100, 200, -1, 300],
        "first_token_ns": [100, 200, -1, -1, 400],
        "finished_ns": [180, 200, -1, -1, 500],
        "transferred_ns": [120, -1, -1, -1, 450],
    }
    return RequestRecord(
        **{
            name: _column([time * MS if time >= 0 else -1 for time in times])
            for name, times in times_ms.items()
        },
        num_prefill_tokens=_column([1000, 2000, 500, 500, 3000]),
        num_decode_tokens=_column([3, 1, 10, 10, 2]),
        num_preemptions=_column([0] * 5),
        num_cached_tokens=_column([0] * 5),
        num_loaded_tokens=_column([0] * 5),
        engine=_column([1, 0, -1, -1, 2]),
        slo_class=_column([-1] * 5),
        outcome=_column([done, done, lost, rejected, done]),
        prefill_engine=_column([0, -1, -1, -1, 0]),
        num_retries=_column([0, 0, 0, 0, 1]),
    )


def _steps(times_ms: Sequence[tuple[int, int]], prefills: Sequence[int] = ()) -> StepRecord:
    """Return steps of one request each, of 10 blocks: prefills of the given ones, or decodes."""
    start, end = (_column([time * MS for time in times]) for times in zip(*times_ms, strict=True))
    is_prefill = bool(prefills)
    size = len(times_ms)
    lengths = _requests().num_prefill_tokens[list(prefills)]
    return StepRecord(
        scheduled_ns=start,
        start_ns=start,
        end_ns=end,
        num_tokens=lengths if is_prefill else _column([1] * size),
        num_rows=_column([1] * size),
        num_decodes=_column([0 if is_prefill else 1] * size),
        num_prefills=_column([1 if is_prefill else 0] * size),
        decode_kv_tokens=_column([0 if is_prefill else 1001] * size),
        decode_kv_tokens_max=_column([0 if is_prefill else 1001] * size),
        num_running=_column([1] * size),
        num_waiting=_column([0] * size),
        num_used_blocks=_column([10] * size),
        num_preempted=_column([0] * size),
        prefill_step=_column(list(range(len(prefills)))),
        prefill_request=_column(list(prefills)),
        prefill_tokens=lengths,
        prefill_context=_column([0] * len(prefills)),
    )


def _span(engine: int, start_ms: int, end_ms: int, *, is_ready: bool = True) -> ReplicaSpan:
    return ReplicaSpan(engine=engine, start_ns=start_ms * MS, end_ns=end_ms * MS, is_ready=is_ready)


def _column(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
