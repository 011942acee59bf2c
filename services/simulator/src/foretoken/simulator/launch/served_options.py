"""What a server of a deployment is started with, in the words of a scenario."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.domain.measurements.estimate import DType
from foretoken.domain.requests.cluster import SpeculativeSpec
from foretoken.simulator.launch.server import LaunchPool

# Rules of an engine's profile that options say.
_RULES = ("has_prefix_caching", "has_priority_scheduling", "mixes_prefill")
_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "memory_utilization_ratio")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedOptions:
    """What one replica is started with.

    Without speculation `drafts` is empty, of adapters without any `max_loras` is 0. `role` is that
    of the replica's pool. A format of weights is only named where the server makes it of a 16-bit
    checkpoint while it loads that.
    """

    model_id: str
    dtype: DType
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    max_tokens: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    memory_utilization_ratio: float = 0.0
    quantization: str = ""
    kv_dtype: DType | None = None
    has_prefix_caching: bool = True
    has_graphs: bool = True
    has_priority_scheduling: bool = False
    mixes_prefill: bool = False
    role: str = "aggregated"
    max_loras: int = 0
    num_loras: int = 0
    lora_rank: int = 0
    drafts: str = ""
    num_draft_tokens: int = 0
    draft_model: str = ""

    @classmethod
    def of_pool(cls, pool: LaunchPool) -> "ServedOptions":
        """Return what a replica of a pool is started with."""
        scenario, layout = pool.scenario, pool.scenario.layout
        engine, lora = scenario.engine.resolve(), scenario.lora
        drafts = scenario.speculative
        return cls(
            model_id=pool.model_id,
            dtype=scenario.dtype,
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            ep=layout.ep,
            max_tokens=pool.max_tokens,
            **{name: getattr(engine, name) for name in (*_LIMITS, *_RULES)},
            quantization=scenario.quantization,
            kv_dtype=scenario.kv_dtype,
            has_graphs=engine.graph_mode != "none",
            role=pool.pool.role,
            max_loras=lora.max_loaded if lora else 0,
            num_loras=max(lora.num_adapters, lora.max_loaded) if lora else 0,
            lora_rank=lora.rank if lora else 0,
            drafts=drafts.method if drafts else "",
            num_draft_tokens=drafts.num_draft_tokens if drafts else 0,
            draft_model=_name_draft(drafts),
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def scenario_content(fields: Mapping[str, Any], profile: str) -> dict[str, Any]:
    """Return fields that were read as the content of a scenario file, by the rules of a profile."""
    rules = {name: fields[name] for name in _RULES if name in fields}
    if not fields.get("has_graphs", True):
        rules["graph_mode"] = "none"
    content: dict[str, Any] = {
        "model": fields.get("model_id"),
        "dtype": fields.get("dtype"),
        "layout": {axis: fields[axis] for axis in ("tp", "pp", "dp", "ep") if axis in fields},
        "quantization": fields.get("quantization"),
        "kv_dtype": fields.get("kv_dtype"),
        "engine": {
            "profile": profile,
            **{name: fields[name] for name in _LIMITS if fields.get(name)},
            "rules": rules,
        },
    }
    if fields.get("max_loras"):
        num_loras = fields.get("num_loras") or fields["max_loras"]
        content["lora"] = {"num_adapters": num_loras, "max_loaded": fields["max_loras"]}
        if fields.get("lora_rank"):
            content["lora"]["rank"] = fields["lora_rank"]
    if fields.get("drafts"):
        content["speculative"] = {
            "method": fields["drafts"],
            "num_draft_tokens": fields["num_draft_tokens"],
            "draft_model": fields.get("draft_model") or None,
        }
    return {name: value for name, value in content.items() if value}


def _name_draft(drafts: SpeculativeSpec | None) -> str:
    if drafts is None or drafts.draft_model is None:
        return ""
    model = drafts.draft_model
    return next((alias for alias in model.aliases if "/" in alias), model.name)
