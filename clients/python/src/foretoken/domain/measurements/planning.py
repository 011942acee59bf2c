"""Which points to profile next: the most error removed for the GPU time it takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.alias import settle_devices
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable, Phase
from foretoken.domain.measurements.surface import check_axes
from foretoken.domain.requests.option import check_options, describe, option
from foretoken.domain.results.methods import ResultMethods

# More combinations of the axes than these are not weighed.
MAX_CANDIDATES = 250_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateAxis:
    """Values of one dimension that may be profiled, ascending."""

    dim: str
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What may be profiled and how much GPU time there is.

    The candidates are all combinations of the axes; without any, the operator's own sweep, that of
    a collective inside one node.
    `max_num_points` 0 takes as many as the budget allows.
    """

    device: str = field(metadata=describe("Device: see `foretoken list devices`."))
    operator: str = field(
        metadata=describe("Operator: see `foretoken list operators`.", argument="operator")
    )
    dtype: DType = DType.BF16
    phase: Phase = Phase.FORWARD
    axes: tuple[CandidateAxis, ...] = ()
    topology: str = option("", "Topology, for collectives.")
    framework: str = ""
    variant: str = ""
    budget_gpu_s: float = option(
        600.0, "GPU time there is: `60s`, `10min`.", names=("--budget",), syntax="duration"
    )
    max_num_points: int = option(
        0, "Most points; 0: as many as fit.", minimum=0, names=("--max-points",)
    )
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        settle_devices(self, "device")
        axes = check_axes(self.axes, MAX_CANDIDATES)
        checks = {
            **{violation.field: (False, violation.description) for violation in axes},
            "budget_gpu_s": (self.budget_gpu_s > 0, "must be positive"),
            "seed": (self.seed >= 0, "must not be negative"),
        }
        check_options(self, "plan", checks)

    def to_query(self) -> LatencyQuery:
        """Return the query of no call that all calls of the plan are like."""
        table = OperatorTable(
            operator=self.operator,
            dtype=self.dtype,
            phase=self.phase,
            columns={},
            variant=self.variant,
        )
        return LatencyQuery(
            device=self.device,
            tables=(table,),
            topology=self.topology,
            framework=self.framework,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPoint:
    """A point worth profiling, what it costs, and the mean error expected once it is known.

    `error_ratio` is over all candidates, this point and those before it measured.
    """

    dims: Mapping[str, int]
    latency_us: float
    gpu_s: float
    error_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ProfilePlan(ResultMethods):
    """Points in the order to profile them.

    `error_before_ratio` is the mean error expected over all candidates as things are.
    `num_measured` of the `num_candidates` are in the catalog already and not planned again.
    """

    points: tuple[PlannedPoint, ...] = field(default_factory=tuple)
    num_candidates: int = 0
    num_measured: int = 0
    error_before_ratio: float = 0.0
    error_after_ratio: float = 0.0
    gpu_s: float = 0.0
    model_version: str = ""
