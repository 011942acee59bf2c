"""Random streams: one seed, one named stream per subsystem."""

import zlib

import numpy as np


def named_stream(seed: int, name: str) -> np.random.Generator:
    """Return the stream of a subsystem; its draws do not depend on what others draw."""
    return np.random.default_rng(
        np.random.SeedSequence(seed, spawn_key=(zlib.crc32(name.encode()),))
    )
