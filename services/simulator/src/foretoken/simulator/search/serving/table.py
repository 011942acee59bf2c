"""The points of a search as the table that its report carries."""

from collections.abc import Sequence

import numpy as np

from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.search import CandidateColumns
from foretoken.simulator.search.pareto import pareto_front
from foretoken.simulator.search.serving.engine_answer import NOT_ANSWERED, EngineAnswer
from foretoken.simulator.search.serving.points import Points
from foretoken.simulator.search.serving.rank import Figures
from foretoken.simulator.search.serving.space import EngineKind, SearchSpace

_US_PER_MS = 1000.0


def build_table(
    points: Points, figures: Figures, answers: Sequence[EngineAnswer], space: SearchSpace
) -> CandidateColumns:
    """Return the columns of points, without ranks.

    The fronts are of all that fit in memory, whether or not they meet the targets.
    """
    kinds = [answer.kind for answer in answers]
    has_prefill = points.prefill_kind >= 0
    tpot_ms, ttft_ms = points.tpot_us / _US_PER_MS, points.ttft_us / _US_PER_MS
    runs = points.rate_rps[0] > 0
    runs &= ~np.isin(points.verdict, (*NOT_ANSWERED, "devices"))
    per_user = 1000.0 / np.where(tpot_ms[0] > 0, tpot_ms[0], np.inf)
    cost = figures.usd_per_million[0]
    return CandidateColumns(
        name=_names(points, answers, space),
        device=_pick([kind.device for kind in kinds], points.kind),
        mode=np.where(has_prefill, "disaggregated", "aggregated").astype(object),
        profile=_pick([kind.profile for kind in kinds], points.kind),
        quantization=_pick([kind.quantization for kind in kinds], points.kind),
        speculation=_pick([kind.speculation for kind in kinds], points.kind),
        rules=_pick([kind.rules for kind in kinds], points.kind),
        kv_tiers=_pick([kind.kv_tiers for kind in kinds], points.kind),
        router=_pick(space.routers, points.router),
        num_devices=points.num_devices,
        num_idle_devices=figures.num_idle,
        num_counted_devices=figures.num_counted,
        replicas=points.replicas,
        **_degrees(points, kinds),
        batch_size=points.batch,
        num_batched_tokens=points.step_limit,
        encoders=points.encoders,
        prefill_replicas=points.prefill_replicas,
        prefill_batch_size=points.prefill_batch,
        ttft_ms=ttft_ms[0],
        ttft_low_ms=ttft_ms.min(axis=0),
        ttft_high_ms=ttft_ms.max(axis=0),
        tpot_ms=tpot_ms[0],
        tpot_low_ms=tpot_ms.min(axis=0),
        tpot_high_ms=tpot_ms.max(axis=0),
        request_throughput_rps=points.rate_rps[0],
        output_throughput_tps=figures.tps[0],
        output_throughput_tps_per_gpu=figures.tps_per_gpu[0],
        tps_per_gpu_low=figures.tps_per_gpu.min(axis=0),
        tps_per_gpu_high=figures.tps_per_gpu.max(axis=0),
        tps_per_user=per_user,
        usd_per_million_output_tokens=cost,
        usd_per_hour=figures.usd_per_hour,
        kv_utilization_ratio=points.kv_ratio,
        verdict=points.verdict,
        reason=points.reason,
        rank=np.zeros(len(points), dtype=np.int64),
        is_pareto_user=pareto_front(figures.tps_per_gpu[0], -per_user, runs),
        is_pareto_cost=pareto_front(-tpot_ms[0], cost, runs & (cost > 0)),
    )


def _degrees(points: Points, kinds: Sequence[EngineKind]) -> dict[str, np.ndarray]:
    """Return the degrees of each point's engines; those of prefill are 0 where there is none."""
    found = {}
    for prefix, numbers, axes in (
        ("", points.kind, ("tp", "pp", "dp", "ep")),
        ("prefill_", points.prefill_kind, ("tp", "pp", "ep")),
    ):
        for axis in axes:
            degrees = _pick([kind.layout.degree(axis) for kind in kinds], numbers)
            found[f"{prefix}{axis}"] = degrees * (numbers >= 0)
    return found


def name_of(points: Points, row: int, answers: Sequence[EngineAnswer], space: SearchSpace) -> str:
    """Return the name of one point."""
    return str(_names(points.take(np.array([row])), answers, space)[0])


def _pick(values: Sequence[object], numbers: np.ndarray) -> np.ndarray:
    """Return the value of each number."""
    is_text = any(isinstance(value, str) for value in values)
    chosen: np.ndarray = np.array(values or [0], dtype=object if is_text else np.int64)[numbers]
    return chosen


def _names(points: Points, answers: Sequence[EngineAnswer], space: SearchSpace) -> np.ndarray:
    """Return what tells each point from all others, and only that."""
    parts = [_describe(answer.kind.layout) for answer in answers]
    extras = [_extras(answers, number) for number in range(len(answers))]
    routers = [f" {name}" if len(space.routers) > 1 else "" for name in space.routers]
    has_limits = len(space.step_limits) > 1
    rows = zip(
        points.kind.tolist(),
        points.prefill_kind.tolist(),
        points.router.tolist(),
        points.replicas.tolist(),
        points.batch.tolist(),
        points.step_limit.tolist(),
        points.prefill_replicas.tolist(),
        points.prefill_batch.tolist(),
        points.prefill_limit.tolist(),
        points.encoders.tolist(),
        strict=True,
    )
    names = []
    for kind, first, router, num, batch, limit, num_first, first_batch, first_limit, eyes in rows:
        before = f"{eyes} x encoder + " if eyes else ""
        tail = extras[kind] + routers[router]
        if first < 0:
            chunk = f" c{limit}" if has_limits else ""
            names.append(f"{before}{num} x {parts[kind]} b{batch}{chunk}{tail}")
            continue
        chunk = f" c{first_limit}" if has_limits else ""
        other = extras[first] if extras[first] != extras[kind] else ""
        names.append(
            f"{before}{num_first} x {parts[first]} b{first_batch}{chunk}{other}"
            f" + {num} x {parts[kind]} b{batch}{tail}"
        )
    return np.array(names, dtype=object)


def _describe(layout: ParallelLayout) -> str:
    others = [
        f" {axis}{layout.degree(axis)}" for axis in ("pp", "dp", "ep") if layout.degree(axis) > 1
    ]
    return f"tp{layout.tp}" + "".join(others)


def _extras(answers: Sequence[EngineAnswer], number: int) -> str:
    """Return the device, profile, format, drafts and so on of an engine, of which are several."""
    formats = []
    unnamed = {"quantization": "unquantized", "speculation": "as given"}
    for name in ("device", "profile", "quantization", "speculation", "rules", "kv_tiers"):
        values = {getattr(answer.kind, name) for answer in answers}
        if len(values) > 1:
            formats.append(getattr(answers[number].kind, name) or unnamed.get(name, ""))
    return "".join(f" {value}" for value in formats)
