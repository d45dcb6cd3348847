"""How many ranks share a whale, and how long a segment may be.

A width is a power of two in 2..world. It admits a prompt if equal segments would keep to the floor and to the largest
bucket: width * segment_floor <= length <= width * buckets[-1]. The widest one that admits is taken, because a superstep
holds up the whole fleet and the widest gang is the shortest stall. No segment may exceed the bucket that covers the
mean: a head segment leveled into the next bucket would double that rank's row-wise work, and everybody waits for it.
"""

from __future__ import annotations

from whalez.planning.policy import PlanPolicy


def widths(world: int) -> tuple[int, ...]:
    """Powers of two a gang of this world can have, widest first; none for a world of one."""
    found = []
    width = 2
    while width <= world:
        found.append(width)
        width *= 2
    return tuple(reversed(found))


def covering_bucket(rows: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest bucket of at least `rows` rows, None if there is none."""
    for bucket in buckets:
        if bucket >= rows:
            return bucket
    return None


def segment_cap(length: int, width: int, policy: PlanPolicy) -> int | None:
    """Most rows of one segment: the bucket that covers the mean. None if no bucket does."""
    return covering_bucket(-(-length // width), policy.buckets)


def why_not_width(length: int, width: int, policy: PlanPolicy) -> tuple[str, str] | None:
    """None if `width` admits the prompt, otherwise the setting it breaks and a sentence."""
    if length < width * policy.segment_floor:
        return "segment_floor", (
            f"width {width}: {length} tokens are fewer than {width} segments of {policy.segment_floor} rows"
        )
    if segment_cap(length, width, policy) is None:
        mean = -(-length // width)
        return (
            "buckets",
            f"width {width}: a mean segment of {mean} rows exceeds the largest bucket, {policy.buckets[-1]}",
        )
    return None


def rows_max(policy: PlanPolicy, max_ctx: int, chunk_tokens: int) -> int:
    """Most rows of one request that one launch of one rank can be asked to hold, so that slabs can be sized.

    That is a chunk of the local lane, or a segment of any gang for any prompt up to max_ctx; narrower gangs count,
    because declines can force them.
    """
    rows = chunk_tokens
    for width in widths(policy.world):
        length = min(max_ctx, width * policy.buckets[-1])
        if length < max(policy.whale_min, width * policy.segment_floor):
            continue
        cap = segment_cap(length, width, policy)
        assert cap is not None, (length, width)
        rows = max(rows, min(cap, length - (width - 1) * policy.segment_floor))
    return rows
