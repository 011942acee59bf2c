"""What ends a training step, in columns: gradients reduced, parameters updated and gathered.

The same collectives and kernels as `state_sharding` and `update` write for one chunk, for all
strategies that cut the model in the same chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretoken.domain.communication import PlacedGroup
from foretoken.domain.estimate import DType
from foretoken.domain.graph import OperatorNode, RankContext, Section
from foretoken.domain.lowering_options import Nodes
from foretoken.domain.placement import RankGroup
from foretoken.domain.trainer import TrainerProfile
from foretoken.domain.training_kernels import (
    check_kernels,
    reduction_kernels,
    sum_kernels,
    update_kernels,
)
from foretoken.domain.units import ceil_divide
from foretoken.simulator.grid import Flags, Floats, Ints
from foretoken.simulator.search.training.call_prices import CallBook
from foretoken.simulator.search.training.chunk_kinds import ChunkCut, ChunkKind
from foretoken.simulator.search.training.parameter_counts import ParameterCounts
from foretoken.simulator.search.training.transfer_columns import at_stride
from foretoken.simulator.steps.row_numbers import number_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateKeys:
    """What the end of a step depends on beside the chunks, one entry per group of strategies.

    `shards` and `replicas` are, for dense parameters and experts, over how many ranks states are
    split and how many sets of them there are; `stride` how far these ranks are apart. `keeps_*`
    tell what is split. With `is_once` ZeRO 3 exchanges once a step.
    """

    shards: Mapping[str, Ints]
    replicas: Mapping[str, Ints]
    stride: Mapping[str, Ints]
    splits_optimizer: Flags
    splits_gradients: Flags
    splits_parameters: Flags
    is_once: Flags
    hides_data: Flags
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
            (ceil_divide(columns.of(name), self._keys.shards[name]) for name in names),
            np.zeros(len(self._keys), dtype=np.int64),
        )
        kernels = tuple(self._kernels(names, columns))
        return ChunkStates(
            kernels=kernels,
            buckets=tuple(calls for name in names for calls in self._reduce(name, columns)),
            reduction=(
                *kernels,
                *self._norms(columns),
                *self._table(kind, columns),
                *self._mirror(num_updated),
            ),
            gather=tuple(self._gather(name, columns) for name in names),
            num_updated=num_updated,
        )

    def write_updates(self, num_updated: Ints) -> tuple[tuple[Calls, ...], tuple[Calls, ...]]:
        """Return the checks and the update of a rank that updates as many parameters."""
        trainer, dtype = self._rules.trainer, self._rules.dtype
        checks = self._flat(lambda count: check_kernels(count, dtype, trainer), num_updated)
        return checks, self._flat(lambda count: update_kernels(count, dtype, trainer), num_updated)

    def _reduce(self, name: str, columns: "_Counts") -> list[Calls]:
        """Return the sums of gradients, in buckets."""
        keys, num_params = self._keys, columns.of(name)
        shards, replicas, stride = keys.shards[name], keys.replicas[name], keys.stride[name]
        keeps_shares = keys.splits_optimizer & (
            keys.splits_gradients | (not self._rules.trainer.reduces_whole_gradients)
        )
        in_layers = keys.splits_gradients & ~keys.is_once
        summed = np.where(keeps_shares, ceil_divide(num_params, shards), num_params)
        degree = np.where(keeps_shares, replicas, shards * replicas)
        far = np.where(keeps_shares, stride * shards, stride)
        bucket = np.full(len(keys), self._rules.trainer.bucket_elements)
        most = np.where(in_layers, columns.of(f"{name}_layer"), bucket)
        scattered = np.where(keeps_shares & ~in_layers, num_params, 0)
        return [
            *self._buckets("reduce_scatter", scattered, most, (shards, stride)),
            *self._buckets("all_reduce", summed, most, (degree, far), num_params),
        ]

    def _buckets(
        self,
        operator: str,
        num_params: Ints,
        most: Ints,
        group: tuple[Ints, Ints],
        of_params: Ints | None = None,
    ) -> list[Calls]:
        """Return full buckets and the rest: of whole gradients, or a rank's share of them."""
        wanted = np.where(group[0] > 1, num_params, 0)
        least = np.maximum(1, wanted)
        share = np.maximum(1, (num_params if of_params is None else of_params) // least)
        size = ceil_divide(most, share)
        size = np.minimum(np.where(size > 0, size, least), least)
        num_full, rest = np.divmod(wanted, size)
        dtype = self._rules.gradient_dtype
        return [
            self._collective(operator, elements, group, dtype, count)
            for elements, count in ((size, num_full), (rest, (rest > 0).astype(np.int64)))
        ]

    def _gather(self, name: str, columns: "_Counts") -> Calls:
        """Return the gathering of updated parameters."""
        keys, num_params = self._keys, columns.of(name)
        in_layers = keys.splits_parameters & ~keys.is_once
        num_calls = np.ones_like(num_params)
        if self._rules.trainer.broadcasts_parameters:
            num_calls = np.minimum(keys.shards[name], columns.of(f"{name}_tensors"))
        num_calls = np.where(keys.splits_optimizer & ~in_layers & (num_params > 0), num_calls, 0)
        size = ceil_divide(num_params, np.maximum(1, num_calls))
        group, dtype = (keys.shards[name], keys.stride[name]), self._rules.dtype.kept_in_training
        num_calls = np.where(group[0] > 1, num_calls, 0)
        return self._collective("all_gather", size, group, dtype, num_calls)

    def _kernels(self, names: Sequence[str], columns: "_Counts") -> list[Calls]:
        """Return what runs beside the sums."""
        keys, rules = self._keys, self._rules
        own, shared = np.zeros_like(keys.tp), np.zeros_like(keys.tp)
        for name in names:
            num_params = columns.of(name)
            own = own + num_params
            shared = shared + np.where(keys.shards[name] * keys.replicas[name] > 1, num_params, 0)
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
        group = (keys.tp, np.ones_like(keys.tp))
        count = (wanted > 0).astype(np.int64)
        return [self._collective("all_reduce", wanted, group, self._rules.gradient_dtype, count)]

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

    def _collective(
        self, operator: str, elements: Ints, group: tuple[Ints, Ints], dtype: DType, count: Ints
    ) -> Calls:
        groups = self._place(
            np.stack(group, axis=1),
            lambda pair: PlacedGroup.of_rank(
                RankGroup(axis="dp", degree=pair[0], stride=pair[1]), self._rules.rank
            ),
        )
        return self._add(operator, elements, groups, dtype, count)

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
