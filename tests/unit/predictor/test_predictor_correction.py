"""Corrections: what observations say of one factor, of many, and what they cannot say."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from predictor_fakes import FakeCatalog

from foretoken.domain.errors import (
    CorruptCatalogError,
    InvalidRequestError,
    UnknownCorrectionError,
    UnknownDeviceError,
)
from foretoken.domain.measurements.correction import (
    Correction,
    CorrectionRequest,
    Observation,
    ObservedCall,
)
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorCall,
    OperatorTable,
    Provenance,
)
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.measurements.step_model import StepKindModel, StepModel
from foretoken.domain.operators.spec.operator import all_operators, find_operator
from foretoken.predictor.correction import CorrectionBook, apply_correction, factor_for
from foretoken.predictor.correction_fit import learn_correction
from foretoken.predictor.roofline import FloatColumn
from foretoken.wire.columns import decode_reply, encode_query, encode_reply

_NOW = "2026-01-01T00:00:00.000+00:00"
_GEMM = ObservedCall(
    call=OperatorCall(operator="gemm", dtype=DType.BF16, dims={"m": 8, "n": 16, "k": 32}), count=3
)
_RMS_NORM = ObservedCall(
    call=OperatorCall(operator="rms_norm", dtype=DType.BF16, dims={"num_tokens": 8, "hidden": 16})
)


def _request(observed_us: Iterable[float], by_group: bool = False) -> CorrectionRequest:
    return CorrectionRequest(
        name="mine",
        device="a30",
        observations=tuple(
            Observation(name=str(index), observed_us=float(value), calls=(_GEMM, _RMS_NORM))
            for index, value in enumerate(observed_us)
        ),
        by_group=by_group,
    )


@pytest.mark.parametrize("name", ["../x", "a b", "/abs", ".x"])
def test_a_correction_keeps_to_the_alphabet_of_names(name: str) -> None:
    book = CorrectionBook(FakeCatalog(), lambda: _NOW)
    with pytest.raises(InvalidRequestError, match=r"name: .* is no name"):
        book.learn(replace(_request([1.0]), name=name), lambda _: LatencyReply("", ()))


def test_an_artifact_that_is_no_correction_hides_no_others() -> None:
    catalog = FakeCatalog()
    for name, content in (("one", b"{}"), ("other", b"no JSON"), ("third", b"\xff")):
        catalog.store_artifact(
            Artifact(
                kind="corrections",
                name=name,
                content_hash="0",
                num_bytes=len(content),
                created_at=_NOW,
            ),
            (content,),
        )
    book = CorrectionBook(catalog, lambda: _NOW)
    assert () == book.list()
    with pytest.raises(CorruptCatalogError, match="corrections/other is no correction"):
        book.find("other")


def _learn(raw_us: dict[str, FloatColumn], observed_us: FloatColumn, by_group: bool) -> Correction:
    return learn_correction(_request(observed_us, by_group), raw_us, "v1", _NOW)


def _steps(num_steps: int, seed: int = 0) -> dict[str, FloatColumn]:
    """Return what three groups take in steps of differing mix and size."""
    random = np.random.default_rng(seed)
    shares = random.dirichlet((3.0, 2.0, 1.0), num_steps) * 2.0 ** random.uniform(
        8, 14, (num_steps, 1)
    )
    return dict(zip(("attention", "elementwise", "gemm"), shares.T, strict=True))


def _sum(raw_us: dict[str, FloatColumn], factors: Iterable[float]) -> FloatColumn:
    return np.asarray(np.stack(list(raw_us.values()), axis=1) @ np.array(list(factors)))


def _ten_each(query: LatencyQuery) -> LatencyReply:
    """Every call takes 10 µs."""
    tables = tuple(_columns(np.full(table.num_rows, 10.0)) for table in query.tables)
    return LatencyReply(model_version="v1", tables=tables)


def _columns(latency_us: FloatColumn) -> LatencyColumns:
    provenance = np.full(len(latency_us), Provenance.INTERPOLATED.value)
    return LatencyColumns(
        latency_us=latency_us, low_us=latency_us / 2, high_us=latency_us * 2, provenance=provenance
    )


@pytest.mark.parametrize("by_group", [False, True])
def test_one_observation_stretches_everything_alike(by_group: bool) -> None:
    """Nothing tells the groups apart, and there is nothing to check it on."""
    correction = _learn(_steps(1), _sum(_steps(1), (1.5, 1.5, 1.5)), by_group)
    assert pytest.approx([1.5] * len(correction.factors)) == list(correction.factors.values())
    assert (0.0, 0.0) == (correction.left_out_error_ratio, correction.observations[0].left_out_us)
    assert pytest.approx(0.0, abs=1e-12) == correction.corrected_error_ratio
    assert pytest.approx(1 / 3) == correction.raw_error_ratio


def test_one_factor_is_the_geometric_mean() -> None:
    """Twice too slow and twice too fast are equally far off."""
    raw_us = {"gemm": np.array([10.0, 10.0])}
    correction = _learn(raw_us, np.array([20.0, 5.0]), by_group=False)
    assert {"": pytest.approx(1.0)} == dict(correction.factors)
    # Each is predicted by the other's factor.
    assert pytest.approx([5.0, 20.0]) == [item.left_out_us for item in correction.observations]
    assert pytest.approx((0.75 + 3.0) / 2) == correction.left_out_error_ratio


def test_enough_observations_tell_the_groups_apart() -> None:
    raw_us, truth = _steps(12), (1.6, 1.0, 1.3)
    correction = _learn(raw_us, _sum(raw_us, truth), by_group=True)
    found = [correction.factors[group] for group in raw_us]
    assert pytest.approx(list(truth), rel=0.02) == found
    common = _learn(raw_us, _sum(raw_us, truth), by_group=False)
    assert correction.left_out_error_ratio < common.left_out_error_ratio / 5


def test_groups_that_do_not_differ_are_not_told_apart() -> None:
    """Noise alone must not pull the factors apart."""
    raw_us = _steps(8)
    noise = np.exp(0.1 * np.random.default_rng(1).standard_normal(8))
    correction = _learn(raw_us, 1.4 * noise * _sum(raw_us, (1, 1, 1)), by_group=True)
    assert pytest.approx([correction.factors[""]] * 4) == list(correction.factors.values())


def test_factors_stay_sane_whatever_is_observed() -> None:
    """Two groups that never occur apart, and steps that fit no factors at all."""
    raw_us = {"attention": np.full(4, 10.0), "gemm": np.array([10.0, 10.1, 9.9, 10.0])}
    observed_us = np.array([1.0, 1e3, 1.0, 1e3])
    factors = _learn(raw_us, observed_us, by_group=True).factors
    common = factors[""]
    assert all(common / 5 <= factor <= common * 5 for factor in factors.values())


def test_many_observations_are_learned_from_too() -> None:
    """More than are left out one by one."""
    raw_us = _steps(45)
    correction = _learn(raw_us, _sum(raw_us, (0.8, 1.2, 1.0)), by_group=True)
    assert all(item.left_out_us > 0 for item in correction.observations)
    assert correction.left_out_error_ratio < 0.01


@pytest.mark.parametrize("raw_us", [0.0, -1.0, float("nan"), float("inf")])
def test_an_observation_without_time_is_named(raw_us: float) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        _learn({"gemm": np.array([1.0, raw_us])}, np.array([1.0, 1.0]), by_group=False)
    assert ["observations[1].calls"] == [v.field for v in caught.value.violations]


def test_a_book_prices_the_calls_by_group_and_count() -> None:
    """Three GEMMs and a norm at 10 µs each take 40 µs."""
    correction = CorrectionBook(FakeCatalog(), lambda: _NOW).learn(
        _request([60.0, 60.0]), _ten_each
    )
    assert [40.0, 40.0] == [item.raw_us for item in correction.observations]
    assert ("v1", _NOW) == (correction.model_version, correction.created_at)
    assert pytest.approx(1.5) == correction.factors[""]


def test_a_book_finds_what_another_learned() -> None:
    catalog = FakeCatalog()
    learned = CorrectionBook(catalog, lambda: _NOW).learn(_request([60.0], True), _ten_each)
    other = CorrectionBook(catalog, lambda: _NOW)
    assert learned == other.find("mine", "a30")
    assert (learned,) == other.list()


def test_a_correction_of_the_same_name_is_replaced() -> None:
    catalog = FakeCatalog()
    book, reader = (CorrectionBook(catalog, lambda: _NOW) for _ in range(2))
    first = book.learn(_request([60.0]), _ten_each)
    assert first == reader.find("mine")
    second = book.learn(_request([80.0]), _ten_each)
    assert (second,) == book.list()
    assert second == book.find("mine")
    assert first == reader.find("mine")
    reader.refresh()
    assert second == reader.find("mine")


def test_a_correction_that_is_not_there_names_the_nearest() -> None:
    book = CorrectionBook(FakeCatalog(), lambda: _NOW)
    book.learn(_request([60.0]), _ten_each)
    with pytest.raises(UnknownCorrectionError, match="did you mean mine"):
        book.find("mein")


def test_a_correction_is_for_its_device() -> None:
    book = CorrectionBook(FakeCatalog(), lambda: _NOW)
    book.learn(_request([60.0]), _ten_each)
    with pytest.raises(InvalidRequestError, match="learned on a30, not on h100_sxm"):
        book.find("mine", "h100_sxm")
    with pytest.raises(UnknownDeviceError):
        book.learn(replace(_request([60.0]), device="a31"), _ten_each)


def test_a_correction_stretches_a_reply_by_group() -> None:
    correction = Correction(
        name="mine",
        device="a30",
        created_at=_NOW,
        model_version="v1",
        factors={"": 1.5, "gemm": 2.0},
    )
    tables = tuple(
        OperatorTable(operator=name, dtype=DType.BF16, columns={"x": [1]})
        for name in ("gemm", "rms_norm")
    )
    query = LatencyQuery(device="a30", tables=tables)
    gemm, norm = apply_correction(correction, query, _ten_each(query)).tables
    assert (20.0, 10.0, 40.0) == (gemm.latency_us[0], gemm.low_us[0], gemm.high_us[0])
    assert (10.0, 15.0) == (norm.raw_latency_us[0], norm.latency_us[0])
    assert 2.0 == factor_for(correction, "batched_gemm")
    assert 1.0 == factor_for(replace(correction, factors={"gemm": 2.0}), "rms_norm")


def test_every_kind_of_operator_has_its_group() -> None:
    """A new attention must not be taken for an activation."""
    groups = {name: spec.group for name, spec in all_operators().items()}
    expected = {"attention": "attention", "mla": "attention", "moe": "moe"}
    for prefix, group in expected.items():
        found = {g for name, g in groups.items() if name.startswith(prefix)}
        assert {group} == found
    collectives = {spec.group for spec in all_operators().values() if spec.is_collective}
    assert {"communication"} == collectives
    assert "elementwise" == find_operator("rms_norm").group


def test_a_model_of_steps_is_kept_as_it_is_and_stretches_no_operator() -> None:
    def kind(name: str, num_steps: int, error: float) -> StepKindModel:
        return StepKindModel(
            kind=name,
            num_steps=num_steps,
            ratio=1.2,
            constant_us=300.0,
            low_ratio=0.9,
            high_ratio=1.1,
            measured_us=1500.0,
            raw_us=1000.0,
            corrected_us=1500.0,
            raw_error_ratio=error,
            corrected_error_ratio=0.01,
            left_out_error_ratio=0.02,
        )

    steps = StepModel(
        model="llama-3.1-8b",
        engine="vllm 0.19",
        topology="",
        layout="",
        source="a log",
        kinds=(kind("decode", 30, 0.2), kind("mixed", 10, 0.4)),
    )
    catalog = FakeCatalog()
    request = CorrectionRequest(name="mine", device="a30", observations=(), steps=steps)
    learned = CorrectionBook(catalog, lambda: _NOW).learn(
        request, lambda _: LatencyReply(model_version="", tables=())
    )
    assert (0.25, {}) == (pytest.approx(learned.raw_error_ratio), learned.factors)
    found = CorrectionBook(catalog, lambda: _NOW).find("mine", "a30")
    assert steps == found.steps
    assert "mixed" == (found.steps.find("prefill") or steps.kinds[0]).kind
    times = np.array([10.0])
    columns = LatencyColumns(
        latency_us=times, low_us=times, high_us=times, provenance=np.array([0])
    )
    query = LatencyQuery(
        device="a30",
        tables=(OperatorTable(operator="gemm", dtype=DType.BF16, columns={"m": [1]}),),
    )
    reply = apply_correction(found, query, LatencyReply(model_version="", tables=(columns,)))
    assert (10.0, steps) == (reply.tables[0].latency_us[0], reply.steps)
    back = decode_reply(encode_reply(reply, encode_query(query)))
    assert steps == back.steps
    with pytest.raises(InvalidRequestError, match="go with no observations"):
        replace(_request([1.0]), steps=steps)
    with pytest.raises(InvalidRequestError, match="must be positive"):
        replace(steps.kinds[0], ratio=0.0)
