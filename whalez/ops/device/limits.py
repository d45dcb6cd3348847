"""What a launch asks of its addresses and sizes before anything is queued.

A kernel trusts what it gets: a misaligned access or a grid that no device takes is an error of the whole context, found
at the next call that waits. So a launch checks what it can know, and raises ShapeError with the name of the argument.
"""

from __future__ import annotations

from whalez.errors import ShapeError

GRID_YZ_MAX = 65_535  # blocks of a grid on y and on z; x takes 2^31 - 1


def require_multiples(what: str, *values: tuple[str, int, int]) -> None:
    """Every (name, value, divisor) is a multiple; a 0 is, so what is not used may be 0. Raises: ShapeError."""
    for name, value, divisor in values:
        if value % divisor:
            raise ShapeError(f"{name}: expected a multiple of {divisor} as {what}, got {value:#x}")


def require_addresses(**aligned: tuple[int, int]) -> None:
    """Every name=(address, bytes) is aligned to that many bytes. Raises: ShapeError."""
    require_multiples("address", *((name, address, nbytes) for name, (address, nbytes) in aligned.items()))


def require_blocks(name: str, count: int, most: int = GRID_YZ_MAX) -> None:
    """A count that is, or is cut into, the blocks of a grid on y or z. Raises: ShapeError."""
    if not 0 < count <= most:
        raise ShapeError(f"{name}: expected 1..{most}, got {count}")
