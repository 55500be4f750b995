"""Measure whole training steps of the four models: `phalanx bench --what steps`, with its options."""

from __future__ import annotations

import sys

from phalanx.observe.bench import main

if __name__ == "__main__":
    sys.exit(main(["--what", "steps", *sys.argv[1:]]))
