"""Where the `whalez` command begins."""

from __future__ import annotations

import whalez.early  # noqa: F401


def main() -> None:
    from whalez.cli import main as run

    run()
