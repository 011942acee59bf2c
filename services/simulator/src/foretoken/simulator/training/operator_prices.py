"""Ask the predictor once for all operators of a step."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from foretoken.domain.estimate import (
    DType,
    LatencyQuery,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.graph import OperatorNode
from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.hardware.roofline import compute_terms
from foretoken.domain.operator import OperatorSpec, find_operator
from foretoken.domain.scenario import TrainingScenario
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.software_note import list_software_notes
from foretoken.simulator.training.module_profile import MeasuredPrices
from foretoken.simulator.training.stage_hardware import StageHardware

# The calls of one table of a query: operator, number format, pass, variant, names of dimensions.
_TableKey = tuple[str, DType, Phase, str, tuple[str, ...]]
_Key = tuple[_TableKey, tuple[int, ...]]


# Groups of operators that the tensor cores work for; the limit is none to others in them.
_MATRIX_GROUPS = ("gemm", "attention", "moe")


@dataclass(frozen=True, slots=True)
class Price:
    """What one call of an operator costs, in µs, and what the figure rests on."""

    latency_us: float
    low_us: float
    high_us: float
    provenance: Provenance

    def of_share(self, share: float) -> "Price":
        """Return what a part of the call costs."""
        low_us, high_us = self.low_us * share, self.high_us * share
        return Price(self.latency_us * share, low_us, high_us, self.provenance)


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
            return Price(time_us, time_us, time_us, Provenance.MEASURED)
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
    tables: dict[_TableKey, dict[_Key, None]] = {}
    for node in nodes:
        key = _key(node)
        tables.setdefault(key[0], {})[key] = None
    software = scenario.trainer.resolve().software
    query = LatencyQuery(
        device=scenario.device,
        topology=scenario.topology,
        framework=scenario.framework,
        preferred_framework=software,
        tables=tuple(_table(table, calls) for table, calls in tables.items()),
    )
    reply, device = predictor.predict(query), find_device(scenario.device)
    by_call: dict[_Key, Price] = {}
    for calls, columns in zip(tables.values(), reply.tables, strict=True):
        for row, key in enumerate(calls):
            price = Price(
                latency_us=float(columns.latency_us[row]),
                low_us=float(columns.low_us[row]),
                high_us=float(columns.high_us[row]),
                provenance=Provenance(int(columns.provenance[row])),
            )
            by_call[key] = _sustained(price, key, device)
    answers = zip((table[0] for table in tables), reply.tables, strict=True)
    notes = list_software_notes(answers, scenario.framework or software)
    return OperatorPrices(reply.model_version, by_call, notes=notes)


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


def is_for_tensor_cores(spec: OperatorSpec) -> bool:
    """Tell whether an operator is of those that the tensor cores work for."""
    return spec.group in _MATRIX_GROUPS


def _sustained(price: Price, key: _Key, device: DeviceSpec) -> Price:
    """Return what matrix products cost at the rate that a device keeps up through a step.

    They are timed alone, small ones and attention too briefly to reach the limit of power.
    """
    (operator, dtype, phase, _, names), values = key
    spec = find_operator(operator)
    if not (device.sustained_flops_ratio and is_for_tensor_cores(spec)):
        return price
    dims = dict(zip(names, values, strict=True))
    terms = compute_terms(spec, dims, dtype, phase, device)
    least_us = float(terms.compute_us) / device.sustained_flops_ratio
    latency_us = max(price.latency_us, least_us)
    return replace(price, latency_us=latency_us, high_us=max(price.high_us, latency_us))


def _table(key: _TableKey, calls: Iterable[_Key]) -> OperatorTable:
    operator, dtype, phase, variant, names = key
    rows = [values for _, values in calls]
    columns = {
        name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }
    return OperatorTable(
        operator=operator, dtype=dtype, phase=phase, variant=variant, columns=columns
    )


def _key(node: OperatorNode) -> _Key:
    names = tuple(sorted(node.dims))
    table = (node.operator, node.dtype, node.phase, node.variant, names)
    return table, tuple(_dim(node, name) for name in names)


def _dim(node: OperatorNode, name: str) -> int:
    # Groups that share a network port each have that share of it, as if each sent all.
    shared = node.num_sharing if name == "message_bytes" else 1
    return int(node.dims[name]) * shared
