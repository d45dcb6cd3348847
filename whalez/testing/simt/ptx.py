"""The CPU meaning of every statement of inline PTX that the project's kernels, or libdevice, contain.

Rule: an emulation is written from the PTX ISA, not from the kernel that uses it, and has a numpy test of its own in
tests/cuda/test_simt_ptx.py; a test fails if one has none.   Where PTX leaves freedom (`.approx`, order of the sums of a
matrix product, when an asynchronous copy lands) this file takes the exact or the worst answer.
"""

from __future__ import annotations

import re

from whalez.testing.simt.emulation import Mem, Reg, Site, Vec, emulate_ir, emulate_native
from whalez.testing.simt.errors import SimtError
from whalez.testing.simt.machine import CLOCK, OP_BAR, OP_FAIL, OP_SLEEP, YIELD

_SCOPE = r"(?:\.(?:cta|cluster|gpu|sys))?"
_SPACE = r"(?:\.(?:global|shared(?:::cta)?|const))?"
_CACHE = r"(?:\.(?:nc|ca|cg|cs|lu|cv|wb|wt))*(?:\.L[12]::[\w:]+)*"


# --------------------------------------------------------------------------------------------- tensor cores and copies
emulate_native(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32", "simt_mma_m16n8k16_bf16", "warp")
emulate_native(r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.bf16\.bf16\.f32", "simt_mma_m16n8k8_bf16", "warp")
emulate_native(r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32", "simt_mma_m16n8k8_tf32", "warp")
for _n in (1, 2, 4):
    _shape = rf"ldmatrix\.sync\.aligned\.m8n8\.x{_n}"
    emulate_native(rf"{_shape}\.shared(?:::cta)?\.b16", f"simt_ldmatrix_x{_n}", "warp")
    emulate_native(rf"{_shape}\.trans\.shared(?:::cta)?\.b16", f"simt_ldmatrix_x{_n}_trans", "warp")
emulate_native(r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::\w+)?", "simt_cp_async", "thread")
emulate_native(r"cp\.async\.commit_group", "simt_cp_async_commit", "thread")
emulate_native(r"cp\.async\.wait_(?:group|all)", "simt_cp_async_wait", "thread")


# --------------------------------------------------------------------------------------------------- loads and stores
def _memory_type(t: str) -> tuple[str, int]:
    bits = int(t[1:])
    return ({32: "float", 64: "double"}[bits] if t[0] == "f" else f"i{bits}"), bits // 8


def _pointer(site: Site, where: Mem, bytes_count: int) -> list[str]:
    """Lines that leave the checked address in %p."""
    t = site.type_of(where.index)
    lines = [f"%b = inttoptr {t} {site.arg(where.index)} to ptr"] if t in ("i32", "i64") else []
    base = "%b" if lines else site.arg(where.index)
    lines.append(f"%p = getelementptr i8, ptr {base}, i64 {where.offset}")
    return [*lines, f"call void @simt_check(ptr %p, i64 {bytes_count - 1})"]


def _convert(value: str, have: str, want: str, signed: bool, name: str) -> tuple[list[str], str]:
    """Between the type in memory and the type of the register, which may be wider or of the other kind."""
    if have == want:
        return [], value
    bits = {"float": 32, "double": 64}
    b_have, b_want = (bits.get(t) or int(t[1:]) for t in (have, want))
    if b_have == b_want:
        return [f"{name} = bitcast {have} {value} to {want}"], name
    assert have[0] == want[0] == "i", f"{have} to {want}"
    how = "trunc" if b_have > b_want else "sext" if signed else "zext"
    return [f"{name} = {how} {have} {value} to {want}"], name


def _pieces(o: object) -> tuple[int, ...]:
    assert isinstance(o, Reg | Vec), f"operand {o} not understood"
    return o.indices if isinstance(o, Vec) else (o.index,)


def _lines(*body: str) -> str:
    return "\n".join(f"  {line.strip()}" for line in body)


def _load(site: Site, m: re.Match[str]) -> str:
    assert site.operands
    destination, where = site.operands
    assert isinstance(where, Mem)
    registers = _pieces(destination)
    t, size = _memory_type(m["type"])
    seen_by_others = m["order"] not in (None, "weak")
    body = [*_pointer(site, where, size * len(registers)), YIELD if seen_by_others else ""]
    values = []
    for i, k in enumerate(registers):
        body.append(f"%p{i} = getelementptr {t}, ptr %p, i64 {i}")
        how = f"load atomic {t}, ptr %p{i} seq_cst, align {size}" if seen_by_others else f"load {t}, ptr %p{i}"
        body.append(f"%m{i} = {how}")
        more, value = _convert(f"%m{i}", t, site.type_of(k), m["type"][0] == "s", f"%c{i}")
        body += more
        values.append(value)
    return _lines(*body, *_return(site, values))


def _return(site: Site, values: list[str]) -> list[str]:
    if not site.returns.startswith("{"):
        return [f"ret {site.returns} {values[0]}"]
    lines, whole = [], "undef"
    for i, (t, value) in enumerate(zip(site.out_types, values, strict=True)):
        lines.append(f"%g{i} = insertvalue {site.returns} {whole}, {t} {value}, {i}")
        whole = f"%g{i}"
    return [*lines, f"ret {site.returns} {whole}"]


def _store(site: Site, m: re.Match[str]) -> str:
    assert site.operands
    where, source = site.operands
    assert isinstance(where, Mem)
    t, size = _memory_type(m["type"])
    seen_by_others = m["order"] not in (None, "weak")
    if isinstance(source, int):
        values: list[tuple[list[str], str]] = [([], str(source))]
    else:
        registers = _pieces(source)
        values = [_convert(site.arg(k), site.type_of(k), t, False, f"%c{i}") for i, k in enumerate(registers)]
    body = _pointer(site, where, size * len(values))
    for i, (more, value) in enumerate(values):
        body += [*more, f"%p{i} = getelementptr {t}, ptr %p, i64 {i}"]
        atomic = f" seq_cst, align {size}" if seen_by_others else ""
        body.append(f"store {'atomic ' if atomic else ''}{t} {value}, ptr %p{i}{atomic}")
    return _lines(*body, YIELD if seen_by_others else "", "ret void")


_TYPE = r"(?:\.v[248])?\.(?P<type>[bus](?:8|16|32|64)|f32|f64)"
emulate_ir(rf"ld(?:\.(?P<order>weak|volatile|relaxed|acquire))?{_SCOPE}{_SPACE}{_CACHE}{_TYPE}", _load)
emulate_ir(rf"st(?:\.(?P<order>weak|volatile|relaxed|release))?{_SCOPE}{_SPACE}{_CACHE}{_TYPE}", _store)


def _atomic(site: Site, m: re.Match[str]) -> str:
    assert site.operands
    operands = list(site.operands)
    destination = operands.pop(0) if m["kind"] == "atom" else None
    where, *sources = operands
    assert isinstance(where, Mem)
    t, size = _memory_type(m["type"])
    body = [YIELD, *_pointer(site, where, size)]
    names = []
    for i, o in enumerate(sources):
        if isinstance(o, int):
            names.append(str(o))
            continue
        (k,) = _pieces(o)
        more, name = _convert(site.arg(k), site.type_of(k), t, False, f"%c{i}")
        body += more
        names.append(name)
    if m["op"] == "cas":
        body += [
            f"%x = cmpxchg ptr %p, {t} {names[0]}, {t} {names[1]} seq_cst seq_cst",
            f"%old = extractvalue {{ {t}, i1 }} %x, 0",
        ]
    else:
        ops = {"exch": "xchg", "inc": "uinc_wrap", "dec": "udec_wrap"}
        op = ops.get(m["op"], m["op"])
        if op in ("min", "max") and m["type"][0] in "ub":
            op = "u" + op
        if t in ("float", "double") and op != "xchg":
            op = "f" + op
        body.append(f"%old = atomicrmw {op} ptr %p, {t} {names[0]} seq_cst")
    body.append(YIELD)
    if destination is None:
        return _lines(*body, "ret void")
    (k,) = _pieces(destination)
    more, value = _convert("%old", t, site.type_of(k), False, "%c_old")
    return _lines(*body, *more, *_return(site, [value]))


emulate_ir(
    rf"(?P<kind>atom|red)(?:\.(?:relaxed|acquire|release|acq_rel))?{_SCOPE}{_SPACE}"
    r"\.(?P<op>add|exch|cas|min|max|and|or|xor|inc|dec)\.(?P<type>[bus](?:32|64)|f32|f64)",
    _atomic,
)
emulate_ir(r"(?:fence|membar)\..*", "  fence seq_cst\n  ret void")
emulate_ir(r"cvta(?:\.to)?\.(?:shared|global)\.u64", "  ret i64 %a0")
emulate_ir(
    r"\{ ?\.reg \.u64 (%?\w+); cvta\.to\.shared\.u64 \1, \$1; cvt\.u32\.u64 \$0, \1; ?\}",
    "  %r = trunc i64 %a0 to i32\n  ret i32 %r",
)


# -------------------------------------------------------------------------------------------- barriers, time, failure
def _barrier(arrive: int, site: Site, m: re.Match[str]) -> str:
    """bar.sync / barrier.sync / bar.arrive id [, threads]: registers or literals."""
    assert site.operands is not None
    body, values = ["%s = call ptr @simt_slots()"], []
    for i, o in enumerate(site.operands):
        if isinstance(o, Reg):
            body.append(f"%z{i} = zext {site.type_of(o.index)} {site.arg(o.index)} to i64")
            values.append(f"%z{i}")
        else:
            assert isinstance(o, int), f"operand {o} not understood"
            values.append(str(o))
    values += ["0"] * (2 - len(values))
    is_unaligned = int(m["name"].startswith("barrier") and not m["aligned"])
    for k, v in enumerate([*values[:2], "0", "0", str(arrive), str(is_unaligned)]):
        body += [f"%s{k} = getelementptr i64, ptr %s, i64 {k}", f"store i64 {v}, ptr %s{k}"]
    return _lines(*body, f"notail call void @simt_trap(i32 {OP_BAR}, i32 0)", "ret void")


emulate_ir(r"(?P<name>bar(?:rier)?)(?:\.cta)?\.sync(?P<aligned>\.aligned)?", lambda s, m: _barrier(0, s, m))
emulate_ir(r"(?P<name>bar(?:rier)?)(?:\.cta)?\.arrive(?P<aligned>\.aligned)?", lambda s, m: _barrier(1, s, m))


def _sleep(site: Site, m: re.Match[str]) -> str:
    assert site.operands is not None
    (o,) = site.operands
    value = str(o) if isinstance(o, int) else f"{site.arg(_pieces(o)[0])}"
    return _lines(
        "%s = call ptr @simt_slots()",
        "store i64 0, ptr %s",
        f"store i32 {value}, ptr %s",
        f"notail call void @simt_trap(i32 {OP_SLEEP}, i32 0)",
        "ret void",
    )


emulate_ir(r"nanosleep\.u32", _sleep)
emulate_ir(
    r"trap",
    "  %s = call ptr @simt_slots()\n  store ptr @simt_trapped, ptr %s\n"
    f"  notail call void @simt_trap(i32 {OP_FAIL}, i32 0)\n  ret void",
)
emulate_ir(r"activemask\.b32", "  ret i32 -1")  # an approximation: every lane, whatever the branches

_LANE = ["%l = call i32 @simt_field(i64 48)", "%s = shl i32 1, %l"]
_SPECIAL: dict[str, list[str]] = {
    "%laneid": ["%r = call i32 @simt_field(i64 48)"],
    "%lanemask_eq": [*_LANE, "%r = or i32 %s, 0"],
    "%lanemask_lt": [*_LANE, "%r = sub i32 %s, 1"],
    "%lanemask_le": [*_LANE, "%t = sub i32 %s, 1", "%r = or i32 %t, %s"],
    "%lanemask_gt": [*_LANE, "%t = sub i32 %s, 1", "%u = or i32 %t, %s", "%r = xor i32 %u, -1"],
    "%lanemask_ge": [*_LANE, "%t = sub i32 %s, 1", "%r = xor i32 %t, -1"],
    "%dynamic_smem_size": ["%r = call i32 @simt_field(i64 52)"],
    "%smid": ["%r = add i32 0, 0"],
    # a thread that only looks at the clock yields, or nothing would move it
    "%globaltimer": [YIELD, f"%r = load volatile i64, ptr inttoptr (i64 {CLOCK} to ptr)"],
    "%clock64": [YIELD, f"%r = load volatile i64, ptr inttoptr (i64 {CLOCK} to ptr)"],
}


def _mov(site: Site, m: re.Match[str]) -> str:
    """Special registers, and packing or unpacking of {low, high}."""
    assert site.operands
    destination, source = site.operands
    if isinstance(source, str):
        if source not in _SPECIAL:
            raise SimtError(f"inline PTX {site.text}: no emulation of {source}")
        return _lines(*_SPECIAL[source], f"ret {site.returns} %r")
    t = f"i{m['bits']}"
    if isinstance(source, Vec):
        half = int(m["bits"]) // len(source.indices)
        body, whole = [], "0"
        for i, k in enumerate(source.indices):
            more, name = _convert(site.arg(k), site.type_of(k), f"i{half}", False, f"%c{i}")
            body += [
                *more,
                f"%x{i} = zext i{half} {name} to {t}",
                f"%y{i} = shl {t} %x{i}, {half * i}",
                f"%z{i} = or {t} {whole}, %y{i}",
            ]
            whole = f"%z{i}"
        more, name = _convert(whole, t, site.returns, False, "%r")
        return _lines(*body, *more, f"ret {site.returns} {name}")
    (k,) = _pieces(source)
    if isinstance(destination, Reg):
        more, name = _convert(site.arg(k), site.type_of(k), site.returns, False, "%r")
        return _lines(*more, f"ret {site.returns} {name}")
    assert isinstance(destination, Vec)
    half = int(m["bits"]) // len(destination.indices)
    body, whole = _convert(site.arg(k), site.type_of(k), t, False, "%w")
    values = []
    for i, d in enumerate(destination.indices):
        body += [f"%x{i} = lshr {t} {whole}, {half * i}", f"%y{i} = trunc {t} %x{i} to i{half}"]
        more, name = _convert(f"%y{i}", f"i{half}", site.type_of(d), False, f"%c{i}")
        body += more
        values.append(name)
    return _lines(*body, *_return(site, values))


emulate_ir(r"mov\.[bu](?P<bits>16|32|64)", _mov)


# -------------------------------------------------------------------------------------------------- numbers in numbers
def _convert_number(site: Site, m: re.Match[str]) -> str:
    to, a0, t0 = m["to"], "%a0", site.types[0]
    match to:
        case "bf16x2" | "f16x2":  # d, a, b: a goes into the upper half
            assert set(site.types) == {"float"}
            body = []
            for k, d in ((0, "%hi"), (1, "%lo")):
                if to == "bf16x2":
                    body += [f"{d} = call i32 @simt_bf16(float %a{k})"]
                else:
                    body += [f"%h{k} = fptrunc float %a{k} to half", f"%b{k} = bitcast half %h{k} to i16"]
                    body += [f"{d} = zext i16 %b{k} to i32"]
            return _lines(*body, "%s = shl i32 %hi, 16", "%r = or i32 %s, %lo", "ret i32 %r")
        case "bf16":
            return _lines("%w = call i32 @simt_bf16(float %a0)", "%r = trunc i32 %w to i16", "ret i16 %r")
        case "f16":
            return _lines("%h = fptrunc float %a0 to half", "%r = bitcast half %h to i16", "ret i16 %r")
        case _:
            if m["from"] == "bf16":
                return _lines(
                    f"%w = zext {t0} {a0} to i32", "%s = shl i32 %w, 16", "%r = bitcast i32 %s to float", "ret float %r"
                )
            return _lines(f"%h = bitcast {t0} {a0} to half", "%r = fpext half %h to float", "ret float %r")


emulate_ir(r"cvt\.rn\.(?P<to>bf16x2|f16x2|bf16|f16)\.(?P<from>f32)", _convert_number)
emulate_ir(r"cvt\.(?P<to>f32)\.(?P<from>bf16|f16)", _convert_number)
emulate_ir(
    r"cvt\.rna\.tf32\.f32",
    lambda site, m: _lines(
        "%w = call i32 @simt_tf32_rna(float %a0)",
        *_convert("%w", "i32", site.returns, False, "%r")[0],
        f"ret {site.returns} {'%w' if site.returns == 'i32' else '%r'}",
    ),
)
emulate_ir(r"prmt\.b32", "  %r = call i32 @simt_prmt(i32 %a0, i32 %a1, i32 %a2)\n  ret i32 %r")
emulate_ir(
    r"bfind\.shiftamt\.u32",
    "  %z = icmp eq i32 %a0, 0\n  %c = call i32 @llvm.ctlz.i32(i32 %a0, i1 false)\n"
    "  %r = select i1 %z, i32 -1, i32 %c\n  ret i32 %r",
)
for _s, _t, _w in (("f", "float", "32"), ("d", "double", "64")):
    _ftz = r"(?:\.ftz)?" if _s == "f" else ""
    emulate_ir(rf"sub\.rn{_ftz}\.f{_w}", f"  %r = fsub {_t} %a0, %a1\n  ret {_t} %r")
    for _m in ("rz", "rm", "rp"):
        emulate_ir(
            rf"sub\.{_m}{_ftz}\.f{_w}",
            f"  %n = fneg {_t} %a1\n  %r = call {_t} @simt_add_{_m}_{_s}({_t} %a0, {_t} %n)\n  ret {_t} %r",
        )
    emulate_ir(
        rf"fma\.rn{_ftz}\.f{_w}", f"  %r = call {_t} @llvm.fma.f{_w}({_t} %a0, {_t} %a1, {_t} %a2)\n  ret {_t} %r"
    )
for _op, _ir in (
    (r"ex2\.approx(?:\.ftz)?\.f32", "call float @llvm.exp2.f32(float %a0)"),
    (r"lg2\.approx(?:\.ftz)?\.f32", "call float @llvm.log2.f32(float %a0)"),
    (r"tanh\.approx\.f32", "call float @llvm.tanh.f32(float %a0)"),
    (r"sqrt\.(?:approx|rn)(?:\.ftz)?\.f32", "call float @llvm.sqrt.f32(float %a0)"),
    (r"rcp\.(?:approx|rn)(?:\.ftz)?\.f32", "fdiv float 1.0, %a0"),
):
    emulate_ir(_op, f"  %r = {_ir}\n  ret float %r")
emulate_ir(
    r"rsqrt\.approx(?:\.ftz)?\.f32",
    "  %q = call float @llvm.sqrt.f32(float %a0)\n  %r = fdiv float 1.0, %q\n  ret float %r",
)
emulate_ir(
    r"rsqrt\.approx(?:\.ftz)?\.f64",
    "  %q = call double @llvm.sqrt.f64(double %a0)\n  %r = fdiv double 1.0, %q\n  ret double %r",
)


# ----------------------------------------------------------------------------------- several statements, in libdevice
emulate_ir(
    r".*setp\.equ\.f64 .*selp\.f64 .*",
    "  %c = fcmp ueq double %a0, %a1\n  %r = select i1 %c, double %a2, double %a3\n  ret double %r",
)


def _wide(n: int, *expression: str) -> str:
    """128-bit arithmetic on pairs of 64-bit words; the expression leaves its value in %v."""
    return _lines(
        *(f"%w{i} = zext i64 %a{i} to i128" for i in range(n)),
        *expression,
        "%l = trunc i128 %v to i64",
        "%hh = lshr i128 %v, 64",
        "%h = trunc i128 %hh to i64",
        "%r0 = insertvalue { i64, i64 } undef, i64 %l, 0",
        "%r = insertvalue { i64, i64 } %r0, i64 %h, 1",
        "ret { i64, i64 } %r",
    )


_PAIRS = ("%h0 = shl i128 %w1, 64", "%x = or i128 %w0, %h0", "%h1 = shl i128 %w3, 64", "%y = or i128 %w2, %h1")
emulate_ir(r"\{ \.reg \.u32 r0.*\badd\.cc\.u32.*", _wide(4, *_PAIRS, "%v = add i128 %x, %y"))
emulate_ir(r"\{ \.reg \.u32 r0.*\bsub\.cc\.u32.*", _wide(4, *_PAIRS, "%v = sub i128 %x, %y"))
emulate_ir(r"\{ \.reg \.u32 r0.*\bmov\.b64 \{blo,bhi\}, \$3; mul\.lo\.u32.*", _wide(2, "%v = mul i128 %w0, %w1"))
emulate_ir(
    r"\{ \.reg \.u32 r0.*\bmov\.b64 \{clo,chi\}, \$4; mad\.lo\.cc\.u32.*",
    _wide(3, "%m = mul i128 %w0, %w1", "%v = add i128 %m, %w2"),
)
emulate_ir(
    r"\{ mad\.lo\.cc\.u32 \$0, \$2, \$3, \$4; madc\.hi\.u32 \$1, \$2, \$3, 0; \}",
    _lines(
        "%x = zext i32 %a0 to i64",
        "%y = zext i32 %a1 to i64",
        "%z = zext i32 %a2 to i64",
        "%m = mul i64 %x, %y",
        "%v = add i64 %m, %z",
        "%l = trunc i64 %v to i32",
        "%hh = lshr i64 %v, 32",
        "%h = trunc i64 %hh to i32",
        "%r0 = insertvalue { i32, i32 } undef, i32 %l, 0",
        "%r = insertvalue { i32, i32 } %r0, i32 %h, 1",
        "ret { i32, i32 } %r",
    ),
)
