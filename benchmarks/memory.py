"""Measure the memory that training holds, per rank and per host: `phalanx bench --what memory`, with its options."""

from __future__ import annotations

import sys

from phalanx.observe.bench import main

if __name__ == "__main__":
    sys.exit(main(["--what", "memory", *sys.argv[1:]]))
