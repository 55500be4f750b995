"""`python -m phalanx` is the `phalanx` command."""

from __future__ import annotations

import sys

from phalanx.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
