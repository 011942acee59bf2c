"""The calls of shapes in the book, and what tells shapes apart that run other operators."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.lowering.communication import PlacedGroup
from foretoken.domain.lowering.graph import OperatorNode
from foretoken.domain.lowering.options import Nodes
from foretoken.domain.lowering.placement import axis_group
from foretoken.domain.lowering.sequence_parallel import splits_tokens
from foretoken.simulator.grid import Ints
from foretoken.simulator.search.training.shapes import Shape
from foretoken.simulator.search.training.transfer_columns import INSIDE
from foretoken.simulator.steps.call_prices import CallBook
from foretoken.simulator.training.recompute import LAYER_INPUT
from foretoken.simulator.training.state_sharding import StateExchange


@dataclass(frozen=True, slots=True, eq=False)
class WrittenCalls:
    """The calls of a shape, one row per operator and one column per micro batch size.

    `boundary` is what gathers that which arrives from another stage.
    """

    boundary: Nodes
    forward: Ints
    backward: Ints
    input_gather: Ints
    boundary_gather: Ints


def write_calls(shape: Shape, book: CallBook, *, gathers_inputs: bool) -> WrittenCalls:
    """Write what a shape runs to the book."""
    length = len(shape.micro_batch_sizes)
    inputs = (_input_gather(shape),) if gathers_inputs and _holds_whole_tokens(shape) else ()
    boundary = _boundary_gathers(shape)
    return WrittenCalls(
        boundary=boundary,
        forward=_stack(shape.forward, book, length),
        backward=_stack(shape.backward, book, length),
        input_gather=_stack(inputs, book, length),
        boundary_gather=_stack(boundary, book, length),
    )


def _stack(nodes: Nodes, book: CallBook, length: int) -> Ints:
    numbers = [book.add(node, length) for node in nodes]
    return np.array(numbers, dtype=np.int64).reshape(len(numbers), length)


def _holds_whole_tokens(shape: Shape) -> bool:
    """Tell whether ranks of tp each have all that layers hand on, and so may keep a part of it."""
    return shape.rank.layout.tp > 1 and not splits_tokens(shape.rank, shape.scenario)


def _boundary_gathers(shape: Shape) -> Nodes:
    """Return how what arrives in parts from another stage is gathered over tp."""
    transfers = shape.transfers_over(INSIDE)
    return tuple(node for node in transfers if node.operator != "send_recv")


def _input_gather(shape: Shape) -> OperatorNode:
    """Return how the saved input of a layer is gathered again, where it is split over tp."""
    stream = shape.stream
    num_bytes = stream.written_dtype.bytes_of(stream.dims["num_tokens"] * stream.dims["hidden"])
    group = PlacedGroup.of_rank(axis_group(shape.rank.layout, "tp"), shape.rank)
    return group.collective(stream, f"{LAYER_INPUT}_all_gather", "all_gather", num_bytes)


def exchanged_nodes(exchange: StateExchange) -> Nodes:
    """Return the operators of an exchange in layers, each once."""
    found = {
        id(node): node
        for node in (*exchange.forward, *exchange.backward_gather, *exchange.backward_reduction)
    }
    return tuple(found.values())


def _signature(nodes: Nodes) -> tuple[object, ...]:
    """Return what a pass is made of, whatever its operators take."""
    return tuple(
        (
            *(node.role, node.operator, node.group, node.axis, node.section, node.share),
            *(node.overlap, node.overlaps_with),
            *(node.repeat, node.first_layer, node.layer_stride),
        )
        for node in nodes
    )


def shape_signature(shape: Shape) -> tuple[object, ...]:
    """Return what the passes of a shape are made of, whatever its operators take."""
    gathers = _holds_whole_tokens(shape), bool(_boundary_gathers(shape))
    return (*_signature((*shape.forward, *shape.backward)), gathers)


def exchange_signature(exchange: StateExchange) -> tuple[object, ...]:
    """Return what an exchange in layers is made of, whatever its operators take."""
    return (
        _signature(exchange.forward),
        _signature(exchange.backward_gather),
        _signature(exchange.backward_reduction),
    )


def number_values(values: Sequence[tuple[object, ...]]) -> Ints:
    """Return numbers that are equal where values are."""
    known: dict[tuple[object, ...], int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)
