"""`moe_perf`: the expert MLPs of one rank.

`moe_tp_size` ranks split every expert's width, `moe_ep_size` ranks the experts. The rows hold the
widths and experts of the whole layer and all tokens; the rank timed has its share of the width and
of the experts, and the tokens that the routing sends to these.
"""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from foretoken.catalog.array import Integers
from foretoken.catalog.dims import group_rows
from foretoken.catalog.importers.aiconfigurator.formats import split_scheme
from foretoken.catalog.importers.aiconfigurator.perf_table import (
    Circumstances,
    Coded,
    Described,
    PerfTable,
)
from foretoken.catalog.importers.aiconfigurator.points import Points, make_points
from foretoken.catalog.importers.aiconfigurator.routing import (
    Routing,
    is_known_distribution,
    local_load,
)

# How TensorRT-LLM's kernels say that the experts have no gate.
_UNGATED = "_nongated"
# (hidden, top_k, experts) of models without gates, the Nemotron 3 family. Other engines' rows do
# not say whether the kernel timed had one: by their times some had, and some had not.
_UNGATED_LAYERS = ((2688, 6, 128), (2048, 22, 512), (4096, 22, 512), (8192, 22, 512))


def read_moe(table: PerfTable) -> Iterator[Points]:
    """Yield `moe_experts` of rows on one rank, `moe_local_experts` of those on several."""
    mlp = _mlp_kinds(table)
    described = table.describe(("moe_dtype", "distribution"), _describe, {"mlp": mlp})
    tp, ep = table.integers("moe_tp_size"), table.integers("moe_ep_size")
    width = table.integers("inter_size")
    tp_ranks = np.maximum(tp, 1)
    described = table.without(
        described, (tp < 1) | (width % tp_ranks != 0), "moe_tp_size does not divide inter_size"
    )
    described, pairs, active = _loads(table, described, ep)
    num_experts = table.integers("num_experts")
    dims = {
        "num_tokens": table.integers("num_tokens"),
        "top_k": table.integers("topk"),
        "num_experts": num_experts,
        "num_active_experts": active,
        "hidden": table.integers("hidden_size"),
        "intermediate": width // tp_ranks,
    }
    yield make_points("moe_experts", table, described.where(ep == 1), dims)
    dims |= {"num_local_experts": num_experts // np.maximum(ep, 1), "num_local_pairs": pairs}
    yield make_points("moe_local_experts", table, described.where(ep != 1), dims)


def _describe(said: Mapping[str, str]) -> Circumstances | str:
    scheme = split_scheme(said["moe_dtype"])
    if scheme is None:
        return f"moe_dtype {said['moe_dtype']!r} is unknown here"
    if not is_known_distribution(said["distribution"]):
        return f"the tokens' distribution {said['distribution']!r} is unknown here"
    dtype, quant = scheme
    facts = {"quant": quant, "routing": said["distribution"], "mlp": said["mlp"]}
    return Circumstances.of(said, dtype, facts)


def _mlp_kinds(table: PerfTable) -> Coded:
    """Return what kind of MLP the experts are, nothing for the gated ones."""
    kernels, names = table.coded("kernel_source")
    is_ungated = np.array([name.endswith(_UNGATED) for name in names], dtype=bool)[kernels]
    columns = [table.integers(name) for name in ("hidden_size", "topk", "num_experts")]
    may_be = np.zeros(table.origin.num_rows, dtype=bool)
    for layer in _UNGATED_LAYERS:
        may_be |= np.logical_and.reduce(
            [column == value for column, value in zip(columns, layer, strict=True)]
        )
    codes = np.where(is_ungated, 1, np.where(may_be, 2, 0))
    return codes.astype(np.int64), ["", "ungated", "unsaid"]


def _loads(
    table: PerfTable, described: Described, ep: Integers
) -> tuple[Described, Integers, Integers]:
    """Return the rows that can be, and by row of the file what the rank timed has.

    That is its pairs of a token and an expert, and its active experts; 1 where a row is not read.
    """
    codes, names = table.coded("distribution")
    counts = [table.integers(name) for name in ("num_tokens", "topk", "num_experts")]
    keys = [*counts, ep, codes]
    order, starts = group_rows([column[described.rows] for column in keys])
    pairs, active = (np.ones(table.origin.num_rows, dtype=np.int64) for _ in range(2))
    faults: dict[str, list[Integers]] = {}
    for start, stop in itertools.pairwise([*starts.tolist(), len(order)]):
        rows = described.rows[order[start:stop]]
        num_tokens, top_k, num_experts, num_ranks, code = (int(key[rows[0]]) for key in keys)
        routing = Routing(num_tokens, top_k, num_experts, num_ranks, names[code])
        if routing.fault:
            faults.setdefault(routing.fault, []).append(rows)
            continue
        load = local_load(routing)
        pairs[rows], active[rows] = load.num_pairs, load.num_active
    for fault, places in faults.items():
        is_bad = np.isin(np.arange(table.origin.num_rows), np.concatenate(places))
        described = table.without(described, is_bad, fault)
    return described, pairs, active
