"""What "equal" means between lanes and references (docs/equality.md), as assertions."""

from __future__ import annotations

import numpy as np

MARGIN_MIN = 1e-4  # a differing expert choice must have been this close in the reference
DIFFERENT_MAX = 1e-4  # and such choices must be fewer than one in 10^4


def assert_choices_close(lane: list[np.ndarray], reference: list[np.ndarray], margins: list[np.ndarray]) -> None:
    """Expert choices per MoE layer [T, k]: equal as sets, but for few and close ones."""
    different = total = 0
    for layer, (ours, theirs, margin) in enumerate(zip(lane, reference, margins, strict=True)):
        rows = np.nonzero((np.sort(ours, 1) != np.sort(theirs, 1)).any(1))[0]
        worst = margin[rows].max(initial=0.0)
        assert worst < MARGIN_MIN, f"MoE layer {layer}: a clear choice differs, margin {worst:.2e}"
        different += len(rows)
        total += len(ours)
    assert different <= DIFFERENT_MAX * total, f"{different} of {total} choices differ"


def relative_error(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max |a - b| / max |b| per position."""
    return np.abs(a - b).max(-1) / np.abs(b).max(-1)
