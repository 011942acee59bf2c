"""Whether a serving engine can do what a replica requires."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.frameworks.capability import MORE, describe_lack
from foretoken.domain.frameworks.engine import all_engines
from foretoken.domain.frameworks.engine_capability import ENGINE_ASPECTS, EngineCapabilities
from foretoken.domain.frameworks.kv_tier import KvTier
from foretoken.domain.hardware.device import find_device
from foretoken.domain.models.quantization import UNQUANTIZED
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cluster.fleet import pool_scenarios


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBound:
    """What one engine can do, by the name that its users know."""

    name: str
    can: EngineCapabilities


def check_engines(scenario: ServingScenario) -> None:
    """Check that the engines of all pools can do what they are asked for.

    Raises:
        InvalidRequestError: one cannot; every reason names the key to change.

    """
    cluster = scenario.cluster
    encoders = "apart" if cluster is not None and cluster.encoders is not None else "together"
    roles = [pool.role for pool in cluster.engine_pools] if cluster else ["aggregated"]
    for part, role in zip(pool_scenarios(scenario), roles, strict=True):
        if idle := list_idle_tiers(part):
            raise InvalidRequestError.of_violations(idle)
        profile = part.resolve_engine()
        bound = EngineBound(name=profile.name, can=profile.can)
        if lacks := list_engine_lacks(part, role, bound, encoders):
            raise InvalidRequestError.of_violations(
                lacks,
                f"{profile.name} cannot run this (`--set engine.profile=plain` simulates it by the"
                " rules of no engine)",
            )


def list_idle_tiers(replica: ServingScenario) -> list[FieldViolation]:
    """Return why the tiers of a replica would hold nothing; nothing where they hold something."""
    engine = replica.resolve_engine()
    is_used = engine.has_prefix_caching or engine.preemption == "swap"
    if is_used or not replica.engine.kv_tiers:
        return []
    why = (
        f"{engine.name} neither caches prefixes nor swaps: set"
        " engine.rules.has_prefix_caching or engine.rules.preemption"
    )
    return [FieldViolation("engine.kv_tiers", why)]


def list_engine_lacks(
    replica: ServingScenario, role: str, bound: EngineBound, encoders: str = "together"
) -> list[FieldViolation]:
    """Return what an engine has not of a replica of a pool with this role.

    `encoders` are `together` with the engine, or `apart`.
    """
    values, can = {**_find_values(replica, role), "encoders": encoders}, bound.can
    found = [
        (aspect, _describe_lack(can, aspect, values[aspect], replica.device))
        for aspect, allowed in can.has.items()
        if aspect in values and not _is_of(values[aspect], allowed)
    ]
    found += [
        (conflict.aspect, conflict.why)
        for conflict in can.conflicts
        if all(_is_of(values[aspect], wrong) for aspect, wrong in conflict.of.items())
    ]
    return [
        FieldViolation(ENGINE_ASPECTS[aspect], f"{bound.name}: {reason}")
        for aspect, reason in found
    ]


def _describe_lack(can: EngineCapabilities, aspect: str, value: Any, device: str) -> str:
    lack = describe_lack(can.has, aspect, value)
    if aspect != "platform":
        return lack
    runs = {
        profile.engine
        for profile in all_engines().values()
        if _is_of(value, profile.can.has.get(aspect, (value,)))
    }
    return f"{lack}; what runs on {device} is {', '.join(sorted(runs))}"


def _is_of(value: Any, values: tuple[Any, ...]) -> bool:
    is_more = MORE in values and isinstance(value, int) and value > 1
    return is_more or value in values


def _find_values(replica: ServingScenario, role: str) -> Mapping[str, Any]:
    layout, kv_dtype, engine = replica.layout, replica.kv_dtype, replica.resolve_engine()
    device = find_device(replica.device)
    has_own_format = kv_dtype is not None and kv_dtype is not replica.dtype
    num_engines = layout.dp if layout.shares_experts else 1
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "dp": num_engines,
        "ep": layout.ep,
        "partial_ep": 1 < layout.ep < layout.tp * num_engines,
        "mode": "disaggregated" if role in ("prefill", "decode") else "aggregated",
        "role": role,
        "architecture": device.architecture,
        **({"platform": device.platform} if device.platform else {}),
        "quantization": replica.quantization.replace(UNQUANTIZED, ""),
        "dtype": replica.dtype.name.lower(),
        "kv_dtype": kv_dtype.name.lower() if kv_dtype and has_own_format else "none",
        "speculation": replica.speculative.method if replica.speculative else "none",
        "lora": replica.lora is not None,
        "expert_exchange": engine.expert_exchange,
        "expert_balancing": engine.has_expert_balancing,
        "dcp": engine.decode_context_parallel,
        "two_batch_overlap": engine.two_batch_tokens > 0,
        "experts": "apart" if engine.ffn_devices else "together",
        "kv_tiers": _name_tiers(replica.engine.kv_tiers),
    }


def _name_tiers(tiers: Sequence[KvTier]) -> str:
    if len(tiers) > 1:
        return "several"
    return "none" if not tiers else "store" if tiers[0].is_shared else "host"
