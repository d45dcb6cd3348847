"""Times the host ops of a KDA layer on one thread and prints a table: `python bench/ops_kda.py [T] [H]`.

Columns: best of several runs in CPU time of this thread (the cores may be shared); bytes touched per call over that
time (element-wise ops), or GEMM flops over it.
The first and the last row are what the same machine does at the same moment on a plain copy and a plain GEMM.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy loads, so it stands before the imports

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from whalez.ops import conv, kda, norm

Array = np.ndarray[Any, Any]
Case = tuple[str, Callable[[], object], Callable[[], object], int, int]
DIM = 128


def best_s(run: Callable[[], object], restore: Callable[[], object], repeats: int = 5) -> float:
    """The shortest of `repeats` timed runs; `restore` puts back what the run overwrites and is not timed."""
    times = []
    for _ in range(repeats):
        restore()
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return min(times)


def cases(rows: int, heads: int) -> Iterator[Case]:
    """Rows of the table: name, what runs, what restores its input, bytes touched, flops of its GEMMs."""
    rng = np.random.default_rng(0)
    inner = heads * DIM
    qkv0 = rng.standard_normal((rows, 3 * inner)).astype(np.float32)
    f0 = rng.standard_normal((rows, heads, DIM)).astype(np.float32)
    qkv, f, out = qkv0.copy(), f0.copy(), np.zeros((rows, heads, DIM), np.float32)
    q, k, v = (qkv[:, i * inner : (i + 1) * inner].reshape(rows, heads, DIM) for i in range(3))
    beta = rng.uniform(0, 1, (rows, heads)).astype(np.float32)
    p = np.empty((rows, heads, kda.CHUNK), np.float32)
    decay = np.empty((kda.chunks_count(rows), heads, DIM), np.float32)
    state, m, d = (np.zeros((heads, DIM, DIM), np.float32) for _ in range(3))
    a_log, bias = np.zeros(heads, np.float32), np.zeros((heads, DIM), np.float32)
    taps, tail = rng.standard_normal((3 * inner, 4)).astype(np.float32), np.zeros((3, 3 * inner), np.float32)
    row_weight, head_weight = np.ones(inner, np.float32), np.ones(DIM, np.float32)
    x = out.reshape(rows, inner)
    slots = np.zeros(1, np.int64)

    def fresh() -> None:
        np.copyto(qkv, qkv0)
        np.copyto(f, f0)
        norm.l2_norm(q)
        norm.l2_norm(k)
        kda.kda_gate(f, a_log, bias)

    def nothing() -> None:
        pass

    def clear() -> None:
        state.fill(0)

    def decode() -> None:
        kda.kda_decode(q[:1], k[:1], v[:1], f[:1], beta[:1], 0.1, state[None], slots, out[:1])

    gemm = decay.shape[0] * heads * 2 * kda.CHUNK * DIM * DIM  # flops of one [64, 128] x [128, 128] in every chunk
    row_bytes = 4 * rows * inner
    yield "copy [T, 3 inner]", lambda: np.copyto(qkv, qkv0), nothing, 6 * row_bytes, 0
    yield "short_conv, in place", lambda: conv.short_conv(qkv, tail, taps, qkv), fresh, 6 * row_bytes, 0
    yield "l2_norm q", lambda: norm.l2_norm(q), fresh, 2 * row_bytes, 0
    yield "kda_gate", lambda: kda.kda_gate(f, a_log, bias), lambda: np.copyto(f, f0), 2 * row_bytes, 0
    yield "rms_norm, in place", lambda: norm.rms_norm(x, row_weight, 1e-5, x), lambda: x.fill(1), 2 * row_bytes, 0
    yield "gated_rms_norm", lambda: norm.gated_rms_norm(out, head_weight, f0, 1e-5), nothing, 3 * row_bytes, 0
    yield "kda_prepare", lambda: kda.kda_prepare(q, k, v, f, beta, DIM**-0.5, p, decay), fresh, 0, 0
    # the following read what kda_prepare left
    yield "kda_scan", lambda: kda.kda_scan(q, k, v, f, p, decay, state, out), clear, 0, gemm * 7 // 2
    yield "kda_package", lambda: kda.kda_package(k, v, f, decay, m, d), nothing, 0, gemm * 4
    yield "kda_package_d", lambda: kda.kda_package_d(k, v, f, decay, d), nothing, 0, gemm * 2
    yield "kda_compose", lambda: kda.kda_compose(m, d, state), clear, 0, 2 * heads * DIM**3
    yield "kda_decode, B=1", decode, clear, 4 * state.nbytes, 0
    left, right, product = (np.ones(shape, np.float32) for shape in ((kda.CHUNK, DIM), (DIM, DIM), (kda.CHUNK, DIM)))
    yield (
        "np.dot 64x128x128 x100",
        lambda: [np.dot(left, right, product) for _ in range(100)],
        nothing,
        0,
        200 * kda.CHUNK * DIM * DIM,
    )


def main(rows: int = 4096, heads: int = 8) -> None:
    kda.warm()
    norm.warm()
    conv.warm()
    table = Table(title=f"T={rows} H={heads} K=V={DIM}, one thread")
    for column in ("op", "ms", "GB/s", "GFLOP/s"):
        table.add_column(column, justify="left" if column == "op" else "right")
    for name, run, restore, touched, flops in cases(rows, heads):
        seconds = best_s(run, restore)
        rate = f"{touched / seconds / 1e9:.1f}" if touched else ""
        table.add_row(name, f"{seconds * 1e3:.3f}", rate, f"{flops / seconds / 1e9:.0f}" if flops else "")
    Console().print(table)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:3]))
