"""All CSV files of a variant; here those by layer name, and the expert layers."""

from collections.abc import Iterator, Mapping

import numpy as np

from foretoken.catalog.array import Floats
from foretoken.catalog.importers.llmservingsim.attention_files import read_attention, read_skew
from foretoken.catalog.importers.llmservingsim.degree import Degree, Rows, join_rows, take_rows
from foretoken.catalog.importers.llmservingsim.layers import LAYERS
from foretoken.catalog.importers.llmservingsim.variant import Variant
from foretoken.catalog.importing import ImportNotes
from foretoken.catalog.sources.table import SourceTable
from foretoken.domain.errors import InvalidRequestError

# Files by layer name, and their column that counts tokens or sequences.
_NAMED_FILES: Mapping[str, str] = {"dense": "tokens", "per_sequence": "sequences"}
_KNOWN_FILES = frozenset({*_NAMED_FILES, "attention", "moe", "skew"})


def read_layers(variant: Variant, notes: ImportNotes) -> Iterator[Rows]:
    """Yield every file of a variant that holds measurements, with its rows.

    Raises:
        InvalidRequestError: a file lacks a column, or a cell cannot be used.

    """
    lowest: dict[str, SourceTable] = {}
    for tp in variant.degrees:
        degree = Degree(variant, tp, notes)
        stems = degree.list_stems()
        for stem in stems:
            if stem not in _KNOWN_FILES:
                is_fit = stem == "skew_fit"
                degree.note(stem, "a fit, not measurements" if is_fit else "not known here")
        for stem in (stem for stem in _NAMED_FILES if stem in stems):
            origin, rows = _read_named(degree, stem, lowest.get(stem))
            lowest.setdefault(stem, origin)
            yield origin, rows
        if "attention" in stems:
            attention = read_attention(degree)
            yield attention
            if "skew" in stems:
                yield read_skew(degree, attention[0])
        elif "skew" in stems:
            degree.note("skew", "not read: its times cannot be estimated without attention.csv")
        if "moe" in stems:
            yield _read_experts(degree)


def _read_named(degree: Degree, stem: str, lowest: SourceTable | None) -> Rows:
    """Read a file of named layers; `lowest` is that file at the lowest degree."""
    column = _NAMED_FILES[stem]
    origin = degree.open(stem, ("layer", column, "time_us"))
    names, counts = origin.texts("layer"), origin.integers(column)
    times_us = origin.numbers("time_us")
    pieces = []
    for name in dict.fromkeys(names.tolist()):
        mask = names == name
        layer = LAYERS.get(name)
        if layer is None:
            degree.note(stem, f"{mask.sum()} rows of the unknown layer {name!r} are not read")
        elif lowest is not None and _is_copy(lowest, name, times_us[mask]):
            degree.note(stem, f"{mask.sum()} rows of {name} are copied from the lowest degree")
        else:
            facts = degree.facts(layer.operator, flag=layer.flag)
            dims = layer.dims(counts, degree.rank)
            pieces.append(take_rows(facts, origin, mask, dims, times_us))
    return origin, join_rows(pieces)


def _is_copy(lowest: SourceTable, name: str, times_us: Floats) -> bool:
    """Return whether the lowest degree has the very same times.

    The profiler measures some layers at one degree and writes them to all; of a layer whose size
    depends on the degree that is wrong, of the others it says nothing new.
    """
    known = lowest.numbers("time_us")[lowest.texts("layer") == name]
    return np.array_equal(known, times_us, equal_nan=True)


def _read_experts(degree: Degree) -> Rows:
    model = degree.variant.model
    origin = degree.open("moe", ("tokens", "activated_experts", "time_us"))
    if model.moe is None:
        raise InvalidRequestError.of_field("path", f"{origin.path}: {model.name} has no experts")
    dims = {
        "num_tokens": origin.integers("tokens"),
        "top_k": model.moe.top_k,
        "num_experts": model.moe.num_experts,
        "num_active_experts": origin.integers("activated_experts"),
        "hidden": model.hidden,
        "intermediate": model.moe.expert_intermediate // degree.tp,
    }
    degree.note("moe", "the times hold the router too")
    everywhere = np.ones(origin.num_rows, dtype=bool)
    facts = degree.facts("moe_experts", kernel="moe_block_with_router")
    return origin, take_rows(facts, origin, everywhere, dims, origin.numbers("time_us"))
