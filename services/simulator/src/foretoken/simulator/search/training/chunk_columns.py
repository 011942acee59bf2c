"""Times of the passes of chunks, in columns: one run of the streams for very many strategies.

Passes whose operators are the same but for what each takes are run together, as columns. Such a
family is told by the operators of its shapes, by what is recomputed, and by what states exchange in
its layers; its members are the micro batch sizes, the shapes, and the ranks states are split over.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.communication import PlacedGroup
from foretoken.domain.graph import OperatorNode, Section
from foretoken.domain.lowering import Nodes
from foretoken.domain.placement import axis_group
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.sequence_parallel import splits_tokens
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.training.call_prices import NUM_VARIANTS, CallBook
from foretoken.simulator.search.training.chunk_kinds import ChunkKind
from foretoken.simulator.search.training.program_outline import (
    join_passes,
    outline_passes,
    shorten_passes,
)
from foretoken.simulator.search.training.shapes import Shape, number_rows
from foretoken.simulator.training.layer_program import (
    PassNodes,
    Program,
    StreamRules,
    alike_layers,
    cut_program,
    split_layers,
)
from foretoken.simulator.training.pass_timing import PassParts, PassTime, time_all_parts
from foretoken.simulator.training.recompute import LAYER_INPUT, RecomputePlan, plan_recompute
from foretoken.simulator.training.stage_operators import ChunkOperators
from foretoken.simulator.training.state_sharding import StateExchange

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

    `shape`, `micro_batch` (of the shape's sizes), `recompute` (of `Recomputing`) and `exchange`
    are numbers, `cut` that of how the model is cut to chunks.
    """

    shape: Ints
    micro_batch: Ints
    recompute: Ints
    exchange: Ints
    cut: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassColumns:
    """Times of one pass, in µs: by what a chunk's pass depends on, (field, variant, group).

    Fields are TOTAL, what it waits for communication (EXPOSED), what nothing waited for (HIDDEN)
    and what of it is LEFT at its end, computation (COMPUTE), and the additions to earlier
    gradients (SUMS). `group` finds the group of a strategy.
    """

    times: Mapping[tuple[int, ...], Floats]
    group: Ints

    def of(self, kind: ChunkKind, rows: Ints) -> Floats:
        """Return the times of a kind of chunk for some strategies: (field, variant, strategy)."""
        found: Floats = self.times[kind.pass_key][:, :, self.group[rows]]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """The calls of a shape, one row per operator and one column per micro batch size."""

    forward: Ints
    backward: Ints
    input_gather: Ints
    boundary_gather: Ints


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
        self._shapes = shapes
        self._exchanges = exchanges
        self._book = book
        self._written = [
            _write(shape, book, gathers_inputs=scenario.partitions_activations) for shape in shapes
        ]
        self._signatures = _number([_shape_signature(shape) for shape in shapes])
        self._exchange_numbers = [
            [int(book.add(node, 1)[0]) for node in _exchanged(exchange)] for exchange in exchanges
        ]
        self._exchange_signatures = _number([_exchange_signature(item) for item in exchanges])

    def time(
        self,
        name: str,
        keys: PassKeys,
        kinds_of_cut: Sequence[Sequence[ChunkKind]],
    ) -> PassColumns:
        """Return the times of a pass for all kinds: `forward`, `both`, `input` or `weight`."""
        columns = [keys.shape, keys.micro_batch, keys.recompute, keys.exchange]
        first, group = number_rows(columns)
        shape, micro_batch, recompute, exchange = (column[first] for column in columns)
        signatures = self._signatures[shape], recompute, self._exchange_signatures[exchange]
        family_first, family = number_rows(list(signatures))
        kinds = {kind.pass_key: kind for cut in kinds_of_cut for kind in cut}
        times = {key: np.zeros((NUM_FIELDS, NUM_VARIANTS, len(first))) for key in kinds}
        has_sums = self.trainer.gradient_dtype is None and name in ("both", "weight")
        slowdown = self.trainer.overlap_slowdown_ratio
        alike: dict[Hashable, list[tuple[Ints, list[PassParts]]]] = {}
        order = np.argsort(family, kind="stable")
        bounds = np.searchsorted(family[order], np.arange(len(family_first) + 1))
        for number, start in enumerate(family_first):
            members = order[bounds[number] : bounds[number + 1]]
            member = _Family(
                timer=self,
                mode=int(recompute[start]),
                shape=shape[members],
                micro_batch=micro_batch[members],
                exchange=exchange[members],
            )
            parts = shorten_passes(member.cut(name, list(kinds.values())), slowdown)
            for key, kind in kinds.items() if has_sums else ():
                times[key][SUMS][:, members] = member.sums_us(kind)
            alike.setdefault(outline_passes(parts), []).append((members, parts))
        for families in alike.values():
            members = np.concatenate([members for members, _ in families])
            rules = StreamRules(
                gap_us=np.zeros((NUM_VARIANTS, len(members))),
                slowdown_ratio=slowdown,
            )
            found = time_all_parts(join_passes([parts for _, parts in families]), rules)
            for key, time in zip(kinds, found, strict=True):
                times[key][:SUMS, :, members] = _fields(time)
        return PassColumns(times=times, group=group)

    def operators_of(self, shape: int, exchange: int, mode: int) -> ChunkOperators:
        """Return what a rank with the whole model runs, and gathers from other stages."""
        lowered, states = self._shapes[shape], self._exchanges[exchange]
        gather = _boundary_gather(lowered)
        gathers = () if gather is None else (gather,)
        return ChunkOperators(
            rank=lowered.rank,
            forward=lowered.forward,
            backward=lowered.backward,
            plan=self.plan(shape, mode),
            states=states,
            sends=(),
            sends_back=(),
            receives_input=gathers,
            receives_gradient=gathers,
        )

    def plan(self, shape: int, mode: int, kind: ChunkKind | None = None) -> RecomputePlan:
        """Return what a shape recomputes, of one kind of chunk where the mode counts layers."""
        scenario, lowered = self._modes[mode], self._shapes[shape]
        if scenario.recompute == "none":
            return _NO_PLAN
        key = int(self._signatures[shape]), mode, None if kind is None else kind.pass_key
        if key not in self._plans:
            rank = lowered.rank
            if kind is not None:
                before, held = kind.layers.start, len(kind.layers)
                layers = (before, held, rank.model.num_layers - before - held)
                rank = dataclasses.replace(rank, layers_by_stage=layers, stage=1)
            own = dataclasses.replace(
                lowered.scenario,
                recompute=scenario.recompute,
                recompute_layers=scenario.recompute_layers,
                recompute_modules=scenario.recompute_modules,
                partitions_activations=scenario.partitions_activations,
            )
            self._plans[key] = plan_recompute(lowered.forward_of(0), own, rank)
        return self._plans[key]

    def counts_layers(self, mode: int) -> bool:
        """Tell whether a mode recomputes some layers of a chunk and not the others."""
        return self._modes[mode].recompute_layers > 0

    def calls_of(self, shape: Ints, micro_batch: Ints, exchange: Ints) -> "_FamilyCalls":
        """Return the prices of operators of a family: (variant, operator, member)."""
        distinct, of_member = np.unique(shape, return_inverse=True)
        most = max(self._written[number].forward.shape[1] for number in distinct)
        names = ("forward", "backward", "input_gather", "boundary_gather")
        found = []
        for name in names:
            calls = [getattr(self._written[number], name) for number in distinct]
            table = np.zeros((len(distinct), len(calls[0]), most), dtype=np.int64)
            for row, item in enumerate(calls):
                table[row, :, : item.shape[1]] = item
            found.append(self._book.prices_us[:, table[of_member, :, micro_batch].T])
        exchanged = np.array([self._exchange_numbers[number] for number in exchange]).T
        return _FamilyCalls(
            forward=found[0],
            backward=found[1],
            input_gather=found[2],
            boundary_gather=found[3],
            exchange=self._book.prices_us[:, exchanged.astype(np.int64)],
        )

    def gap_us(self, name: str, exchange: Ints) -> Floats:
        """Return what the host leaves in each layer of a pass of members: (variant, member)."""
        gap_us = np.zeros((NUM_VARIANTS, len(exchange)))
        if name == "weight":
            return gap_us
        direction = "forward" if name == "forward" else "backward"
        of_exchange = np.array([getattr(item, f"{direction}_host_us") for item in self._exchanges])
        gap_us += of_exchange[exchange] + getattr(self.trainer, f"{direction}_gap_us")
        calibration = self._scenario.calibration
        if calibration is not None:
            gap_us += getattr(calibration, f"{direction}_gap_us")
        return gap_us


@dataclass(frozen=True, slots=True, eq=False)
class _FamilyCalls:
    """The prices of the operators of a family, each (variant, operator, member)."""

    forward: Floats
    backward: Floats
    input_gather: Floats
    boundary_gather: Floats
    exchange: Floats


class _Family:
    """Passes whose operators are alike."""

    def __init__(
        self, timer: PassTimer, mode: int, shape: Ints, micro_batch: Ints, exchange: Ints
    ) -> None:
        self._timer = timer
        self._mode = mode
        self._first = int(shape[0])
        self._exchange = exchange
        self._operators = timer.operators_of(self._first, int(exchange[0]), mode)
        self._calls = timer.calls_of(shape, micro_batch, exchange)
        self._times: dict[int, Floats] = {}
        self._keep(self._operators.forward, self._calls.forward)
        self._keep(self._operators.backward, self._calls.backward)
        self._keep(self._operators.receives_input, self._calls.boundary_gather)
        self._keep(_exchanged(self._operators.states), self._calls.exchange)
        self._keep_plan(self._operators.plan)
        self._programs: dict[tuple[int, ...], Program] = {}

    def cut(self, name: str, kinds: Sequence[ChunkKind]) -> list[PassParts]:
        """Return the programs of a pass for each kind of chunk."""
        rules = StreamRules(
            gap_us=self._timer.gap_us(name, self._exchange),
            launch_us=self._timer.trainer.launch_us,
        )
        outside = rules.outside_of_layers
        counts_layers = name != "forward" and self._timer.counts_layers(self._mode)
        whole = _split(self._operators, name)
        found = []
        for kind in kinds:
            parts = whole
            if counts_layers:
                plan = self._timer.plan(self._first, self._mode, kind)
                self._keep_plan(plan)
                parts = _split(dataclasses.replace(self._operators, plan=plan), name)
            runs = parts.runs_of(kind, is_forward=name == "forward")
            is_forward = name == "forward"
            found.append(
                PassParts(
                    head=self._program(parts.outside(kind, "head", is_forward=is_forward), outside),
                    runs=tuple((self._program(nodes, rules), count) for nodes, count in runs),
                    tail=self._program(parts.outside(kind, "tail", is_forward=is_forward), outside),
                )
            )
        return found

    def sums_us(self, kind: ChunkKind) -> Floats:
        """Return what the first backward pass does without: additions to earlier gradients."""
        total_us = np.zeros((NUM_VARIANTS, len(self._exchange)))
        for node in self._operators.backward:
            if node.operator == _FIRST_SUM:
                total_us += self._times[id(node)] * kind.count(node)
        return total_us

    def _keep(self, nodes: Iterable[OperatorNode], prices_us: Floats) -> None:
        """Remember the times of nodes, by their identity."""
        for row, node in enumerate(nodes):
            own_us = prices_us[:, row]
            self._times[id(node)] = own_us if node.share == 1 else own_us * node.share

    def _keep_plan(self, plan: RecomputePlan) -> None:
        if not plan.recomputed or id(plan.recomputed[0]) in self._times:
            return
        gather = [node for node in plan.recomputed if node.role.startswith(LAYER_INPUT)]
        kernels = [node for node in plan.recomputed if not node.role.startswith(LAYER_INPUT)]
        self._keep(gather, self._calls.input_gather)
        self._keep(kernels, self._calls.forward[:, _places(kernels, self._operators.forward)])

    def _program(self, nodes: Nodes, rules: StreamRules) -> Program:
        key = tuple(map(id, nodes))
        if key not in self._programs:
            self._programs[key] = cut_program(nodes, lambda node: self._times[id(node)], rules)
        return self._programs[key]


@dataclass(frozen=True, slots=True)
class _Split:
    """A pass of the whole model: before its layers, in them, and after."""

    head: Nodes
    layers: Nodes
    tail: Nodes
    is_uniform: bool

    def outside(self, kind: ChunkKind, place: str, *, is_forward: bool) -> Nodes:
        """Return what a chunk runs before (`head`) or after its layers (`tail`)."""
        nodes = self.head if place == "head" else self.tail
        receives = kind.receives_input if is_forward else kind.receives_gradient
        return tuple(
            node
            for node in nodes
            if (receives if node.section is Section.BOUNDARY else kind.has(node))
        )

    def runs_of(self, kind: ChunkKind, *, is_forward: bool) -> list[tuple[Nodes, int]]:
        """Return the runs of alike layers of a chunk."""
        if self.is_uniform:
            return [(self.layers, len(kind.layers))]
        layers = kind.layers if is_forward else kind.layers[::-1]
        return alike_layers(PassNodes(nodes=self.layers, layers=layers))


def _split(operators: ChunkOperators, name: str) -> _Split:
    work = operators.forward_pass if name == "forward" else operators.backward_pass(name)
    head, tail = split_layers(work.nodes)
    layers = tuple(node for node in work.nodes if node.section is Section.LAYER and node.repeat)
    count = operators.rank.model.num_layers
    return _Split(head, layers, tail, all(node.repeat == count for node in layers))


def _fields(time: PassTime) -> Floats:
    exposed = sum(time.exposed_us.values(), np.zeros_like(time.total_us))
    return np.stack([time.total_us, exposed, time.hidden_us, time.left_us, time.compute_us])


def _places(nodes: Sequence[OperatorNode], among: Sequence[OperatorNode]) -> list[int]:
    """Return where operators stand among others, in whose order they are, by their roles."""
    places, at = [], 0
    for node in nodes:
        while among[at].role != node.role or among[at].operator != node.operator:
            at += 1
        places.append(at)
        at += 1
    return places


def _write(shape: Shape, book: CallBook, *, gathers_inputs: bool) -> _Written:
    length = len(shape.micro_batch_sizes)
    boundary = _boundary_gather(shape)
    return _Written(
        forward=_stack(shape.forward, book, length),
        backward=_stack(shape.backward, book, length),
        input_gather=_stack(_input_gather(shape) if gathers_inputs else (), book, length),
        boundary_gather=_stack(() if boundary is None else (boundary,), book, length),
    )


def _stack(nodes: Nodes, book: CallBook, length: int) -> Ints:
    numbers = [book.add(node, length) for node in nodes]
    return np.array(numbers, dtype=np.int64).reshape(len(numbers), length)


def _stream(shape: Shape) -> OperatorNode:
    """Return the operator that has what layers hand on: the norm at their beginning."""
    return next(node for node in shape.forward if node.role == "input_norm")


def _input_gather(shape: Shape) -> Nodes:
    """Return how the saved input of a layer is gathered again, where it is split over tp."""
    stream = _stream(shape)
    num_bytes = stream.written_dtype.bytes_of(stream.dims["num_tokens"] * stream.dims["hidden"])
    if shape.rank.layout.tp == 1 or splits_tokens(shape.rank, shape.scenario):
        return ()
    group = PlacedGroup.of_rank(axis_group(shape.rank.layout, "tp"), shape.rank)
    return (group.collective(stream, f"{LAYER_INPUT}_all_gather", "all_gather", num_bytes),)


def _boundary_gather(shape: Shape) -> OperatorNode | None:
    """Return how what arrives in parts from another stage is gathered over tp."""
    is_scattered = shape.trainer.scatters_stage_transfers and shape.rank.layout.tp > 1
    if not is_scattered or splits_tokens(shape.rank, shape.scenario):
        return None
    near = dataclasses.replace(
        _stream(shape), section=Section.BOUNDARY, repeat=1, first_layer=0, layer_stride=1
    )
    group = PlacedGroup.of_rank(axis_group(shape.rank.layout, "tp"), shape.rank)
    message_bytes = near.dtype.bytes_of(near.dims["num_tokens"] * shape.rank.model.hidden)
    return group.collective(near, "stage_receive_all_gather", "all_gather", message_bytes)


def _exchanged(exchange: StateExchange) -> Nodes:
    """Return the operators of an exchange in layers, each once."""
    found = {
        id(node): node
        for node in (*exchange.forward, *exchange.backward_gather, *exchange.backward_reduction)
    }
    return tuple(found.values())


def _signature(nodes: Nodes) -> tuple[object, ...]:
    """Return what a pass is made of, whatever its operators take."""
    return tuple(
        (
            *(node.role, node.operator, node.group, node.axis, node.section, node.share),
            *(node.overlap, node.overlaps_with),
            *(node.repeat, node.first_layer, node.layer_stride),
        )
        for node in nodes
    )


def _shape_signature(shape: Shape) -> tuple[object, ...]:
    gathers = len(_input_gather(shape)), _boundary_gather(shape) is not None
    return (*_signature((*shape.forward, *shape.backward)), gathers)


def _exchange_signature(exchange: StateExchange) -> tuple[object, ...]:
    return (
        _signature(exchange.forward),
        _signature(exchange.backward_gather),
        _signature(exchange.backward_reduction),
    )


def _number(values: Sequence[tuple[object, ...]]) -> Ints:
    """Return numbers that are equal where values are."""
    known: dict[tuple[object, ...], int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)
