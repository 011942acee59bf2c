"""What every scheduler makes of drawn workloads, alone on the clock: kept, besides the laws.

Engines skip ahead where a scheduler says that it would choose the same; that is in these runs.
"""

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from golden_table import check_golden

from foretoken.domain.frameworks.engine import EngineProfile, find_engine
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import RequestPlan, plan_requests

_ENGINES: dict[str, dict[str, Any]] = {
    "faster-transformer": {},
    "faster-transformer unpadded": {"counts_padding": False},
    "lightllm": {"max_decode_run": 3},
    "lightllm eager": {"max_decode_run": 0},
    "lightllm paged": {"max_decode_run": 5, "block_size": 8},
    "orca": {},
    "plain": {},
    "sarathi": {},
    "sglang-0.5": {},
    "sglang-0.5 mixed": {"mixes_prefill": True},
    "sglang-0.5 paged": {"block_size": 8},
    "trtllm-1.0": {},
    "vllm-0.19": {},
    "vllm-v0": {},
    "vllm-v0 padded": {"counts_padding": True},
}
# Tokens that the cache holds, requests at once, tokens of a step.
_LIMITS = {
    "room": (64_000, 32, 512),
    "pressure": (640, 12, 256),
    "few tokens": (1_024, 8, 72),
    # For the share of answers that SGLang reserves, which falls slowly.
    "long answers": (3_200, 16, 512),
}
_NUM_REQUESTS = 40


def test_every_scheduler_runs_drawn_workloads_as_kept() -> None:
    """Steps, requests taken back, the end in ms, and a checksum of when each came to its tokens."""
    rows = [
        {"engine": engine, "workload": name, **_describe(_run(engine, rules, name))}
        for engine, rules in _ENGINES.items()
        for name in _LIMITS
        if name != "long answers" or engine.startswith("sglang")
    ]
    check_golden("schedulers_drawn", rows)


def _run(engine: str, rules: dict[str, Any], name: str) -> ServingRecord:
    num_tokens, num_seqs, num_batched = _LIMITS[name]
    profile: EngineProfile = replace(
        find_engine(engine.partition(" ")[0]),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_batched,
        has_prefix_caching=name == "room",
        **rules,
    )
    num_blocks = num_tokens // profile.block_size
    setup = DeploymentSetup(profile=profile, num_kv_blocks=num_blocks)
    tables = flat_tables(900.0, 7.0, us_per_kv_token=0.3)
    return run_deployment(_draw_plan(name), setup, tables, lambda _: None)


def _draw_plan(name: str) -> RequestPlan:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    longest, answer = (64, 40) if name == "few tokens" else (200, 90)
    arrival_ns = np.cumsum(rng.integers(0, 3, _NUM_REQUESTS) * rng.integers(1, 9_000_000))
    plan = plan_requests(
        arrival_ns,
        rng.integers(1, longest, _NUM_REQUESTS),
        rng.integers(1, 1_200 if name == "long answers" else answer, _NUM_REQUESTS),
    )
    if name != "room":
        return plan
    # Half of them begin alike.
    streams = np.where(rng.integers(0, 2, _NUM_REQUESTS) == 1, 0, -1)
    return replace(plan, prefix_stream=streams, prefix_tokens=np.where(streams == 0, 150, 0))


def _describe(record: ServingRecord) -> dict[str, Any]:
    requests = record.requests
    return {
        "steps": len(record.steps[0].num_tokens),
        "preemptions": int(requests.num_preemptions.sum()),
        "end_ms": f"{requests.finished_ns.max() / 1e6:.3f}",
        "checksum": f"{zlib.crc32(b''.join(_times(record))):08x}",
    }


def _times(record: ServingRecord) -> Iterator[bytes]:
    requests = record.requests
    for column in (requests.scheduled_ns, requests.first_token_ns, requests.finished_ns):
        yield np.ascontiguousarray(column, dtype="<i8").tobytes()
