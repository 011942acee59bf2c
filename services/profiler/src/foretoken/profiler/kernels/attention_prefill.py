"""Causal attention of new tokens over their context, sequences of equal or unequal length."""

from foretoken.profiler.attention.batch import attention_kernel, read_prefill
from foretoken.profiler.attention.codes import PREFILL_CODES

KERNEL = attention_kernel("attention_prefill", read_prefill, PREFILL_CODES, has_backward=True)
