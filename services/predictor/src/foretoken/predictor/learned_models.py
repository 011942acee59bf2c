"""A version's models, and those that are trained when a question needs what the version lacks."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import DType, LatencyQuery
from foretoken.domain.operators.spec.operator import OperatorSpec, find_operator
from foretoken.predictor.head_index import Subject
from foretoken.predictor.model_set import Choice, ModelSet, Wanted
from foretoken.predictor.roofline import Target
from foretoken.predictor.series import SeriesHead
from foretoken.predictor.transfer import TransferModel


def subjects_of(query: LatencyQuery) -> frozenset[Subject]:
    """Return what a query is about."""
    place = find_topology(query.topology).device if query.topology else query.device
    return frozenset((find_operator(table.operator).name, place) for table in query.tables)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedModels(ModelSet):
    """Models of a version, with `missing` subjects that were measured and are not in it.

    Of each it is known under which software. `learn` returns the models of one of them, each
    trained when it is first loaded. It is asked in the order in which answers are looked for: about
    another device of the same chip only where that may know more than the device itself. A subject
    teaches typical efficiencies of its operator alone.
    """

    missing: Mapping[Subject, AbstractSet[str]]
    learn: Callable[[Subject], ModelSet]

    @property
    def knows_nothing(self) -> bool:
        """Whether nothing at all was measured: never."""
        return False

    def heads_for(self, query: LatencyQuery) -> Sequence[SeriesHead]:
        """Return the series of the version, and those of the operators and device in a query."""
        subjects = sorted(subjects_of(query) & self.missing.keys())
        return (*self.heads, *(head for item in subjects for head in self.learn(item).heads))

    def frameworks_of(self, subject: Subject) -> AbstractSet[str]:
        """Return under which software an operator was measured on a device."""
        return self.missing.get(subject) or ModelSet.frameworks_of(self, subject)

    def rank(self, spec: OperatorSpec, target: Target, wanted: Wanted) -> Sequence[Choice]:
        """Return the models that may answer, the nearest to what is asked first."""
        subject = spec.name, target.place
        if subject not in self.missing:
            return ModelSet.rank(self, spec, target, wanted)
        learned = self.learn(subject).rank(spec, target, wanted)
        return [replace(choice, is_on_demand=True) for choice in learned]

    def has_transfer(self, spec: OperatorSpec, device: DeviceSpec, variant: str = "") -> bool:
        """Whether the version has a typical efficiency of an operator, or can learn one."""
        is_missing = (spec.name, device.name) in self.missing
        return is_missing or ModelSet.has_transfer(self, spec, device, variant)

    def transfer(
        self,
        spec: OperatorSpec,
        device: DeviceSpec,
        variant: str = "",
        dtype: DType | None = None,
    ) -> TransferModel:
        """Return the typical efficiency of an operator: the version's if it has one."""
        subject = spec.name, device.name
        if subject in self.missing and not ModelSet.has_transfer(self, spec, device, variant):
            return self.learn(subject).transfer(spec, device, variant, dtype)
        return ModelSet.transfer(self, spec, device, variant, dtype)
