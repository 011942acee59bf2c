"""CPU time of the report of 100,000 requests over 1.5 million steps, apart from their simulation.

The record is drawn, not simulated: its sizes are those of a long run, its numbers are not.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from foretoken.domain.lowering.memory import ServingMemory
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.slo import Slo
from foretoken.domain.results.report import ServingReport
from foretoken.simulator.serving.outcome import build_report
from foretoken.simulator.serving.record import (
    RequestRecord,
    ServingRecord,
    StepRecord,
    TokenRuns,
)
from foretoken.simulator.serving.step_cost import StepAccount
from foretoken.simulator.serving.tables import build_tables

NUM_REQUESTS = 100_000
NUM_STEPS = 1_500_000


def main() -> None:
    """Print the times."""
    record = draw_record(NUM_REQUESTS, NUM_STEPS)
    scenario = ServingScenario(
        model=find_model("llama-3-8b"),
        device="h100_sxm",
        slo=Slo(ttft_ms=500, itl_ms=50),
        device_idle_w=100,
        device_busy_w=600,
    )
    memory = ServingMemory(
        usable_bytes=72e9, weights_bytes=16e9, activations_bytes=2e9, kv_bytes_per_token=131072
    )
    account = StepAccount(
        time_s_by_group={"gemm": 1e4},
        time_s_by_provenance={"interpolated": 1e4},
        stage_busy_s=(1e4,),
        low_s=9e3,
        high_s=1.1e4,
    )

    def report() -> ServingReport:
        return build_report(ServingReport(), scenario, record, [account], [[memory]])

    report()  # compiles
    _time("report", report)
    _time("tables", lambda: build_tables(record, scenario))


def _time(name: str, work: Callable[[], object]) -> None:
    start = time.process_time()
    work()
    print(f"{name}: {time.process_time() - start:.2f} CPU s")


def draw_record(num_requests: int, num_steps: int) -> ServingRecord:
    """Return a record in which requests begin evenly and decode without a break."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 400, num_requests)
    first = np.sort(generator.integers(0, num_steps - 400, num_requests))
    end_ns = np.cumsum(generator.integers(8_000_000, 40_000_000, num_steps))
    start_ns = np.concatenate(([0], end_ns[:-1]))
    scheduled = start_ns[first]
    zero = np.zeros(num_requests, dtype=np.int64)
    changes = np.bincount(first, minlength=num_steps + 1) - np.bincount(
        first + lengths, minlength=num_steps + 1
    )
    running = np.cumsum(changes)[:num_steps]
    prompts = generator.integers(1, 2000, num_requests)
    pieces: dict[str, Any] = {
        "prefill_step": first,
        "prefill_request": np.arange(num_requests),
        "prefill_tokens": prompts,
        "prefill_context": zero,
    }
    return ServingRecord(
        requests=RequestRecord(
            arrival_ns=np.maximum(scheduled - generator.integers(0, 10**9, num_requests), 0),
            queued_ns=scheduled,
            scheduled_ns=scheduled,
            first_token_ns=end_ns[first],
            finished_ns=end_ns[first + lengths - 1],
            num_prefill_tokens=prompts,
            num_decode_tokens=lengths,
            num_preemptions=zero,
            num_cached_tokens=zero,
            num_loaded_tokens=zero,
            engine=zero,
            slo_class=zero - 1,
            outcome=zero + 1,
        ),
        tokens=TokenRuns(
            request=np.arange(num_requests), first_step=first, stride=zero + 1, count=lengths
        ),
        steps=[
            StepRecord(
                scheduled_ns=start_ns,
                start_ns=start_ns,
                end_ns=end_ns,
                num_tokens=running + 100,
                num_rows=running,
                num_decodes=running,
                num_prefills=np.bincount(first, minlength=num_steps),
                decode_kv_tokens=running * 700,
                decode_kv_tokens_max=running * 0 + 2400,
                num_running=running,
                num_waiting=running // 4,
                num_used_blocks=running * 45,
                num_preempted=running * 0,
                **pieces,
            )
        ],
        num_kv_blocks=20_000,
        block_size=16,
    )


if __name__ == "__main__":
    main()
