"""What the predictor can be told."""

from dataclasses import dataclass, field

from foretoken.domain.errors import FieldViolation, InvalidRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class BoosterConfig:
    """How one LightGBM model is grown.

    The defaults were chosen on held-out sizes and held-out model configurations of the A30, A100,
    H100, RTX 4090 and RTX PRO 6000 profiles: with the neighbour correction more or larger trees
    gain less than 0.02 percentage points there and cost twice the time.
    """

    num_trees: int = 200
    num_leaves: int = 15
    learning_rate: float = 0.08
    min_rows_in_leaf: int = 3
    row_fraction: float = 0.8
    feature_fraction: float = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorConfig:
    """Where the predictor keeps its models and how it trains.

    `min_rows` is the fewest points for which trees are grown; with fewer, neighbours interpolate.
    `max_rows` bounds the points one model's trees are grown on (all serve as neighbours).
    `measured_weight` is the share, in log space, of a point's own measurement in its estimate.
    """

    state_folder: str
    booster: BoosterConfig = field(default_factory=BoosterConfig)
    num_threads: int = 1
    min_rows: int = 30
    max_rows: int = 20_000
    measured_weight: float = 0.5

    def __post_init__(self) -> None:
        """Check the ranges."""
        violations = [
            FieldViolation(name, "must be at least 1")
            for name in ("num_threads", "min_rows", "max_rows")
            if getattr(self, name) < 1
        ]
        if not 0.0 <= self.measured_weight <= 1.0:
            violations.append(FieldViolation("measured_weight", "must be between 0 and 1"))
        if violations:
            raise InvalidRequestError.of_violations(violations, "predictor configuration")
