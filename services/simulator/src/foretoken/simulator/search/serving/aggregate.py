"""Deployments of replicas that are alike."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.simulator.search.serving.engine_answer import EngineAnswer
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.points import Points, empty_points, join_points
from foretoken.simulator.search.serving.sizing import count_replicas


def make_aggregated(
    answers: Sequence[EngineAnswer], load: LoadProfile, max_devices: int, target_rps: float
) -> Points:
    """Return the deployments of every kind of engine at every setting, sized for the target.

    Without a target they take as many devices as there may be.
    """
    return join_points(
        [
            _deployments(number, answer, load, (max_devices, target_rps))
            for number, answer in enumerate(answers)
        ]
    )


def _deployments(
    number: int, answer: EngineAnswer, load: LoadProfile, size: tuple[int, float]
) -> Points:
    found = answer.aggregated
    max_devices, target_rps = size
    devices = answer.kind.layout.num_devices
    replicas = count_replicas(found.state.rate_rps[0], devices, max_devices, target_rps)
    carried = found.state.rate_rps * replicas
    points = empty_points(len(found.batch))
    used = load.context_mean / (load.prefill_mean + load.decode_mean)
    return replace(
        points,
        kind=points.kind + number,
        batch=found.batch,
        step_limit=found.step_limit,
        replicas=replicas,
        num_devices=replicas * devices,
        kv_ratio=found.batch / np.maximum(found.room, 1.0) * used * (found.room > 0),
        ttft_us=found.state.ttft_us,
        tpot_us=found.state.tpot_us,
        rate_rps=np.minimum(carried, target_rps) if target_rps else carried,
        verdict=found.verdict,
        reason=found.reason,
    )
