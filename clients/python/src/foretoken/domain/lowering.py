"""Turn a model and a batch into the operators of one rank.

`lower_forward` writes the whole model for one device; the passes in `parallelism/`, one per axis,
then cut it to a rank and add the collectives; `lower_backward` derives the backward operators.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.estimate import DType, Phase
from foretoken.domain.graph import BatchShape, OperatorNode, Partition, RankContext, Section
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.operator import find_operator
from foretoken.domain.plugins import scan_modules

Nodes = tuple[OperatorNode, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringOptions:
    """What the framework that runs the model decides.

    `has_kv_cache` and `has_sampler` are serving; `has_loss` is training. With
    `fuses_add_norm` the residual addition and the norm after it are one kernel.
    """

    dtype: DType
    has_kv_cache: bool = False
    has_sampler: bool = False
    has_loss: bool = False
    fuses_add_norm: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPass:
    """Cut a graph along one axis.

    `check` yields why a model cannot be cut that way; `rewrite` returns the rank's graph.
    """

    axis: str
    check: Callable[[RankContext], Iterator[str]]
    rewrite: Callable[[Nodes, RankContext], Nodes]


def lower_rank(shape: BatchShape, options: LoweringOptions, rank: RankContext) -> Nodes:
    """Return the forward operators of one rank.

    Raises:
        InvalidRequestError: the layout does not fit the model, or an axis has no pass.

    """
    check_layout(rank)
    nodes = lower_forward(rank.model, shape, options)
    for parallel_pass in _passes():
        nodes = parallel_pass.rewrite(nodes, rank)
    return nodes


def check_layout(rank: RankContext) -> None:
    """Check that every axis of the layout can cut the model.

    Raises:
        InvalidRequestError: with one violation per reason.

    """
    violations = [
        FieldViolation(f"layout.{parallel_pass.axis}", reason)
        for parallel_pass in _passes()
        for reason in parallel_pass.check(rank)
    ]
    known = {parallel_pass.axis for parallel_pass in _passes()}
    violations += [
        FieldViolation(f"layout.{axis}", "this axis is not simulated yet; leave it at 1")
        for axis in ("tp", "pp", "dp", "cp", "ep")
        if axis not in known and rank.layout.degree(axis) > 1
    ]
    if violations:
        raise InvalidRequestError.of_violations(violations)


def lower_forward(model: ModelArchitecture, shape: BatchShape, options: LoweringOptions) -> Nodes:
    """Return the forward operators of the whole model on one device.

    Raises:
        InvalidRequestError: the model needs an operator that is not lowered yet.

    """
    if model.mla is not None:
        raise InvalidRequestError.of_field(
            "model", f"{model.name}: multi-head latent attention is not simulated yet"
        )
    builder = _Builder(model, shape, options)
    return (*builder.embedding(), *builder.layers(), *builder.head())


def lower_backward(nodes: Nodes) -> Nodes:
    """Return the backward operators of a rank's forward operators, in reverse order.

    A GEMM has two: the gradient of its input and of its weight. A collective of a layer, or between
    stages, has its mirror of the same size. Those of a vocabulary-parallel embedding and loss have
    none, but the input gradient of the head must be summed.

    Raises:
        InvalidRequestError: an operator with weights has no backward pass yet.

    """
    return tuple(backward for node in reversed(nodes) for backward in _backward_of(node, nodes))


def _backward_of(node: OperatorNode, nodes: Nodes) -> Iterator[OperatorNode]:
    spec = find_operator(node.operator)
    if node.operator == "gemm":
        m, n, k = node.dims["m"], node.dims["n"], node.dims["k"]
        yield _renamed(node, "_dgrad", {"m": m, "n": k, "k": n})
        if node.role == "lm_head":
            yield from _head_reduction(node, nodes)
        yield _renamed(node, "_wgrad", {"m": n, "n": k, "k": m})
    elif spec.is_collective:
        if node.section not in (Section.EMBEDDING, Section.HEAD):
            yield _renamed(node, "_backward", dict(node.dims))
    elif spec.backward_work_ratio > 0:
        yield dataclasses.replace(node, role=f"{node.role}_backward", phase=Phase.BACKWARD)
    elif spec.num_weights(node.dims):
        raise InvalidRequestError.of_field("model", f"{node.operator} cannot be trained yet")


def _head_reduction(head: OperatorNode, nodes: Nodes) -> Iterator[OperatorNode]:
    # The group is the loss's: its ranks hold the same split of the vocabulary.
    for node in nodes:
        if node.role == "loss_all_reduce":
            message_bytes = head.dtype.bytes_of(head.dims["m"] * head.dims["k"])
            dims = {**node.dims, "message_bytes": message_bytes}
            role = "lm_head_dgrad_all_reduce"
            yield dataclasses.replace(node, role=role, dims=dims, dtype=head.dtype, repeat=1)


def _renamed(node: OperatorNode, suffix: str, dims: dict[str, object]) -> OperatorNode:
    return dataclasses.replace(node, role=node.role + suffix, dims=dims)


@cache
def _passes() -> Sequence[ParallelPass]:
    # Tensor parallelism first: the others then see a rank's own sizes.
    order = ("tp", "cp", "ep", "pp", "dp")
    found = scan_modules("foretoken.domain.parallelism", "PASS").values()
    return sorted(found, key=lambda item: order.index(item.axis))


class _Builder:
    """Writes the nodes of one model section by section."""

    def __init__(
        self, model: ModelArchitecture, shape: BatchShape, options: LoweringOptions
    ) -> None:
        self._model = model
        self._shape = shape
        self._options = options

    def embedding(self) -> Iterator[OperatorNode]:
        model, tokens = self._model, self._shape.num_tokens
        section = Section.EMBEDDING
        dims = {"num_tokens": tokens, "hidden": model.hidden, "vocab": model.vocab}
        yield self._node("embedding", section, "embedding", dims, Partition.VOCAB)
        if model.position == "learned":
            dims = {"num_tokens": tokens, "hidden": model.hidden, "vocab": model.max_position}
            yield self._node("position_embedding", section, "embedding", dims)

    def layers(self) -> Iterator[OperatorNode]:
        num_dense = self._model.moe.num_dense_layers if self._model.moe else self._model.num_layers
        num_moe = self._model.num_layers - num_dense
        for node in self._attention():
            yield dataclasses.replace(node, repeat=self._model.num_layers)
        if num_dense:
            for node in self._dense_mlp():
                yield dataclasses.replace(node, repeat=num_dense)
        if num_moe:
            for node in self._moe_mlp():
                yield dataclasses.replace(node, repeat=num_moe, first_layer=num_dense)

    def head(self) -> Iterator[OperatorNode]:
        model, rows = self._model, self._shape.num_output_rows
        section = Section.HEAD
        yield self._norm("final_norm", section, self._shape.num_tokens)
        dims = {"m": rows, "n": model.vocab, "k": model.hidden}
        head = self._node("lm_head", section, "gemm", dims, Partition.COLUMN)
        yield dataclasses.replace(head, shares_weights=model.has_tied_embedding)
        if self._options.has_sampler:
            dims = {"num_seqs": rows, "vocab": model.vocab}
            yield self._node("sampler", section, "sampler", dims)
        if self._options.has_loss:
            dims = {"num_tokens": rows, "vocab": model.vocab}
            yield self._node("loss", section, "cross_entropy", dims, Partition.VOCAB)

    def _attention(self) -> Iterator[OperatorNode]:
        model, tokens = self._model, self._shape.num_tokens
        heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads}
        yield self._norm("input_norm", Section.LAYER, tokens)
        q_width = model.num_heads * model.head_dim
        kv_width = model.num_kv_heads * model.head_dim
        dims = {"m": tokens, "n": q_width + 2 * kv_width, "k": model.hidden}
        yield self._layer_node("attn_qkv_proj", "gemm", dims, Partition.QKV)
        if model.has_qk_norm:
            for role, num_heads in (("q_norm", model.num_heads), ("k_norm", model.num_kv_heads)):
                dims = {"num_tokens": tokens * num_heads, "hidden": model.head_dim}
                yield self._layer_node(role, "rms_norm", dims, Partition.HEADS)
        if model.position == "rope":
            dims = {"num_tokens": tokens, **heads, "head_dim": model.head_dim}
            yield self._layer_node("attn_rope", "rope", dims, Partition.HEADS)
        if self._options.has_kv_cache:
            dims = {"num_tokens": tokens, "num_kv_heads": model.num_kv_heads}
            dims["head_dim"] = model.head_dim
            yield self._layer_node("kv_cache_write", "kv_cache_write", dims, Partition.HEADS)
        for part, name in ((self._shape.prefill, "prefill"), (self._shape.decode, "decode")):
            if part is not None:
                fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
                dims = {**fields, **heads, "head_dim": model.head_dim}
                operator = f"attention_{name}"
                yield self._layer_node(operator, operator, dims, Partition.HEADS)
        dims = {"m": tokens, "n": model.hidden, "k": q_width}
        yield self._layer_node("attn_out_proj", "gemm", dims, Partition.ROW)
        if not self._options.fuses_add_norm and not model.has_parallel_residual:
            yield self._residual("attn_residual")

    def _dense_mlp(self) -> Iterator[OperatorNode]:
        model, tokens = self._model, self._shape.num_tokens
        if not model.has_parallel_residual:
            yield self._norm("post_attention_norm", Section.LAYER, tokens)
        width = (2 if model.is_gated else 1) * model.intermediate
        dims = {"m": tokens, "n": width, "k": model.hidden}
        yield self._layer_node("mlp_up_proj", "gemm", dims, Partition.COLUMN)
        operator = "silu_mul" if model.is_gated else "gelu"
        dims = {"num_tokens": tokens, "intermediate": model.intermediate}
        yield self._layer_node("mlp_activation", operator, dims, Partition.WIDTH)
        dims = {"m": tokens, "n": model.hidden, "k": model.intermediate}
        yield self._layer_node("mlp_down_proj", "gemm", dims, Partition.ROW)
        if not self._options.fuses_add_norm:
            yield self._residual("mlp_residual")

    def _moe_mlp(self) -> Iterator[OperatorNode]:
        model, tokens, moe = self._model, self._shape.num_tokens, self._model.moe
        if moe is None:
            return
        yield self._norm("post_attention_norm", Section.LAYER, tokens)
        dims = {"m": tokens, "n": moe.num_experts, "k": model.hidden}
        yield self._layer_node("moe_router", "gemm", dims)
        # Experts hit when every token draws its experts evenly.
        missed_ratio = (1 - moe.top_k / moe.num_experts) ** (tokens * 1.0)
        dims = {
            "num_tokens": tokens,
            "top_k": moe.top_k,
            "num_experts": moe.num_experts,
            "num_active_experts": (moe.num_experts * (1 - missed_ratio) + 0.5) // 1,
            "hidden": model.hidden,
            "intermediate": moe.expert_intermediate,
        }
        yield self._layer_node("moe_experts", "moe_experts", dims, Partition.WIDTH)
        if moe.num_shared_experts:
            width = moe.num_shared_experts * moe.expert_intermediate
            dims = {"m": tokens, "n": 2 * width, "k": model.hidden}
            yield self._layer_node("shared_up_proj", "gemm", dims, Partition.COLUMN)
            dims = {"num_tokens": tokens, "intermediate": width}
            yield self._layer_node("shared_activation", "silu_mul", dims, Partition.WIDTH)
            # Its sum over ranks is the experts': one reduction serves both.
            dims = {"m": tokens, "n": model.hidden, "k": width}
            yield self._layer_node("shared_down_proj", "gemm", dims, Partition.ROW)
        if not self._options.fuses_add_norm:
            yield self._residual("mlp_residual")

    def _norm(self, role: str, section: Section, rows: object) -> OperatorNode:
        operator = self._model.norm
        if self._options.fuses_add_norm and operator == "rms_norm":
            operator = "add_rms_norm"
        return self._node(
            role, section, operator, {"num_tokens": rows, "hidden": self._model.hidden}
        )

    def _residual(self, role: str) -> OperatorNode:
        dims = {"num_tokens": self._shape.num_tokens, "hidden": self._model.hidden}
        return self._layer_node(role, "residual_add", dims)

    def _layer_node(
        self,
        role: str,
        operator: str,
        dims: dict[str, object],
        partition: Partition = Partition.REPLICATED,
    ) -> OperatorNode:
        return self._node(role, Section.LAYER, operator, dims, partition)

    def _node(
        self,
        role: str,
        section: Section,
        operator: str,
        dims: dict[str, object],
        partition: Partition = Partition.REPLICATED,
    ) -> OperatorNode:
        return OperatorNode(
            role=role,
            group=find_operator(operator).group,
            section=section,
            operator=operator,
            dims=dims,
            dtype=self._options.dtype,
            partition=partition,
        )
