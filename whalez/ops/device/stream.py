"""What an op does to a device: put work on a stream. The same calls on a GPU, in the CPU harness and under a fake."""

from __future__ import annotations

from typing import Protocol

from whalez.ops.device.kernel import Dim, Kernel


class Stream(Protocol):
    """A queue of one device: entries run in order, addresses are plain integers.

    A call returns at once; but it waits, and may raise what ends that wait, while more is queued than a device takes.
    """

    def launch(self, kernel: Kernel, grid: Dim, block: Dim, shared_bytes: int, *arguments: int | float) -> None:
        """Queue a kernel; arguments are typed by `kernel.signature`, pointers are addresses."""
        ...

    def wait_value(self, *pairs: tuple[int, int]) -> None:
        """Queue a wait until every u64 at `address` has reached `value`: (int64)(seen - value) >= 0, in one batch."""
        ...

    def write_value(self, address: int, value: int) -> None:
        """Queue a store of a u64 to memory of this device."""
        ...

    def copy(self, dst: int, src: int, nbytes: int) -> None: ...

    def zero(self, dst: int, nbytes: int) -> None: ...
