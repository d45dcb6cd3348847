"""Run the compiled numba-cuda kernels of this project on the CPU, in a known order, and tell what they do wrong.

    kernel = simt.jit(lse_merge_kernel)             # a Kernel of ops/device, a plain function, a @cuda.jit dispatcher
    kernel[grid, block, 0, shared_bytes](*arguments, order="reverse")
    simt.run([simt.Launch(...), simt.Launch(...)])  # several grids side by side: ranks
    stream = simt.SimtStream(rank); ...; simt.run_queues([stream, ...])

README.md beside this file says how it works, and what it cannot see.
"""

from whalez.testing.simt.errors import SimtError
from whalez.testing.simt.versions import check_versions

check_versions()

from whalez.testing.simt import ptx as ptx  # noqa: E402  before anything is compiled
from whalez.testing.simt.compile import SimtKernel, jit  # noqa: E402
from whalez.testing.simt.emulation import current, emulate, emulate_ir, emulate_native, read_memory  # noqa: E402
from whalez.testing.simt.launch import ORDERS, Launch, orders, run  # noqa: E402
from whalez.testing.simt.machine import stats  # noqa: E402
from whalez.testing.simt.memory import array, empty, zeros  # noqa: E402
from whalez.testing.simt.queue import SimtStream, run_queues  # noqa: E402

__all__ = [
    "ORDERS",
    "Launch",
    "SimtError",
    "SimtKernel",
    "SimtStream",
    "array",
    "current",
    "empty",
    "emulate",
    "emulate_ir",
    "emulate_native",
    "jit",
    "orders",
    "ptx",
    "read_memory",
    "run",
    "run_queues",
    "stats",
    "zeros",
]
