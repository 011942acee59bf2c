"""Latency surfaces as messages: the axes go once, the estimates come back as columns."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foretoken.api.predictor.v1 import predictor_service_pb2 as predictor_pb2
from foretoken.domain.measurements.axis import Axis
from foretoken.domain.measurements.surface import LatencySurface, SurfaceQuery
from foretoken.wire import columns


def grid_columns(axes: Sequence[Axis]) -> dict[str, npt.NDArray[np.int64]]:
    """Return the grid's points as columns by dimension, the last axis varying fastest."""
    meshes = np.meshgrid(*(axis.values for axis in axes), indexing="ij")
    return {
        axis.dim: mesh.reshape(-1).astype(np.int64) for axis, mesh in zip(axes, meshes, strict=True)
    }


def encode_surface(surface: LatencySurface) -> predictor_pb2.TabulateResponse:
    """Return the message of a surface."""
    return predictor_pb2.TabulateResponse(
        model_version=surface.model_version,
        estimates=columns.encode_estimates(surface.estimates, as_arrow=True),
    )


def decode_surface(message: predictor_pb2.TabulateResponse, query: SurfaceQuery) -> LatencySurface:
    """Return the surface of a message that answers a query."""
    return LatencySurface(
        axes=query.axes,
        estimates=columns.decode_estimates(message.estimates),
        model_version=message.model_version,
    )
