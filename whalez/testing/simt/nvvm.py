"""What NVVM and libdevice provide, as IR for the machine: special registers, barriers, collectives, mathematics.

libdevice itself is NVIDIA's bitcode, linked as it is; only the intrinsics and inline PTX it is made of are defined here
and in ptx.py. So `exp` and `sin` are NVIDIA's code, not libm's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import llvmlite.binding as ll
from numba.cuda.cudadrv import nvvm as numba_nvvm

from whalez.testing.simt import ptx as ptx  # libdevice uses statements that are defined there
from whalez.testing.simt.emulation import trap_ir
from whalez.testing.simt.machine import (
    IR_HEADER,
    OP_BAR,
    OP_MATCH_ALL,
    OP_MATCH_ANY,
    OP_SHFL,
    OP_SYNCWARP,
    OP_VOTE,
    SELF,
    YIELD,
    export,
)
from whalez.testing.simt.rewrite import _ASM, Rewriter

_TYPES = {"f": ("float", "f32"), "d": ("double", "f64")}
_DIRECTED = ("rz", "rm", "rp")
_DIRECTED_OPS = (("add", 2), ("mul", 2), ("div", 2), ("fma", 3), ("rcp", 1), ("sqrt", 1))


def _function(signature: str, *body: str) -> str:
    lines = "\n".join(f"  {line}" for line in body)
    return f"define linkonce_odr {signature} alwaysinline {{\n{lines}\n}}"


def _special_registers() -> Iterator[str]:
    def register(name: str, offset: int) -> str:
        return _function(
            f'i32 @"simt.nvvm.read.ptx.sreg.{name}"()', f"%r = call i32 @simt_field(i64 {offset})", "ret i32 %r"
        )

    for name, base in (("tid", 0), ("ctaid", 12), ("ntid", 24), ("nctaid", 36)):
        for k, axis in enumerate("xyz"):
            yield register(f"{name}.{axis}", base + 4 * k)
    yield register("laneid", 48)
    yield _function('i32 @"simt.nvvm.read.ptx.sreg.warpsize"()', "ret i32 32")


def _barriers() -> Iterator[str]:
    for name, kind in (("", 0), (".popc", 1), (".and", 2), (".or", 3)):
        returns, parameters = ("i32", ["i32 %p"]) if name else ("void", [])
        stores = [(k, "i64", str(v)) for k, v in enumerate((0, 0, kind, 0, 0, 0))]
        if name:
            stores[3] = (3, "i32", "%p")
        text = trap_ir(
            returns, f'"simt.nvvm.barrier0{name}"', parameters, stores, OP_BAR, "0", [("i32", 0)] if name else []
        )
        yield text.replace("define internal", "define linkonce_odr")
    for scope in ("cta", "gl", "sys"):
        yield _function(f'void @"simt.nvvm.membar.{scope}"()', "fence seq_cst", "ret void")


def _collectives() -> Iterator[str]:
    """The first argument is the mask of members, the others go into slots."""

    def define(name: str, results: list[str], types: list[str], op: int) -> str:
        returns = "void" if not results else results[0] if len(results) == 1 else "{" + ", ".join(results) + "}"
        text = trap_ir(
            returns,
            f'"simt.nvvm.{name}"',
            ["i32 %m", *(f"{t} %a{i}" for i, t in enumerate(types))],
            [(i, t, f"%a{i}") for i, t in enumerate(types)],
            op,
            "%m",
            [(t, i) for i, t in enumerate(results)],
        )
        return text.replace("define internal", "define linkonce_odr")

    yield define("bar.warp.sync", [], [], OP_SYNCWARP)
    yield define("shfl.sync.i32", ["i32", "i1"], ["i32"] * 4, OP_SHFL)
    yield define("vote.sync", ["i32", "i1"], ["i32", "i1"], OP_VOTE)
    for width in (32, 64):
        yield define(f"match.any.sync.i{width}", ["i32"], [f"i{width}"], OP_MATCH_ANY)
        yield define(f"match.all.sync.i{width}", ["i32", "i1"], [f"i{width}"], OP_MATCH_ALL)


def _atomics() -> Iterator[str]:
    for t, n in _TYPES.values():
        yield _function(
            f'{t} @"simt.nvvm.atomic.load.add.{n}.p0{n}"(ptr %p, {t} %v)',
            f"call void @simt_check(ptr %p, i64 {3 if t == 'float' else 7})",
            f"%r = atomicrmw fadd ptr %p, {t} %v monotonic",
            YIELD.strip(),
            f"ret {t} %r",
        )
    for k in ("inc", "dec"):
        yield _function(
            f'i32 @"simt.nvvm.atomic.load.{k}.32.p0i32"(ptr %p, i32 %v)',
            "call void @simt_check(ptr %p, i64 3)",
            f"%r = atomicrmw u{k}_wrap ptr %p, i32 %v monotonic",
            YIELD.strip(),
            "ret i32 %r",
        )


def _mathematics() -> Iterator[str]:
    """`.approx` is exact here, and `.ftz` keeps denormals: use tolerances."""
    for s, (t, n) in _TYPES.items():
        for z in (".ftz", "") if s == "f" else ("",):
            one = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint", "fabs": "fabs"}
            one |= {"sqrt.rn": "sqrt", "sqrt.approx": "sqrt", "ex2.approx": "exp2", "lg2.approx": "log2"}
            one |= {"sin.approx": "sin", "cos.approx": "cos"}
            for name, llvm in one.items():
                for full in (f"{name}{z}.{s}", f"{name}{z}.{n}"):
                    yield _function(
                        f'{t} @"simt.nvvm.{full}"({t} %a)', f"%r = call {t} @llvm.{llvm}.{n}({t} %a)", f"ret {t} %r"
                    )
            for name in ("rcp.rn", "rcp.approx"):
                yield _function(f'{t} @"simt.nvvm.{name}{z}.{s}"({t} %a)', f"%r = fdiv {t} 1.0, %a", f"ret {t} %r")
            yield _function(
                f'{t} @"simt.nvvm.rsqrt.approx{z}.{s}"({t} %a)',
                f"%q = call {t} @llvm.sqrt.{n}({t} %a)",
                f"%r = fdiv {t} 1.0, %q",
                f"ret {t} %r",
            )
            for name, llvm in (("fmin", "minnum"), ("fmax", "maxnum")):
                yield _function(
                    f'{t} @"simt.nvvm.{name}{z}.{s}"({t} %a, {t} %b)',
                    f"%r = call {t} @llvm.{llvm}.{n}({t} %a, {t} %b)",
                    f"ret {t} %r",
                )
            for name, llvm in (("add.rn", "fadd"), ("mul.rn", "fmul"), ("div.rn", "fdiv"), ("div.approx", "fdiv")):
                yield _function(
                    f'{t} @"simt.nvvm.{name}{z}.{s}"({t} %a, {t} %b)', f"%r = {llvm} {t} %a, %b", f"ret {t} %r"
                )
            yield _function(
                f'{t} @"simt.nvvm.fma.rn{z}.{s}"({t} %a, {t} %b, {t} %c)',
                f"%r = call {t} @llvm.fma.{n}({t} %a, {t} %b, {t} %c)",
                f"ret {t} %r",
            )
            yield _function(
                f'{t} @"simt.nvvm.saturate{z}.{s}"({t} %a)',
                f"%q = call {t} @llvm.maxnum.{n}({t} %a, {t} 0.0)",
                f"%r = call {t} @llvm.minnum.{n}({t} %q, {t} 1.0)",
                f"ret {t} %r",
            )
            for integer, width, sign in (("i", 32, "s"), ("ui", 32, "u"), ("ll", 64, "s"), ("ull", 64, "u")):
                for mode, llvm in (("rz", "trunc"), ("rn", "roundeven"), ("rm", "floor"), ("rp", "ceil")):
                    yield _function(
                        f'i{width} @"simt.nvvm.{s}2{integer}.{mode}{z}"({t} %a)',
                        f"%q = call {t} @llvm.{llvm}.{n}({t} %a)",
                        f"%r = call i{width} @llvm.fpto{sign}i.sat.i{width}.{n}({t} %q)",
                        f"ret i{width} %r",
                    )
                if not z:
                    yield _function(
                        f'{t} @"simt.nvvm.{integer}2{s}.rn"(i{width} %a)',
                        f"%r = {sign}itofp i{width} %a to {t}",
                        f"ret {t} %r",
                    )


def _directed_rounding() -> Iterator[str]:
    for mode in _DIRECTED:
        for s, (t, _) in _TYPES.items():
            for name, n in _DIRECTED_OPS:
                symbol = f"simt_{name}_{mode}_{s}"
                export(symbol)
                yield f"declare {t} @{symbol}({', '.join([t] * n)})"
                parameters = ", ".join(f"{t} %a{i}" for i in range(n))
                for z in (".ftz", "") if s == "f" else ("",):
                    yield _function(
                        f'{t} @"simt.nvvm.{name}.{mode}{z}.{s}"({parameters})',
                        f"%r = call {t} @{symbol}({parameters})",
                        f"ret {t} %r",
                    )
        export(f"simt_d2f_{mode}")
        yield f"declare float @simt_d2f_{mode}(double)"
        for z in (".ftz", ""):
            yield _function(
                f'float @"simt.nvvm.d2f.{mode}{z}"(double %a)',
                f"%r = call float @simt_d2f_{mode}(double %a)",
                "ret float %r",
            )


def _conversions() -> Iterator[str]:
    for z in (".ftz", ""):
        yield _function(f'float @"simt.nvvm.d2f.rn{z}"(double %a)', "%r = fptrunc double %a to float", "ret float %r")
        yield _function(
            f'i16 @"simt.nvvm.f2h.rn{z}"(float %a)',
            "%h = fptrunc float %a to half",
            "%r = bitcast half %h to i16",
            "ret i16 %r",
        )
    yield _function(
        'i32 @"simt.nvvm.d2i.lo"(double %a)', "%b = bitcast double %a to i64", "%r = trunc i64 %b to i32", "ret i32 %r"
    )
    yield _function(
        'i32 @"simt.nvvm.d2i.hi"(double %a)',
        "%b = bitcast double %a to i64",
        "%c = lshr i64 %b, 32",
        "%r = trunc i64 %c to i32",
        "ret i32 %r",
    )
    yield _function(
        'double @"simt.nvvm.lohi.i2d"(i32 %l, i32 %h)',
        "%a = zext i32 %l to i64",
        "%b = zext i32 %h to i64",
        "%c = shl i64 %b, 32",
        "%d = or i64 %a, %c",
        "%r = bitcast i64 %d to double",
        "ret double %r",
    )
    for name, w, e in (("i", 32, "s"), ("ui", 32, "z"), ("ll", 64, "s"), ("ull", 64, "z")):
        yield _function(
            f'i{w} @"simt.nvvm.mulhi.{name}"(i{w} %a, i{w} %b)',
            f"%x = {e}ext i{w} %a to i{2 * w}",
            f"%y = {e}ext i{w} %b to i{2 * w}",
            f"%m = mul i{2 * w} %x, %y",
            f"%h = lshr i{2 * w} %m, {w}",
            f"%r = trunc i{2 * w} %h to i{w}",
            f"ret i{w} %r",
        )
    yield _function('double @"simt.nvvm.rcp.approx.ftz.d"(double %a)', "%r = fdiv double 1.0, %a", "ret double %r")
    yield _function("i32 @__nvvm_reflect(ptr %p)", "ret i32 0")


@functools.cache
def definitions() -> bytes:
    """Bitcode of everything but libdevice."""
    shared_base = f"""
define linkonce_odr ptr @simt_smem(ptr %off) alwaysinline {{
  %f = load ptr, ptr inttoptr (i64 {SELF} to ptr)
  %a = getelementptr i8, ptr %f, i64 64
  %s = load ptr, ptr %a
  %o = load i64, ptr %off
  %r = getelementptr i8, ptr %s, i64 %o
  ret ptr %r
}}"""
    parts = (
        _special_registers,
        _barriers,
        _collectives,
        _atomics,
        _mathematics,
        _directed_rounding,
        _conversions,
    )
    header = IR_HEADER.replace("define internal", "define linkonce_odr")
    text = "\n".join([header, shared_base, *(line for part in parts for line in part())])
    bitcode: bytes = ll.parse_assembly(text).as_bitcode()
    return bitcode


@functools.cache
def libdevice() -> bytes:
    """Bitcode of libdevice with the statements of inline PTX it contains."""
    text = str(ll.parse_bitcode(numba_nvvm.LibDevice().get()))
    text = re.sub(r"^target .*$", "", text, flags=re.M).replace("llvm.nvvm.", "simt.nvvm.")
    text = re.sub(r"^!(nvvm|llvm)[\w.]* = .*$", "", text, flags=re.M)
    rewriter = Rewriter("libdevice", "simt_libdevice_asm_")
    lines = [_ASM.sub(rewriter.call_site, line) if " asm " in line else line for line in text.splitlines()]
    module = ll.parse_assembly(rewriter.site_declarations() + "\n" + "\n".join(lines))
    module.link_in(ll.parse_assembly(sites_module(rewriter)))
    bitcode: bytes = module.as_bitcode()
    return bitcode


def sites_module(rewriter: Rewriter) -> str:
    """IR module that defines the statements a rewriter met."""
    externals = "".join(
        f"declare {t} @simt_add_{mode}_{s}({t}, {t})\n" for mode in _DIRECTED for s, (t, _) in _TYPES.items()
    )
    definitions_text = re.sub(r"^define internal", "define", rewriter.site_definitions(), flags=re.M)
    return IR_HEADER + externals + definitions_text
