"""Run the compiled numba-cuda kernels of this project on the CPU, deterministically."""

from whalez.testing.simt import ptx as ptx
from whalez.testing.simt._core import (
    ORDERS,
    Launch,
    SimtError,
    array,
    emulate,
    emulate_ir,
    empty,
    jit,
    orders,
    run,
    stats,
    zeros,
)
from whalez.testing.simt.queue import SimtStream, run_queues

__all__ = [
    "ORDERS",
    "Launch",
    "SimtError",
    "SimtStream",
    "array",
    "emulate",
    "emulate_ir",
    "empty",
    "jit",
    "orders",
    "ptx",
    "run",
    "run_queues",
    "stats",
    "zeros",
]
