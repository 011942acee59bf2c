"""What the sampling scripts run under each name, as operators of the catalog.

`mp` is the tensor-parallel degree: the sizes are those of one of its ranks. Source: the functions
of `Kernel_sampling/target_functions.py` and the events they are timed by (`configs/collect`) in
https://github.com/Littlesnakess/GPUModeling25 and https://github.com/DebarghaG/estimate-train-time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretoken.catalog.dims import Integers
from foretoken.catalog.sources.table import SourceTable
from foretoken.domain.units import ceil_divide

# Rows of the vocabulary, padded so that every rank has a multiple of 128.
_VOCAB = 50257
_VOCAB_MULTIPLE = 128
_MLP_RATIO = 4
# Far above any model's, and their products still fit 64 bits.
_SIZE_MAX = 2**18
_COUNT_MAX = 2**40


@dataclass(frozen=True, slots=True)
class Shape:
    """The size columns of a file: `b` sequences of `l` tokens, `h` heads, width `dim`."""

    origin: SourceTable

    def read(self, column: str) -> Integers:
        """Return a column of sizes.

        Raises:
            InvalidRequestError: it is missing, or a cell is no whole number from 1 on.

        """
        return self._read(column, _SIZE_MAX)

    def count(self, column: str) -> Integers:
        """Return a column of elements or parameters, which may be many.

        Raises:
            InvalidRequestError: it is missing, or a cell is no whole number from 1 on.

        """
        return self._read(column, _COUNT_MAX)

    def _read(self, column: str, largest: int) -> Integers:
        values = self.origin.integers(column)
        is_legal = (values >= 1) & (values <= largest)
        if not is_legal.all():
            row = int(np.argmin(is_legal))
            raise self.origin.fault(row, f"{column}: {values[row]} is not from 1 to {largest}")
        return values

    @property
    def mp(self) -> Integers:
        """Ranks that share a layer."""
        return self.read("mp")

    @property
    def dim(self) -> Integers:
        """Width of the model."""
        return self.read("dim")

    @property
    def tokens(self) -> Integers:
        """Tokens of a micro batch."""
        return self.read("b") * self.read("l")

    @property
    def vocab(self) -> Integers:
        """Rows of the vocabulary on one rank, padding included."""
        rows: Integers = ceil_divide(_VOCAB, _VOCAB_MULTIPLE * self.mp) * _VOCAB_MULTIPLE
        return rows

    @property
    def heads(self) -> Integers:
        """Heads on one rank."""
        return self.split("h", self.read("h"), self.mp)

    @property
    def head_dim(self) -> Integers:
        """Features of a head."""
        return self.split("dim", self.dim, self.read("h"))

    def share(self, multiple: int) -> Integers:
        """Return one rank's share of `multiple` times the width."""
        return self.split("dim", multiple * self.dim, self.mp)

    def split(self, column: str, whole: Integers, parts: Integers) -> Integers:
        """Return the quotient.

        Raises:
            InvalidRequestError: a row does not divide evenly.

        """
        is_uneven = whole % parts != 0
        if is_uneven.any():
            row = int(np.argmax(is_uneven))
            raise self.origin.fault(row, f"{column}: {whole[row]} does not divide by {parts[row]}")
        return whole // parts


# The sampled loss is a mean of squares: in 16 bit its gradient, 2 / numel of a difference, is zero
# or has few bits left, and products of zeros take less power and run faster. Source: `nn.MSELoss`
# in Kernel_sampling/target_functions.py of GPUModeling25.
_ZERO_GRADIENTS = "gradients=zero"

Dims = Mapping[str, Any]
DimsFormula = Callable[[Shape], Dims]


@dataclass(frozen=True, slots=True)
class SampledOp:
    """One name of the source. `variant` and `backward_variant` say what the operator leaves open.

    `kernel` is the code that ran.
    """

    operator: str
    kernel: str
    dims: DimsFormula
    variant: str | None = None
    backward_variant: str | None = None


def _linear(
    kernel: str, n: Callable[[Shape], Any], k: Callable[[Shape], Any], *, has_bias: bool = False
) -> SampledOp:
    # A bias is part of the forward GEMM, and one more reduction in the backward pass.
    return SampledOp(
        "gemm",
        kernel,
        lambda s: {"m": s.tokens, "n": n(s), "k": k(s)},
        backward_variant=f"bias=true;{_ZERO_GRADIENTS}" if has_bias else _ZERO_GRADIENTS,
    )


def _wide(shape: Shape) -> Dims:
    return {"num_tokens": shape.tokens, "hidden": shape.dim}


def _matrices(shape: Shape) -> Integers:
    return shape.read("b") * shape.heads


def _batched(kernel: str, n: str, k: str) -> SampledOp:
    def dims(shape: Shape) -> Dims:
        sizes = {"length": shape.read("l"), "head_dim": shape.head_dim}
        return {"batch": _matrices(shape), "m": sizes["length"], "n": sizes[n], "k": sizes[k]}

    return SampledOp("batched_gemm", kernel, dims, backward_variant=_ZERO_GRADIENTS)


def _softmax_dims(shape: Shape) -> Dims:
    return {"num_rows": _matrices(shape) * shape.read("l"), "width": shape.read("l")}


def _gelu_dims(shape: Shape) -> Dims:
    return {"num_tokens": shape.tokens, "intermediate": shape.share(_MLP_RATIO)}


def _attention_dims(shape: Shape) -> Dims:
    # Every query sees every key: the call leaves `causal` at false.
    heads = shape.heads
    return {
        "num_seqs": shape.read("b"),
        "q_tokens": shape.tokens,
        "kv_tokens": shape.tokens,
        "score_pairs": shape.tokens * shape.read("l"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": shape.head_dim,
    }


def _rope_dims(shape: Shape) -> Dims:
    heads = shape.heads
    return {
        "num_tokens": shape.tokens,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": shape.head_dim,
    }


def _mask_dims(shape: Shape) -> Dims:
    length = shape.read("l")
    return {"num_matrices": _matrices(shape), "q_len": length, "kv_len": length}


def _encoder_params(shape: Shape) -> Integers:
    """Return the parameters of one layer on one rank: two norms and four linear layers."""
    dim, mp = shape.dim, shape.mp
    norms = 2 * 2 * dim
    attention = (dim + 1) * (3 * dim // mp) + (dim // mp) * dim
    params: Integers = norms + attention + 2 * dim * (_MLP_RATIO * dim // mp)
    return params


def _stage(extra: Callable[[Shape], Any], num_extra_tensors: int) -> SampledOp:
    # Two weights in each norm, weight and bias in the first linear layer, a weight in the others.
    tensors_per_encoder = 9

    def dims(shape: Shape) -> Dims:
        encoders = shape.read("encoders")
        return {
            "num_params": encoders * _encoder_params(shape) + extra(shape),
            "num_tensors": encoders * tensors_per_encoder + num_extra_tensors,
        }

    # Every call has a new optimizer, which makes its moments in the step that is timed.
    return SampledOp("fused_adam", "deepspeed_fused_adam", dims, variant="step=first")


# Variants of both passes.
_EAGER = ("form=eager", "form=eager")

SAMPLED_OPS: Mapping[str, SampledOp] = {
    "linear1": _linear("aten::addmm", lambda s: s.share(3), lambda s: s.dim, has_bias=True),
    "linear2": _linear("aten::mm", lambda s: s.dim, lambda s: s.share(1)),
    "linear3": _linear("aten::mm", lambda s: s.share(_MLP_RATIO), lambda s: s.dim),
    "linear4": _linear("aten::mm", lambda s: s.dim, lambda s: s.share(_MLP_RATIO)),
    "linear_final": _linear("aten::mm", lambda s: s.vocab, lambda s: s.dim),
    "baddbmm": _batched("aten::baddbmm", "length", "head_dim"),
    "bmm": _batched("aten::bmm", "head_dim", "length"),
    "softmax": SampledOp("softmax", "aten::softmax", _softmax_dims),
    "ScaledUpperTriangMaskedSoftmax": SampledOp(
        "causal_softmax",
        "megatron_scaled_upper_triang_masked_softmax",
        lambda s: {"num_matrices": _matrices(s), "length": s.read("l")},
    ),
    # The scores are a view; their gradient is copied before and after it is masked.
    "fillmask": SampledOp(
        "masked_fill", "aten::masked_fill_", _mask_dims, backward_variant="input=view"
    ),
    "flash_atten": SampledOp(
        "attention_prefill", "flash_attn", _attention_dims, "mask=none", "mask=none"
    ),
    # Chains of kernels, not one.
    "RoPE": SampledOp("rope", "torch_jit", _rope_dims, *_EAGER),
    "layernorm": SampledOp("layer_norm", "aten::layer_norm", _wide),
    "RMSlayernorm": SampledOp("rms_norm", "torch_eager", _wide, *_EAGER),
    "res_add": SampledOp("residual_add", "aten::add", _wide),
    "gelu": SampledOp("gelu", "aten::gelu", _gelu_dims),
    "embedding": SampledOp(
        "embedding", "aten::embedding", lambda s: {**_wide(s), "vocab": s.vocab}
    ),
    # One rank's part of the loss; the sums over ranks between are left out.
    "parallel_cross_entropy_128": SampledOp(
        "cross_entropy",
        "megatron_vocab_parallel_cross_entropy",
        lambda s: {"num_tokens": s.tokens, "vocab": s.vocab},
    ),
    "firstStage_optimizer": _stage(lambda s: s.vocab * s.dim, 1),
    "middleStage_optimizer": _stage(lambda _: 0, 0),
    # The script divides the head by the degree once more than the vocabulary is.
    "lastStage_optimizer": _stage(lambda s: 2 * s.dim + s.dim * (s.vocab // s.mp), 3),
    "optimizer": SampledOp(
        operator="fused_adam",
        dims=lambda s: {
            "num_params": s.count("params"),
            "num_tensors": s.read("param_tensors"),
        },
        kernel="unpublished",
        variant="step=unknown",
    ),
}

# Name of a collective -> operator, and what of a message `shape` elements are: the tensor of one
# rank, or one shard of a gathered one. Source: `NCCL_sampling/nccl_functions.py`.
COLLECTIVES: Mapping[str, tuple[str, bool]] = {
    "allreduce": ("all_reduce", False),
    "allgather": ("all_gather", True),
    "reducescatter": ("reduce_scatter", False),
    "p2p": ("send_recv", False),
}
