from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.workload import LengthSpec, Request, WorkloadSpec
from foretoken.simulator.engine.rng import named_stream
from foretoken.simulator.serving.arrivals.trace import load_trace
from foretoken.simulator.serving.workload import resolve_requests

_HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


def _request(arrival_s: float, num_prefill: int, num_decode: int) -> Request:
    return Request(
        arrival_s=arrival_s, num_prefill_tokens=num_prefill, num_decode_tokens=num_decode
    )


def test_constant_arrivals_have_equal_gaps() -> None:
    spec = WorkloadSpec(arrival="constant", rate_rps=4.0, num_requests=3)
    assert resolve_requests(spec, 0) == (
        _request(0.0, 512, 128),
        _request(0.25, 512, 128),
        _request(0.5, 512, 128),
    )


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential() -> None:
    spec = WorkloadSpec(rate_rps=5.0, num_requests=20_000)
    times = [request.arrival_s for request in resolve_requests(spec, 3)]
    gaps = np.diff([0.0, *times])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)


def test_another_rate_stretches_the_same_arrivals() -> None:
    slow = resolve_requests(WorkloadSpec(rate_rps=1.0), 3)
    fast = resolve_requests(WorkloadSpec(rate_rps=2.0), 3)
    assert [r.arrival_s for r in slow] == [2 * r.arrival_s for r in fast]


def test_a_seed_decides_everything_and_streams_do_not_disturb_each_other() -> None:
    spec = WorkloadSpec(decode=LengthSpec(kind="uniform", minimum=5, maximum=9))
    other_prompts = WorkloadSpec(
        prefill=LengthSpec(kind="uniform", minimum=1, maximum=3), decode=spec.decode
    )
    requests = resolve_requests(spec, 1)
    assert requests == resolve_requests(spec, 1)
    assert requests != resolve_requests(spec, 2)
    assert [(r.arrival_s, r.num_decode_tokens) for r in requests] == [
        (r.arrival_s, r.num_decode_tokens) for r in resolve_requests(other_prompts, 1)
    ]
    draws = {name: named_stream(0, name).integers(2**60) for name in ("arrivals", "prefill")}
    assert draws["arrivals"] != draws["prefill"]


def test_uniform_lengths_reach_both_ends() -> None:
    lengths = LengthSpec(kind="uniform", minimum=5, maximum=7)
    spec = WorkloadSpec(num_requests=300, prefill=lengths)
    counts = Counter(r.num_prefill_tokens for r in resolve_requests(spec, 0))
    assert set(counts) == {5, 6, 7}


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (LengthSpec(kind="normal"), r"workload\.prefill\.kind: 'normal'"),
        (LengthSpec(kind="fixed", mean=0), r"workload\.prefill\.mean: must be at least 1"),
        (LengthSpec(kind="uniform", minimum=4, maximum=3), r"found 4 and 3"),
    ],
)
def test_lengths_that_mean_nothing_are_refused(lengths: LengthSpec, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve_requests(WorkloadSpec(prefill=lengths), 0)


def test_an_unknown_arrival_process_names_the_nearest() -> None:
    with pytest.raises(UnknownPluginError, match="poisson"):
        resolve_requests(WorkloadSpec(arrival="poison"), 0)


def test_an_unknown_option_is_refused() -> None:
    spec = WorkloadSpec(arrival="constant", arrival_options={"burst": "2"})
    with pytest.raises(InvalidRequestError, match=r"arrival_options\.burst"):
        resolve_requests(spec, 0)


def test_a_trace_is_stretched_sorted_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(_HEADER + "1.5,20,3\n0.25,90,20\n2,1,200\n")
    spec = WorkloadSpec(
        arrival="trace", trace_path=str(path), time_scale=2.0, max_tokens_per_request=100
    )
    assert resolve_requests(spec, 0) == (
        _request(0.5, 80, 20),
        _request(3.0, 20, 3),
        _request(4.0, 1, 99),
    )


def test_inline_requests_need_no_file() -> None:
    spec = WorkloadSpec(
        arrival="trace", trace_path="gone.csv", trace_requests=(_request(1.0, 2, 3),)
    )
    assert resolve_requests(spec, 0) == (_request(1.0, 2, 3),)


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("id,num_decode_tokens,arrived_at,num_prefill_tokens\na,3,0.5,7\n\n")
    assert load_trace(path) == (_request(0.5, 7, 3),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_HEADER + "0,1,2\n0.5,x,2\n", r"trace\.csv:3: expected 3 numbers, found '0\.5,x,2'"),
        (_HEADER + "0,1\n", r"trace\.csv:2: expected 3 numbers"),
        (_HEADER + "-1,1,2\n", r"trace\.csv:2: arrived_at must be at least 0"),
        (_HEADER + "nan,1,2\n", r"trace\.csv:2: arrived_at must be at least 0"),
        (_HEADER + "0,1,0\n", r"trace\.csv:2: num_decode_tokens must be a whole number"),
        (_HEADER + "0,1.5,2\n", r"trace\.csv:2: num_prefill_tokens must be a whole number"),
        (_HEADER, "holds no requests"),
        ("arrived_at,num_prefill_tokens\n0,1\n", r"trace\.csv:1: the header lacks num_decode"),
        ("", r"trace\.csv:1: the header lacks arrived_at"),
    ],
)
def test_a_bad_trace_names_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=message):
        load_trace(path)


def test_a_missing_trace_is_an_invalid_request(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot read"):
        load_trace(tmp_path / "none.csv")
    with pytest.raises(InvalidRequestError, match="a trace needs a file"):
        resolve_requests(WorkloadSpec(arrival="trace"), 0)


def test_the_splitwise_traces_load(shared_data: Path) -> None:
    requests = load_trace(shared_data / "vidur" / "traces" / "splitwise_conv_first2000.csv")
    assert len(requests) == 2000
    assert requests[1] == _request(4.314579, 396, 109)
