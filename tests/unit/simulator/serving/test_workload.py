from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.slo import SloClass
from foretoken.domain.requests.workload import LengthSpec, Request, SessionSpec, WorkloadSpec
from foretoken.simulator.workload.request_plan import NONE, RequestPlan
from foretoken.simulator.workload.requests import resolve_workload
from foretoken.simulator.workload.trace import load_trace


def _request(arrival_s: float, prompt: int = 8, answer: int = 2, **more: object) -> Request:
    return Request(
        arrival_s=arrival_s,
        num_prefill_tokens=prompt,
        num_decode_tokens=answer,
        **more,  # type: ignore[arg-type]
    )


def _replay(*requests: Request, **fields: object) -> RequestPlan:
    return resolve_workload(
        WorkloadSpec(arrival="trace", trace_requests=requests, **fields),  # type: ignore[arg-type]
        (),
        0,
    )


def _names(plan: RequestPlan) -> list[list[int]]:
    bounds = zip(plan.hash_offsets[:-1], plan.hash_offsets[1:], strict=True)
    return [plan.hashes[begin:end].tolist() for begin, end in bounds]


def test_a_trace_is_stretched_sorted_and_cut() -> None:
    plan = _replay(
        _request(1.5, 20, 3),
        _request(0.25, 90, 20),
        _request(2, 1, 200),
        time_scale=2.0,
        max_tokens_per_request=100,
    )
    assert plan.arrival_ns.tolist() == [500_000_000, 3_000_000_000, 4_000_000_000]
    assert plan.num_prefill_tokens.tolist() == [80, 20, 1]
    assert plan.num_decode_tokens.tolist() == [20, 3, 99]


def test_a_window_begins_anew_and_then_is_stretched() -> None:
    requests = [_request(float(second), 10 + second) for second in range(10)]
    plan = _replay(*requests, window_start_s=3, window_end_s=6, time_scale=0.5)
    assert plan.num_prefill_tokens.tolist() == [13, 14, 15]
    assert plan.arrival_ns.tolist() == [0, 500_000_000, 1_000_000_000]
    assert _replay(*requests, window_start_s=8).num_prefill_tokens.tolist() == [18, 19]
    assert _replay(*requests, max_num_requests=2).num_prefill_tokens.tolist() == [10, 11]
    with pytest.raises(InvalidRequestError, match=r"no request .* last one arrives at 9 s"):
        _replay(*requests, window_start_s=10)


def test_a_trace_can_be_replayed_as_a_closed_loop_in_its_order() -> None:
    requests = [_request(second, 10 + second) for second in (4, 1, 0, 2, 3)]
    options = {"concurrency": "2", "ramp_s": "1"}
    plan = _replay(*requests, arrival_options=options, window_start_s=1)
    assert plan.concurrency == 2
    assert plan.num_prefill_tokens.tolist() == [11, 12, 13, 14]
    assert plan.arrival_ns.tolist() == [0, 500_000_000, 500_000_000, 500_000_000]


def test_hashes_go_as_far_as_the_prompt_that_is_left() -> None:
    plan = _replay(
        _request(2.0, 40, 4, block_hashes=(7, 8, 9)),
        _request(1.0, 40, 4),
        _request(3.0, 30, 4, block_hashes=(7,)),
        hash_block_tokens=16,
        max_tokens_per_request=36,
    )
    assert plan.num_prefill_tokens.tolist() == [32, 32, 30]
    assert _names(plan) == [[], [7, 8], [7]]
    assert plan.hash_block_tokens == 16
    assert sorted(set(plan.stream.tolist())) == [0, 1, 2]


def test_a_later_prompt_names_the_answer_it_holds() -> None:
    told = _request(0.0, 40, 30, block_hashes=(1, 2, 3), session=1)
    later = _request(1.0, 90, 9, block_hashes=(1, 2, 4, 5, 6, 7), session=1)
    plan = _replay(told, later, hash_block_tokens=16)
    assert _names(plan) == [[1, 2, 4, 5], [1, 2, 4, 5, 6, 7]]
    other = replace(later, block_hashes=(1, 9, 4, 5, 6, 7))
    assert _names(_replay(told, other, hash_block_tokens=16))[0] == [1, 2, 3]
    short = replace(later, num_prefill_tokens=64, block_hashes=(1, 2, 4, 5))
    assert _names(_replay(told, short, hash_block_tokens=16))[0] == [1, 2, 3]
    cut = _replay(told, later, hash_block_tokens=16, max_tokens_per_request=50)
    assert _names(cut)[0] == [1, 2]


def test_turns_of_a_trace_follow_each_other_and_share_what_they_can_hold() -> None:
    plan = _replay(
        _request(0.0, 10, 2, session=5),
        _request(1.0, 99, 2),
        _request(4.0, 20, 3, session=5, think_s=2.5),
        _request(0.0, 23, 3, session=5, think_s=0.5),
        _request(6.0, 9, 1, session=5),
    )
    assert plan.arrival_ns.tolist() == [0, 10**9, 4 * 10**9, 4 * 10**9, 6 * 10**9]
    assert plan.follows.tolist() == [NONE, NONE, 0, 2, 3]
    assert plan.think_ns.tolist() == [0, 0, 2_500_000_000, 500_000_000, 0]
    # The last prompt is too short for what was said before: it began anew.
    first, other, second, third, anew = plan.stream.tolist()
    assert first == second == third
    assert len({first, other, anew}) == 3


def test_a_turn_whose_first_is_outside_the_window_comes_at_its_own_time() -> None:
    plan = _replay(
        _request(0.0, session=1), _request(5.0, 20, session=1, think_s=9.0), window_start_s=1
    )
    assert (plan.arrival_ns.tolist(), plan.follows.tolist()) == ([4 * 10**9], [NONE])
    assert plan.think_ns.tolist() == [0]


def test_sessions_grow_by_what_is_new() -> None:
    spec = WorkloadSpec(
        arrival="constant",
        rate_rps=1.0,
        num_requests=8,
        prefill=LengthSpec(mean=10),
        decode=LengthSpec(mean=4),
        sessions=SessionSpec(
            turns=LengthSpec(mean=3), think_s=2.0, shared_prefix_tokens=100, num_shared_prefixes=2
        ),
    )
    plan = resolve_workload(spec, (), 0)
    assert plan.num_prefill_tokens.tolist() == [110, 124, 138, 110, 124, 138, 110, 124]
    assert plan.follows.tolist() == [NONE, 0, 1, NONE, 3, 4, NONE, 6]
    assert (plan.arrival_ns // 10**9).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert plan.stream.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert set(plan.prefix_tokens.tolist()) == {100}
    assert set(plan.prefix_stream.tolist()).isdisjoint(plan.stream.tolist())
    assert len(set(plan.prefix_stream.tolist())) == 2
    assert (plan.think_ns == 0).tolist() == (plan.follows == NONE).tolist()


def test_prompts_with_all_that_comes_before_are_no_longer_than_engines_count() -> None:
    """Of each length for itself that is checked where it is drawn."""
    shared = SessionSpec(shared_prefix_tokens=2**31 - 1)
    spec = WorkloadSpec(
        num_requests=2, prefill=LengthSpec(mean=8), decode=LengthSpec(mean=2), sessions=shared
    )
    for limit in (0, 2**62):
        with pytest.raises(InvalidRequestError, match="max_tokens_per_request"):
            resolve_workload(replace(spec, max_tokens_per_request=limit), (), 0)
    cut = resolve_workload(replace(spec, max_tokens_per_request=100), (), 0)
    assert [98, 98] == cut.num_prefill_tokens.tolist()


def test_the_mean_think_time_is_the_one_asked_for() -> None:
    sessions = SessionSpec(turns=LengthSpec(mean=10), think_s=3.0)
    plan = resolve_workload(WorkloadSpec(num_requests=50_000, sessions=sessions), (), 0)
    think_s = plan.think_ns[plan.follows != NONE] / 1e9
    assert think_s.mean() == pytest.approx(3.0, rel=0.03)


def test_classes_are_drawn_by_share_once_for_a_session() -> None:
    classes = (SloClass(name="a", share_ratio=0.2, priority=3), SloClass(name="b", share_ratio=0.5))
    spec = WorkloadSpec(num_requests=40_000, sessions=SessionSpec(turns=LengthSpec(mean=2)))
    plan = resolve_workload(spec, classes, 0)
    shares = np.bincount(plan.slo_class + 1) / plan.num_requests
    assert shares == pytest.approx([0.3, 0.2, 0.5], abs=0.01)
    later = plan.follows != NONE
    assert plan.slo_class[later].tolist() == plan.slo_class[plan.follows[later]].tolist()
    assert plan.priority.tolist() == np.where(plan.slo_class == 0, 3, 0).tolist()


def test_requests_of_a_trace_name_their_class() -> None:
    spec = WorkloadSpec(
        arrival="trace",
        trace_requests=(
            _request(0, slo_class="b"), _request(1), _request(2, slo_class="a"),
        ),
    )  # fmt: skip
    classes = (SloClass(name="a", priority=1), SloClass(name="b", priority=-2, share_ratio=1.0))
    plan = resolve_workload(spec, classes, 0)
    assert plan.slo_class.tolist() == [1, NONE, 0]
    assert plan.priority.tolist() == [-2, 0, 1]
    with pytest.raises(InvalidRequestError, match=r"slo_classes: the trace names b; known are a"):
        resolve_workload(spec, classes[:1], 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"trace_path: a trace needs a file"),
        ({"trace_path": "t.csv"}, r"trace_path: t\.csv was not loaded"),
        ({"sessions": SessionSpec()}, r"workload\.sessions: a trace brings its own"),
        (
            {"trace_requests": (_request(0),), "arrival_options": {"ramp_s": "1"}},
            r"arrival_options\.concurrency: a closed loop needs",
        ),
        ({"max_tokens_per_request": 1}, r"max_tokens_per_request: must be at least 2"),
        ({"arrival_options": {"a": "1"}}, r"arrival_options\.a: trace knows these options: con"),
    ],
)
def test_a_trace_workload_that_means_nothing_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve_workload(WorkloadSpec(arrival="trace", **fields), (), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (_request(-1.0), r"trace_requests\[1\]\.arrival_s: must be a number of at least 0"),
        (_request(float("nan")), r"trace_requests\[1\]\.arrival_s"),
        (_request(1e12), r"look at rate_rps, time_scale"),
        (_request(0, 0), r"trace_requests\[1\]\.num_prefill_tokens: must be at least 1"),
        (_request(0, 2**40), r"trace_requests\[1\]\.num_prefill_tokens: must be at most"),
        (_request(0, 2**80), r"trace_requests: num_prefill_tokens"),
        (_request(0, 1, 0), r"trace_requests\[1\]\.num_decode_tokens: must be at least 1"),
        (_request(0, session=-1), r"trace_requests\[1\]\.session: must be at least 0"),
        (_request(0, think_s=-1.0), r"trace_requests\[1\]\.think_s"),
        (_request(0, block_hashes=(1,)), r"workload\.hash_block_tokens: must say"),
    ],
)
def test_a_request_that_cannot_be_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _replay(_request(0), request_)


def test_hashes_must_fit_the_prompt_and_64_bits() -> None:
    with pytest.raises(InvalidRequestError, match=r"\[0\]\.block_hashes: are more than"):
        _replay(_request(0, 16, block_hashes=(1, 2)), hash_block_tokens=16)
    with pytest.raises(InvalidRequestError, match=r"block_hashes must fit into 64 bits"):
        _replay(_request(0, 16, block_hashes=(2**64,)), hash_block_tokens=16)


def test_the_vllm_runs_resolve_as_they_are(shared_data: Path) -> None:
    content = load_trace(
        shared_data / "llmservingsim" / "runs" / "rtx4090-llama8b" / "workload.jsonl"
    )
    plan = _replay(*content.requests, hash_block_tokens=content.hash_block_tokens)
    assert plan.num_requests == 300
    assert int(plan.hash_offsets[-1]) == len(plan.hashes)
    assert (np.diff(plan.hash_offsets) == plan.num_prefill_tokens // 16).all()
