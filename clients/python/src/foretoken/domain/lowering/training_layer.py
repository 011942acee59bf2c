"""A layer as a training framework runs it: what its rules add to the operators of the model.

Serving engines fuse what is small; frameworks of training run some of it by kernels of its own, and
every one of them reads and writes the activations once more.
"""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.graph import OperatorNode, Partition, PrefillShape, Section
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.units import Quantity


def lower_unfused_attention(builder: NodeBuilder, part: PrefillShape) -> Iterator[OperatorNode]:
    """Yield scores, softmax and values of every head as operators of their own.

    Masked scores are computed like the others. Sequences are equally long.
    """
    model, length = builder.model, part.q_tokens // part.num_seqs
    num_matrices = part.num_seqs * model.num_heads
    square = {"batch": num_matrices, "m": length, "n": length, "k": model.head_dim}
    yield builder.layer("attn_scores", "batched_gemm", square, Partition.HEADS)
    dims = {"num_matrices": num_matrices, "length": length}
    yield builder.layer("attn_softmax", "causal_softmax", dims, Partition.HEADS)
    trainer = trainer_of(builder)
    if trainer.has_dropout:
        dims = {"num_tokens": num_matrices * length, "hidden": length}
        yield builder.layer("attn_dropout", "dropout", dims, Partition.HEADS)
    narrow = {"batch": num_matrices, "m": length, "n": model.head_dim, "k": length}
    yield builder.layer("attn_values", "batched_gemm", narrow, Partition.HEADS)
    if trainer.has_copy_kernels:
        dims = {"num_tokens": part.q_tokens, "hidden": model.num_heads * model.head_dim}
        yield builder.layer("attn_context_copy", "copy", dims, Partition.WIDTH)


def is_unfused(builder: NodeBuilder) -> bool:
    """Tell whether attention runs as operators of its own."""
    training = builder.options.training
    return training is not None and training.trainer.attention == "unfused"


def trainer_of(builder: NodeBuilder) -> TrainerProfile:
    """Return the framework's rules; those of nothing in particular where nothing is trained."""
    training = builder.options.training
    return training.trainer if training else TrainerProfile(name="")


def training_projection(
    builder: NodeBuilder, role: str, dims: dict[str, Quantity], partition: Partition
) -> Iterator[OperatorNode]:
    """Yield a matrix product of every layer, in 8 bit after its input has been converted.

    Weights stay in 16 bit next to the copies that are multiplied.
    Source: NVIDIA Transformer Engine, FP8 primer.
    """
    node = builder.layer(role, "gemm", dims, partition)
    if builder.options.dtype is DType.FP8:
        split = Partition.WIDTH if partition is Partition.ROW else Partition.REPLICATED
        conversion = {"num_tokens": dims["m"], "hidden": dims["k"]}
        yield builder.layer(f"{role}_quantize", "quantize", conversion, split)
        node = dataclasses.replace(
            node, dtype=DType.FP8, output_dtype=builder.activation_dtype, weight_bits=16.0
        )
    yield node


def lower_training_mlp(builder: NodeBuilder) -> Iterator[OperatorNode]:
    """Yield both projections of a dense MLP, its activation, and biases by kernels of their own."""
    model, tokens, trainer = builder.model, builder.shape.num_tokens, trainer_of(builder)
    has_bias = model.has_bias or (trainer.has_mlp_bias and not model.is_gated)
    width = (2 if model.is_gated else 1) * model.intermediate
    dims = {"m": tokens, "n": width, "k": model.hidden}
    num_matrices = 2 if model.is_gated and not trainer.fuses_gate else 1
    for node in training_projection(builder, "mlp_up_proj", dims, Partition.COLUMN):
        biased = _with_bias(node, is_fused=has_bias and trainer.fuses_bias_activation)
        yield dataclasses.replace(biased, num_matrices=num_matrices)
    if has_bias and not trainer.fuses_bias_activation:
        dims = {"num_tokens": tokens, "hidden": width}
        yield builder.layer("mlp_up_bias", "bias_add", dims, Partition.WIDTH)
    dims = {"num_tokens": tokens, "intermediate": model.intermediate}
    if model.is_gated and not trainer.fuses_gate:
        yield builder.layer("mlp_activation", "silu", dims, Partition.WIDTH)
        yield builder.layer("mlp_product", "product", dims, Partition.WIDTH)
    else:
        operator = "silu_mul" if model.is_gated else "gelu"
        yield builder.layer("mlp_activation", operator, dims, Partition.WIDTH)
    dims = {"m": tokens, "n": model.hidden, "k": model.intermediate}
    for node in training_projection(builder, "mlp_down_proj", dims, Partition.ROW):
        yield _with_bias(node, is_fused=has_bias and trainer.fuses_residual)
    yield from lower_join(builder, "mlp", has_bias=has_bias)


def lower_training_norm(builder: NodeBuilder, role: str) -> Iterator[OperatorNode]:
    """Yield a norm of every layer, its input converted before where the framework does that."""
    tokens = builder.shape.num_tokens
    if trainer_of(builder).casts_norm_inputs:
        dims = {"num_tokens": tokens, "hidden": builder.model.hidden}
        yield builder.layer(f"{role}_upcast", "norm_upcast", dims)
    yield builder.norm(role, Section.LAYER, tokens)


def lower_join(builder: NodeBuilder, branch: str, *, has_bias: bool) -> Iterator[OperatorNode]:
    """Yield how a branch (`attn`, `mlp`) joins the residual stream: bias, dropout, addition.

    The attention of a parallel residual joins the MLP's output, or nothing of its own.
    """
    trainer, model = trainer_of(builder), builder.model
    dims = {"num_tokens": builder.shape.num_tokens, "hidden": model.hidden}
    if not trainer.fuses_residual:
        if has_bias:
            role = "attn_out_bias" if branch == "attn" else "mlp_down_bias"
            yield builder.layer(role, "bias_add", dims)
        if trainer.has_dropout:
            yield builder.layer(f"{branch}_out_dropout", "dropout", dims)
    if branch == "mlp" and model.has_parallel_residual and not trainer.fuses_residual:
        yield builder.layer("branch_sum", "residual_add", dims)
    if branch == "mlp" or not model.has_parallel_residual:
        yield builder.residual(f"{branch}_residual")


def lower_training_embedding(builder: NodeBuilder) -> Iterator[OperatorNode]:
    """Yield what follows the look-up of tokens and positions."""
    trainer, section = trainer_of(builder), Section.EMBEDDING
    dims = {"num_tokens": builder.shape.num_tokens, "hidden": builder.model.hidden}
    if builder.model.position == "learned":
        yield builder.node("embedding_sum", section, "residual_add", dims)
    if trainer.has_dropout:
        yield builder.node("embedding_dropout", section, "dropout", dims)
    if trainer.has_copy_kernels:
        yield builder.node("embedding_copy", section, "copy", dims)


def lower_training_head(builder: NodeBuilder) -> Iterator[OperatorNode]:
    """Yield the conversion of logits to fp32, where the framework does it before the loss."""
    if trainer_of(builder).casts_logits:
        dims = {"num_params": builder.shape.num_output_rows * builder.model.vocab}
        yield dataclasses.replace(
            builder.node("logits_cast", Section.HEAD, "cast", dims, Partition.VOCAB), group="loss"
        )


def _with_bias(node: OperatorNode, *, is_fused: bool) -> OperatorNode:
    return dataclasses.replace(node, has_bias=is_fused) if node.operator == "gemm" else node
