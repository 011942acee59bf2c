"""Why an estimate is what it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.measurements.estimate import LatencyEstimate
from foretoken.domain.results.methods import ResultMethods


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberAnswer:
    """What one way of estimating says of the call, and its share in the answer (log space)."""

    name: str
    latency_us: float
    weight_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """By what factor a feature moves the trees' answer away from their average."""

    feature: str
    value: float
    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredNeighbour:
    """A measured point near the call."""

    dims: Mapping[str, int]
    latency_us: float
    distance_octaves: float


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Explanation(ResultMethods):
    """One estimate and what it is made of, the strongest first in every list.

    `floor_us` is what launching costs, `compute_us` and `memory_us` (links, for a collective) the
    device's limits; `efficiency_ratio` the larger of the two over the estimate. `tier` says how the
    call lies to what was measured ("inside", "gap", "new configuration", "beyond", "unmeasured").
    """

    estimate: LatencyEstimate
    floor_us: float
    compute_us: float
    memory_us: float
    efficiency_ratio: float
    tier: str
    members: tuple[MemberAnswer, ...] = field(default_factory=tuple)
    contributions: tuple[Contribution, ...] = field(default_factory=tuple)
    neighbours: tuple[MeasuredNeighbour, ...] = field(default_factory=tuple)
