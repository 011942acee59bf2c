"""`wideep_deepep_ll_perf`: how DeepEP's low-latency kernels bring tokens to experts and back.

A row has both ways, in µs, of `num_token` tokens of every rank, on all devices of `node_num` nodes.
A token goes once for each of its experts, in FP8 with a scale of four bytes for 128 features, and
what comes back has 16 bit. How many experts had a token is in the row's bandwidth: the test leaves
out some, ten in all. Source: deepseek-ai/DeepEP, `tests/test_low_latency.py`, whose output the
tables hold.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from foretoken.catalog.importers.aiconfigurator.perf_table import (
    Circumstances,
    PerfTable,
    topology_of,
)
from foretoken.catalog.importers.aiconfigurator.points import Points, make_points
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.expert_exchange import (
    LEAST_EXPERTS,
    LOW_LATENCY,
    ExchangePart,
    exchange_facts,
    scaled_bytes,
)

# A rack's trays have fewer devices than its topology calls a node, and rows do not say how many.
_SERVER_DEVICES = 8
_BYTES_PER_GB_S_US = 1e3
TIMES = ("dispatch_avg_t_us", "combine_avg_t_us")
_BANDWIDTH = "combine_bandwidth_gbps"
COLUMNS = ("op_name", "node_num", "hidden_size", "num_experts", _BANDWIDTH)


def read_low_latency_exchange(table: PerfTable) -> Iterator[Points]:
    """Yield the exchanges of tokens, and those of what experts made of them."""
    hidden = table.integers("hidden_size")
    times = [table.origin.numbers(name) for name in TIMES]
    returned = table.origin.numbers(_BANDWIDTH) * times[1] * _BYTES_PER_GB_S_US
    returned_width = DType.BF16.bytes_of(hidden)
    num_pairs = np.rint(np.nan_to_num(returned) / returned_width).astype(np.int64)
    is_other = table.integers("num_experts") < LEAST_EXPERTS
    widths = (scaled_bytes(hidden), returned_width)
    for part, latency_us, width in zip(ExchangePart, times, widths, strict=True):
        described = table.describe((), lambda said, part=part: _describe(said, part))  # type: ignore[misc]
        reason = f"of fewer than {LEAST_EXPERTS} experts few multiprocessors send"
        described = table.without(described, is_other, reason)
        dims = {
            "message_bytes": num_pairs * width,
            "devices_per_node": _SERVER_DEVICES,
            "num_nodes": table.integers("node_num"),
        }
        yield make_points("all_to_all", table, described, dims, latency_us=latency_us)


def _describe(said: Mapping[str, str], part: ExchangePart) -> Circumstances | str:
    if said["op_name"] != "ll":
        return f"{said['op_name']!r} of DeepEP's low-latency kernels is unknown here"
    topology = topology_of(said)
    if find_topology(topology).devices_per_node != _SERVER_DEVICES:
        return f"how many devices of {topology} exchange tokens is not said"
    facts = exchange_facts(LOW_LATENCY, LEAST_EXPERTS, part)
    return Circumstances.of(said, DType.BF16, facts, topology=topology)
