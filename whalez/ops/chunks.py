"""Rows of a KDA chunk; apart from the kernels, for those who only count and must not load numba."""

CHUNK = 64


def chunks_count(rows: int) -> int:
    """N: chunks of 64 rows that cover `rows`, the last one ragged."""
    return -(-rows // CHUNK)
