"""Which collectives to time: sizes, groups, and products to run beside them."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.operators.spec.collective import variant_of_group
from foretoken.domain.operators.spec.overlap import call_alone, call_beside
from foretoken.domain.operators.spec.sweep import powers_of_two
from foretoken.domain.units import GIB

_KIB, _MIB = 2**10, 2**20
_UNITS = {"": 1, "B": 1, "KiB": _KIB, "MiB": _MIB, "GiB": GIB}
_SIZE = re.compile(r"(\d+)([A-Za-z]*)")
_FEWEST_RANKS = 2
_NUM_SIDES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveChoice:
    """Collectives, and the sizes and groups (devices of a node x nodes) to time each for."""

    operators: tuple[str, ...]
    dtype: DType
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    sizes: tuple[int, ...]

    def groups(self) -> Iterator[tuple[int, int]]:
        """Yield (devices per node, nodes) of every group with somebody to talk to."""
        for group in itertools.product(self.ranks, self.nodes):
            if math.prod(group) >= _FEWEST_RANKS:
                yield group


def bandwidth_calls(choice: CollectiveChoice) -> tuple[OperatorCall, ...]:
    """Return each collective in each size for each group; transfers of more than a pair as a ring.

    Raises:
        InvalidRequestError: no group has two ranks.

    """
    found = tuple(
        _collective(operator, size, group, choice.dtype)
        for operator in choice.operators
        for group in choice.groups()
        for size in choice.sizes
    )
    if not found:
        raise InvalidRequestError.of_field("ranks", "a group needs at least two ranks")
    return found


def overlap_calls(choice: CollectiveChoice, gemm: OperatorCall) -> tuple[OperatorCall, ...]:
    """Return the product alone, each collective alone, and each beside the other."""
    found: list[OperatorCall] = []
    product = OperatorCall(operator=gemm.operator, dtype=choice.dtype, dims=gemm.dims)
    for group in choice.groups():
        found.append(call_alone(product, *group))
        for operator, size in itertools.product(choice.operators, choice.sizes):
            collective = _collective(operator, size, group, choice.dtype)
            found += [
                collective,
                call_beside(product, collective),
                call_beside(collective, product),
            ]
    return tuple(found)


def gemm_of_text(text: str) -> OperatorCall:
    """Return the product that `MxNxK` says.

    Raises:
        InvalidRequestError: it says none.

    """
    words = text.split("x")
    if len(words) != _NUM_SIDES or not all(word.isascii() and word.isdigit() for word in words):
        raise InvalidRequestError.of_field("gemm", f"{text!r} is not MxNxK, as in 512x512x512")
    dims = dict(zip(("m", "n", "k"), map(int, words), strict=True))
    return OperatorCall(operator="gemm", dtype=DType.FP32, dims=dims)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the bytes that `1KiB:1GiB` (doubling) or `64KiB,1MiB` say, ascending.

    Raises:
        InvalidRequestError: a part is no size or range.

    """
    sizes: set[int] = set()
    for part in text.split(","):
        bounds = [_bytes_of(word) for word in part.split(":")]
        match bounds:
            case [size]:
                sizes.add(size)
            case [first, last] if first <= last:
                sizes.update(first * factor for factor in powers_of_two(1, last // first))
            case _:
                raise InvalidRequestError.of_field("sizes", f"{part!r} is not FIRST:LAST")
    return tuple(sorted(sizes))


def format_size(size: int) -> str:
    """Return bytes as people say them."""
    for unit, factor in (("GiB", GIB), ("MiB", _MIB), ("KiB", _KIB)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def _collective(operator: str, size: int, group: tuple[int, int], dtype: DType) -> OperatorCall:
    devices_per_node, num_nodes = group
    return OperatorCall(
        operator=operator,
        dtype=dtype,
        dims={
            "message_bytes": size,
            "devices_per_node": devices_per_node,
            "num_nodes": num_nodes,
        },
        variant=variant_of_group(operator, math.prod(group)),
    )


def _bytes_of(word: str) -> int:
    found = _SIZE.fullmatch(word.strip())
    if found is None or found[2] not in _UNITS or int(found[1]) == 0:
        raise InvalidRequestError.of_field("sizes", f"{word!r} is no size, as 64KiB or 1MiB is")
    return int(found[1]) * int(_UNITS[found[2]])
