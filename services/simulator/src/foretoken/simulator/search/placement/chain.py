"""A chain of nodes to be cut into contiguous stages, the longest of which is to be short.

Stages may be of several kinds, on each of which a node costs something else; a cut may cost the
stage before it a transfer, and a stage may have limited memory. Every stage gets at least one node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.simulator.grid import Floats

_METHODS = "foretoken.simulator.search.placement.partition"
# Sums of bytes in another order may differ in their last digits.
_ROUNDING = 1 + 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """Nodes in order, and the stages in order that they are cut to.

    `costs` is what a node costs on a kind of stage: (nodes, kinds); `kinds` names the kind of every
    stage. `transfers` is what a cut after a node costs between two stages, (nodes - 1, stages - 1),
    or empty. `bytes_needed` is what a node needs on a stage, (nodes, stages), and `bytes_there`
    what the stage has, (stages); both may be empty. Nothing is negative.
    """

    costs: Floats
    kinds: tuple[int, ...]
    transfers: Floats
    bytes_needed: Floats
    bytes_there: Floats

    @classmethod
    def of(
        cls,
        costs: ArrayLike,
        kinds: Sequence[int],
        *,
        transfers: ArrayLike = (),
        bytes_needed: ArrayLike = (),
        bytes_there: ArrayLike = (),
    ) -> Self:
        """Return a chain; one column of costs may be given as a list, one transfer as a number.

        Raises:
            InvalidRequestError: fewer nodes than stages, or shapes that do not fit.

        """
        table = np.asarray(costs, dtype=np.float64)
        table = table[:, None] if table.ndim == 1 else table
        num_nodes, num_stages = len(table), len(kinds)
        sent, needed = np.asarray(transfers, np.float64), np.asarray(bytes_needed, np.float64)
        there = np.asarray(bytes_there, np.float64)
        try:
            if sent.size or sent.ndim == 0:
                sent = np.broadcast_to(sent, (num_nodes - 1, num_stages - 1))
            if needed.size:
                needed = needed[:, None] if needed.ndim == 1 else needed
                needed = np.broadcast_to(needed, (num_nodes, num_stages))
                there = np.broadcast_to(there, (num_stages,))
        except ValueError as err:
            raise InvalidRequestError(f"the chain: {err}") from err
        chain = cls(
            costs=table,
            kinds=tuple(kinds),
            transfers=sent,
            bytes_needed=needed,
            bytes_there=there,
        )
        chain.check()
        return chain

    def check(self) -> None:
        """Refuse chains that nobody can cut.

        Raises:
            InvalidRequestError: with the reason.

        """
        given = (self.costs, self.transfers, self.bytes_needed, self.bytes_there)
        numbers = np.concatenate([np.ravel(part) for part in given])
        num_nodes, num_stages = self.num_nodes, self.num_stages
        problem = (
            f"{num_nodes} nodes cannot be cut to {num_stages} stages of at least one node, of kinds"
            f" below {self.costs.shape[1]}"
        )
        InvalidRequestError.check(
            "chain",
            {
                "kinds": (
                    1 <= num_stages <= num_nodes
                    and min(self.kinds) >= 0
                    and max(self.kinds) < self.costs.shape[1],
                    problem,
                ),
                "costs": (
                    bool(np.all(np.isfinite(numbers) & (numbers >= 0))),
                    "costs, transfers and bytes must be finite and not negative",
                ),
            },
        )

    @property
    def num_nodes(self) -> int:
        """Nodes of the chain."""
        return len(self.costs)

    @property
    def num_stages(self) -> int:
        """Stages to cut it to."""
        return len(self.kinds)

    @property
    def has_transfers(self) -> bool:
        """Whether a cut costs anything."""
        return bool(self.transfers.size)

    @property
    def has_memory(self) -> bool:
        """Whether stages have limited memory."""
        return bool(self.bytes_needed.size)

    @property
    def is_uniform(self) -> bool:
        """Whether all stages are alike: greedy methods are exact then."""
        return (
            len(set(self.kinds)) == 1
            and not self.has_memory
            and (not self.has_transfers or bool(np.ptp(self.transfers) == 0))
        )

    @cached_property
    def room_bytes(self) -> Floats:
        """Bytes that stages have, with room for rounded sums: (stages)."""
        return np.asarray(self.bytes_there * _ROUNDING)

    @cached_property
    def cost_sums(self) -> Floats:
        """Costs of the nodes before each: (kinds, nodes + 1)."""
        return _sums(self.costs)

    @cached_property
    def byte_sums(self) -> Floats:
        """Bytes of the nodes before each: (stages, nodes + 1)."""
        return _sums(self.bytes_needed)

    def stage_costs(self, ends: NDArray[np.int64]) -> Floats:
        """Return what stages that end before these nodes cost: (..., stages)."""
        starts = np.concatenate([np.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
        kinds = np.asarray(self.kinds)
        found: Floats = self.cost_sums[kinds, ends] - self.cost_sums[kinds, starts]
        if self.has_transfers:
            stages = np.arange(self.num_stages - 1)
            found[..., :-1] += self.transfers[ends[..., :-1] - 1, stages]
        return found

    def fits(self, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether stages that end before these nodes have the memory: (...)."""
        if not self.has_memory:
            return np.ones(ends.shape[:-1], dtype=bool)
        starts = np.concatenate([np.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
        stages = np.arange(self.num_stages)
        needed = self.byte_sums[stages, ends] - self.byte_sums[stages, starts]
        found: NDArray[np.bool_] = np.all(needed <= self.room_bytes, axis=-1)
        return found


def _sums(table: Floats) -> Floats:
    sums = np.zeros((table.shape[1], len(table) + 1))
    np.cumsum(table.T, axis=1, out=sums[:, 1:])
    return sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A chain cut to stages of `num_nodes` nodes; none where no cut was found that fits.

    `longest` is the cost of the longest stage. `is_optimal` says that no other cut that fits is
    better; `note` what stopped a method early.
    """

    num_nodes: tuple[int, ...] = ()
    longest: float = float("inf")
    is_optimal: bool = False
    note: str = ""

    @classmethod
    def at(
        cls, ends: Sequence[int], chain: Chain, *, is_optimal: bool = False, note: str = ""
    ) -> Self:
        """Return the cut whose stages end before these nodes, if it has the memory."""
        rows = np.asarray(ends, dtype=np.int64)
        if not chain.fits(rows):
            return cls(note=note)
        return cls(
            num_nodes=tuple(np.diff(rows, prepend=0).tolist()),
            longest=float(chain.stage_costs(rows).max()),
            is_optimal=is_optimal,
            note=note,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionMethod:
    """A way to cut: `cut` returns one of no stages where nothing it looked at has the memory."""

    name: str
    cut: Callable[[Chain], Cut]


def find_method(name: str) -> PartitionMethod:
    """Return the method of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    methods: dict[str, PartitionMethod] = dict(scan_modules(_METHODS, "METHOD"))
    return UnknownPluginError.look_up(name, methods, "partition", "partition method")
