"""Take text, YAML, JSON, ZIP archives and NumPy arrays out of files that strangers made.

Nothing here runs code from a file, writes to disk, or spends memory that the file only claims to
need.
"""

import codecs
import json
import math
import sys
import tokenize
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from foretoken.catalog.sources.file import SourceFile, current_budget, refuse
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.plugins import SAFE_LOADER, parse_yaml
from foretoken.domain.text_file import DEFLATE_RATIO_MAX, Archive, UnpackBudget

# PyYAML reads about 0.2 MB/s; side files of profiles are a few kB.
_YAML_MAX_BYTES = 512 << 10
_JSON_MAX_BYTES = 64 << 20
# Deeper than any side file, and well within the interpreter's own limit.
_DEPTH_MAX = 64
# As many as there are in a file of the largest size that has no alias.
_NODES_MAX = 1 << 18
_DECODE_STEP = 1 << 20
# Real lines have some kB.
_LINE_MAX_BYTES = 1 << 20
# However well an array of one value compresses: the import's own budget limits the bytes.
_ZIP_BUDGET = UnpackBudget(max_bytes=sys.maxsize, max_ratio=DEFLATE_RATIO_MAX)
_NPY_VERSIONS = {(1, 0): np.lib.format.read_array_header_1_0}
_NPY_VERSIONS[2, 0] = np.lib.format.read_array_header_2_0


def decode_text(source: SourceFile, path: Path) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        InvalidRequestError: it is in something else; names the line.

    """
    check_utf8(source, path)
    return source.content.decode("utf-8-sig")


def check_utf8(source: SourceFile, path: Path) -> None:
    """Check that a file is text in UTF-8 without decoding all of it at once.

    Raises:
        InvalidRequestError: it is not; names the line.

    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    content = memoryview(source.content)
    for start in range(0, len(content), _DECODE_STEP):
        end = start + _DECODE_STEP
        try:
            decoder.decode(content[start:end], final=end >= len(content))
        except UnicodeDecodeError as err:
            line = source.content.count(b"\n", 0, start + err.start) + 1
            refuse(path, f"line {line}: not UTF-8 text")


def check_lines(source: SourceFile, path: Path) -> None:
    """Check that no line is too long to be one of a table or a log.

    Raises:
        InvalidRequestError: one is; names it.

    """
    content, start = source.content, 0
    while len(content) - start > _LINE_MAX_BYTES:
        end = content.rfind(b"\n", start, start + _LINE_MAX_BYTES)
        if end < 0:
            line = content.count(b"\n", 0, start) + 1
            refuse(path, f"line {line}: longer than {_LINE_MAX_BYTES} bytes")
        start = end + 1


def parse_source_yaml(source: SourceFile, path: Path) -> Mapping[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        InvalidRequestError: it is no YAML mapping, too large or too deep, or its aliases stand for
            too much.

    """
    if len(source.content) > _YAML_MAX_BYTES:
        refuse(path, f"more than {_YAML_MAX_BYTES} bytes, too much for a YAML file")
    text = decode_text(source, path)
    try:
        _check_yaml_events(text, path)
        return parse_yaml(text, str(path))
    except (yaml.YAMLError, ValueError) as err:  # a number or date no machine can hold
        refuse(path, f"not valid YAML: {err}")


def _check_yaml_events(text: str, path: Path) -> None:
    """Refuse what is deep, or immense once each alias is what it stands for."""
    # The nodes that are open: their anchors, and the nodes and levels they hold up to here.
    stack: list[tuple[str | None, int, int]] = [(None, 0, 0)]
    anchors: dict[str | None, tuple[int, int]] = {}
    for event in yaml.parse(text, Loader=SAFE_LOADER):
        size, depth, line = 1, 0, event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append((event.anchor, 1, 1))
        elif isinstance(event, yaml.AliasEvent):
            # One inside what it stands for has no end, and is not in `anchors` yet.
            if event.anchor not in anchors:
                refuse(path, f"line {line}: a YAML alias of nothing that is complete before it")
            size, depth = anchors[event.anchor]
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size, depth = stack.pop()
            anchors[anchor] = size, depth
        elif isinstance(event, yaml.ScalarEvent):
            anchors[event.anchor] = size, depth
        anchor, outer_size, outer_depth = stack[-1]
        stack[-1] = anchor, outer_size + size, max(outer_depth, depth + 1)
        if len(stack) - 1 + depth > _DEPTH_MAX:
            refuse(path, f"line {line}: nested deeper than {_DEPTH_MAX}")
        if stack[-1][1] > _NODES_MAX:
            refuse(path, f"line {line}: stands for more than {_NODES_MAX} values")


def parse_source_json(source: SourceFile, path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        InvalidRequestError: it is no JSON, too large or too deep.

    """
    if len(source.content) > _JSON_MAX_BYTES:
        refuse(path, f"more than {_JSON_MAX_BYTES} bytes, too much for a JSON file")
    try:
        return json.loads(decode_text(source, path))
    except RecursionError:
        refuse(path, "JSON nested too deep")
    except ValueError as err:
        refuse(path, f"not valid JSON: {err}")


def read_zip_members(source: SourceFile, path: Path) -> Mapping[str, bytes]:
    """Return the content of every file in a ZIP archive, by name; nothing is written to disk.

    Raises:
        InvalidRequestError: as `Archive.open`, or they unpack to more than the import may read.

    """
    try:
        archive = Archive.open(source.content, _ZIP_BUDGET)
        current_budget().spend(archive.num_bytes, path)
        return dict(archive)
    except InvalidRequestError as err:
        if err.violations:  # the import's budget names the file already
            raise
        refuse(path, err.message)


def parse_npy(content: bytes, path: Path) -> npt.NDArray[Any]:
    """Return the array in the content of an `.npy` file (a member of an `.npz`, too).

    Raises:
        InvalidRequestError: it is none, holds Python objects, or has another size than it claims.

    """
    stream = BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in _NPY_VERSIONS:
            refuse(path, f"an .npy file of the unknown version {version}")
        shape, is_fortran, dtype = _NPY_VERSIONS[version](stream)
    # numpy evaluates the header as a Python literal, which may fail in any of its stages.
    except (ValueError, TypeError, SyntaxError, RecursionError, tokenize.TokenError) as err:
        refuse(path, f"not an .npy file: {err}")
    if dtype.hasobject:
        refuse(path, "holds Python objects, which are not read")
    if (
        min(shape, default=0) < 0
        or math.prod(shape) * dtype.itemsize != len(content) - stream.tell()
    ):
        refuse(path, f"claims {shape} of {dtype}, which is not the size of its data")
    array = np.frombuffer(content, dtype, offset=stream.tell())
    return array.reshape(shape, order="F" if is_fortran else "C")
