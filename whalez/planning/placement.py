"""Which ranks form a gang: one contiguous block that holds the poster, along node boundaries where it fits.

The first choice for a width W, nodes of `node_ranks` ranks and poster p:

    W a multiple of node_ranks   the W-aligned block of p, so that two gangs never share part of a node
    W > node_ranks otherwise     the block that starts at p's node
    W < node_ranks               the W-aligned block inside p's node, moved back if it would leave the node
    and in each case             the block that ends at world - 1 if the choice would reach beyond it

If ranks are excluded (they declined), other blocks that hold p follow: those over fewer nodes first, then the nearest
to the first choice. The order does not depend on who is excluded, so a member that does not know the decliners finds
the same gang when it takes every rank outside the gang as excluded.
"""

from __future__ import annotations

from collections.abc import Set


def place_gang(
    width: int, poster: int, world: int, node_ranks: int, excluded: Set[int] = frozenset()
) -> tuple[int, ...] | None:
    """The gang in context-parallel order: the block in rank order, the poster moved to the end.

    Returns None if every contiguous block of that width that holds the poster has an excluded rank.
    """
    assert 1 <= width <= world, (width, world)
    assert 0 <= poster < world, (poster, world)
    for start in _starts(width, poster, world, node_ranks):
        block = range(start, start + width)
        if not any(rank in excluded for rank in block):
            return (*(rank for rank in block if rank != poster), poster)
    return None


def first_choice(width: int, poster: int, world: int, node_ranks: int) -> int:
    """First rank of the block taken if nobody is excluded."""
    node_start = poster - poster % node_ranks
    if width % node_ranks == 0:
        start = poster - poster % width
    elif width > node_ranks:
        start = node_start
    else:
        offset = poster - node_start
        start = node_start + min(offset - offset % width, node_ranks - width)
    return min(start, world - width)


def _starts(width: int, poster: int, world: int, node_ranks: int) -> list[int]:
    first = first_choice(width, poster, world, node_ranks)

    def nodes_touched(start: int) -> int:
        return (start + width - 1) // node_ranks - start // node_ranks + 1

    holding_poster = range(max(0, poster - width + 1), min(poster, world - width) + 1)
    return sorted(holding_poster, key=lambda start: (start != first, nodes_touched(start), abs(start - first), start))
