"""Times of the passes of chunks, in columns: one run of the streams for very many strategies.

Passes whose operators are the same but for what each takes are run together, as columns. Such a
family is told by the operators of its shapes, by what is recomputed, and by what states exchange in
its layers; its members are the micro batch sizes, the shapes, and the ranks states are split over.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.training.chunk_calls import (
    exchange_signature,
    exchanged_nodes,
    number_values,
    shape_signature,
    write_calls,
)
from foretoken.simulator.search.training.chunk_kinds import ChunkKind, Ends
from foretoken.simulator.search.training.pass_sections import (
    PassSections,
    Places,
    distinct_heads,
    presence_outside,
    split_pass,
)
from foretoken.simulator.search.training.shapes import Shape
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.steps.pass_batches import (
    join_passes,
    outline_passes,
    shorten_passes,
)
from foretoken.simulator.steps.passes import (
    PassParts,
    PassTime,
    time_passes,
)
from foretoken.simulator.steps.program import (
    Program,
    StreamRules,
    cut_program,
)
from foretoken.simulator.steps.row_numbers import number_rows
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
        self._shapes = shapes
        self._exchanges = exchanges
        self._book = book
        self._written = [
            write_calls(shape, book, gathers_inputs=scenario.partitions_activations)
            for shape in shapes
        ]
        self._signatures = number_values([shape_signature(shape) for shape in shapes])
        self._exchange_numbers = [
            [int(book.add(node, 1)[0]) for node in exchanged_nodes(exchange)]
            for exchange in exchanges
        ]
        self._exchange_signatures = number_values([exchange_signature(item) for item in exchanges])
        self._host_us = {
            way: np.array([getattr(item, f"{way}_host_us") for item in exchanges])
            for way in ("forward", "backward")
        }

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
        num_variants = self._book.num_variants
        kinds = {kind.pass_key: kind for cut in kinds_of_cut for kind in cut}
        stacked = np.zeros((NUM_FIELDS, num_variants, len(kinds), len(first)))
        sums_us = np.zeros((num_variants, len(kinds), len(first)))
        has_sums = self.trainer.gradient_dtype is None and name in ("both", "weight")
        slowdown = self.trainer.overlap_slowdown_ratio
        alike: dict[tuple[Places, Hashable], list[tuple[Ints, list[PassParts]]]] = {}
        prices: dict[tuple[bytes, ...], _FamilyPrices] = {}
        order = np.argsort(family, kind="stable")
        bounds = np.searchsorted(family[order], np.arange(len(family_first) + 1))
        for index, row in enumerate(family_first):
            members = order[bounds[index] : bounds[index + 1]]
            own = shape[members], micro_batch[members], exchange[members]
            key = tuple(column.tobytes() for column in own)
            if key not in prices:
                prices[key] = _FamilyPrices(self, *own)
            member = _Family(prices[key], int(recompute[row]))
            places, parts = member.cut(name, list(kinds.values()))
            parts = shorten_passes(parts, slowdown)
            for at, kind in enumerate(kinds.values()) if has_sums else ():
                sums_us[:, at, members] = member.sums_us(kind)
            alike.setdefault((places, outline_passes(parts)), []).append((members, parts))
        # Groups are numbered anew, so that what is run together stands together.
        number, start = np.zeros(len(first), dtype=np.int64), 0
        for (places, _), families in alike.items():
            members = np.concatenate([members for members, _ in families])
            stop = start + len(members)
            number[members] = np.arange(start, stop)
            passes = join_passes([parts for _, parts in families])
            for place, time in zip(places, time_passes(passes, slowdown), strict=True):
                for field, column in enumerate(_fields(time)):
                    stacked[field][:, list(place), start:stop] = column
            start = stop
        if has_sums:
            stacked[SUMS][:, :, number] = sums_us
        times = {key: stacked[:, :, at] for at, key in enumerate(kinds)}
        return PassColumns(times=times, group=number[group])

    def operators_of(self, shape: int, exchange: int, mode: int) -> ChunkOperators:
        """Return what a rank with the whole model runs, and gathers from other stages."""
        lowered, states = self._shapes[shape], self._exchanges[exchange]
        gathers = self._written[shape].boundary
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
        gap_us = np.zeros((self._book.num_variants, len(exchange)))
        if name == "weight":
            return gap_us
        direction = "forward" if name == "forward" else "backward"
        gap_us += self._host_us[direction][exchange] + getattr(self.trainer, f"{direction}_gap_us")
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


class _FamilyPrices:
    """The times of the operators of passes that are alike, whatever these recompute."""

    def __init__(self, timer: PassTimer, shape: Ints, micro_batch: Ints, exchange: Ints) -> None:
        """Keep what members take; `first` is the shape of one, whose operators stand for all."""
        self.timer = timer
        self.first = int(shape[0])
        self.exchange = exchange
        self.calls = timer.calls_of(shape, micro_batch, exchange)
        self.times: dict[int, Floats] = {}
        # What was cut of programs before and after layers.
        self.outside: dict[Hashable, Program] = {}

    def keep(self, nodes: Iterable[OperatorNode], prices_us: Floats) -> None:
        """Remember the times of nodes, by their identity."""
        for row, node in enumerate(nodes):
            own_us = prices_us[:, row]
            self.times[id(node)] = own_us if node.share == 1 else own_us * node.share


class _Family:
    """Passes whose operators are alike."""

    def __init__(self, prices: _FamilyPrices, mode: int) -> None:
        self._prices = prices
        self._timer = prices.timer
        self._mode = mode
        self._first = prices.first
        self._exchange = prices.exchange
        self._operators = self._timer.operators_of(self._first, int(prices.exchange[0]), mode)
        self._calls = prices.calls
        self._times = prices.times
        if not self._times:
            prices.keep(self._operators.forward, self._calls.forward)
            prices.keep(self._operators.backward, self._calls.backward)
            prices.keep(self._operators.receives_input, self._calls.boundary_gather)
            prices.keep(exchanged_nodes(self._operators.states), self._calls.exchange)
        self._keep_plan(self._operators.plan)
        self._programs: dict[tuple[int, ...], Program] = {}

    def cut(self, name: str, kinds: Sequence[ChunkKind]) -> tuple[Places, list[PassParts]]:
        """Return the programs of a pass, and which kinds of chunks each is of.

        Where all layers are alike one is of many kinds; columns are (variant, kind, member).
        """
        rules = StreamRules(
            gap_us=self._timer.gap_us(name, self._exchange)[:, None],
            launch_us=self._timer.trainer.launch_us,
        )
        outside = rules.outside_of_layers
        is_forward = name == "forward"
        counts_layers = not is_forward and self._timer.counts_layers(self._mode)
        whole = split_pass(self._operators, name)
        if whole.is_uniform and not counts_layers:
            places = whole.places(kinds, is_forward=is_forward)
            chosen = [[kinds[at] for at in place] for place in places]
            return places, self._cut_stacked(whole, chosen, rules, is_forward=is_forward)
        found = []
        for kind in kinds:
            parts = whole
            if counts_layers:
                plan = self._timer.plan(self._first, self._mode, kind)
                self._keep_plan(plan)
                parts = split_pass(dataclasses.replace(self._operators, plan=plan), name)
            runs = parts.runs_of(kind, is_forward=is_forward)
            found.append(
                PassParts(
                    head=self._program(parts.outside(kind, "head", is_forward=is_forward), outside),
                    runs=tuple((self._program(nodes, rules), (count,)) for nodes, count in runs),
                    tail=self._program(parts.outside(kind, "tail", is_forward=is_forward), outside),
                )
            )
        return tuple((at,) for at in range(len(kinds))), found

    def _cut_stacked(
        self,
        whole: "PassSections",
        chosen: Sequence[Sequence[ChunkKind]],
        rules: StreamRules,
        *,
        is_forward: bool,
    ) -> list[PassParts]:
        """Return the programs of a pass for kinds that are run together: the layers are the same.

        What one of these kinds does not have before or after its layers takes no time there.
        """
        program = self._program(whole.layers, rules)
        found = []
        for kinds in chosen:
            first, heads = distinct_heads(kinds)
            counts = tuple(len(kind.layers) for kind in kinds)
            found.append(
                PassParts(
                    head=self._cut_outside(whole.head, first, rules, is_forward=is_forward),
                    runs=((program, counts),) if all(counts) else (),
                    tail=self._cut_outside(whole.tail, kinds, rules, is_forward=is_forward),
                    heads=heads,
                )
            )
        return found

    def _cut_outside(
        self, nodes: Nodes, kinds: Sequence[ChunkKind], rules: StreamRules, *, is_forward: bool
    ) -> Program:
        """Return what kinds run before or after layers, which is the same in all modes."""
        ends = tuple(kind.ends for kind in kinds)
        key = tuple(map(id, nodes)), ends, is_forward
        known = self._prices.outside
        if key not in known:
            none_us = 0 * rules.gap_us + np.zeros((len(kinds), 1))
            rules = dataclasses.replace(rules, gap_us=none_us)
            known[key] = self._cut_ends(nodes, ends, rules, is_forward=is_forward)
        return known[key]

    def _cut_ends(
        self, nodes: Nodes, ends: tuple[Ends, ...], rules: StreamRules, *, is_forward: bool
    ) -> Program:
        presence = {
            section: presence_outside(ends, section, is_forward=is_forward)
            for section in dict.fromkeys(node.section for node in nodes)
        }
        absent = {section for section, is_there in presence.items() if not is_there.any()}
        return cut_program(
            tuple(node for node in nodes if node.section not in absent),
            lambda node: self._times[id(node)][:, None] * presence[node.section],
            rules,
            lambda node: presence[node.section],
        )

    def sums_us(self, kind: ChunkKind) -> Floats:
        """Return what the first backward pass does without: additions to earlier gradients."""
        total_us = np.zeros((len(self._calls.forward), len(self._exchange)))
        for node in self._operators.backward:
            if node.operator == _FIRST_SUM:
                total_us += self._times[id(node)] * kind.count(node)
        return total_us

    def _keep_plan(self, plan: RecomputePlan) -> None:
        if not plan.recomputed or id(plan.recomputed[0]) in self._times:
            return
        gather = [node for node in plan.recomputed if node.role.startswith(LAYER_INPUT)]
        kernels = [node for node in plan.recomputed if not node.role.startswith(LAYER_INPUT)]
        self._prices.keep(gather, self._calls.input_gather)
        self._prices.keep(
            kernels, self._calls.forward[:, _places(kernels, self._operators.forward)]
        )

    def _program(self, nodes: Nodes, rules: StreamRules) -> Program:
        key = tuple(map(id, nodes))
        if key not in self._programs:
            self._programs[key] = cut_program(
                nodes, lambda node: self._times[id(node)][:, None], rules
            )
        return self._programs[key]


def _fields(time: PassTime) -> tuple[Floats, ...]:
    """Return the columns of TOTAL, EXPOSED, HIDDEN, LEFT and COMPUTE."""
    return time.total_us, time.all_exposed_us, time.hidden_us, time.left_us, time.compute_us


def _places(nodes: Sequence[OperatorNode], among: Sequence[OperatorNode]) -> list[int]:
    """Return where operators stand among others, in whose order they are, by their roles."""
    places, at = [], 0
    for node in nodes:
        while among[at].role != node.role or among[at].operator != node.operator:
            at += 1
        places.append(at)
        at += 1
    return places
