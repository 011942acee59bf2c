"""What a serving engine can do: the aspects of a deployment that a profile bounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.capability import Conflict, Has, find_unknown

# By aspect, the key of a scenario to change where an engine has not its value.
ENGINE_ASPECTS: Mapping[str, str] = {
    **{axis: f"layout.{axis}" for axis in ("tp", "pp", "dp", "ep")},
    "partial_ep": "layout.ep",
    "mode": "cluster.pools",
    "role": "cluster.pools",
    "architecture": "device",
    "platform": "device",
    "encoders": "cluster.pools",
    "quantization": "quantization",
    "dtype": "dtype",
    "kv_dtype": "kv_dtype",
    "speculation": "speculative.method",
    "lora": "lora",
    "expert_exchange": "engine.rules.expert_exchange",
    "expert_balancing": "engine.rules.has_expert_balancing",
    "two_batch_overlap": "engine.rules.two_batch_tokens",
    "experts": "engine.rules.ffn_devices",
    "dcp": "engine.rules.decode_context_parallel",
    "kv_tiers": "engine.kv_tiers",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapabilities:
    """What an engine can do.

    `has` are the values of an aspect that there are (aspects that are not named: all, but for
    `experts`, which engines that were looked up have `together` alone). Degrees are numbers, or
    `more` for all above 1; `dp` are engines that share experts (1 without expert parallelism:
    replicas need nothing of an engine), `partial_ep` tells that experts are spread over some of an
    engine's ranks. `mode` is `aggregated` or `disaggregated`, `role` that of the engine's pool
    (`aggregated`, `prefill`, `decode`), `architecture` and `platform` its device's,
    `encoders` of images are `together` with engines or `apart`, `experts` `together` with
    attention or `apart`, `kv_dtype` is `none` where the KV cache has the scenario's
    format, `speculation` is `none` or its method, and `lora` whether adapters are asked for.
    `quantization` and `dtype` are fields of a scenario, `expert_exchange`, `expert_balancing`,
    `two_batch_overlap`, `experts` and `dcp` rules of the engine. `kv_tiers` below the device
    are `none`, one on the `host`, a `store` of all replicas, or `several`.

    `conflicts` are values there are, but not together. `source` says where this was looked up.
    """

    source: str = ""
    has: Has = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()

    def __post_init__(self) -> None:
        """Refuse aspects there are not; no release has experts apart unless it says so."""
        violations = list(find_unknown(self.has, self.conflicts, tuple(ENGINE_ASPECTS)))
        if violations:
            raise InvalidRequestError.of_violations(violations, "can")
        if self.source:
            object.__setattr__(self, "has", {"experts": ("together",), **self.has})
