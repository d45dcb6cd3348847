"""Kernels to machine code without a driver: images and the devices that take them, what is in them, the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="the CUDA packages are not installed")

from numba import cuda
from numba.cuda import codegen, dispatcher

import whalez
from helpers import devices
from whalez.errors import CapabilityMissing, FabricError
from whalez.ops.device import compile as compiler
from whalez.ops.device.compile import (
    ARCHITECTURES,
    PTX_LAST_RESORT,
    PTX_VERSION,
    Usage,
    compile_cubin,
    compile_last_resort,
    compile_ptx,
    image_for,
)
from whalez.ops.device.kernel import KERNELS, Kernel, kernel
from whalez.ops.device.ptx import mma_m16n8k16_bf16
from whalez.ops.device.types import f32, f32p, i64, u32
from whalez.ops.norm.cuda import l2_norm_kernel, rms_norm_kernel

ROOT = Path(whalez.__file__).parents[1]


@cuda.jit(device=True)
def twice_thread(x: Any) -> Any:
    return x + x


def doubling_body(g_x: Any, n: Any) -> None:
    i = cuda.grid(1)
    if i < n:
        g_x[i] = twice_thread(g_x[i])


def crowded_body(g_x: Any, n: Any) -> None:
    """96 values that live at once; 1024 threads leave 64 registers to each."""
    base = cuda.threadIdx.x * 96
    t = cuda.local.array(96, f32)
    for i in range(96):
        t[i] = g_x[base + i]
    for k in range(n):
        for i in range(96):
            t[i] = t[i] * t[(i + 5) % 96] + g_x[k]
    for i in range(96):
        g_x[base + i] = t[i]


def indexed_body(g_x: Any, n: Any) -> None:
    """An array whose index only the device knows."""
    t = cuda.local.array(50, f32)
    for i in range(n):
        t[i] = g_x[i]
    g_x[0] = t[n // 2]


def shared_body(g_x: Any, n: Any) -> None:
    s_x = cuda.shared.array(100, f32)
    s_x[cuda.threadIdx.x] = g_x[cuda.threadIdx.x]
    cuda.syncthreads()
    g_x[cuda.threadIdx.x] = s_x[n]


def product_body(g_x: Any, n: Any) -> None:
    a, zero = u32(n), f32(0.0)
    g_x[cuda.threadIdx.x] = mma_m16n8k16_bf16(a, a, a, a, a, a, zero, zero, zero, zero)[0]


def of(body: Any, threads: int = 32) -> Kernel:
    return Kernel(body.__name__, body, (f32p, i64), (threads, 1, 1))


# ---- which image ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "image"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((11, 0), PTX_LAST_RESORT),
        ((12, 0), PTX_LAST_RESORT),
        ((12, 1), PTX_LAST_RESORT),
    ],
)
def test_image_of_a_device(capability: tuple[int, int], image: str) -> None:
    assert image_for(capability) == image


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_old_devices_are_refused_by_name(capability: tuple[int, int]) -> None:
    with pytest.raises(CapabilityMissing, match=rf"8\.0 or newer.*{capability[0]}\.{capability[1]}"):
        image_for(capability)


@pytest.mark.parametrize(
    ("capability", "image"), [((9, 0), "sm_90a"), ((9, 1), "sm_90"), ((10, 0), "sm_100"), ((8, 0), "sm_80")]
)
def test_an_image_for_one_chip_goes_to_that_chip_only(capability: tuple[int, int], image: str) -> None:
    assert image_for(capability, (*ARCHITECTURES, "sm_90a")) == image


def assembled_for_all(name: str) -> None:
    text = compile_last_resort(KERNELS[name])
    assert f"\n.version {PTX_VERSION}\n" in text
    for arch in ("sm_80", "sm_120"):
        assert compiler.assemble(text, arch, name).startswith(b"\x7fELF")


@pytest.mark.parametrize("name", ["doorbell_wait_kernel", "l2_norm_kernel", "mla_decode_split_kernel"])
def test_the_last_resort_asks_no_more_than_its_version(name: str) -> None:
    devices.all_kernels()
    assembled_for_all(name)


@pytest.mark.slow  # every kernel through the front end once more
def test_the_last_resort_of_every_kernel() -> None:
    for each in devices.all_kernels():
        if each.function.__module__.startswith("whalez."):
            assembled_for_all(each.name)


def test_the_assembler_refuses_an_instruction_newer_than_the_version() -> None:
    """What makes the tests above say something."""
    text = compile_last_resort(l2_norm_kernel).replace("\tret;", "\tfence.proxy.alias;\n\tret;", 1)
    assert compiler.assemble(text.replace(".version 7.0", ".version 9.0"), "sm_80", "newer")
    with pytest.raises(FabricError, match=r"newer for sm_80"):
        compiler.assemble(text, "sm_80", "newer")
    with pytest.raises(FabricError, match=r"older for sm_80"):
        compiler.assemble(text.replace(".version 7.0", ".version 6.5"), "sm_80", "older")


def test_a_missing_image_falls_back_to_ptx() -> None:
    assert image_for((9, 0), ("sm_80",)) == PTX_LAST_RESORT  # no cubin crosses a major version


def test_images_of_a_kernel() -> None:
    assert compiler.architectures_of(of(doubling_body)) == ARCHITECTURES
    assert compiler.architectures_of(Kernel("k", doubling_body, (), arch="sm_90")) == ("sm_90", "sm_100")
    assert compiler.architectures_of(Kernel("k", doubling_body, (), arch="sm_90a")) == ("sm_90a",)


# ---- compiling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "sm_90a"])
def test_compiles_without_a_driver(arch: str) -> None:
    """It calls a device function, for which numba asks a device that is not there."""
    before = dispatcher.get_current_device
    text = compile_ptx(of(doubling_body), arch)
    assert f".target {arch}" in text
    assert ".maxntid 32" in text
    assert "call" not in text.replace("Callable", "")
    assert compiler.entry_name(of(doubling_body), text)
    cubin = compile_cubin(of(doubling_body), arch)
    assert cubin.startswith(b"\x7fELF") and cubin[compiler._ELF_SM] == int(arch.rstrip("a")[3:])
    assert dispatcher.get_current_device is before


def test_device_functions_come_in_the_order_in_which_they_are_met() -> None:
    """Registers follow from it, and a set of them is ordered by their addresses: another one in every process."""

    maker = codegen.JITCUDACodegen("")
    with compiler._without_driver((9, 0)):
        called = [maker.create_library(f"function {i}") for i in range(20)]
        first, second = maker.create_library("a kernel"), maker.create_library("another")
    for library, order in ((first, called), (second, called[::-1])):  # one set has one order of them
        for each in order:
            library.add_linking_library(each)
        assert list(library._linking_libraries) == order


def test_the_linker_is_quoted() -> None:
    with pytest.raises(FabricError, match=r"broken for sm_90.*ptxas"):
        compiler.assemble(compile_ptx(of(doubling_body), "sm_90").replace("add.f32", "odd.f32"), "sm_90", "broken")


def test_one_name_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whalez.ops.device.kernel.KERNELS", dict(KERNELS))
    with pytest.raises(AssertionError, match="twice"):
        kernel("rms_norm_kernel", f32p, i64)(doubling_body)


# ---- what is in an image --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_spills_are_seen(arch: str) -> None:
    """By the annotations of the disassembly; the assembler's own words are the judge."""
    from cuda.bindings import nvjitlink

    crowded = of(crowded_body, 1024)
    usage = compiler.resource_usage(compile_cubin(crowded, arch))
    text = compile_ptx(crowded, arch).encode()
    handle = nvjitlink.create(2, [f"-arch={arch}", "-verbose"])
    nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text, len(text), "crowded")
    nvjitlink.complete(handle)
    log = bytearray(nvjitlink.get_info_log_size(handle))
    nvjitlink.get_info_log(handle, log)
    nvjitlink.destroy(handle)
    said = log.decode()
    assert usage.registers == 64
    assert usage.stack_bytes > 0 and f"{usage.stack_bytes} bytes stack frame" in said
    stores, loads = (int(said.split(f" bytes spill {way}")[0].split()[-1]) for way in ("stores", "loads"))
    assert usage.spill_bytes == stores + loads > 0


def test_arrays_on_the_stack_are_seen() -> None:
    usage = compiler.resource_usage(compile_cubin(of(indexed_body), "sm_90"))
    assert usage.stack_bytes == 200
    assert usage.spill_bytes == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shared_memory_is_the_kernels_own(arch: str) -> None:
    """The tools add what the system reserves from sm_90 on."""
    usage = compiler.resource_usage(compile_cubin(of(shared_body), arch))
    assert usage == Usage(usage.registers, shared_bytes=400, stack_bytes=0, spill_bytes=0)
    assert compiler.resource_usage(compile_cubin(of(doubling_body), arch)).shared_bytes == 0


@pytest.mark.parametrize("order", [1, -1])
def test_a_helper_of_the_arithmetic_is_not_the_kernel(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    """A division brings a function of its own along, which has a line of its own, with zeros."""
    cubin = compile_cubin(rms_norm_kernel, "sm_80")
    lines = compiler._inspect(cubin, "cuobjdump", "--dump-resource-usage").splitlines()
    assert sum("REG:" in line for line in lines) > 1
    disassembled = compiler.disassembly(cubin)
    monkeypatch.setattr(compiler, "disassembly", lambda cubin: disassembled)
    monkeypatch.setattr(compiler, "_inspect", lambda *_: "\n".join(lines[::order]))
    assert compiler.resource_usage(cubin).registers >= 24
    assert compiler.resource_usage(cubin).shared_bytes == 128


def test_opcodes_are_counted() -> None:
    counts = compiler.sass_opcodes(compile_cubin(of(doubling_body), "sm_90"))
    assert counts["LDG"] == counts["STG"] == counts["FADD"] == 1
    assert counts["EXIT"] >= 1
    assert compiler.tensor_core_instructions(compile_cubin(of(doubling_body), "sm_90")) == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensor_core_instructions(arch: str) -> None:
    assert compiler.tensor_core_instructions(compile_cubin(of(product_body), arch)) == 1


@pytest.mark.parametrize(
    ("opcode", "count"),
    [("HMMA", 3), ("IMMA", 3), ("HGMMA", 3), ("UTCHMMA", 3), ("UTCQMMA", 3), ("FFMA", 0), ("IMAD", 0), ("UTMALDG", 0)],
)
def test_names_of_tensor_core_instructions(monkeypatch: pytest.MonkeyPatch, opcode: str, count: int) -> None:
    line = f"        /*00a0*/              @!P0 {opcode}.16816.F32 R4, R4, R8, RZ ;\n"
    monkeypatch.setattr(compiler, "disassembly", lambda cubin: 3 * line)
    assert compiler.tensor_core_instructions(b"") == count


# ---- the cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WHALEZ_CACHE", str(tmp_path))
    return tmp_path / "images"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were compiled, not found."""
    names: list[str] = []
    original = compile_ptx

    def count(kernel: Kernel, arch: str) -> str:
        names.append(f"{kernel.name} {arch}")
        return original(kernel, arch)

    monkeypatch.setattr(compiler, "compile_ptx", count)
    return names


def test_the_second_time_it_is_found(store: Path, compiled: list[str]) -> None:
    first = compile_cubin(l2_norm_kernel, "sm_90")
    assert compile_cubin(l2_norm_kernel, "sm_90") == first
    assert compiled == ["l2_norm_kernel sm_90"]
    assert [path.name.split("-")[:2] for path in store.iterdir()] == [["l2_norm_kernel", "sm_90"]]
    compile_cubin(l2_norm_kernel, "sm_80")
    assert len(compiled) == 2


def test_what_is_not_registered_is_not_kept(store: Path, compiled: list[str]) -> None:
    mutant = Kernel(l2_norm_kernel.name, l2_norm_kernel.function, l2_norm_kernel.signature, l2_norm_kernel.block)
    compile_cubin(mutant, "sm_90")
    compile_cubin(mutant, "sm_90")
    assert len(compiled) == 2
    assert not store.exists()


def test_what_is_not_of_whalez_is_not_kept(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "doubling_body", of(doubling_body))
    assert compiler._cached_at(KERNELS["doubling_body"], "sm_90") is None


@pytest.mark.parametrize("left", [b"", b"half of it"])
def test_a_broken_file_is_made_again(store: Path, compiled: list[str], left: bytes) -> None:
    compile_cubin(l2_norm_kernel, "sm_90")
    (path,) = store.iterdir()
    path.write_bytes(left)
    again = compile_cubin(l2_norm_kernel, "sm_90")
    assert again.startswith(b"\x7fELF")
    assert path.read_bytes() == again
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_made_costs_only_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHALEZ_CACHE", str(tmp_path / "file"))
    assert compile_cubin(l2_norm_kernel, "sm_90").startswith(b"\x7fELF")


@pytest.mark.parametrize("what", ["source", "device source", "compiler", "block", "closure"])
def test_what_decides_the_code_decides_the_name(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    monkeypatch.setattr("whalez.ops.device.kernel.KERNELS", KERNELS)
    subject = l2_norm_kernel
    before = compiler._cached_at(subject, "sm_90")
    if what in ("source", "device source"):
        changed = "norm/cuda.py" if what == "source" else "device/ptx.py"
        sources = compiler._sources_of(frozenset({subject.function.__module__}))
        (path,) = (path for path in sources if path.as_posix().endswith(changed))
        edited = tmp_path / "edited.py"
        edited.write_text(path.read_text() + "\n")
        swapped = tuple(edited if each == path else each for each in sources)
        monkeypatch.setattr(compiler, "_sources_of", lambda modules: swapped)
    elif what == "compiler":
        monkeypatch.setattr(compiler, "compiler_versions", lambda: {"numba-cuda": "0"})
    else:
        if what == "block":
            changed_kernel = Kernel(subject.name, subject.function, subject.signature, (64, 1, 1))
        else:
            namespace = dict(subject.function.__globals__)
            source = textwrap.dedent(
                """
                def make(rows):
                    def body(g_x, x_stride, heads, quads, width):
                        g_x[0] = rows
                    return body
                """
            )
            exec(source, namespace)
            one, two = (
                Kernel(subject.name, namespace["make"](rows), subject.signature, subject.block) for rows in (1, 2)
            )
            monkeypatch.setitem(KERNELS, subject.name, one)
            before = compiler._cached_at(one, "sm_90")
            changed_kernel = two
        monkeypatch.setitem(KERNELS, subject.name, changed_kernel)
        subject = changed_kernel
    after = compiler._cached_at(subject, "sm_90")
    assert before is not None and after is not None
    assert before != after


def test_all_that_is_imported_decides(store: Path) -> None:
    sources = compiler._sources_of(frozenset({"whalez.ops.norm.cuda"}))
    names = {path.relative_to(ROOT).as_posix() for path in sources}
    assert {"whalez/ops/norm/cuda.py", "whalez/ops/device/ptx.py", "whalez/ops/device/rowwise.py"} <= names
    assert all(name.startswith("whalez/") for name in names)
    by_name = compiler._sources_of(frozenset({"whalez.testing.simt"}))  # `from package import module`
    assert any(path.as_posix().endswith("simt/ptx.py") for path in by_name)


def test_old_images_go(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_CACHED_MAX", 4)
    for i in range(5):
        compiler._keep(store / f"{i}.cubin", b"\x7fELF")
        os.utime(store / f"{i}.cubin", (i, i))
    compiler._keep(store / "5.cubin", b"\x7fELF")
    assert sorted(path.name for path in store.iterdir()) == ["2.cubin", "3.cubin", "4.cubin", "5.cubin"]


def test_processes_share_it(store: Path) -> None:
    program = """
import sys
from whalez.ops.device.compile import compile_cubin
from whalez.ops.norm.cuda import l2_norm_kernel
assert compile_cubin(l2_norm_kernel, "sm_90").startswith(b"\\x7fELF")
"""
    processes = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert [path.suffix for path in store.iterdir()] == [".cubin"]  # one image, and nothing half-written


# ---- who needs CUDA packages ----------------------------------------------------------------------------------------


def test_cpu_paths_import_no_cuda_package() -> None:
    """With the packages made unimportable, everything but the CUDA modules themselves imports."""
    program = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cuda", "nvidia", "numba_cuda") or name.startswith("numba.cuda"):
            raise ImportError(f"{name} is not installed")

for name in [name for name in sys.modules if name.split(".")[0] in ("cuda", "nvidia", "numba_cuda")]:
    del sys.modules[name]
sys.meta_path.insert(0, Refuse())
import whalez
missing = set()
for module in pkgutil.walk_packages(whalez.__path__, "whalez."):
    if module.name.startswith("whalez.testing.simt"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        assert "is not installed" in str(error), (module.name, error)
        missing.add(module.name)
print(" ".join(sorted(missing)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT, check=True
    )
    missing = done.stdout.split()
    assert "whalez.ops.norm.cuda" in missing and "whalez.ops.device.compile" in missing
    allowed = ("whalez.ops.device.", "whalez.fabric.cuda.", "whalez.testing.fake_driver")
    assert [name for name in missing if not name.startswith(allowed) and not name.endswith(".cuda")] == []
