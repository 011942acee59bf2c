"""One model version as one file, from which each series is read when first asked for.

A ZIP file, the same for the same models: an index of what there is, the models of typical
efficiency, and one member per series, named by the identity of its training. A member is a line of
JSON and plain arrays.
"""

import io
import json
import logging
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy.typing as npt

from foretoken.domain import schema
from foretoken.domain.errors import CorruptCatalogError, ForetokenError, NotTrainedError
from foretoken.domain.results.report import OperatorTrainingReport
from foretoken.jobs.progress import tell_job
from foretoken.predictor.learned_folder import LearnedFolder
from foretoken.predictor.model_set import ModelSet, SeriesOnDemand
from foretoken.predictor.packed_model import (
    STORE_REVISION,
    has_model,
    pack_model,
    train_points,
    unpack_model,
    unpack_points,
    unpack_report,
)
from foretoken.predictor.packing import pack, unpack
from foretoken.predictor.regression.trees import Trees
from foretoken.predictor.series import Series, SeriesHead, SeriesKey
from foretoken.predictor.trainer import SeriesModel
from foretoken.predictor.transfer import TransferModel
from foretoken.predictor.transfer.support import Support

_log = logging.getLogger(__name__)

_INDEX, _TRANSFERS = "index.json", "transfers"


class StoredSeries(SeriesOnDemand):
    """The models of series, each unpacked when first asked for, and then kept."""

    def __init__(
        self,
        heads: Mapping[SeriesKey, SeriesHead],
        packed: Mapping[str, bytes],
        learned: LearnedFolder | None = None,
        read_points: Callable[[SeriesKey], Series] | None = None,
    ) -> None:
        """Keep what is known of every series, and what reads their members by name.

        Models of members that have none are looked for in `learned`, and kept there. `read_points`
        knows the points of series whose members are yet to be made.
        """
        super().__init__()
        self.heads = heads
        self._packed, self._learned, self._read_points = packed, learned, read_points

    def packed(self, key: SeriesKey) -> bytes:
        """Return a series' member as it is stored; reading one raises `CorruptCatalogError`."""
        with _reading(key):
            return self._packed[self.heads[key].content_hash]

    def load(self, head: SeriesHead) -> SeriesModel:
        """Return the model of a series: its member's, or one that its points make."""
        with _reading(head.key):
            return self._load(head, self.packed(head.key))

    def _load(self, head: SeriesHead, content: bytes) -> SeriesModel:
        if has_model(content):
            return unpack_model(head, content)
        label = training_label(head.key)

        def train() -> SeriesModel:
            _log.info("%s: points=%d", label, head.num_points)
            return train_points(head, content, lambda: tell_job(label))

        return train() if self._learned is None else self._learned.load(head, train)

    def read_series(self, key: SeriesKey) -> Series:
        """Return the points of a series, without its model."""
        with _reading(key):
            if self._read_points is not None:
                return self._read_points(key)
            return unpack_points(self.heads[key], self.packed(key))

    def has_model(self, key: SeriesKey) -> bool:
        """Tell whether a series' member has its model, or the points alone."""
        with _reading(key):
            return has_model(self.packed(key))

    def read_report(self, key: SeriesKey) -> OperatorTrainingReport:
        """Return how good the model of a series is."""
        with _reading(key):
            return unpack_report(self.packed(key))


@contextmanager
def _reading(key: SeriesKey) -> Iterator[None]:
    try:
        yield
    except ForetokenError:
        raise
    except Exception as err:  # what is damaged can fail anywhere
        raise CorruptCatalogError(
            f"the model of {key.operator} on {key.device} cannot be read ({err!r}): train again"
        ) from err


class _Members(Mapping[str, bytes]):
    """The members of a ZIP file that may be read by several threads."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)

    def __getitem__(self, name: str) -> bytes:
        return self._archive.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._archive.namelist())

    def __len__(self) -> int:
        return len(self._archive.namelist())


class _StoredTransfers(Mapping[str, TransferModel]):
    """Models of typical efficiency, unpacked once anything is asked of them."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    @cached_property
    def _transfers(self) -> Mapping[str, TransferModel]:
        meta, arrays = unpack(self._content)
        return {
            item["name"]: TransferModel(
                Trees.from_arrays(str(place), arrays),
                item["low_log"],
                item["high_log"],
                schema.decode(Support, item["support"]),
            )
            for place, item in enumerate(meta["transfers"])
        }

    def __getitem__(self, name: str) -> TransferModel:
        return self._transfers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._transfers)

    def __len__(self) -> int:
        return len(self._transfers)


def store_series(series: Mapping[SeriesKey, SeriesModel]) -> StoredSeries:
    """Return models as they are stored."""
    if isinstance(series, StoredSeries):
        return series
    packed = {model.content_hash: pack_model(model) for model in series.values()}
    return StoredSeries({key: model.head for key, model in series.items()}, packed)


def write_models(models: ModelSet, *, has_members: bool = True) -> bytes:
    """Return models as one file; the same models give the same bytes.

    Without members it says which series there are, and has the models of typical efficiency.
    """
    heads = sorted(models.heads, key=lambda head: head.key)
    series = store_series(models.series)
    kept = heads if has_members else []
    members = {head.content_hash: series.packed(head.key) for head in kept}
    arrays: dict[str, npt.NDArray[Any]] = {}
    transfers = []
    for place, (name, transfer) in enumerate(sorted(models.transfers.items())):
        arrays |= transfer.trees.to_arrays(str(place))
        bounds = {"low_log": transfer.low_log, "high_log": transfer.high_log}
        transfers.append({"name": name, "support": schema.encode(transfer.support), **bounds})
    index = {
        "revision": STORE_REVISION,
        "series": [
            [head.key.names, head.kernels, head.num_points, head.content_hash] for head in heads
        ],
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        _write_member(archive, _INDEX, json.dumps(index).encode())
        _write_member(archive, _TRANSFERS, pack({"transfers": transfers}, arrays))
        for name, member in sorted(members.items()):
            _write_member(archive, name, member)
    return content.getvalue()


def _write_member(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    # Without a date and with one permission, whenever and by whomever it is written.
    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


def training_label(key: SeriesKey) -> str:
    """Say which series is trained."""
    what = ", ".join(text for text in (key.dtype, key.framework, key.variant, key.kernel) if text)
    return f"training {key.operator} on {key.topology or key.device} ({what})"


def read_models(path: Path, learned: LearnedFolder | None = None) -> ModelSet:
    """Return the models of a file, without what is known of their version.

    Models that it has only the points of are kept in `learned` once they are trained.

    Raises:
        NotTrainedError: another release wrote them, whose features mean something else.

    """
    members = _Members(path)
    index = json.loads(members.get(_INDEX, b"{}"))
    if index.get("revision") != STORE_REVISION:
        raise NotTrainedError(f"another release trained the models of {path.name}; train again")
    heads = {}
    for key, kernels, num_points, content_hash in index["series"]:
        own = SeriesKey(*key)
        heads[own] = SeriesHead(
            key=own, kernels=tuple(kernels), num_points=num_points, content_hash=content_hash
        )
    return ModelSet(
        series=StoredSeries(heads, members, learned),
        transfers=_StoredTransfers(members[_TRANSFERS]),
    )
