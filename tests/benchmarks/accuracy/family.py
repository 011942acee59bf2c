"""The families of operators, what is asked of each, what peers reach and what we want.

Peers' errors are those of AIConfigurator's interpolation, of Vidur's random forests and of the
regressors that GPUModeling25 publishes, measured on the same sets with cuts of these kinds, not on
the very points drawn here; "miss" is no answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from accuracy.cut import (
    Cut,
    dimension,
    finest,
    hold_out_beyond,
    hold_out_groups,
    hold_out_octave,
    hold_out_random,
    hold_out_values,
    per_sequence,
)
from accuracy.line import Figure
from accuracy.source import AICONFIGURATOR, GPUMODELING, VIDUR_A30, Measurements, Source
from accuracy.table import MeasuredTable, split_into_tables
from foretoken.domain.operators.spec.operator import OperatorSpec

_HEADS = ("num_heads", "num_kv_heads", "head_dim")
_MODEL = ("hidden", "top_k", "num_experts")
_GROUP = ("devices_per_node", "num_nodes")
_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "send_recv")
_EXCHANGE = "exchange="
# With fewer points there is nothing to leave out.
_MIN_POINTS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One way of leaving points out; `cut` is None where it depends on the operator."""

    split: str
    cut: Cut | None
    peer: str = ""
    goal: Figure | None = None

    def cut_of(self, spec: OperatorSpec) -> Cut:
        """Return the cut for an operator: its own, or whole values of the finest dimension."""
        return self.cut or hold_out_values(finest(spec))


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Operators asked alike; without operators, all of the source but collectives.

    Exchanges of tokens by kernels of their own are no library's: a family has those or the others.
    """

    name: str
    source: Source
    questions: tuple[Question, ...]
    operators: tuple[str, ...] = ()
    device: str = ""
    has_exchanges: bool = False

    def tables(self, measurements: Measurements) -> Iterator[MeasuredTable]:
        """Yield the tables of the family."""
        for operator in self.operators or self._computing_operators(measurements):
            rows = measurements.read(self.source, operator, self.device)
            variants = pc.fill_null(rows["variant"], "")
            is_exchange = pc.starts_with(variants, _EXCHANGE)
            rows = rows.filter(pc.equal(is_exchange, self.has_exchanges))
            if rows.num_rows:
                yield from split_into_tables(rows, _MIN_POINTS)

    def _computing_operators(self, measurements: Measurements) -> list[str]:
        rows = measurements.read(self.source, device=self.device)
        found = np.unique(rows["operator"].to_pylist()).tolist()
        return [operator for operator in found if operator not in _COLLECTIVES]


def _ask(split: str, cut: Cut | None, peer: str, *goal: float) -> Question:
    return Question(split=split, cut=cut, peer=peer, goal=Figure(*goal) if goal else None)


def _gpumodeling_ops(name: str, device: str, *questions: Question) -> Family:
    return Family(name=name, source=GPUMODELING, device=device, questions=questions)


def _context(
    name: str, *operators: str, tokens: str = "q_tokens", heads: tuple[str, ...]
) -> Family:
    """Return a family asked as context attention is."""
    length = per_sequence(tokens)
    return Family(
        name=f"{name} context",
        source=AICONFIGURATOR,
        operators=operators,
        questions=(
            _ask("random", hold_out_random, "", 1.5, 3),
            _ask("whole heads", hold_out_groups(*heads), "", 1.9, 4),
            _ask("whole isl", hold_out_values(length), "", 4.5, 11),
            _ask("isl beyond", hold_out_beyond(length), "", 2.3, 5),
        ),
    )


def _generation(name: str, *operators: str, size: str, heads: tuple[str, ...]) -> Family:
    """Return a family asked as generation attention is, by what grows from step to step."""
    return Family(
        name=f"{name} generation",
        source=AICONFIGURATOR,
        operators=operators,
        questions=(
            _ask("random", hold_out_random, "", 2.2, 5),
            _ask("whole heads", hold_out_groups(*heads), "", 3, 7),
            _ask(f"whole {_SHORT[size]}", hold_out_values(dimension(size)), "", 8.5, 20),
            _ask(f"{_SHORT[size]} beyond", hold_out_beyond(dimension(size)), "", 3, 7),
        ),
    )


_SHORT = {"kv_tokens_max": "kv", "num_tokens": "tokens"}
_DELTA_HEADS = ("num_k_heads", "num_v_heads")


def _kernel(name: str, operator: str, size: str, configuration: str) -> Family:
    """Return a family of one kernel, asked as a matrix product is."""
    return Family(
        name=name,
        source=AICONFIGURATOR,
        operators=(operator,),
        questions=(
            _ask("random", hold_out_random, "", 3.0, 6.5),
            _ask("whole sizes", hold_out_values(dimension(size)), "", 3.8, 8.5),
            _ask(f"whole {configuration}", hold_out_groups(configuration), "", 3.5, 8),
            _ask("sizes beyond", hold_out_beyond(dimension(size)), "", 6.5, 16),
        ),
    )


# Blocks and kernels of models after DeepSeek-V3, by the goals of what they are nearest to.
_TODAY = (
    _context("MLA block", "mla_prefill_module", heads=("num_heads", "hidden")),
    _generation(
        "MLA block", "mla_decode_module", size="kv_tokens_max", heads=("num_heads", "hidden")
    ),
    _context("DSA", "dsa_prefill_module", heads=("num_heads", "hidden", "index_num_heads")),
    _generation(
        "DSA",
        "dsa_decode_module",
        size="kv_tokens_max",
        heads=("num_heads", "hidden", "index_num_heads"),
    ),
    _context(
        "CSA, HCA",
        "compressed_attention_prefill_module",
        heads=("num_heads", "hidden", "compress_ratio"),
    ),
    _generation(
        "CSA, HCA",
        "compressed_attention_decode_module",
        size="kv_tokens_max",
        heads=("num_heads", "hidden", "compress_ratio"),
    ),
    _context("pools", "pooled_attention_prefill_module", heads=("num_heads",)),
    _generation(
        "pools", "pooled_attention_decode_module", size="kv_tokens_max", heads=("num_heads",)
    ),
    _context("MSA", "msa_prefill_module", heads=("num_heads",)),
    _generation("MSA", "msa_decode_module", size="kv_tokens_max", heads=("num_heads",)),
    _context("gated delta", "gated_delta_prefill", tokens="num_tokens", heads=_DELTA_HEADS),
    _generation("gated delta", "gated_delta_decode", size="num_tokens", heads=_DELTA_HEADS),
    _context("KDA", "kda_prefill", tokens="num_tokens", heads=("num_heads",)),
    _generation("KDA", "kda_decode", size="num_tokens", heads=("num_heads",)),
    _context("causal conv", "causal_conv_prefill", tokens="num_tokens", heads=("channels",)),
    _generation("causal conv", "causal_conv_decode", size="num_tokens", heads=("channels",)),
    _context("encoder", "encoder_attention", tokens="num_tokens", heads=("num_heads", "head_dim")),
    _kernel("mHC before", "mhc_pre", "num_tokens", "hidden"),
    _kernel("mHC after", "mhc_post", "num_tokens", "hidden"),
    _kernel("quantize", "quantize", "num_tokens", "hidden"),
    _kernel("latent products", "batched_gemm", "m", "batch"),
)

FAMILIES = (
    Family(
        name="GEMM",
        source=AICONFIGURATOR,
        operators=("gemm",),
        questions=(
            _ask("random", hold_out_random, "AIC 8.1/18", 3.0, 6.5),
            _ask("whole m", hold_out_values(dimension("m")), "AIC 8.0/19", 3.8, 8.5),
            _ask("whole (n,k)", hold_out_groups("n", "k"), "AIC 8.9/21", 3.5, 8),
            _ask("m beyond", hold_out_beyond(dimension("m")), "AIC 25/60", 6.5, 16),
        ),
    ),
    Family(
        name="context attention",
        source=AICONFIGURATOR,
        operators=("attention_prefill", "attention_prefill_window"),
        questions=(
            _ask("random", hold_out_random, "AIC 4.8/12", 1.5, 3),
            _ask("whole heads", hold_out_groups(*_HEADS), "AIC 8.8/24", 1.9, 4),
            _ask("whole isl", hold_out_values(per_sequence("q_tokens")), "AIC 5.4/13", 4.5, 11),
            _ask("isl beyond", hold_out_beyond(per_sequence("q_tokens")), "AIC 12/28", 2.3, 5),
        ),
    ),
    Family(
        name="generation attention",
        source=AICONFIGURATOR,
        operators=("attention_decode", "attention_decode_window"),
        questions=(
            _ask("random", hold_out_random, "AIC 7.2/20", 2.2, 5),
            _ask("whole heads", hold_out_groups(*_HEADS), "AIC 9.3/27", 3, 7),
            _ask("whole kv", hold_out_values(dimension("kv_tokens_max")), "AIC 10/25", 8.5, 20),
            _ask("kv beyond", hold_out_beyond(dimension("kv_tokens_max")), "AIC 32/71", 3, 7),
        ),
    ),
    Family(
        name="MoE",
        source=AICONFIGURATOR,
        operators=("moe_experts", "moe_local_experts"),
        questions=(
            _ask("random", hold_out_random, "AIC 7.3/17", 3.8, 8.5),
            _ask("whole tokens", hold_out_values(dimension("num_tokens")), "AIC 4.6/11", 4.4, 10),
            _ask("whole models", hold_out_groups(*_MODEL), "AIC miss", 12, 30),
        ),
    ),
    Family(
        name="NCCL",
        source=AICONFIGURATOR,
        operators=_COLLECTIVES,
        questions=(
            _ask("random", hold_out_random, "AIC 5.6/12", 4.3, 9.5),
            _ask("whole group sizes", hold_out_groups(*_GROUP), "AIC miss", 7, 14),
        ),
    ),
    Family(
        name="DeepEP",
        source=AICONFIGURATOR,
        operators=("all_to_all",),
        has_exchanges=True,
        questions=(
            _ask("random", hold_out_random, "", 4.3, 9.5),
            _ask("whole group sizes", hold_out_groups(*_GROUP), "", 7, 14),
        ),
    ),
    Family(
        name="Vidur prefill",
        source=VIDUR_A30,
        operators=("attention_prefill",),
        questions=(
            _ask("whole chunks", hold_out_values(per_sequence("q_tokens")), "Vidur 18/30", 7, 13),
        ),
    ),
    Family(
        name="Vidur decode",
        source=VIDUR_A30,
        operators=("attention_decode",),
        questions=(
            _ask("whole batches", hold_out_values(dimension("num_seqs")), "Vidur 5.6/18", 2.8, 9),
        ),
    ),
    _gpumodeling_ops(
        "GPUModeling A100",
        "a100_sxm_80",
        _ask("random", hold_out_random, "GPUM 5.0", 2.2),
        _ask("size holes", None, "GPUM 10-14", 2.4),
    ),
    _gpumodeling_ops(
        "GPUModeling GH200",
        "gh200",
        _ask("random", hold_out_random, "GPUM 4.0", 1.3),
        _ask("size holes", None, "GPUM 8-13", 1.6),
    ),
    Family(
        name="GPUModeling NCCL",
        source=GPUMODELING,
        operators=_COLLECTIVES,
        questions=(
            _ask("size hole", hold_out_octave("message_bytes"), "GPUM 8.2", 1.3),
            _ask(
                "sizes beyond",
                hold_out_beyond(dimension("message_bytes"), *_GROUP),
                "GPUM 9.3",
                1.6,
            ),
            _ask("whole node counts", hold_out_groups("num_nodes"), ""),
        ),
    ),
    *_TODAY,
)
