"""Series by what they have in common, made when first looked at."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import TypeAlias

from foretoken.domain.operators.spec.variant import parse_variant
from foretoken.predictor.known_names import KnownNames
from foretoken.predictor.series import SeriesHead, SeriesKey

# What a variant may say of how an operator was sampled, which says little of its time: whether an
# attention mask, a bias, an optimizer's first step. Where the plain case is missing they stand in.
_SAMPLING_FACTS = frozenset({"mask", "bias", "step"})
_UNKNOWN = "unknown"

# An operator, and the device it was measured on.
Subject: TypeAlias = tuple[str, str]


class HeadIndex:
    """The heads of a set of models in all the ways in which questions look them up."""

    def __init__(self, heads: Sequence[SeriesHead]) -> None:
        """Keep them as they are."""
        self._heads = heads

    @cached_property
    def known(self) -> KnownNames:
        """Software, kernels and variants by name."""
        return KnownNames.of(self._heads)

    @cached_property
    def by_circumstances(self) -> Mapping[SeriesKey, Sequence[SeriesHead]]:
        """Those that have all but framework and kernel in common."""
        found: dict[SeriesKey, list[SeriesHead]] = {}
        for head in self._heads:
            found.setdefault(head.key.circumstances, []).append(head)
        return found

    @cached_property
    def alike_variants(self) -> Mapping[tuple[str, frozenset[tuple[str, str]]], Sequence[str]]:
        """An operator's variants by what they say of all but routing."""
        alike: dict[tuple[str, frozenset[tuple[str, str]]], list[str]] = {}
        for operator, variant in self._variants:
            alike.setdefault((operator, without_routing(variant)), []).append(variant)
        return alike

    @cached_property
    def sampled_variants(self) -> Mapping[str, Sequence[str]]:
        """An operator's variants that say no more than how it was sampled."""
        sampled: dict[str, list[str]] = {}
        for operator, variant in self._variants:
            if _is_sampling_alone(variant):
                sampled.setdefault(operator, []).append(variant)
        return sampled

    @cached_property
    def frameworks(self) -> Mapping[Subject, AbstractSet[str]]:
        """Under which software an operator was measured on a device."""
        found: dict[Subject, set[str]] = {}
        for head in self._heads:
            found.setdefault((head.key.operator, head.key.device), set()).add(head.key.framework)
        return found

    @cached_property
    def _variants(self) -> Sequence[tuple[str, str]]:
        return sorted({(head.key.operator, head.key.variant) for head in self._heads})


def without_routing(variant: str) -> frozenset[tuple[str, str]]:
    """Return a variant's facts but how tokens are spread over experts."""
    return frozenset(fact for fact in parse_variant(variant).items() if fact[0] != "routing")


def _is_sampling_alone(variant: str) -> bool:
    """Tell whether a variant says no more than how its operator was sampled."""
    facts = parse_variant(variant)
    return bool(facts) and facts.keys() <= _SAMPLING_FACTS and _UNKNOWN not in facts.values()
