"""A deployment of many replicas: pools of them, how requests find one, what happens to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from foretoken.domain.alias import settle_devices
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.layout import MOST_DEVICES, ParallelLayout

# What a pool does with a request: all of it, its prompt up to the first token, or the rest; or the
# images of its prompt before any of it.
POOL_ROLES = ("aggregated", "prefill", "decode", "encoder")
_ALONE = ParallelLayout()
_LORA_TARGETS = ("all", "attention")
_SPECULATION_METHODS = ("draft_model", "layers", "ngram")


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscalingSpec:
    """How many replicas of a pool run: `policy` names a plug-in of `cluster/autoscalers`.

    It decides every `interval_s` between `min_replicas` and `max_replicas` from what it sees
    then; `options` are its own knobs. A new replica serves `cold_start_s` after the decision; one
    that is given up takes no more requests and goes when it is empty.
    """

    policy: str
    min_replicas: int = 1
    max_replicas: int = 1
    interval_s: float = 15.0
    cold_start_s: float = 0.0
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse bounds that leave nothing, and times that do not pass."""
        InvalidRequestError.check(
            "autoscaling",
            {
                "policy": (bool(self.policy), "name a policy"),
                "min_replicas": (self.min_replicas >= 1, "must be at least 1"),
                "max_replicas": (
                    self.max_replicas >= self.min_replicas,
                    "must be at least min_replicas",
                ),
                "interval_s": (self.interval_s > 0, "must be positive"),
                "cold_start_s": (self.cold_start_s >= 0, "must not be negative"),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPool:
    """Replicas that are alike. What is not set is the scenario's.

    `role` is one of `POOL_ROLES`; requests are prefilled in a pool of role `prefill` and their KV
    cache moves to one of role `decode`. A replica is an engine of `layout` with its `dp` left out
    (`num_replicas` count), or all of it where its engines share experts. One of role `encoder` has
    the encoder of images alone, split over `layout.tp` devices (no layout: on one).
    """

    name: str
    role: str = "aggregated"
    num_replicas: int = 1
    device: str = ""
    topology: str = ""
    layout: ParallelLayout | None = None
    engine: EngineSpec | None = None
    quantization: str = ""
    device_usd_per_hour: float = 0.0
    device_idle_w: float = 0.0
    device_busy_w: float = 0.0
    autoscaling: AutoscalingSpec | None = None

    def __post_init__(self) -> None:
        """Refuse roles there are not, and pools of nothing."""
        settle_devices(self, "device")
        InvalidRequestError.check(
            f"pool {self.name}",
            {
                "name": (bool(self.name), "must be set"),
                "role": (self.role in POOL_ROLES, f"must be one of {', '.join(POOL_ROLES)}"),
                "num_replicas": (
                    1 <= self.num_replicas <= MOST_DEVICES,
                    f"must be from 1 to {MOST_DEVICES:,}",
                ),
                "device_usd_per_hour": (self.device_usd_per_hour >= 0, "must not be negative"),
                "device_idle_w": (self.device_idle_w >= 0, "must not be negative"),
                "device_busy_w": (
                    self.device_busy_w >= self.device_idle_w,
                    "must be at least device_idle_w",
                ),
            },
        )

    def layout_in(self, layout: ParallelLayout) -> ParallelLayout:
        """Return the layout of its replicas in a scenario of some layout."""
        return self.layout or (ParallelLayout() if self.role == "encoder" else layout)

    @property
    def max_replicas(self) -> int:
        """Replicas there can be at once."""
        most = self.autoscaling.max_replicas if self.autoscaling else 0
        return max(self.num_replicas, most)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingSpec:
    """How requests are spread over the replicas of a role.

    `router` names a plug-in of `cluster/routers`, `options` are its knobs. It sees the replicas'
    load as it was at the last multiple of `load_interval_ms` (0: as it is). At most
    `max_outstanding` requests (0: no limit) are on a replica; where all are full a request waits
    at the router, or with `max_queued` (0: no limit) others waiting there it is rejected.
    """

    router: str = "round_robin"
    load_interval_ms: float = 0.0
    max_outstanding: int = 0
    max_queued: int = 0
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse limits below zero."""
        InvalidRequestError.check(
            "routing",
            {
                name: (getattr(self, name) >= 0, "must not be negative")
                for name in ("load_interval_ms", "max_outstanding", "max_queued")
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTransferSpec:
    """How the KV cache of a prompt moves from its prefill to its decode replica.

    Every device sends and receives its part over its own port, one transfer after the other:
    `bandwidth_bytes_per_s` of a port and `latency_us` of a transfer (0: the topology's between
    nodes, of the slower pool). With `overlaps_prefill` layers move while later ones are computed
    and only what is left after the prefill counts.
    """

    bandwidth_bytes_per_s: float = 0.0
    latency_us: float = 0.0
    overlaps_prefill: bool = False

    def __post_init__(self) -> None:
        """Refuse negative rates."""
        InvalidRequestError.check(
            "kv_transfer",
            {
                name: (getattr(self, name) >= 0, "must not be negative; 0 takes the topology's")
                for name in ("bandwidth_bytes_per_s", "latency_us")
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOutage:
    """A replica of a pool, by its number, that fails at a time and is back `restart_s` later."""

    pool: str
    replica: int
    start_s: float
    restart_s: float

    def __post_init__(self) -> None:
        """Refuse times that cannot be."""
        InvalidRequestError.check(
            "outage",
            {
                "replica": (self.replica >= 0, "must not be negative"),
                "start_s": (self.start_s >= 0, "must not be negative"),
                "restart_s": (self.restart_s > 0, "must be positive"),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureSpec:
    """How replicas fail: at random every `mtbf_s` of running (mean; 0: never), and as listed.

    A failed replica is back after `restart_s`. Its requests start again elsewhere, at most
    `max_retries` times each, `retry_delay_s` later; then they are lost.
    """

    mtbf_s: float = 0.0
    restart_s: float = 120.0
    max_retries: int = 1
    retry_delay_s: float = 0.0
    outages: tuple[ReplicaOutage, ...] = ()

    def __post_init__(self) -> None:
        """Refuse times and counts that cannot be."""
        InvalidRequestError.check(
            "failures",
            {
                "mtbf_s": (self.mtbf_s >= 0, "must not be negative; 0 is never"),
                "restart_s": (self.restart_s > 0, "must be positive"),
                "max_retries": (self.max_retries >= 0, "must not be negative"),
                "retry_delay_s": (self.retry_delay_s >= 0, "must not be negative"),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """Pools of replicas, and the router before those that take requests.

    `decode_routing` chooses the decode replica of a prefilled request.
    """

    pools: tuple[ReplicaPool, ...] = ()
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    decode_routing: RoutingSpec = field(
        default_factory=lambda: RoutingSpec(router="least_outstanding")
    )
    kv_transfer: KvTransferSpec = field(default_factory=KvTransferSpec)
    failures: FailureSpec | None = None

    def __post_init__(self) -> None:
        """Refuse pools that cannot serve together."""
        names = [pool.name for pool in self.pools]
        encoders = [pool for pool in self.pools if pool.role == "encoder"]
        roles = {pool.role for pool in self.engine_pools}
        known = set(names)
        outages = self.failures.outages if self.failures else ()
        most = {pool.name: pool.max_replicas for pool in self.pools}
        InvalidRequestError.check(
            "cluster",
            {
                "pools": (
                    roles in ({"aggregated"}, {"prefill", "decode"}),
                    "must be all aggregated, or prefill and decode; one of role encoder besides",
                ),
                "pools.role": (
                    len(encoders) <= 1
                    and not any(pool.autoscaling or pool.engine for pool in encoders)
                    and all(
                        (pool.layout or _ALONE).num_devices == pool.layout_in(_ALONE).tp
                        for pool in encoders
                    ),
                    "of encoder at most one, without autoscaling and engine, split over tp alone",
                ),
                "pools.name": (len(names) == len(known), "must differ"),
                "failures.outages": (
                    all(outage.pool in known for outage in outages),
                    f"name one of the pools {', '.join(names)}",
                ),
                "failures.outages.pool": (
                    all(outage.pool != pool.name for outage in outages for pool in encoders),
                    "must be no pool of encoders, which do not fail",
                ),
                "failures.outages.replica": (
                    all(outage.replica < most.get(outage.pool, 0) for outage in outages),
                    "must be a replica that the pool can have; they count from 0",
                ),
                "decode_routing.max_queued": (
                    self.decode_routing.max_queued == 0,
                    "must be 0: a prefilled request is never rejected; limit routing instead",
                ),
            },
        )

    @property
    def engine_pools(self) -> tuple[ReplicaPool, ...]:
        """The pools whose replicas are engines: all but those of encoders."""
        return tuple(pool for pool in self.pools if pool.role != "encoder")

    @property
    def encoders(self) -> ReplicaPool | None:
        """The pool that encodes images apart; None where engines do."""
        return next((pool for pool in self.pools if pool.role == "encoder"), None)

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts and answers are computed in different pools."""
        return any(pool.role == "prefill" for pool in self.pools)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeSpec:
    """Speculative decoding: a step proposes `num_draft_tokens` per sequence and verifies them all.

    Each is accepted with `acceptance_ratio` where all before it were, or, as engines log it, in
    `acceptance_by_position` of all steps (one for each that is proposed; empty: by the ratio); a
    step yields the accepted ones and one more. Proposals come from a `draft_model` that runs on the
    same devices, from `layers` of the model itself (`num_draft_layers` of them and its head: EAGLE,
    MTP), or from the text at no cost (`ngram`).
    """

    method: str = "ngram"
    num_draft_tokens: int = 3
    acceptance_ratio: float = 0.7
    draft_model: ModelArchitecture | None = None
    num_draft_layers: int = 1
    acceptance_by_position: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse methods there are not and ratios that are none."""
        InvalidRequestError.check(
            "speculative",
            {
                "method": (
                    self.method in _SPECULATION_METHODS,
                    f"must be one of {', '.join(_SPECULATION_METHODS)}",
                ),
                "num_draft_tokens": (self.num_draft_tokens >= 1, "must be at least 1"),
                "acceptance_ratio": (
                    0 <= self.acceptance_ratio <= 1,
                    "must be between 0 and 1",
                ),
                "draft_model": (
                    (self.draft_model is not None) == (self.method == "draft_model"),
                    "must be set for the method draft_model and for no other",
                ),
                "num_draft_layers": (self.num_draft_layers >= 1, "must be at least 1"),
                "acceptance_by_position": (
                    not self.acceptance_by_position or self._has_positions(),
                    "must fall from at most 1 to no less than 0, a ratio for each draft token",
                ),
            },
        )

    def _has_positions(self) -> bool:
        ratios = self.acceptance_by_position
        falls = all(after <= before for before, after in pairwise((1.0, *ratios, 0.0)))
        return len(ratios) == self.num_draft_tokens and falls

    @property
    def conditional_ratios(self) -> tuple[float, ...]:
        """How often each draft token is accepted where all before it were."""
        if not self.acceptance_by_position:
            return (self.acceptance_ratio,) * self.num_draft_tokens
        pairs = pairwise((1.0, *self.acceptance_by_position))
        return tuple(after / before if before else 0.0 for before, after in pairs)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a verification yields on average: those accepted, and one more."""
        ratios = self.conditional_ratios
        return sum(prod(ratios[:count]) for count in range(len(ratios) + 1))

    def describe(self) -> str:
        """Return the method and how many tokens it drafts, as `settle_speculation` reads them."""
        return f"{self.method}:{self.num_draft_tokens}"


def settle_speculation(text: str, given: SpeculativeSpec | None) -> SpeculativeSpec | None:
    """Return the speculation of a text, `none` or `ngram:3`, with what is given of drafts.

    An empty text is what is given.

    Raises:
        InvalidRequestError: no such method, no number of tokens, or nothing says what drafts.

    """
    if text in ("", "none"):
        return None if text else given
    method, _, count = text.partition(":")
    if method not in _SPECULATION_METHODS or not count.isdigit() or int(count) < 1:
        known = ", ".join(f"{known}:3" for known in _SPECULATION_METHODS)
        raise InvalidRequestError.of_field("speculations", f"{text!r} is not one of none, {known}")
    spec, num_drafts = given or SpeculativeSpec(), int(count)
    by_position = spec.acceptance_by_position
    if by_position and num_drafts > len(by_position):
        raise InvalidRequestError.of_field(
            "speculations", f"{text}: speculative.acceptance_by_position ends before"
        )
    has_model = method == "draft_model"
    if has_model and spec.draft_model is None:
        raise InvalidRequestError.of_field("speculations", f"{text}: set speculative.draft_model")
    return replace(
        spec,
        method=method,
        num_draft_tokens=num_drafts,
        acceptance_by_position=by_position[:num_drafts],
        draft_model=spec.draft_model if has_model else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """Low-rank adapters that requests ask for: `num_adapters` of `rank`.

    `targets` are the linear layers they adapt: `all`, of every expert too, or those of `attention`.
    The k-th is asked for with weight 1 / k^`popularity_spread` (0: all alike). A replica keeps
    `max_loaded` of them in device memory, the least recently used gives way; one that is not there
    is loaded over `load_bytes_per_s` (host memory to device) before its request may start.
    """

    num_adapters: int
    rank: int = 16
    max_loaded: int = 1
    popularity_spread: float = 0.0
    load_bytes_per_s: float = 25e9
    targets: str = "all"

    def __post_init__(self) -> None:
        """Refuse adapters that are none."""
        InvalidRequestError.check(
            "lora",
            {
                **{
                    name: (getattr(self, name) >= 1, "must be at least 1")
                    for name in ("rank", "max_loaded")
                },
                "num_adapters": (1 <= self.num_adapters <= 2**20, "must be 1 to 1,048,576"),
                "popularity_spread": (self.popularity_spread >= 0, "must not be negative"),
                "load_bytes_per_s": (self.load_bytes_per_s > 0, "must be positive"),
                "targets": (
                    self.targets in _LORA_TARGETS,
                    f"must be one of {', '.join(_LORA_TARGETS)}",
                ),
            },
        )
