"""Corrections: learned from times observed end to end, kept in the catalog, applied to replies."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from foretoken.domain import schema
from foretoken.domain.errors import CorruptCatalogError, InvalidRequestError, UnknownCorrectionError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.correction import Correction, CorrectionRequest
from foretoken.domain.measurements.estimate import (
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorCall,
    table_of_calls,
)
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.measurements.step_model import StepModel
from foretoken.domain.name import check_name
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.text_file import parse_json
from foretoken.predictor.correction_fit import COMMON_FACTOR, learn_correction
from foretoken.predictor.roofline import FloatColumn

if TYPE_CHECKING:
    from foretoken.domain.ports import CatalogPort

Predict = Callable[[LatencyQuery], LatencyReply]

_log = logging.getLogger(__name__)

_KIND = "corrections"


class CorrectionBook:
    """The corrections, kept in the catalog; those found are remembered until `refresh`."""

    def __init__(self, catalog: "CatalogPort", now: Callable[[], str]) -> None:
        """Keep the port; `now` returns ISO 8601 UTC."""
        self._catalog = catalog
        self._now = now
        self._found: dict[str, Correction] = {}

    def learn(self, request: CorrectionRequest, predict: Predict) -> Correction:
        """Learn a correction and keep it; one of the same name is replaced.

        Raises:
            UnknownDeviceError: no such device file.
            InvalidRequestError: the name is none, or calls take no time.
            what `predict` raises.

        """
        check_name(request.name, "name")
        known = replace(request, device=find_device(request.device).name)
        if known.steps is not None:
            correction = _keep_steps(known, known.steps, self._now())
        else:
            raw_us, model_version = _price(known, predict)
            correction = learn_correction(known, raw_us, model_version, self._now())
        content = json.dumps(schema.encode(correction), sort_keys=True).encode()
        artifact = Artifact(
            kind=_KIND,
            name=known.name,
            content_hash=hashlib.sha256(content).hexdigest(),
            num_bytes=len(content),
            created_at=correction.created_at,
        )
        self._catalog.store_artifact(artifact, (content,))
        self._found[known.name] = correction
        return correction

    def find(self, name: str, device: str = "") -> Correction:
        """Return the correction of that name.

        Raises:
            UnknownCorrectionError: there is none; the message names the nearest.
            CorruptCatalogError: what is kept under that name is no correction.
            InvalidRequestError: it is another device's than the one given.

        """
        correction = self._found.get(name)
        if correction is None:
            kept = {artifact.name: artifact for artifact in self._catalog.list_artifacts(_KIND)}
            correction = self._read(UnknownCorrectionError.look_up(name, kept))
            self._found[name] = correction
        if device and device != correction.device:
            reason = f"{name} was learned on {correction.device}, not on {device}"
            raise InvalidRequestError.of_field("correction", reason)
        return correction

    def list(self) -> tuple[Correction, ...]:
        """Return the corrections, newest first; an artifact that is none is left out."""
        found = []
        for artifact in self._catalog.list_artifacts(_KIND):
            try:
                found.append(self._read(artifact))
            except CorruptCatalogError as err:
                _log.warning("left out of the corrections: %s", err.message)
        return tuple(found)

    def refresh(self) -> None:
        """Forget what was found: another process may have replaced it."""
        self._found.clear()

    def _read(self, artifact: Artifact) -> Correction:
        content = b"".join(self._catalog.read_artifact(_KIND, artifact.name))
        try:
            found = parse_json(content, "correction")
            return schema.decode(Correction, found, artifact.name)
        except InvalidRequestError as err:
            raise CorruptCatalogError(
                f"the artifact {_KIND}/{artifact.name} is no correction: {err}; delete it"
            ) from err


def _keep_steps(request: CorrectionRequest, steps: StepModel, created_at: str) -> Correction:
    """Return the correction of steps that were learned already, with the means of their errors."""
    weights = [each.num_steps for each in steps.kinds]

    def mean(name: str) -> float:
        return float(np.average([getattr(each, name) for each in steps.kinds], weights=weights))

    return Correction(
        name=request.name,
        device=request.device,
        created_at=created_at,
        model_version="",
        raw_error_ratio=mean("raw_error_ratio"),
        corrected_error_ratio=mean("corrected_error_ratio"),
        left_out_error_ratio=mean("left_out_error_ratio"),
        steps=steps,
    )


def factor_for(correction: Correction, operator: str) -> float:
    """Return what a correction multiplies an operator's estimates with."""
    common = correction.factors.get(COMMON_FACTOR, 1.0)
    return correction.factors.get(find_operator(operator).group, common)


def apply_correction(
    correction: Correction, query: LatencyQuery, reply: LatencyReply
) -> LatencyReply:
    """Return the reply with all times stretched; the raw ones stay within reach.

    A model of whole steps goes with it, and stretches no operator.
    """
    pairs = zip(query.tables, reply.tables, strict=True)
    return replace(
        reply,
        steps=correction.steps,
        tables=tuple(
            _stretch(columns, factor_for(correction, table.operator)) for table, columns in pairs
        ),
    )


def _stretch(columns: LatencyColumns, factor: float) -> LatencyColumns:
    return replace(
        columns,
        latency_us=columns.latency_us * factor,
        low_us=columns.low_us * factor,
        high_us=columns.high_us * factor,
        correction_factor=factor,
    )


def _price(request: CorrectionRequest, predict: Predict) -> tuple[Mapping[str, FloatColumn], str]:
    """Return what each group takes in each observation, and the model version that says so."""
    places: dict[tuple[object, ...], list[tuple[int, float, OperatorCall]]] = {}
    for index, observation in enumerate(request.observations):
        for item in observation.calls:
            call = item.call
            kind = (call.operator, call.dtype, call.phase, call.variant, call.kernel)
            key = (*kind, tuple(sorted(call.dims)))
            places.setdefault(key, []).append((index, item.count, call))
    tables = tuple(table_of_calls([call for _, _, call in members]) for members in places.values())
    reply = predict(
        LatencyQuery(
            device=request.device,
            tables=tables,
            topology=request.topology,
            framework=request.framework,
        )
    )
    raw_us: dict[str, FloatColumn] = {}
    for table, answer, members in zip(tables, reply.tables, places.values(), strict=True):
        group = find_operator(table.operator).group
        column = raw_us.setdefault(group, np.zeros(len(request.observations)))
        rows = [index for index, _, _ in members]
        np.add.at(column, rows, np.array([count for _, count, _ in members]) * answer.latency_us)
    return dict(sorted(raw_us.items())), reply.model_version
