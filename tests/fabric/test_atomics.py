"""Every atomic by its IR and its instructions, for both processors, and the njit code that uses them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from numba import njit

from whalez.errors import FabricError
from whalez.fabric import atomics, futex
from whalez.fabric.atomics import I32, I64

TRIPLES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}

Emit = Callable[[Any, Any, Any], Any]

EMITTERS: dict[str, Emit] = {
    "load_acquire_u64": lambda b, p, v: atomics.emit_load(b, p, I64, "acquire"),
    "store_release_u64": lambda b, p, v: atomics.emit_store(b, p, v, I64, "release"),
    "load_seqcst_u32": lambda b, p, v: atomics.emit_load(b, p, I32, "seq_cst"),
    "store_seqcst_u32": lambda b, p, v: atomics.emit_store(b, p, v, I32, "seq_cst"),
    "fetch_add_seqcst_u32": lambda b, p, v: atomics.emit_fetch_add(b, p, v, I32, "seq_cst"),
    "fetch_add_seqcst_u64": lambda b, p, v: atomics.emit_fetch_add(b, p, v, I64, "seq_cst"),
    "cpu_relax": lambda b, p, v: atomics.emit_relax(b),
    "futex_wait": lambda b, p, v: futex.emit_futex(b, futex.FUTEX_WAIT, p, v, v),
}

IR_TEXT = {
    "load_acquire_u64": r"load atomic i64, .* acquire, align 8",
    "store_release_u64": r"store atomic i64 .* release, align 8",
    "load_seqcst_u32": r"load atomic i32, .* seq_cst, align 4",
    "store_seqcst_u32": r"store atomic i32 .* seq_cst, align 4",
    "fetch_add_seqcst_u32": r"atomicrmw add ptr .*, i32 .* seq_cst, align 4",
    "fetch_add_seqcst_u64": r"atomicrmw add ptr .*, i64 .* seq_cst, align 8",
}

#: In order; on x86-64 a plain mov is an acquire load and a release store, and only the seq_cst store needs xchg.
INSTRUCTIONS = {
    ("x86_64", "load_acquire_u64"): [r"movq\s+\(%rdi\), %rax"],
    ("x86_64", "store_release_u64"): [r"movq\s+%rsi, \(%rdi\)"],
    ("x86_64", "load_seqcst_u32"): [r"movl\s+\(%rdi\), %eax"],
    ("x86_64", "store_seqcst_u32"): [r"xchgl\s+%esi, \(%rdi\)"],
    ("x86_64", "fetch_add_seqcst_u32"): [r"lock\s+xaddl\s+%e.., \(%rdi\)"],
    ("x86_64", "fetch_add_seqcst_u64"): [r"lock\s+xaddq\s+%r.., \(%rdi\)"],
    ("x86_64", "cpu_relax"): [r"\bpause\b"],
    ("x86_64", "futex_wait"): [r"movl\s+\$202, %edi"],
    ("aarch64", "load_acquire_u64"): [r"\bldar\s+x0, \[x0\]"],
    ("aarch64", "store_release_u64"): [r"\bstlr\s+x1, \[x0\]"],
    ("aarch64", "load_seqcst_u32"): [r"\bldar\s+w0, \[x0\]"],
    ("aarch64", "store_seqcst_u32"): [r"\bstlr\s+w1, \[x0\]"],
    ("aarch64", "fetch_add_seqcst_u32"): [r"\bldaxr\s+w", r"\bstlxr\s+w"],
    ("aarch64", "fetch_add_seqcst_u64"): [r"\bldaxr\s+x", r"\bstlxr\s+w\d+, x"],
    ("aarch64", "cpu_relax"): [r"\bisb\b"],
    ("aarch64", "futex_wait"): [r"mov\s+w0, #98\b"],
}


def compile_for(triple: str, emit: Emit) -> llvm.ModuleRef:
    module = ir.Module("probe")
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(I64, [I64, I64]), "probe")
    builder = ir.IRBuilder(function.append_basic_block())
    result = emit(builder, *function.args)
    builder.ret(result if result is not None else function.args[0])
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return parsed


def assembly(parsed: llvm.ModuleRef) -> str:
    return str(llvm.Target.from_triple(parsed.triple).create_target_machine(opt=2).emit_assembly(parsed))


@pytest.fixture(scope="module", autouse=True)
def all_targets() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@pytest.mark.parametrize("arch", TRIPLES)
@pytest.mark.parametrize("name", IR_TEXT)
def test_ir(arch: str, name: str) -> None:
    assert re.search(IR_TEXT[name], str(compile_for(TRIPLES[arch], EMITTERS[name])))


@pytest.mark.parametrize(("arch", "name"), INSTRUCTIONS, ids=lambda x: x)
def test_instructions(arch: str, name: str) -> None:
    text = assembly(compile_for(TRIPLES[arch], EMITTERS[name]))
    position = 0
    for pattern in INSTRUCTIONS[arch, name]:
        match = re.compile(pattern).search(text, position)
        assert match, f"{pattern} not in order in\n{text}"
        position = match.end()


def test_unknown_processor_is_named() -> None:
    with pytest.raises(FabricError, match="riscv64"):
        compile_for("riscv64-unknown-linux-gnu", EMITTERS["futex_wait"])


def test_relax_is_nothing_on_an_unknown_processor() -> None:
    assert "call" not in str(compile_for("riscv64-unknown-linux-gnu", EMITTERS["cpu_relax"]))


def test_njit_code_holds_the_atomics_and_keeps_all_bits() -> None:
    @njit
    def probe(p: Any) -> Any:
        atomics.store_release_u64(p, 2**62 + 1)
        atomics.store_seqcst_u32(p + 8, 2**32 - 1)
        before = atomics.fetch_add_seqcst_u32(p + 8, 3)
        long_before = atomics.fetch_add_seqcst_u64(p, 2)
        atomics.cpu_relax()
        return before, long_before, atomics.load_seqcst_u32(p + 8), atomics.load_acquire_u64(p)

    words = np.zeros(4, np.uint64)
    assert probe(words.ctypes.data) == (2**32 - 1, 2**62 + 1, 2, 2**62 + 3)
    assert words.tolist() == [2**62 + 3, 2, 0, 0]  # the u32 beside the counter is untouched
    text = probe.inspect_llvm(probe.signatures[0])
    for name, pattern in IR_TEXT.items():
        assert re.search(pattern, text), name
