"""Every error whalez raises on purpose, so that a caller can catch by kind and read what to do."""

from __future__ import annotations

from collections.abc import Sequence


class WhalezError(Exception):
    """Base of all errors raised on purpose. Any other exception type is a bug to report."""


class ConfigError(WhalezError, ValueError):
    """A setting is wrong: `field: expected ..., got ...`."""


class ShapeError(WhalezError, ValueError):
    """An array handed to an op has the wrong shape, dtype or layout."""


class RequestError(WhalezError, ValueError):
    """A client's request is wrong (HTTP 400). `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unavailable(WhalezError):
    """The fleet cannot take this request now (HTTP 503): draining, failed or full."""


class OutputError(WhalezError):
    """A file or stream of results cannot be written; names it and the reason."""

    def __init__(self, where: object, error: OSError) -> None:
        super().__init__(f"{where}: cannot be written: {error.strerror or error}")
        self.errno = error.errno


class WireError(WhalezError):
    """Bytes that are not a frame of this protocol and version."""


class ProtocolError(WhalezError):
    """Abstract: someone broke the rendezvous protocol."""


class LocalProtocolError(ProtocolError):
    """We broke the protocol: a step the transition table has no row for. The machine is unchanged."""


class PeerProtocolError(ProtocolError):
    """A peer broke the protocol."""

    def __init__(self, rank: int, message: str, story: Sequence[object] = ()) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank
        self.story = tuple(story)


class FleetRefused(WhalezError):
    """The fleet refuses this rank: fingerprint, rank number, incarnation or a world that already runs."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class HubError(WhalezError):
    """The control plane failed: no hub, bad address, silent or dead peer."""


class PeerDied(WhalezError):
    """A rank is gone or silent; the fleet stops."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(f"rank {rank} died: {how}")
        self.rank = rank
        self.how = how


class FabricError(WhalezError):
    """Shared memory between ranks could not be made, mapped or trusted."""


class DoorbellTimeout(FabricError):
    """A doorbell did not reach its value while the awaited rank made no progress.

    `root` is the rank at the end of the chain of waits, which holds up the others; in a circle the awaited one.
    """

    def __init__(
        self,
        peer: int,
        kind: str,
        expected: int,
        seen: int,
        waited_s: float,
        where: str = "",
        root: int | None = None,
    ) -> None:
        super().__init__(
            f"waited {waited_s:.1f} s for rank {peer}'s {kind} doorbell{' at ' + where if where else ''}: "
            f"expected >= {expected:#x}, seen {seen:#x}"
        )
        self.peer = peer
        self.kind = kind
        self.expected = expected
        self.seen = seen
        self.waited_s = waited_s
        self.where = where
        self.root = peer if root is None else root


class MispairedLaunch(FabricError):
    """A pairing doorbell ran ahead of what any correct peer can have rung."""


class CheckpointError(WhalezError):
    """A checkpoint cannot be used; names the file and the tensor."""


class WeightMismatch(CheckpointError):
    """Tensors are missing, unused or of the wrong shape."""

    def __init__(
        self, where: str, missing: Sequence[str] = (), unused: Sequence[str] = (), wrong_shape: Sequence[str] = ()
    ) -> None:
        parts = [
            f"{name}: {', '.join(items[:8])}{f' and {len(items) - 8} more' if len(items) > 8 else ''}"
            for name, items in (("missing", missing), ("unused", unused), ("wrong shape", wrong_shape))
            if items
        ]
        super().__init__(f"{where}: tensors do not match the model; {'; '.join(parts)}")
        self.missing = tuple(missing)
        self.unused = tuple(unused)
        self.wrong_shape = tuple(wrong_shape)


class PlanDiffers(ProtocolError):
    """A gathered plan is not the one this rank computes from the same descriptor; names the field."""

    def __init__(self, field: str, expected: object, got: object) -> None:
        super().__init__(f"plan.{field}: expected {expected}, got {got}; do all ranks run the same configuration?")
        self.field = field
        self.expected = expected
        self.got = got


class CapabilityMissing(FabricError):
    """The machine lacks what was asked for: says what, and what to do."""
