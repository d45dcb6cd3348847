"""Statements of inline PTX as numba-cuda intrinsics, written as a project that knows nothing of a harness would."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

_IR = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.uint16: ir.IntType(16),
    types.uint32: ir.IntType(32),
    types.uint64: ir.IntType(64),
    types.void: ir.VoidType(),
}
OF_CONSTRAINT = {
    "h": types.uint16,
    "r": types.uint32,
    "l": types.uint64,
    "f": types.float32,
    "d": types.float64,
}


def statement(returns: Any, arguments: list[Any], text: str, constraints: str, memory: bool = False) -> Any:
    """A device function that is this statement. `returns`: a type, or a UniTuple or list of them."""
    outs = list(returns) if isinstance(returns, list) else None
    if isinstance(returns, types.UniTuple):
        outs = [returns.dtype] * returns.count
    result = types.Tuple(outs) if outs else returns

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        t = ir.LiteralStructType([_IR[x] for x in outs]) if outs else _IR[returns]
        asm = ir.InlineAsm(ir.FunctionType(t, [_IR[x] for x in arguments]), text, constraints, side_effect=memory)
        r = builder.call(asm, args)
        if outs:
            return context.make_tuple(builder, result, [builder.extract_value(r, i) for i in range(len(outs))])
        return context.get_dummy_value() if returns is types.void else r

    names = ", ".join(f"x{i}" for i in range(len(arguments)))
    space = {"sig": signature(result, *arguments), "generate": generate}
    exec(f"def f(typingctx{', ' if names else ''}{names}):\n    return sig, generate", space)
    return intrinsic(space["f"])


def from_constraints(text: str, constraints: str) -> Any:
    """The same, with the types that the constraints say."""
    parts = [c for c in constraints.split(",") if c and not c.startswith("~")]
    outs = [OF_CONSTRAINT[c[1:]] for c in parts if c.startswith("=")]
    ins = [OF_CONSTRAINT[c] if not c.isdigit() else outs[int(c)] for c in parts if not c.startswith("=")]
    returns = types.void if not outs else outs[0] if len(outs) == 1 else outs
    return statement(returns, ins, text, constraints, memory=not outs or "memory" in constraints)


@intrinsic
def shared_u32(typingctx: Any, a: Any) -> Any:
    """32-bit shared address of an array's first element."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        p = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(builder.addrspacecast(p, ir.PointerType(p.type.pointee, 3)), ir.IntType(32))

    return types.uint32(a), generate


@intrinsic
def f32_array(typingctx: Any, address: Any, n: Any) -> Any:
    """1-D f32 view of a raw 64-bit address."""
    ty = types.Array(types.float32, 1, "C")

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        a = context.make_array(ty)(context, builder)
        count = context.cast(builder, args[1], sig.args[1], types.int64)
        k = context.get_constant(types.int64, 4)
        data = builder.inttoptr(args[0], a.data.type)
        context.populate_array(a, data=data, shape=[count], strides=[k], itemsize=k, meminfo=None)
        return a._getvalue()

    return signature(ty, types.uint64, n), generate


MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
_MMA_TYPES = (types.UniTuple(types.float32, 4), [types.uint32] * 6 + [types.float32] * 4)
_MMA_CONSTRAINTS = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
mma = statement(
    *_MMA_TYPES, f"{MMA} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};", _MMA_CONSTRAINTS
)
mma_swapped = statement(  # a bug in the text: two registers of A in each other's place
    *_MMA_TYPES, f"{MMA} {{$0,$1,$2,$3}}, {{$4,$6,$5,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};", _MMA_CONSTRAINTS
)
ldmatrix_x4 = from_constraints(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,r,~{memory}"
)
ldmatrix_x2_trans = from_constraints(
    "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {$0,$1}, [$2];", "=r,=r,r,~{memory}"
)
cp_async_16 = from_constraints("cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}")
cp_async_commit = from_constraints("cp.async.commit_group;", "~{memory}")
cp_async_wait_0 = from_constraints("cp.async.wait_group 0;", "~{memory}")
cp_async_wait_1 = from_constraints("cp.async.wait_group 1;", "~{memory}")
ld_acquire_u32 = from_constraints("ld.acquire.sys.global.u32 $0, [$1];", "=r,l,~{memory}")
st_release_u32 = from_constraints("st.release.sys.global.u32 [$0], $1;", "l,r,~{memory}")
ld_acquire_u64 = from_constraints("ld.acquire.sys.global.u64 $0, [$1];", "=l,l,~{memory}")
st_release_u64 = from_constraints("st.release.sys.global.u64 [$0], $1;", "l,l,~{memory}")
