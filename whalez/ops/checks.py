"""What an op asks of an array before any kernel runs: dtype, shape, layout; named in the error.

Rule 1: a check raises ShapeError with the argument's name, expected and got.   Rule 2: nothing here copies or converts.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numba import types

from whalez.errors import ShapeError

NDArray = np.ndarray[Any, np.dtype[Any]]


def reads(dtype: Any, ndim: int, layout: Literal["C", "A"] = "C") -> Any:
    """Type of a kernel argument that is only read: a mapped, read-only weight is then as good as any other array."""
    return types.Array(dtype, ndim, layout, readonly=True)


def writes(dtype: Any, ndim: int, layout: Literal["C", "A"] = "C") -> Any:
    """Type of a kernel argument that is written."""
    return types.Array(dtype, ndim, layout)


def require(name: str, array: NDArray, dtype: Any, shape: tuple[int, ...], *, rows_strided: bool = False) -> None:
    """`array` must be `dtype` [`shape`] (-1 = any), C-contiguous; `rows_strided` asks only the last axis to be."""
    if array.dtype != dtype or array.ndim != len(shape):
        raise ShapeError(f"{name}: expected {np.dtype(dtype)} {shape}, got {array.dtype} {array.shape}")
    for want, got in zip(shape, array.shape, strict=True):
        if want >= 0 and want != got:
            raise ShapeError(f"{name}: expected {np.dtype(dtype)} {shape}, got {array.dtype} {array.shape}")
    if rows_strided:
        if array.size and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
            raise ShapeError(f"{name}: expected a last axis of stride 1, got strides {array.strides}")
    elif not array.flags.c_contiguous:
        raise ShapeError(f"{name}: expected C-contiguous, got strides {array.strides} for {array.shape}")


def require_that(holds: bool, message: str) -> None:
    """Raise ShapeError(`message`) unless `holds`."""
    if not holds:
        raise ShapeError(message)
