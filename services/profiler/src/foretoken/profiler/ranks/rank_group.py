"""The process groups one rank is in, and what their ranks agree on."""

from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed

from foretoken.profiler.ranks.group_spec import GroupSpec, RankOrder, ranks_of_group


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """The ranks of one collective, seen by one of them."""

    ranks: tuple[int, ...]
    place: int
    group: distributed.ProcessGroup
    device: torch.device

    @property
    def next_rank(self) -> int:
        """The rank after this one in the ring."""
        return self.ranks[(self.place + 1) % len(self.ranks)]

    @property
    def previous_rank(self) -> int:
        """The rank before this one in the ring."""
        return self.ranks[self.place - 1]

    def agree(self, *values: float) -> list[float]:
        """Return the largest of all ranks for each value; all ranks have then come here."""
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=self.group)
        return [float(value) for value in largest]


@dataclass(kw_only=True, slots=True)
class RankGroups:
    """All groups this rank has come across; each is made once, by all ranks together."""

    order: RankOrder
    device: torch.device
    _known: dict[tuple[int, ...], distributed.ProcessGroup] = field(default_factory=dict)

    @property
    def spec(self) -> GroupSpec:
        """The group of all ranks."""
        return self.order.group

    def join(self, devices_per_node: int, num_nodes: int) -> RankGroup | None:
        """Return the group of that shape; None where this rank is not in it.

        Raises:
            CollectiveTimingError: there are not as many ranks.
            RuntimeError: the ranks did not find each other.

        """
        ranks = ranks_of_group(devices_per_node, num_nodes, self.spec)
        if ranks not in self._known:
            timeout = timedelta(seconds=self.order.timeout_s)
            self._known[ranks] = distributed.new_group(list(ranks), timeout=timeout)
        if self.order.rank not in ranks:
            return None
        return RankGroup(
            ranks=ranks,
            place=ranks.index(self.order.rank),
            group=self._known[ranks],
            device=self.device,
        )
