import numpy as np
import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.domain.requests.workload import LengthSpec, Request, WorkloadSpec
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import RequestPlan
from foretoken.simulator.workload.requests import resolve_workload
from foretoken.simulator.workload.rng import named_stream


def _resolve(seed: int = 0, **fields: object) -> RequestPlan:
    return resolve_workload(WorkloadSpec(**fields), (), seed)  # type: ignore[arg-type]


def _gaps_s(plan: RequestPlan) -> np.ndarray:
    return np.diff(plan.arrival_ns, prepend=0) / 1e9


def test_constant_arrivals_have_equal_gaps() -> None:
    plan = _resolve(arrival="constant", rate_rps=4.0, num_requests=3)
    assert plan.arrival_ns.tolist() == [0, 250_000_000, 500_000_000]
    assert plan.num_prefill_tokens.tolist() == [512] * 3
    assert plan.num_decode_tokens.tolist() == [128] * 3


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential() -> None:
    gaps = _gaps_s(_resolve(3, rate_rps=5.0, num_requests=20_000))
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize(
    ("options", "cv"), [({"shape": "0.25"}, 2.0), ({"cv": "2"}, 2.0), ({"cv": "0.5"}, 0.5)]
)
def test_gamma_gaps_have_the_mean_of_the_rate_and_the_spread_asked_for(
    options: dict[str, str], cv: float
) -> None:
    gaps = _gaps_s(
        _resolve(arrival="gamma", arrival_options=options, rate_rps=5.0, num_requests=40_000)
    )
    assert gaps.mean() == pytest.approx(0.2, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_gamma_of_shape_one_is_poisson() -> None:
    gaps = _gaps_s(_resolve(arrival="gamma", rate_rps=5.0, num_requests=40_000))
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("options", [{}, {"rate_ratios": "0, 1, 5", "dwell_s": "[10, 5, 1]"}])
def test_markov_arrivals_keep_the_mean_rate_and_are_burstier_than_poisson(
    options: dict[str, str],
) -> None:
    plan = _resolve(arrival="markov", arrival_options=options, rate_rps=8.0, num_requests=200_000)
    end_s = plan.arrival_ns[-1] / 1e9
    assert 200_000 / end_s == pytest.approx(8.0, rel=0.05)
    per_second = np.bincount((plan.arrival_ns // 10**9).astype(int))
    assert per_second.var() > 2 * per_second.mean()


def test_markov_rates_are_taken_as_they_are() -> None:
    options = {"rates_rps": "2, 10", "dwell_s": "30, 10"}
    plan = _resolve(arrival="markov", arrival_options=options, num_requests=100_000)
    assert 100_000 / (plan.arrival_ns[-1] / 1e9) == pytest.approx(4.0, rel=0.05)


def test_closed_loop_arrivals_begin_along_the_ramp() -> None:
    options = {"concurrency": "4", "ramp_s": "2"}
    plan = _resolve(arrival="closed_loop", arrival_options=options, num_requests=6)
    assert plan.concurrency == 4
    assert plan.arrival_ns.tolist() == [
        0, 500_000_000, 1_000_000_000, 1_500_000_000, 1_500_000_000, 1_500_000_000,
    ]  # fmt: skip
    at_once = _resolve(arrival="closed_loop", arrival_options={"concurrency": "4"})
    assert set(at_once.arrival_ns.tolist()) == {0}


def test_a_trace_replayed_as_a_closed_loop_warms_up_too() -> None:
    options = {"concurrency": "2", "ramp_s": "2", "num_warmup": "3", "resume_s": "9"}
    sent = [Request(arrival_s=0.0, num_prefill_tokens=n, num_decode_tokens=2) for n in range(1, 7)]
    spec = WorkloadSpec(arrival="trace", arrival_options=options, trace_requests=tuple(sent))
    plan = resolve_workload(spec, (), 0)
    assert (plan.arrival_ns // 10**9).tolist() == [0, 1, 1, 9, 9, 9]
    assert plan.num_prefill_tokens.tolist() == [1, 2, 3, 4, 5, 6]


def test_requests_after_those_that_warm_up_come_at_once() -> None:
    """Three of two at a time take four steps' time; the rest begin at 9 s, two at once."""
    options = {"concurrency": "2", "ramp_s": "2", "num_warmup": "3", "resume_s": "9"}
    spec = WorkloadSpec(
        arrival="closed_loop",
        arrival_options=options,
        num_requests=6,
        prefill=LengthSpec(mean=4),
        decode=LengthSpec(mean=2),
    )
    plan = resolve_workload(spec, (), 0)
    assert (plan.arrival_ns // 10**9).tolist() == [0, 1, 1, 9, 9, 9]
    setup = DeploymentSetup(
        profile=EngineProfile(name="mine", engine="mine", max_num_seqs=4), num_kv_blocks=99
    )
    record = run_deployment(plan, setup, flat_tables(1000.0, 0.0), lambda _: None)
    arrival_ms = np.asarray(record.requests.arrival_ns) / 1e6
    assert arrival_ms.tolist() == [0, 1000, 1000, 9000, 9000, 9002]


def test_open_loops_have_no_concurrency() -> None:
    assert _resolve().concurrency == 0


@pytest.mark.parametrize("arrival", ["poisson", "constant", "gamma"])
def test_another_rate_stretches_the_same_arrivals(arrival: str) -> None:
    slow = _resolve(3, arrival=arrival, rate_rps=1.0)
    fast = _resolve(3, arrival=arrival, rate_rps=2.0)
    assert np.abs(slow.arrival_ns - 2 * fast.arrival_ns).max() <= 1


def test_a_rate_without_limit_is_all_at_once() -> None:
    assert set(_resolve(rate_rps=float("inf")).arrival_ns.tolist()) == {0}


def test_streams_do_not_disturb_each_other() -> None:
    decode = LengthSpec(kind="uniform", minimum=5, maximum=9)
    plan = _resolve(1, decode=decode)
    other_prompts = _resolve(
        1, decode=decode, prefill=LengthSpec(kind="uniform", minimum=1, maximum=3)
    )
    assert plan.arrival_ns.tolist() == other_prompts.arrival_ns.tolist()
    assert plan.num_decode_tokens.tolist() == other_prompts.num_decode_tokens.tolist()
    assert plan.arrival_ns.tolist() != _resolve(2, decode=decode).arrival_ns.tolist()
    draws = {name: named_stream(0, name).integers(2**60) for name in ("arrivals", "prefill")}
    assert draws["arrivals"] != draws["prefill"]


def test_an_unknown_arrival_process_names_the_nearest() -> None:
    with pytest.raises(UnknownPluginError, match="poisson"):
        _resolve(arrival="poison")


@pytest.mark.parametrize(
    ("arrival", "options", "message"),
    [
        ("constant", {"burst": "2"}, r"arrival_options\.burst: constant knows these options: none"),
        ("gamma", {"rate": "2"}, r"arrival_options\.rate: gamma knows these options: shape, cv"),
        ("gamma", {"shape": "0"}, r"arrival_options\.shape: must be positive"),
        ("gamma", {"shape": "-1"}, r"arrival_options\.shape: must be positive"),
        ("gamma", {"shape": "x"}, r"arrival_options\.shape: expected a number, found 'x'"),
        ("gamma", {"shape": "nan"}, r"arrival_options\.shape: expected a number"),
        ("gamma", {"shape": "1e9"}, r"arrival_options\.shape: must be from 1e-06 to 1e\+06"),
        ("gamma", {"shape": "1", "cv": "1"}, r"arrival_options\.cv: .* give one of the two"),
        ("markov", {"dwell_s": "0, 1"}, r"arrival_options\.dwell_s: must be positive"),
        ("markov", {"dwell_s": "1, a"}, r"arrival_options\.dwell_s: expected a number, found 'a'"),
        ("markov", {"dwell_s": "1"}, r"arrival_options\.rate_ratios: needs a number for each"),
        ("markov", {"rate_ratios": "0, 0"}, r"arrival_options\.rate_ratios: must not all be 0"),
        ("markov", {"rates_rps": "-1, 1"}, r"arrival_options\.rates_rps: must not be negative"),
        ("markov", {"rates_rps": "1, 2", "rate_ratios": "1, 2"}, "give rates_rps or rate_ratios"),
        ("markov", {"dwell_s": "1e-9, 1e-9"}, r"arrival_options\.dwell_s: changes more than"),
        ("closed_loop", {}, r"arrival_options\.concurrency: a closed loop needs"),
        ("closed_loop", {"concurrency": "0"}, r"arrival_options\.concurrency: must be positive"),
        ("closed_loop", {"concurrency": "1.5"}, r"concurrency: must be a whole number"),
        (
            "closed_loop",
            {"concurrency": "2", "ramp_s": "-1"},
            r"options\.ramp_s: must not be negative",
        ),
        (
            "closed_loop",
            {"concurrency": "2", "num_warmup": "1.5"},
            r"options\.num_warmup: must be a whole number",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(
    arrival: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _resolve(arrival=arrival, arrival_options=options)


def test_times_that_no_clock_holds_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="look at rate_rps"):
        _resolve(rate_rps=1e-12)
    with pytest.raises(InvalidRequestError, match=r"rate_ratios: a rate without limit"):
        _resolve(arrival="markov", rate_rps=float("inf"))


def test_a_process_of_its_own_lengths_takes_no_trace() -> None:
    request = Request(arrival_s=0.0, num_prefill_tokens=1, num_decode_tokens=1)
    with pytest.raises(InvalidRequestError, match=r"workload\.arrival: poisson draws its own"):
        _resolve(trace_requests=(request,))
