"""The points of a search: every combination of what may vary, as columns, piece by piece.

Where a space leaves an axis open these values are tried: tp powers of two up to the devices of a
node that divide the heads; pp divisors of the devices up to the layers; one chunk of layers per
rank, and by `interleaved` every number that cuts the layers evenly, also with the embedding, the
head or both counted as a layer; cp powers of two that leave a rank 2,048 tokens of a sequence; ep
powers of two that divide the experts; micro batches of 1, 2, 4 and 8 samples; all ZeRO stages,
overlaps and recompute modes; and weights split by tensor parallelism, without and with sequence
parallelism, as `msp`, `fsp`, and (without experts) as `isp` over powers of two up to a node. Of
these, and of what a space names, values that the framework has in no strategy are cut.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import (
    OVERLAPS,
    WEIGHT_PARALLELS,
    TrainingSearchRequest,
    TrainingSpace,
)
from foretoken.simulator.grid import Ints
from foretoken.simulator.rank import even_chunk_counts, links_of
from foretoken.simulator.search.training.trainer_bounds import find_possible, list_bounds
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.strategies import (
    RECOMPUTE_MODES,
    Strategies,
    StrategySource,
)
from foretoken.simulator.training.scenario_checks import check_scenario

# Points that are looked at, and strategies that are answered, together: some hundred MB of columns.
PIECE = 200_000
_MICRO_BATCHES = (1, 2, 4, 8)
_ZERO_STAGES = (0, 1, 2, 3)
# Tokens of a sequence that context parallelism should leave a rank.
_RANK_TOKENS = 2048
_PLAIN_SCHEDULE, _INTERLEAVED = "one_f_one_b", "interleaved"


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisBlock:
    """Axes that vary together: `rows` are their combinations, one value for each of `names`."""

    names: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def of_axis(cls, name: str, values: Iterable[int]) -> "AxisBlock":
        """Return an axis that varies by itself; what is named twice counts once."""
        return cls(names=(name,), rows=tuple((value,) for value in dict.fromkeys(values)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySpace:
    """The product of blocks of axes, the last one fastest.

    `whole` are the blocks with the values that the framework has in no strategy.
    """

    source: StrategySource
    blocks: tuple[AxisBlock, ...]
    whole: tuple[AxisBlock, ...]

    @property
    def num_points(self) -> int:
        """Points of the space, those included that cannot run."""
        return prod(len(block.rows) for block in self.blocks)

    @property
    def num_cut(self) -> int:
        """Points that have a value which the framework has in no strategy."""
        return prod(len(block.rows) for block in self.whole) - self.num_points

    def find_cut(self) -> Strategies:
        """Return one of the points that are cut; there must be one."""
        columns: dict[str, Ints] = {}
        is_cut = False
        for whole, block in zip(self.whole, self.blocks, strict=True):
            left_out = [row for row in whole.rows if row not in block.rows]
            chosen = (block.rows or left_out) if is_cut else (left_out or block.rows)
            is_cut = is_cut or bool(left_out)
            values = zip(block.names, chosen[0], strict=True)
            columns |= {name: np.array([value]) for name, value in values}
        return Strategies(source=self.source, **columns)

    def rows_of(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the combinations of the block that an axis is in."""
        return next(block.rows for block in self.blocks if name in block.names)

    def pieces(self, size: int = PIECE) -> Iterator[Strategies]:
        """Yield all points in order, `size` of them at a time."""
        for start in range(0, self.num_points, size):
            yield self.piece(start, min(start + size, self.num_points))

    def piece(self, start: int, stop: int) -> Strategies:
        """Return the points of a range of places."""
        shape = tuple(len(block.rows) for block in self.blocks)
        places = np.unravel_index(np.arange(start, stop), shape)
        columns: dict[str, Ints] = {}
        for block, place in zip(self.blocks, places, strict=True):
            table = np.array(block.rows, dtype=np.int64)
            for number, name in enumerate(block.names):
                columns[name] = table[:, number][place]
        return Strategies(source=self.source, **columns)


def resolve_space(request: TrainingSearchRequest) -> StrategySpace:
    """Return what a request varies, defaults filled in.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.

    """
    scenario, space = request.scenario, request.space
    devices = tuple(dict.fromkeys(space.devices or (scenario.device,)))
    num_devices = space.num_devices or (scenario.layout.num_devices,)
    batches = space.global_batch_sizes or (scenario.global_batch_size,)
    room = _node_room(scenario, devices, max(num_devices))
    schedules, pipelines = _pipelines(scenario, space, num_devices)
    modes = space.recompute or RECOMPUTE_MODES
    overlaps = space.overlaps or OVERLAPS
    blocks = (
        AxisBlock.of_axis("device", range(len(devices))),
        AxisBlock.of_axis("num_devices", num_devices),
        AxisBlock.of_axis("global_batch_size", batches),
        AxisBlock.of_axis("tp", space.tp or _tp_degrees(scenario, room)),
        AxisBlock(names=("pp", "pipeline_schedule", "virtual_stages"), rows=pipelines),
        AxisBlock.of_axis("cp", space.cp or _cp_degrees(scenario)),
        AxisBlock.of_axis("ep", space.ep or _ep_degrees(scenario)),
        AxisBlock.of_axis(
            "micro_batch_size",
            space.micro_batch_sizes or [size for size in _MICRO_BATCHES if size <= max(batches)],
        ),
        AxisBlock(
            names=("sequence_parallel", "weight_parallel", "weight_degree"),
            rows=_weight_splits(scenario, space, room),
        ),
        AxisBlock(
            names=("zero_stage", "shard_degree"),
            rows=tuple(
                (stage, scenario.shard_degree if stage else 0)
                for stage in dict.fromkeys(space.zero_stages or _ZERO_STAGES)
            ),
        ),
        AxisBlock.of_axis("overlap", [OVERLAPS.index(name) for name in overlaps]),
        AxisBlock.of_axis("recompute", [RECOMPUTE_MODES.index(name) for name in modes]),
    )
    varied = {name for block in blocks for name in block.names if len(block.rows) > 1}
    if len({row[::2] for row in pipelines}) == len(pipelines):
        # The number of chunks tells which schedule it is.
        varied -= {"pipeline_schedule"}
    source = StrategySource(
        scenario=scenario,
        devices=devices,
        pipeline_schedules=schedules,
        varied=frozenset(varied),
        bounds=list_bounds(request),
    )
    possible = tuple(_bound(source, block) for block in blocks)
    return StrategySpace(source=source, blocks=possible, whole=blocks)


def _bound(source: StrategySource, block: AxisBlock) -> AxisBlock:
    """Return a block with the values that the framework has."""
    possible = find_possible(source, block.names, block.rows)
    rows = tuple(row for row, is_had in zip(block.rows, possible, strict=True) if is_had)
    return replace(block, rows=rows)


def _node_room(scenario: TrainingScenario, devices: Sequence[str], num_devices: int) -> int:
    """Return the devices of the largest node."""
    if num_devices == 1:
        return 1
    return max(links_of(scenario, device).devices_per_node for device in devices)


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length())]


def _tp_degrees(scenario: TrainingScenario, room: int) -> list[int]:
    heads = stack_of(scenario.model).split_heads
    return [tp for tp in _powers_of_two(room) if all(num_heads % tp == 0 for num_heads in heads)]


def _pp_degrees(scenario: TrainingScenario, num_devices: Sequence[int]) -> list[int]:
    most = min(scenario.model.num_layers, max(num_devices))
    return [pp for pp in range(1, most + 1) if any(count % pp == 0 for count in num_devices)]


def _cp_degrees(scenario: TrainingScenario) -> list[int]:
    return _powers_of_two(scenario.sequence_length // _RANK_TOKENS)


def _ep_degrees(scenario: TrainingScenario) -> list[int]:
    counts = {part["num_experts"] for part in stack_of(scenario.model).experts}
    return [
        ep
        for ep in _powers_of_two(max(counts, default=1))
        if all(num_experts % ep == 0 for num_experts in counts)
    ]


def _pipelines(
    scenario: TrainingScenario, space: TrainingSpace, num_devices: Sequence[int]
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return the schedules; and degrees of the pipeline, each with a schedule and its chunks."""
    own = scenario.pipeline_schedule
    names = tuple(dict.fromkeys(space.pipeline_schedules or (own, _INTERLEAVED)))
    if not space.pipeline_schedules and find_schedule(own).virtual_stages > 1:
        names = (own,)
    rows = [
        (pp, code, count)
        for pp in dict.fromkeys(space.pp or _pp_degrees(scenario, num_devices))
        for code, name in enumerate(names)
        for count in dict.fromkeys(_chunk_counts(scenario, space, pp, name))
        # One interleaved chunk is what the plain schedule next to it does.
        if count > 1 or name == own or find_schedule(name).virtual_stages or len(names) == 1
    ]
    return names, tuple(rows)


def _chunk_counts(
    scenario: TrainingScenario, space: TrainingSpace, pp: int, schedule: str
) -> Sequence[int]:
    """Return the chunks of layers per rank that a schedule is tried with."""
    needed = find_schedule(schedule).virtual_stages
    given = space.virtual_stages
    if needed == 1 and not space.pipeline_schedules:
        return [count for count in given if count == 1] if given else [1]
    if needed:
        return given or [needed]
    return given or even_chunk_counts(scenario.model.num_layers, pp)


def _weight_splits(
    scenario: TrainingScenario, space: TrainingSpace, room: int
) -> tuple[tuple[int, ...], ...]:
    """Return combinations of sequence parallelism, weight parallelism and its degree."""
    is_open = not space.sequence_parallel
    forms = space.weight_parallel or (
        WEIGHT_PARALLELS[:-1] if stack_of(scenario.model).experts else WEIGHT_PARALLELS
    )
    rows: list[tuple[int, ...]] = []
    for form in forms:
        # Without a word on it, tokens are split as the form does it.
        splits = (False, True) if is_open and not form else space.sequence_parallel or (False,)
        own_degrees = space.weight_degrees or tuple(_powers_of_two(room))
        degrees = own_degrees if form == "isp" else (0,)
        code = WEIGHT_PARALLELS.index(form)
        rows += [(int(split), code, degree) for split, degree in product(splits, degrees)]
    return tuple(dict.fromkeys(rows))


def check_space(request: TrainingSearchRequest) -> None:
    """Check that a search can vary the scenario.

    Raises:
        InvalidRequestError: the scenario settles what is of one layout alone, or cannot be whatever
            the layout is.
        UnknownPluginError: no such trainer.

    """
    scenario = request.scenario
    InvalidRequestError.check(
        "scenario",
        {
            "stage_layers": (
                not scenario.stage_layers,
                "are of one pipeline: a search cuts layers evenly, leave them out",
            ),
            "stage_devices": (
                not scenario.stage_devices,
                "are of one pipeline: name the groups of nodes in space.node_groups",
            ),
            "module_times": (
                scenario.module_times is None,
                "are of one layout: simulate that, or leave them out to search",
            ),
        },
    )
    unknown = sorted(set(request.space.recompute) - set(RECOMPUTE_MODES))
    if unknown:
        problem = f"{', '.join(unknown)}: must be of {', '.join(RECOMPUTE_MODES)}"
        raise InvalidRequestError.of_field("space.recompute", problem)
    scenario.trainer.resolve()
    check_scenario(_plain(scenario))


def _plain(scenario: TrainingScenario) -> TrainingScenario:
    """Return the scenario with nothing spread and nothing saved: what all its strategies share."""
    return replace(
        scenario,
        layout=ParallelLayout(),
        micro_batch_size=1,
        global_batch_size=1,
        pipeline_schedule=_PLAIN_SCHEDULE,
        virtual_stages=1,
        recompute="none",
        recompute_layers=0,
        recompute_modules=(),
        partitions_activations=False,
        zero_stage=0,
        shard_degree=0,
        sequence_parallel=False,
        weight_parallel="",
        weight_degree=0,
    )
