"""A layer as a training framework runs it, and the kernels that end a step.

Source: DeepSpeed, `runtime/zero/stage_1_and_2.py` (flatten, overflow check, norm, unscale and clip,
update); Megatron-LM, `optimizer/optimizer.py` (the same on fp32 gradients).

Serving engines fuse what is small; frameworks of training run some of it by kernels of its own, and
every one of them reads and writes the activations once more.
"""

import dataclasses
from collections.abc import Iterator

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.lowering.graph import OperatorNode, Partition, PrefillShape, Section
from foretoken.domain.lowering.node_builder import NodeBuilder
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.layer import LayerPart
from foretoken.domain.models.quantization import StoredWeight
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.units import Quantity

_NARROW_BYTES = 2
# Bytes that AdamW moves for a parameter, kernel by kernel, in passes that read and write an fp32
# each: decay 8, first moment 8 + 12, second 8 + 12, root 8, division 8, epsilon 8, update 16.
# Source: PyTorch 1.13, `torch/optim/adamw.py`, _single_tensor_adamw.
_ADAM_PASSES = 11
_NUM_MOMENTS = 2

# Products that follow a norm of their own, and what their input's transposition moves of a
# conversion.
_AFTER_NORM = ("attn_qkv_proj", "mlp_up_proj")
_TRANSPOSED_SHARE = 0.5

_Nodes = tuple[OperatorNode, ...]


def reduction_kernels(num_params: int, dtype: DType, trainer: TrainerProfile) -> _Nodes:
    """Return what a reduction of a rank's gradients needs around it: in a buffer, divided, spread.

    `num_params` are all of the rank's, or of a bucket.
    """
    if not num_params or not trainer.flattens_gradients:
        return ()
    return tuple(
        dataclasses.replace(
            _flat(role, "buffer_copy", num_params, trainer.gradient_dtype or dtype),
            section=Section.GRADIENT,
            group="gradient_reduction",
        )
        for role in ("gradient_flatten", "gradient_divide", "gradient_spread")
    )


def sum_kernels(num_params: int, num_ranks: int, dtype: DType, trainer: TrainerProfile) -> _Nodes:
    """Return what runs on all of a rank's own gradients, which `num_ranks` ranks add up.

    Source: Megatron-Core, `distributed/param_and_grad_buffer.py` (check_for_nan_in_grad,
    gradient_scaling_factor, reset).
    """
    # Zeros of 16 bit: twice as many where gradients have 32.
    width = max(1, round((trainer.gradient_dtype or dtype).num_bytes / _NARROW_BYTES))
    # A copy moves as much as a product in place with gradients of 16 bit.
    scaling = "unscale" if trainer.gradient_dtype is DType.FP32 else "buffer_copy"
    kernels = (
        ("gradient_zero", "fill", num_params * width, trainer.zeroes_gradients),
        ("gradient_check", "gradient_norm", num_params, trainer.checks_gradients),
        ("gradient_scale", scaling, num_params, trainer.scales_gradients and num_ranks > 1),
    )
    return tuple(
        dataclasses.replace(
            _flat(role, operator, count, dtype),
            section=Section.GRADIENT,
            group="gradient_reduction",
        )
        for role, operator, count, is_run in kernels
        if is_run and num_params
    )


def check_kernels(num_params: int, dtype: DType, trainer: TrainerProfile) -> _Nodes:
    """Return what runs on reduced gradients before it is known whether to update.

    `num_params` are those whose gradients the rank keeps. Gradients in 16 bit are converted first.
    """
    nodes: list[OperatorNode] = []
    for role, is_run in (
        ("overflow_check", scales_loss(dtype, trainer)),
        ("gradient_norm", trainer.clips_gradients),
    ):
        if is_run and num_params:
            if trainer.gradient_dtype is not DType.FP32:
                nodes.append(_flat(f"{role}_cast", "cast", num_params, dtype))
            nodes.append(_flat(role, "gradient_norm", num_params, dtype))
    return tuple(nodes)


def update_kernels(num_params: int, dtype: DType, trainer: TrainerProfile) -> _Nodes:
    """Return the update of `num_params` parameters: their gradients unscaled and clipped, Adam."""
    if not num_params:
        return ()
    nodes: list[OperatorNode] = []
    if trainer.flattens_gradients:
        nodes.append(_flat("update_flatten", "buffer_copy", num_params, dtype))
    if trainer.gradient_dtype is not DType.FP32 and not trainer.reads_any_gradients(dtype):
        nodes.append(_flat("gradient_cast", "cast", num_params, dtype))
    unscales = scales_loss(dtype, trainer)
    if unscales and trainer.clips_gradients and trainer.unscales_first:
        nodes.append(_flat("gradient_clip", "unscale", num_params, dtype))
    if unscales or trainer.clips_gradients:
        nodes.append(_flat("gradient_unscale", "unscale", num_params, dtype))
    nodes += _adam_kernels(num_params, dtype, trainer)
    if not trainer.fuses_optimizer or (
        trainer.copies_parameters and not trainer.splits_masters(dtype)
    ):
        nodes.append(_flat("parameter_cast", "cast", num_params, dtype))
    return tuple(nodes)


def _adam_kernels(num_params: int, dtype: DType, trainer: TrainerProfile) -> Iterator[OperatorNode]:
    """Yield Adam, and conversions of its moments: to fp32, back to 16 bit, and to their place."""
    if not trainer.fuses_optimizer:
        yield _flat("optimizer_update", "unscale", _ADAM_PASSES * num_params, dtype)
        return
    converts = trainer.converts_moments and trainer.moment_dtype is not DType.FP32
    if converts:
        yield _flat("moment_upcast", "cast", _NUM_MOMENTS * num_params, dtype)
    update = _flat("optimizer_update", "adam", num_params, dtype)
    yield dataclasses.replace(update, share=1.0 if converts else _moved_share(trainer))
    if converts:
        yield _flat("moment_downcast", "cast", _NUM_MOMENTS * num_params, dtype)
        yield _flat("moment_store", "buffer_copy", _NUM_MOMENTS * num_params, dtype)


def _moved_share(trainer: TrainerProfile) -> float:
    """Return what an update moves with moments in the trainer's format, of that in fp32.

    Master weight and moments are read and written, the gradient read, the parameter written.
    """
    moments = 2 * _NUM_MOMENTS * (DType.FP32.num_bytes - trainer.moment_dtype.num_bytes)
    whole = 2 * 3 * DType.FP32.num_bytes + 2 * _NARROW_BYTES
    return (whole - moments) / whole


def scales_loss(dtype: DType, trainer: TrainerProfile) -> bool:
    """Tell whether the loss is scaled against underflow: other formats than fp16 do not need it."""
    return trainer.scales_loss and dtype is DType.FP16


def _flat(role: str, operator: str, num_params: int, dtype: DType) -> OperatorNode:
    return OperatorNode(
        role=role,
        group=find_operator(operator).group,
        section=Section.OPTIMIZER,
        operator=operator,
        dims={"num_params": num_params},
        dtype=_activation_dtype(dtype),
    )


def _activation_dtype(dtype: DType) -> DType:
    return DType.BF16 if dtype is DType.FP8 else dtype


def lower_unfused_attention(
    builder: NodeBuilder, part: PrefillShape, heads: LayerPart
) -> Iterator[OperatorNode]:
    """Yield scores, softmax and values of every head as operators of their own.

    Masked scores are computed like the others, those out of a window too. Sequences are equally
    long.
    """
    num_heads, head_dim = heads["num_heads"], heads["head_dim"]
    length = part.q_tokens // part.num_seqs
    num_matrices = part.num_seqs * num_heads
    square = {"batch": num_matrices, "m": length, "n": length, "k": head_dim}
    yield builder.layer("attn_scores", "batched_gemm", square, Partition.HEADS)
    dims = {"num_matrices": num_matrices, "length": length}
    yield builder.layer("attn_softmax", "causal_softmax", dims, Partition.HEADS)
    trainer = trainer_of(builder)
    if trainer.has_dropout:
        dims = {"num_tokens": num_matrices * length, "hidden": length}
        yield builder.layer("attn_dropout", "dropout", dims, Partition.HEADS)
    narrow = {"batch": num_matrices, "m": length, "n": head_dim, "k": length}
    yield builder.layer("attn_values", "batched_gemm", narrow, Partition.HEADS)
    if trainer.has_copy_kernels:
        dims = {"num_tokens": part.q_tokens, "hidden": num_heads * head_dim}
        yield builder.layer("attn_context_copy", "copy", dims, Partition.WIDTH)


def is_unfused(builder: NodeBuilder) -> bool:
    """Tell whether attention runs as operators of its own."""
    training = builder.options.training
    return training is not None and training.trainer.attention == "unfused"


def trainer_of(builder: NodeBuilder) -> TrainerProfile:
    """Return the framework's rules; those of nothing in particular where nothing is trained."""
    training = builder.options.training
    return training.trainer if training else TrainerProfile(name="")


def project(
    builder: NodeBuilder,
    role: str,
    dims: dict[str, Quantity],
    partition: Partition,
    stored: StoredWeight,
) -> Iterator[OperatorNode]:
    """Yield a matrix product of every layer as it is served, its weights stored so, or trained."""
    if builder.options.training is None:
        yield builder.projection(role, dims, partition, stored)
    else:
        yield from training_projection(builder, role, dims, partition)


def lower_gate(builder: NodeBuilder, width: Quantity) -> Iterator[OperatorNode]:
    """Yield the product of a mixer's output and its gate, a kernel of its own in training alone."""
    if builder.options.training is not None:
        dims = {"num_tokens": builder.shape.num_tokens, "intermediate": width}
        yield builder.layer("attn_gate_product", "product", dims, Partition.WIDTH)


def training_projection(
    builder: NodeBuilder, role: str, dims: dict[str, Quantity], partition: Partition
) -> Iterator[OperatorNode]:
    """Yield a matrix product of every layer, in 8 bit after its input has been converted.

    Weights stay in 16 bit next to the copies that are multiplied. With `fuses_norm_quantize` the
    norm before it writes 8 bit, so that the transposition is left: a byte is read and one written
    of the four that a conversion moves.
    Source: NVIDIA Transformer Engine, FP8 primer; `pytorch/module/layernorm_linear.py`.
    """
    node = builder.layer(role, "gemm", dims, partition)
    if builder.options.dtype is DType.FP8:
        split = Partition.WIDTH if partition is Partition.ROW else Partition.REPLICATED
        conversion = {"num_tokens": dims["m"], "hidden": dims["k"]}
        cast = builder.layer(f"{role}_quantize", "quantize", conversion, split)
        is_fused = role in _AFTER_NORM and trainer_of(builder).fuses_norm_quantize
        yield dataclasses.replace(cast, share=_TRANSPOSED_SHARE if is_fused else 1.0)
        node = dataclasses.replace(
            node, dtype=DType.FP8, output_dtype=builder.activation_dtype, weight_bits=16.0
        )
    yield node


def lower_training_mlp(builder: NodeBuilder, part: LayerPart) -> Iterator[OperatorNode]:
    """Yield both projections of a dense MLP, its activation, and biases by kernels of their own."""
    model, tokens, trainer = builder.model, builder.shape.num_tokens, trainer_of(builder)
    is_gated, intermediate = part["is_gated"], part["intermediate"]
    has_bias = bool(part["has_bias"] or (trainer.has_mlp_bias and not is_gated))
    width = (2 if is_gated else 1) * intermediate
    dims = {"m": tokens, "n": width, "k": model.hidden}
    num_matrices = 2 if is_gated and not trainer.fuses_gate else 1
    for node in training_projection(builder, "mlp_up_proj", dims, Partition.COLUMN):
        biased = _with_bias(node, is_fused=has_bias and trainer.fuses_bias_activation)
        yield dataclasses.replace(biased, num_matrices=num_matrices)
    if has_bias and not trainer.fuses_bias_activation:
        dims = {"num_tokens": tokens, "hidden": width}
        yield builder.layer("mlp_up_bias", "bias_add", dims, Partition.WIDTH)
    dims = {"num_tokens": tokens, "intermediate": intermediate}
    if is_gated and not trainer.fuses_gate:
        yield builder.layer("mlp_activation", "silu", dims, Partition.WIDTH)
        yield builder.layer("mlp_product", "product", dims, Partition.WIDTH)
    else:
        operator = "silu_mul" if is_gated else "gelu"
        yield builder.layer("mlp_activation", operator, dims, Partition.WIDTH)
    dims = {"m": tokens, "n": model.hidden, "k": intermediate}
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
