"""`python -m whalez.admin`."""

import sys

from whalez.cli import main

if __name__ == "__main__":
    main(["admin", *sys.argv[1:]])
