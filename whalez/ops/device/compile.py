"""From a Kernel to machine code, without a GPU and without a driver; and which image a device takes.

Images: sm_80, sm_90, sm_100 (a cubin runs on its major version at that or a higher minor one), sm_90a for kernels that
exist there only, and PTX for compute_80 as the last resort of chips that have no image.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import types as python_types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numba import cuda
from numba.cuda import dispatcher

from whalez.errors import CapabilityMissing, FabricError
from whalez.ops.device.kernel import Kernel

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
PTX_LAST_RESORT = "compute_80"
_CC: dict[str, tuple[Any, ...]] = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_90a": (9, 0, "a"), "sm_100": (10, 0)}


@contextlib.contextmanager
def _without_driver(cc: tuple[Any, ...]) -> Iterator[None]:
    """numba asks the current device for its capability when a kernel calls a device function; here is the answer."""
    saved = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: python_types.SimpleNamespace(compute_capability=cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = saved


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


def compile_cubin(kernel: Kernel, arch: str) -> bytes:
    """Machine code of a kernel for `arch`. Raises: FabricError with the linker's words."""
    from cuda.bindings import nvjitlink

    text = compile_ptx(kernel, arch).encode()
    handle = nvjitlink.create(1, [f"-arch={arch}"])
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text, len(text), kernel.name)
        nvjitlink.complete(handle)
        image = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, image)
        return bytes(image)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise FabricError(f"{kernel.name} for {arch}: {error}: {log.decode(errors='replace')}") from None
    finally:
        nvjitlink.destroy(handle)


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


@dataclass(frozen=True)
class Usage:
    """What a kernel takes of a multiprocessor."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def _tool(name: str) -> str:
    """A CUDA binary tool from its wheel or from the PATH. Raises: CapabilityMissing."""
    import nvidia

    for root in nvidia.__path__:
        found = sorted(Path(root).rglob(f"bin/{name}"))
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


def resource_usage(cubin: bytes) -> Usage:
    """Registers, static shared memory and stack of the one kernel in a cubin, and what it spills."""
    text = _inspect(cubin, "cuobjdump", "--dump-resource-usage")
    found = dict(re.findall(r"(REG|SHARED|STACK|LOCAL):(\d+)", text))
    return Usage(
        registers=int(found["REG"]),
        shared_bytes=int(found["SHARED"]),
        stack_bytes=int(found["STACK"]),
        spill_bytes=int(found["LOCAL"]),
    )


def sass_opcodes(cubin: bytes) -> dict[str, int]:
    """Opcode -> count, modifiers cut off, of all code in a cubin."""
    counts: dict[str, int] = {}
    for opcode in re.findall(
        r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)", _inspect(cubin, "nvdisasm", "-c")
    ):
        counts[opcode] = counts.get(opcode, 0) + 1
    return counts
