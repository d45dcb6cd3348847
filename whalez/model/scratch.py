"""Scratch of the forward pass: what each part of a launch takes, and the one block it is taken from.

Rule 1: nothing is allocated while a launch runs; what the largest launch takes is known before the first.
Rule 2: the block is written once when it is made, so that a machine with too little memory says so at start.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import numpy as np

from whalez.model.config import KimiLinearConfig
from whalez.ops.chunks import CHUNK, chunks_count

TILE_ROWS = 1024  # full GEMM speed, and what a tile leaves stays near the core; whole KDA chunks
LINE = 16  # f32 of a cache line; every array starts at one

Shapes = Mapping[str, tuple[int, ...]]


def tiles(rows: int, size: int = TILE_ROWS) -> Iterator[slice]:
    """Slices of at most `size` rows that cover `rows`."""
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))


def size_of(shapes: Shapes) -> int:
    """f32 values that a frame of these shapes takes."""
    return sum(-(-math.prod(shape) // LINE) * LINE for shape in shapes.values())


class Arena:
    """A stack of frames in one block.

    Args:
        size:  f32 values
    """

    def __init__(self, size: int) -> None:
        self._block = np.empty(size + LINE, np.float32)
        self._block.fill(0.0)
        self._next = -(self._block.ctypes.data // 4) % LINE
        self._end = self._next + size
        self.free_least = size  #: fewest values that were ever free

    @contextlib.contextmanager
    def frame(self, shapes: Shapes) -> Iterator[dict[str, np.ndarray]]:
        """C-contiguous f32 arrays of the given shapes, contents undefined, until the frame is left."""
        mark, arrays = self._next, {}
        short = mark + size_of(shapes) - self._end
        assert short <= 0, f"scratch: {short} values short of {', '.join(shapes)}"
        for name, shape in shapes.items():
            arrays[name] = self._block[self._next : self._next + math.prod(shape)].reshape(shape)
            self._next += size_of({name: shape})
        self.free_least = min(self.free_least, self._end - self._next)
        try:
            yield arrays
        finally:
            self._next = mark


class Frames:
    """The shapes of every frame of a launch, by the part that takes it.

    A span frame holds what has to wait for a whole span: what the KDA scan needs once its state has come, queries and
    outputs of MLA. The frames inside hold a tile of rows or a window of context.
    """

    def __init__(self, config: KimiLinearConfig) -> None:
        self.config = config

    def kda_span(self, rows: int) -> Shapes:
        c = self.config
        return {
            "qkv": (rows, 3 * c.kda_inner),
            "g": (rows, c.kda_inner),
            "beta": (rows, c.kda_heads),
            "gate_in": (rows, c.kda_head_dim),  # the narrow half of the output gate
            "p": (rows, c.kda_heads, CHUNK),
            "decay": (chunks_count(rows), c.kda_heads, c.kda_head_dim),
            "tail": (c.conv_width - 1, 3 * c.kda_inner),
            "last": (c.conv_width - 1, 3 * c.kda_inner),
        }

    def kda_in(self, rows: int) -> Shapes:
        c = self.config
        return {
            "normed": (rows, c.hidden_size),
            "projected": (rows, 3 * c.kda_inner),
            "narrow": (rows, 2 * c.kda_head_dim + c.kda_heads),
        }

    def kda_out(self, rows: int) -> Shapes:
        return {"gate": (rows, self.config.kda_inner), "mixed": (rows, self.config.hidden_size)}

    def mla_span(self, rows: int) -> Shapes:
        c = self.config
        return {
            "q": (rows, c.num_attention_heads, c.qk_head_dim),
            "o": (rows, c.num_attention_heads, c.v_head_dim),
            "lse": (rows, c.num_attention_heads),
            "latent": (rows, c.latent_width),
        }

    def mla_part(self, rows: int) -> Shapes:
        c = self.config
        return {"o": (rows, c.num_attention_heads, c.v_head_dim), "lse": (rows, c.num_attention_heads)}

    def mla_window(self, depth: int) -> Shapes:
        c = self.config
        return {
            "latent": (depth, c.latent_width),
            "kv": (depth, c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim),
        }

    def normed(self, rows: int) -> Shapes:
        return {"normed": (rows, self.config.hidden_size)}

    def mixed(self, rows: int) -> Shapes:
        return {"mixed": (rows, self.config.hidden_size)}

    def mlp(self, rows: int, width: int) -> Shapes:
        return {"gate_up": (rows, 2 * width), "act": (rows, width), "mixed": (rows, self.config.hidden_size)}

    def router(self, rows: int) -> Shapes:
        return {"scores": (rows, self.config.num_experts)}

    def size(self, rows: int, window: int) -> int:
        """f32 values that the largest launch takes: `rows` rows, all of one span, in attention windows of `window`."""
        c, tile = self.config, min(rows, TILE_ROWS)
        row = size_of(self.normed(tile))
        kda = size_of(self.kda_span(rows)) + max(size_of(self.kda_in(tile)), size_of(self.kda_out(tile)))
        attend = size_of(self.mla_part(min(rows, window))) + size_of(self.mla_window(window))
        mla = size_of(self.mla_span(rows)) + max(row, attend)
        dense = row + size_of(self.mlp(tile, c.intermediate_size))
        shared = size_of(self.mlp(tile, c.shared_size))
        return max(kda, mla, dense, shared, size_of(self.router(tile)))


def scratch_bytes(config: KimiLinearConfig, rows: int, window: int) -> int:
    """Bytes that Forward makes at start: scratch, and the residual stream of `rows` rows."""
    return 4 * (Frames(config).size(rows, window) + rows * config.hidden_size)
