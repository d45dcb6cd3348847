"""Named scratch arrays that outlive a launch, so that the hot path allocates nothing once it is warm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class Buffers:
    """Scratch by name: `take("q", rows, width)` is a C-contiguous view of the buffer of that name.

    A name is one buffer: two takes of one name alias. Contents are undefined. A buffer grows to the largest size asked
    for and never shrinks; memory that was never written is never resident.
    """

    def __init__(self) -> None:
        self._flat: dict[str, np.ndarray] = {}

    def take(self, name: str, *shape: int, dtype: Any = np.float32) -> np.ndarray:
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size:
            self._flat.pop(name, None)  # release the small one before asking for the large one
            flat = self._flat[name] = np.empty(size, dtype)
        assert flat.dtype == dtype, name
        return flat[:size].reshape(shape)
