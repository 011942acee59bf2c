"""The calls of a scenario or of many strategies, priced together.

Each distinct one is asked about once, in one query.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.steps.library_answers import answer_by_libraries
from foretoken.simulator.steps.row_numbers import number_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PricedTable:
    """The calls of a table on a device and its links, with the predictor's answer.

    `topology` is empty for the device's first; `device` is empty where they are the host's.
    """

    table: OperatorTable
    answer: LatencyColumns
    device: str
    topology: str

    @property
    def is_of_host(self) -> bool:
        """Whether the host takes this time, which no other GPU and no other link changes."""
        return not self.device

    @property
    def latency_us(self) -> Floats:
        """The estimates."""
        return np.asarray(self.answer.latency_us, dtype=np.float64)


# Within which factor of a trainer's profile what the host needs is. Source: as of its `launch_us`,
# the layer of `tests/benchmarks/host_time_of_layer.py`, for each operator 34 µs at the least and 50
# in the middle, which the profile has; taken to reach as far up, for processors differ.
_HOST_FACTOR = 50 / 34
HOST_GROUP = "host"


@cache
def price_host() -> PricedTable:
    """Return what a µs of the host is priced at, as if it were a call."""
    table = OperatorTable(
        operator="launch_gap", dtype=DType.BF16, columns={"num_kernels": np.array([1])}
    )
    answer = LatencyColumns(
        latency_us=np.array([1.0]),
        low_us=np.array([1 / _HOST_FACTOR]),
        high_us=np.array([_HOST_FACTOR]),
        provenance=np.array([Provenance.MEASURED.value]),
    )
    return PricedTable(table=table, answer=answer, device="", topology="")


# The places of the bounds in the prices of `estimate_and_bounds`, and of those that begin so.
BOUNDS = (1, 2)
# Gives the prices in µs that times are wanted for, each one of a table's calls.
Variants = Callable[[PricedTable], Sequence[Floats]]
_TableKey = tuple[str, DType, Phase, str, tuple[str, ...]]


@dataclass(slots=True, eq=False)
class _Calls:
    """The calls of one table: by dimension, blocks of values; and where their numbers begin."""

    blocks: list[Sequence[Ints]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


class CallBook:
    """Hands out a number for every call, and knows what each costs once all were asked for.

    The number 0 is of no call, which costs nothing.
    """

    def __init__(self, variants: Variants | None = None) -> None:
        """Begin with no call; `variants` are the estimate and its bounds where none are given."""
        self._variants = variants or estimate_and_bounds
        self._tables: dict[_TableKey, _Calls] = {}
        self._known: dict[tuple[object, ...], Ints] = {}
        self._num_calls = 1
        self.model_version = ""
        # In µs: (variant, number of a call).
        self.prices_us: Floats = np.zeros((0, 1))

    def add(self, node: OperatorNode, length: int) -> Ints:
        """Return the numbers of an operator's calls; its dimensions are integers or columns."""
        key = (
            *(node.operator, node.dtype, node.phase, node.variant, node.num_sharing, length),
            *(
                (name, getattr(value, "tobytes", value.__int__)())
                for name, value in node.dims.items()
            ),
        )
        if key not in self._known:
            self._known[key] = self.add_columns(node, node.dims, length)
        return self._known[key]

    def add_columns(self, like: OperatorNode, dims: Mapping[str, object], length: int) -> Ints:
        """Return the numbers of the calls of an operator with these dimensions."""
        names = tuple(sorted(dims))
        key = (like.operator, like.dtype, like.phase, like.variant, names)
        calls = self._tables.setdefault(key, _Calls())
        columns = [
            np.broadcast_to(np.asarray(dims[name], dtype=np.int64), length) for name in names
        ]
        if "message_bytes" in names and like.num_sharing != 1:
            # Groups that share a network port each have that share of it, as if each sent all.
            place = names.index("message_bytes")
            columns[place] = columns[place] * like.num_sharing
        numbers = np.arange(self._num_calls, self._num_calls + length)
        calls.blocks.append(columns)
        calls.starts.append(self._num_calls)
        self._num_calls += length
        return numbers

    def fetch(self, scenario: TrainingScenario, predictor: LatencySource) -> None:
        """Ask what all calls cost, in one query."""
        trainer = scenario.trainer.resolve()
        wanted = [_Distinct.of_calls(calls, len(key[4])) for key, calls in self._tables.items()]
        query = LatencyQuery(
            device=scenario.device,
            topology=scenario.topology,
            framework=scenario.framework,
            preferred_framework=trainer.software,
            sustained=trainer.slowed_by_power,
            power_limit_w=scenario.power_limit_w,
            tables=tuple(
                OperatorTable(
                    operator=operator,
                    dtype=dtype,
                    phase=phase,
                    variant=variant,
                    columns=dict(zip(names, distinct.columns, strict=True)),
                )
                for (operator, dtype, phase, variant, names), distinct in zip(
                    self._tables, wanted, strict=True
                )
            ),
        )
        reply = predictor.predict(query)
        self.model_version = reply.model_version
        answers = answer_by_libraries(query, reply.tables, trainer, predictor)
        prices_us: list[Floats] = []
        for table, distinct, answer in zip(query.tables, wanted, answers, strict=True):
            priced = PricedTable(
                table=table,
                answer=answer,
                device=query.device,
                topology=query.topology,
            )
            columns = self._variants(priced)
            prices_us = prices_us or [np.zeros(self._num_calls) for _ in columns]
            for prices, column in zip(prices_us, columns, strict=True):
                prices[distinct.numbers] = column[distinct.inverse]
        if prices_us:
            self.prices_us = np.stack(prices_us)

    def price_host(self) -> Floats:
        """Return what a µs of the host takes, in µs by variant."""
        return np.concatenate(list(self._variants(price_host())))

    @property
    def num_variants(self) -> int:
        """How many prices there are of each call, once they were fetched."""
        return len(self.prices_us)


def estimate_and_bounds(priced: PricedTable) -> tuple[Floats, Floats, Floats]:
    """Return the estimate, and the low and the high bound of the predictor's interval."""
    answer = priced.answer
    low_us, high_us = (np.asarray(end, dtype=np.float64) for end in (answer.low_us, answer.high_us))
    return priced.latency_us, low_us, high_us


def _column(value: Any, length: int) -> Ints:
    return value if np.ndim(value) else np.full(length, value, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Distinct:
    """The distinct calls of a table, and of every number handed out its place among them."""

    columns: tuple[Ints, ...]
    numbers: Ints
    inverse: Ints

    @classmethod
    def of_calls(cls, calls: _Calls, num_dims: int) -> "_Distinct":
        columns = [np.concatenate([block[i] for block in calls.blocks]) for i in range(num_dims)]
        lengths = [len(block[0]) for block in calls.blocks]
        steps = np.arange(sum(lengths)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        first, inverse = number_rows(columns)
        return cls(
            columns=tuple(column[first] for column in columns),
            numbers=np.repeat(calls.starts, lengths) + steps,
            inverse=inverse,
        )
