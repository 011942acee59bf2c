"""Columns of rows as NumPy arrays."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
# A truth value per row.
Mask = npt.NDArray[np.bool_]
