"""Search every interleaving of small fleets, deeper than `make test` does.

    python tools/explore.py                    # what make test explores
    python tools/explore.py --depth 1          # two whales and a trouble, three and four ranks
    python tools/explore.py --depth 3 --states 50000000

`--depth N`: messages may come up to N launches late. Exits non-zero if a property is broken, after its trace.
"""

from __future__ import annotations

import argparse
import sys
import time

from whalez.testing.explore import Explorer, deep_worlds, worlds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--depth", type=int, default=0, help="launches a message may be late; 0: the worlds of make test"
    )
    parser.add_argument("--states", type=int, default=5_000_000, help="give a world up after so many states")
    parser.add_argument("--only", default="", help="worlds whose name contains this")
    args = parser.parse_args()
    chosen = [one for one in (deep_worlds(args.depth) if args.depth else worlds()) if args.only in one.name]
    states = broken = 0
    for world in chosen:
        began = time.perf_counter()
        result = Explorer(world).run(args.states)
        took_s = time.perf_counter() - began
        end = "all" if result.is_complete else f"the first {result.depth} moves"
        print(
            f"{result.states_count:>9} states, {result.moves_count:>9} moves, {end}, {took_s:6.1f} s: {world.name}",
            flush=True,
        )
        states += result.states_count
        if result.broken is not None:
            broken += 1
            print(f"BROKEN {result.what}", *result.trace, sep="\n  ")
    print(f"{states} states of {len(chosen)} worlds, {broken} with a broken property")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
