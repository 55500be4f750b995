"""The cases that apply to the CPU, pass with torch's own, and are expected not to pass on Phalanx.

Each has its reason. The list only shrinks: a case that is listed and passes is a failure too.
"""

from __future__ import annotations

from tests.peer.cases import What

EXPECTED: dict[What, dict[str, str]] = {
    What.DDP: {},
    What.COLLECTIVES: {},
}
