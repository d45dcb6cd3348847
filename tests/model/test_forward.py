"""The fast forward pass against the float64 reference: every position, all chunkings, windows and decode."""

from pathlib import Path

import numpy as np
import pytest
from helpers.equal import assert_choices_close, relative_error
from helpers.solo import solo
from whalez.model.checkpoint import read_tensors
from whalez.model.config import KimiLinearConfig
from whalez.model.naive import naive_forward
from whalez.model.presets import make_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `tiny` checkpoint, f32, seed 0."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_checkpoint(folder, "kimi-linear", "tiny", 0, dtype="f32")
    return folder


TOKENS = np.random.default_rng(7).integers(0, 256, 333)


@pytest.mark.parametrize("chunk", [333, 64, 100, 1])
def test_every_position_agrees_with_the_reference(tiny: Path, chunk: int) -> None:
    tokens = TOKENS[:40] if chunk == 1 else TOKENS
    with solo(tiny, chunk_tokens=max(chunk, 64)) as one:
        logits = one.prefill(tokens, chunk)
        config, tensors = KimiLinearConfig.from_dir(tiny), read_tensors(tiny)
        free = naive_forward(config, tensors, tokens)
        assert_choices_close(one.choices, free.choices, free.margins)
        reference = naive_forward(config, tensors, tokens, one.choices)
    assert relative_error(logits, reference.logits).max() <= 1e-4


def test_decode_continues_the_prefill(tiny: Path) -> None:
    with solo(tiny) as one:
        one.prefill(TOKENS[:200], 200)
        decoded = [one.decode(int(token), 200 + i) for i, token in enumerate(TOKENS[200:210])]
        whole = one.prefill(TOKENS[:210], 210)
    assert relative_error(np.stack(decoded), whole[200:]).max() <= 1e-4


def test_a_context_that_fits_one_window_gives_the_same_bits(tiny: Path) -> None:
    with solo(tiny, attention_window=333) as one:
        exact = one.prefill(TOKENS, 333)
    with solo(tiny, attention_window=16896) as one:
        assert (one.prefill(TOKENS, 333) == exact).all()


@pytest.mark.parametrize("window", [332, 128, 50])
def test_windows_fold_to_the_same_logits(tiny: Path, window: int) -> None:
    with solo(tiny) as one:
        exact = one.prefill(TOKENS, 333)
    with solo(tiny, attention_window=window) as one:
        assert relative_error(one.prefill(TOKENS, 100), exact).max() <= 1e-4
