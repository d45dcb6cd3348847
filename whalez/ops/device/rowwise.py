"""What row-wise kernels share: four or eight bf16 or four f32 in one access, as f32 in registers; sums; the sigmoid.

A vector index counts vectors: vector i of a bf16 array begins at element 4 i or 8 i. The register tile `t` is a local
array, indexed by constants only after unrolling, so it never becomes memory; `at` is where in it the vector lies.

That the accesses are aligned is decided outside the kernel, once per launch, by `vectors_of`. Kernels walk that many
vectors of a row and take what is left of it, or all of it, element by element.
Hot: yes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import libdevice, types
from numba.cuda.extending import intrinsic as _intrinsic

from whalez.ops.device.ptx import cvt_bf16x2_f32

# numba declares the decorator's result with the typing context as an argument callers must pass, which they must not.
intrinsic: Any = _intrinsic
f32 = types.float32

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_BF16P, _F32P = types.CPointer(types.uint16), types.CPointer(types.float32)


def vectors_of(width: int, vector: int, addresses: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many whole vectors every row of `width` elements has; 0 if some row's would not be aligned.

    Args:
        vector:     elements per vector: 4, or 8 of bf16
        addresses:  of all arrays accessed by vectors, f32 and bf16 alike
        strides:    and offsets, in elements: all that is added to an address before the vector index
    """
    aligned = all(a % 16 == 0 for a in addresses) and all(s % vector == 0 for s in strides)
    return width // vector if aligned else 0


@cuda.jit(device=True)
def load_x4_thread(g: Any, i_quad: Any, t: Any, at: Any) -> None:
    """t[at:at+4] <- quad `i_quad` of bf16 or f32, one access of 8 or 16 bytes."""
    t[at], t[at + 1], t[at + 2], t[at + 3] = _load_x4(g, i_quad)


@cuda.jit(device=True)
def load_bf16x8_thread(g: Any, i_octet: Any, t: Any) -> None:
    """t[:8] <- bf16 octet `i_octet`, one access of 16 bytes."""
    t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7] = _load_bf16x8(g, i_octet)


@cuda.jit(device=True)
def store_bf16x4_thread(g: Any, i_quad: Any, t: Any) -> None:
    """bf16 quad `i_quad` <- t[:4], rounded to nearest even, one access of 8 bytes."""
    _store_u32x2(g, i_quad, cvt_bf16x2_f32(t[0], t[1]), cvt_bf16x2_f32(t[2], t[3]))


@cuda.jit(device=True)
def store_bf16x8_thread(g: Any, i_octet: Any, t: Any) -> None:
    """bf16 octet `i_octet` <- t[:8], rounded to nearest even, one access of 16 bytes."""
    low, high = cvt_bf16x2_f32(t[0], t[1]), cvt_bf16x2_f32(t[2], t[3])
    _store_u32x4(g, i_octet, low, high, cvt_bf16x2_f32(t[4], t[5]), cvt_bf16x2_f32(t[6], t[7]))


@cuda.jit(device=True)
def store_f32x4_thread(g: Any, i_quad: Any, t: Any) -> None:
    """f32 quad `i_quad` <- t[:4], one access of 16 bytes."""
    _store_f32x4(g, i_quad, t[0], t[1], t[2], t[3])


@cuda.jit(device=True)
def copy_bf16x8_thread(g_to: Any, i_to: Any, g_from: Any, i_from: Any) -> None:
    """Octet `i_to` of g_to <- octet `i_from` of g_from, bit by bit."""
    a, b, c, d = _load_u32x4(g_from, i_from)
    _store_u32x4(g_to, i_to, a, b, c, d)


@cuda.jit(device=True)
def warp_sum_warp(x: Any) -> Any:
    """The sum over 32 lanes, the same bits in each: partners add the same two values."""
    for distance in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(0xFFFFFFFF, x, distance)
    return x


@cuda.jit(device=True)
def block_sum_block(x: Any) -> Any:
    """The sum over a block of whole warps, the same bits in each thread. Once per kernel: it has one shared array."""
    s_sums = cuda.shared.array(32, f32)
    i_lane, i_warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    x = warp_sum_warp(x)
    if i_lane == 0:
        s_sums[i_warp] = x
    cuda.syncthreads()
    return warp_sum_warp(s_sums[i_lane] if i_lane < cuda.blockDim.x // 32 else f32(0.0))


@cuda.jit(device=True)
def sigmoid_thread(x: Any) -> Any:
    """1 / (1 + exp(-x)) to a relative 1e-5, 400 times finer than the bf16 it ends in.

    exp is ex2.approx of x log2(e): 2 ulp, and the rounding of the product, |x| 2^-24 of the result, 5e-6 where exp is
    still finite. The quotient is a 2 ulp one that gives 0 behind 2^126, where the sigmoid is below 1.2e-38. So 0 and 1
    at the ends, never NaN. The exact functions would cost more issue slots than a memory-bound row has.
    """
    return libdevice.fast_fdividef(f32(1.0), f32(1.0) + libdevice.fast_expf(-x))


def _vector_pointer(builder: Any, pointer: Any, index: Any, element: Any, count: int) -> Any:
    return builder.gep(builder.bitcast(pointer, ir.VectorType(element, count).as_pointer()), [index])


def _lane(n: int) -> Any:
    return ir.Constant(_I32, n)


def _load_bf16(pointer: Any, count: int) -> Any:
    if pointer != _BF16P:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = builder.load(_vector_pointer(builder, args[0], args[1], _I32, count // 2), align=2 * count)
        values = []
        for i in range(count // 2):
            word = builder.extract_element(words, _lane(i))
            values.append(builder.bitcast(builder.shl(word, ir.Constant(_I32, 16)), _F32))
            values.append(builder.bitcast(builder.and_(word, ir.Constant(_I32, 0xFFFF0000)), _F32))
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(types.float32, count)(_BF16P, types.int64), codegen


def _store(pointer: Any, pointer_type: Any, value_type: Any, element: Any, count: int, align: int) -> Any:
    if pointer != pointer_type:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.Constant(ir.VectorType(element, count), ir.Undefined)
        for i, value in enumerate(args[2:]):
            vector = builder.insert_element(vector, value, _lane(i))
        builder.store(vector, _vector_pointer(builder, args[0], args[1], element, count), align=align)
        return context.get_dummy_value()

    return types.void(pointer_type, types.int64, *[value_type] * count), codegen


@intrinsic
def load_x1(typingctx: Any, pointer: Any, index: Any) -> Any:
    """One f32 from element `index` of bf16 or f32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(builder.gep(args[0], [args[1]]))
        if pointer == _BF16P:
            value = builder.bitcast(builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16)), _F32)
        return value

    return (types.float32(pointer, types.int64), codegen) if pointer in (_BF16P, _F32P) else None


@intrinsic
def _load_x4(typingctx: Any, pointer: Any, index: Any) -> Any:
    return _load_bf16(pointer, 4) if pointer == _BF16P else _load_words(pointer, _F32P, types.float32, _F32, 4)


@intrinsic
def _load_bf16x8(typingctx: Any, pointer: Any, index: Any) -> Any:
    return _load_bf16(pointer, 8)


@intrinsic
def load_bits_x4(typingctx: Any, pointer: Any, index: Any) -> Any:
    """The 64 bits of bf16 quad `index`."""
    if pointer != _BF16P:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(builder.bitcast(args[0], _I64.as_pointer()), [args[1]]), align=8)

    return types.uint64(_BF16P, types.int64), codegen


@intrinsic
def store_bits_x4(typingctx: Any, pointer: Any, index: Any, bits: Any) -> Any:
    """bf16 quad `index` <- these 64 bits."""
    if pointer != _BF16P:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(builder.bitcast(args[0], _I64.as_pointer()), [args[1]]), align=8)
        return context.get_dummy_value()

    return types.void(_BF16P, types.int64, types.uint64), codegen


def _load_words(pointer: Any, pointer_type: Any, value_type: Any, element: Any, count: int) -> Any:
    if pointer != pointer_type:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = builder.load(_vector_pointer(builder, args[0], args[1], element, count), align=4 * count)
        values = [builder.extract_element(vector, _lane(i)) for i in range(count)]
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(value_type, count)(pointer_type, types.int64), codegen


@intrinsic
def _load_u32x4(typingctx: Any, pointer: Any, index: Any) -> Any:
    return _load_words(pointer, _BF16P, types.uint32, _I32, 4)


@intrinsic
def _store_u32x2(typingctx: Any, pointer: Any, index: Any, a: Any, b: Any) -> Any:
    return _store(pointer, _BF16P, types.uint32, _I32, 2, 8)


@intrinsic
def _store_u32x4(typingctx: Any, pointer: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return _store(pointer, _BF16P, types.uint32, _I32, 4, 16)


@intrinsic
def _store_f32x4(typingctx: Any, pointer: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return _store(pointer, _F32P, types.float32, _F32, 4, 16)
