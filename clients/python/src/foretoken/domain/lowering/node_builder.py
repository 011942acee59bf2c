"""Make the operator nodes of a model: what all its parts share."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.domain.lowering.graph import BatchShape, OperatorNode, Partition, Section, place
from foretoken.domain.lowering.options import LoweringOptions
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.quantization import Quantization, StoredWeight, find_quantization
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import EAGER_VARIANT, format_variant
from foretoken.domain.units import Quantity

_Dims = dict[str, Quantity]


def as_chain(node: OperatorNode) -> OperatorNode:
    """Return an operator as the chain of kernels that it is where nothing fuses them."""
    kernels = find_operator(node.operator).chain_kernels
    return dataclasses.replace(node, variant=EAGER_VARIANT, num_kernels=kernels)


@dataclass(frozen=True, slots=True)
class NodeBuilder:
    """Makes nodes of a model on a batch, as a framework runs it.

    Those of layers are made for `layers` (none: all of them).

    Raises:
        UnknownPluginError: the options name a quantisation there is not.

    """

    model: ModelArchitecture
    shape: BatchShape
    options: LoweringOptions
    layers: Sequence[int] = ()
    quantization: Quantization = field(init=False)

    def __post_init__(self) -> None:
        """Look the quantisation up."""
        object.__setattr__(self, "quantization", find_quantization(self.options.quantization))

    def node(
        self,
        role: str,
        section: Section,
        operator: str,
        dims: _Dims,
        partition: Partition = Partition.REPLICATED,
    ) -> OperatorNode:
        """Return an operator in the model's own number format."""
        return OperatorNode(
            role=role,
            group=find_operator(operator).group,
            section=section,
            operator=operator,
            dims=dims,
            dtype=self.activation_dtype,
            partition=partition,
        )

    def layer(
        self,
        role: str,
        operator: str,
        dims: _Dims,
        partition: Partition = Partition.REPLICATED,
        variant: str = "",
    ) -> OperatorNode:
        """Return an operator of the layers it makes nodes for."""
        return OperatorNode(
            role=role,
            group=find_operator(operator).group,
            section=Section.LAYER,
            operator=operator,
            dims=dims,
            dtype=self.activation_dtype,
            partition=partition,
            variant=variant,
            **place(self.layers or range(self.model.num_layers)),
        )

    def projection(
        self, role: str, dims: _Dims, partition: Partition, weight: StoredWeight
    ) -> OperatorNode:
        """Return a matrix product of the layers, its weights stored that way."""
        return self.stored(self.layer(role, "gemm", dims, partition), weight)

    def stored(self, node: OperatorNode, weight: StoredWeight, **facts: str) -> OperatorNode:
        """Return the node with its weights stored that way; `facts` say more of its variant."""
        dtype = weight.dtype or node.dtype
        return OperatorNode(
            role=node.role,
            group=node.group,
            section=node.section,
            operator=node.operator,
            dims=node.dims,
            dtype=dtype,
            partition=node.partition,
            **node.placement,
            kv_heads=node.kv_heads,
            variant=format_variant({"quant": weight.variant, **facts}) or "",
            output_dtype=None if dtype is node.dtype else node.dtype,
            weight_bits=weight.bits,
        )

    @property
    def activation_dtype(self) -> DType:
        """Number format between operators: that of the options, or 16 bit where 8 train."""
        is_narrow = self.options.training is not None and self.options.dtype is DType.FP8
        return DType.BF16 if is_narrow else self.options.dtype

    @property
    def kv_format(self) -> str:
        """Name of the KV cache's number format, nothing where it is the model's own."""
        kv_dtype = self.options.kv_dtype
        return "" if kv_dtype in (None, self.options.dtype) else kv_dtype.name.lower()

    def block_formats(self, weight: StoredWeight) -> dict[str, str]:
        """Return the formats of attention and KV cache in a block whose weights are stored so."""
        own = self.options.dtype
        attention = "" if weight.dtype in (None, own) else own.name.lower()
        return {"attn": attention, "kv": self.kv_format}

    @property
    def kv_variant(self) -> str:
        """Variant of operators that read or write the KV cache."""
        return format_variant({"kv": self.kv_format}) or ""

    def norm(self, role: str, section: Section, rows: Quantity) -> OperatorNode:
        """Return a norm of the residual stream, the addition before it included where fused."""
        operator = self.model.norm
        if self.options.fuses_add_norm and operator == "rms_norm":
            operator = "add_rms_norm"
        dims = {"num_tokens": rows, "hidden": self.model.hidden}
        training = self.options.training
        is_chain = training and not training.trainer.fuses_norm and operator == "rms_norm"
        node = (
            self.layer(role, operator, dims)
            if section is Section.LAYER
            else self.node(role, section, operator, dims)
        )
        return as_chain(node) if is_chain else node

    def residual(self, role: str) -> OperatorNode:
        """Return the addition to the residual stream."""
        dims = {"num_tokens": self.shape.num_tokens, "hidden": self.model.hidden}
        return self.layer(role, "residual_add", dims)
