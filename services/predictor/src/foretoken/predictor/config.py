"""What the predictor can be configured with."""

from dataclasses import dataclass, field, replace

from foretoken.domain.errors import Checks, InvalidRequestError, at_least, positive

# A tree has at most so many leaves: one bit of a word for each (see `regression/tree_engine`).
MAX_LEAVES = 32
# Where a model only tells how far its like are off. Source: errors of mixtures learned this way
# are within 0.1 percentage points of those learned with all trees.
_QUICK_SHARE, _QUICK_RATE_SHARE = 0.5, 2.0 / 3.0
# Trees with constant leaves count where those with lines fail, and are asked in every call: few
# have to do. Source: on attention and GEMM twice as many of them err 0.1 percentage points less by
# themselves, half the leaves up to 0.5 more.
_STEP_TREES, _STEP_LEAVES, _STEP_RATE = 40, 31, 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class BoosterConfig:
    """How one LightGBM model is grown.

    The defaults were chosen on points, sizes and configurations left out of tables of GEMM,
    attention, MoE and elementwise operators on A30, A100, H100 and H200: 48 trees that see every
    row and feature, mixed with kriging, err at most 4 % more than 80 with steps of 0.2 (attention
    of six tables, three draws; other operators as much), in two thirds of the time and room. 40 of
    them err up to 10 % more.
    Leaves hold lines, or with `is_linear` off constants; `linear_shrinkage` is the ridge penalty
    of the lines. Small tables get a tree for every `rows_per_tree` rows: more of them learn the
    noise.
    """

    num_trees: int = 48
    num_leaves: int = 31
    learning_rate: float = 0.28
    min_rows_in_leaf: int = 5
    is_linear: bool = True
    linear_shrinkage: float = 1.0
    max_bins: int = 255
    rows_per_tree: int = 4

    def __post_init__(self) -> None:
        """Check that a word has a bit for every leaf."""
        if not 2 <= self.num_leaves <= MAX_LEAVES:  # noqa: PLR2004
            raise InvalidRequestError.of_field("num_leaves", f"is from 2 to {MAX_LEAVES}")

    @property
    def quick(self) -> "BoosterConfig":
        """Fewer and smaller trees that learn faster: a little worse, in a quarter of the time."""
        return replace(
            self,
            num_trees=max(1, round(_QUICK_SHARE * self.num_trees)),
            num_leaves=max(2, self.num_leaves // 2),
            rows_per_tree=round(self.rows_per_tree / _QUICK_SHARE),
            learning_rate=self.learning_rate / _QUICK_RATE_SHARE,
        )

    @property
    def steps(self) -> "BoosterConfig":
        """Trees with constants in their leaves; never more than of the others."""
        return replace(
            self,
            is_linear=False,
            num_trees=min(self.num_trees, _STEP_TREES),
            num_leaves=min(self.num_leaves, _STEP_LEAVES),
            learning_rate=_STEP_RATE,
            rows_per_tree=1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorConfig:
    """Where the predictor keeps its models and how it trains.

    A training runs in `num_train_workers` processes (0: one for each core, if it has many points),
    or on so many cores of the Ray cluster at `ray_address` (empty: none).
    `min_rows` is the fewest points for which trees are grown; with fewer, neighbours interpolate.
    `max_rows` bounds the points one model's trees are grown on (all serve as neighbours).
    Every `refresh_s` it looks for a version that another predictor trained or activated, every
    `drift_s` for new measurements to compare with its estimates. `max_pinned_models` versions that
    callers asked for by name stay in memory in addition to the active one, and `max_cached_rows`
    estimates, of 73 bytes each; a table counts for 27 more. With `train_on_demand` a question about
    an operator that was measured on a device, and not trained on, trains what it needs. `starter`
    is the folder of a starter catalog, which answers where nothing was measured; empty: none does.
    A caller may have `max_jobs_per_caller` trainings that have not ended (0: any number).
    With `shares_jobs` trainings are in the catalog, which all predictors that have it share: each
    knows all of them, and goes on with those of one that was not heard of for `job_lease_s`.
    """

    state_folder: str
    starter: str = ""
    booster: BoosterConfig = field(default_factory=BoosterConfig)
    num_threads: int = 1
    num_train_workers: int = 0
    ray_address: str = ""
    min_rows: int = 30
    max_rows: int = 8_000
    refresh_s: float = 10.0
    drift_s: float = 60.0
    max_pinned_models: int = 2
    max_cached_rows: int = 1_000_000
    train_on_demand: bool = True
    max_jobs_per_caller: int = 0
    shares_jobs: bool = False
    job_lease_s: float = 30.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        checks: Checks = {
            **at_least(self, 1, "num_threads", "min_rows", "max_rows", "job_lease_s"),
            **positive(self, "refresh_s", "drift_s"),
            **at_least(self, 0, "max_pinned_models", "max_cached_rows", "num_train_workers"),
        }
        InvalidRequestError.check("predictor configuration", checks)
