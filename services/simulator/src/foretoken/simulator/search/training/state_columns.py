"""What ends a training step, in columns: gradients reduced, parameters updated and gathered.

The same collectives and kernels as `state_sharding` and `update` write for one chunk, for all
strategies that cut the model in the same chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.communication import PlacedGroup
from foretoken.domain.lowering.graph import OperatorNode, RankContext, Section
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.lowering.placement import RankGroup
from foretoken.domain.lowering.training_kernels import (
    check_kernels,
    reduction_kernels,
    sum_kernels,
    update_kernels,
)
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.units import ceil_divide
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.search.training.chunk_kinds import ChunkCut, ChunkKind
from foretoken.simulator.search.training.parameter_counts import ParameterCounts
from foretoken.simulator.search.training.transfer_columns import at_stride
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.sharding import StateRanks
from foretoken.simulator.steps.state_sums import HeldParameters, StateCall, StateRule


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateKeys:
    """What the end of a step depends on beside the chunks, one entry per group of strategies.

    `ranks` are those that hold the same dense parameters, and the same experts; `stage` is that of
    ZeRO, 0 where nothing is split. With `is_once` stage 3 exchanges once a step.
    """

    ranks: Mapping[str, StateRanks]
    stage: Ints
    is_once: Flags
    tp: Ints
    num_sums: Ints
    is_isp: Flags
    stage_stride: Ints

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.tp)


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """A call per entry, `counts` times; `numbers` are of the call book, 0 for none."""

    numbers: Ints
    counts: Ints

    def total_us(self, prices_us: Floats) -> Floats:
        """Return what all repetitions take: (variant, entry)."""
        total: Floats = prices_us[:, self.numbers] * self.counts
        return total


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkStates:
    """What a chunk's states exchange once a step, one entry per key.

    `buckets` are reduced during the last backward pass where they are hidden, `reduction` is
    always waited for, of which `kernels` compute; `gather` follows the update. A rank updates
    `num_updated`.
    """

    buckets: tuple[Calls, ...]
    reduction: tuple[Calls, ...]
    kernels: tuple[Calls, ...]
    gather: tuple[Calls, ...]
    num_updated: Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRules:
    """What all strategies have: the framework, the format, and the machine by `rank`."""

    trainer: TrainerProfile
    dtype: DType
    rank: RankContext

    @property
    def gradient_dtype(self) -> DType:
        """Format that gradients are reduced in."""
        return self.trainer.gradient_dtype or self.dtype.kept_in_training


class StateWriter:
    """Writes the ends of steps of strategies that cut the model alike."""

    def __init__(self, keys: StateKeys, cut: ChunkCut, rules: StateRules, book: CallBook) -> None:
        """Keep what is written from, and the book that calls are written to."""
        self._keys = keys
        self._cut = cut
        self._rules = rules
        self._book = book

    def write_chunk(
        self, kind: ChunkKind, counts: Sequence[ParameterCounts], of_key: Ints
    ) -> ChunkStates:
        """Return what chunks of a kind exchange; `of_key` finds the counts of each key."""
        columns = _Counts(counts, of_key)
        names = ["dense"] + ["expert"] * bool(np.any(columns.of("expert")))
        num_updated = sum(
            (ceil_divide(columns.of(name), self._keys.ranks[name].shards) for name in names),
            np.zeros(len(self._keys), dtype=np.int64),
        )
        kernels = tuple(self._kernels(names, columns))
        keys = self._keys
        rule = StateRule(trainer=self._rules.trainer, stage=keys.stage, is_once=keys.is_once)
        held = [
            HeldParameters(
                num_params=columns.of(name),
                num_layer_params=columns.of(f"{name}_layer"),
                num_tensors=columns.of(f"{name}_tensors"),
                ranks=keys.ranks[name],
            )
            for name in names
        ]
        return ChunkStates(
            kernels=kernels,
            buckets=tuple(
                self._collective(call, self._rules.gradient_dtype)
                for group in held
                for call in rule.sum_gradients(group)
            ),
            reduction=(
                *kernels,
                *self._norms(columns),
                *self._table(kind, columns),
                *self._mirror(num_updated),
            ),
            gather=tuple(
                self._collective(rule.gather_parameters(group), self._rules.dtype.kept_in_training)
                for group in held
            ),
            num_updated=num_updated,
        )

    def write_updates(self, num_updated: Ints) -> tuple[tuple[Calls, ...], tuple[Calls, ...]]:
        """Return the checks and the update of a rank that updates as many parameters."""
        trainer, dtype = self._rules.trainer, self._rules.dtype
        checks = self._flat(lambda count: check_kernels(count, dtype, trainer), num_updated)
        return checks, self._flat(lambda count: update_kernels(count, dtype, trainer), num_updated)

    def _kernels(self, names: Sequence[str], columns: "_Counts") -> list[Calls]:
        """Return what runs beside the sums."""
        keys, rules = self._keys, self._rules
        own, shared = np.zeros_like(keys.tp), np.zeros_like(keys.tp)
        for name in names:
            num_params = columns.of(name)
            own = own + num_params
            ranks = keys.ranks[name]
            shared = shared + np.where(ranks.num_ranks > 1, num_params, 0)
        found: list[Calls] = []
        for num_ranks in np.unique(keys.num_sums):
            some = np.where(keys.num_sums == num_ranks, own, 0)

            def write(count: int, num_ranks: int = int(num_ranks)) -> Nodes:
                return sum_kernels(count, num_ranks, rules.dtype, rules.trainer)

            found += self._flat(write, some)
        return [
            *found,
            *self._flat(lambda count: reduction_kernels(count, rules.dtype, rules.trainer), shared),
        ]

    def _norms(self, columns: "_Counts") -> list[Calls]:
        """Return the sum over tp of gradients that each rank has a part of."""
        keys = self._keys
        wanted = np.where((keys.tp > 1) & ~keys.is_isp, columns.of("norms"), 0)
        call = StateCall(
            operator="all_reduce",
            elements=wanted,
            count=(wanted > 0).astype(np.int64),
            degree=keys.tp,
            stride=np.ones_like(keys.tp),
        )
        return [self._collective(call, self._rules.gradient_dtype)]

    def _table(self, kind: ChunkKind, columns: "_Counts") -> list[Calls]:
        """Return the sum of a tied embedding's gradients over the first and the last stage."""
        cut, model = self._cut, self._rules.rank.model
        if cut.is_folded or not (
            model.has_tied_embedding and (kind.has_embedding or kind.has_head)
        ):
            return []
        return [self._of_stages(columns.of("table"), 0, cut.sources[-1])]

    def _mirror(self, num_updated: Ints) -> list[Calls]:
        """Return the sum over the two ranks that hold a chunk."""
        if not self._cut.is_mirrored:
            return []
        # Which two does not matter to the time but for their nodes: the first and the last.
        return [self._of_stages(num_updated, 0, len(self._cut.ranks) - 1)]

    def _of_stages(self, num_params: Ints, first: int, second: int) -> Calls:
        """Return a sum over two ranks of the pipeline."""
        groups = self._place(
            self._keys.stage_stride[:, None],
            lambda stride: PlacedGroup.of_stages(
                first, second, at_stride(self._rules.rank, *stride)
            ),
        )
        count = (num_params > 0).astype(np.int64)
        return self._add("all_reduce", num_params, groups, self._rules.gradient_dtype, count)

    def _collective(self, call: StateCall, dtype: DType) -> Calls:
        groups = self._place(
            np.stack((call.degree, call.stride), axis=1),
            lambda pair: PlacedGroup.of_rank(
                RankGroup(axis="dp", degree=pair[0], stride=pair[1]), self._rules.rank
            ),
        )
        return self._add(call.operator, call.elements, groups, dtype, call.count)

    def _place(
        self, pairs: Ints, place: Callable[[tuple[int, ...]], PlacedGroup]
    ) -> dict[str, Ints]:
        """Return the dimensions of groups, and who shares their links, each kind placed once."""
        first, inverse = number_rows(list(pairs.T))
        groups = [place(tuple(pair)) for pair in pairs[first].tolist()]
        columns = {
            name: np.array([group.dims[name] for group in groups])[inverse]
            for name in ("devices_per_node", "num_nodes")
        }
        columns["num_sharing"] = np.array([group.num_sharing for group in groups])[inverse]
        return columns

    def _add(
        self, operator: str, elements: Ints, groups: Mapping[str, Ints], dtype: DType, count: Ints
    ) -> Calls:
        numbers = np.zeros_like(elements)
        rows = np.flatnonzero(count)
        if len(rows):
            like = OperatorNode(
                role=operator,
                group="",
                section=Section.GRADIENT,
                operator=operator,
                dims={},
                dtype=dtype,
            )
            dims = {
                "message_bytes": dtype.bytes_of(elements[rows]) * groups["num_sharing"][rows],
                "devices_per_node": groups["devices_per_node"][rows],
                "num_nodes": groups["num_nodes"][rows],
            }
            numbers[rows] = self._book.add_columns(like, dims, len(rows))
        return Calls(numbers, count)

    def _flat(self, write: Callable[[int], Nodes], num_params: Ints) -> tuple[Calls, ...]:
        """Return kernels over as many parameters; their dimension is proportional to these."""
        rows = np.flatnonzero(num_params)
        found = []
        for node in write(1) if len(rows) else ():
            numbers = np.zeros_like(num_params)
            dims = {"num_params": num_params[rows] * node.dims["num_params"]}
            numbers[rows] = self._book.add_columns(node, dims, len(rows))
            found.append(Calls(numbers, (num_params > 0).astype(np.int64)))
        return tuple(found)


@dataclass(slots=True, eq=False)
class _Counts:
    """Parameter counts as columns, by name."""

    counts: Sequence[ParameterCounts]
    of_key: Ints
    _known: dict[str, Ints] = field(default_factory=dict)

    def of(self, name: str) -> Ints:
        if name not in self._known:
            values = [getattr(counts, name) for counts in self.counts]
            self._known[name] = np.array(values, dtype=np.int64)[self.of_key]
        return self._known[name]
