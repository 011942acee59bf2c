"""The axes of the arrays of a step, by name, and the check that arrays of a record agree on them.

An array's type names its axes, the case first:

    tp: PerCase                               # [case]
    kept: Annotated[Floats, CASE, RANK]       # [case, rank]

| letter | axis  | one entry for each                                                         |
|--------|-------|----------------------------------------------------------------------------|
| C      | case  | strategy, draw of a step, or placement                                     |
| R      | rank  | rank of the pipeline, the one with the first layers first                  |
| K      | chunk | chunk of layers, in the order of the model                                 |
| P      | place | the embedding, every layer, and the head                                   |
| L      | kind  | kind of layer: those that the same operators run in                        |
| M      | micro | micro batch                                                                |
| T      | moment| moment of a rank's order of passes                                         |
| F      | figure| what is counted, in an order that the record names                         |

An axis of length 1 stands for any length, as numpy broadcasts it.
"""

from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import numpy as np

from foretoken.simulator.grid import Floats, Ints

CASE, RANK, CHUNK, PLACE = "case", "rank", "chunk", "place"
KIND, MICRO, MOMENT, FIGURE = "kind", "micro", "moment", "figure"

PerCase = Annotated[Ints, CASE]
FloatPerCase = Annotated[Floats, CASE]


def measure_axes(record: Any) -> dict[str, int]:
    """Return the length of every named axis of the arrays of a record (a dataclass).

    Raises:
        ValueError: an array has another number of axes than its type names, or two arrays have
            different lengths of the same axis, neither of which is 1.

    """
    hints = get_type_hints(type(record), include_extras=True)
    lengths: dict[str, int] = {}
    for field in fields(record):
        names = getattr(hints[field.name], "__metadata__", ())
        if not names:
            continue
        shape = np.shape(getattr(record, field.name))
        if len(shape) != len(names):
            raise ValueError(f"{field.name} has shape {shape}, not [{', '.join(names)}]")
        for name, length in zip(names, shape, strict=True):
            known = lengths.setdefault(name, length)
            if length != known and 1 not in (length, known):
                raise ValueError(f"{field.name} has {length} of axis {name}, others {known}")
            lengths[name] = max(length, known) if length else length
    return lengths
