"""The memory orders two ranks share: every atomic access of the host backend, and its LLVM spelling.

Rule 1: an ordering is chosen here, by name; nothing outside emits an atomic or a fence.
Rule 2: no protocol. What is stored where, and why the order suffices, is doorbell.py's and README.md's.

Words are unsigned in memory and travel as int64: numba turns uint64 + int64 into float64, which would lose bits above
2^53. 64-bit words must therefore stay below 2^63 (doorbell values do); 32-bit ones are zero-extended.
Hot: yes. Each is one or two instructions; call them from njit code, with an address that is mapped and aligned.
"""

from __future__ import annotations

from typing import Any

import numba.extending
from llvmlite import ir
from numba import types

#: numba types an intrinsic as a call with its typing context; in njit code there is none.
intrinsic: Any = numba.extending.intrinsic

I32 = ir.IntType(32)
I64 = ir.IntType(64)


def _pointer(builder: Any, address: Any, word: ir.IntType) -> Any:
    return builder.inttoptr(address, word.as_pointer())


def emit_load(builder: Any, address: Any, word: ir.IntType, ordering: str) -> Any:
    """Atomic load of `word` at an i64 address, zero-extended to i64."""
    value = builder.load_atomic(_pointer(builder, address, word), ordering, word.width // 8)
    return value if word.width == 64 else builder.zext(value, I64)


def emit_store(builder: Any, address: Any, value: Any, word: ir.IntType, ordering: str) -> None:
    """Atomic store of the low bits of an i64 value."""
    low = value if word.width == 64 else builder.trunc(value, word)
    builder.store_atomic(low, _pointer(builder, address, word), ordering, word.width // 8)


def emit_fetch_add(builder: Any, address: Any, value: Any, word: ir.IntType, ordering: str) -> Any:
    """Atomic add; the value before it, zero-extended to i64. Wraps."""
    low = value if word.width == 64 else builder.trunc(value, word)
    before = builder.atomic_rmw("add", _pointer(builder, address, word), low, ordering)
    return before if word.width == 64 else builder.zext(before, I64)


def emit_relax(builder: Any) -> None:
    """Tell the core that this is a spin loop. Nothing where the target has no such hint."""
    arch = builder.module.triple.split("-")[0]
    # LLVM's intrinsics, not inline asm: numba initialises no asm parser and would abort the process.
    if arch == "x86_64":
        hint, arguments = "llvm.x86.sse2.pause", []
    elif arch == "aarch64":  # isb takes some tens of ns, like pause; aarch64's yield is a no-op on most cores
        hint, arguments = "llvm.aarch64.isb", [ir.Constant(I32, 15)]
    else:
        return
    type_ = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    module = builder.module
    builder.call(module.globals[hint] if hint in module.globals else ir.Function(module, type_, hint), arguments)


@intrinsic
def load_acquire_u64(typingctx: Any, address: Any) -> Any:
    """load_acquire_u64(address) -> int64: what the storer wrote before its release is visible after it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load(builder, args[0], I64, "acquire")

    return types.int64(types.int64), generate


@intrinsic
def store_release_u64(typingctx: Any, address: Any, value: Any) -> Any:
    """store_release_u64(address, value): everything this thread read or wrote before is done before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_store(builder, args[0], args[1], I64, "release")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def load_seqcst_u32(typingctx: Any, address: Any) -> Any:
    """load_seqcst_u32(address) -> int64: one place in the single order of all sequentially consistent accesses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load(builder, args[0], I32, "seq_cst")

    return types.int64(types.int64), generate


@intrinsic
def store_seqcst_u32(typingctx: Any, address: Any, value: Any) -> Any:
    """store_seqcst_u32(address, value): no later sequentially consistent load may pass it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_store(builder, args[0], args[1], I32, "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def fetch_add_seqcst_u32(typingctx: Any, address: Any, value: Any) -> Any:
    """fetch_add_seqcst_u32(address, value) -> int64: the value before; wraps at 2^32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_fetch_add(builder, args[0], args[1], I32, "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def fetch_add_seqcst_u64(typingctx: Any, address: Any, value: Any) -> Any:
    """fetch_add_seqcst_u64(address, value) -> int64: the value before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_fetch_add(builder, args[0], args[1], I64, "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def cpu_relax(typingctx: Any) -> Any:
    """cpu_relax(): the spin-loop hint of this processor."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_relax(builder)
        return context.get_dummy_value()

    return types.void(), generate
