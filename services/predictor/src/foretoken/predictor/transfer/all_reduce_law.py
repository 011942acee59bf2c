"""How long an all-reduce between nodes takes: the fastest of NCCL's algorithms and protocols.

A ring passes every part of the message by all ranks twice, so its latency grows with their number.
A tree climbs and comes down again, but reaches less of the bandwidth. Three protocols trade latency
for bandwidth: LL and LL128 carry flags between the data, Simple waits for whole chunks.
Source: NCCL's own cost model, src/graph/tuning.cc of 2022, for machines with NVLink.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import TopologySpec
from foretoken.domain.units import US_PER_S
from foretoken.predictor.roofline import Columns, FloatColumn


@dataclass(frozen=True, kw_only=True, slots=True)
class _Protocol:
    """Latencies in µs: once, and of a hop over NVLink and over the network.

    `ratio` is the share of the bandwidth; `sizes` are factors of it at messages of 64 bytes, 128,
    256 and so on.
    """

    base_us: float
    inside_us: float
    between_us: float
    ratio: float
    sizes: tuple[float, ...] = (1.0,)


# A hop of LL inside a node takes longer where others go between nodes.
_LL_INSIDE = 1.8
_LL_RING = _Protocol(base_us=3.6, inside_us=0.47 * _LL_INSIDE, between_us=2.7, ratio=1 / 4)
_LL128_RING = _Protocol(base_us=10.0, inside_us=1.9, between_us=4.0, ratio=0.92)
# The same with one rank on each node: one device sends and receives.
_LL128_ALONE_RATIO = 0.7
# The hops of Simple are those of the topology's file.
_SIMPLE_RING_BASE_US = 8.4
_TREE_RATIO = 0.92
_TREES = (
    _Protocol(
        base_us=4.4,
        inside_us=0.52 * _LL_INSIDE,
        between_us=5.0,
        ratio=1 / 3.8,
        sizes=(1,) * 4
        + (0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1),
    ),
    _Protocol(
        base_us=4.4,
        inside_us=1.25,
        between_us=8.5,
        ratio=120 / 128,
        sizes=(1,) * 5 + (0.9, 0.8, 0.8, 0.8, 0.7) + (0.6,) * 6 + (0.8,) + (0.9,) * 4 + (1,),
    ),
    _Protocol(
        base_us=0.0,
        inside_us=28.0,
        between_us=28.0,
        ratio=1.0,
        sizes=(0.9,) * 7
        + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 1),
    ),
)
_SMALLEST_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chip:
    """What depends on the device's architecture.

    A channel, one for each network port, carries at most so much in a tree over two nodes, over
    more, and in the protocol LL128. Where a rank's part of a message fills its buffers, the hops of
    a ring take `plateau` times as long.
    """

    pair_bytes_per_s: float
    tree_bytes_per_s: float
    ll128_bytes_per_s: float
    plateau: float


_HOPPER = _Chip(
    pair_bytes_per_s=41.4e9, tree_bytes_per_s=33e9, ll128_bytes_per_s=36.7e9, plateau=1.5
)
# Later architectures count as the latest that is known.
_CHIPS: Mapping[str, _Chip] = {
    "volta": _Chip(
        pair_bytes_per_s=18.5e9, tree_bytes_per_s=10e9, ll128_bytes_per_s=20e9, plateau=1.9
    ),
    "ampere": _Chip(
        pair_bytes_per_s=23.6e9, tree_bytes_per_s=17.8e9, ll128_bytes_per_s=20e9, plateau=1.9
    ),
}
# From so many bytes of a message for each rank on its parts fill the buffers.
_FULL_BYTES = 65536 / 16
_PAIR = 2


def estimate_all_reduce(
    columns: Columns, bus_us: FloatColumn, topology: TopologySpec
) -> FloatColumn:
    """Return the time of all-reduces over two nodes or more, in µs.

    `bus_us` is what a ring without latency takes at the bandwidth that the links reach.
    """
    group = _Group.of_columns(columns, bus_us, topology)
    fastest_us: FloatColumn = np.min([*_ring_us(group, topology), *_tree_us(group)], axis=0)
    return fastest_us


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Groups of ranks, their message, and the bandwidth of a ring around each, as columns."""

    message_bytes: FloatColumn
    devices_per_node: FloatColumn
    num_nodes: FloatColumn
    num_channels: FloatColumn
    bus_us: FloatColumn
    bus_bytes_per_s: FloatColumn
    chip: _Chip

    @classmethod
    def of_columns(cls, columns: Columns, bus_us: FloatColumn, topology: TopologySpec) -> "_Group":
        message_bytes = columns["message_bytes"].astype(np.float64)
        devices = columns["devices_per_node"].astype(np.float64)
        num_nodes = columns["num_nodes"].astype(np.float64)
        num_ranks = devices * num_nodes
        moved_bytes = 2 * message_bytes * (num_ranks - 1) / num_ranks
        return cls(
            message_bytes=message_bytes,
            devices_per_node=devices,
            num_nodes=num_nodes,
            num_channels=np.minimum(devices, topology.num_ports),
            bus_us=bus_us,
            bus_bytes_per_s=moved_bytes / np.maximum(bus_us, np.finfo(float).tiny) * US_PER_S,
            chip=_CHIPS.get(find_device(topology.device).architecture, _HOPPER),
        )

    @property
    def num_ranks(self) -> FloatColumn:
        """Ranks of each group."""
        ranks: FloatColumn = self.devices_per_node * self.num_nodes
        return ranks

    def limit(
        self, ratio: FloatColumn | float, channel_bytes_per_s: FloatColumn | float
    ) -> FloatColumn:
        """Return a share of the bandwidth, less where a channel cannot carry its part of it."""
        most = channel_bytes_per_s * self.num_channels / self.bus_bytes_per_s
        share: FloatColumn = np.minimum(ratio, most)
        return share


def _ring_us(group: _Group, topology: TopologySpec) -> list[FloatColumn]:
    """Return the time of a ring in each protocol."""
    inside = 2 * (group.num_ranks - group.num_nodes)
    between = 2 * (group.num_nodes - 1)
    is_full = group.message_bytes >= group.num_ranks * _FULL_BYTES
    intra, inter = topology.intra_node, topology.inter_node
    passing_us = inside * intra.hop_latency_us + between * inter.hop_latency_us
    simple_us = _SIMPLE_RING_BASE_US + passing_us * np.where(is_full, group.chip.plateau, 1.0)
    is_alone = group.devices_per_node == 1
    ll128 = group.limit(
        np.where(is_alone, _LL128_ALONE_RATIO, _LL128_RING.ratio), group.chip.ll128_bytes_per_s
    )
    return [
        simple_us + group.bus_us,
        _hops_us(_LL_RING, inside, between) + group.bus_us / _LL_RING.ratio,
        _hops_us(_LL128_RING, inside, between) + group.bus_us / ll128,
    ]


def _tree_us(group: _Group) -> list[FloatColumn]:
    """Return the time of a tree in each protocol."""
    chip = group.chip
    channel = np.where(group.num_nodes == _PAIR, chip.pair_bytes_per_s, chip.tree_bytes_per_s)
    # The whole message comes up, where a ring leaves out each rank's own part.
    whole_us = group.bus_us * group.num_ranks / (group.num_ranks - 1)
    inside = 2 * (group.devices_per_node - 1)
    between = 2 * np.floor(np.log2(group.num_nodes))
    octaves = np.log2(np.maximum(group.message_bytes / _SMALLEST_BYTES, 1.0))
    reached = group.limit(_TREE_RATIO, channel)
    return [
        _hops_us(tree, inside, between)
        + whole_us
        / (reached * tree.ratio * np.interp(octaves, np.arange(len(tree.sizes)), tree.sizes))
        for tree in _TREES
    ]


def _hops_us(protocol: _Protocol, inside: FloatColumn, between: FloatColumn) -> FloatColumn:
    hops_us: FloatColumn = (
        protocol.base_us + inside * protocol.inside_us + between * protocol.between_us
    )
    return hops_us
