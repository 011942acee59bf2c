"""The settings of a process that answers queries in SQL: where the tables lie, and its limits."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from foretoken.catalog.config import CatalogConfig, LakeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Where the tables lie, what is asked of them, and what one process may take.

    `memory_bytes` is for DuckDB; the program itself needs some more. `spill_folder` takes what
    does not fit the memory, up to `max_spill_bytes`. `views` gives names and what is in them.
    """

    path: str
    lake: LakeConfig | None
    views: Mapping[str, str]
    num_threads: int
    memory_bytes: int
    spill_folder: str
    max_spill_bytes: int
    max_rows: int
    max_result_bytes: int

    @property
    def catalog(self) -> CatalogConfig:
        """The configuration of a catalog whose tables lie there."""
        return CatalogConfig(
            path=self.path,
            lake=self.lake,
            num_threads=self.num_threads,
            memory_limit=f"{self.memory_bytes} bytes",
        )

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what a line says."""
        fields = json.loads(text)
        lake = fields.pop("lake")
        return cls(lake=LakeConfig(**lake) if lake else None, **fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A text, how many rows are wanted (0: all), and the state of the tables it is asked of."""

    text: str
    num_wanted: int
    revision: str

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what a line says."""
        return cls(**json.loads(text))
