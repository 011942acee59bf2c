"""What can happen at an instant of simulated time."""

import enum
from typing import Any, NamedTuple


class EventKind(enum.IntEnum):
    """Kinds of events; at one instant the lower kind comes first."""

    ARRIVAL = 1
    STEP_DONE = 2
    STAGE_FREE = 3


class Event(NamedTuple):
    """One event. `sequence` orders events of one instant and kind by when they were posted."""

    time_ns: int
    kind: EventKind
    sequence: int
    payload: Any
