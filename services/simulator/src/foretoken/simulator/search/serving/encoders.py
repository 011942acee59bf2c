"""Replicas that encode images apart, next to the deployments of a search.

Each has one device, and is of the kind that the engines run on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.units import US_PER_S
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces, surface_spec
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.serving.points import Points
from foretoken.simulator.search.serving.prompt_queue import PromptPasses, random_wait_us
from foretoken.simulator.search.serving.space import EngineKind

# Encoders that are busier have queues that a steady load hardly works off.
_BUSIEST_RATIO = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderTimes:
    """What the images of a prompt take a replica, and how long their embeddings are on the way."""

    encode_us: float
    sent_us: float


def time_encoders(
    kinds: Sequence[EngineKind], base: ServingScenario, predictor: LatencySource
) -> Mapping[str, float]:
    """Return what the images of a prompt take one device, in µs, by the devices of some kinds."""
    found: dict[str, float] = {}
    for kind in kinds:
        if kind.encodes_apart and kind.device not in found:
            # Of the rest of a step it needs nothing.
            alone = replace(kind, encodes_apart=False, layout=ParallelLayout(), speculation="none")
            spec = surface_spec(alone.scenario(base, 1, 1), 1)
            found[kind.device] = fetch_surfaces(spec, predictor).encoding_us
    return found


def put_before(points: Points, num_encoders: int, times: Sequence[EncoderTimes]) -> Points:
    """Return deployments with encoders before them, `times` by the kind of their engines.

    Prompts come at random. Deployments that carry more than the encoders do are ruled out.
    """
    encode_us = np.array([each.encode_us for each in times] or [0.0])[points.kind]
    sent_us = np.array([each.sent_us for each in times] or [0.0])[points.kind]
    each_rps = points.rate_rps / num_encoders
    passes = PromptPasses(
        alone_us=np.broadcast_to(encode_us, each_rps.shape),
        single_us=np.broadcast_to(encode_us, each_rps.shape),
        each_us=np.broadcast_to(encode_us, each_rps.shape),
        most=np.ones(each_rps.shape),
    )
    replicas = np.full(len(points), num_encoders, dtype=np.int64)
    wait_us = random_wait_us(passes, each_rps, 1.0, replicas)
    points = replace(
        points,
        encoders=replicas,
        num_devices=points.num_devices + num_encoders,
        ttft_us=points.ttft_us + encode_us + sent_us + wait_us,
    )
    most_rps = num_encoders * US_PER_S / np.maximum(encode_us, 1e-9) * _BUSIEST_RATIO
    late = points.is_ok & (points.rate_rps[0] > most_rps)
    reasons = [
        f"{num_encoders} encoders carry {format_number(most, 4)} requests/s of"
        f" {format_number(rate, 4)}"
        for most, rate in zip(most_rps[late], points.rate_rps[0][late], strict=True)
    ]
    return points.rule_out(late, "encoders", reasons)
