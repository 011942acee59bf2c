"""What a cluster is once its specification is resolved: pools of engines, and their routing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.domain.requests.cluster import AutoscalingSpec, FailureSpec, RoutingSpec
from foretoken.simulator.cluster.engine_pool import PoolRole
from foretoken.simulator.serving.setup import DeploymentSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSetup:
    """LoRA adapters of a replica: so many in device memory at once, and how long one loads."""

    max_loaded: int
    load_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSetup:
    """Replicas that are alike, `num_replicas` of which run at first.

    `engines.num_engines` are all there may ever be. A replica is `engines_per_replica` of them, one
    or several in lock step, over which `engines.router` spreads its requests. All devices of a
    replica together send or receive `port_bytes_per_s` of KV caches.
    """

    name: str
    engines: DeploymentSetup
    role: PoolRole = PoolRole.AGGREGATED
    num_replicas: int = 1
    engines_per_replica: int = 1
    port_bytes_per_s: float = float("inf")
    autoscaling: AutoscalingSpec | None = None
    adapters: AdapterSetup | None = None

    @property
    def num_replicas_max(self) -> int:
        """Replicas there may ever be."""
        return self.engines.num_engines // self.engines_per_replica


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTransferSetup:
    """How a prompt's KV cache moves: its bytes in the whole model, and `latency_ns` more.

    Every token has `bytes_per_token`, the last `window_tokens` of a prompt also those of layers
    with a sliding window, `window_bytes_per_token`.
    With `overlaps_prefill` what could be sent while the prompt was computed need not be any more;
    the last of `num_layers` always is.
    """

    bytes_per_token: float = 0.0
    latency_ns: int = 0
    overlaps_prefill: bool = False
    num_layers: int = 1
    window_bytes_per_token: float = 0.0
    window_tokens: int = 0

    def bytes_of(self, num_tokens: int) -> float:
        """Return the bytes of a prompt's KV cache."""
        num_in_window = min(num_tokens, self.window_tokens)
        return num_tokens * self.bytes_per_token + num_in_window * self.window_bytes_per_token


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSetup:
    """Pools, all aggregated or some for prompts and some for answers, and what happens to them.

    `routing` spreads requests that arrive, `decode_routing` those whose prompt is computed; its
    `max_queued` has no meaning. All that is drawn comes from the `seed`.
    """

    pools: Sequence[PoolSetup]
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    decode_routing: RoutingSpec = field(default_factory=RoutingSpec)
    kv_transfer: KvTransferSetup = field(default_factory=KvTransferSetup)
    failures: FailureSpec | None = None
    seed: int = 0
