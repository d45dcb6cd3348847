"""Kimi Delta Attention in chunk form, as an affine map of the state, and one token at a time (README.md)."""

from whalez.ops.kda.host import (
    CHUNK,
    chunks_count,
    kda_beta,
    kda_compose,
    kda_decode,
    kda_gate,
    kda_package,
    kda_package_d,
    kda_prepare,
    kda_scan,
    warm,
)

__all__ = [
    "CHUNK",
    "chunks_count",
    "kda_beta",
    "kda_compose",
    "kda_decode",
    "kda_gate",
    "kda_package",
    "kda_package_d",
    "kda_prepare",
    "kda_scan",
    "warm",
]
