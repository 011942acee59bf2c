"""What holds for every workload, whatever arrives and however long it is."""

from dataclasses import fields, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.requests.slo import SloClass
from foretoken.domain.requests.workload import LengthSpec, Request, SessionSpec, WorkloadSpec
from foretoken.simulator.workload.request_plan import NONE, RequestPlan
from foretoken.simulator.workload.requests import resolve_workload

_CLASSES = (SloClass(name="gold", share_ratio=0.3, priority=1), SloClass(name="b", share_ratio=0.2))

_LENGTHS = st.one_of(
    st.builds(LengthSpec, mean=st.integers(1, 500)),
    st.builds(
        LengthSpec,
        kind=st.sampled_from(["uniform", "zipf"]),
        minimum=st.integers(1, 20),
        maximum=st.integers(20, 300),
        spread=st.floats(0, 3),
    ),
    st.builds(
        LengthSpec,
        kind=st.just("lognormal"),
        mean=st.integers(1, 500),
        spread=st.floats(0, 3),
        maximum=st.sampled_from([0, 50, 4000]),
    ),
    st.builds(
        LengthSpec,
        kind=st.just("empirical"),
        values=st.lists(st.integers(1, 900), min_size=1, max_size=5).map(tuple),
    ),
)
_ARRIVALS = st.sampled_from(
    [
        ("poisson", {}),
        ("constant", {}),
        ("gamma", {"cv": "2.5"}),
        ("markov", {"rate_ratios": "0, 3", "dwell_s": "2, 1"}),
        ("closed_loop", {"concurrency": "3", "ramp_s": "1"}),
        ("closed_loop", {"concurrency": "3", "num_warmup": "5", "resume_s": "2"}),
    ]
)
_SESSIONS = st.one_of(
    st.none(),
    st.builds(
        SessionSpec,
        turns=st.builds(
            LengthSpec, kind=st.just("uniform"), minimum=st.just(1), maximum=st.integers(1, 6)
        ),
        think_s=st.floats(0, 10),
        shared_prefix_tokens=st.integers(0, 70),
        num_shared_prefixes=st.integers(1, 3),
    ),
)
_SYNTHETIC = st.builds(
    lambda arrival, **rest: WorkloadSpec(arrival=arrival[0], arrival_options=arrival[1], **rest),
    arrival=_ARRIVALS,
    rate_rps=st.floats(0.01, 1000),
    num_requests=st.integers(1, 60),
    prefill=_LENGTHS,
    decode=_LENGTHS,
    sessions=_SESSIONS,
)
_BLOCK_TOKENS = 16


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    prompt = draw(st.integers(1, 200))
    num_hashes = draw(st.integers(0, -(-prompt // _BLOCK_TOKENS)))
    return Request(
        arrival_s=draw(st.floats(0, 100)),
        num_prefill_tokens=prompt,
        num_decode_tokens=draw(st.integers(1, 100)),
        block_hashes=tuple(
            draw(st.lists(st.integers(0, 9), min_size=num_hashes, max_size=num_hashes))
        ),
        session=draw(st.integers(0, 3)),
        think_s=draw(st.floats(0, 5)),
        slo_class=draw(st.sampled_from(["", "gold", "b"])),
    )


_TRACES = st.builds(
    WorkloadSpec,
    arrival=st.just("trace"),
    trace_requests=st.lists(_requests(), min_size=1, max_size=20).map(tuple),
    hash_block_tokens=st.just(_BLOCK_TOKENS),
)
_ANY = st.one_of(_SYNTHETIC, _TRACES)
_SEEDS = st.integers(0, 2**32)


def _columns(plan: RequestPlan) -> dict[str, object]:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()}


@given(_ANY, _SEEDS)
def test_a_plan_is_in_order_and_refers_backwards(spec: WorkloadSpec, seed: int) -> None:
    plan = resolve_workload(spec, _CLASSES, seed)
    indices = np.arange(plan.num_requests)
    assert (np.diff(plan.arrival_ns) >= 0).all()
    assert (plan.arrival_ns >= 0).all()
    assert ((plan.follows == NONE) | ((plan.follows >= 0) & (plan.follows < indices))).all()
    assert (plan.think_ns[plan.follows == NONE] == 0).all()
    followed = plan.follows[plan.follows != NONE]
    assert len(set(followed.tolist())) == len(followed)
    assert (plan.num_prefill_tokens >= 1).all()
    assert (plan.num_decode_tokens >= 1).all()
    assert {"int64"} == {
        str(value.dtype)
        for field in fields(plan)
        if isinstance(value := getattr(plan, field.name), np.ndarray)
    }


@given(_ANY, _SEEDS)
def test_the_same_seed_gives_the_same_plan(spec: WorkloadSpec, seed: int) -> None:
    first, again = (resolve_workload(spec, _CLASSES, seed) for _ in range(2))
    assert _columns(first) == _columns(again)


@given(_SYNTHETIC, _SEEDS)
def test_as_many_requests_as_asked_for(spec: WorkloadSpec, seed: int) -> None:
    assert resolve_workload(spec, (), seed).num_requests == spec.num_requests


@given(_ANY, _SEEDS)
def test_scaling_time_by_two_halves_the_rate(spec: WorkloadSpec, seed: int) -> None:
    plan = resolve_workload(spec, _CLASSES, seed)
    scaled = resolve_workload(replace(spec, time_scale=2.0), _CLASSES, seed)
    assert (np.abs(scaled.arrival_ns - 2 * plan.arrival_ns) <= 1).all()
    same = {"arrival_ns": None}
    assert _columns(plan) | same == _columns(scaled) | same


@given(_TRACES, st.floats(0, 90), st.floats(1, 30), st.integers(0, 9))
def test_a_window_is_a_subset(
    spec: WorkloadSpec, start_s: float, length_s: float, max_num_requests: int
) -> None:
    spec = replace(spec, trace_requests=tuple(replace(r, session=0) for r in spec.trace_requests))
    inside = sorted(
        r.arrival_s for r in spec.trace_requests if start_s <= r.arrival_s < start_s + length_s
    )[: max_num_requests or None]
    if not inside:
        return
    window = replace(
        spec,
        window_start_s=start_s,
        window_end_s=start_s + length_s,
        max_num_requests=max_num_requests,
    )
    plan = resolve_workload(window, _CLASSES, 0)
    expected = np.rint((np.array(inside) - start_s) * 1e9).astype(np.int64)
    assert plan.arrival_ns.tolist() == expected.tolist()


@given(_ANY, _SEEDS, st.integers(2, 300))
def test_no_request_is_longer_than_allowed(spec: WorkloadSpec, seed: int, limit: int) -> None:
    plan = resolve_workload(replace(spec, max_tokens_per_request=limit), _CLASSES, seed)
    uncut = resolve_workload(spec, _CLASSES, seed)
    assert (plan.num_prefill_tokens + plan.num_decode_tokens <= limit).all()
    assert (plan.num_prefill_tokens >= 1).all()
    assert (plan.num_decode_tokens >= 1).all()
    assert (plan.num_prefill_tokens <= uncut.num_prefill_tokens).all()
    assert (plan.num_decode_tokens <= uncut.num_decode_tokens).all()
    assert (plan.prefix_tokens <= plan.num_prefill_tokens).all()


@given(_TRACES, st.sampled_from([0, 2, 40, 120]))
def test_hashes_are_the_leading_ones_of_their_request(spec: WorkloadSpec, limit: int) -> None:
    plan = resolve_workload(replace(spec, max_tokens_per_request=limit), _CLASSES, 0)
    counts = np.diff(plan.hash_offsets)
    assert (plan.hash_offsets[0], plan.hash_offsets[-1]) == (0, len(plan.hashes))
    assert (counts >= 0).all()
    length = plan.num_prefill_tokens + plan.num_decode_tokens
    assert (counts <= -(-length // _BLOCK_TOKENS)).all()
    names = sorted(
        tuple(plan.hashes[begin : begin + count].tolist())
        for begin, count in zip(plan.hash_offsets[:-1], counts, strict=True)
    )
    if limit == 0 and not any(request.session for request in spec.trace_requests):
        assert names == sorted(request.block_hashes for request in spec.trace_requests)


@given(_SYNTHETIC, _SEEDS)
def test_a_turn_begins_with_the_turns_before_it(spec: WorkloadSpec, seed: int) -> None:
    plan = resolve_workload(spec, (), seed)
    later = np.flatnonzero(plan.follows != NONE)
    before = plan.follows[later]
    history = plan.num_prefill_tokens[before] + plan.num_decode_tokens[before]
    assert (plan.num_prefill_tokens[later] > history).all()
    assert plan.stream[later].tolist() == plan.stream[before].tolist()
    assert plan.prefix_stream[later].tolist() == plan.prefix_stream[before].tolist()


@given(_SYNTHETIC, _SEEDS, _LENGTHS)
def test_what_one_stream_draws_moves_no_other(
    spec: WorkloadSpec, seed: int, answers: LengthSpec
) -> None:
    plan = resolve_workload(spec, _CLASSES, seed)
    other = resolve_workload(replace(spec, decode=answers), _CLASSES, seed)
    for name in ("arrival_ns", "follows", "think_ns", "slo_class", "prefix_stream"):
        assert getattr(plan, name).tolist() == getattr(other, name).tolist()
