"""What users and payers ask of deployments: tokens/s of a device, dollars of a token."""

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
    devices = np.array([answer.kind.layout.num_devices for answer in answers] or [0])
    hour = points.replicas * devices[points.kind] * prices[points.kind]
    has_prefill = points.prefill_kind >= 0
    first = np.where(has_prefill, points.prefill_kind, 0)
    hour = hour + has_prefill * points.prefill_replicas * devices[first] * prices[first]
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
