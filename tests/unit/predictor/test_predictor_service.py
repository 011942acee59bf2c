"""The predictor as its callers see it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from predictor_fakes import (
    GEMM_EFFICIENCY,
    FakeCatalog,
    MakePredictor,
    Train,
    all_reduce_rows,
    base_us,
    columns_of,
    gemm_rows,
    row_of,
)

from foretoken.domain.errors import (
    InvalidRequestError,
    NotTrainedError,
    OutOfCoverageError,
    UnknownDeviceError,
    UnknownOperatorError,
)
from foretoken.domain.job import JobState
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.predictor.service import PredictorService

MEASURED = {"m": 512, "n": 4096, "k": 4096}
BETWEEN = {"m": 600, "n": 4096, "k": 4096}
NEW_SHAPE = {"m": 512, "n": 2048, "k": 2048}
FAR = {"m": 65536, "n": 4096, "k": 4096}
RMS_NORM = {"num_tokens": 64, "hidden": 4096}


def ask(
    service: PredictorService,
    *dims: Mapping[str, int],
    operator: str = "gemm",
    dtype: DType = DType.FP16,
    phase: Phase = Phase.FORWARD,
    **query: Any,
) -> LatencyColumns:
    """Return the estimates of calls of one operator, on the A30 if nothing else is said."""
    table = OperatorTable(operator=operator, dtype=dtype, phase=phase, columns=columns_of(*dims))
    reply = service.predict(LatencyQuery(**{"device": "a30", "tables": (table,), **query}))
    return reply.tables[0]


def provenances(columns: LatencyColumns) -> list[Provenance]:
    return [Provenance(value) for value in columns.provenance]


def test_far_extrapolation_is_not_less_sure_than_no_measurement(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Bounds grow with distance, up to what is claimed of a device nobody measured."""
    service = make_predictor(gemm_rows())
    train(service)
    near = ask(service, FAR)
    far = ask(service, {"m": 2**40, "n": 1, "k": 1})
    unmeasured = ask(service, {"m": 2**40, "n": 1, "k": 1}, device="h200_sxm")
    assert provenances(far) == [Provenance.EXTRAPOLATED]
    assert provenances(unmeasured) == [Provenance.TRANSFERRED]
    near_width, far_width, unmeasured_width = (
        float(estimate.high_us[0] / estimate.low_us[0]) for estimate in (near, far, unmeasured)
    )
    assert near_width < far_width <= unmeasured_width * (1 + 1e-9)


def test_says_what_each_estimate_rests_on(make_predictor: MakePredictor, train: Train) -> None:
    service = make_predictor(gemm_rows())
    train(service)
    estimates = ask(service, MEASURED, BETWEEN, NEW_SHAPE, FAR)
    assert provenances(estimates) == [
        Provenance.MEASURED,
        Provenance.INTERPOLATED,
        Provenance.INTERPOLATED,
        Provenance.EXTRAPOLATED,
    ]
    expected_us = [
        base_us("gemm", d) / GEMM_EFFICIENCY for d in (MEASURED, BETWEEN, NEW_SHAPE, FAR)
    ]
    assert estimates.latency_us == pytest.approx(expected_us, rel=1e-3)


def test_learns_what_the_roofline_does_not_know(
    make_predictor: MakePredictor, train: Train
) -> None:
    """A slowdown by alignment, which no term of the base latency holds, is in the features."""
    service = make_predictor(gemm_rows(lambda d: 3.0 if d["m"] % 16 else 1.5))
    train(service)
    estimates = ask(service, {"m": 9, "n": 4096, "k": 4096}, {"m": 640, "n": 4096, "k": 4096})
    expected_us = [
        3.0 * base_us("gemm", {"m": 9, "n": 4096, "k": 4096}),
        1.5 * base_us("gemm", {"m": 640, "n": 4096, "k": 4096}),
    ]
    assert estimates.latency_us == pytest.approx(expected_us, rel=0.15)


def test_a_measurement_counts_half(make_predictor: MakePredictor, train: Train) -> None:
    """One outlier among its neighbours is neither believed nor ignored, and is in the interval."""
    rows = gemm_rows(lambda _: 1.5)
    rows[40]["latency_us_median"] *= 1.3
    service = make_predictor(rows)
    train(service)
    estimates = ask(service, rows[40]["dims"])
    smooth_us = 1.5 * base_us("gemm", rows[40]["dims"])
    assert smooth_us * 1.05 < estimates.latency_us[0] < smooth_us * 1.25
    assert estimates.low_us[0] < smooth_us * 1.3 < estimates.high_us[0]


def test_repeats_of_a_point_count_by_their_median(
    make_predictor: MakePredictor, train: Train
) -> None:
    rows = gemm_rows(lambda _: 2.0)
    odd = dict(rows[10], latency_us_median=rows[10]["latency_us_median"] * 1.4)
    service = make_predictor([*rows, rows[10], odd])
    train(service)
    estimates = ask(service, rows[10]["dims"])
    assert estimates.latency_us[0] == pytest.approx(rows[10]["latency_us_median"], rel=1e-3)


def test_flagged_failed_and_impossible_rows_are_not_trained_on(
    make_predictor: MakePredictor, train: Train
) -> None:
    rows = gemm_rows()
    bad = [
        row_of("gemm", MEASURED, 0.001, flags=["too_fast: below half the roofline"]),
        row_of("gemm", MEASURED, None, status="failed", status_reason="out of memory"),
        row_of("gemm", MEASURED, float("nan")),
        row_of("gemm", MEASURED, -1.0),
    ]
    clean = make_predictor(rows)
    assert train(make_predictor([*rows, *bad])).model_version == train(clean).model_version


def test_answers_before_any_training(make_predictor: MakePredictor) -> None:
    """Nothing measured: the roofline, a wide interval, and no version."""
    service = make_predictor([])
    table = OperatorTable(operator="gemm", dtype=DType.BF16, columns=columns_of(MEASURED))
    reply = service.predict(LatencyQuery(device="h100_sxm", tables=(table,)))
    assert reply.model_version == ""
    assert provenances(reply.tables[0]) == [Provenance.ANALYTICAL]
    assert reply.tables[0].high_us[0] > 2 * reply.tables[0].low_us[0]


def test_refuses_to_answer_untrained_only_when_told_to(make_predictor: MakePredictor) -> None:
    with pytest.raises(NotTrainedError):
        ask(make_predictor([]), MEASURED, refuse_extrapolation=True)


def test_refuses_extrapolation_when_told_to(make_predictor: MakePredictor, train: Train) -> None:
    service = make_predictor(gemm_rows())
    train(service)
    assert len(ask(service, MEASURED, NEW_SHAPE, refuse_extrapolation=True).latency_us) == 2
    with pytest.raises(OutOfCoverageError, match="m=65536"):
        ask(service, MEASURED, FAR, refuse_extrapolation=True)
    with pytest.raises(OutOfCoverageError):
        ask(service, RMS_NORM, operator="rms_norm", refuse_extrapolation=True)


def test_an_unmeasured_device_takes_the_efficiency_of_others(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(gemm_rows(lambda _: 1.6))
    train(service)
    estimates = ask(service, MEASURED, device="a100_sxm_80")
    assert provenances(estimates) == [Provenance.TRANSFERRED]
    assert estimates.basis == "gemm on 1 other GPU"
    expected_us = 1.6 * base_us("gemm", MEASURED, "a100_sxm_80")
    assert estimates.latency_us[0] == pytest.approx(expected_us, rel=1e-3)


def test_an_unmeasured_device_takes_the_same_weights_of_others_first(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Weights of another format take other kernels; how tokens were routed does not matter here."""
    rows = gemm_rows(lambda _: 1.6) + gemm_rows(lambda _: 3.2, variant="quant=bfloat16")
    service = make_predictor(rows)
    train(service)
    columns = {name: np.array([value]) for name, value in MEASURED.items()}
    table = OperatorTable(
        operator="gemm",
        dtype=DType.FP16,
        columns=columns,
        variant="quant=bfloat16;routing=balanced",
    )
    reply = service.predict(LatencyQuery(device="a100_sxm_80", tables=(table,)))
    expected_us = 3.2 * base_us("gemm", MEASURED, "a100_sxm_80")
    assert expected_us == pytest.approx(reply.tables[0].latency_us[0], rel=0.01)


def test_an_unmeasured_operator_takes_the_efficiency_of_its_device(
    make_predictor: MakePredictor, train: Train
) -> None:
    dims = {"batch": 4, **MEASURED}
    service = make_predictor(gemm_rows(lambda _: 1.6))
    train(service)
    estimates = ask(service, dims, operator="batched_gemm")
    assert provenances(estimates) == [Provenance.ANALYTICAL]
    assert estimates.basis == "other operators of this device"
    assert estimates.latency_us[0] == pytest.approx(1.6 * base_us("batched_gemm", dims), rel=1e-3)


def test_what_streams_is_not_told_from_matrix_products(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(gemm_rows(lambda _: 1.6))
    train(service)
    assert "the roofline alone" == ask(service, RMS_NORM, operator="rms_norm").basis


def test_half_formats_stand_in_for_each_other_but_are_not_measured(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(gemm_rows())
    train(service)
    fp16, bf16 = ask(service, MEASURED), ask(service, MEASURED, dtype=DType.BF16)
    assert provenances(bf16) == [Provenance.INTERPOLATED]
    assert bf16.latency_us[0] == fp16.latency_us[0]
    assert provenances(ask(service, MEASURED, dtype=DType.FP32)) == [Provenance.TRANSFERRED]


def test_frameworks_are_told_apart_when_asked_for(
    make_predictor: MakePredictor, train: Train
) -> None:
    slow = gemm_rows(lambda _: 2.0, framework="vllm", framework_version="0.19.0")
    fast = gemm_rows(lambda _: 1.5, framework="sglang", framework_version="0.5")
    service = make_predictor([*slow, *fast])
    train(service)
    expected_us = {"vllm 0.19": 2.0, "sglang": 1.5}
    for framework, slowdown in expected_us.items():
        estimates = ask(service, MEASURED, framework=framework)
        assert provenances(estimates) == [Provenance.MEASURED]
        assert estimates.latency_us[0] == pytest.approx(
            slowdown * base_us("gemm", MEASURED), rel=0.01
        )


def test_what_two_frameworks_disagree_on_is_not_averaged(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Asked for any framework, a measured point is as the one with the most points measured it."""
    many = gemm_rows(lambda _: 2.0, framework="vllm", framework_version="0.19.0")
    few = gemm_rows(lambda _: 20.0, framework="sglang", framework_version="0.5")[:10]
    service = make_predictor([*few, *many])
    train(service)
    estimates = ask(service, MEASURED, few[0]["dims"])
    assert provenances(estimates) == [Provenance.MEASURED] * 2
    expected_us = [2.0 * base_us("gemm", dims) for dims in (MEASURED, few[0]["dims"])]
    assert estimates.latency_us.tolist() == pytest.approx(expected_us, rel=0.01)


def test_work_beyond_64_bit_integers_does_not_wrap(make_predictor: MakePredictor) -> None:
    service = make_predictor([])
    huge = {"m": 2**40, "n": 2**40, "k": 2**40}
    assert ask(service, huge).latency_us[0] == pytest.approx(
        2**30 * ask(service, {**huge, "m": 2**10}).latency_us[0], rel=0.01
    )
    with pytest.raises(InvalidRequestError, match="m: must be at most"):
        ask(service, {**huge, "m": 2**63 - 1})


def test_a_few_rows_are_interpolated_without_trees(
    make_predictor: MakePredictor, train: Train
) -> None:
    dims = [{"num_tokens": n, "hidden": 1024} for n in (16, 64, 256, 1024)]
    rows = [row_of("rms_norm", d, 2.5 * base_us("rms_norm", d)) for d in dims]
    service = make_predictor(rows)
    train(service)
    between = {"num_tokens": 100, "hidden": 1024}
    estimates = ask(service, between, operator="rms_norm")
    assert provenances(estimates) == [Provenance.INTERPOLATED]
    assert estimates.latency_us[0] == pytest.approx(2.5 * base_us("rms_norm", between), rel=1e-3)


def test_a_backward_pass_without_rows_is_scaled_from_the_forward_pass(
    make_predictor: MakePredictor, train: Train
) -> None:
    rows = [
        row_of("rms_norm", d, 2.0 * base_us("rms_norm", d))
        for d in ({"num_tokens": n, "hidden": 4096} for n in (16, 64, 256))
    ]
    service = make_predictor(rows)
    train(service)
    forward = ask(service, RMS_NORM, operator="rms_norm")
    backward = ask(service, RMS_NORM, operator="rms_norm", phase=Phase.BACKWARD)
    assert provenances(backward) == [Provenance.ANALYTICAL]
    assert backward.latency_us[0] == pytest.approx(2.0 * forward.latency_us[0])
    assert backward.high_us[0] / backward.low_us[0] > forward.high_us[0] / forward.low_us[0]
    with pytest.raises(InvalidRequestError, match="no backward pass"):
        ask(service, {"num_params": 64}, operator="adam", phase=Phase.BACKWARD)


def test_collectives_follow_their_curve_and_the_ring_law(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(all_reduce_rows())
    train(service)
    known = {"message_bytes": 3_000_000, "devices_per_node": 8, "num_nodes": 1}
    new_group = {"message_bytes": 3_000_000, "devices_per_node": 4, "num_nodes": 1}
    two_nodes = {"message_bytes": 3_000_000, "devices_per_node": 8, "num_nodes": 2}
    estimates = ask(
        service, known, new_group, two_nodes, operator="all_reduce", device="a100_sxm_80"
    )
    assert provenances(estimates) == [
        Provenance.INTERPOLATED,
        Provenance.INTERPOLATED,
        Provenance.EXTRAPOLATED,
    ]
    expected_us = [
        base_us("all_reduce", d, "a100_sxm_80", "a100_dgx") / 0.8
        for d in (known, new_group, two_nodes)
    ]
    assert estimates.latency_us[:2] == pytest.approx(expected_us[:2], rel=1e-3)
    # Of links between nodes nothing was measured but those inside.
    assert estimates.low_us[2] < expected_us[2] < estimates.high_us[2]


def test_a_restart_answers_the_same(make_predictor: MakePredictor, train: Train) -> None:
    first = make_predictor(gemm_rows(lambda d: 1.5 + (d["m"] % 16) / 16))
    report = train(first)
    second = make_predictor([])
    calls = (MEASURED, BETWEEN, NEW_SHAPE, FAR)
    before, after = ask(first, *calls), ask(second, *calls)
    assert after.latency_us.tolist() == before.latency_us.tolist()
    assert after.high_us.tolist() == before.high_us.tolist()
    versions = second.list_models()
    assert [(v.version, v.is_active, v.num_rows) for v in versions] == [
        (report.model_version, True, 64)
    ]
    assert second.get_training_report(first.list_jobs()[0].job_id) == report


def test_a_copy_that_was_not_finished_is_copied_again(
    make_predictor: MakePredictor, train: Train, tmp_path: Path
) -> None:
    service = make_predictor(gemm_rows())
    version = train(service).model_version
    before = ask(service, BETWEEN)
    folder = tmp_path / "state" / "models"
    begun = (folder / f"{version}.models").rename(folder / f".{version}.models.begun")
    # One that was begun just now may be another process's.
    (folder / f".{version}.models.now").touch()
    os.utime(begun, (0.0, 0.0))
    again = make_predictor([])
    found = sorted(path.name for path in folder.glob("*models*"))
    assert [f".{version}.models.now", f"{version}.models"] == found
    assert ask(again, BETWEEN).latency_us.tolist() == before.latency_us.tolist()


def test_training_a_part_keeps_the_rest(make_predictor: MakePredictor, train: Train) -> None:
    rows = [*gemm_rows(), *all_reduce_rows()]
    service = make_predictor(rows)
    whole = train(service)
    part = train(service, TrainRequest(operator="gemm"))
    assert [entry.operator for entry in part.operators] == ["gemm"]
    assert part.model_version == whole.model_version


def test_another_seed_is_another_version(make_predictor: MakePredictor, train: Train) -> None:
    service = make_predictor(gemm_rows())
    first, second = train(service), train(service, TrainRequest(seed=1))
    assert first.model_version != second.model_version
    assert [v.is_active for v in service.list_models()] == [True, False]


def test_the_report_measures_on_rows_left_out(make_predictor: MakePredictor, train: Train) -> None:
    rng = np.random.default_rng(5)
    rows = gemm_rows(lambda _: 1.5 * float(rng.lognormal(0.0, 0.05)))
    entry = train(make_predictor(rows)).operators[0]
    assert (entry.operator, entry.device, entry.num_rows) == ("gemm", "a30", 64)
    assert entry.num_held_out == sum(split.num_held_out for split in entry.splits)
    assert {"inside", "gap", "beyond"} <= {split.split for split in entry.splits}
    assert 0.02 < entry.held_out_mape_ratio < 0.12
    assert entry.held_out_mape_ratio < entry.held_out_p90_ratio
    assert 0.7 < entry.interval_coverage_ratio <= 1.0


def test_a_model_holds_the_rows_it_was_trained_on(
    make_predictor: MakePredictor, train: Train
) -> None:
    """What is recorded while it trains is not in it, and pruning must leave its rows."""
    service = make_predictor(gemm_rows())
    report = train(service)
    catalog = service._catalog
    assert isinstance(catalog, FakeCatalog)
    assert [(report.snapshot_hash, f"model {report.model_version}")] == catalog.holders
    assert gemm_rows() == catalog.snapshots[report.snapshot_hash]


def test_training_on_nothing_fails_with_what_to_do(make_predictor: MakePredictor) -> None:
    service = make_predictor([])
    job = service.create_training(TrainRequest())
    *_, last = service.watch_job(job.job_id)
    assert last.state is JobState.FAILED
    assert "import measurements" in last.error_message


def test_rejects_what_it_cannot_understand(make_predictor: MakePredictor) -> None:
    service = make_predictor([])
    with pytest.raises(UnknownDeviceError):
        ask(service, MEASURED, device="h900")
    with pytest.raises(UnknownOperatorError):
        ask(service, MEASURED, operator="gem")
    with pytest.raises(UnknownOperatorError):
        service.create_training(TrainRequest(operator="gem"))


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"m": [1], "n": [1]}, "k"),
        ({"m": [1], "n": [1], "k": [1], "batch": [1]}, "batch"),
        ({"m": [0], "n": [1], "k": [1]}, "m"),
        ({"m": [1.5], "n": [1], "k": [1]}, "m"),
        ({"m": [1, 2], "n": [1], "k": [1]}, "columns"),
        ({"m": ["x"], "n": [1], "k": [1]}, "m"),
        ({}, "m"),
    ],
)
def test_names_the_column_that_is_wrong(
    make_predictor: MakePredictor, columns: Mapping[str, object], field: str
) -> None:
    table = OperatorTable(operator="gemm", dtype=DType.FP16, columns=columns)
    with pytest.raises(InvalidRequestError) as caught:
        make_predictor([]).predict(LatencyQuery(device="a30", tables=(table,)))
    assert field in [violation.field for violation in caught.value.violations]


def test_an_empty_table_has_an_empty_answer(make_predictor: MakePredictor) -> None:
    table = OperatorTable(operator="gemm", dtype=DType.FP16, columns={"m": [], "n": [], "k": []})
    reply = make_predictor([]).predict(LatencyQuery(device="a30", tables=(table, table)))
    assert [len(columns.latency_us) for columns in reply.tables] == [0, 0]


def test_rows_of_things_without_a_file_are_left_out(
    make_predictor: MakePredictor, train: Train
) -> None:
    rows = gemm_rows()
    strange = [{**rows[0], "device": "tpu"}, {**rows[0], "operator": "fft"}]
    assert train(make_predictor([*rows, *strange])).operators[0].num_rows == 64


def test_warming_up_counts_as_nobody_s_question(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(gemm_rows())
    service.warm_up()
    train(service)
    service.warm_up()
    assert () == tuple(service.statistics.read().operators)
