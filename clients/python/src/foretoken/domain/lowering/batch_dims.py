"""Dimensions of a batch as operators have them: whole, and of what a query sees of it."""

import dataclasses

from foretoken.domain.lowering.graph import BatchShape, DecodeShape, PrefillShape
from foretoken.domain.operators.attention_decode_window import most_visible
from foretoken.domain.units import Quantity, smaller

Part = PrefillShape | DecodeShape


def parts_of(shape: BatchShape) -> list[tuple[str, Part]]:
    """Return the prefilling and the decoding part of a batch by name, those there are."""
    named: list[tuple[str, Part | None]] = [("prefill", shape.prefill), ("decode", shape.decode)]
    return [(name, part) for name, part in named if part is not None]


def dims_of(part: Part) -> dict[str, Quantity]:
    """Return the dimensions of a part."""
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def state_dims(part: Part) -> dict[str, Quantity]:
    """Return the sequences and new tokens of a part, which recurrent layers see."""
    tokens = part.num_seqs if isinstance(part, DecodeShape) else part.q_tokens
    return {"num_seqs": part.num_seqs, "num_tokens": tokens}


def window_dims(part: Part, window: int) -> dict[str, Quantity]:
    """Return the batch as window operators see it, sequences but the longest as equally long."""
    if isinstance(part, DecodeShape):
        visible = visible_tokens(part, window)
        return {**dims_of(part), "visible_tokens": visible, "window": window}
    context = (part.kv_tokens - part.q_tokens) // part.num_seqs
    return {
        "num_seqs": part.num_seqs,
        "q_tokens": part.q_tokens,
        "kv_tokens": part.q_tokens + part.num_seqs * smaller(context, window - 1),
        "score_pairs": window_pairs(part, window),
        "window": window,
    }


def chunk_dims(part: Part, chunk: int) -> dict[str, Quantity]:
    """Return whole sequences, equally long, as operators see their chunks: each a sequence."""
    dims = dims_of(part)
    length = dims["q_tokens"] // dims["num_seqs"]
    whole, rest = length // chunk, length % chunk
    pairs = whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2
    num_chunks = whole + (rest > 0)
    return {
        **dims,
        "num_seqs": dims["num_seqs"] * num_chunks,
        "score_pairs": dims["num_seqs"] * pairs,
    }


def visible_tokens(part: DecodeShape, window: int) -> Quantity:
    """Return the tokens that queries see of the last so many, summed over sequences."""
    return most_visible({**dims_of(part), "window": window})


def window_pairs(part: PrefillShape, window: int) -> Quantity:
    """Return the pairs of a query and a key of the last so many, sequences equally long."""
    q_len = part.q_tokens // part.num_seqs
    context = (part.kv_tokens - part.q_tokens) // part.num_seqs
    # Tokens that still see all of their context; the others see a full window.
    in_window = smaller(_positive(window - context), q_len)
    pairs = in_window * context + in_window * (in_window + 1) // 2 + (q_len - in_window) * window
    return part.num_seqs * pairs


def selected_dims(part: Part, num_selected: int) -> dict[str, Quantity]:
    """Return the batch of attention to at most so many tokens that a query picks."""
    if isinstance(part, DecodeShape):
        return {**dims_of(part), "selected_tokens": visible_tokens(part, num_selected)}
    return {**dims_of(part), "selected_pairs": window_pairs(part, num_selected)}


def _positive(value: Quantity) -> Quantity:
    return value - smaller(value, 0 * value)
