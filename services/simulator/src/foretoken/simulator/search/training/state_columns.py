"""What ends a training step, in columns: gradients reduced, parameters updated and gathered.

The same collectives and kernels as `state_sharding` and `update` write for one chunk, for all
strategies that cut the model in the same chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.training.chunk_kinds import ChunkCut, ChunkKind
from foretoken.simulator.search.training.transfer_columns import at_stride
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.steps.parameters import (
    COPIED_HEAD,
    EMBEDDING,
    HEAD,
    LAYERS,
    ChunkParameters,
    add_places,
)
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.state_sums import StateCall, StateRule
from foretoken.simulator.steps.strategies import Strategies


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


class StateWriter:
    """Writes the ends of steps of strategies that cut the model alike, each key one strategy."""

    def __init__(self, keys: Strategies, cut: ChunkCut, rank: RankContext, book: CallBook) -> None:
        """Keep what is written from, a rank of the machine, and the book that calls go to."""
        self._keys = keys
        self._cut = cut
        self._rank = rank
        self._book = book
        self._trainer = keys.base.trainer.resolve()
        self._dtype = keys.base.dtype
        self._gradient_dtype = self._trainer.gradient_dtype or self._dtype.kept_in_training
        self._rule = StateRule(trainer=self._trainer, stage=keys.state_stage, is_once=keys.is_once)

    def write_chunk(self, kind: ChunkKind, counts: Ints, layer_kinds: Sequence[int]) -> ChunkStates:
        """Return what chunks of a kind exchange, given what places have: [key, figure, place]."""
        places = [EMBEDDING] * kind.has_embedding
        places += [LAYERS + layer_kinds[layer] for layer in kind.layers]
        places += [COPIED_HEAD if kind.has_copy else HEAD] * kind.has_head
        chunk = add_places(counts, places, self._keys)
        held, kernels = chunk.groups.values(), tuple(self._kernels(chunk))
        return ChunkStates(
            kernels=kernels,
            buckets=tuple(
                self._collective(call, self._gradient_dtype)
                for group in held
                for call in self._rule.sum_gradients(group)
            ),
            reduction=(
                *kernels,
                self._norms(chunk),
                *self._table(kind, chunk),
                *self._mirror(chunk.num_updated),
            ),
            gather=tuple(
                self._collective(self._rule.gather_parameters(group), self._dtype.kept_in_training)
                for group in held
            ),
            num_updated=chunk.num_updated,
        )

    def write_updates(self, num_updated: Ints) -> tuple[tuple[Calls, ...], tuple[Calls, ...]]:
        """Return the checks and the update of a rank that updates as many parameters."""
        trainer, dtype = self._trainer, self._dtype
        checks = self._flat(lambda count: check_kernels(count, dtype, trainer), num_updated)
        return checks, self._flat(lambda count: update_kernels(count, dtype, trainer), num_updated)

    def _kernels(self, chunk: ChunkParameters) -> list[Calls]:
        """Return what runs next to the sums."""
        num_sums = self._keys.dp * self._keys.cp
        groups = [(held.num_params, held.ranks.num_ranks) for held in chunk.groups.values()]
        own = np.sum([num_params for num_params, _ in groups], axis=0)
        shared = np.sum([count * (num_ranks > 1) for count, num_ranks in groups], axis=0)
        found: list[Calls] = []
        for num_ranks in np.unique(num_sums).tolist():
            some = np.where(num_sums == num_ranks, own, 0)

            def write(count: int, num_ranks: int = num_ranks) -> Nodes:
                return sum_kernels(count, num_ranks, self._dtype, self._trainer)

            found += self._flat(write, some)
        return [
            *found,
            *self._flat(lambda n: reduction_kernels(n, self._dtype, self._trainer), shared),
        ]

    def _norms(self, chunk: ChunkParameters) -> Calls:
        """Return the sum over tp of gradients that each rank has a part of."""
        keys = self._keys
        wanted = np.where((keys.tp > 1) & ~keys.is_isp, chunk.norms, 0)
        call = StateCall(
            operator="all_reduce",
            elements=wanted,
            count=(wanted > 0).astype(np.int64),
            degree=keys.tp,
            stride=np.ones_like(keys.tp),
        )
        return self._collective(call, self._gradient_dtype)

    def _table(self, kind: ChunkKind, chunk: ChunkParameters) -> list[Calls]:
        """Return the sum of a tied embedding's gradients over the first and the last stage."""
        cut, model = self._cut, self._rank.model
        if cut.is_folded or not (
            model.has_tied_embedding and (kind.has_embedding or kind.has_head)
        ):
            return []
        return [self._of_stages(chunk.table, 0, cut.sources[-1])]

    def _mirror(self, num_updated: Ints) -> list[Calls]:
        """Return the sum over the two ranks that hold a chunk."""
        if not self._cut.is_mirrored:
            return []
        # Which two does not matter to the time but for their nodes: the first and the last.
        return [self._of_stages(num_updated, 0, len(self._cut.ranks) - 1)]

    def _of_stages(self, num_params: Ints, first: int, second: int) -> Calls:
        """Return a sum over two ranks of the pipeline."""
        groups = self._place(
            self._keys.stage_ranks[:, None],
            lambda stride: PlacedGroup.of_stages(first, second, at_stride(self._rank, *stride)),
        )
        count = (num_params > 0).astype(np.int64)
        return self._add("all_reduce", num_params, groups, self._gradient_dtype, count)

    def _collective(self, call: StateCall, dtype: DType) -> Calls:
        groups = self._place(
            np.stack((call.degree, call.stride), axis=1),
            lambda pair: PlacedGroup.of_rank(
                RankGroup(axis="dp", degree=pair[0], stride=pair[1]), self._rank
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
