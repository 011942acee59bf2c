"""What linear attention and state space operators share: a state per sequence that tokens update.

Prefill goes over the tokens of each sequence in chunks and leaves the state behind; decode reads
and writes it for each sequence. The state is fp32: recurrences lose what is small otherwise.
Source: `mamba_ssm_dtype` of Qwen3.5's, `mamba_ssm_cache_dtype` of Nemotron 3's configuration.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from foretoken.domain.operators.spec.operator import (
    Dim,
    Dims,
    FeatureFormula,
    OperatorSpec,
    Relation,
    dim_axes,
)
from foretoken.domain.operators.spec.sweep import pick, powers_of_two
from foretoken.domain.units import Quantity, ceil_divide

STATE_BYTES = 4
# Of a scan in chunks: the gradients of both factors of its products, and its states computed again.
# Source: flash-linear-attention, `ops/gated_delta_rule/chunk.py` and `ops/kda/chunk.py` (backward:
# `recompute_w_u_fwd`, `chunk_gated_delta_rule_fwd_h`); mamba, `ops/triton/ssd_combined.py`
# (`_mamba_chunk_scan_combined_bwd`: `_chunk_state_fwd`, `_state_passing_fwd`).
SCAN_BACKWARD_RATIO = 3.0
# Tokens of a chunk whose products with each other are kept. Source: as above, `chunk_size`.
SCAN_CHUNK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentWork:
    """The work of one token, and the state of one sequence.

    `token_flops` are those of the recurrence itself, the least there are; `token_elements` the
    values read and written in the row's format; `state_elements` those of the state, each of
    `state_bytes`, or in the row's format where that is None; `num_weights` are read once.
    `saved_elements` of a token are kept for the backward pass, whose work is `backward_work_ratio`
    times as much.
    """

    token_flops: Callable[[Dims], Quantity]
    token_elements: Callable[[Dims], Quantity]
    state_elements: Callable[[Dims], Quantity]
    state_bytes: int | None = STATE_BYTES
    num_weights: Callable[[Dims], Quantity] = lambda _: 0
    saved_elements: Callable[[Dims], Quantity]
    backward_work_ratio: float = SCAN_BACKWARD_RATIO


@dataclass(frozen=True, kw_only=True, slots=True)
class SweptSizes:
    """The sizes that a sweep takes: a small one to try, those of published models on a rank."""

    quick: Mapping[str, int]
    full: tuple[Mapping[str, int], ...]

    def sweep(self, quick: bool, *, is_decode: bool) -> Iterator[Mapping[str, int]]:
        """Yield batches of equal sequences of each size; of one token each when decoding."""
        lengths = pick(quick, (16, 100), powers_of_two(64, 32768))
        batches = [(seqs, length) for seqs in (1, 4) for length in lengths]
        if is_decode:
            batches = [(seqs, 1) for seqs in pick(quick, (1, 4, 16), powers_of_two(1, 1024))]
        for sizes in (self.quick,) if quick else self.full:
            for num_seqs, length in batches:
                yield {"num_seqs": num_seqs, "num_tokens": num_seqs * length, **sizes}


def recurrent_operator(
    name: str, summary: str, *, sizes: tuple[Dim, ...], work: RecurrentWork, swept: SweptSizes
) -> OperatorSpec:
    """Return an operator over `num_tokens` tokens of `num_seqs` sequences.

    A name that ends in `decode` reads the state as well as it writes it.
    """
    is_decode = name.endswith("decode")
    num_passes = 2 if is_decode else 1

    def moved_bytes(d: Dims, element_bytes: float) -> Quantity:
        elements = d["num_tokens"] * work.token_elements(d) + work.num_weights(d)
        state_bytes = element_bytes if work.state_bytes is None else work.state_bytes
        state = num_passes * d["num_seqs"] * work.state_elements(d)
        return elements * element_bytes + state * state_bytes

    costs: Mapping[str, FeatureFormula] = {
        "sequences": lambda d, _: d["num_seqs"],
        "tokens": lambda d, _: d["num_tokens"],
        "length": _mean_length,
        "chain": lambda d, _: _num_chunks(d),
        "token_elements": lambda d, _: d["num_tokens"] * work.token_elements(d),
        "state": lambda d, _: d["num_seqs"] * work.state_elements(d),
        "chunk_states": lambda d, _: d["num_seqs"] * _num_chunks(d) * work.state_elements(d),
        "token_states": lambda d, _: d["num_tokens"] * work.state_elements(d),
    }
    return OperatorSpec(
        name=name,
        summary=summary,
        group="attention",
        dims=(
            Dim("num_seqs", "sequences in the batch"),
            Dim("num_tokens", "new tokens, summed over sequences"),
            *sizes,
        ),
        flops=lambda d, _: d["num_tokens"] * work.token_flops(d),
        moved_bytes=moved_bytes,
        features={
            "length_mean": _mean_length,
            "tokens_per_sm": lambda d, num_sms: d["num_tokens"] / num_sms,
            "states_per_sm": lambda d, num_sms: (
                d["num_seqs"] * work.state_elements(d) / 2**14 / num_sms
            ),
        },
        costs=costs,
        axes={
            "num_seqs": lambda d, _: d["num_seqs"],
            "length_mean": _mean_length,
            **dim_axes(*(dim.name for dim in sizes)),
        },
        relations=(Relation("num_seqs", "num_tokens"),),
        sweep=lambda quick: swept.sweep(quick, is_decode=is_decode),
        num_weights=work.num_weights,
        # A decoded token is not trained on.
        backward_work_ratio=0.0 if is_decode else work.backward_work_ratio,
        saved_elements=lambda d: (not is_decode) * d["num_tokens"] * work.saved_elements(d),
    )


def _mean_length(d: Dims, _num_sms: int) -> Quantity:
    return d["num_tokens"] / d["num_seqs"]


def _num_chunks(d: Dims) -> Quantity:
    return ceil_divide(d["num_tokens"] / d["num_seqs"], SCAN_CHUNK)
