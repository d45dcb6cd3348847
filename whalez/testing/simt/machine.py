"""The C machine beside this file: how it is built, and what Python and generated IR share with it.

Built with `cc` on first use, into a folder named by NUMBA_CACHE_DIR or into one of this user's under the temporary
folder, and never into the source tree. Keyed by the text of the C file.
"""

from __future__ import annotations

import ctypes as C
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import llvmlite.binding as ll

from whalez.testing.simt.errors import SimtError

SLOTS = 288  #: 64-bit operand slots of a thread: NSLOT in the C file
OPS_FIRST, OPS_MAX = 16, 1024  #: numbers of emulated statements: OP_USER and MAX_OP in the C file
OP_YIELD, OP_BAR, OP_SYNCWARP, OP_SHFL, OP_VOTE, OP_MATCH_ANY, OP_MATCH_ALL, OP_FAIL, OP_SLEEP = range(9)
OP_NAMES = {
    OP_SYNCWARP: "bar.warp.sync",
    OP_SHFL: "shfl.sync",
    OP_VOTE: "vote.sync",
    OP_MATCH_ANY: "match.any.sync",
    OP_MATCH_ALL: "match.all.sync",
}
SOURCE = Path(__file__).with_name("simt_rt.c")
FLAGS = ("-O2", "-frounding-math", "-fno-strict-aliasing", "-shared", "-fPIC")


class CLaunch(C.Structure):
    _fields_ = [
        ("entry", C.c_void_p),
        ("argv", C.c_void_p),
        ("grid", C.c_uint32 * 3),
        ("block", C.c_uint32 * 3),
        ("smem_static", C.c_uint32),
        ("smem_dynamic", C.c_uint32),
        ("resident", C.c_uint32),
        ("rank", C.c_uint32),
        ("next", C.c_uint64),
        ("total", C.c_uint64),
        ("step", C.c_uint64),
        ("shift", C.c_uint64),
        ("live", C.c_uint32),
        ("closed", C.c_uint32),
    ]


class CFiber(C.Structure):
    """The fields of a thread that generated IR and emulations read."""

    _fields_ = [
        ("tid", C.c_uint32 * 3),
        ("ctaid", C.c_uint32 * 3),
        ("ntid", C.c_uint32 * 3),
        ("nctaid", C.c_uint32 * 3),
        ("lane", C.c_uint32),
        ("dynamic_bytes", C.c_uint32),
        ("slots", C.c_void_p),
        ("smem", C.c_void_p),
        ("rank", C.c_uint32),
        ("smem_bytes", C.c_uint32),
    ]


OP_FUNCTION = C.CFUNCTYPE(C.c_int, C.c_uint32, C.POINTER(C.c_uint64), C.c_void_p)
FEED_FUNCTION = C.CFUNCTYPE(C.c_int, C.c_int)
FEED_DID, FEED_LAUNCHED, FEED_CLOSED = 1, 2, 4


def cache_folder() -> Path:
    root = os.environ.get("NUMBA_CACHE_DIR")
    return Path(root) / "simt" if root else Path(tempfile.gettempdir()) / f"whalez-simt-{os.getuid()}"


def build(source: Path = SOURCE) -> Path:
    """The shared library of `source`, compiled unless the cache has it."""
    tag = hashlib.sha256(source.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    library = cache_folder() / f"{source.stem}-{tag}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if library.parent.stat().st_uid != os.getuid():
            raise SimtError(f"{library.parent} belongs to another user; set NUMBA_CACHE_DIR")
        part = library.with_suffix(f".{os.getpid()}")  # several test processes may build at once; the rename is atomic
        command = [os.environ.get("CC", "cc"), *FLAGS, "-o", str(part), str(source), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise SimtError(
                f"{command[0]}: not found; the harness needs a C compiler (set CC, or install gcc)"
            ) from None
        except subprocess.CalledProcessError as e:
            raise SimtError(f"{' '.join(command)}\n{e.stderr}") from None
        part.rename(library)
    return library


def _load() -> C.CDLL:
    rt = C.CDLL(str(build()))
    rt.simt_run.argtypes = [
        C.POINTER(CLaunch),
        C.c_int,
        C.c_int,
        C.c_uint64,
        C.c_uint64,
        C.c_double,
        FEED_FUNCTION,
    ]
    rt.simt_set_op.argtypes = [C.c_int, C.c_void_p, C.c_int, C.c_int]
    rt.simt_memory.argtypes = [C.c_int, C.c_uint64, C.c_uint64, C.c_uint64, C.POINTER(C.c_uint64)]
    return rt


rt = _load()
SELF = C.addressof(C.c_void_p.in_dll(rt, "simt_self"))  #: holds the pointer to the thread that runs
CLOCK = C.addressof(C.c_uint64.in_dll(rt, "simt_clock_ns"))

ll.initialize_native_target()
ll.initialize_native_asmprinter()


def address_of(symbol: str) -> int:
    address = C.cast(getattr(rt, symbol), C.c_void_p).value
    assert address is not None
    return address


def export(symbol: str) -> None:
    """Let generated IR call this C function."""
    ll.add_symbol(symbol, address_of(symbol))


for _symbol in ("simt_trap", "simt_yield", "simt_misaligned", "simt_bf16", "simt_tf32_rna", "simt_prmt"):
    export(_symbol)


def last_error() -> str:
    message: bytes = (C.c_char * 16384).in_dll(rt, "simt_err").value
    return message.decode()


def stats() -> dict[str, int]:
    """Counts of the last run."""
    names = ("switches", "barriers", "collectives", "callbacks")
    return dict(zip(names, (C.c_uint64 * 4).in_dll(rt, "simt_stat"), strict=True))


# --------------------------------------------------------------------------------------- memory, from the host's side
_READ, _WRITE, _COPY, _ZERO = range(4)


def _memory(what: int, a: int, b: int, nbytes: int, said: str) -> int:
    out = C.c_uint64()
    if rt.simt_memory(what, a, b, nbytes, C.byref(out)):
        raise SimtError(f"invalid memory access by {said}")
    return out.value


def read_u64(address: int) -> int:
    return _memory(_READ, address, 0, 8, f"a read of [{address:#x}]")


def write_u64(address: int, value: int) -> None:
    _memory(_WRITE, address, value, 8, f"a write to [{address:#x}]")


def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    _memory(_COPY, dst, src, nbytes, f"a copy of {nbytes} bytes from [{src:#x}] to [{dst:#x}]")


def zero_bytes(dst: int, nbytes: int) -> None:
    _memory(_ZERO, dst, 0, nbytes, f"zeroing {nbytes} bytes at [{dst:#x}]")


#: IR that every generated module may use. simt_trap is convergent: NVVM's barriers are, and a copy of one on each side
#: of a branch would be another program.
IR_HEADER = f"""
declare void @simt_trap(i32, i32) convergent
declare void @simt_misaligned(i64, i64) convergent cold noreturn
declare i32 @simt_bf16(float) memory(none)
declare i32 @simt_tf32_rna(float) memory(none)
declare i32 @simt_prmt(i32, i32, i32) memory(none)
@simt_trapped = linkonce_odr constant [14 x i8] c"trap executed\\00"
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
define internal void @simt_check(ptr %p, i64 %mask) alwaysinline {{
  %i = ptrtoint ptr %p to i64
  %a = and i64 %i, %mask
  %c = icmp eq i64 %a, 0
  br i1 %c, label %ok, label %bad
bad:
  notail call void @simt_misaligned(i64 %i, i64 %mask) nomerge
  unreachable
ok:
  ret void
}}
"""
YIELD = f"  notail call void @simt_trap(i32 {OP_YIELD}, i32 0)"


def target_machine() -> Any:
    target = ll.Target.from_default_triple()
    return target.create_target_machine(
        cpu=ll.get_host_cpu_name(),
        features=ll.get_host_cpu_features().flatten(),
        opt=2,
        jit=True,
        codemodel="jitdefault",
    )
