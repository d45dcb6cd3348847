"""Run numba-cuda kernels on the CPU from their *compiled* NVVM IR.

    k = simt.jit(kernel)                   # a @cuda.jit dispatcher or a plain function
    k[grid, block, 0, dyn_smem](*args)     # numpy arrays / numpy scalars / raw ints
    simt.run([simt.Launch(...), ...])      # several co-resident grids ("ranks")

Pipeline: numba-cuda front end -> NVVM IR text -> small textual rewrite ->
llvmlite parse/link (+ libdevice bitcode) -> O2 -> MCJIT for the host.  CUDA
threads are fibers (simt_rt.c).  Inline PTX is mapped to functions registered
with @emulate, keyed by the PTX opcode; the project's intrinsics stay unchanged.
"""
import ctypes as C
import hashlib
import mmap
import threading
import os
import re
import subprocess
import tempfile
import types as _pt
import warnings

import llvmlite.binding as ll
import numpy as np
from numba.cuda import types
from numba.cuda import compiler as _cc           # private: _compile_pyfunc_with_fixup
from numba.cuda import dispatcher as _disp       # private: get_current_device (patched)
from numba.cuda.cudadrv import nvvm as _nvvm     # private: llvm_replace, LibDevice
from numba.cuda.typing.typeof import Purpose, typeof

CC = (9, 0, "a")
NSLOT = 288
HERE = os.path.dirname(os.path.abspath(__file__))


class SimtError(RuntimeError):
    pass


# ------------------------------------------------------------------ C runtime
class _CLaunch(C.Structure):
    _fields_ = [("entry", C.c_void_p), ("argv", C.c_void_p), ("grid", C.c_uint32 * 3),
                ("block", C.c_uint32 * 3), ("smem_static", C.c_uint32), ("smem_dyn", C.c_uint32),
                ("resident", C.c_uint32), ("rank", C.c_uint32), ("next", C.c_uint64),
                ("total", C.c_uint64), ("live", C.c_uint32), ("pad", C.c_uint32)]


def _build_rt():
    src = os.path.join(HERE, "simt_rt.c")
    tag = hashlib.sha1(open(src, "rb").read()).hexdigest()[:12]
    d = os.path.join(os.environ.get("NUMBA_CACHE_DIR") or os.path.join(tempfile.gettempdir(), f"whalez-simt-{os.getuid()}"), "simt")
    so = os.path.join(d, f"simt_rt_{tag}.so")
    if not os.path.exists(so):
        os.makedirs(d, exist_ok=True)
        tmp = f"{so}.{os.getpid()}"
        subprocess.check_call([os.environ.get("CC", "cc"), "-O2", "-frounding-math", "-shared", "-fPIC", "-o", tmp, src, "-lm"])
        os.replace(tmp, so)
    return C.CDLL(so)


_rt = _build_rt()
_rt.simt_run.argtypes = [C.POINTER(_CLaunch), C.c_int, C.c_int, C.c_uint64, C.c_uint64, C.c_double]
_OPFN = C.CFUNCTYPE(C.c_int, C.c_uint32, C.POINTER(C.c_uint64), C.c_void_p)
_rt.simt_set_op.argtypes = [C.c_int, C.c_void_p, C.c_int]
_SELF = C.addressof(C.c_void_p.in_dll(_rt, "simt_self"))
ll.initialize_native_target()
ll.initialize_native_asmprinter()
for _n in ("simt_trap", "simt_yield"):
    ll.add_symbol(_n, C.cast(getattr(_rt, _n), C.c_void_p).value)


# ------------------------------------------------------- inline-PTX emulation
_EMU = []           # (regex on the normalised asm text, scope, fn or ir text)
_OPS = {}           # asm key -> op number
_KEEP = []          # ctypes callbacks
_pending = []       # exception raised inside a callback
_NLANES = {"thread": 1, "warp": 32, "warpgroup": 128}
_NP = {"r": np.uint32, "l": np.uint64, "h": np.uint16, "f": np.float32, "d": np.float64, "b": np.bool_}


def emulate(pattern, scope="thread", native=False):
    """Declare the CPU meaning of one inline-PTX statement.

    pattern: regex that must match the whole opcode of a single-instruction asm
             (or the whole text of a multi-instruction one).
    scope:   'thread' | 'warp' | 'warpgroup' -- who executes it together.
    The function gets the operands *in PTX text order* (destinations left out),
    one argument per operand: an array (lanes, regs) of the constraint's type for
    {..} vectors, (lanes,) for registers and [addresses], an int for literals.
    It returns the destination(s) in the same shapes.
    native=True: fn is compiled with numba.cfunc and gets (mask, slots, fiber);
    carray(slots, (lanes, NSLOT)) holds the registers as 64-bit words in PTX text
    order (destinations first) -- about 50x faster, for the hot statements.
    """
    def deco(fn):
        if native:
            import numba
            cf = numba.cfunc("int32(uint32, CPointer(uint64), voidptr)")(fn)
            cf.simt_native = True
            _EMU.insert(0, (re.compile(pattern), scope, cf))
            return fn
        _EMU.insert(0, (re.compile(pattern), scope, fn))
        return fn
    return deco


def emulate_ir(pattern, body):
    """Fast path for per-thread statements: LLVM IR body; operands %a0.. in asm
    ($n) order without outputs, must end in a ret."""
    _EMU.insert(0, (re.compile(pattern), "ir", body))


class _CFiber(C.Structure):
    _fields_ = [("tid", C.c_uint32 * 3), ("ctaid", C.c_uint32 * 3), ("ntid", C.c_uint32 * 3), ("nctaid", C.c_uint32 * 3),
                ("lane", C.c_uint32), ("dynsz", C.c_uint32), ("slots", C.c_void_p), ("smem", C.c_void_p), ("rank", C.c_uint32)]


_cur = [0]
on_launch = []      # callables run before every launch (reset emulation state)


def current():
    """Inside an emulation: (rank, block xyz, thread xyz) of the (first) executing thread."""
    f = _CFiber.from_address(_cur[0])
    return f.rank, tuple(f.ctaid), tuple(f.tid)


def read_mem(addr, dtype, n=1):
    return np.frombuffer((C.c_char * (np.dtype(dtype).itemsize * n)).from_address(int(addr)), dtype, n)


def _parse_ptx(text):
    """'op a, {b,c}, [d], 16;' -> (op, [operand, ...]); operand: list|int|('mem', n)"""
    text = " ".join(text.replace("\\0A", " ").replace("\\09", " ").split()).rstrip("; ")
    if ";" in text:
        return text, None
    op, _, rest = text.partition(" ")
    out = []
    for tok in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest):
        regs = [int(x) for x in re.findall(r"\$(\d+)", tok)]
        if tok[0] == "{":
            out.append(regs)
        elif regs:
            out.append(("reg", regs[0]))
        else:
            try:
                out.append(int(tok, 0))
            except ValueError:
                out.append(tok)
    return op, out


def _wrap_callback(fn, scope, operands, cons):
    """ctypes trampoline: slots -> numpy operands -> fn -> slots."""
    outs = [c for c in cons if c.startswith("=")]
    ins = [c for c in cons if not c.startswith(("=", "~"))]
    tied = {i: int(c) for i, c in enumerate(ins) if c.isdigit()}
    lanes, no = _NLANES[scope], len(outs)
    dt = [_NP[c.lstrip("=&+")] for c in outs]
    dt += [dt[tied[i]] if i in tied else _NP[c.lstrip("&")] for i, c in enumerate(ins)]

    def col(s, k):
        return s[:, k].astype(np.uint64).view(np.uint8).reshape(lanes, 8)[:, :np.dtype(dt[k]).itemsize].copy().view(dt[k])[:, 0]

    def cb(mask, slots, fiber):
        try:
            _cur[0] = fiber
            s = np.ctypeslib.as_array(slots, (lanes * NSLOT,)).reshape(lanes, NSLOT)
            a, dst = [], []
            ops = operands if operands is not None else [("reg", k) for k in range(len(dt))]
            for o in ops:
                if isinstance(o, (int, str)):
                    a.append(o)
                    continue
                ks = o if isinstance(o, list) else [o[1]]
                if ks and ks[0] < no:
                    dst.append(ks)
                else:
                    v = [col(s, k) for k in ks]
                    a.append(np.stack(v, 1) if isinstance(o, list) else v[0])
            if scope == "thread":
                a = [x if isinstance(x, (int, str)) else x[0] for x in a]
            r = fn(*a)
            if dst:
                r = r if isinstance(r, tuple) else (r,)
                for ks, v in zip(dst, r):
                    v = np.asarray(v).reshape(lanes, len(ks))
                    for j, k in enumerate(ks):
                        w = np.ascontiguousarray(v[:, j]).astype(dt[k])
                        buf = np.zeros((lanes, 8), np.uint8)
                        buf[:, :w.itemsize] = w.view(np.uint8).reshape(lanes, -1)
                        s[:, k] = buf.view(np.uint64)[:, 0]
            return 0
        except BaseException as e:  # noqa: BLE001 - must not cross the C frame
            _pending.append(e)
            return 1
    return cb


# -------------------------------------------------------------- IR rewriting
def _split(s):
    out, d, cur = [], 0, ""
    for ch in s:
        d += ch in "([{<"
        d -= ch in ")]}>"
        if ch == "," and d == 0:
            out.append(cur.strip()); cur = ""
        else:
            cur += ch
    if cur.strip():
        out.append(cur.strip())
    return out


_ASM = re.compile(r'call (?P<ret>.+?) asm\s+(?:sideeffect\s+)?(?:alignstack\s+)?"(?P<text>[^"]*)",\s*"(?P<cons>[^"]*)"\s*\((?P<args>.*)\)(?P<tail>[^)]*)$')
_SMEM = re.compile(r'^@"?([\w.$]+)"? = (external )?addrspace\(3\) global (\[.*\]|\S+?)( undef)?, align (\d+)')


class _Rewriter:
    def __init__(self, prefix="simt_asm_"):
        self.asm, self.smem, self.prefix = {}, {}, prefix

    def module(self, text):
        text = _nvvm.llvm_replace(text)
        lines, fn_lines, in_fn = [], [], False
        for line in text.splitlines():
            m = _SMEM.match(line)
            if m:
                self.smem[m[1]] = (m[3], bool(m[2]), int(m[5]))
        pat = re.compile(r'@"?(' + "|".join(map(re.escape, self.smem)) + r')"?(?![\w.$])') if self.smem else None
        for line in text.splitlines():
            if line.startswith(("target ", "!nvvm", "@llvm.used", '@"llvm.used"', "source_filename")) or _SMEM.match(line):
                continue
            if re.match(r"!\d+ = !\{.*\)\* @", line):      # kernel annotation
                continue
            line = line.replace("llvm.nvvm.", "simt.nvvm.")
            if line.startswith("define"):
                in_fn, fn_lines, used = True, [line], set()
                continue
            if not in_fn:
                lines.append(line)
                continue
            if line.startswith("}"):
                fn_lines.append(line)
                pre = [x for n in sorted(used) for x in self.smem_prologue(n)]
                k = next(i for i, x in enumerate(fn_lines) if x.rstrip().endswith(":")) + 1
                lines += fn_lines[:k] + pre + fn_lines[k:]
                in_fn = False
                continue
            if pat and pat.search(line):
                used |= {m[1] for m in pat.finditer(line)}
                line = pat.sub(r'%"\1.simt"', line)
            if " asm " in line:
                line = _ASM.sub(self.sub_asm, line)
            # contraction like NVVM's default -fma=1
            line = re.sub(r"= f(add|sub|mul) (?!.*\b(fast|contract)\b)", r"= f\1 contract ", line)
            fn_lines.append(line)
            if re.search(r"\b(atomicrmw|cmpxchg|load volatile|load atomic)\b", line):
                fn_lines.append("  call void @simt_yield()")
        return "declare void @simt_yield()\n" + "\n".join(lines)

    def smem_prologue(self, n):
        off = f"@simt_off_{n}"
        return [f'  %"{n}.simt.b" = call ptr @simt_smem(ptr {off})',
                f'  %"{n}.simt" = addrspacecast ptr %"{n}.simt.b" to ptr addrspace(3)']

    def sub_asm(self, m):
        ret, text, cons = m["ret"], m["text"], m["cons"]
        tys = [re.sub(r'\s+(%.*|@.*|-?[\d.][\w.+-]*|undef|poison|true|false|null|zeroinitializer)$', "", a) for a in _split(m["args"])]
        key = (ret, text, cons, tuple(tys))
        name = self.asm.setdefault(key, f"{self.prefix}{len(self.asm)}")
        return f'call {ret} @{name}({m["args"]})'

    def smem_layout(self):
        off, dyn_align = 0, 16
        out = []
        td = ll.create_target_data("")
        m = ll.parse_assembly("\n".join(f"@g{i} = global {t} undef" for i, (t, _, _) in enumerate(self.smem.values())))
        sizes = [td.get_abi_size(g.global_value_type) for g in m.global_variables]
        pos = {}
        for (n, (t, dyn, al)), sz in zip(self.smem.items(), sizes):
            if not dyn:
                off = (off + al - 1) & -al
                pos[n] = off
                off += sz
        off = (off + dyn_align - 1) & -dyn_align
        for n, (_, dyn, _) in self.smem.items():
            if dyn:
                pos[n] = off
            out.append(f"@simt_off_{n} = constant i64 {pos[n]}")
        return "\n".join(out), off

    # -- definitions for inline asm
    def asm_defs(self):
        out = []
        for (ret, text, cons, tys), name in self.asm.items():
            op, operands = _parse_ptx(text)
            for rx, scope, fn in _EMU:
                if rx.fullmatch(op) or rx.fullmatch(text.strip()):
                    break
            else:
                msg = f"inline PTX without emulation: {op}"
                warnings.warn(msg)
                out.append(_unsupported(ret, name, tys, msg))
                continue
            params = ", ".join(f"{t} %a{i}" for i, t in enumerate(tys))
            if scope == "ir":
                body = fn(operands, tys) if callable(fn) else fn
                out.append(f"define internal {ret} @{name}({params}) alwaysinline {{\n{body}\n}}")
                continue
            cl = [c for c in cons.split(",") if c and not c.startswith("~")]
            okey = (text, cons, fn)
            if okey not in _OPS:
                num = 16 + len(_OPS)
                cb = fn if hasattr(fn, "simt_native") else _OPFN(_wrap_callback(fn, scope, operands, cl))
                _KEEP.append(cb)
                addr = fn.address if cb is fn else C.cast(cb, C.c_void_p)
                _rt.simt_set_op(num, addr, _NLANES[scope])
                _OPS[okey] = num
            no = sum(c.startswith("=") for c in cl)
            assert no + len(tys) <= NSLOT, "raise NSLOT in simt.py and simt_rt.c"
            rts = [] if ret == "void" else _split(ret[1:-1]) if ret.startswith("{") else [ret]
            assert len(rts) == no, (ret, cons)
            slot = list(range(no + len(tys)))
            if hasattr(fn, "simt_native") and operands is not None:
                flat = [k for o in operands if not isinstance(o, (int, str)) for k in (o if isinstance(o, list) else [o[1]])]
                slot = [flat.index(k) for k in slot]
            out.append(_trap_fn(ret, rts, name, tys, no, _OPS[okey], slot=slot))
        return "\n".join(out)


def _trap_fn(ret, rts, name, tys, first, op, mask="-1", slot=range(NSLOT)):
    b = [f"define internal {ret} @{name}(" + ", ".join(f"{t} %a{i}" for i, t in enumerate(tys)) + ") alwaysinline {",
         "  %s = call ptr @simt_slots()"]
    for i, t in enumerate(tys):
        k = first + i
        b += [f"  %p{k} = getelementptr i64, ptr %s, i64 {slot[k]}", f"  store i64 0, ptr %p{k}", f"  store {t} %a{i}, ptr %p{k}"]
    b.append(f"  call void @simt_trap(i32 {op}, i32 {mask})")
    if not rts:
        b.append("  ret void\n}")
        return "\n".join(b)
    agg = "undef"
    for i, t in enumerate(rts):
        b += [f"  %q{i} = getelementptr i64, ptr %s, i64 {slot[i]}", f"  %r{i} = load {t}, ptr %q{i}"]
        if ret.startswith("{"):
            b.append(f"  %g{i} = insertvalue {ret} {agg}, {t} %r{i}, {i}")
            agg = f"%g{i}"
    b.append(f"  ret {ret} {agg if ret.startswith('{') else '%r0'}\n}}")
    return "\n".join(b)


_nuns = [0]


def _unsupported(ret, name, tys, msg):
    _nuns[0] += 1
    n, data = _nuns[0], msg.encode().replace(b'"', b"'").replace(b"\\", b"/")
    return (f'@simt_uns_{n} = private constant [{len(data) + 1} x i8] c"{data.decode()}\\00"\n'
            f'define internal {ret} @"{name}"({", ".join(tys)}) {{\n  %s = call ptr @simt_slots()\n'
            f"  store ptr @simt_uns_{n}, ptr %s\n  call void @simt_trap(i32 7, i32 0)\n  unreachable\n}}")


# ---------------------------------------------- prelude: nvvm intrinsics in IR
def _prelude():
    fld = {"tid": 0, "ctaid": 12, "ntid": 24, "nctaid": 36}
    o = [f"""
declare void @simt_trap(i32, i32)
define internal ptr @simt_slots() alwaysinline {{
  %f = load ptr, ptr inttoptr (i64 {_SELF} to ptr)
  %a = getelementptr i8, ptr %f, i64 56
  %s = load ptr, ptr %a
  ret ptr %s
}}
define linkonce_odr ptr @simt_smem(ptr %off) {{
  %f = load ptr, ptr inttoptr (i64 {_SELF} to ptr)
  %a = getelementptr i8, ptr %f, i64 64
  %s = load ptr, ptr %a
  %o = load i64, ptr %off
  %r = getelementptr i8, ptr %s, i64 %o
  ret ptr %r
}}
define internal i32 @simt_field(i64 %off) alwaysinline {{
  %f = load ptr, ptr inttoptr (i64 {_SELF} to ptr)
  %a = getelementptr i8, ptr %f, i64 %off
  %r = load i32, ptr %a
  ret i32 %r
}}"""]

    def sreg(n, off):
        o.append(f'define linkonce_odr i32 @"simt.nvvm.read.ptx.sreg.{n}"() alwaysinline {{\n  %r = call i32 @simt_field(i64 {off})\n  ret i32 %r\n}}')
    for n, base in fld.items():
        for k, ax in enumerate("xyz"):
            sreg(f"{n}.{ax}", base + 4 * k)
    sreg("laneid", 48)
    o.append('define linkonce_odr i32 @"simt.nvvm.read.ptx.sreg.warpsize"() alwaysinline { ret i32 32 }')

    def bar(name, kind, ret="i32"):
        pred = "" if ret == "void" else "i32 %p"
        o.append(f'define linkonce_odr {ret} @"{name}"({pred}) alwaysinline {{\n  %s = call ptr @simt_slots()\n'
                 "  store i64 0, ptr %s\n"
                 + "".join(f"  %s{k} = getelementptr i64, ptr %s, i64 {k}\n  store i64 {kind if k == 2 else 0}, ptr %s{k}\n" for k in (1, 2, 3, 4))
                 + ("" if ret == "void" else "  store i32 %p, ptr %s3\n")
                 + "  call void @simt_trap(i32 1, i32 0)\n"
                 + ("  ret void\n}" if ret == "void" else "  %r = load i32, ptr %s\n  ret i32 %r\n}"))
    bar("simt.nvvm.barrier0", 0, "void")
    bar("simt.nvvm.barrier0.popc", 1)
    bar("simt.nvvm.barrier0.and", 2)
    bar("simt.nvvm.barrier0.or", 3)
    for n in ("cta", "gl", "sys"):
        o.append(f'define linkonce_odr void @"simt.nvvm.membar.{n}"() alwaysinline {{\n  fence seq_cst\n  ret void\n}}')

    def coll(name, ret, rts, tys, op):
        """first argument is the member mask, the others go to slots"""
        f = _trap_fn(ret, rts, "X", tys[1:], 0, op, "%m").replace('define internal', 'define linkonce_odr').replace('@X(', f'@"{name}"(i32 %m' + (", " if len(tys) > 1 else ""))
        o.append(f)
    coll("simt.nvvm.bar.warp.sync", "void", [], ["i32"], 2)
    coll("simt.nvvm.shfl.sync.i32", "{i32, i1}", ["i32", "i1"], ["i32"] * 5, 3)
    coll("simt.nvvm.vote.sync", "{i32, i1}", ["i32", "i1"], ["i32", "i32", "i1"], 4)
    for w in (32, 64):
        coll(f"simt.nvvm.match.any.sync.i{w}", "i32", ["i32"], ["i32", f"i{w}"], 5)
        coll(f"simt.nvvm.match.all.sync.i{w}", "{i32, i1}", ["i32", "i1"], ["i32", f"i{w}"], 6)

    def fn(sig, body):
        o.append(f"define linkonce_odr {sig} alwaysinline {{\n{body}\n}}")
    for t, n in (("float", "f32"), ("double", "f64")):
        fn(f'{t} @"simt.nvvm.atomic.load.add.{n}.p0{n}"(ptr %p, {t} %v)', f"  %r = atomicrmw fadd ptr %p, {t} %v monotonic\n  call void @simt_trap(i32 0, i32 0)\n  ret {t} %r")
    for k in ("inc", "dec"):
        fn(f'i32 @"simt.nvvm.atomic.load.{k}.32.p0i32"(ptr %p, i32 %v)', f"  %r = atomicrmw u{k}_wrap ptr %p, i32 %v monotonic\n  call void @simt_trap(i32 0, i32 0)\n  ret i32 %r")
    # libdevice / math intrinsics
    T = {"f": ("float", "f32"), "d": ("double", "f64")}
    for s, (t, n) in T.items():
        for z in ([".ftz", ""] if s == "f" else [""]):
            un = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint", "fabs": "fabs"}
            for k, v in un.items():
                for nm in {f"{k}{z}.{s}", f"{k}{z}.{n}"}:
                    fn(f'{t} @"simt.nvvm.{nm}"({t} %a)', f"  %r = call {t} @llvm.{v}.{n}({t} %a)\n  ret {t} %r")
            for k, v in (("sqrt.rn", "sqrt"), ("sqrt.approx", "sqrt"), ("ex2.approx", "exp2"), ("lg2.approx", "log2"), ("sin.approx", "sin"), ("cos.approx", "cos")):
                for nm in {f"{k}{z}.{s}", f"{k}{z}.{n}"}:
                    fn(f'{t} @"simt.nvvm.{nm}"({t} %a)', f"  %r = call {t} @llvm.{v}.{n}({t} %a)\n  ret {t} %r")
            for k in ("rcp.rn", "rcp.approx"):
                fn(f'{t} @"simt.nvvm.{k}{z}.{s}"({t} %a)', f"  %r = fdiv {t} 1.0, %a\n  ret {t} %r")
            fn(f'{t} @"simt.nvvm.rsqrt.approx{z}.{s}"({t} %a)', f"  %q = call {t} @llvm.sqrt.{n}({t} %a)\n  %r = fdiv {t} 1.0, %q\n  ret {t} %r")
            for k, v in (("fmin", "minnum"), ("fmax", "maxnum")):
                fn(f'{t} @"simt.nvvm.{k}{z}.{s}"({t} %a, {t} %b)', f"  %r = call {t} @llvm.{v}.{n}({t} %a, {t} %b)\n  ret {t} %r")
            for k in ("add", "mul", "div"):
                fn(f'{t} @"simt.nvvm.{k}.rn{z}.{s}"({t} %a, {t} %b)', f"  %r = f{k} {t} %a, %b\n  ret {t} %r")
            fn(f'{t} @"simt.nvvm.div.approx{z}.{s}"({t} %a, {t} %b)', f"  %r = fdiv {t} %a, %b\n  ret {t} %r")
            fn(f'{t} @"simt.nvvm.fma.rn{z}.{s}"({t} %a, {t} %b, {t} %c)', f"  %r = call {t} @llvm.fma.{n}({t} %a, {t} %b, {t} %c)\n  ret {t} %r")
            fn(f'{t} @"simt.nvvm.saturate{z}.{s}"({t} %a)', f"  %q = call {t} @llvm.maxnum.{n}({t} %a, {t} 0.0)\n  %r = call {t} @llvm.minnum.{n}({t} %q, {t} 1.0)\n  ret {t} %r")
            for it, iw, sg in (("i", 32, "s"), ("ui", 32, "u"), ("ll", 64, "s"), ("ull", 64, "u")):
                for rm, rf in (("rz", "trunc"), ("rn", "roundeven"), ("rm", "floor"), ("rp", "ceil")):
                    fn(f'i{iw} @"simt.nvvm.{s}2{it}.{rm}{z}"({t} %a)', f"  %q = call {t} @llvm.{rf}.{n}({t} %a)\n  %r = call i{iw} @llvm.fpto{sg}i.sat.i{iw}.{n}({t} %q)\n  ret i{iw} %r")
                if not z:
                    fn(f'{t} @"simt.nvvm.{it}2{s}.rn"(i{iw} %a)', f"  %r = {sg}itofp i{iw} %a to {t}\n  ret {t} %r")
    for rm in ("rz", "rm", "rp"):                # directed rounding: C helpers
        for s, (t, n) in T.items():
            for k, na in (("add", 2), ("mul", 2), ("div", 2), ("fma", 3), ("rcp", 1), ("sqrt", 1)):
                o.append(f"declare {t} @simt_{k}_{rm}_{s}({', '.join([t] * na)})")
                ll.add_symbol(f"simt_{k}_{rm}_{s}", C.cast(getattr(_rt, f"simt_{k}_{rm}_{s}"), C.c_void_p).value)
                pr, ar = ", ".join(f"{t} %a{i}" for i in range(na)), ", ".join(f"{t} %a{i}" for i in range(na))
                for z in ([".ftz", ""] if s == "f" else [""]):
                    fn(f'{t} @"simt.nvvm.{k}.{rm}{z}.{s}"({pr})', f"  %r = call {t} @simt_{k}_{rm}_{s}({ar})\n  ret {t} %r")
        o.append(f"declare float @simt_d2f_{rm}(double)")
        ll.add_symbol(f"simt_d2f_{rm}", C.cast(getattr(_rt, f"simt_d2f_{rm}"), C.c_void_p).value)
        for z in (".ftz", ""):
            fn(f'float @"simt.nvvm.d2f.{rm}{z}"(double %a)', f"  %r = call float @simt_d2f_{rm}(double %a)\n  ret float %r")
    for z in (".ftz", ""):
        fn(f'float @"simt.nvvm.d2f.rn{z}"(double %a)', "  %r = fptrunc double %a to float\n  ret float %r")
    fn('i32 @"simt.nvvm.d2i.lo"(double %a)', "  %b = bitcast double %a to i64\n  %r = trunc i64 %b to i32\n  ret i32 %r")
    fn('i32 @"simt.nvvm.d2i.hi"(double %a)', "  %b = bitcast double %a to i64\n  %c = lshr i64 %b, 32\n  %r = trunc i64 %c to i32\n  ret i32 %r")
    fn('double @"simt.nvvm.lohi.i2d"(i32 %l, i32 %h)', "  %a = zext i32 %l to i64\n  %b = zext i32 %h to i64\n  %c = shl i64 %b, 32\n  %d = or i64 %a, %c\n  %r = bitcast i64 %d to double\n  ret double %r")
    for k, w, e in (("i", 32, "s"), ("ui", 32, "z"), ("ll", 64, "s"), ("ull", 64, "z")):
        fn(f'i{w} @"simt.nvvm.mulhi.{k}"(i{w} %a, i{w} %b)', f"  %x = {e}ext i{w} %a to i{2*w}\n  %y = {e}ext i{w} %b to i{2*w}\n  %m = mul i{2*w} %x, %y\n  %h = lshr i{2*w} %m, {w}\n  %r = trunc i{2*w} %h to i{w}\n  ret i{w} %r")
    fn('double @"simt.nvvm.rcp.approx.ftz.d"(double %a)', "  %r = fdiv double 1.0, %a\n  ret double %r")
    for z in (".ftz", ""):
        fn(f'i16 @"simt.nvvm.f2h.rn{z}"(float %a)', "  %h = fptrunc float %a to half\n  %r = bitcast half %h to i16\n  ret i16 %r")
    fn("i32 @__nvvm_reflect(ptr %p)", "  ret i32 0")
    return "\n".join(o)


emulate_ir(r"activemask\.b32", "  ret i32 -1")   # approximation: all lanes
emulate_ir(r"mov\.u32 \$0, %lanemask_lt;", "  %l = call i32 @simt_field(i64 48)\n  %s = shl i32 1, %l\n  %r = sub i32 %s, 1\n  ret i32 %r")
emulate_ir(r"mov\.u32 \$0, %dynamic_smem_size;", "  %r = call i32 @simt_field(i64 52)\n  ret i32 %r")
emulate_ir(r"nanosleep\.u32", "  call void @simt_trap(i32 0, i32 0)\n  ret void")
emulate_ir(r"(fence|membar)\..*", "  fence seq_cst\n  ret void")

def _bar(operands, tys, arrive=0):
    """bar.sync / barrier.sync / bar.arrive id [, count] -- operands are registers or literals"""
    b = ["  %s = call ptr @simt_slots()"]
    vals = [o if isinstance(o, int) else f"%z{o[1]}" for o in operands] + [0] * (2 - len(operands))
    b += [f"  %z{i} = zext {t} %a{i} to i64" for i, t in enumerate(tys)]
    for k, v in enumerate([*vals[:2], 0, 0, arrive]):
        b += [f"  %s{k} = getelementptr i64, ptr %s, i64 {k}", f"  store i64 {v}, ptr %s{k}"]
    return "\n".join(b + ["  call void @simt_trap(i32 1, i32 0)", "  ret void"])


emulate_ir(r"bar(rier)?(\.cta)?\.sync(\.aligned)?", _bar)
emulate_ir(r"bar(rier)?(\.cta)?\.arrive(\.aligned)?", lambda o, t: _bar(o, t, 1))

_IRT = {"u32": "i32", "s32": "i32", "b32": "i32", "u64": "i64", "s64": "i64", "b64": "i64", "f32": "float", "f64": "double"}


def _mk_ld(t):
    def body(operands, tys):
        p = "%a0" if tys[0].endswith(("*", "ptr")) else "%p"
        pre = "" if p == "%a0" else f"  %p = inttoptr {tys[0]} %a0 to ptr\n"
        return pre + f"  call void @simt_trap(i32 0, i32 0)\n  %r = load atomic {_IRT[t]}, ptr {p} seq_cst, align {4 if '32' in t else 8}\n  ret {_IRT[t]} %r"
    return body


def _mk_st(t):
    def body(operands, tys):
        p = "%a0" if tys[0].endswith(("*", "ptr")) else "%p"
        pre = "" if p == "%a0" else f"  %p = inttoptr {tys[0]} %a0 to ptr\n"
        return pre + f"  store atomic {_IRT[t]} %a1, ptr {p} seq_cst, align {4 if '32' in t else 8}\n  call void @simt_trap(i32 0, i32 0)\n  ret void"
    return body


for _t in _IRT:
    emulate_ir(rf"ld\.(acquire|relaxed|volatile)(\.(cta|gpu|sys|cluster))?(\.global|\.shared)?\.{_t}", _mk_ld(_t))
    emulate_ir(rf"st\.(release|relaxed|volatile)(\.(cta|gpu|sys|cluster))?(\.global|\.shared)?\.{_t}", _mk_st(_t))


# --------------------------------------------------------------- compilation
_machine = None
_libdev = None


def _tm():
    global _machine
    if _machine is None:
        t = ll.Target.from_default_triple()
        _machine = t.create_target_machine(cpu=ll.get_host_cpu_name(), features=ll.get_host_cpu_features().flatten(), opt=2, jit=True, codemodel="jitdefault")
    return _machine


def _libdevice():
    global _libdev
    if _libdev is None:
        t = str(ll.parse_bitcode(_nvvm.LibDevice().get()))
        t = re.sub(r"^target .*$", "", t, flags=re.M).replace("llvm.nvvm.", "simt.nvvm.")
        t = re.sub(r"^!(nvvm|llvm)[\w.]* = .*$", "", t, flags=re.M)
        rw = _Rewriter("simt_ldasm_")               # libdevice has a dozen inline-PTX statements of its own
        t = "\n".join(_ASM.sub(rw.sub_asm, x) if " asm " in x else x for x in t.splitlines())
        decl = "\n".join(f'declare {r} @{n}({", ".join(a)})' for (r, _, _, a), n in rw.asm.items())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asm = _ASMHDR.format(SELF=_SELF) + _ASMEXT + re.sub(r"^define internal", "define", rw.asm_defs(), flags=re.M)
        m = ll.parse_assembly(decl + "\n" + t)
        m.link_in(ll.parse_assembly(asm))
        _libdev = m.as_bitcode()
    return ll.parse_bitcode(_libdev)


def kernel_ir(pyfunc, argtypes, **opts):
    """NVVM IR modules (text) + kernel name. The only place that touches numba-cuda internals."""
    saved = _disp.get_current_device
    _disp.get_current_device = lambda: _pt.SimpleNamespace(compute_capability=CC)
    try:
        lib, _ = _cc._compile_pyfunc_with_fixup(pyfunc, types.void(*argtypes), device=False, cc=CC, abi="numba", **opts)
    finally:
        _disp.get_current_device = saved
    return lib.llvm_strs, lib._entry_name


class Compiled:
    def __init__(self, pyfunc, argtypes, **opts):
        mods, entry = kernel_ir(pyfunc, argtypes, **opts)
        rw = _Rewriter()
        mods = [rw.module(m) for m in mods]
        offs, self.smem_static = rw.smem_layout()
        line = next(ln for m in mods for ln in m.splitlines() if ln.startswith("define") and f'@"{entry}"(' in ln)
        params = _split(line[line.index(f'@"{entry}"(') + len(entry) + 4: line.rindex(")")])
        self.tys = [re.sub(r'\s+%.*$', "", p).split(" ")[0] if not p.startswith(("{", "[")) else p.rsplit(" ", 1)[0] for p in params]
        w = ["define void @simt_entry(ptr %v) {"]
        for i, t in enumerate(self.tys):
            w += [f"  %p{i} = getelementptr i64, ptr %v, i64 {i}", f"  %x{i} = load {t}, ptr %p{i}"]
        w += [f'  call void @"{entry}"(' + ", ".join(f"{t} %x{i}" for i, t in enumerate(self.tys)) + ")", "  ret void\n}"]
        decl = f'declare void @"{entry}"({", ".join(self.tys)})'
        main = ll.parse_assembly(_prelude() + "\n" + offs + "\n" + decl + "\n" + "\n".join(w))
        ext = "declare ptr @simt_smem(ptr)\n" + "\n".join(f"@simt_off_{n} = external constant i64" for n in rw.smem) + "\n"
        asm = rw.asm_defs()
        if asm:
            main.link_in(ll.parse_assembly(_ASMHDR.format(SELF=_SELF) + _ASMEXT + re.sub(r"^define internal", "define", asm, flags=re.M)))
        asm_decl = "\n".join(f'declare {r} @{n}({", ".join(t)})' for (r, _, _, t), n in rw.asm.items())
        for m in mods:
            main.link_in(ll.parse_assembly(ext + asm_decl + "\n" + m))
        if any(f.is_declaration and f.name.startswith("__nv_") for f in main.functions):
            main.link_in(_libdevice())
        for f in main.functions:
            if not f.is_declaration and f.name != "simt_entry":
                f.linkage = "internal"
        for g in main.global_variables:
            if not g.is_declaration:
                g.linkage = "internal"
        main = self._dce(main)
        for f in list(main.functions):              # what is still undefined?
            if f.is_declaration and not f.name.startswith(("llvm.", "simt_")):
                ft = str(f.global_value_type if hasattr(f, "global_value_type") else f.type)
                ret, args = re.match(r"(.*?) \((.*)\)$", ft).groups()
                u = ll.parse_assembly(_ASMHDR.format(SELF=_SELF) + _unsupported(ret, f.name, _split(args), "no CPU definition for " + f.name).replace("define internal", "define"))
                main.link_in(u)
        main.triple = ll.get_default_triple()
        self.ir = str(main)
        pto = ll.create_pipeline_tuning_options(speed_level=2)
        pb = ll.create_pass_builder(_tm(), pto)
        pb.getModulePassManager().run(main, pb)
        self.opt_ir = str(main)
        main.verify()
        t = ll.Target.from_default_triple()
        tm = t.create_target_machine(cpu=ll.get_host_cpu_name(), features=ll.get_host_cpu_features().flatten(), opt=2, jit=True, codemodel="jitdefault")
        self._engine = ll.create_mcjit_compiler(main, tm)
        self._engine.finalize_object()
        self.entry = self._engine.get_function_address("simt_entry")

    @staticmethod
    def _dce(mod):
        pb = ll.create_pass_builder(_tm(), ll.create_pipeline_tuning_options(speed_level=0))
        pm = ll.create_new_module_pass_manager()
        pm.add_global_dead_code_eliminate_pass() if hasattr(pm, "add_global_dead_code_eliminate_pass") else pm.add_global_dce_pass()
        pm.run(mod, pb)
        return mod


_ASMHDR = """
declare void @simt_trap(i32, i32)
define internal ptr @simt_slots() alwaysinline {{
  %f = load ptr, ptr inttoptr (i64 {SELF} to ptr)
  %a = getelementptr i8, ptr %f, i64 56
  %s = load ptr, ptr %a
  ret ptr %s
}}
define internal i32 @simt_field(i64 %off) alwaysinline {{
  %f = load ptr, ptr inttoptr (i64 {SELF} to ptr)
  %a = getelementptr i8, ptr %f, i64 %off
  %r = load i32, ptr %a
  ret i32 %r
}}
"""


# inline PTX inside libdevice.10.bc
_ASMEXT = "".join(f"declare {t} @simt_add_{m}_{s}({t}, {t})\n" for m in ("rz", "rm", "rp") for s, t in (("f", "float"), ("d", "double")))
for _s, _t in (("f", "float"), ("d", "double")):
    _w = "32" if _s == "f" else "64"
    emulate_ir(rf"sub\.rn(\.ftz)?\.f{_w}", f"  %r = fsub {_t} %a0, %a1\n  ret {_t} %r")
    for _m in ("rz", "rm", "rp"):
        emulate_ir(rf"sub\.{_m}(\.ftz)?\.f{_w}", f"  %n = fneg {_t} %a1\n  %r = call {_t} @simt_add_{_m}_{_s}({_t} %a0, {_t} %n)\n  ret {_t} %r")
emulate_ir(r"bfind\.shiftamt\.u32", "  %z = icmp eq i32 %a0, 0\n  %c = call i32 @llvm.ctlz.i32(i32 %a0, i1 false)\n  %r = select i1 %z, i32 -1, i32 %c\n  ret i32 %r")
emulate_ir(r"rcp\.approx\.ftz\.f32", "  %r = fdiv float 1.0, %a0\n  ret float %r")
emulate_ir(r"tanh\.approx\.f32", "  %r = call float @llvm.tanh.f32(float %a0)\n  ret float %r")
emulate_ir(r"ex2\.approx(\.ftz)?\.f32", "  %r = call float @llvm.exp2.f32(float %a0)\n  ret float %r")
emulate_ir(r"lg2\.approx(\.ftz)?\.f32", "  %r = call float @llvm.log2.f32(float %a0)\n  ret float %r")
emulate_ir(r"rsqrt\.approx\.ftz\.f64", "  %q = call double @llvm.sqrt.f64(double %a0)\n  %r = fdiv double 1.0, %q\n  ret double %r")
emulate_ir(r".*setp\.equ\.f64 .*selp\.f64 .*", "  %c = fcmp ueq double %a0, %a1\n  %r = select i1 %c, double %a2, double %a3\n  ret double %r")


def _i128(n, expr):
    b = []
    for i in range(n):
        b.append(f"  %w{i} = zext i64 %a{i} to i128")
    b += expr + ["  %l = trunc i128 %v to i64", "  %hh = lshr i128 %v, 64", "  %h = trunc i128 %hh to i64",
                 "  %r0 = insertvalue { i64, i64 } undef, i64 %l, 0", "  %r = insertvalue { i64, i64 } %r0, i64 %h, 1", "  ret { i64, i64 } %r"]
    return "\n".join(b)


_J = ["  %h0 = shl i128 %w1, 64", "  %x = or i128 %w0, %h0", "  %h1 = shl i128 %w3, 64", "  %y = or i128 %w2, %h1"]
emulate_ir(r"\{ \.reg \.u32 r0.*\badd\.cc\.u32.*", _i128(4, _J + ["  %v = add i128 %x, %y"]))
emulate_ir(r"\{ \.reg \.u32 r0.*\bsub\.cc\.u32.*", _i128(4, _J + ["  %v = sub i128 %x, %y"]))
emulate_ir(r"\{ \.reg \.u32 r0.*\bmov\.b64 \{blo,bhi\}, \$3; mul\.lo\.u32.*", _i128(2, ["  %v = mul i128 %w0, %w1"]))
emulate_ir(r"\{ \.reg \.u32 r0.*\bmov\.b64 \{clo,chi\}, \$4; mad\.lo\.cc\.u32.*", _i128(3, ["  %m = mul i128 %w0, %w1", "  %v = add i128 %m, %w2"]))
emulate_ir(r"\{ mad\.lo\.cc\.u32 \$0, \$2, \$3, \$4; madc\.hi\.u32 \$1, \$2, \$3, 0; \}",
           "  %x = zext i32 %a0 to i64\n  %y = zext i32 %a1 to i64\n  %z = zext i32 %a2 to i64\n  %m = mul i64 %x, %y\n  %v = add i64 %m, %z\n"
           "  %l = trunc i64 %v to i32\n  %hh = lshr i64 %v, 32\n  %h = trunc i64 %hh to i32\n"
           "  %r0 = insertvalue { i32, i32 } undef, i32 %l, 0\n  %r = insertvalue { i32, i32 } %r0, i32 %h, 1\n  ret { i32, i32 } %r")


# -------------------------------------------------------------------- launch
def _flatten(ty, v, out, keep):
    if isinstance(ty, types.Array):
        keep.append(v)
        out += [0, 0, v.size, v.itemsize, v.ctypes.data, *v.shape, *[s & (2**64 - 1) for s in v.strides]]
    elif isinstance(ty, (types.UniTuple, types.Tuple)):
        for t, x in zip(ty, v):
            _flatten(t, x, out, keep)
    elif isinstance(ty, types.Float):
        out.append(int(np.array([v], f"f{ty.bitwidth // 8}").view(f"u{ty.bitwidth // 8}")[0]))
    elif isinstance(ty, types.CPointer):
        if isinstance(v, np.ndarray):
            keep.append(v)
            v = v.ctypes.data
        out.append(int(v) & (2**64 - 1))
    elif isinstance(ty, (types.Integer, types.Boolean)):
        out.append(int(v) & (2**64 - 1))
    else:
        raise TypeError(f"kernel argument type {ty} not handled")


def empty(shape, dtype=np.float32):
    """numpy array whose end touches an inaccessible page (and one lies before it):
    an out-of-bounds kernel access becomes a SimtError. Filled with 0xFF (NaN / -1)."""
    shape = (shape,) if np.isscalar(shape) else tuple(shape)
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    body = -(-max(n, 1) // 4096) * 4096
    m = mmap.mmap(-1, body + 8192)
    base = C.addressof(C.c_char.from_buffer(m))
    libc = C.CDLL(None)
    for off in (0, 4096 + body):
        if libc.mprotect(C.c_void_p(base + off), 4096, 0):
            raise OSError("mprotect")
    a = np.frombuffer(m, np.uint8, n, 4096 + body - n)
    a[:] = 0xFF
    return a.view(dtype).reshape(shape)


def array(x, dtype=None):
    x = np.asarray(x, dtype)
    a = empty(x.shape, x.dtype)
    a[...] = x
    return a


_lock = threading.Lock()


def _dim3(d):
    d = (d,) if np.isscalar(d) else tuple(d)
    return tuple(int(x) for x in d) + (1,) * (3 - len(d))


class Kernel:
    def __init__(self, fn, signature=None, **opts):
        if signature is None:
            signature = getattr(fn, "signature", None)
        self.signature = None if signature is None else tuple(signature)
        self.name = getattr(fn, "name", None) or getattr(fn, "__name__", "?")
        fn = getattr(fn, "function", fn)
        self.pyfunc = getattr(fn, "py_func", fn)
        to = dict(getattr(fn, "targetoptions", {}))
        self.opts = {k: to[k] for k in ("fastmath", "opt") if k in to} | opts
        self.cache = {}

    def compile(self, argtypes):
        if argtypes not in self.cache:
            self.cache[argtypes] = Compiled(self.pyfunc, argtypes, **self.opts)
        return self.cache[argtypes]

    def __getitem__(self, cfg):
        cfg = tuple(cfg) + (0, 0)[len(cfg) - 2:] if len(cfg) < 4 else cfg
        return lambda *args, **kw: run([Launch(self, cfg[0], cfg[1], args, cfg[3] or 0)], **kw)


_jitted = {}


def jit(kernel, signature=None, **opts):
    """The kernel ready to run on the CPU. `kernel`: an ops.device Kernel, a plain function or a @cuda.jit dispatcher.
    With a signature arguments are packed by it (a pointer takes an int or a numpy array), else typed from the arguments."""
    if isinstance(kernel, Kernel):
        return kernel
    if getattr(kernel, "function", None) is None:
        return Kernel(kernel, signature, **opts)
    key = (kernel.function, tuple(signature or kernel.signature), tuple(sorted(opts.items())))
    if key not in _jitted:
        _jitted[key] = Kernel(kernel, signature, **opts)
    return _jitted[key]


def zeros(shape, dtype=np.float32):
    a = empty(shape, dtype)
    a[...] = 0
    return a


ORDERS = ("forward", "reverse", "seed1", "seed2", "seed3")


def orders():
    """`@simt.orders()` runs a test once per thread order, handed in as `order`."""
    import pytest

    return pytest.mark.parametrize("order", ORDERS)


def _order(order, seed):
    if order.startswith("seed"):
        return 2, int(order[4:])
    return {"forward": 0, "reverse": 1, "random": 2}[order], seed


class Launch:
    def __init__(self, kernel, grid, block, args, shared=0, sig=None):
        kernel = jit(kernel)
        sig = sig or kernel.signature
        if sig and len(sig) != len(args):
            raise TypeError(f"{kernel.name}: {len(args)} arguments for {len(sig)} parameters")
        self.args, self.grid, self.block, self.shared = args, _dim3(grid), _dim3(block), int(shared)
        tys = tuple(sig) if sig else tuple(typeof(a, Purpose.argument) for a in args)
        self.c = kernel.compile(tys)
        if np.prod(self.block) > 1024 or self.c.smem_static > 48 << 10 or self.c.smem_static + self.shared > 227 << 10:
            raise SimtError(f"launch exceeds GPU limits: block {self.block}, shared {self.c.smem_static}+{self.shared} bytes")
        flat, self.keep = [], []
        for t, a in zip(tys, args):
            _flatten(t, a, flat, self.keep)
        if len(flat) != len(self.c.tys):
            raise TypeError(f"ABI mismatch: {len(flat)} packed words, kernel takes {self.c.tys}")
        self.argv = (C.c_uint64 * max(1, len(flat)))(*flat)


def run(launches, order="forward", seed=1, resident=1, spin_limit=1_000_000, cpu_s=60.0):
    """Run grids together. resident: blocks of each grid that are live at once
    (1 = strictly one after another; use the grid size for inter-block spinning)."""
    n = len(launches)
    arr = (_CLaunch * n)()
    for i, (c, la) in enumerate(zip(arr, launches)):
        c.entry, c.argv = la.c.entry, C.addressof(la.argv)
        c.grid[:], c.block[:] = la.grid, la.block
        c.smem_static, c.smem_dyn, c.resident, c.rank = la.c.smem_static, la.shared, resident, i
    with _lock:
        _run(arr, n, order, seed, spin_limit, cpu_s)


def _run(arr, n, order, seed, spin_limit, cpu_s):
    _pending.clear()
    for h in on_launch:
        h()
    ord_, seed = _order(order, seed)
    rc = _rt.simt_run(arr, n, ord_, seed, spin_limit, cpu_s)
    if rc:
        if _pending:
            raise SimtError("emulation callback failed") from _pending[0]
        names = {2: "bar.warp.sync", 3: "shfl.sync", 4: "vote.sync", 5: "match.any.sync", 6: "match.all.sync"}
        names |= {v: _parse_ptx(k[0])[0] for k, v in _OPS.items()}
        msg = (C.c_char * 8192).in_dll(_rt, "simt_err").value.decode()
        raise SimtError(re.sub(r"op#(\d+)", lambda m: names.get(int(m[1]), m[0]), msg))


def stats():
    return dict(zip(("switches", "barriers", "collectives", "callbacks"), (C.c_uint64 * 4).in_dll(_rt, "simt_stat")))
