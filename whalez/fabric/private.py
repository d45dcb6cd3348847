"""Memory of one process in the shape of a slab: to run kernels on that no other process sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class PrivateSlab:
    """Implements provider.ViewableSlab. Owns: its memory, which ends with it and its views."""

    def __init__(self, rank: int, nbytes: int) -> None:
        memory = np.zeros(nbytes + 4096, np.uint8)
        skip = -int(memory.ctypes.data) % 4096
        self.rank = rank
        self.nbytes = nbytes
        self._bytes = memory[skip : skip + nbytes]
        self.address = int(self._bytes.ctypes.data)

    def view(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.ndarray(shape, dtype, self._bytes.data, offset)
