"""From a Python kernel to machine code of this host, once per process; and back from a program counter to its line.

`kernel_ir` is the only place that touches private parts of numba-cuda.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import tempfile
import types as python_types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as ll
from numba.cuda import compiler as numba_compiler
from numba.cuda import dispatcher as numba_dispatcher
from numba.cuda import types as numba_types
from numba.cuda.core.errors import NumbaDebugInfoWarning

from whalez.testing.simt import nvvm
from whalez.testing.simt.emulation import fail_ir, split_top
from whalez.testing.simt.machine import IR_HEADER, target_machine
from whalez.testing.simt.rewrite import Rewriter

COMPUTE_CAPABILITY = (9, 0, "a")  #: what the front end is told; kernels that ask see the newest this project has
_compiled: weakref.WeakSet[Compiled]
types: Any = numba_types  # their attributes are made at run time
_front_end: Any = numba_compiler


def kernel_ir(function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> tuple[list[str], str]:
    """Texts of the NVVM IR modules, and the name of the kernel in them: exactly what NVVM would get."""
    saved = numba_dispatcher.get_current_device, numba_dispatcher.compile_cuda
    device = python_types.SimpleNamespace(compute_capability=COMPUTE_CAPABILITY)

    def compile_device_function(*arguments: Any, **how: Any) -> Any:
        return saved[1](*arguments, **how | {"lineinfo": not how.get("debug")})

    numba_dispatcher.get_current_device = lambda: device
    numba_dispatcher.compile_cuda = compile_device_function
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumbaDebugInfoWarning)  # a kernel made by exec has no lines
            library, _ = _front_end._compile_pyfunc_with_fixup(
                function,
                types.void(*arguments),
                device=False,
                cc=COMPUTE_CAPABILITY,
                abi="numba",
                **({"lineinfo": True} | options),
            )
    finally:
        numba_dispatcher.get_current_device, numba_dispatcher.compile_cuda = saved
    return library.llvm_strs, library._entry_name


class Compiled:
    """A kernel as machine code.

    Attributes:
        entry:       address of a C function that takes the arguments as an array of 64-bit words
        words:       IR types of these words
        smem_static: bytes of its shared arrays
        ir, optimised_ir: for looking at
    """

    def __init__(self, name: str, function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> None:
        self.name = name
        modules, entry = kernel_ir(function, arguments, **options)
        rewriter = Rewriter(name)
        modules = [rewriter.module(m) for m in modules]
        offsets, self.smem_static = rewriter.shared_layout()
        head = next(x for m in modules for x in m.splitlines() if x.startswith("define") and f'@"{entry}"(' in x)
        parameters = split_top(head[head.index(f'@"{entry}"(') + len(entry) + 4 : head.rindex(")")])
        self.words = [_parameter_type(p) for p in parameters]

        main = ll.parse_bitcode(nvvm.definitions())
        main.link_in(ll.parse_assembly(f"{offsets}\n{_entry_ir(entry, self.words)}"))
        if rewriter.sites:
            main.link_in(ll.parse_assembly(nvvm.sites_module(rewriter)))
        externals = "declare ptr @simt_smem(ptr)\n"
        externals += "".join(f"@simt_off_{n} = external constant i64\n" for n in rewriter.shared)
        for m in modules:
            main.link_in(ll.parse_assembly(f"{externals}{rewriter.site_declarations()}\n{m}"))
        if any(f.is_declaration and f.name.startswith("__nv_") for f in main.functions):
            main.link_in(ll.parse_bitcode(nvvm.libdevice()))
        for f in main.functions:
            if not f.is_declaration and f.name != "simt_entry":
                f.linkage = "internal"
        for g in main.global_variables:
            if not g.is_declaration:
                g.linkage = "internal"
        _remove_unused(main)
        _define_missing(main, name)
        main.triple = ll.get_default_triple()
        self.ir = str(main)
        machine = target_machine()
        builder = ll.create_pass_builder(machine, ll.create_pipeline_tuning_options(speed_level=2))
        builder.getModulePassManager().run(main, builder)
        main.verify()
        self.optimised_ir = str(main)
        self._object = b""
        self._engine = ll.create_mcjit_compiler(main, machine)
        self._engine.set_object_cache(notify_func=self._keep_object)
        self._engine.finalize_object()
        self.entry: int = self._engine.get_function_address("simt_entry")
        _compiled.add(self)

    def _keep_object(self, module: Any, object_file: bytes) -> None:
        self._object = bytes(object_file)

    def has(self, pc: int) -> bool:
        return self.entry <= pc < self.entry + len(self._object)

    def lines_of(self, pcs: Sequence[int]) -> dict[int, str]:
        """`file.py:12` of the instruction before each pc; of an inlined device function also where it was called.

        Empty without addr2line, which comes with the C compiler.
        """
        start = _symbol_offset(self._object, b"simt_entry")
        if start is None or not shutil.which("addr2line"):
            return {}
        with tempfile.NamedTemporaryFile(suffix=".o") as f:
            f.write(self._object)
            f.flush()
            at = [hex(pc - 1 - self.entry + start) for pc in pcs]
            command = ["addr2line", "-a", "-i", "-e", f.name, *at]
            output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        lines = {}
        for pc, part in zip(pcs, re.split(r"^0x[0-9a-f]+$", output, flags=re.M)[1:], strict=False):
            places = [os.path.relpath(x) for x in part.split() if re.search(r":[1-9]\d*$", x)]
            places = [x if not x.startswith("../") else os.path.basename(x) for x in places]
            if places:
                lines[pc] = ", inlined at ".join(places)
        return lines


_compiled = weakref.WeakSet()


def places_of(pcs: Sequence[int]) -> dict[int, str]:
    """Kernel and source line of program counters, as far as they are known."""
    places = dict.fromkeys(pcs, "a place outside the kernels")
    for c in _compiled:
        inside = [pc for pc in places if c.has(pc)]
        lines = c.lines_of(inside) if inside else {}
        for pc in inside:
            if pc in lines or "outside" in places[pc]:
                places[pc] = f"{c.name}, {lines.get(pc, 'line unknown')}"
    return places


def _symbol_offset(elf: bytes, name: bytes) -> int | None:
    """Where in its section a symbol of an ELF64 object stands."""
    if elf[:5] != b"\x7fELF\x02":
        return None
    table, size, count = *struct.unpack_from("<Q", elf, 0x28), *struct.unpack_from("<HH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    for section in sections:
        if section[1] == 2:  # SHT_SYMTAB; link is the section of its strings
            strings = sections[section[6]][4]
            for at in range(section[4], section[4] + section[5], 24):
                at_name, value = struct.unpack_from("<I", elf, at)[0], struct.unpack_from("<Q", elf, at + 8)[0]
                begin = strings + int(at_name)
                if elf[begin : begin + len(name) + 1] == name + b"\0":
                    return int(value)
    return None


def _parameter_type(parameter: str) -> str:
    if parameter.startswith(("{", "[")):
        return parameter.rsplit(" ", 1)[0]
    return re.sub(r"\s+%.*$", "", parameter).split(" ")[0]


def _entry_ir(entry: str, words: list[str]) -> str:
    """Not inlined: the caller has no line information, and would take the kernel's away."""
    lines = [f'declare void @"{entry}"({", ".join(words)})', "define void @simt_entry(ptr %v) {"]
    for i, t in enumerate(words):
        lines += [f"  %p{i} = getelementptr i64, ptr %v, i64 {i}", f"  %x{i} = load {t}, ptr %p{i}"]
    values = ", ".join(f"{t} %x{i}" for i, t in enumerate(words))
    return "\n".join([*lines, f'  notail call void @"{entry}"({values}) noinline', "  ret void\n}"])


def _remove_unused(module: Any) -> None:
    builder = ll.create_pass_builder(target_machine(), ll.create_pipeline_tuning_options(speed_level=0))
    passes = ll.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)


def _define_missing(module: Any, kernel: str) -> None:
    """What is still undefined fails when it is reached, not when it is compiled: it may be behind a branch."""
    for f in list(module.functions):
        if f.is_declaration and not f.name.startswith(("llvm.", "simt_")):
            signature = re.match(r"(.*?) \((.*)\)$", str(f.global_value_type))
            assert signature, f"{f.name}: {f.global_value_type}"
            text = fail_ir(signature[1], f.name, split_top(signature[2]), f"no CPU definition of {f.name} in {kernel}")
            module.link_in(ll.parse_assembly(IR_HEADER + text.replace("define internal", "define")))


class SimtKernel:
    """A kernel that runs on the machine; compiled for each combination of argument types it meets, or for its
    signature."""

    def __init__(self, kernel: Any, signature: Sequence[Any] | None = None, **options: Any) -> None:
        if signature is None:
            signature = getattr(kernel, "signature", None)
        self.signature = None if signature is None else tuple(signature)
        #: what the kernel declares to be launched with at most; None where it declares nothing
        self.block_max: tuple[int, ...] | None = getattr(kernel, "block", None)
        self.shared_max: int | None = getattr(kernel, "shared_bytes", None)
        function = getattr(kernel, "function", kernel)
        self.name = str(getattr(kernel, "name", None) or getattr(function, "__name__", "kernel"))
        target_options = dict(getattr(function, "targetoptions", {}))
        self.function: Callable[..., Any] = getattr(function, "py_func", function)
        self.options = {k: target_options[k] for k in ("fastmath", "opt") if k in target_options} | options
        self._compiled: dict[tuple[Any, ...], Compiled] = {}

    def compile(self, arguments: tuple[Any, ...]) -> Compiled:
        if arguments not in self._compiled:
            self._compiled[arguments] = Compiled(self.name, self.function, arguments, **self.options)
        return self._compiled[arguments]

    def __getitem__(self, configuration: Any) -> Callable[..., None]:
        """`kernel[grid, block, 0, shared_bytes](*arguments, order=...)`: one launch, run to its end."""
        from whalez.testing.simt.launch import Launch, run

        grid, block, _, shared = (*configuration, 0, 0)[:4] if len(configuration) < 4 else configuration

        def launch(*arguments: Any, **how: Any) -> None:
            run([Launch(self, grid, block, arguments, shared or 0)], **how)

        return launch


_jitted: dict[tuple[Any, ...], SimtKernel] = {}


def jit(kernel: Any, signature: Sequence[Any] | None = None, **options: Any) -> SimtKernel:
    """The kernel, ready to run here; compiled once per process for each list of argument types.

    Args:
        kernel:    a Kernel of ops/device (function and signature), a plain function, or a @cuda.jit dispatcher
        signature: numba types of the arguments; without it (and without one of the kernel) they are taken from the
                   arguments of each launch, which then are numpy arrays and scalars
        options:   of the front end, such as fastmath=True
    """
    if isinstance(kernel, SimtKernel):
        return kernel
    signature = signature or getattr(kernel, "signature", None)
    function = getattr(kernel, "function", kernel)
    declared = [getattr(kernel, x, None) for x in ("name", "block", "shared_bytes")] if function is not kernel else []
    key = (function, signature and tuple(signature), *declared, *sorted(options.items()))
    if key not in _jitted:
        _jitted[key] = SimtKernel(kernel, signature, **options)
    return _jitted[key]
