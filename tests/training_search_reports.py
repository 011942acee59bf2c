"""Reports of training searches as the simulator gives them, from a made-up rule."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretoken.domain import schema
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    NodeGroup,
    RuledOut,
    SpaceCell,
    StrategyColumns,
    StrategyFinalist,
    StrategySensitivity,
    TieCall,
    TrainingSearchReport,
    TrainingSearchRequest,
    TrainingSpace,
)
from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.training_report import StageMemory, TrainingReport
from foretoken.domain.units import GIB

_NUM_DEVICES = 16
_GLOBAL_BATCH_SIZE = 64
_SEQUENCE_LENGTH = 4096
_USD_PER_HOUR = 2.5
_DEVICE_GIB = 80.0
Point = dict[str, Any]


def build_training_search_request() -> TrainingSearchRequest:
    """Return the request that `build_training_search` would answer."""
    return TrainingSearchRequest(
        scenario=TrainingScenario(
            model=load_model("llama-2-7b"),
            device="a100_sxm_80",
            global_batch_size=_GLOBAL_BATCH_SIZE,
        ),
        space=TrainingSpace(
            num_devices=(_NUM_DEVICES,), usd_per_hour={"a100_sxm_80": _USD_PER_HOUR}
        ),
        num_finalists=3,
        has_sensitivity=True,
    )


def build_training_search(name_suffix: str = "") -> TrainingSearchReport:
    """Return the report of a search over tp, pp, micro batch and recomputation.

    `name_suffix` ends every name. Of its 66 legal strategies 51 fit.
    """
    points = [
        _point(tp, pp, micro_batch, recompute, name_suffix)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4)
        for micro_batch in (1, 2, 4)
        for recompute in ("none", "full")
        if _GLOBAL_BATCH_SIZE * tp * pp // _NUM_DEVICES >= micro_batch and tp * pp <= _NUM_DEVICES
    ]
    fitting = sorted(
        (point for point in points if point["margin_bytes"] >= 0),
        key=lambda point: -point["tokens_per_s_per_gpu"],
    )
    for place, point in enumerate(fitting):
        point["rank"] = place + 1
    _mark_fronts(fitting)
    return TrainingSearchReport(
        num_points=1000,
        num_legal=len(points),
        num_fitting=len(fitting),
        num_simulated=3,
        num_shapes=24,
        ruled_out=_ruled_out(points, f"tp64{name_suffix}"),
        best=_best(fitting),
        # The second is within the error of the first.
        ties=tuple(point["name"] for point in fitting[:2]),
        tie_calls=(
            TieCall(
                operator="all_reduce",
                words="message_bytes=1048576 devices_per_node=4 num_nodes=1",
                device="a100_sxm_80",
                topology="a100_dgx",
                difference_ratio=0.0234,
            ),
        ),
        finalists=tuple(_finalist(place, point) for place, point in enumerate(fitting[:3])),
        sensitivities=_sensitivities(fitting[0]),
        cells=(*_cells(points, "tp", "pp"), *_cells(points, "micro_batch_size", "recompute")),
        candidates=StrategyColumns(
            **{name: tuple(point[name] for point in fitting) for name in fitting[0]}
        ),
        closed_form_s=0.01,
        cpu_s=4.2,
        wall_s=2.5,
        num_workers=1,
        model_version="v1",
        notes=("no measurements of this interconnect",),
        request_json=json.dumps(schema.encode(build_training_search_request())),
        job_id="search-1",
    )


def _ruled_out(points: Sequence[Point], illegal: str) -> tuple[RuledOut, ...]:
    too_large = [point for point in points if point["margin_bytes"] < 0]
    return (
        RuledOut(
            verdict="memory",
            num_strategies=len(too_large),
            example=too_large[0]["name"],
            reason="stage 0 needs 94.1 GiB of 80 GiB",
        ),
        RuledOut(
            verdict="heads",
            num_strategies=1000 - len(points),
            example=illegal,
            reason="tp 64 does not divide the 32 heads",
        ),
    )


def _best(fitting: Sequence[Point]) -> dict[str, str]:
    """Return the best by each objective; of one cluster the fastest is the cheapest."""
    fastest = dict.fromkeys(("throughput_per_gpu", "step_time", "cost"), fitting[0]["name"])
    roomiest = max(fitting, key=lambda point: point["margin_bytes"])
    return {**fastest, "memory_headroom": roomiest["name"]}


def build_placed_search() -> TrainingSearchReport:
    """Return the report of a search whose stages lie on two types of device."""
    report = build_training_search()
    count = len(report.candidates.name)
    groups = (
        NodeGroup(device="a100_sxm_80", num_nodes=2, devices_per_node=4),
        NodeGroup(device="h100_sxm", devices_per_node=8),
    )
    request = replace(build_training_search_request(), space=TrainingSpace(node_groups=groups))
    candidates = replace(
        report.candidates,
        placement=("2 x a100_sxm_80,h100_sxm", *["a100_sxm_80,h100_sxm"] * (count - 1)),
        stage_layers=("8,9,15", *["12,20"] * (count - 1)),
    )
    return replace(
        report,
        candidates=candidates,
        request_json=json.dumps(schema.encode(request)),
    )


def _point(tp: int, pp: int, micro_batch: int, recompute: str, suffix: str) -> Point:
    dp = _NUM_DEVICES // tp // pp
    num_micro_batches = _GLOBAL_BATCH_SIZE // dp // micro_batch
    per_gpu = 3600.0 * (0.97**tp) * micro_batch / (micro_batch + 0.15)
    per_gpu *= num_micro_batches / (num_micro_batches + pp - 1)
    if recompute == "full":
        per_gpu *= 0.77
    held = 12.0 + 100.0 / tp / pp + (2.0 if recompute == "full" else 34.0 / tp) * micro_batch
    tokens = _GLOBAL_BATCH_SIZE * _SEQUENCE_LENGTH
    step_ms = tokens / per_gpu / _NUM_DEVICES * 1000.0
    usd_per_step = _USD_PER_HOUR * _NUM_DEVICES * step_ms / 3.6e6
    recomputes = f" recompute-{recompute}" if recompute != "none" else ""
    return {
        "name": f"tp{tp} pp{pp} dp{dp} mbs{micro_batch}{recomputes}{suffix}",
        "device": "a100_sxm_80",
        "num_devices": _NUM_DEVICES,
        "tp": tp,
        "pp": pp,
        "virtual_stages": 1,
        "dp": dp,
        "cp": 1,
        "ep": 1,
        "micro_batch_size": micro_batch,
        "num_micro_batches": num_micro_batches,
        "global_batch_size": _GLOBAL_BATCH_SIZE,
        "sequence_parallel": tp > 1,
        "zero_stage": 1,
        "shard_degree": 0,
        "overlap": "data",
        "recompute": recompute,
        "weight_parallel": "",
        "weight_degree": 0,
        "pipeline_schedule": "one_f_one_b",
        "placement": "",
        "stage_layers": "",
        "step_time_ms": step_ms,
        "step_time_low_ms": 0.9 * step_ms,
        "step_time_high_ms": 1.2 * step_ms,
        "tokens_per_s": per_gpu * _NUM_DEVICES,
        "tokens_per_s_per_gpu": per_gpu,
        "mfu_ratio": per_gpu / 8000.0,
        "bubble_ratio": (pp - 1) / (num_micro_batches + pp - 1),
        "exposed_communication_ratio": 0.02 * tp,
        "reserved_bytes": held * GIB,
        "margin_bytes": (_DEVICE_GIB - held) * GIB,
        "usd_per_step": usd_per_step,
        "usd_per_billion_tokens": usd_per_step / tokens * 1e9,
        "rank": 0,
        "is_pareto_cost": False,
        "is_pareto_memory": False,
    }


def _mark_fronts(points: Sequence[Point]) -> None:
    """Mark those that none beats; of one cluster the fastest is the cheapest."""
    points[0]["is_pareto_cost"] = True
    for point in points:
        point["is_pareto_memory"] = not any(
            other["margin_bytes"] > point["margin_bytes"]
            and other["tokens_per_s_per_gpu"] > point["tokens_per_s_per_gpu"]
            for other in points
        )


def _cells(points: Sequence[Point], row_axis: str, column_axis: str) -> tuple[SpaceCell, ...]:
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((str(point[row_axis]), str(point[column_axis])), []).append(point)
    cells = []
    for (row, column), group in groups.items():
        fitting = [point for point in group if point["margin_bytes"] >= 0]
        best = max(fitting, key=lambda point: point["tokens_per_s_per_gpu"], default=None)
        cells.append(
            SpaceCell(
                row_axis=row_axis,
                column_axis=column_axis,
                row=row,
                column=column,
                num_legal=len(group),
                num_fitting=len(fitting),
                best=best["name"] if best else "",
                tokens_per_s_per_gpu=best["tokens_per_s_per_gpu"] if best else 0.0,
            )
        )
    return tuple(cells)


def _finalist(place: int, point: Point) -> StrategyFinalist:
    step_ms = 1.02 * point["step_time_ms"]
    held = point["reserved_bytes"]
    # The last one does not fit once it is simulated.
    fits = place < 2
    return StrategyFinalist(
        candidate=place,
        name=point["name"],
        rank=place + 1 if fits else 0,
        closed_form_ms=point["step_time_ms"],
        report=TrainingReport(
            feasibility=Feasibility(
                is_feasible=fits, reason="" if fits else "stage 0 needs 81.0 GiB of 80 GiB"
            ),
            step_time_ms=step_ms,
            step_time_low_ms=0.9 * step_ms,
            step_time_high_ms=1.2 * step_ms,
            mfu_ratio=point["mfu_ratio"] / 1.02,
            bubble_ratio=point["bubble_ratio"],
            exposed_communication_ratio=0.1,
            tokens_per_s=point["tokens_per_s"] / 1.02,
            tokens_per_s_per_gpu=point["tokens_per_s_per_gpu"] / 1.02,
            num_devices=_NUM_DEVICES,
            num_micro_batches=point["num_micro_batches"],
            step_time_ms_by_group={
                "gemm": 0.75 * step_ms,
                "collective": 0.1 * step_ms,
                "bubble": 0.1 * step_ms,
                "optimizer": 0.05 * step_ms,
            },
            exposed_ms_by_axis={"tp": 0.06 * step_ms, "dp": 0.04 * step_ms},
            memory=(
                StageMemory(
                    stage=0,
                    weights_bytes=0.2 * held,
                    gradients_bytes=0.2 * held,
                    optimizer_bytes=0.3 * held,
                    activations_bytes=0.2 * held,
                    reserved_bytes=held,
                    device_bytes=_DEVICE_GIB * GIB,
                ),
            ),
            device_memory_bytes=_DEVICE_GIB * GIB,
        ),
        scenario_json=json.dumps(schema.encode(_scenario(point))),
    )


def _scenario(point: Point) -> TrainingScenario:
    layout = ParallelLayout(tp=point["tp"], pp=point["pp"], dp=point["dp"])
    return replace(
        build_training_search_request().scenario,
        name=point["name"],
        layout=layout,
        micro_batch_size=point["micro_batch_size"],
    )


def _sensitivities(best: Point) -> tuple[StrategySensitivity, ...]:
    figures = {"links 2x": 1.06, "memory capacity +50 %": 1.0, "half the batch": 0.93}
    return tuple(
        StrategySensitivity(
            change=change,
            best=best["name"] if ratio != 0.93 else "another layout",
            step_time_ms=best["step_time_ms"] / ratio,
            tokens_per_s_per_gpu=best["tokens_per_s_per_gpu"] * ratio,
            throughput_ratio=ratio,
            same_throughput_ratio=ratio if ratio != 0.93 else 0.91,
            num_fitting=40,
            is_same_best=ratio != 0.93,
        )
        for change, ratio in figures.items()
    )
