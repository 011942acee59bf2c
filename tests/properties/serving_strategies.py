"""Random workloads and engines, small enough that many run and tight enough that all rules show."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.domain.plugins import scan_modules
from foretoken.simulator.cost.tables import CostTables, flat_tables
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.serving.speculation import Speculation
from foretoken.simulator.workload.request_plan import RequestPlan

BYTES_PER_TOKEN = 100
SCHEDULERS = sorted(scan_modules("foretoken.simulator.engine.schedulers", "select"))


@dataclass(frozen=True)
class Case:
    """A workload, and what it runs on."""

    plan: RequestPlan
    setup: DeploymentSetup
    tables: CostTables

    def run(self) -> ServingRecord:
        """Return what the engines did."""
        return run_deployment(self.plan, self.setup, self.tables, lambda _: None)


@st.composite
def plans(draw: st.DrawFn) -> RequestPlan:
    """Draw requests that arrive together or apart, follow each other and share content."""
    gaps_ns = st.sampled_from((0, 0, 700, 9_000, 31_000))
    rows = draw(
        st.lists(
            st.tuples(gaps_ns, st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=20
        )
    )
    gaps, prefill, decode = (_ints(column) for column in zip(*rows, strict=True))
    count = len(rows)
    hash_block_tokens = draw(st.sampled_from((2, 3, 8, 16)))
    num_hashes = [draw(st.integers(0, int(tokens) // hash_block_tokens)) for tokens in prefill]
    if draw(st.booleans()):
        num_hashes = [0] * count
    follows = _ints([-1] * count)
    if draw(st.booleans()):
        follows = _ints([draw(st.integers(-1, index - 1)) for index in range(count)])
    joins = None
    if count > 1 and draw(st.booleans()):
        later = st.integers(1, count - 1).flatmap(
            lambda index: st.tuples(st.just(index), st.integers(0, index - 1))
        )
        joins = _ints(draw(st.lists(later, max_size=count))).reshape(-1, 2)
    hashes = st.lists(st.integers(0, 2), min_size=sum(num_hashes), max_size=sum(num_hashes))
    return RequestPlan(
        arrival_ns=np.cumsum(gaps),
        num_prefill_tokens=prefill,
        num_decode_tokens=decode,
        follows=follows,
        think_ns=_draw_column(draw, st.sampled_from((0, 4_000)), count),
        slo_class=_ints([-1] * count),
        priority=_draw_column(draw, st.integers(0, 2), count),
        stream=_draw_column(draw, st.integers(0, draw(st.integers(0, count))), count),
        prefix_stream=_draw_column(draw, st.integers(0, 1), count),
        prefix_tokens=_draw_column(draw, st.integers(0, 40), count),
        hash_offsets=np.concatenate([[0], np.cumsum(_ints(num_hashes))]),
        hashes=_ints(draw(hashes)),
        hash_block_tokens=hash_block_tokens,
        concurrency=draw(st.sampled_from((0, 0, 1, 3, 8))),
        joins=joins,
    )


@st.composite
def profiles(draw: st.DrawFn, scheduler: str = "chunked_prefill") -> EngineProfile:
    """Draw the rules of an engine."""
    return EngineProfile(
        name="drawn",
        engine="drawn",
        scheduler=scheduler,
        max_num_seqs=draw(st.sampled_from((1, 3, 8, 16))),
        max_num_batched_tokens=draw(st.sampled_from((16, 64, 512))),
        max_chunk_tokens=draw(st.sampled_from((0, 0, 7))),
        max_num_prefills=draw(st.sampled_from((0, 0, 1))),
        block_size=draw(st.sampled_from((1, 2, 4, 16))),
        admission=draw(st.sampled_from(("chunk", "prompt", "answer"))),
        watermark_ratio=draw(st.sampled_from((0.0, 0.1))),
        has_prefix_caching=draw(st.booleans()),
        has_async_scheduling=draw(st.booleans()),
        has_priority_scheduling=draw(st.booleans()),
        host_us=draw(st.sampled_from((0.0, 3.0))),
        host_us_per_seq=draw(st.sampled_from((0.0, 0.2))),
        admission_us_per_token=draw(st.sampled_from((0.0, 0.3))),
        output_us=draw(st.sampled_from((0.0, 1.0))),
        output_us_per_seq=draw(st.sampled_from((0.0, 0.1))),
        output_us_per_past_token=draw(st.sampled_from((0.0, 0.01))),
        frontend_ms=draw(st.sampled_from((0.0, 0.01))),
        frontend_us_per_token=draw(st.sampled_from((0.0, 0.1, 5.0))),
        executor_us_per_token=draw(st.sampled_from((0.0, 0.3, 3.0))),
    )


@st.composite
def cases(draw: st.DrawFn, scheduler: str = "chunked_prefill") -> Case:
    """Draw a workload and engines; the KV cache holds between less than a request and them all."""
    plan, profile = draw(plans()), draw(profiles(scheduler))
    longest = int((plan.num_prefill_tokens + plan.num_decode_tokens).max())
    num_needed = -(-longest // profile.block_size)
    setup = DeploymentSetup(
        profile=profile,
        num_kv_blocks=max(1, int(num_needed * draw(st.sampled_from((0.8, 1, 1.3, 3, 10))))),
        num_engines=draw(st.sampled_from((1, 1, 2, 3))),
        is_lock_step=draw(st.booleans()),
        router=draw(st.sampled_from(("round_robin", "least_loaded"))),
        max_context=draw(st.sampled_from((80, 10**6))),
    )
    return Case(
        plan, setup, make_tables(draw(st.sampled_from((0.5, 5.0))), draw(st.integers(1, 3)))
    )


@st.composite
def rich_cases(draw: st.DrawFn, scheduler: str = "chunked_prefill") -> Case:
    """Draw a case with rules that few have: tiers, swapping, drafts, padding, prompts that wait."""
    case = draw(cases(scheduler))
    profile = replace(
        case.setup.profile,
        counts_padding=draw(st.booleans()),
        max_decode_run=draw(st.sampled_from((0, 1, 3, 10))),
        mixes_prefill=draw(st.booleans()),
        deals_requests=draw(st.booleans()),
        batch_wait_iters=draw(st.sampled_from((0, 2, 9))),
        batch_wait_tokens_ratio=draw(st.sampled_from((0.3, 1.0))),
        balance_timeout_iters=draw(st.sampled_from((0, 3, 9))),
        balance_wait_iters=draw(st.sampled_from((0, 2))),
        prefill_interval=draw(st.sampled_from((1, 1, 4))),
        receive_interval=draw(st.sampled_from((1, 1, 5))),
        preemption=draw(st.sampled_from(("recompute", "swap"))),
    )
    has_draft = len(case.tables.tokens_us) == 1
    setup = replace(
        case.setup,
        profile=profile,
        kv_bytes_per_token=BYTES_PER_TOKEN,
        kv_tiers=draw(tiers(profile)),
        speculation=draw(st.none() | speculations(has_draft=has_draft)),
    )
    return replace(case, setup=setup)


@st.composite
def tiers(draw: st.DrawFn, profile: EngineProfile) -> tuple[KvTier, ...]:
    """Draw up to three tiers below an engine, or stores that all share."""
    drawn = draw(st.just([]) | st.lists(_tiers(profile.block_size), min_size=1, max_size=3))
    is_shared = profile.preemption == "recompute" and draw(st.booleans())
    return tuple(replace(tier, is_shared=is_shared) for tier in drawn)


@st.composite
def speculations(draw: st.DrawFn, *, has_draft: bool = True) -> Speculation:
    """Draw how an engine speculates; a draft that takes time is on one stage."""
    num_drafts = draw(st.integers(1, 7))
    ratio = st.sampled_from((0.0, 0.3, 0.8, 1.0))
    return Speculation(
        acceptance_ratios=tuple(draw(st.lists(ratio, min_size=num_drafts, max_size=num_drafts))),
        num_lookahead_tokens=draw(st.sampled_from((0, num_drafts))),
        draft=draw(st.none() | st.just(flat_tables(1.0, 0.1))) if has_draft else None,
        seed=draw(st.integers(0, 3)),
    )


def _tiers(block_size: int) -> st.SearchStrategy[KvTier]:
    """Draw a tier of no block, a few or more than there are."""
    rates = st.sampled_from((1e9, 1e8, 1e7))
    return st.builds(
        KvTier,
        name=st.just("tier"),
        capacity_bytes=st.sampled_from((0, 1, 3, 8, 40, 10**6)).map(
            lambda count: count * BYTES_PER_TOKEN * block_size + 1
        ),
        read_bytes_per_s=rates,
        write_bytes_per_s=rates,
    )


def make_tables(step_us: float, num_stages: int) -> CostTables:
    """Return tables in which every stage is a little slower than the one before."""
    tables = flat_tables(step_us, 0.7, us_per_kv_token=0.013)
    columns: dict[str, Any] = {
        name: np.concatenate([column * (1 + 0.3 * stage) for stage in range(num_stages)])
        for name, column in tables._asdict().items()
        if name.endswith("_us")
    }
    return tables._replace(**columns, shared=np.repeat(tables.shared, num_stages, axis=0))


def _draw_column(draw: st.DrawFn, values: st.SearchStrategy[int], count: int) -> NDArray[np.int64]:
    return _ints(draw(st.lists(values, min_size=count, max_size=count)))


def _ints(values: Any) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
