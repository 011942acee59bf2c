"""All models of one version, and which of them answers a question."""

import threading
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.domain.operators.spec.variant import parse_variant
from foretoken.predictor.head_index import HeadIndex, Subject, without_routing
from foretoken.predictor.known_names import KnownNames
from foretoken.predictor.reach import Reach
from foretoken.predictor.roofline import Target
from foretoken.predictor.series import Series, SeriesHead, SeriesKey
from foretoken.predictor.software import (
    DEFAULT_SOFTWARE,
    Relation,
    matches,
    order_versions,
    parse_software,
)
from foretoken.predictor.trainer import SeriesModel
from foretoken.predictor.transfer import TransferModel, default_transfer, transfer_names
from foretoken.predictor.transfer.device_law import DeviceLaw
from foretoken.predictor.transfer.device_transfer import DeviceTransferRegressor
from foretoken.predictor.transfer.own_points import OwnCorrection

# Weights of 4 bits with a scale for 16, 32 or 128 of them that kernels widen to 16 bits.
_WIDENED_4_BIT = ("int4_wo", "w4a16_mxfp4", "nvfp4_wo")
# Formats that run the same kernels at the same rate where a device has both.
_TWINS = {DType.FP16: DType.BF16, DType.BF16: DType.FP16}


@dataclass(frozen=True, slots=True)
class Choice:
    """The model that answers, and where it is not what was asked for.

    `is_other_code` means another kernel's or variant's measurements, or another software's than one
    that was asked for by name; `software` what the measured one, `measured_by`, is to that which
    runs the calls. `is_on_demand` means trained for the question, in no version.
    """

    head: SeriesHead
    is_other_dtype: bool = False
    is_other_code: bool = False
    software: Relation = Relation.SAME
    versions_apart: tuple[int, ...] = ()
    measured_by: str = ""
    is_on_demand: bool = False
    models: Mapping[SeriesKey, SeriesModel] = field(default_factory=dict, repr=False)

    @property
    def model(self) -> SeriesModel:
        """The model, loaded when first asked for."""
        return self.models[self.head.key]

    @property
    def reach(self) -> Reach:
        """Where its points lie, known without loading or training the model."""
        if isinstance(self.models, SeriesOnDemand):
            return self.models.reach(self.head.key)
        return self.model.reach

    @property
    def other_framework(self) -> str:
        """Whose measurements stand in for those of the software in mind; empty: none do."""
        return "" if self.software in (Relation.SAME, Relation.LIBRARY) else self.measured_by

    @property
    def rank(self) -> tuple[bool, Relation, tuple[int, ...], bool, int, str]:
        """Where it stands among others, the nearest to what was asked first."""
        size, name = -self.head.num_points, self.head.key.framework
        apart = (self.software, self.versions_apart)
        return (self.is_other_code, *apart, self.is_other_dtype, size, name)

    @property
    def basis(self) -> str:
        """In words, what answers."""
        key = self.head.key
        what = [text for text in (key.dtype, key.framework, key.kernel, key.variant) if text]
        place = key.topology or key.device
        described = f" ({', '.join(what)})" if what else ""
        own = f"{self.head.num_points:,} points of {key.operator} on {place}{described}"
        own += ", trained on demand" if self.is_on_demand else ""
        own += f" of the {self.head.origin} catalog" if self.head.origin else ""
        regressor = self.model.regressor
        return (
            f"{own}; {regressor.basis}" if isinstance(regressor, DeviceTransferRegressor) else own
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which series is asked for, of an operator and target; empty takes any framework or kernel.

    An empty variant is the plain case. Where no `framework` is asked for, measurements of the
    `preferred` one come first, then those of its nearest version.
    """

    framework: str = ""
    variant: str = ""
    kernel: str = ""
    preferred: str = ""

    @property
    def software(self) -> str:
        """The software in mind: asked for, or else preferred."""
        return self.framework or self.preferred

    @classmethod
    def of(cls, query: LatencyQuery, table: OperatorTable) -> "Wanted":
        """Return which series a table of a query requests."""
        return cls(query.framework, table.variant, table.kernel, query.preferred_framework)


class SeriesByHead(Mapping[SeriesKey, SeriesModel]):
    """Series that are loaded when they are asked for; what there is their heads say."""

    heads: Mapping[SeriesKey, SeriesHead]

    def __contains__(self, key: object) -> bool:
        """Tell whether there is such a series, without loading it."""
        return key in self.heads

    def __iter__(self) -> Iterator[SeriesKey]:
        """Yield the keys."""
        return iter(self.heads)

    def __len__(self) -> int:
        """How many series there are."""
        return len(self.heads)


class SeriesOnDemand(SeriesByHead):
    """Series whose models are loaded or trained when they are asked for, and then kept."""

    def __init__(self) -> None:
        """Begin without any; a subclass sets `heads`."""
        self._models: dict[SeriesKey, SeriesModel] = {}
        self._reaches: dict[SeriesKey, Reach] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def load(self, head: SeriesHead) -> SeriesModel:
        """Return the model of a series, loaded or trained; it may take a second or two."""

    @abstractmethod
    def read_series(self, key: SeriesKey) -> Series:
        """Return the points of a series, without its model."""

    def __getitem__(self, key: SeriesKey) -> SeriesModel:
        """Return the model of a series."""
        head = self.heads[key]
        with self._lock:
            if key not in self._models:
                self._models[key] = self.load(head)
            return self._models[key]

    def reach(self, key: SeriesKey) -> Reach:
        """Return where the points of a series lie, without its model."""
        with self._lock:
            if key in self._models:
                return self._models[key].reach
            if key not in self._reaches:
                self._reaches[key] = Reach(self.read_series(key))
            return self._reaches[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSet:
    """Trained models by key. `version` is empty for the set that knows no measurement.

    `corrections` keeps what own points say of other measurements, by the identities of both and by
    what of a query the answers from those measurements depend on; `laws` what series follow of
    their devices' data sheets, by their identity.
    """

    version: str = ""
    created_at: str = ""
    snapshot_hash: str = ""
    series: Mapping[SeriesKey, SeriesModel] = field(default_factory=dict)
    transfers: Mapping[str, TransferModel] = field(default_factory=dict)
    corrections: MutableMapping[tuple[Hashable, ...], OwnCorrection] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    laws: MutableMapping[str, DeviceLaw] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    heads: Sequence[SeriesHead] = field(init=False, repr=False, compare=False)
    _index: HeadIndex = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Keep what is known of the models without loading them."""
        stored = getattr(self.series, "heads", None)
        heads = stored.values() if stored is not None else (m.head for m in self.series.values())
        object.__setattr__(self, "heads", tuple(heads))
        object.__setattr__(self, "_index", HeadIndex(self.heads))

    @property
    def layers(self) -> "Sequence[ModelSet]":
        """The sets that may know of the same device, the own one first."""
        return (self,)

    @property
    def num_rows(self) -> int:
        """Distinct points of all series, none counted twice."""
        return sum(head.num_points for head in own_heads(self.heads))

    @property
    def knows_nothing(self) -> bool:
        """Whether nothing at all was measured."""
        return not self.series

    def heads_for(self, query: LatencyQuery) -> Sequence[SeriesHead]:
        """Return the series among which the names in a query are looked up."""
        del query
        return self.heads

    def frameworks_of(self, subject: Subject) -> AbstractSet[str]:
        """Return under which software an operator was measured on a device."""
        return self._index.frameworks.get(subject, frozenset()) - {""}

    def check_names(self, query: LatencyQuery) -> None:
        """Refuse a framework, kernel or variant of which there is no row, as `KnownNames.check`."""
        named = [table.kernel or table.variant for table in query.tables if not table.tentative]
        if query.framework or any(named):
            heads = self.heads_for(query)
            known = self._index.known if heads is self.heads else KnownNames.of(heads)
            known.check(query)

    def choose(self, spec: OperatorSpec, target: Target, wanted: Wanted) -> Choice | None:
        """Return the model of the series nearest to what is asked, None where there is none."""
        return next(iter(self.rank(spec, target, wanted)), None)

    def rank(self, spec: OperatorSpec, target: Target, wanted: Wanted) -> Sequence[Choice]:
        """Return the models that may answer, the nearest to what is asked first.

        A variant nobody measured is answered, with a wider interval, by one that differs in nothing
        but how tokens were routed to experts, else in which of the formats of 4 bits the weights
        were, else by the plain case, else by one that differs in how it was sampled. Software
        counts for more than which of two twin formats.
        """
        for variant in self._near_variants(spec, wanted.variant):
            found = self._choices(spec, target, replace(wanted, variant=variant))
            if ranked := sorted(found, key=lambda choice: choice.rank):
                is_other = variant != wanted.variant
                return [replace(c, is_other_code=c.is_other_code or is_other) for c in ranked]
        return ()

    def _choices(self, spec: OperatorSpec, target: Target, wanted: Wanted) -> Iterator[Choice]:
        for dtype in _candidates(target):
            key = SeriesKey(
                spec.name,
                target.place,
                target.topology.name if target.topology else "",
                "" if spec.is_collective else dtype.name.lower(),
                target.phase.name.lower(),
                "",
                wanted.variant,
            )
            is_other_dtype = dtype is not target.dtype and not spec.is_collective
            for choice in _relate(self._index.by_circumstances.get(key, ()), wanted):
                yield replace(choice, is_other_dtype=is_other_dtype, models=self.series)

    def _near_variants(self, spec: OperatorSpec, variant: str) -> Sequence[str]:
        """Return the variants to try, the nearest first."""
        routing = parse_variant(variant).get("routing")
        alike = [
            name
            for facts in (without_routing(variant), *_of_like_weights(variant))
            for name in sorted(
                self._index.alike_variants.get((spec.name, facts), ()),
                key=lambda name: parse_variant(name).get("routing") != routing,
            )
        ]
        sampled = () if variant else self._index.sampled_variants.get(spec.name, ())
        return tuple(dict.fromkeys((variant, *alike, "", *sampled)))

    def has_transfer(self, spec: OperatorSpec, device: DeviceSpec, variant: str = "") -> bool:
        """Whether anything of an operator's kind tells its typical efficiency."""
        return not self.transfers.keys().isdisjoint(transfer_names(spec, device, variant))

    def transfer(
        self,
        spec: OperatorSpec,
        device: DeviceSpec,
        variant: str = "",
        dtype: DType | None = None,
    ) -> TransferModel:
        """Return the typical efficiency of an operator, or of its kind, or the default.

        That of the variant comes first: other weights take other kernels.
        """
        names = transfer_names(spec, device, variant, dtype)
        found = (self.transfers[name] for name in names if name in self.transfers)
        return next(found, default_transfer()).for_device(spec, device)


def _relate(found: Sequence[SeriesHead], wanted: Wanted) -> Iterator[Choice]:
    """Yield the models of one set of circumstances, each with what it is to the one asked for.

    Without any software in mind that is one model: of the default software, or of all software
    together, which is also what answers for all other software than the one in mind.
    """
    of_kernel = [head for head in found if _is_of_kernel(head, wanted.kernel)]
    alike = of_kernel or [head for head in found if not head.key.kernel]
    if not alike:
        return
    is_other_kernel = not of_kernel
    named = [head for head in alike if head.key.framework]
    united = [head for head in alike if not head.key.framework]
    if not (named and wanted.software):
        defaults = [head for head in named if _version(head)]
        head = max(defaults, key=_version) if defaults else max(united or alike, key=_num_points)
        yield Choice(head, is_other_code=is_other_kernel or bool(wanted.framework))
        return
    others, software = [], parse_software(wanted.software)
    for head in named:
        key = head.key
        relation, apart = software.relate(key.framework, key.operator, key.dtype, key.variant)
        if relation is Relation.OTHER:
            others.append(head)
            continue
        is_other = bool(wanted.framework) and not matches(key.framework, wanted.framework)
        is_other = is_other and relation is not Relation.LIBRARY
        yield Choice(head, False, is_other_kernel or is_other, relation, apart, key.framework)
    if others:
        head = max(united if len(others) > 1 and united else others, key=_num_points)
        names = ", ".join(sorted(other.key.framework for other in others))
        is_other = is_other_kernel or bool(wanted.framework)
        yield Choice(head, False, is_other, Relation.OTHER, (), names)


def _version(head: SeriesHead) -> tuple[int, ...]:
    """Return the version of the software that is meant where none is said; empty for others."""
    software = parse_software(head.key.framework)
    return software.first if software.name == DEFAULT_SOFTWARE else ()


def _is_of_kernel(head: SeriesHead, kernel: str) -> bool:
    """Tell whether a series is a kernel's own, or its rows are of no other."""
    return head.key.kernel == kernel or (not head.key.kernel and head.kernels == (kernel,))


def own_heads(heads: Sequence[SeriesHead]) -> Iterator[SeriesHead]:
    """Yield single series, without those of one kernel or several frameworks."""
    keys = [head.key for head in heads]
    named = {key.circumstances for key in keys if key.framework and not key.kernel}
    for head in heads:
        key = head.key
        if not key.kernel and (key.framework or key.circumstances not in named):
            yield head


def newest_heads(heads: Sequence[SeriesHead]) -> Iterator[SeriesHead]:
    """Yield of single series those of the newest version of each software that has measured it."""
    newest: dict[tuple[SeriesKey, str], SeriesHead] = {}
    for head in own_heads(heads):
        of_what = head.key.circumstances, parse_software(head.key.framework).name
        other = newest.get(of_what, head)
        newest[of_what] = max(other, head, key=lambda one: order_versions(one.key.framework))
    yield from newest.values()


def _of_like_weights(variant: str) -> Iterator[frozenset[tuple[str, str]]]:
    """Yield the facts of variants whose weights are widened from as few bits, routing left out."""
    facts = without_routing(variant)
    for scheme in _WIDENED_4_BIT:
        if ("quant", scheme) in facts:
            for other in _WIDENED_4_BIT:
                yield facts - {("quant", scheme)} | {("quant", other)}


def _num_points(head: SeriesHead) -> tuple[int, str]:
    return head.num_points, head.key.framework


def _candidates(target: Target) -> Iterator[DType]:
    yield target.dtype
    twin = _TWINS.get(target.dtype)
    if twin is not None and _has_both(target.device, target.dtype, twin):
        yield twin


def _has_both(device: DeviceSpec, dtype: DType, twin: DType) -> bool:
    peaks = device.peak_flops_per_s
    return dtype in peaks and twin in peaks and peaks[dtype] == peaks[twin]
