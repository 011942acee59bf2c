"""AIConfigurator's H200 tables for the closed-loop runs: whole, and thinned for searches of them.

Thinned ones are written again with the rows that the measured models need, in the same layout, and
imported like the whole. What they leave out, norms, rotary embedding, activations and the sampler,
comes from LLMServingSim's profiles of other GPUs, transferred.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from foretoken.app.compose import Composition
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.client.facade import Foretoken

TRAINED_ON = "h200_sxm"
# The tables under which experts see few tokens as real routers send them.
ROUTING = "power_law_1.01"
# No table has vLLM's Marlin experts at gpt-oss's width: those of two other layers tell it, one with
# int4, one with MXFP4 weights, which count as one (`MarlinExperts` takes both, of the same size).
MARLIN_EXPERTS = "marlin_marlinexperts"

# Every second of the collector's token counts is one more than the one before; these are enough.
_GEMM_TOKENS = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512]
_GEMM_TOKENS += [1024, 2048, 4096, 8192, 16384, 32768]


def _one_of(**columns: Sequence[object]) -> pc.Expression:
    masks = [pc.field(name).isin(values) for name, values in columns.items()]
    return functools.reduce(operator.and_, masks)


_ATTENTION = _one_of(
    head_dim=[64, 128],
    window_size=[0, 128],
    num_heads=[2, 4, 8, 16, 32, 64],
    num_key_value_heads=[1, 2, 4, 8],
    kv_cache_dtype=["bfloat16"],
    attn_dtype=["bfloat16"],
)
_EXPERTS = _one_of(
    hidden_size=[2880, 7168],
    num_experts=[128, 256],
    distribution=[ROUTING],
    moe_dtype=["fp8_block", "w4a16_mxfp4"],
    moe_tp_size=[1, 2, 4, 8],
    moe_ep_size=[1, 2, 4, 8],
)
_MARLIN = _one_of(distribution=[ROUTING], moe_ep_size=[1, 2, 4, 8]) & pc.match_substring(
    pc.field("kernel_source"), MARLIN_EXPERTS
)
_PICKS: Mapping[str, pc.Expression] = {
    "gemm_perf": _one_of(m=_GEMM_TOKENS),
    "context_attention_perf": _ATTENTION,
    "generation_attention_perf": _ATTENTION,
    "mla_context_module_perf": _one_of(gemm_type=["fp8_block"]),
    "mla_generation_module_perf": _one_of(gemm_type=["fp8_block"]),
    "moe_perf": _EXPERTS | _MARLIN,
}


def record_whole(services: Composition, data: Path) -> None:
    """Import H200's tables as a user does; their series are learned when they are asked for."""
    request = ImportRequest(path=data / "aiconfigurator" / "systems", device=TRAINED_ON)
    plan = find_importer("aiconfigurator").read(request)
    list(services.catalog.record(plan.run, plan.batches))


def train(services: Composition, foretoken: Foretoken, data: Path, thinned: Path) -> None:
    """Learn H200's tables, and from LLMServingSim's of other GPUs what H200's leave out.

    That is norms, rotary embedding, activations and the sampler, transferred.
    """
    _thin(data / "aiconfigurator" / "systems", thinned)
    sources = {"aiconfigurator": thinned, "llmservingsim": data / "llmservingsim"}
    for importer, path in sources.items():
        plan = find_importer(importer).read(ImportRequest(path=path))
        list(services.catalog.record(plan.run, plan.batches))
    print(f"trained in {foretoken.train().cpu_s:.0f} CPU s")


def _thin(systems: Path, thinned: Path) -> None:
    """Write the rows that the measured models need, in the same layout."""
    source = systems / "data" / TRAINED_ON
    thinned.mkdir(parents=True)
    for path in (systems / f"{TRAINED_ON}.yaml", *sorted(source.rglob("collection_meta.yaml"))):
        _place(path, systems, thinned).write_bytes(path.read_bytes())
    for path in sorted(source.rglob("*.parquet")):
        table = pq.read_table(path)
        if path.stem in _PICKS:
            table = table.filter(_PICKS[path.stem])
        if path.stem == "moe_perf":
            table = _unite_marlin(table)
        pq.write_table(table, _place(path, systems, thinned))


def _unite_marlin(table: pa.Table) -> pa.Table:
    is_marlin = pc.match_substring(table["kernel_source"], MARLIN_EXPERTS)
    for name, value in (("kernel_source", MARLIN_EXPERTS), ("moe_dtype", "w4a16_mxfp4")):
        column = pc.if_else(is_marlin, pa.scalar(value), table[name])
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _place(path: Path, systems: Path, thinned: Path) -> Path:
    place = thinned / path.relative_to(systems)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place
