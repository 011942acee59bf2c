"""What a serving engine can do, as the data of a profile: `can` in `engines/*.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.capability import Conflict, Has, find_unknown

# By aspect, the key of a scenario to change where an engine has not its value.
ENGINE_ASPECTS: Mapping[str, str] = {
    **{axis: f"layout.{axis}" for axis in ("tp", "pp", "dp", "ep")},
    "partial_ep": "layout.ep",
    "mode": "cluster.pools",
    "quantization": "quantization",
    "dtype": "dtype",
    "kv_dtype": "kv_dtype",
    "speculation": "speculative.method",
    "lora": "lora",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapabilities:
    """What an engine can do.

    `has` are the values of an aspect that there are (aspects that are not named: all). Degrees are
    numbers, or `more` for all above 1; `dp` are engines that share experts (1 without expert
    parallelism: replicas need nothing of an engine), `partial_ep` tells that experts are spread
    over some of an engine's ranks. `mode` is `aggregated` or `disaggregated`, `kv_dtype` is `none`
    where the KV cache has the scenario's format, `speculation` is `none` or its method, and `lora`
    whether adapters are asked for. `quantization` and `dtype` are fields of a scenario.

    `conflicts` are values there are, but not together. `source` says where this was looked up.
    """

    source: str = ""
    has: Has = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()

    def __post_init__(self) -> None:
        """Refuse aspects there are not."""
        violations = list(find_unknown(self.has, self.conflicts, tuple(ENGINE_ASPECTS)))
        if violations:
            raise InvalidRequestError.of_violations(violations, "can")
