"""The head of a GGUF file: what it says of a model, and the tensors it holds, without their data.

Source: ggml, `docs/gguf.md` (versions 2 and 3); `gguf-py/gguf/constants.py` (GGML_QUANT_SIZES).
"""

import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from foretoken.domain.errors import InvalidRequestError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Formats of numbers by the type of a value; 7 is a flag.
_NUMBERS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
# Of each type of a tensor: its name, the weights of a block and the bytes that these take.
_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    28: ("F64", 1, 8),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
# Far more than a tensor has, and nested lists there are none.
_MOST_DIMS = 8
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """A tensor: its name, its shape with the innermost dimension first, and how it is stored."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFile:
    """What a file says by key (of a list of texts only how many they are), and its tensors."""

    metadata: Mapping[str, object]
    tensors: tuple[GgufTensor, ...] = field(repr=False)


def read_gguf(path: Path) -> GgufFile:
    """Read the head of a file, and of those that it was split into.

    Raises:
        InvalidRequestError: there is no such file, it is no GGUF file, damaged, or of a version or
            with a type that is not known.

    """
    files = [_read_one(shard) for shard in _list_shards(path)]
    tensors = tuple(tensor for file in files for tensor in file.tensors)
    return GgufFile(metadata=files[0].metadata, tensors=tensors)


def _list_shards(path: Path) -> Sequence[Path]:
    match = _SHARD.search(path.name)
    if match is None:
        return (path,)
    stem, count = path.name[: match.start()], int(match[2])
    return [path.with_name(f"{stem}-{part:05}-of-{match[2]}.gguf") for part in range(1, count + 1)]


def _read_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream:
            return _Reader(stream, path).read()
    except (OSError, struct.error, UnicodeDecodeError) as err:
        raise _refuse(path, f"cannot be read as GGUF: {err}") from err


class _Reader:
    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream, self._path = stream, path
        self._num_bytes = os.fstat(stream.fileno()).st_size

    def read(self) -> GgufFile:
        if self._take(len(_MAGIC)) != _MAGIC:
            raise _refuse(self._path, "is no GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise _refuse(self._path, f"is GGUF of version {version}; versions {known} are read")
        num_tensors, num_keys = self._count(), self._count()
        metadata = {self._text(): self._value(self._number("I")) for _ in range(num_keys)}
        return GgufFile(
            metadata=metadata, tensors=tuple(self._tensor() for _ in range(num_tensors))
        )

    def _take(self, count: int) -> bytes:
        content = self._stream.read(count) if count <= self._num_bytes else b""
        if len(content) != count:
            raise _refuse(self._path, "ends before what it says it holds")
        return content

    def _number(self, code: str) -> int:
        value: int = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]
        return value

    def _count(self) -> int:
        """Return a number of things, of which each takes a byte at least."""
        count = self._number("Q")
        if count > self._num_bytes:
            raise _refuse(self._path, "ends before what it says it holds")
        return count

    def _text(self) -> str:
        return self._take(self._count()).decode()

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        return self._number(self._code(kind))

    def _array(self) -> object:
        kind, count = self._number("I"), self._count()
        if kind == _STRING:
            for _ in range(count):
                self._take(self._count())
            return range(count)
        code = f"<{count}{self._code(kind)}"
        return struct.unpack(code, self._take(struct.calcsize(code)))

    def _code(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise _refuse(self._path, f"has a value of a type that is not known, {kind}")
        return _NUMBERS[kind]

    def _tensor(self) -> GgufTensor:
        name, num_dims = self._text(), self._number("I")
        if num_dims > _MOST_DIMS:
            raise _refuse(self._path, f"{name} has {num_dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dims))
        kind, _ = self._number("I"), self._number("Q")
        if kind not in _TYPES:
            raise _refuse(self._path, f"{name} is stored in a type that is not known, {kind}")
        type_name, block, block_bytes = _TYPES[kind]
        num_bytes = math.prod(shape) // block * block_bytes
        return GgufTensor(name=name, shape=shape, type_name=type_name, num_bytes=num_bytes)


def _refuse(path: Path, problem: str) -> InvalidRequestError:
    return InvalidRequestError.of_field("model", f"{path}: {problem}")
