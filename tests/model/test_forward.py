"""The fast forward pass against the float64 reference: every position, all chunkings, windows and decode."""

from pathlib import Path

import numpy as np
import pytest

from helpers.equal import assert_choices_close, relative_error
from helpers.solo import solo
from whalez.model.checkpoint import read_tensors
from whalez.model.config import KimiLinearConfig
from whalez.model.naive import NaiveResult, naive_forward
from whalez.model.scratch import TILE_ROWS

TOKENS = np.random.default_rng(7).integers(0, 256, 333)


@pytest.fixture(scope="module")
def free(tiny_dir: Path) -> NaiveResult:
    """The reference with its own choice of experts; it is causal, so that a shorter prompt has the first rows."""
    return naive_forward(KimiLinearConfig.from_dir(tiny_dir), read_tensors(tiny_dir), TOKENS)


@pytest.mark.parametrize("chunk", [333, 64, 100, 1])
def test_every_position_agrees_with_the_reference(tiny_dir: Path, free: NaiveResult, chunk: int) -> None:
    count = 40 if chunk == 1 else len(TOKENS)
    with solo(tiny_dir, chunk_tokens=max(chunk, 64)) as one:
        logits = one.prefill(TOKENS[:count], chunk)
    choices, margins = [each[:count] for each in free.choices], [each[:count] for each in free.margins]
    assert_choices_close(one.choices, choices, margins)
    reference = free.logits[:count]
    if not all(map(np.array_equal, one.choices, choices)):
        config, tensors = KimiLinearConfig.from_dir(tiny_dir), read_tensors(tiny_dir)
        reference = naive_forward(config, tensors, TOKENS[:count], one.choices).logits
    assert relative_error(logits, reference).max() <= 1e-4


def test_decode_continues_the_prefill(tiny_dir: Path) -> None:
    with solo(tiny_dir) as one:
        one.prefill(TOKENS[:200], 200)
        decoded = [one.decode(int(token), 200 + i) for i, token in enumerate(TOKENS[200:210])]
        whole = one.prefill(TOKENS[:210], 210)
    assert relative_error(np.stack(decoded), whole[200:]).max() <= 1e-4


def test_a_context_that_fits_one_window_gives_the_same_bits(tiny_dir: Path) -> None:
    with solo(tiny_dir, attention_window=333) as one:
        exact = one.prefill(TOKENS, 333)
    with solo(tiny_dir, attention_window=16896) as one:
        assert (one.prefill(TOKENS, 333) == exact).all()


@pytest.mark.parametrize("window", [332, 128, 50])
def test_windows_fold_to_the_same_logits(tiny_dir: Path, window: int) -> None:
    with solo(tiny_dir) as one:
        exact = one.prefill(TOKENS, 333)
    with solo(tiny_dir, attention_window=window) as one:
        assert relative_error(one.prefill(TOKENS, 100), exact).max() <= 1e-4


def test_a_span_of_several_tiles_equals_spans_of_one(tiny_dir: Path) -> None:
    tokens = np.random.default_rng(8).integers(0, 256, 2 * TILE_ROWS + 77)
    with solo(tiny_dir, chunk_tokens=len(tokens)) as one:
        exact = one.prefill(tokens, 500)
        states, tails = one.cache.states[:, 0].copy(), one.cache.tails[:, 0].copy()
        assert relative_error(one.prefill(tokens, len(tokens)), exact).max() <= 1e-4
        assert relative_error(one.cache.states[:, 0], states).max() <= 1e-4
        assert relative_error(one.cache.tails[:, 0], tails).max() <= 1e-4
