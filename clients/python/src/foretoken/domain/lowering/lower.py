"""Turn a model and a batch into the operators of one rank.

`lower_forward` writes the whole model for one device; the passes in `parallelism/`, one per axis,
then cut it to a rank and add the collectives; `lower_backward` derives the backward operators.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.lowering.backward import backward_of
from foretoken.domain.lowering.graph import (
    BatchShape,
    OperatorNode,
    Partition,
    RankContext,
    Section,
    in_order,
)
from foretoken.domain.lowering.lora import add_adapters
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.lowering.options import (
    LayoutCases,
    Lowering,
    LoweringOptions,
    Nodes,
    ParallelPass,
)
from foretoken.domain.lowering.sequence_parallel import local_shape
from foretoken.domain.lowering.training_layer import (
    lower_join,
    lower_training_embedding,
    lower_training_head,
    lower_training_norm,
    trainer_of,
)
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.kinds.spec.kind import KindSpec, Placed, find_kind
from foretoken.domain.models.stack import stack_of
from foretoken.domain.plugins import scan_modules
from foretoken.domain.requests.limit import Limit, list_broken

# Fields of a scenario that an axis outside of the layout is chosen by.
_FIELDS = {
    "wp": "weight_parallel",
    "dcp": "engine.rules.decode_context_parallel",
    "ffn": "engine.rules.ffn_devices",
}


def lower_rank(shape: BatchShape, options: LoweringOptions, rank: RankContext) -> Nodes:
    """Return the forward operators of one rank.

    Raises:
        InvalidRequestError: the layout does not fit the model, or an axis has no pass.
        UnknownPluginError: no such quantisation.

    """
    check_layout(rank, options)
    nodes = lower_forward(rank.model, local_shape(shape, rank, options), options)
    lowering = Lowering(rank=rank, shape=shape, options=options)
    for parallel_pass in _passes():
        nodes = parallel_pass.rewrite(nodes, lowering)
    if options.lora is not None:
        nodes = add_adapters(nodes, rank, shape.num_tokens, options.lora)
    return nodes


def check_layout(rank: RankContext, options: LoweringOptions | None = None) -> None:
    """Check that every axis of the layout can cut the model, as the options do it if any are given.

    Raises:
        InvalidRequestError: with one violation per reason.

    """
    violations = list(list_broken(list_limits(LayoutCases.of_rank(rank, options))))
    known = {parallel_pass.axis for parallel_pass in _passes()}
    violations += [
        FieldViolation(f"layout.{axis}", "this axis is not simulated yet; leave it at 1")
        for axis in ("tp", "pp", "dp", "cp", "ep")
        if axis not in known and rank.layout.degree(axis) > 1
    ]
    if violations:
        raise InvalidRequestError.of_violations(violations)


def list_limits(cases: LayoutCases) -> Iterator[Limit]:
    """Yield the limits of every axis, each with the field of a scenario to change."""
    for parallel_pass in _passes():
        field = _FIELDS.get(parallel_pass.axis, f"layout.{parallel_pass.axis}")
        for limit in parallel_pass.limits(cases):
            yield dataclasses.replace(limit, field=field)


def lower_forward(model: ModelArchitecture, shape: BatchShape, options: LoweringOptions) -> Nodes:
    """Return the forward operators of the whole model on one device.

    Raises:
        UnknownPluginError: no such quantisation.
        InvalidRequestError: the model has layers of a kind that is not lowered, or not trained.

    """
    builder = NodeBuilder(model, shape, options)
    if options.training is not None:
        for part in model.extras:
            _check_trained(builder, find_kind(part.kind))
    return (*_embedding(builder), *_layers(builder), *_head(builder))


def lower_backward(nodes: Nodes, options: LoweringOptions | None = None) -> Nodes:
    """Return the backward operators of a rank's forward operators, in reverse order.

    A GEMM has two, the gradient of its input and of its weight, and by the rules of the framework
    the sum with the gradients of earlier micro batches. Collectives have their mirror.

    Raises:
        InvalidRequestError: an operator with weights has no backward pass yet.

    """
    return tuple(
        backward for node in reversed(nodes) for backward in backward_of(node, nodes, options)
    )


@cache
def _passes() -> Sequence[ParallelPass]:
    # Tensor parallelism first: the others then see a rank's own sizes. Axes of plug-ins come last.
    place = {axis: index for index, axis in enumerate(("tp", "dcp", "cp", "ep", "wp", "pp", "dp"))}
    found = scan_modules("foretoken.domain.parallelism", "PASS").values()
    return sorted(found, key=lambda item: place.get(item.axis, len(place)))


def _embedding(builder: NodeBuilder) -> Iterator[OperatorNode]:
    model, tokens = builder.model, builder.shape.num_tokens
    section = Section.EMBEDDING
    dims = {"num_tokens": tokens, "hidden": model.hidden, "vocab": model.vocab}
    node = builder.node("embedding", section, "embedding", dims, Partition.VOCAB)
    yield dataclasses.replace(node, weight_bits=builder.quantization.embedding.bits)
    if model.position == "learned":
        dims = {"num_tokens": tokens, "hidden": model.hidden, "vocab": model.max_position}
        yield builder.node("position_embedding", section, "embedding", dims)
    if builder.options.training is not None:
        yield from lower_training_embedding(builder)


def _layers(builder: NodeBuilder) -> Iterator[OperatorNode]:
    stack = stack_of(builder.model)
    halves = ((stack.mixer_groups, _mixer), (stack.feed_forward_groups, _feed_forward))
    for groups, lower_half in halves:
        for parts in groups:
            within = dataclasses.replace(builder, layers=in_order(parts.values()))
            half = lower_half(within, parts)
            for extra in stack.extras:
                around = find_kind(extra.kind).around
                half = around(within, extra, half) if around else half
            yield from half
    for extra in stack.extras:
        if find_kind(extra.kind).lower is not None:
            yield from _operators(builder, {extra: tuple(range(builder.model.num_layers))})


def _operators(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    kind = find_kind(next(iter(parts)).kind)
    if kind.lower is None:
        problem = f"{builder.model.name} has {kind.name}, which cannot be simulated yet"
        raise InvalidRequestError.of_field("model", problem)
    if builder.options.training is not None:
        _check_trained(builder, kind)
    return kind.lower(builder, parts)


def _check_trained(builder: NodeBuilder, kind: KindSpec) -> None:
    """Refuse to train what has no backward pass here."""
    if not kind.backward:
        why = kind.untrained or "it has no backward pass"
        problem = f"{builder.model.name} has {kind.name}, which can be served only: {why}"
        raise InvalidRequestError.of_field("model", problem)


def _mixer(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    model, is_training = builder.model, builder.options.training is not None
    yield from lower_training_norm(builder, "input_norm")
    yield from _operators(builder, parts)
    if is_training:
        has_bias = bool(model.has_bias or next(iter(parts)).dims.get("has_out_bias"))
        yield from lower_join(builder, "attn", has_bias=has_bias)
    elif not builder.options.fuses_add_norm and not model.has_parallel_residual:
        yield builder.residual("attn_residual")


def _feed_forward(builder: NodeBuilder, parts: Placed) -> Iterator[OperatorNode]:
    model, is_training = builder.model, builder.options.training is not None
    is_dense = next(iter(parts)).kind == "mlp"
    if not is_dense:
        yield builder.norm("post_attention_norm", Section.LAYER, builder.shape.num_tokens)
    elif not model.has_parallel_residual or trainer_of(builder).has_branch_norms:
        yield from lower_training_norm(builder, "post_attention_norm")
    yield from _operators(builder, parts)
    # A dense half joins the residual by the rules of the framework that trains it.
    if not builder.options.fuses_add_norm and not (is_dense and is_training):
        yield builder.residual("mlp_residual")


def _head(builder: NodeBuilder) -> Iterator[OperatorNode]:
    model, rows = builder.model, builder.shape.num_output_rows
    section = Section.HEAD
    if trainer_of(builder).has_copy_kernels:
        dims = {"num_tokens": builder.shape.num_tokens, "hidden": model.hidden}
        yield builder.node("final_copy", section, "copy", dims)
    yield builder.norm("final_norm", section, builder.shape.num_tokens)
    dims = {"m": rows, "n": model.vocab, "k": model.hidden}
    is_tied, stored = model.has_tied_embedding, builder.quantization
    head = builder.node("lm_head", section, "gemm", dims, Partition.COLUMN)
    head = builder.stored(head, stored.embedding if is_tied else stored.head)
    yield dataclasses.replace(head, shares_weights=is_tied)
    if builder.options.has_sampler:
        dims = {"num_seqs": rows, "vocab": model.vocab}
        yield builder.node("sampler", section, "sampler", dims)
    if builder.options.has_loss:
        yield from lower_training_head(builder)
        dims = {"num_tokens": rows, "vocab": model.vocab}
        yield builder.node("loss", section, "cross_entropy", dims, Partition.VOCAB)
