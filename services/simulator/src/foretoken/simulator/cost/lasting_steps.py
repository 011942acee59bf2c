"""What power slows of steps that last.

Prompts keep a device's arithmetic busy for so long that its power meets the limit, and the longer a
step runs the more of that shows. Decoding takes its time from the memory: 137 to 300 of the 700 W
of an H200 (Ma et al., "The Illusion of Power Capping in LLM Decode", 2026), so steps of no more
tokens than sequences may decode take what bursts of their operators take.
"""

from dataclasses import replace

import numpy as np

from foretoken.domain.units import US_PER_S
from foretoken.simulator.cost.surface import (
    LatencySurfaces,
    PromptSurfaces,
    Surface,
    SurfaceSpec,
)
from foretoken.simulator.grid import Floats, cross_points

# So long after a load began 63 % of its slowdown have come. Source: bench_sustained.py, GEMMs of an
# H200 in runs of different length: 0.17 to 0.36 s by format and slowdown; a B200's in BF16 0.09 and
# 0.26.
_RESPONSE_S = 0.25


def blend_lasting(
    spec: SurfaceSpec, bursts: LatencySurfaces, lasting: PromptSurfaces
) -> LatencySurfaces:
    """Return surfaces whose prompts are slowed as far as their steps last.

    `bursts` and `lasting` rest on times of the same operators in bursts and for long.
    """
    step_us = _StepTime(bursts)
    new_tokens = cross_points(bursts.prefill.axes)[0]
    alone_us = step_us.of(new_tokens) + step_us.busy_us(bursts.prefill)
    prefill = _share(spec, new_tokens, alone_us)
    num_tokens = bursts.tokens.axes[0]
    blended = replace(
        bursts,
        tokens=_blend(
            bursts.tokens, lasting.tokens, _share(spec, num_tokens, step_us.of(num_tokens))
        ),
        prefill=_blend(bursts.prefill, lasting.prefill, prefill),
        prefill_more=_blend(bursts.prefill_more, lasting.prefill_more, prefill),
    )
    if bursts.group is None or lasting.group is None:
        return blended
    own_tokens = bursts.group.axes[0] / bursts.num_engines
    shared = _share(spec, own_tokens, step_us.of(own_tokens))
    return replace(blended, group=_blend(bursts.group, lasting.group, shared))


class _StepTime:
    """How long a device computes for so many tokens, without attention, by stage."""

    def __init__(self, surfaces: LatencySurfaces) -> None:
        self._num_groups = len(surfaces.groups)
        self._tokens, self._group = surfaces.tokens, surfaces.group
        self._num_engines = surfaces.num_engines

    def busy_us(self, surface: Surface) -> Floats:
        total: Floats = surface.values[:, : self._num_groups].sum(axis=1)
        return total

    def of(self, num_tokens: Floats) -> Floats:
        """Return µs by [stage, count]."""
        own = self._at(self._tokens, num_tokens)
        if self._group is None:
            return own
        return own + self._at(self._group, num_tokens * self._num_engines)

    def _at(self, surface: Surface, counts: Floats) -> Floats:
        return np.stack(
            [np.interp(counts, surface.axes[0], stage) for stage in self.busy_us(surface)]
        )


def _share(spec: SurfaceSpec, num_tokens: Floats, step_us: Floats) -> Floats:
    """Return how much of a slowdown shows in steps of so many tokens, [stage, point]."""
    share = _slowed_share(step_us / US_PER_S)
    return np.where(num_tokens > spec.limits.num_rows, share, 0.0)


def _blend(burst: Surface, lasting: Surface, share: Floats) -> Surface:
    values = burst.values + share[:, None, :] * (lasting.values - burst.values)
    return replace(burst, values=values)


def _slowed_share(lasts_s: Floats) -> Floats:
    """Return how much of a slowdown shows on average in what lasts so long, from a rest on."""
    times = np.maximum(lasts_s / _RESPONSE_S, np.finfo(float).tiny)
    share: Floats = 1.0 + np.expm1(-times) / times
    return share
