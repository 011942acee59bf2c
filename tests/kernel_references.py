"""What each operator computes, written plainly and run in float64; and how far off a kernel is.

Attention has its own. Draws at random (`dropout`, `sampler`) have no one right answer: they are in
`DRAWN`, and tested by what they draw.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from recurrence_references import RECURRENCES

from foretoken.domain.measurements.estimate import DType
from foretoken.profiler.expert_rows import share_rows
from foretoken.profiler.kernel import TORCH_DTYPES, Kernel, TensorFactory

DRAWN = ("dropout", "sampler")
# How operators begin that have references of their own.
ATTENTION = ("attention", "compressed_attention", "dsa", "mla", "msa", "pooled_attention")
# Rounding of one result, relative in the norm; inputs are the same to the bit.
TOLERANCE = {
    DType.FP32: 1e-5,
    DType.TF32: 2e-3,
    DType.FP16: 1e-3,
    DType.BF16: 1e-2,
    # Products of 8-bit numbers come out in bf16.
    DType.FP8: 1e-2,
    DType.INT8: 0.0,
}
# Half a step of a number with three bits after the point.
_FP8_ROUNDING = 2**-4

_Dims = Mapping[str, int]
_Result = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """An operator's result from its inputs in float64.

    `changed` are inputs that the kernel overwrites: the result is what they become. `backward` is
    what the backward pass goes back through, where that is another function.
    """

    dims: _Dims
    compute: Callable[..., _Result]
    changed: tuple[int, ...] = ()
    backward: Callable[..., _Result] | None = None
    tolerance: float = 0.0


_ROWS = {"num_tokens": 6, "hidden": 32}
_MLP = {"num_tokens": 6, "intermediate": 32}
_FLAT = {"num_params": 96}
_PRODUCT = {"m": 32, "n": 48, "k": 64}
_GROUPS = {"num_groups": 3, "m": 29, "n": 32, "k": 16}
_EXPERTS = {
    "num_tokens": 9,
    "top_k": 2,
    "num_experts": 8,
    "num_active_experts": 4,
    "hidden": 16,
    "intermediate": 32,
}
_LOCAL_EXPERTS = {**_EXPERTS, "num_local_experts": 5, "num_local_pairs": 11}
_ROUTED = {"num_tokens": 6, "top_k": 2, "hidden": 16}
_HEADS = {"num_tokens": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return _silu(x[..., :half]) * x[..., half:]


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _softmax(x: torch.Tensor) -> torch.Tensor:
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def _causal_softmax(scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return _softmax((scores * 0.5).masked_fill(hidden, -1e300))


def _rope(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> _Result:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        left = first * cos[..., :half] - second * sin[..., :half]
        right = second * cos[..., half:] + first * sin[..., half:]
        return torch.cat((left, right), dim=-1)

    return rotate(query), rotate(key)


def _rope_in_place(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor
) -> _Result:
    """Rotate by the positions in order, whose cosines lie before their sines in a table."""
    heads = [x.view(len(x), -1, table.shape[-1]) for x in (query, key)]
    cos, sin = (half.repeat(1, 2).unsqueeze(1) for half in table.chunk(2, dim=-1))
    return tuple(x.flatten(1) for x in _rope(heads[0], heads[1], cos, sin))


def _eager_rope(*inputs: torch.Tensor) -> _Result:
    return tuple(x.unsqueeze(0).transpose(1, 2) for x in _rope(*inputs))


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(targets), device=targets.device)
    return -_softmax(logits).log()[rows, targets].mean()


def _shard_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    wide = logits - logits.detach().amax(-1, keepdim=True)
    picked = [
        row[target] if target < len(row) else 0 * row[0]
        for row, target in zip(wide, targets.tolist(), strict=True)
    ]
    return wide.exp().sum(-1).log() - torch.stack(picked)


def _grouped(routing: str) -> Callable[..., torch.Tensor]:
    def compute(x: torch.Tensor, weights: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if len(others) > 1:
            x, weights = x * others[0].unsqueeze(-1), weights * others[1].unsqueeze(-1)
        sizes = share_rows(_GROUPS["m"], _GROUPS["num_groups"], routing)
        owners = [group for group, size in enumerate(sizes) for _ in range(size)]
        return torch.stack([weights[owner] @ row for owner, row in zip(owners, x, strict=True)])

    return compute


def _grouped_wgrad(routing: str) -> Callable[..., torch.Tensor]:
    def compute(x: torch.Tensor, gradient: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        sizes = share_rows(_GROUPS["m"], _GROUPS["num_groups"], routing)
        starts = [sum(sizes[:group]) for group in range(len(sizes))]
        return torch.stack(
            [
                torch.einsum("rn,rk->nk", gradient[start : start + size], x[start : start + size])
                for start, size in zip(starts, sizes, strict=True)
            ]
        )

    return compute


def _experts(num_rows: int, routing: str) -> Callable[..., torch.Tensor]:
    def compute(
        x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        if len(others) > 1:
            _, *scales = (scale.unsqueeze(-1) for scale in others)
            x, up, down = x * scales[0], up * scales[1], down * scales[2]
        sizes = share_rows(num_rows, _EXPERTS["num_active_experts"], routing, cap=9)
        owners = [expert for expert, size in enumerate(sizes) for _ in range(size)]
        return torch.stack(
            [down[owner] @ _silu_mul(up[owner] @ row) for owner, row in zip(owners, x, strict=True)]
        )

    return compute


def _top_k(logits: torch.Tensor) -> _Result:
    probabilities = _softmax(logits)
    order = sorted_places(probabilities)[:, :3]
    picked = probabilities.gather(-1, order)
    return picked / picked.sum(-1, keepdim=True), order


def sorted_places(values: torch.Tensor) -> torch.Tensor:
    """Return the places of each row's values, the largest first."""
    rows = [sorted(zip(row, range(len(row)), strict=True))[::-1] for row in values.tolist()]
    return torch.tensor([[place for _, place in row] for row in rows])


def _permute(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[place] for place in order.tolist()])


def _unpermute(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    places = order.view(-1, _ROUTED["top_k"]).tolist()
    return torch.stack([sum(x[place] for place in pair) for pair in places])


def _written(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> _Result:
    for place, slot in enumerate(slots.tolist()):
        keys[slot], values[slot] = key[place], value[place]
    return keys, values


def _swapped(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    for block in range(len(source) // 2):
        target[2 * block + 1] = source[2 * block]
    return target


def _adamw(_: torch.Tensor, gradient: torch.Tensor, *state: torch.Tensor) -> _Result:
    master, first, second, _step = state
    return _adam_update(master * (1 - 1e-4 * 0.1), gradient, (first, second), (0.95, 1e-4))


def _adam(parameter: torch.Tensor, gradient: torch.Tensor, *state: torch.Tensor) -> _Result:
    return _adam_update(parameter, gradient, (state[0], state[1]), (0.999, 1e-3))


def _adam_update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    rates: tuple[float, float],
) -> _Result:
    """Return the second step of Adam, with the decay and the step size in `rates`."""
    decay, step_size = rates
    first = 0.9 * moments[0] + 0.1 * gradient
    second = decay * moments[1] + (1 - decay) * gradient**2
    move = (first / (1 - 0.9**2)) / ((second / (1 - decay**2)).sqrt() + 1e-8)
    return parameter - step_size * move, first, second


def _scaled_conversion(*, is_per_token: bool) -> Callable[[torch.Tensor], _Result]:
    def compute(x: torch.Tensor) -> _Result:
        largest = x.abs().amax(-1, keepdim=True) if is_per_token else x.abs().amax()
        return x / (largest / 448), largest / 448

    return compute


def _gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.einsum("mk,nk->mn", x, weight)


def _scaled_gemm(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    return _gemm(x, weight) * x_scale * weight_scale


_NAMED = ("", "routing=balanced", "routing=power_law_1.01", "routing=power_law_1.2")

_REFERENCES: dict[str, Reference] = {
    "adam": Reference(dims=_FLAT, compute=_adamw, changed=(2, 3, 4)),
    "add_rms_norm": Reference(
        dims=_ROWS, compute=lambda x, residual, w: (_rms(x + residual, w), x + residual)
    ),
    "batched_gemm": Reference(
        dims={"batch": 2, "m": 3, "n": 5, "k": 8},
        compute=lambda a, b: torch.einsum("bmk,bkn->bmn", a, b),
    ),
    "bias_add": Reference(dims=_ROWS, compute=lambda x, bias: x + bias),
    "buffer_copy": Reference(dims=_FLAT, compute=lambda x: x),
    "cast": Reference(dims=_FLAT, compute=lambda x: x),
    "cast direction=narrow": Reference(dims=_FLAT, compute=lambda x, _: x),
    "causal_softmax": Reference(dims={"num_matrices": 2, "length": 8}, compute=_causal_softmax),
    "copy": Reference(dims=_ROWS, compute=lambda x: x.transpose(0, 1)),
    "cross_entropy": Reference(dims={"num_tokens": 6, "vocab": 40}, compute=_loss),
    "cross_entropy vocab=shard": Reference(
        dims={"num_tokens": 6, "vocab": 40}, compute=_shard_loss
    ),
    "embedding": Reference(dims={**_ROWS, "vocab": 9}, compute=lambda ids, table: table[ids]),
    "fill": Reference(dims=_FLAT, compute=lambda x: 0 * x),
    "fused_adam": Reference(dims={**_FLAT, "num_tensors": 3}, compute=_adam, changed=(0, 2, 3)),
    "gelu": Reference(dims=_MLP, compute=_gelu),
    "gelu form=eager": Reference(dims=_MLP, compute=_gelu),
    "gemm": Reference(dims=_PRODUCT, compute=_gemm),
    "gemm torch._scaled_mm": Reference(dims=_PRODUCT, compute=_scaled_gemm),
    "gemm accumulate=fp32": Reference(dims=_PRODUCT, compute=_gemm),
    "gemm layout=nn": Reference(dims=_PRODUCT, compute=lambda a, b: a.mm(b)),
    "gemm layout=nt": Reference(dims=_PRODUCT, compute=lambda a, b: a.t().mm(b)),
    "gemm quant=int8_wo": Reference(
        dims=_PRODUCT, compute=lambda x, weight, scales: _gemm(x, weight * scales[:, None])
    ),
    "gradient_accumulation": Reference(dims=_FLAT, compute=lambda a, b: a + b, changed=(0,)),
    "gradient_norm": Reference(dims=_FLAT, compute=lambda x, w: x.square().sum().sqrt() * w[0]),
    **{
        f"grouped_gemm {variant}".strip(): Reference(
            dims=_GROUPS, compute=_grouped(variant.removeprefix("routing="))
        )
        for variant in _NAMED
    },
    **{
        f"grouped_gemm_wgrad {variant}".strip(): Reference(
            dims=_GROUPS, compute=_grouped_wgrad(variant.removeprefix("routing="))
        )
        for variant in _NAMED
    },
    "kv_cache_write": Reference(
        dims={"num_tokens": 5, "num_kv_heads": 2, "head_dim": 8}, compute=_written, changed=(0, 1)
    ),
    "kv_cache_write kv=fp8": Reference(
        dims={"num_tokens": 5, "num_kv_heads": 2, "head_dim": 8},
        compute=_written,
        changed=(0, 1),
        tolerance=_FP8_ROUNDING,
    ),
    **{
        f"kv_swap direction={direction}": Reference(
            dims={"num_blocks": 3, "block_elements": 64}, compute=_swapped, changed=(1,)
        )
        for direction in ("h2d", "d2h", "h2h")
    },
    "layer_norm": Reference(dims=_ROWS, compute=_layer_norm),
    "masked_fill": Reference(
        dims={"num_matrices": 2, "q_len": 4, "kv_len": 4},
        compute=lambda scores, hidden: scores.masked_fill(hidden, 0.0),
    ),
    **{
        f"moe_experts {variant}".strip(): Reference(
            dims=_EXPERTS, compute=_experts(18, variant.removeprefix("routing="))
        )
        for variant in _NAMED
    },
    **{
        f"moe_local_experts {variant}".strip(): Reference(
            dims=_LOCAL_EXPERTS, compute=_experts(11, variant.removeprefix("routing="))
        )
        for variant in _NAMED
    },
    "moe_permute": Reference(dims=_ROUTED, compute=_permute),
    "moe_topk": Reference(
        dims={"num_tokens": 6, "num_experts": 8, "top_k": 3},
        compute=_top_k,
        backward=lambda logits: _top_k(logits)[0],
    ),
    "moe_unpermute": Reference(dims=_ROUTED, compute=_unpermute),
    "norm_upcast": Reference(dims=_ROWS, compute=lambda x: x),
    "product": Reference(dims=_MLP, compute=lambda x, gate: x * gate),
    "quantize": Reference(
        dims=_ROWS,
        compute=lambda x: (x, x.t()),
        backward=lambda x: x,
        tolerance=_FP8_ROUNDING,
    ),
    "quantize scale=tensor": Reference(
        dims=_ROWS, compute=_scaled_conversion(is_per_token=False), tolerance=_FP8_ROUNDING
    ),
    "quantize scale=token": Reference(
        dims=_ROWS, compute=_scaled_conversion(is_per_token=True), tolerance=_FP8_ROUNDING
    ),
    "residual_add": Reference(
        dims=_ROWS, compute=lambda x, residual: x + residual, backward=lambda x, _: (1 * x, 1 * x)
    ),
    "rms_norm": Reference(dims=_ROWS, compute=_rms),
    "rms_norm form=eager": Reference(dims=_ROWS, compute=_rms),
    "rope": Reference(dims=_HEADS, compute=_rope),
    "rope flashinfer.rope.apply_rope_with_cos_sin_cache_inplace": Reference(
        dims={**_HEADS, "head_dim": 64}, compute=_rope_in_place, changed=(1, 2)
    ),
    "rope form=eager": Reference(dims=_HEADS, compute=_eager_rope),
    "silu": Reference(dims=_MLP, compute=_silu),
    "silu_mul": Reference(dims=_MLP, compute=_silu_mul),
    "softmax": Reference(dims={"num_rows": 6, "width": 40}, compute=_softmax),
    "unscale": Reference(dims=_FLAT, compute=lambda x, factor: x * factor[0], changed=(0,)),
    **{
        name: Reference(dims=dims, compute=compute) for name, (dims, compute) in RECURRENCES.items()
    },
}


def reference_of(kernel: Kernel) -> Reference:
    """Return what a kernel must compute."""
    by_source = _REFERENCES.get(f"{kernel.operator} {kernel.source}")
    reference = by_source or _REFERENCES[f"{kernel.operator} {kernel.variant}".strip()]
    if kernel.operator.startswith("moe") and DType.FP8 in kernel.dtypes:
        # What is between its two products is rounded, too.
        return replace(reference, tolerance=_FP8_ROUNDING)
    return reference


def forward_error(kernel: Kernel, dtype: DType, device: torch.device) -> float:
    """Return how far a kernel's results are from its reference, over what is allowed."""
    reference, inputs = _inputs_of(kernel, dtype, device)
    expected = _as_tuple(reference.compute(*map(_in_float64, inputs)))
    with torch.no_grad():
        found = _as_tuple(kernel.bind(reference.dims)(*inputs))
    if reference.changed:
        found = tuple(inputs[place] for place in reference.changed)
    return _largest_error(found, expected, reference.tolerance + TOLERANCE[dtype])


def backward_error(kernel: Kernel, dtype: DType, device: torch.device) -> float:
    """Return how far a kernel's gradients are from those of its reference, over what is allowed."""
    reference, inputs = _inputs_of(kernel, dtype, device)
    wide = [_in_float64(tensor) for tensor in inputs]
    leaves, wide_leaves = (
        [tensors[place].requires_grad_() for place in kernel.differentiable]
        for tensors in (inputs, wide)
    )
    bind = kernel.bind_backward or kernel.bind
    outputs = _as_tuple(bind(reference.dims)(*inputs))
    compute = reference.backward or reference.compute
    wide_outputs = _as_tuple(compute(*wide))
    gradients = [torch.randn_like(output) for output in outputs]
    found = torch.autograd.grad(outputs, leaves, gradients)
    expected = torch.autograd.grad(
        wide_outputs, wide_leaves, [_in_float64(gradient) for gradient in gradients]
    )
    return _largest_error(found, expected, TOLERANCE[dtype])


def _inputs_of(
    kernel: Kernel, dtype: DType, device: torch.device
) -> tuple[Reference, list[torch.Tensor]]:
    reference = reference_of(kernel)
    return reference, list(kernel.make_inputs(reference.dims, _tensors(device, dtype)))


@cache
def _tensors(device: torch.device, dtype: DType) -> TensorFactory:
    return TensorFactory(device, TORCH_DTYPES[dtype], seed=3)


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, on the CPU; indices and masks stay what they are."""
    is_number = tensor.is_floating_point() or tensor.dtype is torch.int8
    copied = tensor.detach().cpu().clone()
    return copied.to(torch.float64) if is_number else copied


def _as_tuple(result: _Result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _largest_error(
    found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], allowed: float
) -> float:
    assert [tuple(tensor.shape) for tensor in expected] == [tuple(t.shape) for t in found]
    return max(
        _error(tensor.detach().cpu().to(torch.float64), wanted, allowed)
        for tensor, wanted in zip(found, expected, strict=True)
    )


def _error(found: torch.Tensor, expected: torch.Tensor, allowed: float) -> float:
    distance = float((found - expected).norm())
    if distance == 0.0:
        return 0.0
    return distance / max(float(expected.norm()) * allowed, 1e-300)
