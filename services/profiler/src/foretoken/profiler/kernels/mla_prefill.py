"""Latent attention of new tokens on unpacked keys and values, sequences equally long or not.

Keys come whole, as attention kernels take them: each head's has its copy of the shared part.
"""

from foretoken.profiler.attention.batch import attention_kernel, read_latent_prefill
from foretoken.profiler.attention.codes import LATENT_PREFILL_CODES

KERNEL = attention_kernel(
    "mla_prefill", read_latent_prefill, LATENT_PREFILL_CODES, has_backward=True
)
