"""How many tokens known training sets have: one YAML file each in `datasets/`."""

from dataclasses import dataclass
from functools import cache

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.plugins import load_yaml_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSpec:
    """One training set, once through.

    `num_tokens` was counted with `tokenizer` (empty: the source does not say), and another one
    makes more or fewer of the same text. `source` is who published the count, at `date`.
    """

    name: str
    description: str
    num_tokens: float
    tokenizer: str = ""
    source: str = ""
    date: str = ""


@cache
def all_datasets() -> dict[str, DatasetSpec]:
    """Return every dataset by name."""
    return load_yaml_folder(DatasetSpec, "foretoken.domain.requests", "datasets")


def find_dataset(name: str) -> DatasetSpec:
    """Return the dataset of that name.

    Raises:
        UnknownPluginError: there is none; the message names the nearest.

    """
    return UnknownPluginError.look_up(name, all_datasets(), "dataset", "dataset")
