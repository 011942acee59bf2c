"""Latency surfaces at the bounds of the predictor's interval."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from foretoken.simulator.cost.surface import LatencySurfaces, Surface
from foretoken.simulator.serving.simulation import FetchSurfaces

Bound = Literal["low", "high"]
BOUNDS: tuple[Bound, ...] = ("low", "high")
_SURFACES = ("tokens", "rows", "decode", "mixed", "prefill", "prefill_more", "group")


def fetch_at_bound(fetch: FetchSurfaces, bound: Bound) -> FetchSurfaces:
    """Return what fetches surfaces on which every operator takes a bound of its interval."""
    return lambda spec: take_bound(fetch(spec), bound)


def take_bound(surfaces: LatencySurfaces, bound: Bound) -> LatencySurfaces:
    """Return surfaces whose every point is at a bound of its interval, its parts in proportion."""
    num_groups = len(surfaces.groups)
    moved: dict[str, Any] = {
        name: _move(surface, num_groups, num_groups + BOUNDS.index(bound))
        for name in _SURFACES
        if (surface := getattr(surfaces, name)) is not None
    }
    return replace(surfaces, **moved)


def _move(surface: Surface, num_groups: int, channel: int) -> Surface:
    values = surface.values.copy()
    total = values[:, :num_groups].sum(axis=1)
    ratio = np.divide(values[:, channel], total, out=np.ones_like(total), where=total > 0)
    values[:, :num_groups] *= ratio[:, None]
    return replace(surface, values=values)
