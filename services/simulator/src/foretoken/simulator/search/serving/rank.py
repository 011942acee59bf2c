"""The order of deployments, and which of them the predictor's error cannot tell apart."""

from dataclasses import dataclass

import numpy as np

from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.serving.figures import Figures
from foretoken.simulator.search.serving.points import Points


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
