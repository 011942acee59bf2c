"""Attention of one new token per sequence over a sliding window, equally full or not.

The inputs hold the windows alone.
"""

from foretoken.profiler.attention.batch import attention_kernel, read_window_decode
from foretoken.profiler.attention.codes import DECODE_CODES

KERNEL = attention_kernel("attention_decode_window", read_window_decode, DECODE_CODES)
