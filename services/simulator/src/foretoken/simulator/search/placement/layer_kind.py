"""The kinds of layers of a model that is trained: of a mixture of experts the first may be dense.

Costs of two kinds are compared; models of more are not placed.
"""

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.simulator.grid import Ints
from foretoken.simulator.search.training.chunk_kinds import number_layers

# Of the layers that a model begins with, and of all others.
FIRST_KIND, LAST_KIND = 0, 1
NUM_KINDS = 2


def list_layer_kinds(model: ModelArchitecture) -> Ints:
    """Return the kind of every layer; all are `LAST_KIND` where they are alike.

    Raises:
        InvalidRequestError: there are more than two, or they take turns.

    """
    numbers = np.array(number_layers(model))
    if numbers.max() >= NUM_KINDS or (np.diff(numbers) < 0).any():
        problem = f"{model.name} has layers of several kinds in turns, which no placement compares"
        raise InvalidRequestError.of_field("model", f"{problem}; search training does")
    return np.where(numbers < numbers.max(), FIRST_KIND, LAST_KIND)
