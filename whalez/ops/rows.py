"""What an op may be handed: checks of dtype, shape and row stride, made in Python before any kernel runs.

Kernels take addresses and trust them; this file is the only thing between a wrong array and a wild store.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from whalez.errors import ShapeError


def rows_of(name: str, array: np.ndarray[Any, Any], shape: tuple[int, ...]) -> tuple[int, int]:
    """The address and row stride (in elements) of an f32 array [T, ...] whose rows are contiguous.

    The rows themselves may lie apart (a column slice of a wider buffer), all other axes must be packed.

    Raises:   ShapeError naming the argument, with what was expected and what came
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


def packed(name: str, array: np.ndarray[Any, Any], shape: tuple[int, ...]) -> int:
    """The address of a C-contiguous f32 array of exactly this shape.

    Raises:   ShapeError naming the argument
    """
    if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
        layout = "" if array.flags.c_contiguous else " not contiguous"
        raise ShapeError(
            f"{name}: expected contiguous float32 {list(shape)}, got {array.dtype} {list(array.shape)}{layout}"
        )
    return array.ctypes.data


def slots_of(array: np.ndarray[Any, Any], count: int, slots_count: int) -> int:
    """The address of int64 [count] slot numbers, each in [0, slots_count).

    Raises:   ShapeError
    """
    if array.dtype != np.int64 or array.shape != (count,) or not array.flags.c_contiguous:
        raise ShapeError(f"slots: expected contiguous int64 [{count}], got {array.dtype} {list(array.shape)}")
    if count and (array.min() < 0 or array.max() >= slots_count):
        raise ShapeError(f"slots: expected numbers in [0, {slots_count}), got {array.tolist()}")
    return array.ctypes.data


def axes_of(name: str, array: np.ndarray[Any, Any], axes: str) -> tuple[int, ...]:
    """The shape of an array that must have as many axes as letters in `axes`.

    Raises:   ShapeError
    """
    if array.ndim != len(axes):
        raise ShapeError(f"{name}: expected axes [{', '.join(axes)}], got shape {list(array.shape)}")
    return array.shape
