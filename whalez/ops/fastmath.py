"""Elementary f32 functions that the loop vectoriser can widen, the raw pointers kernels index, and one GEMM on them.

Numba's own `math.exp` is a library call per element; the functions here are straight arithmetic on bits, so a loop over
them becomes vector code (`python bench/ops_kda.py`). They are called from `@njit` loops only, and inline into them.

The exponential must not be reassociated (its range reduction subtracts ln 2 in two parts), so it carries only the
`contract` flag whatever the caller's own flags are.
Kernels of these ops get addresses and strides instead of numpy arrays: one compiled signature serves every layout a row
view can have, and a slab of another rank is an ordinary argument. Hot: yes, `python bench/ops_kda.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

# numba declares the decorator's result with the typing context as an argument callers must pass, which they must not.
intrinsic: Any = _intrinsic

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # 9 bits set, so n * _LN2_HIGH is exact for every n that occurs
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
_EXP_MIN = np.float32(-87.0)  # below, 2^n would be subnormal: the result is flushed to 0
_EXP_MAX = np.float32(88.72284)  # above, the result is inf
_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_INF = np.float32(np.inf)
# exp(r) = 1 + r + r^2 (e0 + e1 r + ...), |r| <= ln2 / 2; error 1e-8
_E0 = np.float32(0.5)
_E1 = np.float32(0.16666576266288757)
_E2 = np.float32(0.041666463017463684)
_E3 = np.float32(0.008363235741853714)
_E4 = np.float32(0.0013933733571320772)
# atanh(s) = s (1 + a1 z + a2 z^2 + ...), z = s^2 <= 1/9; error 1e-9
_A1 = np.float32(0.33333340287208557)
_A2 = np.float32(0.19999347627162933)
_A3 = np.float32(0.14310312271118164)
_A4 = np.float32(0.10697133839130402)
_A5 = np.float32(0.12204702198505402)


@intrinsic
def bits_of_f32(typingctx: Any, value: Any) -> Any:
    """int32 with the bits of an f32."""
    if value != types.float32:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def f32_of_bits(typingctx: Any, bits: Any) -> Any:
    """f32 with the bits of an int32."""
    if bits != types.int32:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def _scale_bits(typingctx: Any, magic: Any) -> Any:
    """f32 2^(n-1) from the bits of `n + _ROUND`, in int32 arithmetic that wraps (numba's own would widen to int64)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        bits = builder.bitcast(args[0], i32)
        shifted = builder.shl(bits, ir.Constant(i32, 23))
        return builder.bitcast(builder.add(shifted, ir.Constant(i32, 126 << 23)), ir.FloatType())

    return types.float32(types.float32), codegen


@njit(forceinline=True, fastmath={"contract"}, error_model="numpy")
def exp_f32(x: Any) -> Any:
    """exp(x), f32 to f32, relative error <= 2e-7; exactly 0 below -87, inf above 88.7228, NaN stays NaN."""
    magic = x * _LOG2E + _ROUND
    n = magic - _ROUND
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    tail = (((_E4 * r + _E3) * r + _E2) * r + _E1) * r + _E0
    y = (tail * r * r + r + _ONE) * _scale_bits(magic) * _TWO
    y = _ZERO if x < _EXP_MIN else y
    return _INF if x > _EXP_MAX else y


@njit(forceinline=True, fastmath={"contract"}, error_model="numpy")
def sigmoid_f32(x: Any) -> Any:
    """1 / (1 + exp(-x)), f32 to f32, relative error <= 4e-7; never overflows."""
    return _ONE / (_ONE + exp_f32(-x))


@njit(forceinline=True, fastmath={"contract"}, error_model="numpy")
def silu_f32(x: Any) -> Any:
    """x * sigmoid(x), f32 to f32, relative error <= 4e-7."""
    return x / (_ONE + exp_f32(-x))


@njit(forceinline=True, fastmath={"contract"}, error_model="numpy")
def softplus_f32(x: Any) -> Any:
    """log(1 + exp(x)), f32 to f32, relative error <= 4e-7 down to x = -87; equals x above 20 to the last bit."""
    magnitude = x if x > _ZERO else -x
    y = exp_f32(-magnitude)
    s = y / (_TWO + y)  # log1p(y) = 2 atanh(y / (2 + y)), which keeps small y to relative accuracy
    z = s * s
    series = ((((_A5 * z + _A4) * z + _A3) * z + _A2) * z + _A1) * z + _ONE
    return (x if x > _ZERO else _ZERO) + _TWO * s * series


@intrinsic
def f32_at(typingctx: Any, address: Any) -> Any:
    """A pointer to f32 at an int64 address; index it as `p[i]`. The caller keeps the memory alive."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), codegen


@intrinsic
def i64_at(typingctx: Any, address: Any) -> Any:
    """A pointer to int64 at an int64 address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), codegen


@intrinsic
def _sgemm(
    typingctx: Any,
    trans_a: Any,
    trans_b: Any,
    m: Any,
    n: Any,
    k: Any,
    alpha: Any,
    a: Any,
    lda: Any,
    b: Any,
    ldb: Any,
    beta: Any,
    c: Any,
    ldc: Any,
) -> Any:
    int64 = types.int64
    f32 = types.float32
    signature = types.void(
        types.boolean, types.boolean, int64, int64, int64, f32, int64, int64, int64, int64, f32, int64, int64
    )

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # numba_xxgemm is what numba's own np.dot calls; it finds scipy's BLAS by name, so compiled code can be
        # cached. It takes column-major operands: a row-major product is asked for transposed, C' = B' A'.
        trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc = args
        char, intp, pointer = ir.IntType(8), ir.IntType(64), cgutils.voidptr_t
        function_type = ir.FunctionType(
            ir.IntType(32),
            [char, char, char, intp, intp, intp, pointer, pointer, intp, pointer, intp, pointer, pointer, intp],
        )
        function = cgutils.get_or_insert_function(builder.module, function_type, "numba_xxgemm")

        def flag(trans: Any) -> Any:
            wanted = builder.icmp_unsigned("!=", trans, ir.Constant(trans.type, 0))
            return builder.select(wanted, ir.Constant(char, ord("t")), ir.Constant(char, ord("n")))

        def slot(value: Any) -> Any:
            return builder.bitcast(cgutils.alloca_once_value(builder, value), pointer)

        def at(address: Any) -> Any:
            return builder.inttoptr(address, pointer)

        kind = ir.Constant(char, ord("s"))
        operands = (slot(alpha), at(b), ldb, at(a), lda, slot(beta), at(c), ldc)
        builder.call(function, (kind, flag(trans_b), flag(trans_a), n, m, k, *operands))
        return context.get_dummy_value()

    return signature, codegen


@njit(forceinline=True)
def sgemm(
    trans_a: bool,
    trans_b: bool,
    m: int,
    n: int,
    k: int,
    alpha: Any,
    a: int,
    lda: int,
    b: int,
    ldb: int,
    beta: Any,
    c: int,
    ldc: int,
) -> None:
    """C <- alpha * op(A) @ op(B) + beta * C, row-major f32 at int64 addresses, leading strides in elements.

    Args:
        a:  [m, k], or [k, m] if trans_a      b:  [k, n], or [n, k] if trans_b      c:  [m, n]
        alpha, beta: f32; with beta = 0 the old content of C is not read (it may be NaN)
    Writes:   c[:m, :n] only
    """
    if m > 0 and n > 0 and k > 0:
        _sgemm(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)
