"""whalez: long-context prefill over a fleet of free-running rank processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whalez.version import __version__

if TYPE_CHECKING:
    from whalez.fleet import Fleet as Fleet

__all__ = ["Fleet", "__version__"]


def __getattr__(name: str) -> object:
    """`whalez.Fleet` on first use, so that `import whalez` stays light in every rank and front."""
    if name == "Fleet":
        from whalez.fleet import Fleet

        return Fleet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
