"""What the statements of ops/device/ptx.py are in PTX and in machine code: the harness cannot see a missing fence."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from numba import cuda
from numba.cuda.extending import _Intrinsic

from helpers import devices
from whalez.fabric.cuda.kernels import doorbell_ring_kernel, doorbell_wait_kernel, doorbell_write_kernel
from whalez.ops.device import ptx
from whalez.ops.device.compile import ARCHITECTURES, assemble, compile_cubin, compile_ptx, disassembly, under_aligned
from whalez.ops.device.kernel import Kernel
from whalez.ops.device.types import bf16p, f32, f32p, u32, u32p, u64, u64p

PARAMETERS = {"a": u64, "b": u64, **{f"r{i}": u32 for i in range(6)}, **{f"f{i}": f32 for i in range(4)}}
RESULTS = {"o64": u64p, "o32": u32p, "of": f32p, "o16": bf16p}
_MMA = "{#,#,#,#}, {r0,r1,r2,r3}, {r4,r5}, {f0,f1,f2,f3};"

#: name -> where its results go, its arguments, its one statement: # is a result, the rest are arguments
STATEMENTS = {
    "st_release_sys_u64": ("", "a, b", "st.release.sys.global.u64 [a], b;"),
    "ld_acquire_sys_u64": ("o64", "a", "ld.acquire.sys.global.u64 #, [a];"),
    "st_volatile_u64": ("", "a, b", "st.volatile.global.u64 [a], b;"),
    "nanosleep": ("", "r0", "nanosleep.u32 r0;"),
    "globaltimer": ("o64", "", "mov.u64 #, %globaltimer;"),
    "mma_m16n8k16_bf16": (
        "of",
        "r0, r1, r2, r3, r4, r5, f0, f1, f2, f3",
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {_MMA}",
    ),
    "ldmatrix_x4": ("o32", "r0", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {#,#,#,#}, [r0];"),
    "ldmatrix_x4_trans": ("o32", "r0", "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {#,#,#,#}, [r0];"),
    "cp_async_16": ("", "r0, a", "cp.async.cg.shared.global [r0], [a], 16;"),
    "cp_async_commit": ("", "", "cp.async.commit_group;"),
    "cp_async_wait_all": ("", "", "cp.async.wait_all;"),
    "cvt_bf16x2_f32": ("o32", "f0, f1", "cvt.rn.bf16x2.f32 #, f1, f0;"),
    "cvt_bf16_f32": ("o16", "f0", "cvt.rn.bf16.f32 #, f0;"),
    "ex2_approx_f32": ("of", "f0", "ex2.approx.ftz.f32 #, f0;"),
}
#: Neither read nor write memory nor time: the compiler may merge and move them.
PURE = {"mma_m16n8k16_bf16", "cvt_bf16x2_f32", "cvt_bf16_f32", "ex2_approx_f32"}
#: Not statements but casts.
CASTS = {"f32_from_bf16", "f32_from_bits", "shared_address", "address_of"}


def made(lines: list[str]) -> Kernel:
    """A kernel with this body; it sees `ptx` and all parameters and results by name."""
    names = [*PARAMETERS, *RESULTS]
    space: dict[str, Any] = {"ptx": ptx, "cuda": cuda}
    exec(f"def body({', '.join(names)}):\n" + "".join(f"    {line}\n" for line in lines), space)
    return Kernel("body", space["body"], (*PARAMETERS.values(), *RESULTS.values()), (32, 1, 1))


def call(name: str) -> list[str]:
    result, arguments, text = STATEMENTS[name]
    several = text.split(" ")[1].count("#") if " " in text else 0
    if not result:
        return [f"ptx.{name}({arguments})"]
    if several == 1:
        return [f"{result}[0] = ptx.{name}({arguments})"]
    return [f"t = ptx.{name}({arguments})", *(f"{result}[{i}] = t[{i}]" for i in range(several))]


@cache
def text_of(*names: str) -> str:
    return compile_ptx(made([line for name in names for line in call(name)]), "sm_80")


def inline(text: str) -> list[str]:
    """The inline statements, with the kernel's parameters by name in place of the registers they were loaded to."""
    registers = {
        register: list(PARAMETERS)[int(i)]
        for register, i in re.findall(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]", text)
        if int(i) < len(PARAMETERS)
    }
    found = re.findall(r"// begin inline asm\s+(.*?)\s+// end inline asm", text, re.DOTALL)
    return [re.sub(r"%[a-z]+\d+", lambda m: registers.get(m[0], "#"), " ".join(one.split())) for one in found]


def test_every_function_is_used_by_a_kernel() -> None:
    """A statement that no kernel has is not seen by the harness, and nobody would miss it."""
    package = Path(inspect.getfile(ptx)).parents[2]
    kernels = [*package.glob("ops/*/*.py"), *package.glob("fabric/cuda/*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in kernels if path.name != "ptx.py")
    assert [name for name in sorted(STATEMENTS.keys() | CASTS) if not re.search(rf"\b{name}\b", text)] == []


def test_every_function_has_its_statement_here() -> None:
    functions = {name for name, value in vars(ptx).items() if isinstance(value, _Intrinsic)}
    assert functions == STATEMENTS.keys() | CASTS
    assert not STATEMENTS.keys() & CASTS


@pytest.mark.parametrize("name", STATEMENTS)
def test_statement(name: str) -> None:
    assert inline(text_of(name)) == [STATEMENTS[name][2]]


@pytest.mark.parametrize("name", sorted(STATEMENTS.keys() - PURE))
def test_is_neither_dropped_nor_merged_nor_passed_by(name: str) -> None:
    """Twice the same statement, its results unused, with plain accesses of one word around each of them."""
    arguments = STATEMENTS[name][1]
    step = ["of[9] = of[8]", f"ptx.{name}({arguments})"]
    text = compile_ptx(made([*step, *step, "of[9] = of[8]"]), "sm_80")
    order = re.findall(r"ld\.global\.f32|st\.global\.f32|begin inline asm", text)
    access = ["ld.global.f32", "st.global.f32"]
    assert order == [*access, "begin inline asm", *access, "begin inline asm", *access]


@pytest.mark.parametrize("name", sorted(PURE))
def test_arithmetic_is_merged(name: str) -> None:
    arguments = STATEMENTS[name][1]
    assert inline(compile_ptx(made([f"ptx.{name}({arguments})"]), "sm_80")) == []
    assert len(inline(compile_ptx(made(call(name) + call(name)), "sm_80"))) == 1


def opcodes(lines: list[str], arch: str) -> list[str]:
    sass = disassembly(assemble(compile_ptx(made(lines), arch), arch, "test"))
    return re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@\S+\s+)?([A-Z][\w.]+)", sass)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_machine_code(arch: str) -> None:
    """What the chips do: strong accesses of the system's scope, fences of it, and the units that were meant."""
    lines = [line for name in STATEMENTS for line in call(name)]
    code = opcodes(lines, arch)
    release = next(i for i, opcode in enumerate(code) if re.fullmatch(r"STG?\.E\.64\.STRONG\.SYS", opcode))
    assert any(opcode.startswith("MEMBAR") and opcode.endswith("SYS") for opcode in code[:release]), code
    acquire = next(i for i, opcode in enumerate(code) if re.fullmatch(r"LDG?\.E\.64\.STRONG\.SYS", opcode))
    assert any(opcode.startswith("CCTL.IVALL") for opcode in code[acquire:]), code  # the first cache is emptied
    for expected in ("HMMA.16816.F32.BF16", "LDSM.16.M88.4", "LDSM.16.MT88.4"):
        assert expected in code, expected
    for expected in ("LDGSTS.E.BYPASS", "LDGDEPBAR", "DEPBAR", "NANOSLEEP", "MUFU.EX2", "F2FP"):
        assert any(opcode.startswith(expected) for opcode in code), expected


def accesses(text: str) -> set[str]:
    """The accesses of memory in a PTX text: opcodes, with those of parameters left out."""
    return set(re.findall(r"^\s*(?:@%p\d+ )?((?:ld|st|atom|red)\.(?!param)[\w.]+)", text, re.MULTILINE))


def test_ring_stores_by_release_and_nothing_else() -> None:
    assert accesses(compile_ptx(doorbell_ring_kernel, "sm_80")) == {
        "ld.global.u64",  # the table of lines
        "st.release.sys.global.u64",
    }


def test_wait_looks_by_acquire_and_reports_by_volatile_stores() -> None:
    assert accesses(compile_ptx(doorbell_wait_kernel, "sm_80")) == {
        "ld.global.u64",  # the table of progress words
        "ld.acquire.sys.global.u64",
        "st.volatile.global.u64",
        "st.release.sys.global.u64",  # the state of the report, after its words
    }


def test_write_is_a_release() -> None:
    assert accesses(compile_ptx(doorbell_write_kernel, "sm_80")) == {"st.release.sys.global.u64"}


def with_shared_memory() -> list[Any]:
    """Every kernel that asks for dynamic shared memory; the widest, which take seconds to compile, in the long tier."""
    kernels = [each for each in devices.all_kernels() if each.function.__module__.startswith("whalez.")]
    return [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if "128" in each.name else [])
        for each in kernels
        if each.shared_bytes
    ]


@pytest.mark.parametrize("kernel", with_shared_memory())
def test_dynamic_shared_memory_is_aligned(kernel: Kernel) -> None:
    """Where the driver puts it is otherwise luck: a 16-byte copy into a place that is 4-aligned loses the context."""
    text = compile_ptx(kernel, "sm_80")
    assert ".extern .shared" in text
    assert not under_aligned(text)


@pytest.mark.parametrize(
    "declared",
    [
        ".extern .shared .align 4 .b8 s[];",
        ".shared .align 4 .b8 s[64];\n\tcp.async.cg.shared.global [%r1], [%rd1], 16;",
    ],
)
def test_shared_memory_that_is_not_aligned_is_seen(declared: str) -> None:
    assert len(under_aligned(declared)) == 1
    assert not under_aligned(declared.replace("align 4", "align 16"))


@pytest.mark.slow  # every kernel through the front end once more
def test_no_kernel_of_whalez_is_under_aligned() -> None:
    ours = [each for each in devices.all_kernels() if each.function.__module__.startswith("whalez.")]
    assert not {each.name: found for each in ours if (found := under_aligned(compile_ptx(each, "sm_80")))}


def test_no_inline_ptx_elsewhere() -> None:
    """Other modules with LLVM code of their own make accesses and casts, never statements."""
    package = Path(inspect.getfile(ptx)).parents[2]
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "testing" not in path.parts and re.search(r"InlineAsm|inline_asm", path.read_text(encoding="utf-8"))
    }
    assert {user for user in users if user.startswith(("ops/", "fabric/cuda/"))} == {"ops/device/ptx.py"}, users


def test_doorbells_in_machine_code() -> None:
    code = disassembly(compile_cubin(doorbell_ring_kernel, "sm_90"))
    assert re.search(r"MEMBAR\.\w+\.SYS(.|\n)*ST(G)?\.E\.64\.STRONG\.SYS", code)
    assert re.search(r"LD(G)?\.E\.64\.STRONG\.SYS", disassembly(compile_cubin(doorbell_wait_kernel, "sm_90")))
