"""Arrays for kernels: poisoned, and between pages that fault."""

from __future__ import annotations

import ctypes as C
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from whalez.testing.simt.errors import SimtError

PAGE = mmap.PAGESIZE
POISON = 0xFF  #: NaN in every float format, -1 in every signed integer
_libc = C.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [C.c_void_p, C.c_size_t, C.c_int]
_padded: list[tuple[weakref.ref[np.ndarray], int]] = []  #: array of the whole mapping, where the padding starts


def empty(shape: int | Sequence[int], dtype: Any = np.float32, align: int = 1) -> np.ndarray:
    """A poisoned array whose end touches a page that faults; one lies before its first page too.

    Args:
        align: bytes. Device memory is aligned to 256, an array here only as far as its size allows; what a kernel reads
               in vectors may have to ask for 16. Then up to align - 1 bytes lie between the end and the page: reading
               them is not seen, writing them is, when the run is over.
    """
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    padded = -(-nbytes // align) * align
    body = max(-(-padded // PAGE), 1) * PAGE
    mapping = mmap.mmap(-1, body + 2 * PAGE)
    base = C.addressof(C.c_char.from_buffer(mapping))
    for offset in (0, PAGE + body):
        if _libc.mprotect(base + offset, PAGE, 0):
            raise OSError(C.get_errno(), "mprotect")
    whole = np.frombuffer(mapping, np.uint8, body, PAGE)
    whole[:] = POISON
    if padded > nbytes:
        _padded.append((weakref.ref(whole), body - padded + nbytes))
    return whole[body - padded : body - padded + nbytes].view(dtype).reshape(shape)


def array(values: Any, dtype: Any = None, align: int = 1) -> np.ndarray:
    """A guarded copy of `values`."""
    values = np.asarray(values, dtype)
    out = empty(values.shape, values.dtype, align)
    out[...] = values
    return out


def zeros(shape: int | Sequence[int], dtype: Any = np.float32, align: int = 1) -> np.ndarray:
    out = empty(shape, dtype, align)
    out[...] = 0
    return out


def check_padding() -> None:
    """Raises: SimtError if something was written behind the end of an array that has padding."""
    for entry in tuple(_padded):
        whole, start = entry[0](), entry[1]
        if whole is None:
            _padded.remove(entry)
        elif not (whole[start:] == POISON).all():
            where = start + int(np.argmax(whole[start:] != POISON))
            whole[start:] = POISON
            raise SimtError(
                f"written {where - start} bytes past the end of an array, at {whole.ctypes.data + where:#x}"
            )
