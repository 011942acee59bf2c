"""All models of one version, and which of them answers a question."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretoken.domain.estimate import DType
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.operator import OperatorSpec
from foretoken.domain.variant import parse_variant
from foretoken.predictor.roofline import Target
from foretoken.predictor.trainer import SeriesModel
from foretoken.predictor.training_rows import SeriesKey
from foretoken.predictor.transfer import TransferModel, default_transfer, transfer_names
from foretoken.predictor.transfer.borrowing import BorrowingRegressor

# What a variant may say of how an operator was sampled, which says little of its time: whether an
# attention mask, a bias, an optimizer's first step. Where the plain case is missing they stand in.
_SAMPLING_FACTS = frozenset({"mask", "bias", "step"})
_UNKNOWN = "unknown"
# Formats that run the same kernels at the same rate where a device has both.
_TWINS = {DType.FP16: DType.BF16, DType.BF16: DType.FP16}


@dataclass(frozen=True, slots=True)
class Choice:
    """The model that answers, and where it is not what was asked for.

    `is_other_code` means another software stack's, kernel's or variant's measurements.
    """

    model: SeriesModel
    is_other_dtype: bool = False
    is_other_code: bool = False

    @property
    def basis(self) -> str:
        """In words, what answers."""
        key = self.model.series.key
        what = [text for text in (key.dtype, key.framework, key.kernel, key.variant) if text]
        place = key.topology or key.device
        described = f" ({', '.join(what)})" if what else ""
        own = f"{len(self.model.series.points):,} points of {key.operator} on {place}{described}"
        regressor = self.model.regressor
        return f"{own}; {regressor.basis}" if isinstance(regressor, BorrowingRegressor) else own


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which series is asked for, beside operator and target; empty takes any framework or kernel.

    An empty variant is the plain case.
    """

    framework: str = ""
    variant: str = ""
    kernel: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSet:
    """Trained models by key. `version` is empty for the set that knows no measurement."""

    version: str = ""
    created_at: str = ""
    snapshot_hash: str = ""
    series: Mapping[SeriesKey, SeriesModel] = field(default_factory=dict)
    transfers: Mapping[str, TransferModel] = field(default_factory=dict)
    _by_circumstances: Mapping[SeriesKey, tuple[SeriesModel, ...]] = field(
        init=False, repr=False, compare=False
    )
    _alike_variants: Mapping[tuple[str, frozenset[tuple[str, str]]], Sequence[str]] = field(
        init=False, repr=False, compare=False
    )
    _sampled_variants: Mapping[str, Sequence[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the models by what they have in common but framework and kernel."""
        found: dict[SeriesKey, list[SeriesModel]] = {}
        for key, model in self.series.items():
            found.setdefault(_circumstances(key), []).append(model)
        index = {key: tuple(models) for key, models in found.items()}
        object.__setattr__(self, "_by_circumstances", index)
        alike: dict[tuple[str, frozenset[tuple[str, str]]], list[str]] = {}
        for operator, variant in sorted({(key.operator, key.variant) for key in index}):
            alike.setdefault((operator, _without_routing(variant)), []).append(variant)
        object.__setattr__(self, "_alike_variants", alike)
        sampled: dict[str, list[str]] = {}
        for operator, variant in sorted({(key.operator, key.variant) for key in index}):
            if _is_sampling_alone(variant):
                sampled.setdefault(operator, []).append(variant)
        object.__setattr__(self, "_sampled_variants", sampled)

    @property
    def num_rows(self) -> int:
        """Distinct points of all series, none counted twice."""
        return sum(len(model.series.points) for model in own_models(self.series))

    def choose(self, spec: OperatorSpec, target: Target, wanted: Wanted) -> Choice | None:
        """Return the model of the series nearest to what is asked, None where there is none.

        A variant nobody measured is answered in doubt: by one that differs in nothing but how
        tokens were routed to experts, else by the plain case, else by one that differs in how it
        was sampled. A framework asked for counts for more than which of two twin formats.
        """
        for variant in self._near_variants(spec, wanted.variant):
            found = list(self._choices(spec, target, replace(wanted, variant=variant)))
            if found:
                choice = min(found, key=lambda choice: choice.is_other_code)
                is_other = choice.is_other_code or variant != wanted.variant
                return replace(choice, is_other_code=is_other)
        return None

    def _choices(self, spec: OperatorSpec, target: Target, wanted: Wanted) -> Iterator[Choice]:
        for dtype in _candidates(target):
            key = SeriesKey(
                spec.name,
                target.topology.device if target.topology else target.device.name,
                target.topology.name if target.topology else "",
                "" if spec.is_collective else dtype.name.lower(),
                target.phase.name.lower(),
                "",
                wanted.variant,
            )
            choice = _choose(self._by_circumstances.get(key, ()), wanted)
            if choice is not None:
                is_other_dtype = dtype is not target.dtype and not spec.is_collective
                yield replace(choice, is_other_dtype=is_other_dtype)

    def _near_variants(self, spec: OperatorSpec, variant: str) -> Sequence[str]:
        """Return the variants to try, the nearest first."""
        alike = self._alike_variants.get((spec.name, _without_routing(variant)), ())
        sampled = () if variant else self._sampled_variants.get(spec.name, ())
        return tuple(dict.fromkeys((variant, *alike, "", *sampled)))

    def transfer(self, spec: OperatorSpec, device: DeviceSpec, variant: str = "") -> TransferModel:
        """Return the typical efficiency of an operator, or of its kind, or the default.

        That of the variant comes first: other weights take other kernels.
        """
        names = transfer_names(spec, device, variant)
        found = (self.transfers[name] for name in names if name in self.transfers)
        return next(found, default_transfer()).for_device(spec, device)


def _choose(found: Sequence[SeriesModel], wanted: Wanted) -> Choice | None:
    if not found:
        return None
    kernels = {model.series.key.kernel for model in found}
    kernel = wanted.kernel if wanted.kernel in kernels else ""
    of_kernel = [model for model in found if model.series.key.kernel == kernel]
    asked = [
        model
        for model in of_kernel
        if wanted.framework and matches(model.series.key.framework, wanted.framework)
    ]
    united = [model for model in of_kernel if not model.series.key.framework]
    is_other = kernel != wanted.kernel or bool(wanted.framework and not asked)
    return Choice(max(asked or united or of_kernel, key=_num_points), is_other_code=is_other)


def matches(framework: str, asked: str) -> bool:
    """Tell whether "vllm 0.19.0" is what "vllm", "vllm 0.19" or "vllm 0.19.0" asks for."""
    have, want = framework.lower(), asked.lower()
    return have == want or (have.startswith(want) and have[len(want)] in " .+-")


def own_models(series: Mapping[SeriesKey, SeriesModel]) -> Iterator[SeriesModel]:
    """Yield the models of single series, without those of one kernel or several frameworks."""
    named = {_circumstances(key) for key in series if key.framework and not key.kernel}
    for key, model in series.items():
        if not key.kernel and (key.framework or _circumstances(key) not in named):
            yield model


def _without_routing(variant: str) -> frozenset[tuple[str, str]]:
    """Return a variant's facts but how tokens are spread over experts."""
    return frozenset(fact for fact in parse_variant(variant).items() if fact[0] != "routing")


def _is_sampling_alone(variant: str) -> bool:
    """Tell whether a variant says no more than how its operator was sampled."""
    facts = parse_variant(variant)
    return bool(facts) and facts.keys() <= _SAMPLING_FACTS and _UNKNOWN not in facts.values()


def _circumstances(key: SeriesKey) -> SeriesKey:
    return replace(key, framework="", kernel="")


def _num_points(model: SeriesModel) -> tuple[int, str]:
    return len(model.series.points), model.series.key.framework


def _candidates(target: Target) -> Iterator[DType]:
    yield target.dtype
    twin = _TWINS.get(target.dtype)
    if twin is not None and _has_both(target.device, target.dtype, twin):
        yield twin


def _has_both(device: DeviceSpec, dtype: DType, twin: DType) -> bool:
    peaks = device.peak_flops_per_s
    return dtype in peaks and twin in peaks and peaks[dtype] == peaks[twin]
