"""What requests leave on a rank between launches: KDA states, conv tails and paged MLA latents.

Rule 1: only arrays live here; who owns which slot and page is the scheduler's bookkeeping.
"""

from __future__ import annotations

import numpy as np

from whalez.model.config import KimiLinearConfig


class StateCache:
    """Per-slot states and the paged latent pool of one rank; f32.

    states:  [n_kda, slots, H, K, V]     recurrent KDA state
    tails:   [n_kda, slots, 3, 3*inner]  last projected rows of q, k, v before the convolution
    latents: [n_mla, pages, page, L]     normed latent | shared key channels

    Memory that was never written is never resident.
    """

    def __init__(self, config: KimiLinearConfig, *, slots: int, pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.kda_index = {layer: i for i, layer in enumerate(config.kda_layers)}
        self.mla_index = {layer: i for i, layer in enumerate(config.mla_layers)}
        heads, dim = config.kda_heads, config.kda_head_dim
        self.states = np.empty((len(config.kda_layers), slots, heads, dim, dim), np.float32)
        self.tails = np.empty((len(config.kda_layers), slots, config.conv_width - 1, 3 * config.kda_inner), np.float32)
        self.latents = np.empty((len(config.mla_layers), pages, page_tokens, config.latent_width), np.float32)
        self._pages: list[np.ndarray] = [np.empty(0, np.int32)] * slots

    def open_slot(self, slot: int, pages: tuple[int, ...]) -> None:
        """Give a fresh request its slot: zero state, zero tail, these pages."""
        self.states[:, slot] = 0.0
        self.tails[:, slot] = 0.0
        self._pages[slot] = np.array(pages, np.int32)

    def pages(self, slot: int) -> np.ndarray:
        """Page numbers i32 [n] of a slot, in token order."""
        return self._pages[slot]

    def page_table(self, slots: np.ndarray) -> np.ndarray:
        """Page numbers i32 [B, n] of several slots, padded with page 0 where a slot has fewer."""
        rows = [self._pages[slot] for slot in slots]
        table = np.zeros((len(rows), max(len(row) for row in rows)), np.int32)
        for i, row in enumerate(rows):
            table[i, : len(row)] = row
        return table
