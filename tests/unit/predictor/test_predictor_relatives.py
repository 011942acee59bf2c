"""What devices of other chips show of an engine, where nobody measured the chip asked about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from predictor_fakes import MakePredictor, Rows, Train, columns_of, gemm_rows

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Provenance,
)
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.model_set import ModelSet, Wanted
from foretoken.predictor.roofline import FloatColumn
from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.service import PredictorService
from foretoken.predictor.source import find_relatives
from foretoken.predictor.trainer import MIN_ROOFLINE_RATIO, train_series
from foretoken.predictor.transfer import default_transfer
from foretoken.predictor.transfer.relatives import Shown, apart_log, combine, own_share_of
from foretoken.predictor.transfer.support import Support

_VLLM = {"framework": "vllm", "framework_version": "0.24.0"}
_SGLANG = {"framework": "sglang", "framework_version": "0.5.14"}
_SIZES = (16, 256, 4096)
_POINTS = np.array([(m, n, k) for m in _SIZES for n in _SIZES for k in _SIZES])


def _rough(dims: Mapping[str, int]) -> float:
    """Return a slowdown that jumps from size to size, which no law tells."""
    return 1.5 + 0.8 * float(np.sin(7.0 * dims["m"] ** 0.5 + dims["n"] + 3 * dims["k"]))


def _ask(
    service: PredictorService, rows: Rows, software: str, device: str = "h100_sxm"
) -> LatencyColumns:
    table = OperatorTable(
        operator="gemm", dtype=DType.FP16, columns=columns_of(*(row["dims"] for row in rows))
    )
    query = LatencyQuery(device=device, tables=(table,), preferred_framework=software)
    return service.predict(query).tables[0]


def test_another_chip_shows_how_the_engine_asked_for_goes_from_size_to_size(
    make_predictor: MakePredictor, train: Train
) -> None:
    truth = gemm_rows(_rough, device="h100_sxm", **_VLLM)
    shown = gemm_rows(_rough, device="a100_sxm_80", **_VLLM)
    others = gemm_rows(device="l40s", **_SGLANG)
    service = make_predictor([*shown, *others])
    train(service)
    truth_us = np.array([row["latency_us_median"] for row in truth])
    found, without = (_ask(service, truth, software) for software in ("vllm 0.24.0", "trtllm 1.3"))
    assert "a100_sxm_80" in found.basis
    assert "a100_sxm_80" not in without.basis
    assert {Provenance.TRANSFERRED.value} == set(found.provenance.tolist())
    off, off_without = (np.abs(np.log(it.latency_us / truth_us)).mean() for it in (found, without))
    assert off < 0.75 * off_without


def _key(device: str, dtype: str = "bf16", framework: str = "vllm 0.24.0") -> SeriesKey:
    return SeriesKey("gemm", device, "", dtype, "forward", framework)


def _models(keys: Sequence[SeriesKey]) -> ModelSet:
    blank = Series(key=keys[0], points=_POINTS, latency_us=np.ones(len(_POINTS)))
    series = [replace(blank, key=key) for key in keys]
    times = [replace(it, latency_us=1.5 * it.design.base_us) for it in series]
    config = PredictorConfig(state_folder="")
    return ModelSet(version="v", series={it.key: train_series(it, config, 0) for it in times})


def _relatives(
    keys: Sequence[SeriesKey], device: str = "b200", apart: tuple[tuple[str, str, str], ...] = ()
) -> list[str]:
    asked = _key(device)
    support = Support(operators=("gemm",), apart=apart)
    transfers = {"gemm on any gpu": replace(default_transfer(), support=support)}
    models = replace(_models(keys), transfers=transfers)
    found = find_relatives(models, asked.spec, asked.target, Wanted(preferred="vllm"))
    return [source.target.device.name for source in found]


def test_each_chip_has_one_say_and_the_most_alike_are_asked() -> None:
    keys = [_key(it) for it in ("l40s", "h200_sxm", "a100_sxm_80", "h100_sxm", "rtx_pro_6000")]
    # B200, H100 and A100 fill their caches from memory in 16 to 20 µs, L40S and RTX in 84 and more.
    assert ["h100_sxm", "a100_sxm_80"] == _relatives(keys)


@pytest.mark.parametrize(
    "stranger",
    [_key("a100_sxm_80", framework="sglang 0.5.14"), _key("h100_sxm", dtype="fp8")],
    ids=["other engine", "other format"],
)
def test_who_ran_another_engine_or_format_has_no_say(stranger: SeriesKey) -> None:
    assert ["l40s"] == _relatives([stranger, _key("l40s")])


def test_who_ran_kernels_of_another_kind_has_a_say_only_as_the_most_alike() -> None:
    keys = [_key("a100_sxm_80"), _key("rtx_pro_6000"), _key("l40s")]
    apart = (("rtx_pro_6000", "vllm 0.24.0", ""),)
    assert ["a100_sxm_80", "rtx_pro_6000"] == _relatives(keys)
    assert ["a100_sxm_80", "l40s"] == _relatives(keys, apart=apart)
    assert ["rtx_pro_6000", "l40s"] == _relatives(keys, "rtx_5090", apart)


@pytest.mark.parametrize(
    ("slow", "asked", "is_alike"),
    [("b200", "h100_sxm", False), ("rtx_pro_6000", "rtx_5090", True)],
)
def test_slow_kernels_of_the_most_alike_count_on_its_architecture_and_may_be_anybody_s(
    make_predictor: MakePredictor, train: Train, slow: str, asked: str, *, is_alike: bool
) -> None:
    fast = ("a30", "a100_sxm_80", "l40s", "l4")
    rows = [row for name in fast for row in gemm_rows(lambda _: 2.0, device=name, **_VLLM)]
    rows += gemm_rows(lambda _: 40.0, device=slow, **_VLLM)
    service = make_predictor(rows)
    train(service)
    found = _ask(service, gemm_rows(device=asked), "vllm 0.24.0", asked)
    expected_us = np.array([row["latency_us_median"] for row in gemm_rows(lambda _: 2.0, asked)])
    ratio = found.latency_us / expected_us
    assert is_alike is bool((ratio > 2.0).all())
    assert is_alike is not bool((ratio < 1.5).all())
    assert (found.low_us < expected_us).all()
    assert (found.high_us > 10.0 * expected_us).all()


def test_another_vendor_s_kernels_show_nothing() -> None:
    keys = [_key("l40s"), _key("mi300x")]
    assert ["l40s"] == _relatives(keys)
    assert [] == _relatives(keys, "mi325x")


@pytest.fixture
def design() -> Design:
    key = _key("b200")
    columns = dict(zip(key.spec.dim_names, _POINTS.T, strict=True))
    return build_design(key.spec, columns, key.target)


def _times(design: Design, log_ratio: float) -> LatencyColumns:
    latency_us = design.base_us * np.exp(log_ratio)
    provenance = np.full(design.num_rows, Provenance.TRANSFERRED.value)
    return LatencyColumns(
        latency_us=latency_us,
        low_us=latency_us / 3.0,
        high_us=latency_us * 3.0,
        provenance=provenance,
    )


def _shown(design: Design, moved_log: float, law_log: float, apart: float = 0.0) -> Shown:
    return Shown(apart, np.full(design.num_rows, moved_log), np.full(design.num_rows, law_log))


def _least(design: Design) -> FloatColumn:
    return MIN_ROOFLINE_RATIO * design.roofline_us


def _log(design: Design, found: LatencyColumns) -> float:
    """Return the log ratio to the base latency, the same of all calls."""
    every = np.log(found.latency_us / design.base_us)
    assert every[0] == pytest.approx(every)
    return float(every[0])


def test_what_relatives_show_counts_half_their_laws_and_what_is_typical_a_quarter_each(
    design: Design,
) -> None:
    found = combine(
        _times(design, 0.4), design, _least(design), [_shown(design, 1.0, 0.8)], DType.BF16, ""
    ).found
    assert 0.5 * 1.0 + 0.25 * 0.8 + 0.25 * 0.4 == pytest.approx(_log(design, found))


def test_the_more_alike_of_two_relatives_is_the_weightier(design: Design) -> None:
    shown = [_shown(design, 0.0, 0.0, apart=0.0), _shown(design, 1.0, 0.0, apart=0.3)]
    found = combine(_times(design, 0.0), design, _least(design), shown, DType.BF16, "").found
    assert 0.5 * (1.0 / 3.0) == pytest.approx(_log(design, found))


def test_who_did_not_measure_near_a_call_leaves_it_to_the_other_and_both_to_their_laws(
    design: Design,
) -> None:
    absent = _shown(design, np.nan, 0.6)
    typical = _times(design, 0.6)
    with_other = combine(
        typical, design, _least(design), [absent, _shown(design, 1.0, 0.6)], DType.BF16, ""
    ).found
    assert 0.5 * 1.0 + 0.5 * 0.6 == pytest.approx(_log(design, with_other))
    assert 0.6 == pytest.approx(
        _log(design, combine(typical, design, _least(design), [absent], DType.BF16, "").found)
    )


def test_voices_are_what_is_typical_and_what_each_relative_shows_and_its_law(
    design: Design,
) -> None:
    shown = [_shown(design, np.nan, 0.6), _shown(design, 1.0, 0.2)]
    found = combine(_times(design, 0.4), design, _least(design), shown, DType.BF16, "")
    voices = found.places.voices + np.log(found.found.latency_us / design.base_us)[:, None]
    assert voices == pytest.approx(np.tile([0.4, 0.6, 1.0, 0.6, 0.2], (design.num_rows, 1)))


def test_intervals_are_wider_in_8_bits_where_voices_differ_and_where_nobody_is_alike(
    design: Design,
) -> None:
    typical = _times(design, 0.5)
    alike, differing, far = (
        combine(typical, design, _least(design), [shown], DType.BF16, "").found
        for shown in (
            _shown(design, 0.5, 0.5),
            _shown(design, 0.8, 0.2),
            _shown(design, 0.5, 0.5, apart=2.0),
        )
    )
    in_fp8 = combine(
        typical, design, _least(design), [_shown(design, 0.5, 0.5)], DType.FP8, ""
    ).found
    width_log = 2.0 * 1.66 * np.hypot(0.2, 0.24)
    assert width_log == pytest.approx(np.log(in_fp8.high_us / in_fp8.low_us))
    widths = [np.log(it.high_us / it.low_us) for it in (alike, differing, far)]
    assert 2.0 * 1.66 * 0.2 == pytest.approx(widths[0])
    assert (widths[1] > 1.1 * widths[0]).all()
    assert (widths[2] > 1.1 * widths[0]).all()


def test_caches_filled_in_equal_times_are_alike() -> None:
    device = find_device("a100_sxm_80")
    twice = replace(
        device,
        l2_cache_bytes=2.0 * device.l2_cache_bytes,
        memory_bandwidth_bytes_per_s=2.0 * device.memory_bandwidth_bytes_per_s,
    )
    assert 0.0 == apart_log(device, twice)
    slower = replace(device, memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s / 2.0)
    assert np.log(2.0) == pytest.approx(apart_log(device, slower))


def test_few_own_points_correct_what_other_chips_show(
    make_predictor: MakePredictor, train: Train
) -> None:
    """The engine goes from size to size as on another chip, and is a fifth slower."""
    truth = gemm_rows(lambda dims: 1.2 * _rough(dims), device="h100_sxm", **_VLLM)
    shown = gemm_rows(_rough, device="a100_sxm_80", **_VLLM)
    own, asked = truth[::5], [row for place, row in enumerate(truth) if place % 5]
    truth_us = np.array([row["latency_us_median"] for row in asked])
    off = {}
    for name, rows in {"alone": own, "joined": [*own, *shown]}.items():
        service = make_predictor(rows)
        train(service)
        found = _ask(service, asked, "vllm 0.24.0")
        off[name] = np.abs(np.log(found.latency_us / truth_us)).mean()
        assert ("a100_sxm_80" in found.basis) is (name == "joined")
    assert f"corrected by {len(own)} own points" in found.basis
    assert off["joined"] < 0.95 * off["alone"]


@pytest.mark.parametrize(("num_points", "share"), [(0, 0.5), (100, 0.75), (900, 0.95)])
def test_the_more_own_points_the_less_relatives_count(num_points: int, share: float) -> None:
    assert share == pytest.approx(own_share_of(num_points))
