"""How the servers of published runs were started: `launches/published.yaml`, read and laid over."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from foretoken.domain import schema
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.plugins import scan_yaml
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.simulator.validation.published_run import INFERENCE_MAX_SHORTEST_RATIO, PublishedRun

# Requests for each one that runs at a time. The first of them come at once and wait for each other,
# so means depend on it.
NUM_ROUNDS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """The limit of a step: what it is the sum of, down to a multiple, and at least so many."""

    of: tuple[str, ...] = ()
    spare: int = 0
    unit: int = 1
    least: int = 0

    def limit(self, sizes: Mapping[str, int]) -> int:
        """Return the limit for a run of these sizes."""
        total = sum(sizes[name] for name in self.of) + self.spare
        return max(self.least, total // self.unit * self.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedLaunch:
    """What a launch sets: 0, nothing and empty leave it to the engine.

    With `has_expert_parallelism` experts lie on all ranks of a replica, whatever a run's row says.
    """

    step_tokens: int = 0
    memory_ratio: float = 0.0
    kv_dtype: DType | None = None
    has_expert_parallelism: bool = False
    rules: Mapping[str, str] = field(default_factory=dict)
    num_rounds: int = NUM_ROUNDS


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """Conditions, and what is set where all hold; see the head of the file."""

    source: str
    engine: str
    publisher: str = ""
    models: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    formats: str = ""
    since: str = ""
    before: str = ""
    lengths: tuple[int, ...] = ()
    concurrency_min: int = 0
    dp_min: int = 0
    tp_max: int = 0
    step_tokens: StepTokens | None = None
    memory_ratio: float = 0.0
    kv_dtype: DType | None = None
    has_expert_parallelism: bool = False
    rules: Mapping[str, str] = field(default_factory=dict)
    num_rounds: int = 0

    def holds(self, run: PublishedRun) -> bool:
        """Whether all conditions hold for a run."""
        publisher = "inferencemax" if run.is_of_inference_max else "aiconfigurator"
        return (
            self.engine == run.engine
            and self.publisher in ("", publisher)
            and (not self.models or run.model in self.models)
            and (not self.devices or run.device in self.devices)
            and run.formats[0].startswith(self.formats)
            and self.since <= run.day
            and (not self.before or run.day < self.before)
            and self.lengths in ((), (run.input_tokens, run.output_tokens))
            and run.concurrency >= self.concurrency_min
            and run.dp >= self.dp_min
            and (not self.tp_max or run.tp <= self.tp_max)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DevelopmentLaunch:
    """How an engine of the development rows was started, and what sent it requests.

    `profile` and `framework` are the engine's and its tables', `rules_of_dp` count on several
    replicas of attention. See the head of the file.
    """

    source: str
    engine: str
    model: str
    profile: str
    framework: str
    step_tokens: StepTokens
    quantization: str = ""
    experts_kernel: str = ""
    memory_ratio: float = 0.0
    kv_dtype: DType | None = None
    rules: Mapping[str, str] = field(default_factory=dict)
    rules_of_dp: Mapping[str, str] = field(default_factory=dict)
    is_of_inference_max: bool = False
    num_prompts: int = 0
    num_warmup_rounds: int = 0

    @property
    def shortest_ratio(self) -> float:
        """Of the lengths given, the least that were drawn, evenly."""
        return INFERENCE_MAX_SHORTEST_RATIO if self.is_of_inference_max else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLaunch:
    """How the replicas of a pool were started: 0 and nothing leave it to the run's row."""

    layout: ParallelLayout | None = None
    max_num_seqs: int = 0
    step_tokens: int = 0
    memory_ratio: float = 0.0
    rules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class DisaggregatedLaunch:
    """How both pools of a disaggregated run were started; see the head of the file.

    `profile` and `framework` are the engine's and its tables' (empty: its own, then others'),
    `experts_kernel` is what runs experts, `moe_routing` how tables spread tokens over these (empty:
    as was counted of the model).
    """

    source: str
    engine: str
    model: str
    precision: str
    device: str
    input_tokens: int
    profile: str
    quantization: str
    kv_dtype: DType
    prefill: PoolLaunch
    decode: PoolLaunch
    concurrencies: tuple[int, ...] = ()
    num_decode: int = 0
    framework: str = ""
    experts_kernel: str = ""
    moe_routing: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launches:
    published: tuple[_Entry, ...]
    development: tuple[DevelopmentLaunch, ...]
    disaggregated: tuple[DisaggregatedLaunch, ...]


def find_launch(run: PublishedRun) -> PublishedLaunch:
    """Return how a run's server was started: later entries are laid over earlier ones."""
    found: dict[str, Any] = {}
    rules: dict[str, str] = {}
    for entry in _launches().published:
        if entry.holds(run):
            rules.update(entry.rules)
            found.update(_settings(entry, run))
    return PublishedLaunch(**found, rules=rules)


def development_launches() -> Mapping[tuple[str, str], DevelopmentLaunch]:
    """Return the launches of the development rows, by engine and model as these name it."""
    return {(one.engine, one.model): one for one in _launches().development}


def disaggregated_launches() -> tuple[DisaggregatedLaunch, ...]:
    """Return the launches of disaggregated runs; the first whose conditions hold is a run's."""
    return _launches().disaggregated


def _settings(entry: _Entry, run: PublishedRun) -> dict[str, Any]:
    """Return what an entry sets, but for rules, which add up."""
    sizes = {
        "max_num_seqs": run.concurrency,
        "input_tokens": run.input_tokens,
        "output_tokens": run.output_tokens,
    }
    found = {item.name: getattr(entry, item.name) for item in fields(PublishedLaunch)}
    limit = entry.step_tokens
    found |= {"rules": None, "step_tokens": limit.limit(sizes) if limit else 0}
    return {name: value for name, value in found.items() if value}


@cache
def _launches() -> _Launches:
    [(name, content)] = scan_yaml("foretoken.simulator.validation", "launches")
    return schema.decode(_Launches, dict(content), f"launches/{name}.yaml")
