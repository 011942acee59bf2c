"""Which software, kernels and variants were measured, and refusals of all others."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

from foretoken.domain.errors import UnknownMeasurementError
from foretoken.domain.measurements.estimate import LatencyQuery, OperatorTable
from foretoken.domain.operators.spec.expert_exchange import LOW_LATENCY, ExchangePart
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import parse_variant, stored_dtype
from foretoken.predictor.series import SeriesHead
from foretoken.predictor.software import matches

_Names = Mapping[str, AbstractSet[str]]

# What a variant may say of any operator without a row that says it: how tokens are spread over
# experts, which formats weights, caches and products of attention have, and what lowering, profiler
# and substitutes name.
_STORED, _ROUTING = frozenset({"quant", "kv", "attn"}), "routing"
_SAID: _Names = MappingProxyType(
    {
        "form": {"eager"},
        "gradients": {"zero"},
        "cache": {"warm"},
        "mask": {"none"},
        "bias": {"true"},
        "step": {"first", "unknown"},
        "sampling": {"greedy", "top_k", "top_p", "top_k_top_p"},
        "exchange": {LOW_LATENCY},
        "part": set(ExchangePart),
    }
)


@dataclass(frozen=True, slots=True)
class KnownNames:
    """Software by group of operators, kernels and variants by operator."""

    frameworks: _Names = field(default_factory=dict)
    kernels: _Names = field(default_factory=dict)
    variants: _Names = field(default_factory=dict)

    @classmethod
    def of(cls, heads: Iterable[SeriesHead]) -> Self:
        """Return the names in the rows of series."""
        known: tuple[dict[str, set[str]], ...] = tuple(defaultdict(set) for _ in range(3))
        frameworks, kernels, variants = known
        for head in heads:
            key = head.key
            frameworks[key.spec.group].update({key.framework} - {""})
            kernels[key.operator].update(head.kernels)
            variants[key.operator].update({key.variant} - {""})
        return cls(*(dict(names) for names in known))

    def check(self, query: LatencyQuery) -> None:
        """Refuse a framework, kernel or variant of which there is no row.

        Where nothing at all was measured the roofline answers, whatever is asked for.

        Raises:
            UnknownMeasurementError: it names the nearest there are.
            UnknownOperatorError: no file of that name.

        """
        if not self.frameworks:
            return
        if query.framework and query.tables:
            self._check_framework(query)
        for table in query.tables:
            if not table.tentative:
                self._check_table(table)

    def _check_framework(self, query: LatencyQuery) -> None:
        """Refuse software that measured nothing of the kinds of operators that are asked about."""
        specs = [find_operator(table.operator) for table in query.tables]
        found = {name for spec in specs for name in self.frameworks.get(spec.group, ())}
        known = {name for names in self.frameworks.values() for name in names}
        # A stack that measured no collective may call a library that did.
        asked = known if any(spec.is_collective for spec in specs) else found or known
        if not any(matches(name, query.framework) for name in asked):
            raise UnknownMeasurementError.named(
                query.framework, found or known, "framework", "software"
            )

    def _check_table(self, table: OperatorTable) -> None:
        operator = find_operator(table.operator).name
        kernels = self.kernels.get(operator, frozenset())
        if table.kernel and table.kernel not in kernels:
            kind = f"kernel of {operator}"
            raise UnknownMeasurementError.named(table.kernel, kernels, "kernel", kind)
        variants = self.variants.get(operator, frozenset())
        facts = {fact for variant in variants for fact in parse_variant(variant).items()}
        if table.variant and not all(
            fact in facts or _can_be(*fact) for fact in parse_variant(table.variant).items()
        ):
            kind = f"variant of {operator}"
            raise UnknownMeasurementError.named(table.variant, variants, "variant", kind)


def _can_be(key: str, value: str) -> bool:
    """Tell whether there is such a fact, though no row has it."""
    if key in _STORED:
        return stored_dtype(value) is not None
    if key == _ROUTING:
        # All of lowering, which estimates of single operators do not need.
        from foretoken.domain.lowering.expert_layer import is_routing

        return is_routing(value)
    return value in _SAID.get(key, ())
