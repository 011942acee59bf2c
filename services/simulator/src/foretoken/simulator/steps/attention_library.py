"""How fast the attention kernels that trainers call are, where others published it.

Servers' kernels are measured with paged keys and values, and are other kernels: a trainer on Hopper
calls cuDNN or FlashAttention 2, while what is measured there of servers is FlashAttention 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import Dims
from foretoken.simulator.grid import Floats

# How far such figures are apart: FlashAttention 3 without a mask at 8,192 tokens is at 646 TFLOP/s
# in its paper and at 614 in PyTorch's benchmark of it (pytorch/benchmark, pull request 2391), at
# 512 tokens at 467 and 430.
PUBLISHED_SPREAD_LOG = 0.1
_NARROW_HEAD = 64


@dataclass(frozen=True, slots=True)
class _Curves:
    """TFLOP/s in 16 bit by the length of a sequence, heads of 128.

    `backward` is without a mask. `narrow_ratio` is how fast heads of 64 are compared with these.
    """

    causal: tuple[float, ...]
    full: tuple[float, ...]
    backward: tuple[float, ...]
    narrow_ratio: float
    narrow_backward_ratio: float


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_REFERENCE = "h100_sxm"
# Source: Shah et al., FlashAttention-3, arXiv 2407.08608, figures 5 and 6: H100 80 GB SXM5, 16,384
# tokens in all, hidden 2,048. Ratios of heads of 64 are those at 8,192 tokens without a mask.
_HOPPER: Mapping[str, _Curves] = {
    "flash_2": _Curves(
        causal=(191, 260, 298, 319, 333, 335),
        full=(309, 350, 362, 368, 370, 370),
        backward=(214, 260, 291, 310, 318, 322),
        narrow_ratio=322 / 370,
        narrow_backward_ratio=287 / 318,
    ),
    "cudnn": _Curves(
        causal=(315, 410, 484, 518, 529, 539),
        full=(497, 574, 617, 609, 600, 595),
        backward=(305, 408, 465, 499, 518, 516),
        narrow_ratio=412 / 600,
        narrow_backward_ratio=432 / 518,
    ),
    "flash_3": _Curves(
        causal=(292, 423, 521, 579, 602, 616),
        full=(467, 565, 625, 638, 646, 648),
        backward=(316, 424, 501, 542, 559, 561),
        narrow_ratio=496 / 646,
        narrow_backward_ratio=472 / 559,
    ),
}
_PUBLISHED: Mapping[str, Mapping[str, _Curves]] = {"hopper": _HOPPER}


def has_published(library: str, device: DeviceSpec, dtype: DType) -> bool:
    """Tell whether a library's attention was published for devices like this one."""
    is_half = dtype in (DType.BF16, DType.FP16)
    return is_half and library in _PUBLISHED.get(device.architecture, {})


def published_flops_per_s(library: str, device: DeviceSpec, phase: Phase, dims: Dims) -> Floats:
    """Return what a library's `attention_prefill` reaches, for every row of columns.

    A mask costs the backward pass what it costs the forward pass. Devices of one architecture are
    apart by their peaks.
    """
    curves = _PUBLISHED[device.architecture][library]
    queries = np.asarray(dims["q_tokens"], dtype=np.float64)
    keys = np.asarray(dims["kv_tokens"], dtype=np.float64)
    num_seqs = np.asarray(dims["num_seqs"], dtype=np.float64)
    visible = np.asarray(dims["score_pairs"], dtype=np.float64) * num_seqs / (queries * keys)
    at = np.log2(queries / num_seqs)

    def read(curve: tuple[float, ...]) -> Floats:
        return np.interp(at, np.log2(_LENGTHS), curve)

    # Half of all pairs are behind a causal mask, all of them behind none.
    masked = np.clip(2 * (1 - visible), 0, 1)
    full, causal = read(curves.full), read(curves.causal)
    rate = full + masked * (causal - full)
    narrow = curves.narrow_ratio
    if phase is Phase.BACKWARD:
        rate, narrow = read(curves.backward) * rate / full, curves.narrow_backward_ratio
    rate = rate * np.where(np.asarray(dims["head_dim"]) <= _NARROW_HEAD, narrow, 1.0)
    peak = device.peak_flops(DType.BF16) / find_device(_REFERENCE).peak_flops(DType.BF16)
    return np.asarray(rate * 1e12 * peak, dtype=np.float64)
