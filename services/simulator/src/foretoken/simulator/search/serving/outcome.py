"""The closed-form answer of a request: every point of its space, judged and ranked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.requests.search import ServingSearchRequest
from foretoken.simulator.search.serving.aggregate import make_aggregated
from foretoken.simulator.search.serving.answer_cache import EngineAnswers
from foretoken.simulator.search.serving.figures import Figures, find_figures
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.match import PairSearch, match_pairs
from foretoken.simulator.search.serving.points import Points, join_points
from foretoken.simulator.search.serving.rank import Ranking, rank_points
from foretoken.simulator.search.serving.space import SearchSpace
from foretoken.simulator.search.serving.target import rule_out_late


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedForm:
    """The closed-form answer of a request: every point, ranked, and what it rests on.

    `num_ruled_out` counts by verdict the pairs with a pool that is ruled out by itself; they are
    not among the points.
    """

    request: ServingSearchRequest
    space: SearchSpace
    load: LoadProfile
    answers: EngineAnswers
    points: Points
    figures: Figures
    ranking: Ranking
    num_ruled_out: Mapping[str, int]


def make_closed_form(
    request: ServingSearchRequest, space: SearchSpace, load: LoadProfile, answers: EngineAnswers
) -> ClosedForm:
    """Return every point of a space and its rank, from the answers of the engines."""
    parts: list[Points] = []
    ruled_out: Mapping[str, int] = {}
    if "aggregated" in space.modes:
        sizes = (space.max_devices, request.target_rps)
        parts.append(make_aggregated(answers.engines, load, *sizes))
    if "disaggregated" in space.modes:
        pairs = PairSearch(
            scenario=request.scenario,
            targets=request.targets,
            load=load,
            max_devices=space.max_devices,
            target_rps=request.target_rps,
            counts_idle=request.counts_idle,
        )
        found, ruled_out = match_pairs(pairs, answers.engines)
        parts.append(found)
    points = _with_routers(join_points(parts), len(space.routers))
    points = _rule_out_large(points, space.max_devices)
    points = rule_out_late(points, request, load)
    figures = find_figures(points, answers.engines, load, request)
    return ClosedForm(
        request=request,
        space=space,
        load=load,
        answers=answers,
        points=points,
        figures=figures,
        ranking=rank_points(points, figures, request.objective),
        num_ruled_out={name: num * len(space.routers) for name, num in ruled_out.items()},
    )


def _with_routers(points: Points, num_routers: int) -> Points:
    """Return the points behind each router; one replica has no need of any, so one is enough."""
    if num_routers == 1:
        return points
    entries = np.where(points.prefill_kind >= 0, points.prefill_replicas, points.replicas)
    rows = np.arange(len(points))
    parts = [points]
    for router in range(1, num_routers):
        other = points.take(rows[entries > 1])
        parts.append(replace(other, router=other.router + router))
    return join_points(parts)


def _rule_out_large(points: Points, max_devices: int) -> Points:
    large = points.is_ok & (points.num_devices > max_devices)
    reasons = [
        f"needs {num} devices of {max_devices}" for num in points.num_devices[large].tolist()
    ]
    return points.rule_out(large, "devices", reasons)
