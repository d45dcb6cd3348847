"""GFLOP/s of the MLA and MoE ops on one core: `python bench/ops_mla.py [--quick]`"""

# ruff: noqa: E402 - the thread counts have to be set before numpy loads its BLAS
from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np

from whalez.ops.mla import mla_attend, mla_decode, mla_expand
from whalez.ops.moe import MoeScratch, combine_sum, owner_compute, route

RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def report(name: str, shape: str, flop: float, byte: float, run: Callable[[], None]) -> None:
    run()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    best = min(times)
    print(f"{name:14} {shape:44} {best * 1e3:9.2f} ms {flop / best / 1e9:8.1f} GFLOP/s {byte / best / 1e9:7.1f} GB/s")


def attend(queries: int, keys: int, heads: int, causal: bool) -> None:
    nope, shared, value, rank = 128, 64, 128, 512
    q, latent, kv = draw(queries, heads, nope + shared), draw(keys, rank + shared), draw(keys, heads, nope + value)
    out, lse = np.empty((queries, heads, value), np.float32), np.empty((queries, heads), np.float32)
    pairs = queries * keys - (queries * (queries - 1) // 2 if causal else 0)
    flop = 2.0 * pairs * heads * (nope + shared + value)
    scale = (nope + shared) ** -0.5

    def run() -> None:
        mla_attend(q, kv, latent[:, rank:], keys - queries, causal, scale, out, lse)

    report("mla_attend", f"T={queries} S={keys} H={heads} 128+64/128{' causal' if causal else ''}", flop, 0, run)


def expand(keys: int, heads: int, rank: int) -> None:
    latent, w = draw(keys, rank + 64), draw(heads * 256, rank)
    kv = np.empty((keys, heads, 256), np.float32)
    flop = 2.0 * keys * heads * 256 * rank
    report("mla_expand", f"S={keys} H={heads} R={rank}", flop, 0, lambda: mla_expand(latent, w, kv))


def decode(requests: int, length: int, heads: int, rank: int) -> None:
    pages_each = -(-length // 64)
    pool = draw(requests * pages_each, 64, rank + 64)
    pages = RNG.permutation(requests * pages_each).astype(np.int32).reshape(requests, pages_each)
    q, w = draw(requests, heads, 192), draw(heads * 256, rank)
    out, lengths = np.empty((requests, heads, 128), np.float32), np.full(requests, length)
    flop = 2.0 * requests * heads * (length * (2 * rank + 64) + 256 * rank)
    byte = 4.0 * (requests * length * (rank + 64) + w.size)
    run = lambda: mla_decode(q, w, pool, pages, lengths, 192**-0.5, out)  # noqa: E731
    report("mla_decode", f"B={requests} S={length} H={heads} R={rank}", flop, byte, run)


def experts(world: int, rows: int, experts_count: int, top_k: int, hidden: int, inner: int) -> None:
    """One owner of a world that is routed at random: the plan, its experts' GEMMs and the sums."""
    local = experts_count // world
    x, ids = draw(world, rows, hidden), np.empty((world, rows, top_k), np.int32)
    weights = np.empty((world, rows, top_k), np.float32)
    logits, bias = draw(world * rows, experts_count), np.zeros(experts_count, np.float32)
    flat = ids.reshape(-1, top_k), weights.reshape(-1, top_k)

    def choose() -> None:
        route(logits, bias, top_k, True, 1.0, 1, 1, *flat)

    report("route", f"T={world * rows} E={experts_count} k={top_k}", 0, 0, choose)

    def address(array: np.ndarray) -> np.ndarray:
        return np.array([part.ctypes.data for part in array], np.uint64)

    w13, w2 = draw(local, 2 * inner, hidden), draw(local, hidden, inner)
    partial, offsets = np.empty((world * rows, hidden), np.float32), np.empty(world + 1, np.int64)
    scratch = MoeScratch(world * rows, 1024, hidden, inner, top_k=top_k, local_experts=local, world=world)
    arguments = address(ids), address(weights), address(x), np.full(world, rows), 0, w13, w2, partial, offsets, scratch
    flop = 6.0 * np.count_nonzero(ids < local) * hidden * inner
    shape = f"W={world} rows={rows} E={experts_count}/{local} k={top_k} D={hidden} I={inner}"
    report("owner_compute", shape, flop, 0, lambda: owner_compute(*arguments))

    # Every owner's region stands in for the one that was computed: the sum reads the same amount from each.
    bounds, out = np.arange(world + 1) * local, np.zeros((rows, hidden), np.float32)
    made = np.array([(ids[0] // local == w).any(axis=1).sum() for w in range(world)])
    source = np.full(world, partial.ctypes.data, np.uint64)
    byte = 4.0 * hidden * (made.sum() + 2 * rows)
    report("combine_sum", shape, 0, byte, lambda: combine_sum(ids[0], bounds, source, out, made))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes only")
    quick = parser.parse_args().quick
    attend(512 if quick else 2048, 2048 if quick else 8192, 8, False)
    attend(512 if quick else 2048, 2048 if quick else 8192, 8, True)
    attend(64, 2048, 8, True)
    expand(2048 if quick else 8192, 8, 256)
    decode(1, 16384, 8, 256)
    decode(8, 4096, 8, 256)
    experts(2, 256 if quick else 2048, 16, 4, 1024, 512)
    experts(4, 1, 16, 4, 1024, 512)


if __name__ == "__main__":
    main()
