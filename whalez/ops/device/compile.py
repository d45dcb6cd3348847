"""From a Kernel to machine code, without a GPU and without a driver; which image a device takes; what is in an image.

Images: sm_80, sm_90, sm_100 (a cubin runs on its major version at that or a higher minor one), sm_90a for kernels that
exist there only, and PTX for compute_80 as the last resort of chips that have no image.

Cubins are kept in the cache folder under a hash of all that decides them: the source of this module, of the kernel's
and of every module of whalez that it imports, directly or not; the kernel's own facts and those it closes over; the
versions of the compilers. Any number of processes may fill it at once. A kernel that is not of whalez, or not the one
registered under its name, is compiled every time.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import types as python_types
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numba import cuda
from numba.core.utils import OrderedSet
from numba.cuda import codegen, dispatcher

from whalez.config import cache_dir
from whalez.errors import CapabilityMissing, ConfigError, FabricError
from whalez.ops.device.kernel import KERNELS, Kernel

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
PTX_LAST_RESORT = "compute_80"
PTX_VERSION = "7.0"
"""What the last resort asks of a driver: the first version that knows sm_80, and it has every instruction of ours."""
COMPILERS = ("numba-cuda", "numba", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink")
"""The packages whose version decides what comes out."""

_CC: dict[str, tuple[Any, ...]] = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_90a": (9, 0, "a"), "sm_100": (10, 0)}
_CACHED_MAX = 2048
_compiling = threading.RLock()


def architectures_of(kernel: Kernel) -> tuple[str, ...]:
    """The images a kernel is compiled to."""
    if kernel.arch not in ARCHITECTURES:
        return (kernel.arch,)
    return ARCHITECTURES[ARCHITECTURES.index(kernel.arch) :]


def image_for(capability: tuple[int, int], images: Collection[str] = ARCHITECTURES) -> str:
    """The image that a device of this compute capability takes.

    Raises: CapabilityMissing for a device older than every image.
    """
    major, minor = capability
    if major < 8:
        raise CapabilityMissing(f"a device of compute capability 8.0 or newer, this one has {major}.{minor}")
    if (major, minor) == (9, 0) and "sm_90a" in images:
        return "sm_90a"
    fitting = [name for name in images if name in _CC and name[-1] != "a" and _CC[name][0] == major]
    fitting = [name for name in fitting if _CC[name][1] <= minor]
    return max(fitting, key=lambda name: _CC[name]) if fitting else PTX_LAST_RESORT


# ---- compiling ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _without_driver(cc: tuple[Any, ...]) -> Iterator[None]:
    """numba asks the current device for its capability when a kernel calls a device function; here is the answer.

    And it hands the device functions of a kernel to NVVM in the order of a set, by their addresses. Registers follow
    from that order, so here it is the one in which they were met.
    """

    def make_library(self: Any, *args: Any, **options: Any) -> None:
        make_unordered(self, *args, **options)
        self._linking_libraries = OrderedSet()

    with _compiling:
        current_device, make_unordered = dispatcher.get_current_device, codegen.CUDACodeLibrary.__init__
        dispatcher.get_current_device = lambda: python_types.SimpleNamespace(compute_capability=cc)
        codegen.CUDACodeLibrary.__init__ = make_library
        try:
            yield
        finally:
            dispatcher.get_current_device = current_device
            codegen.CUDACodeLibrary.__init__ = make_unordered


def entry_name(kernel: Kernel, text: str) -> str:
    """The mangled name of the kernel in its PTX."""
    names = re.findall(r"\.visible\s+\.entry\s+([\w$]+)", text)
    assert len(names) == 1, (kernel.name, names)
    return str(names[0])


def compile_ptx(kernel: Kernel, arch: str) -> str:
    """PTX text of a kernel for `arch`."""
    cc = _CC[arch]
    threads = kernel.block[0] * kernel.block[1] * kernel.block[2]
    with _without_driver(cc):
        text, _ = cuda.compile(
            kernel.function,
            kernel.signature,
            device=False,
            abi="numba",
            cc=cc,
            output="ptx",
            launch_bounds=threads,
        )
    return str(text)


def compile_last_resort(kernel: Kernel) -> str:
    """PTX text that the driver of a chip without an image compiles when it is loaded.

    NVVM writes the version of its own toolkit at the top, which only a driver of that toolkit or a newer one takes. The
    text says PTX_VERSION instead: the tests assemble that of every kernel, and the assembler checks each instruction.
    """
    text, count = re.subn(r"^\.version \d+\.\d+$", f".version {PTX_VERSION}", compile_ptx(kernel, "sm_80"), flags=re.M)
    assert count == 1, f"{kernel.name}: {count} lines of .version"
    return text


def compile_cubin(kernel: Kernel, arch: str) -> bytes:
    """Machine code of a kernel for `arch`, from the cache if it is there.

    Raises: FabricError with the linker's words.
    """
    path = _cached_at(kernel, arch)
    if path is not None:
        with contextlib.suppress(OSError):
            image = path.read_bytes()
            if image.startswith(b"\x7fELF"):
                os.utime(path)  # it is in use: the oldest ones go first
                return image
    image = assemble(compile_ptx(kernel, arch), arch, kernel.name)
    if path is not None:
        with contextlib.suppress(OSError):  # a folder that cannot be written costs time, never an image
            _keep(path, image)
    return image


def assemble(text: str, arch: str, name: str) -> bytes:
    """The cubin of a PTX text. Raises: FabricError with the linker's words."""
    from cuda.bindings import nvjitlink

    source = text.encode()
    handle = nvjitlink.create(1, [f"-arch={arch}"])
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, source, len(source), name)
        nvjitlink.complete(handle)
        image = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, image)
        return bytes(image)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        said = log.rstrip(b"\0").decode(errors="replace")
        raise FabricError(f"{name} for {arch}: {error}: {said}") from None
    finally:
        nvjitlink.destroy(handle)


# ---- the cache ------------------------------------------------------------------------------------------------------


def _cached_at(kernel: Kernel, arch: str) -> Path | None:
    """Where the image of a registered kernel is kept; None if it is not to be."""
    function = kernel.function
    if KERNELS.get(kernel.name) is not kernel or not _is_ours(function.__module__):
        return None
    try:
        folder = cache_dir(os.environ) / "images"
    except ConfigError:  # a user without a home
        return None
    modules, values = {function.__module__}, []
    for name, value in sorted(inspect.getclosurevars(function).nonlocals.items()):
        called = getattr(value, "py_func", value)
        if inspect.isfunction(called):
            modules.add(called.__module__)
        else:
            values.append((name, repr(value)))
    python = sys.version_info[:2]
    facts = (arch, kernel.name, str(kernel.signature), kernel.block, values, python, compiler_versions())
    digest = hashlib.sha256(repr(facts).encode())
    for path in (Path(__file__), *_sources_of(frozenset(modules))):
        digest.update(path.read_bytes())
    return folder / f"{kernel.name}-{arch}-{digest.hexdigest()[:32]}.cubin"


def _keep(path: Path, image: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(image)
            file.close()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
    kept = list(path.parent.glob("*.cubin"))
    if len(kept) > _CACHED_MAX:
        for old in sorted(kept, key=lambda each: each.stat().st_mtime)[: _CACHED_MAX // 2]:
            old.unlink(missing_ok=True)


def compiler_versions() -> dict[str, str]:
    """Package -> version; a package that did not come as a wheel has none."""
    found = {}
    for name in COMPILERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "?"
    return found


@functools.cache
def _sources_of(modules: frozenset[str]) -> tuple[Path, ...]:
    """The files of these modules and of all modules of whalez that they import, however far away, sorted."""
    seen: set[Path] = set()
    open_ends = list(modules)
    while open_ends:
        path = _file_of(open_ends.pop())
        if path is None or path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                open_ends += [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                open_ends += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    return tuple(sorted(seen))


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def _file_of(module: str) -> Path | None:
    """Of a module of whalez; None for other names."""
    if _is_ours(module):
        with contextlib.suppress(ModuleNotFoundError):  # what was imported is a name in a module, not a module
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.origin:
                return Path(spec.origin)
    return None


# ---- what is in an image --------------------------------------------------------------------------------------------


SHARED_RESERVED_BYTES = 1024
"""What the system takes of the shared memory of every block; from sm_90 on the tools count it as the kernel's own."""

_ELF_SM = 49  #: the byte of a cubin that has its architecture: 80, 90, 100


@dataclass(frozen=True)
class Usage:
    """What a kernel takes of a multiprocessor."""

    registers: int
    """of each thread"""
    shared_bytes: int
    """static, of each block"""
    stack_bytes: int
    """of each thread: arrays that did not fit into registers, and what was spilled"""
    spill_bytes: int
    """stored to and loaded from the stack because registers ran out: the sum over the instructions that do"""


def _tool(name: str) -> str:
    """A CUDA binary tool from its wheel or from the PATH. Raises: CapabilityMissing."""
    with contextlib.suppress(ModuleNotFoundError):
        import nvidia

        for root in nvidia.__path__:
            found = sorted(Path(root).glob(f"*/bin/{name}"))
            if found:
                return str(found[0])
    path = shutil.which(name)
    if path is None:
        raise CapabilityMissing(f"{name}: pip install nvidia-cuda-{name}")
    return path


def _inspect(cubin: bytes, tool: str, *flags: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_tool(tool), *flags, file.name], capture_output=True, text=True, check=True).stdout


def under_aligned(ptx: str) -> list[str]:
    """Declarations of shared memory that PTX accesses 16 bytes at a time, by name or address, and that promise less.

    Dynamic ones in any case, as tiles lie in them. A cubin does not say it on every chip.
    """
    declared = re.findall(r"^(.*\.shared .*?\.align (\d+) .*);$", ptx, re.MULTILINE)
    is_wide = re.search(r"cp\.async\.\w+\.shared|ldmatrix|(ld|st)\.shared\.v[24]", ptx)
    return [line for line, nbytes in declared if int(nbytes) < 16 and (is_wide or ".extern" in line)]


@functools.lru_cache(maxsize=4)
def disassembly(cubin: bytes) -> str:
    """SASS text of all code in a cubin."""
    return _inspect(cubin, "nvdisasm", "-c")


_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z]\w+)(?P<modifiers>[.\w]*)(?P<rest>.*)$", re.MULTILINE
)


def resource_usage(cubin: bytes) -> Usage:
    """Registers, static shared memory and stack of the one kernel in a cubin, and what it spills."""
    # Helpers of the arithmetic have lines of their own, with zeros: what they take is counted in the kernel's.
    found = {"REG": 0, "SHARED": 0, "STACK": 0}
    for name, count in re.findall(r"(REG|SHARED|STACK):(\d+)", _inspect(cubin, "cuobjdump", "--dump-resource-usage")):
        found[name] = max(found[name], int(count))
    if found["SHARED"] and cubin[_ELF_SM] >= 90:
        found["SHARED"] -= SHARED_RESERVED_BYTES
    spilled = 0
    for instruction in _INSTRUCTION.finditer(disassembly(cubin)):
        if "SpillRefill" in instruction["rest"]:
            width = re.search(r"\.(8|16|64|128)\b|\.[US](8|16)\b", instruction["modifiers"])
            spilled += int(width[1] or width[2]) // 8 if width else 4
    return Usage(found["REG"], found["SHARED"], found["STACK"], spilled)


def sass_opcodes(cubin: bytes) -> Counter[str]:
    """Opcode -> count, modifiers cut off, of all code in a cubin."""
    return Counter(instruction["opcode"] for instruction in _INSTRUCTION.finditer(disassembly(cubin)))


def tensor_core_instructions(cubin: bytes) -> int:
    """How many instructions multiply on tensor cores: HMMA, IMMA, DMMA, HGMMA, QGMMA, OMMA, UTCHMMA and their kin."""
    return sum(count for opcode, count in sass_opcodes(cubin).items() if re.fullmatch(r"(UTC)?[A-Z]{1,2}MMA", opcode))
