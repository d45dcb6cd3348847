"""What an op asks of an array before any kernel runs: dtype, shape, layout; named in the error.

Rule 1: a check raises ShapeError with the argument's name, expected and got.   Rule 2: nothing here copies or converts.

Some kernels take typed arrays (`reads`, `writes`, checked by `require`), some take addresses and trust them (`packed`,
`rows_of`, `slots_of`): this file is then the only thing between a wrong array and a wild store.
"""

from __future__ import annotations

import math
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


def rows_of(name: str, array: NDArray, shape: tuple[int, ...]) -> tuple[int, int]:
    """The address and row stride (in elements) of an f32 array [T, ...] whose rows are contiguous.

    The rows themselves may lie apart (a column slice of a wider buffer), all other axes must be packed.
    """
    if array.dtype != np.float32 or array.shape != shape:
        raise ShapeError(f"{name}: expected float32 {list(shape)}, got {array.dtype} {list(array.shape)}")
    width = math.prod(shape[1:])
    if array.size == 0:
        return array.ctypes.data, width
    packed_bytes = 4
    for axis in range(array.ndim - 1, 0, -1):
        if shape[axis] > 1 and array.strides[axis] != packed_bytes:
            raise ShapeError(f"{name}: expected contiguous rows, got strides {array.strides} for shape {shape}")
        packed_bytes *= shape[axis]
    stride = array.strides[0]
    if shape[0] == 1:
        stride = 4 * width
    elif stride < 4 * width or stride % 4:
        raise ShapeError(f"{name}: rows overlap, row stride {stride} bytes for {width} values")
    return array.ctypes.data, stride // 4


def packed(name: str, array: NDArray, shape: tuple[int, ...]) -> int:
    """The address of a C-contiguous f32 array of exactly this shape."""
    require(name, array, np.float32, shape)
    return array.ctypes.data


def slots_of(array: NDArray, count: int, slots_count: int) -> int:
    """The address of int64 [count] slot numbers, each in [0, slots_count)."""
    require("slots", array, np.int64, (count,))
    if count and (array.min() < 0 or array.max() >= slots_count):
        raise ShapeError(f"slots: expected numbers in [0, {slots_count}), got {array.tolist()}")
    return array.ctypes.data


def axes_of(name: str, array: NDArray, axes: str) -> tuple[int, ...]:
    """The shape of an array that must have as many axes as letters in `axes`."""
    if array.ndim != len(axes):
        raise ShapeError(f"{name}: expected axes [{', '.join(axes)}], got shape {list(array.shape)}")
    return array.shape
