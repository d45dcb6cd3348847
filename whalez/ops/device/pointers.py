"""Arithmetic on raw pointers inside kernels.

A pointer `p[i]` indexes like C: no bounds, and no wrap of negative indices, which for a shared array costs a select per
access and hides from the compiler which accesses are 16 bytes wide.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature


@intrinsic
def shared_pointer(typingctx: Any, array: Any) -> Any:
    """Pointer to the first value of a shared array; its accesses stay accesses of shared memory."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.make_array(sig.args[0])(context, builder, args[0]).data

    return signature(types.CPointer(array.dtype), array), generate


@intrinsic
def offset(typingctx: Any, pointer: Any, count: Any) -> Any:
    """`pointer + count` values."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return signature(pointer, pointer, types.int64), generate


@intrinsic
def shared_address_of(typingctx: Any, pointer: Any) -> Any:
    """u32 address of a pointer into shared memory, as ldmatrix and cp.async take it."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        shared = builder.addrspacecast(args[0], ir.PointerType(args[0].type.pointee, 3))
        return builder.ptrtoint(shared, ir.IntType(32))

    return signature(types.uint32, pointer), generate
