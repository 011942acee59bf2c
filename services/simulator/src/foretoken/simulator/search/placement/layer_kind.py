"""The kinds of layers of a model that is trained: of a mixture of experts the first may be dense.

Layers whose attention has a window are trained like the others.
"""

import numpy as np

from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.simulator.grid import Ints

# Of the layers that a model begins with, and of all others.
FIRST_KIND, LAST_KIND = 0, 1
NUM_KINDS = 2


def list_layer_kinds(model: ModelArchitecture) -> Ints:
    """Return the kind of every layer; all are `LAST_KIND` where they are alike."""
    num_first = model.moe.num_dense_layers if model.moe else 0
    return np.where(np.arange(model.num_layers) < num_first, FIRST_KIND, LAST_KIND)
