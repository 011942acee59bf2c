"""The kernels of every operator of attention, the default of what is installed first."""

from foretoken.profiler.attention.flash import (
    FLASH_2,
    FLASH_2_PAGED,
    FLASH_3,
    FLASH_3_FP8,
    FLASH_3_PAGED,
    TORCH_FLASH_VARLEN,
    TORCH_FLASH_WIDE,
    TORCH_FLASH_WINDOW,
    TORCH_VARLEN,
)
from foretoken.profiler.attention.flashinfer import (
    FLASHINFER_DECODE,
    FLASHINFER_DECODE_FP8,
    FLASHINFER_PREFILL,
    FLASHINFER_PREFILL_FP8,
    FLASHINFER_RAGGED,
)
from foretoken.profiler.attention.sdpa import (
    BACKENDS,
    EQUAL,
    IN_BLOCKS,
    ON_CPU,
    ON_CPU_WINDOW,
    PADDED,
    PER_SEQUENCE,
    PER_SEQUENCE_IN_BLOCKS,
    on_cuda,
)

_TORCH_ON_CUDA = (
    on_cuda(EQUAL),
    TORCH_VARLEN,
    TORCH_FLASH_VARLEN,
    *BACKENDS,
    on_cuda(PER_SEQUENCE),
    on_cuda(PADDED),
)
# On Hopper vLLM takes flash-attn 3 before FlashInfer; elsewhere there is no flash-attn 3.
PREFILL_CODES = (
    *ON_CPU,
    FLASH_3,
    FLASHINFER_PREFILL,
    FLASH_2,
    *_TORCH_ON_CUDA,
    FLASHINFER_PREFILL_FP8,
    FLASH_3_FP8,
)
DECODE_CODES = (
    *ON_CPU,
    FLASH_3_PAGED,
    FLASHINFER_DECODE,
    FLASH_2_PAGED,
    *_TORCH_ON_CUDA,
    FLASHINFER_DECODE_FP8,
    FLASH_3_FP8,
)
MIXED_CODES = (
    *ON_CPU,
    FLASH_3_PAGED,
    FLASHINFER_PREFILL,
    FLASH_2,
    *_TORCH_ON_CUDA,
    FLASHINFER_PREFILL_FP8,
    FLASH_3_FP8,
)
WINDOW_CODES = (
    *ON_CPU_WINDOW,
    FLASH_3,
    FLASHINFER_PREFILL,
    FLASH_2,
    TORCH_FLASH_WINDOW,
    TORCH_VARLEN,
    TORCH_FLASH_VARLEN,
    on_cuda(IN_BLOCKS),
    on_cuda(PER_SEQUENCE_IN_BLOCKS),
    FLASHINFER_PREFILL_FP8,
)
LATENT_PREFILL_CODES = (
    *ON_CPU,
    FLASH_3,
    FLASHINFER_RAGGED,
    on_cuda(EQUAL),
    TORCH_FLASH_WIDE,
    *BACKENDS,
    on_cuda(PER_SEQUENCE),
    on_cuda(PADDED),
)
