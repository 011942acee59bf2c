"""What points cost and carry, and their order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.requests.search import ServingSearchRequest
from foretoken.domain.units import S_PER_HOUR
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.serving.engine_answer import EngineAnswer
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.points import Points

_MILLION = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """[variant, point]: output tokens/s of all and of a device, dollars a million output tokens.

    A point leaves `num_idle` of the devices there are; its tokens/s and dollars are those of the
    `num_counted` ones.
    """

    num_idle: Ints
    num_counted: Ints
    tps: Floats
    tps_per_gpu: Floats
    usd_per_million: Floats
    usd_per_hour: Floats


def find_figures(
    points: Points,
    answers: Sequence[EngineAnswer],
    load: LoadProfile,
    request: ServingSearchRequest,
) -> Figures:
    """Return the figures of points; without prices all cost 0.

    Where idle devices count they cost what the used ones cost on average.
    """
    tps = points.rate_rps * load.decode_mean
    prices = np.array([_price(request, answer.kind.device) for answer in answers] or [0.0])
    devices = np.array([answer.num_devices for answer in answers] or [0])
    hour = points.replicas * devices[points.kind] * prices[points.kind]
    has_prefill = points.prefill_kind >= 0
    first = np.where(has_prefill, points.prefill_kind, 0)
    hour = hour + has_prefill * points.prefill_replicas * devices[first] * prices[first]
    hour = hour + points.encoders * prices[points.kind]
    safe = np.where(tps > 0, tps, 1.0)
    used = np.maximum(points.num_devices, 1)
    idle = np.maximum(request.num_owned_devices - used, 0)
    counted = used + idle if request.counts_idle else used
    hour = hour * counted / used
    return Figures(
        num_idle=idle,
        num_counted=counted,
        tps=tps,
        tps_per_gpu=tps / counted,
        usd_per_million=np.where(tps > 0, hour / S_PER_HOUR / safe * _MILLION, 0.0),
        usd_per_hour=hour,
    )


def _price(request: ServingSearchRequest, device: str) -> float:
    named = request.space.usd_per_hour.get(device)
    if named is not None:
        return float(named)
    return request.scenario.device_usd_per_hour if device == request.scenario.device else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """`order` of all points, those that qualify first; `rank` of each in that order, 0 for others.

    `leaders` are the best points of the deployments that share the first rank.
    """

    order: Ints
    rank: Ints
    leaders: Ints


def rank_points(points: Points, figures: Figures, objective: str) -> Ranking:
    """Return the order by an objective; what is equal in it goes by TPOT, then by devices.

    A deployment is what is left when batch and step limit are not looked at; of each the best point
    stands for it. It ties with the winner where the value of either is within the interval of the
    other. Points of one deployment rest on the same operators, whose errors they share, so among
    them the estimates decide.
    """
    value = _values(figures, points, objective)
    is_ok = points.is_ok
    order = np.lexsort((points.num_devices, points.tpot_us[0], value[0], ~is_ok))
    num_ok = int(is_ok.sum())
    rank = np.zeros(len(points), dtype=np.int64)
    if num_ok == 0:
        return Ranking(order=order, rank=rank, leaders=order[:0])
    best = _firsts(points, order[:num_ok])
    winner = order[0]
    low, high = value[1:].min(axis=0), value[1:].max(axis=0)
    ties = best[(low[best] <= value[0][winner]) & (value[0][best] <= high[winner])]
    # Those that share the first place come first.
    rest = order[:num_ok][~np.isin(order[:num_ok], ties)]
    order = np.concatenate((ties, rest, order[num_ok:]))
    rank[: len(ties)] = 1
    rank[len(ties) : num_ok] = np.arange(len(ties) + 1, num_ok + 1)
    return Ranking(order=order, rank=rank, leaders=ties)


def deployment_keys(points: Points) -> np.ndarray:
    """Return what tells deployments apart, [point, number]: all but batch and step limits."""
    return np.stack(
        (
            points.kind,
            points.prefill_kind,
            points.router,
            points.replicas * (points.prefill_kind < 0),
        ),
        axis=1,
    )


def _firsts(points: Points, order: Ints) -> Ints:
    """Return the first point of each deployment, in order."""
    _, firsts = np.unique(deployment_keys(points)[order], axis=0, return_index=True)
    return order[np.sort(firsts)]


def _values(figures: Figures, points: Points, objective: str) -> Floats:
    """Return [variant, point] of what is to be small."""
    if objective == "cost":
        return figures.usd_per_million
    if objective == "num_devices":
        return np.broadcast_to(points.num_devices, figures.tps_per_gpu.shape).astype(np.float64)
    if objective == "latency":
        return points.tpot_us
    return -figures.tps_per_gpu
