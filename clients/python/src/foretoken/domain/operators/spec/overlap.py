"""Calls that run while another one runs: computation during communication, and the reverse.

Such a call has the variant `beside=<operator>;beside_dims=<dims>`: the other operator's dimensions
in their order, joined by `x`. A computation that ranks time with nothing concurrent, to compare
with, has `beside=nothing` and the group as (devices per node)x(nodes).
"""

import dataclasses

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.domain.operators.spec.collective import variant_of_group
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import format_variant, parse_variant

NOTHING = "nothing"

_FACT = "beside"
_DIMS_FACT = "beside_dims"
_GROUP_LENGTH = 2


def call_during(call: OperatorCall, other: OperatorCall) -> OperatorCall:
    """Return the call as it is while `other` runs again and again."""
    names = find_operator(other.operator).dim_names
    return _with_facts(call, other.operator, [other.dims[name] for name in names])


def call_alone(call: OperatorCall, devices_per_node: int, num_nodes: int) -> OperatorCall:
    """Return the computation as all ranks of a group run it, with nothing concurrent."""
    return _with_facts(call, NOTHING, [devices_per_node, num_nodes])


def is_timed_during(call: OperatorCall) -> bool:
    """Return whether the call is timed during another one, or alone to compare with that."""
    return is_of_overlap(call.variant)


def is_of_overlap(variant: str | None) -> bool:
    """Return whether rows of a variant are such calls: they tell of another operator as well."""
    return _FACT in parse_variant(variant)


def is_group_call(call: OperatorCall) -> bool:
    """Return whether several ranks time a call: a collective, or what runs during another one."""
    return is_of_group(call.operator, call.variant)


def is_of_group(operator: str, variant: str | None) -> bool:
    """Return whether rows of an operator in a variant are those of several ranks.

    Raises:
        UnknownOperatorError: there is no such operator.

    """
    return find_operator(operator).is_collective or is_of_overlap(variant)


def find_companion(call: OperatorCall) -> OperatorCall | None:
    """Return what runs concurrent with the call, None where nothing does.

    Raises:
        InvalidRequestError: the variant does not say its dimensions.
        UnknownOperatorError: it names no operator.

    """
    facts = parse_variant(call.variant)
    name = facts.get(_FACT, NOTHING)
    if name == NOTHING:
        return None
    spec = find_operator(name)
    sizes = _sizes_in(call, len(spec.dim_names))
    dims = dict(zip(spec.dim_names, sizes, strict=True))
    variant = ""
    if spec.is_collective:
        variant = variant_of_group(name, dims["devices_per_node"] * dims["num_nodes"])
    return OperatorCall(operator=name, dtype=call.dtype, dims=dims, variant=variant)


def plain_call(call: OperatorCall) -> OperatorCall:
    """Return the call as it is without regard to what runs concurrent with it."""
    facts = parse_variant(call.variant)
    kept = {key: value for key, value in facts.items() if key not in (_FACT, _DIMS_FACT)}
    return dataclasses.replace(call, variant=format_variant(kept) or "")


def group_of_call(call: OperatorCall) -> tuple[int, int]:
    """Return the (devices per node, nodes) of a collective, or of what it runs concurrent with.

    Raises:
        InvalidRequestError: the variant names no group, or two collectives.

    """
    companion = find_companion(call)
    pair = [call] if companion is None else [call, companion]
    collectives = [one for one in pair if find_operator(one.operator).is_collective]
    if len(collectives) > 1:
        # Ranks may begin them in another order, and wait for each other for ever.
        raise InvalidRequestError.of_field("variant", f"both calls communicate: {call.variant}")
    if collectives:
        return collectives[0].dims["devices_per_node"], collectives[0].dims["num_nodes"]
    if companion is not None:
        raise InvalidRequestError.of_field("variant", f"neither call communicates: {call.variant}")
    devices_per_node, num_nodes = _sizes_in(call, _GROUP_LENGTH)
    return devices_per_node, num_nodes


def _with_facts(call: OperatorCall, other: str, sizes: list[int]) -> OperatorCall:
    facts = parse_variant(call.variant) | {
        _FACT: other,
        _DIMS_FACT: "x".join(str(size) for size in sizes),
    }
    return dataclasses.replace(call, variant=format_variant(facts) or "")


def _sizes_in(call: OperatorCall, length: int) -> list[int]:
    words = parse_variant(call.variant).get(_DIMS_FACT, "").split("x")
    if len(words) != length or not all(word.isascii() and word.isdigit() for word in words):
        raise InvalidRequestError.of_field(
            "variant", f"{call.variant!r}: {_DIMS_FACT} must be {length} sizes joined by x"
        )
    return [int(word) for word in words]
