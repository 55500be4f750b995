"""Measure one all-reduce, by size: `phalanx bench --what allreduce`, with its options."""

from __future__ import annotations

import sys

from phalanx.observe.bench import main

if __name__ == "__main__":
    sys.exit(main(["--what", "allreduce", *sys.argv[1:]]))
