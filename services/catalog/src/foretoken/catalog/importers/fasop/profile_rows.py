"""Rows from a profile: who ran it, what its columns hold, and the rows of one.

A column is the time from the end of one module to the end of the next, so it holds everything that
runs between them, whether or not it belongs to a module. Source: `ModuleProfiler` in
`fasop/make_profiledb/profile_fx.py` of https://github.com/ai-computing/aicomp.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from foretoken.catalog.dims import Floats, Integers
from foretoken.catalog.importing import ImportRequest
from foretoken.catalog.sources.file import SourceFile, refuse
from foretoken.catalog.sources.row import RowFacts, build_rows
from foretoken.catalog.sources.table import SourceTable
from foretoken.domain.errors import (
    FieldViolation,
    InvalidRequestError,
    UnknownDeviceError,
    UnknownModelError,
)
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.operators.spec.variant import format_variant
from foretoken.domain.units import US_PER_MS

Dims = Mapping[str, Any]

# What the catalog calls the code behind a column.
KERNEL_PREFIX = "fasop:"


@dataclass(frozen=True, slots=True)
class RankShape:
    """One of `tp` ranks of a model, and the tokens it is given (an int or a column of them)."""

    model: ModelArchitecture
    tp: int
    tokens: Any

    def gemm(self, n: int, k: int) -> Dims:
        """Return the dims of a linear layer."""
        return {"m": self.tokens, "n": n, "k": k}

    @property
    def q_width(self) -> int:
        """Features of the queries of a rank."""
        return self.model.num_heads * self.model.head_dim // self.tp

    @property
    def kv_width(self) -> int:
        """Features of the keys of a rank, and of its values."""
        return self.model.num_kv_heads * self.model.head_dim // self.tp

    @property
    def intermediate(self) -> int:
        """Features inside the MLP of a rank."""
        return self.model.intermediate // self.tp


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the operator nearest to it, and what else its times hold (empty: nothing).

    `module` is the name it has in a profile JSON.
    """

    name: str
    module: str
    operator: str
    dims: Callable[[RankShape], Dims]
    holds: str = ""

    @property
    def flag(self) -> str:
        """The flag that its rows carry: they are not times of the operator alone."""
        return f"composite: holds {self.holds}" if self.holds else ""

    @property
    def kernel(self) -> str:
        """The kernel that its rows carry."""
        return f"{KERNEL_PREFIX}{self.name}"


def _embedding_dims(shape: RankShape) -> Dims:
    model = shape.model
    return {"num_tokens": shape.tokens, "hidden": model.hidden, "vocab": model.vocab}


def _head_dims(shape: RankShape) -> Dims:
    # Every rank computes the whole vocabulary.
    return shape.gemm(shape.model.vocab, shape.model.hidden)


def _kv_dims(shape: RankShape) -> Dims:
    return shape.gemm(shape.kv_width, shape.model.hidden)


def _up_dims(shape: RankShape) -> Dims:
    return shape.gemm(shape.intermediate, shape.model.hidden)


def _down_dims(shape: RankShape) -> Dims:
    return shape.gemm(shape.model.hidden, shape.intermediate)


def _query_dims(shape: RankShape) -> Dims:
    return shape.gemm(shape.q_width, shape.model.hidden)


def _output_dims(shape: RankShape) -> Dims:
    return shape.gemm(shape.model.hidden, shape.q_width)


def _activation_dims(shape: RankShape) -> Dims:
    return {"num_tokens": shape.tokens, "intermediate": shape.intermediate}


_BEFORE_A_NORM = "the all-reduce before it, the residual sum, the norm"

COLUMNS = (
    Column(
        "embed",
        "embedding",
        "embedding",
        _embedding_dims,
        "all from the start of the stage, host gaps included",
    ),
    Column("attn_q", "self_attn_q_proj", "gemm", _query_dims, _BEFORE_A_NORM),
    Column("attn_k", "self_attn_k_proj", "gemm", _kv_dims),
    Column("attn_v", "self_attn_v_proj", "gemm", _kv_dims),
    Column("attn_o", "self_attn_o_proj", "gemm", _output_dims, "rotary embedding and attention"),
    Column("mlp_gate", "mlp_gate_proj", "gemm", _up_dims, _BEFORE_A_NORM),
    Column("mlp_act_fn", "mlp_act_fn", "silu", _activation_dims),
    Column("mlp_up", "mlp_up_proj", "gemm", _up_dims),
    Column("mlp_down", "mlp_down_proj", "gemm", _down_dims, "the product of gate and up"),
    Column("lm_head", "lm_head", "gemm", _head_dims, _BEFORE_A_NORM),
)

# The parts of a legacy profile, one after another.
LEGACY_EMBEDDING = Column(
    "embedding_layer", "", "embedding", _embedding_dims, "all that runs before the first layer"
)
LEGACY_LAYER = Column("transformer_layer", "", "gemm", _up_dims, "a whole transformer layer")
LEGACY_HEAD = Column("post_process", "", "gemm", _head_dims, "all that runs after the last layer")


# FASOP's names of the models and products it knows. Source: `fasop/config.py`.
PRESETS: Mapping[str, str] = {
    "gpt2XL": "gpt2-xl",
    "llama": "llama-3.2-1b",
    "llama1b": "llama-3.2-1b",
    "llama3b": "llama-3.2-3b",
    "llama70b": "llama-3.3-70b",
}
DEVICES: Mapping[str, str] = {"A40": "a40", "A100": "a100_sxm_40"}
# The profiling script makes the model in the format PyTorch makes models in.
_DEFAULT_DTYPE = DType.FP32
_COUNT = re.compile(r"[1-9][0-9]{0,6}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """What no file says and the request must: tokens of a sequence, number format.

    `device` and `model` narrow the files that name theirs, and stand in where one does not.
    """

    seq_len: int
    dtype: DType
    device: str
    model: str

    @classmethod
    def of(cls, request: ImportRequest) -> "Assumptions":
        """Return what a request says.

        Raises:
            InvalidRequestError: `seq_len` is missing or no count, or `dtype` is no format.
            UnknownDeviceError, UnknownModelError: there is no file for it.

        """
        seq_len = request.options.get("seq_len", "")
        dtype = request.options.get("dtype", _DEFAULT_DTYPE.name).upper()
        violations = []
        if not _COUNT.fullmatch(seq_len):
            violations.append(
                FieldViolation(
                    "options.seq_len", "no file says how many tokens a sequence had; give seq_len=N"
                )
            )
        if dtype not in DType.__members__:
            violations.append(FieldViolation("options.dtype", f"{dtype!r} is no number format"))
        if violations:
            raise InvalidRequestError.of_violations(violations, "import fasop")
        return cls(
            seq_len=int(seq_len),
            dtype=DType[dtype],
            device=find_device(request.device).name if request.device else "",
            model=find_model(request.model).name if request.model else "",
        )

    def resolve_device(self, gpu: str, path: Path) -> str:
        """Return the device of a file by FASOP's name for it (empty: it has none).

        Raises:
            InvalidRequestError: neither the file nor the request says it.
            UnknownDeviceError: there is no file for it.

        """
        try:
            return find_device(DEVICES.get(gpu, gpu)).name
        except UnknownDeviceError as err:
            if self.device:
                return self.device
            if not gpu:
                refuse(path, "does not say which device it is of; give --device")
            raise UnknownDeviceError(f"{path}: {err.message}", **err.details) from err

    def resolve_model(self, name: str, path: Path) -> ModelArchitecture:
        """Return the model of a file by FASOP's name for it.

        Raises:
            UnknownModelError: there is no preset for it.

        """
        try:
            return find_model(PRESETS.get(name, name))
        except UnknownModelError as err:
            if self.model:
                return find_model(self.model)
            raise UnknownModelError(f"{path}: {err.message}", **err.details) from err


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A file by what it says of itself."""

    path: Path
    source: SourceFile
    device: str
    model: ModelArchitecture
    tp: int
    assumed: Assumptions

    def __post_init__(self) -> None:
        """Check that the ranks have equal shares."""
        model = self.model
        whole = (model.num_heads, model.num_kv_heads, model.intermediate)
        if self.tp < 1 or any(size % self.tp for size in whole):
            refuse(self.path, f"{model.name} does not split evenly over {self.tp} ranks")

    @property
    def is_wanted(self) -> bool:
        """Whether it is of the device and model asked for."""
        assumed = self.assumed
        return assumed.device in ("", self.device) and assumed.model in ("", self.model.name)

    def rows_of(
        self,
        column: Column,
        micro_batches: Integers,
        times_ms: Mapping[str, Floats],
        rows: Integers,
        *,
        num_samples: int | None = None,
    ) -> pa.Table:
        """Return the rows of a column: times by statistic, a value per micro batch size.

        `rows` are the places of these values in the file, counted from 0.
        """
        shape = RankShape(self.model, self.tp, micro_batches * self.assumed.seq_len)
        says = {"seq_len": str(self.assumed.seq_len), "tp": str(self.tp)}
        facts = RowFacts(
            operator=column.operator,
            dtype=self.assumed.dtype.name.lower(),
            device=self.device,
            framework="pytorch",
            kernel=column.kernel,
            # What runs concurrently with the operator depends on more than its dims.
            variant=format_variant(says) if column.holds else None,
            model=self.model.name,
            num_samples=num_samples,
            flag=column.flag,
        )
        source = replace(self.source, content=b"")
        origin = SourceTable(source, self.path, pa.table({}), has_lines=False)
        times_us = {statistic: values * US_PER_MS for statistic, values in times_ms.items()}
        return build_rows(facts, origin, rows, column.dims(shape), times_us)
