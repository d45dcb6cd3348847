"""Launches: arguments packed as the kernel takes them, grids run together, failures told with their lines."""

from __future__ import annotations

import ctypes as C
import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba.cuda import types as numba_types
from numba.cuda.typing.typeof import Purpose, typeof

from whalez.testing.simt import emulation, memory
from whalez.testing.simt.compile import jit, places_of
from whalez.testing.simt.errors import SimtError
from whalez.testing.simt.machine import FEED_FUNCTION, CLaunch, last_error, rt

#: Thread orders a kernel test runs under: `forward` lets asynchronous copies land late, `reverse` at once.
ORDERS = ("forward", "reverse", "seed1", "seed2", "seed3")
BLOCK_THREADS_MAX, SHARED_STATIC_MAX, SHARED_MAX = 1024, 48 << 10, 227 << 10
SPIN_PASSES_MAX = 1_000_000
CPU_S_MAX = 60.0
types: Any = numba_types  # their attributes are made at run time
_MASK = (1 << 64) - 1
_one_at_a_time = threading.Lock()


def orders() -> Any:
    """`@simt.orders()` runs a test under each thread order, handed in as `order`."""
    import pytest

    return pytest.mark.parametrize("order", ORDERS)


def _order(order: str, seed: int) -> tuple[int, int]:
    if m := re.fullmatch(r"seed(\d+)", order):
        return 2, int(m[1])
    return {"forward": 0, "reverse": 1, "random": 2}[order], seed


def dim3(d: int | Sequence[int]) -> tuple[int, int, int]:
    d = (int(d),) if isinstance(d, int | np.integer) else tuple(int(x) for x in d)
    x, y, z = (*d, 1, 1, 1)[:3]
    return x, y, z


def pack(t: Any, value: Any, words: list[int], kept: list[Any]) -> None:
    """Append the 64-bit words by which a kernel takes this argument."""
    if isinstance(t, types.Array):
        kept.append(value)
        words += [0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape]
        words += [s & _MASK for s in value.strides]
    elif isinstance(t, types.CPointer):
        if isinstance(value, np.ndarray):
            kept.append(value)
            value = value.ctypes.data
        if not 0 <= int(value) <= _MASK:
            raise TypeError(f"{value!r} is no address")
        words.append(int(value))
    elif isinstance(t, types.UniTuple | types.Tuple):
        for part, x in zip(t, value, strict=True):
            pack(part, x, words, kept)
    elif isinstance(t, types.Float):
        n = t.bitwidth // 8
        words.append(int(np.array([value], f"f{n}").view(f"u{n}")[0]))
    elif isinstance(t, types.Boolean):
        words.append(int(bool(value)))
    elif isinstance(t, types.Integer):
        number = int(value)
        if number != value or not t.minval <= number <= t.maxval:
            raise TypeError(f"{value!r} is no {t}")
        words.append(number & _MASK)
    else:
        raise TypeError(f"arguments of type {t} are not handled")


class Launch:
    """A grid of one kernel with its arguments; `kernel` is anything `jit` takes."""

    def __init__(
        self,
        kernel: Any,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        arguments: Sequence[Any],
        shared: int = 0,
    ) -> None:
        kernel = jit(kernel)
        self.name: str = kernel.name
        self.grid, self.block, self.shared = dim3(grid), dim3(block), int(shared)
        signature = kernel.signature or tuple(typeof(a, Purpose.argument) for a in arguments)
        if len(signature) != len(arguments):
            raise TypeError(f"{self.name}: {len(arguments)} arguments for {len(signature)} parameters")
        self.compiled = kernel.compile(signature)
        static = self.compiled.smem_static
        if (
            math.prod(self.block) > BLOCK_THREADS_MAX
            or static > SHARED_STATIC_MAX
            or static + self.shared > SHARED_MAX
            or min(*self.grid, *self.block) < 1
        ):
            raise SimtError(
                f"{self.name}: launch exceeds the limits of a GPU: grid {self.grid}, block {self.block}, "
                f"shared {static}+{self.shared} bytes"
            )
        if kernel.block_max is not None and math.prod(self.block) > math.prod(kernel.block_max):
            raise SimtError(f"{self.name}: block {self.block} is larger than the kernel declares, {kernel.block_max}")
        if kernel.shared_max is not None and self.shared > kernel.shared_max:
            raise SimtError(f"{self.name}: {self.shared} shared bytes are more than it declares, {kernel.shared_max}")
        words: list[int] = []
        self._kept: list[Any] = []
        for i, (t, a) in enumerate(zip(signature, arguments, strict=True)):
            try:
                pack(t, a, words, self._kept)
            except TypeError as e:
                raise TypeError(f"{self.name}, argument {i}: {e}") from None
        if len(words) != len(self.compiled.words):
            raise TypeError(f"{self.name}: {len(words)} words packed, the kernel takes {self.compiled.words}")
        self._argv = (C.c_uint64 * max(1, len(words)))(*words)

    def __str__(self) -> str:
        return f"{self.name} grid {self.grid} block {self.block}"

    def fill(self, c: CLaunch) -> None:
        c.entry, c.argv = self.compiled.entry, C.addressof(self._argv)
        c.grid[:], c.block[:] = self.grid, self.block
        c.smem_static, c.smem_dynamic = self.compiled.smem_static, self.shared


def run(
    launches: Sequence[Launch],
    *,
    order: str = "forward",
    seed: int = 1,
    resident: int = 1,
    spin_limit: int = SPIN_PASSES_MAX,
    cpu_s: float = CPU_S_MAX,
) -> None:
    """Run grids together until all have ended; launch i is rank i.

    Args:
        order:      of threads, warps and blocks: forward, reverse, seedN, or random with `seed`
        resident:   blocks of each grid that are live at once; 1 is strictly one after another, and blocks that wait for
                    each other need the size of the grid
        spin_limit: passes of the scheduler in which threads do nothing but yield
        cpu_s:      CPU seconds of the process, against loops that do not even yield
    Raises: SimtError
    """
    slots = (CLaunch * len(launches))()
    for i, (c, launch) in enumerate(zip(slots, launches, strict=True)):
        launch.fill(c)
        c.resident, c.rank = resident, i
    start(slots, order, seed, spin_limit, cpu_s, None)


def start(slots: Any, order: str, seed: int, spin_limit: int, cpu_s: float, feed: Callable[[int], int] | None) -> None:
    """Run the machine over slots, which `feed` refills where given (simt_rt.c says how)."""
    with _one_at_a_time:
        emulation.pending.clear()
        for reset in emulation.on_run:
            reset()
        number, seed = _order(order, seed)
        callback = FEED_FUNCTION(feed) if feed else FEED_FUNCTION()
        rc = rt.simt_run(slots, len(slots), number, seed, spin_limit, cpu_s, callback)
        if emulation.pending:
            first = emulation.pending[0]
            if isinstance(first, SimtError):
                raise first
            raise SimtError("an emulation failed") from first
        if rc:
            raise SimtError(explain(last_error()))
        memory.check_padding()


def explain(message: str) -> str:
    """The machine's message with names for its numbers of statements and program counters."""
    message = re.sub(r"op#(\d+)", lambda m: emulation.op_name(int(m[1])), message)
    pcs = re.findall(r"pc#(0x[0-9a-f]+)", message)
    places = places_of([int(pc, 16) for pc in pcs])
    return re.sub(r"pc#(0x[0-9a-f]+)", lambda m: f"({places[int(m[1], 16)]})", message)
