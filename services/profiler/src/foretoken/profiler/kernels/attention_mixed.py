"""A batch of prefills and decodes: one kernel where it takes both, else one for each."""

from dataclasses import replace

from foretoken.profiler.attention.batch import (
    AttentionCode,
    attention_kernel,
    dense_inputs,
    read_mixed,
)
from foretoken.profiler.attention.codes import MIXED_CODES


def _named_twice(code: AttentionCode) -> AttentionCode:
    """Say in the name of code for equal sequences that it runs for each of the two batches."""
    return replace(code, source=f"{code.source} x2") if code.make_inputs is dense_inputs else code


KERNEL = attention_kernel("attention_mixed", read_mixed, [_named_twice(c) for c in MIXED_CODES])
