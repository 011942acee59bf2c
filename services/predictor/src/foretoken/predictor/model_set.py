"""All models of one version, and which of them answers a question."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from foretoken.domain.estimate import DType
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.operator import OperatorSpec
from foretoken.predictor.roofline import Target
from foretoken.predictor.trainer import SeriesModel
from foretoken.predictor.training_rows import SeriesKey
from foretoken.predictor.transfer import TransferModel, default_transfer, transfer_names

# Formats that run the same kernels at the same rate where a device has both.
_TWINS = {DType.FP16: DType.BF16, DType.BF16: DType.FP16}


@dataclass(frozen=True, slots=True)
class Choice:
    """The model that answers, and where it is not what was asked for."""

    model: SeriesModel
    is_other_dtype: bool = False
    is_other_framework: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSet:
    """Trained models by key. `version` is empty for the set that knows no measurement."""

    version: str = ""
    created_at: str = ""
    snapshot_hash: str = ""
    series: Mapping[SeriesKey, SeriesModel] = field(default_factory=dict)
    transfers: Mapping[str, TransferModel] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Distinct points of all series, those of several frameworks together not counted."""
        return sum(len(model.series.points) for model in own_models(self.series))

    def choose(self, spec: OperatorSpec, target: Target, framework: str) -> Choice | None:
        """Return the model of the series nearest to what is asked, None where there is none."""
        for dtype in _candidates(target):
            wanted = SeriesKey(
                spec.name,
                target.topology.device if target.topology else target.device.name,
                target.topology.name if target.topology else "",
                "" if spec.is_collective else dtype.name.lower(),
                target.phase.name.lower(),
                "",
            )
            choice = self._of_framework(wanted, framework)
            if choice is not None:
                is_other_dtype = dtype is not target.dtype and not spec.is_collective
                return dataclasses.replace(choice, is_other_dtype=is_other_dtype)
        return None

    def transfer(self, spec: OperatorSpec, device: DeviceSpec) -> TransferModel:
        """Return the typical efficiency of an operator, or of its kind, or the default."""
        for name in transfer_names(spec, device):
            if name in self.transfers:
                return self.transfers[name]
        return default_transfer()

    def _of_framework(self, wanted: SeriesKey, framework: str) -> Choice | None:
        found = [
            model
            for key, model in self.series.items()
            if dataclasses.replace(key, framework="") == wanted
        ]
        if not found:
            return None
        asked = [m for m in found if framework and matches(m.series.key.framework, framework)]
        if asked:
            return Choice(max(asked, key=_num_points))
        union = [model for model in found if not model.series.key.framework]
        return Choice((union or found)[0], is_other_framework=bool(framework))


def matches(framework: str, asked: str) -> bool:
    """Tell whether "vllm 0.19.0" is what "vllm", "vllm 0.19" or "vllm 0.19.0" asks for."""
    have, want = framework.lower(), asked.lower()
    return have == want or (have.startswith(want) and have[len(want)] in " .+-")


def own_models(series: Mapping[SeriesKey, SeriesModel]) -> Iterator[SeriesModel]:
    """Yield the models of single series, without those of several frameworks together."""
    named = {dataclasses.replace(key, framework="") for key in series if key.framework}
    for key, model in series.items():
        if key.framework or key not in named:
            yield model


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
