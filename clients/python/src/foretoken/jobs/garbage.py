"""How often a program of ours looks for objects that only refer to each other."""

import gc

# Objects made since the last time; Python's own number is 700. What is imported stays, and is gone
# through again and again while more comes: a tenth of the time until a command answers.
_NUM_OBJECTS = 100_000


def collect_rarely() -> None:
    """Let this process look for such objects after many, not after few."""
    gc.set_threshold(_NUM_OBJECTS)
