"""Attention of one new token per sequence, contexts of equal or unequal length."""

from foretoken.profiler.attention.batch import attention_kernel, read_decode
from foretoken.profiler.attention.codes import DECODE_CODES

KERNEL = attention_kernel("attention_decode", read_decode, DECODE_CODES)
