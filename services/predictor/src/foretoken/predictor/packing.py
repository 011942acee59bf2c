"""Some facts and arrays as bytes: a line of JSON, then the arrays, so that they compress well."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


def pack(meta: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Return a line of JSON, and arrays one after the other, bytes of like weight together."""
    layout = {name: [array.dtype.str, array.shape] for name, array in arrays.items()}
    head = json.dumps({**meta, "arrays": layout}).encode()
    parts = [
        np.frombuffer(array.tobytes(), np.uint8).reshape(-1, array.itemsize).T.tobytes()
        for array in arrays.values()
    ]
    return b"".join([head, b"\n", *parts])


def unpack(content: bytes) -> tuple[Mapping[str, Any], Arrays]:
    """Return the line of JSON and the arrays of what was packed."""
    head, _, rest = content.partition(b"\n")
    meta = json.loads(head)
    arrays, start = {}, 0
    for name, (dtype, shape) in meta["arrays"].items():
        kind = np.dtype(dtype)
        num_bytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        planes = np.frombuffer(rest[start : start + num_bytes], np.uint8)
        whole = np.ascontiguousarray(planes.reshape(kind.itemsize, -1).T)
        arrays[name] = whole.view(kind).reshape(shape)
        start += num_bytes
    return meta, arrays


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all; who reads the one before goes on."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
