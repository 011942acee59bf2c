"""Whose measurements answer: the preferred software, its nearest version, else another's."""

import enum
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from foretoken.domain.operators.spec.operator import OperatorSpec

_Version = tuple[int, ...]
_DIGITS = re.compile(r"\d+")
_NUM_PARTS = 3
_FARTHEST: _Version = (sys.maxsize,)
# Names of one software.
_ALIASES = {"torch": "pytorch"}
# What is meant where no software is said, as in a scenario: one kernel's times, where all software
# together lies within a factor of 10.
DEFAULT_SOFTWARE = "vllm"
# All stacks call NCCL for their collectives, but serving engines sum with kernels of their own.
_NCCL, _ALL_REDUCE = "nccl", "all_reduce"
_HAVE_OWN_ALL_REDUCE = frozenset({"vllm", "sglang", "trtllm"})
# Whose plain matrix products in 16 bit were measured as another software's own ones: SGLang's are
# torch.nn.functional.linear of random values, which is what PyTorch runs. Of others vLLM's weights
# are not filled, and devices take less power, so are faster, for values that are alike;
# TensorRT-LLM's are of a layer of its own. Source: ai-dynamo/aiconfigurator, collector/{sglang,
# vllm,trtllm}/collect_gemm.py, and kernel_source of the rows (sglang_torch_linear).
_GEMM, _MEASURED_AS = "gemm", {"sglang": "pytorch"}


class Relation(enum.IntEnum):
    """What measured software is to the one asked for, the nearest first.

    A library is what the software asked for calls itself, whoever measured it: as good as its own
    measurements, where it has none.
    """

    SAME = 0
    VERSION = 1
    LIBRARY = 2
    OTHER = 3


# Within which factor 90 % of the times of one software lie of those of another version of it, and
# of another software, by group of operators: the plain case and variants. Source:
# tests/benchmarks/bench_software_disagreement.py, four GPUs under vLLM, SGLang, TensorRT-LLM and
# NCCL; GEMMs without those that were timed with their launches. What no two stacks measured (such
# as collectives at two versions) has attention's, which are in the middle.
_APART: Mapping[str, Sequence[tuple[float, float]]] = {
    "attention": ((1.50, 1.91), (1.79, 2.60)),
    "communication": ((1.50, 3.54), (1.79, 1.72)),
    "gemm": ((1.18, 1.76), (1.84, 1.93)),
    "moe": ((4.44, 3.70), (4.44, 3.70)),
}
# Plain matrix products by format: in 16 bit all software calls one library (1.14 to 1.22, of short
# and of long ones), in 8 bit kernels of its own (2.2 where they are short, 1.5 where long).
_GEMM_16_BIT_APART, _16_BIT = (1.18, 1.20), ("bf16", "fp16")
# PyTorch's own products at two versions of it, short calls and long ones, of so many µs and more.
# Source: `torch.nn.functional.linear` as up to three releases of SGLang timed it on six devices
# (NVIDIA's wheel of October 2026, 14 pairs of tables with one voice each, as in
# bench_software_disagreement.py).
_LIBRARY_APART, _LONG_CALL_US = (1.27, 1.15), 100.0


@dataclass(frozen=True, slots=True)
class Software:
    """A name, and the range of versions that is meant, both ends included; empty: not said.

    Of a build of no release, `is_build`, nobody knows between which versions it stands.
    """

    name: str
    first: _Version = ()
    last: _Version = ()
    is_build: bool = False

    def relate(
        self, have: str, operator: str, dtype: str = "", variant: str = ""
    ) -> tuple[Relation, _Version]:
        """Return what software that measured an operator is to this one, and how far its version.

        Without a name or a version nothing says that it is another; a build of no release is
        farther from a version than any other.
        """
        other = parse_software(have)
        if not other.name:
            return Relation.SAME, ()
        if other.name != self.name:
            calls = self._calls(other, operator) or self._ran_as(other, operator, dtype, variant)
            return (Relation.LIBRARY if calls else Relation.OTHER), ()
        if self.first and other.is_build:
            return Relation.VERSION, _FARTHEST
        if not (self.first and other.first):
            return Relation.SAME, ()
        apart = self._versions_apart(other.first)
        return (Relation.VERSION if any(apart) else Relation.SAME), apart

    def _calls(self, library: "Software", operator: str) -> bool:
        """Tell whether this software runs an operator by another's library."""
        has_own = operator == _ALL_REDUCE and self.name in _HAVE_OWN_ALL_REDUCE
        return library.name == _NCCL and not has_own

    def _ran_as(self, other: "Software", operator: str, dtype: str, variant: str) -> bool:
        """Tell whether what another software measured is how this one runs an operator."""
        is_plain = operator == _GEMM and dtype in _16_BIT and not variant
        return is_plain and _MEASURED_AS.get(other.name) == self.name

    def _versions_apart(self, have: _Version) -> _Version:
        """Return how far a version is from the range, part by part: major, minor, micro."""
        is_older = have[: len(self.first)] < self.first
        if not is_older and have[: len(self.last)] <= self.last:
            return ()
        end = self.first if is_older else self.last
        parts = zip(_fill(have), _fill(end), strict=True)
        return tuple(abs(one - two) for one, two in parts)


def software_doubt_log(relation: Relation, spec: OperatorSpec, dtype: str, variant: str) -> float:
    """Return the further uncertainty about an operator's times of software of such a relation.

    Products of a library are those of some version of it; see `library_doubt_log` of their length.
    """
    version, other = _APART.get(spec.group, _APART["attention"])[bool(variant)]
    if spec.name == _GEMM and not variant and dtype in _16_BIT:
        version, other = _GEMM_16_BIT_APART
    library = 1.0 if spec.is_collective else version
    widths = {Relation.VERSION: version, Relation.LIBRARY: library, Relation.OTHER: other}
    return math.log(widths.get(relation, 1.0))


def library_doubt_log(latency_us: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the further uncertainty about a library's products at another version, by length."""
    short, long = (math.log(factor) for factor in _LIBRARY_APART)
    return np.where(latency_us < _LONG_CALL_US, short, long)


@cache
def parse_software(text: str) -> Software:
    """Return what "vllm", "vllm 0.19.0" or "vllm 0.14-0.16" names."""
    name, _, versions = text.strip().lower().partition(" ")
    first, _, last = versions.partition("-")
    name, start = _ALIASES.get(name, name), _numbers(first)
    return Software(name, start, (start and _numbers(last)) or start, bool(versions) and not start)


def order_versions(text: str) -> tuple[_Version, _Version]:
    """Return what the versions of one software are ordered by, release candidates too."""
    return parse_software(text).first, tuple(map(int, _DIGITS.findall(text)))


def matches(framework: str, asked: str) -> bool:
    """Tell whether "vllm 0.19.0" is what "vllm", "vllm 0.19" or "vllm 0.19.0" requests."""
    have, want = framework.lower(), asked.lower()
    return have == want or (have.startswith(want) and have[len(want)] in " .+-")


def _numbers(version: str) -> _Version:
    """Return the numbers a version begins with: (1, 3, 0) of "1.3.0rc20"."""
    numbers = []
    for part in version.split("."):
        found = _DIGITS.match(part)
        if found is None:
            break
        numbers.append(int(found.group()))
    return tuple(numbers)


def _fill(version: _Version) -> _Version:
    return (*version, *(0,) * _NUM_PARTS)[:_NUM_PARTS]
