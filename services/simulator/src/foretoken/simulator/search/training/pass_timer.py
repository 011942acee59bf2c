"""Times of the passes of chunks, in columns: one run of the streams for very many strategies.

Passes whose operators are the same but for what each takes are run together, as columns. Such a
family is known by the operators of its shapes, by what is recomputed, and by what states exchange
in its layers; its members are the micro batch sizes, the shapes, and the ranks states are split
over.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foretoken.domain.lowering.communication import PlacedGroup, axis_group
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.lowering.sequence_parallel import splits_tokens
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.training.chunk_kinds import ChunkKind
from foretoken.simulator.search.training.shape_library import Shape
from foretoken.simulator.search.training.transfer_calls import near_pair
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.steps.passes import PassCutter, PassParts, PassTime, time_passes
from foretoken.simulator.steps.program import StreamRules, count_expert_calls
from foretoken.simulator.steps.recompute import LAYER_INPUT, RecomputePlan, plan_recompute
from foretoken.simulator.steps.row_numbers import number_rows
from foretoken.simulator.steps.stage_operators import ChunkOperators
from foretoken.simulator.steps.state_collectives import StateExchange

# What is kept of a pass: see `PassColumns`.
TOTAL, EXPOSED, HIDDEN, LEFT, COMPUTE, SUMS = range(6)
NUM_FIELDS = 6
# The exchange of strategies that exchange nothing in layers.
NO_EXCHANGE = StateExchange(groups=())
_NO_PLAN = RecomputePlan()
_FIRST_SUM = "gradient_accumulation"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassKeys:
    """What the passes of strategies depend on, one entry per strategy.

    `shape`, `micro_batch` (of the shape's sizes), `recompute` (of the modes) and `exchange` are
    numbers.
    """

    shape: Ints
    micro_batch: Ints
    recompute: Ints
    exchange: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassColumns:
    """Times of one pass, in µs: by what a chunk's pass depends on, (field, variant, group).

    Fields are TOTAL, what it waits for communication (EXPOSED), what nothing waited for (HIDDEN)
    and what of it is LEFT at its end, computation (COMPUTE), and the additions to earlier
    gradients (SUMS). `group` finds the group of a strategy.
    """

    times: Mapping[tuple[int, ...], Floats]
    group: Ints

    def with_variants(self, variants: Sequence[int]) -> "PassColumns":
        """Return the times by some of the prices."""
        times = {key: fields[:, variants] for key, fields in self.times.items()}
        return PassColumns(times=times, group=self.group)

    def of(self, kind: ChunkKind, rows: Ints) -> PassTime:
        """Return the times of a kind of chunk for some strategies: (variant, strategy)."""
        found = self.times[kind.pass_key][:SUMS, :, self.group[rows]]
        return PassTime(
            total_us=found[TOTAL],
            compute_us=found[COMPUTE],
            exposed_us={("", ""): found[EXPOSED]},
            hidden_us=found[HIDDEN],
            left_us=found[LEFT],
        )

    def sums_us(self, kind: ChunkKind, rows: Ints) -> Floats:
        """Return the additions to earlier gradients in a kind of chunk for some strategies."""
        return np.asarray(self.times[kind.pass_key][SUMS][:, self.group[rows]])


class PassTimer:
    """Times the passes of shapes: first their calls are written to the book, then it is priced."""

    def __init__(
        self,
        scenario: TrainingScenario,
        shapes: Sequence[Shape],
        exchanges: Sequence[StateExchange],
        modes: Sequence[TrainingScenario],
        book: CallBook,
    ) -> None:
        """Write all calls to the book; `modes` are the ways to recompute."""
        self._scenario = scenario
        self._modes = modes
        self._plans: dict[tuple[object, ...], RecomputePlan] = {}
        # Families differ in what it hides, which their operators tell.
        self.trainer = shapes[0].trainer
        self._exchanges = exchanges
        self._book = book
        self._work = [_ShapeWork.of_shape(shape, scenario) for shape in shapes]
        self._numbers = [
            np.stack([book.add(node, len(work.shape.micro_batch_sizes)) for node in work.nodes])
            for work in self._work
        ]
        self._signatures = _number_values([work.signature for work in self._work])
        self._exchange_numbers = [
            [int(book.add(node, 1)[0]) for node in _exchanged_nodes(exchange)]
            for exchange in exchanges
        ]
        self._exchange_signatures = _number_values(
            [_exchange_signature(item) for item in exchanges]
        )
        self._host_us = {
            way: np.array([getattr(item, f"{way}_host_us") for item in exchanges])
            for way in ("forward", "backward")
        }
        self._families: dict[tuple[bytes, ...], _Family] = {}

    def time(self, name: str, keys: PassKeys, kinds: Iterable[ChunkKind]) -> PassColumns:
        """Return the times of a pass for all kinds: `forward`, `both`, `input` or `weight`."""
        first, group = number_rows([keys.shape, keys.micro_batch, keys.recompute, keys.exchange])
        signatures = [self._signatures[keys.shape[first]], keys.recompute[first]]
        _, family = number_rows([*signatures, self._exchange_signatures[keys.exchange[first]]])
        # Groups are numbered so that what is run together stands together.
        order = np.argsort(family, kind="stable")
        bounds = np.flatnonzero(np.diff(family[order], prepend=-1, append=-1))
        rows = first[order]
        distinct = {kind.pass_key: kind for kind in kinds}
        stacked = np.zeros((NUM_FIELDS, self._book.num_variants, len(distinct), len(rows)))
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            own = rows[start:stop]
            members = keys.shape[own], keys.micro_batch[own], keys.exchange[own]
            key = tuple(column.tobytes() for column in members)
            if key not in self._families:
                self._families[key] = _Family(self, *members)
            found, mode = self._families[key], int(keys.recompute[own[0]])
            kinds_here = list(distinct.values())
            for places, time in found.time(name, mode, kinds_here):
                columns = time.total_us, time.all_exposed_us, time.hidden_us
                for field, column in enumerate((*columns, time.left_us, time.compute_us)):
                    stacked[field][:, places, start:stop] = column
            if self.trainer.gradient_dtype is None and name in ("both", "weight"):
                stacked[SUMS][:, :, start:stop] = found.sums_us(kinds_here)
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        times = {key: stacked[:, :, at] for at, key in enumerate(distinct)}
        return PassColumns(times=times, group=number[group])

    @cached_property
    def host_us(self) -> Floats:
        """What a µs of the host takes: (variant)."""
        return self._book.price_host()

    def work_of(self, shape: int) -> "_ShapeWork":
        """Return what a shape runs."""
        return self._work[shape]

    def exchange_of(self, number: int) -> StateExchange:
        """Return what states exchange in layers."""
        return self._exchanges[number]

    def counts_layers(self, mode: int) -> bool:
        """Tell whether a mode recomputes some layers of a chunk and not the others."""
        return self._modes[mode].recompute_layers > 0

    def plan(self, number: int, mode: int, kind: ChunkKind | None = None) -> RecomputePlan:
        """Return what a shape recomputes, of one kind of chunk where the mode counts layers."""
        scenario, shape = self._modes[mode], self._work[number].shape
        if scenario.recompute == "none":
            return _NO_PLAN
        key = int(self._signatures[number]), mode, None if kind is None else kind.pass_key
        if key not in self._plans:
            rank = shape.rank
            if kind is not None:
                before, held = kind.layers.start, len(kind.layers)
                layers = (before, held, rank.model.num_layers - before - held)
                rank = dataclasses.replace(rank, layers_by_stage=layers, stage=1)
            own = dataclasses.replace(
                shape.scenario,
                recompute=scenario.recompute,
                recompute_layers=scenario.recompute_layers,
                recompute_modules=scenario.recompute_modules,
                partitions_activations=scenario.partitions_activations,
            )
            self._plans[key] = plan_recompute(shape.forward_of(0), own, rank)
        return self._plans[key]

    def price_nodes(self, shape: Ints, micro_batch: Ints) -> Floats:
        """Return the prices of the operators of alike shapes: (variant, operator, member)."""
        distinct, of_member = np.unique(shape, return_inverse=True)
        numbers = [self._numbers[at] for at in distinct]
        most = max(table.shape[1] for table in numbers)
        tables = [np.pad(table, ((0, 0), (0, most - table.shape[1]))) for table in numbers]
        return self._book.prices_us[:, np.stack(tables)[of_member, :, micro_batch].T]

    def price_exchange(self, exchange: Ints) -> Floats:
        """Return the prices of what states exchange: (variant, operator, member)."""
        numbers = np.array([self._exchange_numbers[at] for at in exchange], dtype=np.int64)
        return self._book.prices_us[:, numbers.T]

    def gap_us(self, name: str, exchange: Ints) -> Floats:
        """Return what the host leaves in each layer of a pass of members: (variant, member)."""
        gap_us = np.zeros((self._book.num_variants, len(exchange)))
        if name == "weight":
            return gap_us
        direction = "forward" if name == "forward" else "backward"
        gap_us += self._host_us[direction][exchange] + getattr(self.trainer, f"{direction}_gap_us")
        calibration = self._scenario.calibration
        if calibration is not None:
            gap_us += getattr(calibration, f"{direction}_gap_us")
        return gap_us


class _Family:
    """Passes whose operators are alike, those of the first member standing for all."""

    def __init__(self, timer: PassTimer, shape: Ints, micro_batch: Ints, exchange: Ints) -> None:
        """Keep what operators take, by their identity: (variant, 1, member)."""
        self._timer = timer
        self._first = int(shape[0])
        self._exchange = exchange
        self._work = timer.work_of(self._first)
        self._states = timer.exchange_of(int(exchange[0]))
        self._times: dict[int, Floats] = {}
        self._calls: dict[int, Floats] = {}
        self._keep(self._work.nodes, timer.price_nodes(shape, micro_batch))
        if timer.trainer.expert_call_us:
            self._count_calls([timer.work_of(number) for number in shape.tolist()])
        self._keep(_exchanged_nodes(self._states), timer.price_exchange(exchange))

    def time(
        self, name: str, mode: int, kinds: Sequence[ChunkKind]
    ) -> Iterator[tuple[list[int], PassTime]]:
        """Yield the times of a pass of kinds of chunks, with the places of these."""
        is_forward = name == "forward"
        trainer, host_us = self._timer.trainer, self._timer.host_us[:, None, None]
        rules = StreamRules(
            gap_us=self._timer.gap_us(name, self._exchange)[:, None],
            launch_us=host_us * trainer.launch_us,
            module_call_us=host_us * trainer.module_call_us,
            expert_call_us=host_us * trainer.expert_call_us,
            expert_hook_us=host_us * trainer.expert_hook_us,
            waits_for_counts=trainer.waits_for_counts,
            count_calls=lambda node: self._calls.get(id(node), 0),
        )

        def cutter(kind: ChunkKind | None) -> PassCutter:
            work = self._operators(mode, kind)
            nodes = work.forward_pass if is_forward else work.backward_pass(name)
            return PassCutter(nodes.nodes, self._duration, rules)

        def cut(kind: ChunkKind, whole: PassCutter) -> PassParts:
            layers = kind.layers if is_forward else kind.layers[::-1]
            return whole.cut(layers, lambda node: kind.has_outside(node, is_forward=is_forward))

        if not is_forward and self._timer.counts_layers(mode):
            parts = [cut(kind, cutter(kind)) for kind in kinds]
        else:
            whole = cutter(None)
            parts = [cut(kind, whole) for kind in kinds]
        return time_passes(parts, self._timer.trainer.overlap_slowdown_ratio)

    def sums_us(self, kinds: Sequence[ChunkKind]) -> Floats:
        """Return what first backward passes of kinds do without: additions to earlier gradients."""
        total_us: Floats = np.zeros((1, len(kinds), 1))
        for node in self._work.shape.backward:
            if node.operator == _FIRST_SUM:
                counts = np.array([[kind.count(node)] for kind in kinds])
                total_us = total_us + self._duration(node) * counts
        return total_us

    def _operators(self, mode: int, kind: ChunkKind | None) -> ChunkOperators:
        """Return what a rank with the whole model runs, and gathers from other stages."""
        shape, gathers = self._work.shape, self._work.boundary
        plan = self._timer.plan(self._first, mode, kind)
        if plan.recomputed and id(plan.recomputed[0]) not in self._times:
            inputs = [node for node in plan.recomputed if node.role.startswith(LAYER_INPUT)]
            kernels = plan.recomputed[len(inputs) :]
            alike = (*self._work.inputs[: len(inputs)], *_find_alike(kernels, shape.forward))
            for node, other in zip(plan.recomputed, alike, strict=True):
                self._times[id(node)] = self._times[id(other)]
                if id(other) in self._calls:
                    self._calls[id(node)] = self._calls[id(other)]
        return ChunkOperators(
            rank=shape.rank,
            forward=shape.forward,
            backward=shape.backward,
            plan=plan,
            states=self._states,
            sends=(),
            sends_back=(),
            receives_input=gathers,
            receives_gradient=gathers,
        )

    def _count_calls(self, members: Sequence["_ShapeWork"]) -> None:
        """Keep how many calls operators have that run expert by expert: (member)."""
        alike = zip(*(work.nodes for work in members), strict=True)
        for node, nodes in zip(self._work.nodes, alike, strict=True):
            if count_expert_calls(node):
                self._calls[id(node)] = np.array([float(count_expert_calls(n)) for n in nodes])

    def _keep(self, nodes: Sequence[OperatorNode], prices_us: Floats) -> None:
        self._times |= {id(node): prices_us[:, None, row] for row, node in enumerate(nodes)}

    def _duration(self, node: OperatorNode) -> Floats:
        time_us = self._times[id(node)]
        return time_us if node.share == 1 else time_us * node.share


@dataclass(frozen=True, slots=True, eq=False)
class _ShapeWork:
    """What a shape runs: its passes, what gathers that which arrives from another stage.

    `inputs` gather the saved inputs of layers again where they are split over tp.
    """

    shape: Shape
    boundary: Nodes
    inputs: Nodes
    signature: tuple[object, ...]

    @classmethod
    def of_shape(cls, shape: Shape, scenario: TrainingScenario) -> "_ShapeWork":
        transfers = shape.transfers_over(near_pair(shape.rank))
        boundary = tuple(node for node in transfers if node.operator != "send_recv")
        # Ranks of tp each have all that layers hand on, and so may keep a part of it.
        is_whole = shape.rank.layout.tp > 1 and not splits_tokens(shape.rank, shape.scenario)
        inputs = (_input_gather(shape),) if scenario.partitions_activations and is_whole else ()
        signature = _signature((*shape.forward, *shape.backward)), is_whole, bool(boundary)
        return cls(shape, boundary, inputs, signature)

    @property
    def nodes(self) -> Nodes:
        """All operators, each once."""
        return (*self.shape.forward, *self.shape.backward, *self.boundary, *self.inputs)


def _input_gather(shape: Shape) -> OperatorNode:
    stream = shape.stream
    num_bytes = stream.written_dtype.bytes_of(stream.dims["num_tokens"] * stream.dims["hidden"])
    group = PlacedGroup.of_rank(axis_group(shape.rank.layout, "tp"), shape.rank)
    return group.collective(stream, f"{LAYER_INPUT}_all_gather", "all_gather", num_bytes)


def _exchanged_nodes(exchange: StateExchange) -> Nodes:
    """Return the operators of an exchange in layers, each once."""
    nodes = (*exchange.forward, *exchange.backward_gather, *exchange.backward_reduction)
    return tuple({id(node): node for node in nodes}.values())


def _signature(nodes: Nodes) -> tuple[object, ...]:
    """Return what a pass is made of, whatever its operators take."""
    return tuple(
        (
            *(node.role, node.operator, node.group, node.axis, node.section, node.share),
            *(node.overlap, node.overlaps_with),
            *(node.repeat, node.first_layer, node.layer_stride, node.places),
        )
        for node in nodes
    )


def _exchange_signature(exchange: StateExchange) -> tuple[object, ...]:
    ways = exchange.forward, exchange.backward_gather, exchange.backward_reduction
    return tuple(map(_signature, ways))


def _number_values(values: Sequence[tuple[object, ...]]) -> Ints:
    """Return numbers that are equal where values are."""
    known: dict[tuple[object, ...], int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)


def _find_alike(nodes: Sequence[OperatorNode], among: Sequence[OperatorNode]) -> Nodes:
    """Return the same operators among others, in whose order they are, by their roles."""
    rest = iter(among)
    return tuple(
        next(item for item in rest if (item.role, item.operator) == (node.role, node.operator))
        for node in nodes
    )
