"""Scratch is made once, as large as the largest launch and no larger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.solo import solo
from whalez.model.config import KimiLinearConfig
from whalez.model.presets import PRESETS
from whalez.model.scratch import TILE_ROWS, Arena, Frames, scratch_bytes, size_of, tiles


def test_frames_are_stacked_aligned_and_given_back() -> None:
    arena = Arena(64)
    with arena.frame({"a": (3, 5), "b": (2,)}) as outer:
        with arena.frame({"c": (16,)}) as inner:
            arrays = [outer["a"], outer["b"], inner["c"]]
            for i, array in enumerate(arrays):
                assert array.ctypes.data % 64 == 0
                array[:] = i
            assert [float(array.min()) for array in arrays] == [0, 1, 2] == [float(array.max()) for array in arrays]
        with arena.frame({"d": (16,)}) as again:
            assert again["d"].ctypes.data == arrays[2].ctypes.data
    assert arena.free_least == 64 - 48


def test_a_frame_that_does_not_fit_is_an_error_and_takes_nothing() -> None:
    arena = Arena(32)
    with pytest.raises(AssertionError, match="scratch: 16 values short of a"), arena.frame({"a": (33,)}):
        pass
    with arena.frame({"a": (32,)}):
        pass


def test_tiles_cover_the_rows_once() -> None:
    assert [(t.start, t.stop) for t in tiles(10, 4)] == [(0, 4), (4, 8), (8, 10)]
    assert list(tiles(0)) == []


@pytest.mark.parametrize("window", [500, 2000])
def test_the_largest_launch_takes_all_of_it(tiny_dir: Path, window: int) -> None:
    """Too small would fail in the middle of a whale, too large would be memory nobody uses."""
    with solo(tiny_dir, chunk_tokens=TILE_ROWS + 100, attention_window=window) as one:
        rows = one.layout.spec.rows_max
        one.prefill(np.arange(2 * rows) % 256, rows)
        assert one.runner.forward.scratch.free_least == 0


@pytest.mark.parametrize("preset", list(PRESETS))
def test_scratch_of_a_row_is_what_has_to_wait(preset: str) -> None:
    """Beyond the tiles, a row costs its share of a KDA or an MLA span frame, whichever is larger, and its residual."""
    config = KimiLinearConfig.from_json(PRESETS[preset])
    rows, window = 64 * TILE_ROWS, 4 * TILE_ROWS
    growth = scratch_bytes(config, 2 * rows, window) - scratch_bytes(config, rows, window)
    frames = Frames(config)
    span = max(size_of(frames.kda_span(2 * rows)) - size_of(frames.kda_span(rows)), size_of(frames.mla_span(rows)))
    assert growth == 4 * (span + rows * config.hidden_size)
