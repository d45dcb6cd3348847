"""A kernel: a plain Python function, the types it is compiled for, and what it claims of the chip.

Rule 1: a kernel is compiled ahead, with an explicit signature, for named architectures; nothing is compiled in a loop.
Rule 2: every kernel is in `KERNELS`, so that CI compiles it for every chip and reports what it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Dim = int | tuple[int, int, int]


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    name:         unique; `<op>_<what>_kernel`
    function:     plain Python, no return value
    signature:    numba types of the arguments
    block:        most threads of a block, (x, y, z); bounds the registers the compiler may use
    tensor_cores: whether its SASS must have tensor-core instructions
    arch:         the oldest architecture it runs on; "sm_90a" for what exists there only
    shared_bytes: most dynamic shared memory it is launched with
    """

    name: str
    function: Callable[..., Any]
    signature: tuple[Any, ...]
    block: tuple[int, int, int] = (1024, 1, 1)
    tensor_cores: bool = False
    arch: str = "sm_80"
    shared_bytes: int = 0


KERNELS: dict[str, Kernel] = {}


def kernel(
    name: str,
    *signature: Any,
    block: Dim = 1024,
    tensor_cores: bool = False,
    arch: str = "sm_80",
    shared_bytes: int = 0,
) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator: register a plain function as a kernel; the name it was defined under becomes the Kernel."""

    def register(function: Callable[..., Any]) -> Kernel:
        assert name not in KERNELS, f"kernel {name} is registered twice"
        threads = (block, 1, 1) if isinstance(block, int) else block
        made = Kernel(name, function, tuple(signature), threads, tensor_cores, arch, shared_bytes)
        KERNELS[name] = made
        return made

    return register
