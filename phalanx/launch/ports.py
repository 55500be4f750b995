"""A port for rank 0's store that nobody else gets between finding it and using it.

Asking the kernel for a free port and closing the socket again is a race: two launches at once can be
given the same one. So the launcher keeps its socket bound for as long as the run lasts, and never
listens on it. While it is bound, the kernel hands the port to nobody who asks for any free port. Rank
0's store can still bind and listen there, because both sockets set SO_REUSEADDR and neither of them
listened before.
"""

from __future__ import annotations

import errno
import socket

from phalanx.launch.environment import LOOPBACK

LOOPBACK_IS_DOWN = f"the loopback interface is down or has no {LOOPBACK}, and the ranks of one host meet over it"
BRING_LOOPBACK_UP = (
    f"ip link set lo up; ip addr add {LOOPBACK}/8 dev lo (in a network namespace or container of your own, as its root)"
)
_CONNECT_SECONDS = 1.0


class PortInUseError(OSError):
    """Another program listens on the port that was asked for. Its text names the port."""


def loopback_works() -> bool:
    """Whether a connection to this host's own loopback address can be made."""
    with socket.socket() as listener, socket.socket() as caller:
        try:
            listener.bind((LOOPBACK, 0))
            listener.listen(1)
            caller.settimeout(_CONNECT_SECONDS)
            caller.connect(listener.getsockname())
        except OSError:
            return False
    return True


def reserve(port: int = 0) -> socket.socket:
    """Bind `port` (0: any free one) on all addresses; the caller keeps the socket open while ranks run."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            held = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # this kernel was built without the family
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.bind((address, port))
        except OSError as error:
            held.close()
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(error.errno, f"port {port} is in use by another program") from None
            if family == socket.AF_INET:
                raise
            continue  # the family exists but is switched off
        return held
    raise OSError(errno.EAFNOSUPPORT, "this host has no internet sockets")
