"""exp in f32 that LLVM turns into vector code inside a loop, which math.exp is not."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

_f32 = np.float32


def _f32_of_bits() -> Any:
    """An intrinsic that takes an int32 for the bits of an f32."""

    @intrinsic
    def convert(typingctx: Any, bits: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(types.float32))

        return types.float32(types.int32), codegen

    return convert


_bits_to_f32 = _f32_of_bits()


@njit(cache=True, nogil=True, fastmath={"contract"})
def exp_f32(x: Any) -> Any:
    """exp(x) to about 1e-7 relative, x clamped to [-87.3, 88] so that the result is always a normal number."""
    x = _f32(-87.3) if x < _f32(-87.3) else x
    x = _f32(88.0) if x > _f32(88.0) else x
    # Adding and taking away 1.5 * 2^23 rounds to an integer without a branch.
    whole = (x * _f32(1.44269504) + _f32(12582912.0)) - _f32(12582912.0)
    rest = x - whole * _f32(0.693359375)
    rest = rest + whole * _f32(2.12194440e-4)
    p = _f32(1.9875691500e-4)
    p = p * rest + _f32(1.3981999507e-3)
    p = p * rest + _f32(8.3334519073e-3)
    p = p * rest + _f32(4.1665795894e-2)
    p = p * rest + _f32(1.6666665459e-1)
    p = p * rest + _f32(5.0000001201e-1)
    p = p * rest * rest + rest + _f32(1.0)
    return p * _bits_to_f32(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))
