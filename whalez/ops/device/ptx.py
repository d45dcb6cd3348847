"""All inline PTX of the project, one named function each, for use in kernels.

Names follow the instruction: what it does, its memory order, its scope, its type. Addresses of global memory are u64,
addresses of shared memory are u32 (`shared_address`). A fence or ordered access that is not here does not exist.
Sources: PTX ISA 9, sections on ld, st, fence, mma, ldmatrix, cp.async and cvt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

_IR = {
    types.float32: ir.FloatType(),
    types.uint16: ir.IntType(16),
    types.uint32: ir.IntType(32),
    types.uint64: ir.IntType(64),
    types.void: ir.VoidType(),
}


def _asm(
    result: Any, arguments: tuple[Any, ...], text: str, constraints: str, *, memory: bool
) -> tuple[Any, Callable[..., Any]]:
    """Signature and code generator of one statement. `memory`: it reads or writes memory, or orders those who do."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        is_tuple = isinstance(result, types.UniTuple)
        returned = ir.LiteralStructType([_IR[result.dtype]] * result.count) if is_tuple else _IR[result]
        kind = ir.FunctionType(returned, [_IR[each] for each in arguments])
        wanted = ",".join(filter(None, (constraints, "~{memory}" if memory else "")))
        value = builder.call(ir.InlineAsm(kind, text, wanted, side_effect=memory), args)
        if is_tuple:
            return context.make_tuple(builder, result, [builder.extract_value(value, i) for i in range(result.count)])
        return context.get_dummy_value() if result is types.void else value

    return signature(result, *arguments), generate


_F4, _U4 = types.UniTuple(types.float32, 4), types.UniTuple(types.uint32, 4)
_U16, _U32, _U64, _F32, _VOID = types.uint16, types.uint32, types.uint64, types.float32, types.void


# ---- doorbells: between devices, so the scope is the system ------------------------------------------------------
@intrinsic
def st_release_sys_u64(typingctx: Any, address: Any, value: Any) -> Any:
    """Store; all this thread wrote and observed before is visible to whoever acquires the value."""
    return _asm(_VOID, (_U64, _U64), "st.release.sys.global.u64 [$0], $1;", "l,l", memory=True)


@intrinsic
def ld_acquire_sys_u64(typingctx: Any, address: Any) -> Any:
    """Load; what the releasing side did before its store is visible after it."""
    return _asm(_U64, (_U64,), "ld.acquire.sys.global.u64 $0, [$1];", "=l,l", memory=True)


@intrinsic
def st_volatile_u64(typingctx: Any, address: Any, value: Any) -> Any:
    """Store to host-visible memory, not merged and not delayed by the compiler; orders nothing."""
    return _asm(_VOID, (_U64, _U64), "st.volatile.global.u64 [$0], $1;", "l,l", memory=True)


@intrinsic
def nanosleep(typingctx: Any, ns: Any) -> Any:
    """Suspend the thread for about so many nanoseconds; a spin then leaves the memory system to others."""
    return _asm(_VOID, (_U32,), "nanosleep.u32 $0;", "r", memory=True)


@intrinsic
def globaltimer(typingctx: Any) -> Any:
    """Nanoseconds of the device's global timer."""
    return _asm(_U64, (), "mov.u64 $0, %globaltimer;", "=l", memory=True)


# ---- tensor cores --------------------------------------------------------------------------------------------------
@intrinsic
def mma_m16n8k16_bf16(
    typingctx: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any, c0: Any, c1: Any, c2: Any, c3: Any
) -> Any:
    """One warp: D = A B + C, A 16x16 and B 16x8 bf16 (two per register), C and D 16x8 f32. Returns D."""
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return _asm(_F4, (*[_U32] * 6, *[_F32] * 4), text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", memory=False)


@intrinsic
def ldmatrix_x4(typingctx: Any, address: Any) -> Any:
    """One warp: four 8x8 matrices of 16-bit values from shared memory. Lane l gives the address of row l % 8 of matrix
    l // 8 (16 bytes, aligned to 16) and gets of each matrix the values (l // 4, 2 (l % 4)) and its neighbour."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];"
    return _asm(_U4, (_U32,), text, "=r,=r,=r,=r,r", memory=True)


@intrinsic
def ldmatrix_x4_trans(typingctx: Any, address: Any) -> Any:
    """As `ldmatrix_x4`, each matrix transposed on the way."""
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];"
    return _asm(_U4, (_U32,), text, "=r,=r,=r,=r,r", memory=True)


# ---- copies from global to shared memory that run beside the arithmetic ----------------------------------------------
@intrinsic
def cp_async_16(typingctx: Any, shared: Any, address: Any) -> Any:
    """Start copying 16 bytes, both sides aligned to 16; done after the wait for its group and a barrier."""
    return _asm(_VOID, (_U32, _U64), "cp.async.cg.shared.global [$0], [$1], 16;", "r,l", memory=True)


@intrinsic
def cp_async_commit(typingctx: Any) -> Any:
    """Close the group of this thread's copies started since the last one."""
    return _asm(_VOID, (), "cp.async.commit_group;", "", memory=True)


@intrinsic
def cp_async_wait_all(typingctx: Any) -> Any:
    """Wait for all copies of this thread."""
    return _asm(_VOID, (), "cp.async.wait_all;", "", memory=True)


# ---- numbers -------------------------------------------------------------------------------------------------------
@intrinsic
def cvt_bf16x2_f32(typingctx: Any, low: Any, high: Any) -> Any:
    """Two f32 rounded to nearest even, packed: `low` in the lower 16 bits."""
    return _asm(_U32, (_F32, _F32), "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", memory=False)


@intrinsic
def cvt_bf16_f32(typingctx: Any, value: Any) -> Any:
    """One f32 rounded to nearest even, as its 16 bits."""
    return _asm(_U16, (_F32,), "cvt.rn.bf16.f32 $0, $1;", "=h,f", memory=False)


@intrinsic
def ex2_approx_f32(typingctx: Any, value: Any) -> Any:
    """2 to the power of `value` within 2 units in the last place; 0 for -inf and for all below 2^-126.

    For weights that are rounded to bf16 next. One instruction, where exp2f takes five.
    """
    return _asm(_F32, (_F32,), "ex2.approx.ftz.f32 $0, $1;", "=f,f", memory=False)


@intrinsic
def f32_from_bf16(typingctx: Any, bits: Any) -> Any:
    """The f32 with the same value: bf16 is its upper half."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return signature(_F32, _U16), generate


@intrinsic
def f32_from_bits(typingctx: Any, bits: Any) -> Any:
    """Reinterpret 32 bits as f32; with a shift and a mask this unpacks a bf16 pair."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return signature(_F32, _U32), generate


@intrinsic
def shared_address(typingctx: Any, array: Any) -> Any:
    """u32 address of a shared array's first byte, as ldmatrix and cp.async take it."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        shared = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
        return builder.ptrtoint(shared, ir.IntType(32))

    return signature(_U32, array), generate


@intrinsic
def address_of(typingctx: Any, pointer: Any) -> Any:
    """u64 address of a pointer argument, for the ordered accesses and copies above."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], ir.IntType(64))

    return signature(_U64, pointer), generate
