"""What a whole training run takes: days, money and energy, failures included."""

from dataclasses import dataclass, field
from math import isfinite

from foretoken.domain.errors import InvalidRequestError, at_least
from foretoken.domain.hardware.price import PriceList
from foretoken.domain.requests.option import describe, flag, option
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.echo import Echo
from foretoken.domain.results.methods import ResultMethods
from foretoken.domain.results.report import Feasibility, Percentiles
from foretoken.domain.results.training_report import StageMemory

# A heading of options.
_LENGTH = "How much is trained"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRules:
    """How machines fail and how a run recovers.

    `device_mtbf_hours` is the mean time between failures of one device and its share of the node
    (0: none fail). Writing a checkpoint takes `checkpoint_s` (0: the states over
    `checkpoint_bytes_per_s` of every device), in which training stands still; with
    `is_checkpoint_asynchronous` it goes on meanwhile, but for `checkpoint_stall_s`. One is begun
    after every `checkpoint_interval_s` of training (0: the interval that loses least). After a
    failure a run is down for `restart_s`, and repeats what it did since the last checkpoint that
    was wholly written.
    """

    device_mtbf_hours: float = 0.0
    checkpoint_interval_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_bytes_per_s: float = 1e9
    is_checkpoint_asynchronous: bool = False
    checkpoint_stall_s: float = 0.0
    restart_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse negative times."""
        names = ("device_mtbf_hours", "checkpoint_interval_s", "checkpoint_s", "restart_s")
        InvalidRequestError.check(
            "failures",
            {
                **at_least(self, 0, *names),
                "checkpoint_bytes_per_s": (self.checkpoint_bytes_per_s > 0, "must be positive"),
                "checkpoint_stall_s": (self.checkpoint_stall_s >= 0, "must not be negative"),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteRules:
    """Several clusters that train one model, each with the scenario's layout.

    Each takes samples of its own, so a step of all has `num_sites` global batches. Every
    `sync_steps` steps the sites sum their gradients, or what their parameters changed by, around a
    ring of links with `bytes_per_s` and `latency_ms` for each site; they wait for it.
    """

    num_sites: int = 1
    bytes_per_s: float = 0.0
    latency_ms: float = 0.0
    sync_steps: int = 1

    def __post_init__(self) -> None:
        """Refuse sites without a link."""
        InvalidRequestError.check(
            "sites",
            {
                "num_sites": (self.num_sites >= 1, "must be at least 1"),
                "bytes_per_s": (
                    self.bytes_per_s > 0 or self.num_sites == 1,
                    "several sites need a link",
                ),
                "latency_ms": (self.latency_ms >= 0, "must not be negative"),
                "sync_steps": (self.sync_steps >= 1, "must be at least 1"),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceRules:
    """What devices and power cost.

    `usd_per_hour` prices a device (0: what `own_list` says of it, or the list named `price_list`,
    "": nothing is priced), on the spot market with `is_spot`. A device draws `device_w` (0: its
    data sheet's limit), a data centre `pue` times that, for `usd_per_kwh` (0: in the price).
    """

    usd_per_hour: float = 0.0
    price_list: str = option(
        "", "Price devices by a list (`foretoken list prices`), or by a YAML file of yours."
    )
    own_list: PriceList | None = None
    is_spot: bool = flag(
        "Take the spot prices.",
    )
    device_w: float = 0.0
    pue: float = 1.0
    usd_per_kwh: float = 0.0

    def __post_init__(self) -> None:
        """Refuse negative prices."""
        names = ("usd_per_hour", "device_w", "usd_per_kwh")
        InvalidRequestError.check(
            "prices",
            {
                **at_least(self, 0, *names),
                "pue": (self.pue >= 1, "must be at least 1"),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRunRequest:
    """Ask what it takes to train on `num_tokens` tokens, or on `num_epochs` of a `dataset`.

    Nothing is said of the loss: steps are tokens over the batch. With `target_days` the answer
    tells how many devices it takes to be done by then, by more data-parallel replicas of the same
    batch.
    """

    scenario: TrainingScenario
    num_tokens: float = option(0.0, "Tokens to train on: `2e12`.", group=_LENGTH)
    dataset: str = option(
        "", "Train on a known dataset instead (`foretoken list datasets`).", group=_LENGTH
    )
    num_epochs: float = option(
        1.0, "How often the dataset is gone through (default: once).", group=_LENGTH
    )
    target_days: float = option(
        0.0,
        "Tell the fewest devices that are done in so many days, the batch unchanged.",
        group="When it is to be done",
    )
    failures: FailureRules = field(default_factory=FailureRules)
    sites: SiteRules = field(default_factory=SiteRules)
    prices: PriceRules = field(default_factory=PriceRules, metadata=describe("What it costs"))

    def __post_init__(self) -> None:
        """Refuse a run of unknown length."""
        InvalidRequestError.check(
            "run",
            {
                "num_tokens": (
                    isfinite(self.num_tokens) and (self.num_tokens > 0) != bool(self.dataset),
                    "give either a number of tokens or a dataset",
                ),
                "num_epochs": (
                    isfinite(self.num_epochs) and self.num_epochs > 0,
                    "must be positive",
                ),
                "target_days": (self.target_days >= 0, "must not be negative"),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """The run on so many devices; `is_enough` where it meets the target date.

    Where it cannot run, `reason` says why, and it takes 0 days.
    """

    num_devices: int
    dp: int
    step_time_ms: float
    goodput_ratio: float
    days: float
    usd: float
    is_enough: bool = False
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TrainingRunReport(ResultMethods):
    """Time, money and energy of a whole run.

    `ideal_days` are steps without failures and checkpoints, `days` the expected ones, from
    `days_low` to `days_high` with the predictor's interval; `days_spread` is how runs differ by
    the chance of failures, its mean `days`. The ratios are shares of `days`: `goodput_ratio` new
    steps, then waiting for checkpoints, steps done again, restarts, and waiting for other sites.

    `usd` is devices and, where power is priced apart, `energy_usd`; `usd_per_hour` is what one
    device costs, the mean where a run has several kinds. `num_devices` are those of all sites.

    `sizes` are the run on other numbers of devices, the batch unchanged; with a target date, those
    it was looked for among. `target_devices` is the fewest that meet it (0: none does, or none was
    asked). `job_id` names the answer among the results that the catalog keeps (empty: not kept).
    `echo` is the question, and what the answer rests on.
    """

    feasibility: Feasibility = field(default_factory=Feasibility)
    num_tokens: float = 0.0
    num_steps: float = 0.0
    num_devices: int = 0
    step_time_ms: float = 0.0
    ideal_days: float = 0.0
    days: float = 0.0
    days_low: float = 0.0
    days_high: float = 0.0
    days_spread: Percentiles = field(default_factory=Percentiles)
    goodput_ratio: float = 0.0
    checkpoint_ratio: float = 0.0
    repeated_ratio: float = 0.0
    restart_ratio: float = 0.0
    sites_ratio: float = 0.0
    num_failures: float = 0.0
    checkpoint_interval_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_bytes: float = 0.0
    device_hours: float = 0.0
    usd: float = 0.0
    usd_per_step: float = 0.0
    usd_per_hour: float = 0.0
    price_source: str = ""
    energy_kwh: float = 0.0
    energy_usd: float = 0.0
    target_devices: int = 0
    sizes: tuple[RunSize, ...] = ()
    notes: tuple[str, ...] = ()
    model_version: str = ""
    request_json: str = ""
    job_id: str = ""
    echo: Echo = field(default_factory=Echo)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TrainingMemoryReport(ResultMethods):
    """What one optimizer step of a strategy must hold on every stage; no time is asked for."""

    feasibility: Feasibility = field(default_factory=Feasibility)
    memory: tuple[StageMemory, ...] = ()
    num_devices: int = 0
    num_params: float = 0.0
    device_memory_bytes: float = 0.0
    notes: tuple[str, ...] = ()
    scenario_json: str = ""
    echo: Echo = field(default_factory=Echo)
