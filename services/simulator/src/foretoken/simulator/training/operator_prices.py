"""Ask the predictor once for all operators of a step."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.measurements.estimate import DType, LatencyColumns, Phase, Provenance
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.software_note import list_software_notes
from foretoken.simulator.steps.call_prices import CallBook, PricedTable
from foretoken.simulator.steps.error_parts import NUM_CASES, price_cases
from foretoken.simulator.steps.stage_hardware import StageHardware
from foretoken.simulator.training.module_profile import MeasuredPrices

# The calls of one table of a query: operator, number format, pass, variant, names of dimensions.
_TableKey = tuple[str, DType, Phase, str, tuple[str, ...]]
_Key = tuple[_TableKey, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """What one call of an operator costs, in µs, and what the figure rests on.

    `cases_us` are the prices of `price_cases`.
    """

    cases_us: Floats
    provenance: Provenance

    @property
    def latency_us(self) -> float:
        """The estimate."""
        return float(self.cases_us[0])

    @classmethod
    def certain(cls, time_us: float) -> "Price":
        """Return what a call costs whose time was measured with its module."""
        return cls(np.full(NUM_CASES, time_us), Provenance.MEASURED)

    def of_share(self, share: float) -> "Price":
        """Return what a part of the call costs."""
        return Price(self.cases_us * share, self.provenance)


@dataclass(frozen=True, slots=True)
class OperatorPrices:
    """Prices of all operators of a step, and the model version that gave them.

    Where the stages of a pipeline have hardware of their own, so have they prices: `stages`.
    """

    model_version: str
    by_call: Mapping[_Key, Price]
    measured: MeasuredPrices | None = None
    notes: tuple[str, ...] = ()
    stages: "tuple[OperatorPrices, ...]" = ()

    def of_stage(self, stage: int) -> "OperatorPrices":
        """Return the prices on the hardware of a rank of the pipeline."""
        return self.stages[stage] if self.stages else self

    def find(self, node: OperatorNode) -> Price:
        """Return the price of one repetition of a node: measured with its module, or predicted."""
        time_us = None if self.measured is None else self.measured.find(node)
        if time_us is not None:
            return Price.certain(time_us)
        price = self.by_call[_key(node)]
        return price if node.share == 1 else price.of_share(node.share)

    @property
    def covers_layers(self) -> bool:
        """Whether whole layers were measured, gaps of the host included."""
        return self.measured is not None and self.measured.covers_layers

    def list_notes(self, nodes: Iterable[OperatorNode]) -> tuple[str, ...]:
        """Return what a reader must know of the prices of these nodes."""
        of_modules = () if self.measured is None else self.measured.notes
        unmeasured = {
            _key(node) for node in nodes if self.find(node).provenance is Provenance.ANALYTICAL
        }
        if not unmeasured:
            return (*of_modules, *self.notes)
        calls = Counter(table[0] for table, _ in unmeasured)
        names = ", ".join(f"{name} ({count})" for name, count in sorted(calls.items()))
        note = f"no measurement, priced by the data sheet (distinct calls): {names}"
        return (*of_modules, *self.notes, note)


def fetch_prices(
    nodes: Iterable[OperatorNode], scenario: TrainingScenario, predictor: LatencySource
) -> OperatorPrices:
    """Return the prices of all nodes, in one call with every distinct operator call once."""
    answers: list[tuple[str, LatencyColumns]] = []

    def read(priced: PricedTable) -> Sequence[Floats]:
        answers.append((priced.table.operator, priced.answer))
        provenance = np.asarray(priced.answer.provenance, dtype=np.float64)
        return (provenance, *price_cases(priced))

    book = CallBook(read)
    numbers: dict[_Key, int] = {}
    for node in nodes:
        key = _key(node)
        if key not in numbers:
            numbers[key] = int(book.add(node, 1)[0])
    book.fetch(scenario, predictor)
    by_call = {
        key: Price(column[1:], Provenance(int(column[0])))
        for key, column in zip(numbers, book.prices_us.T[list(numbers.values())], strict=True)
    }
    notes = list_software_notes(answers, scenario.framework or scenario.trainer.resolve().software)
    return OperatorPrices(book.model_version, by_call, notes=notes)


def fetch_stage_prices(
    nodes: Sequence[Iterable[OperatorNode]], scenario: TrainingScenario, predictor: LatencySource
) -> OperatorPrices:
    """Return the prices of the nodes of every rank of the pipeline, in one call per hardware."""
    hardware = StageHardware.of_scenario(scenario)
    if not hardware.is_given:
        return fetch_prices((node for own in nodes for node in own), scenario, predictor)
    stages: dict[tuple[str, str], list[int]] = {}
    for stage in range(len(nodes)):
        stages.setdefault(hardware.key(stage), []).append(stage)
    found: dict[int, OperatorPrices] = {}
    for (device, topology), alike in stages.items():
        asked = replace(scenario, device=device, topology=topology)
        prices = fetch_prices((node for stage in alike for node in nodes[stage]), asked, predictor)
        found.update(dict.fromkeys(alike, prices))
    versions = dict.fromkeys(prices.model_version for prices in found.values())
    return OperatorPrices(
        ", ".join(versions), {}, stages=tuple(found[stage] for stage in range(len(nodes)))
    )


def _key(node: OperatorNode) -> _Key:
    names = tuple(sorted(node.dims))
    table = (node.operator, node.dtype, node.phase, node.variant, names)
    return table, tuple(_dim(node, name) for name in names)


def _dim(node: OperatorNode, name: str) -> int:
    # Groups that share a network port each have that share of it, as if each sent all.
    shared = node.num_sharing if name == "message_bytes" else 1
    return int(node.dims[name]) * shared
