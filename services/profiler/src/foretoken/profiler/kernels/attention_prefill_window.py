"""Causal attention of new tokens over a sliding window, sequences equally long or not."""

from foretoken.profiler.attention.batch import attention_kernel, read_prefill
from foretoken.profiler.attention.codes import WINDOW_CODES

KERNEL = attention_kernel("attention_prefill_window", read_prefill, WINDOW_CODES, has_backward=True)
