"""What makes a fleet small enough to start in every test: whales and launches of a few hundred rows."""

from __future__ import annotations

SETTINGS = {
    "segment_floor": 64,
    "chunk_tokens": 256,
    "buckets": (64, 128, 256, 512, 1024),
    "max_ctx": 4096,
    "armed_rows": 32,
    "slots": 8,
    "threads": 1,
}
