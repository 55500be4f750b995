"""Join the world that the launcher made: `init`, `rank`, `world_size`, `local_rank`, `is_main`, `shutdown`.

There is one place where the world is kept, and it is torch.distributed: whatever has been set up there,
by `init`, by the user or by a test, is what these functions see. Only the store that a launched world
meets in is kept here, for as long as the process lives, so that a second `init` after `shutdown` meets
in the same server and cannot reach one that is just being closed.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import count

import torch.distributed as dist

from phalanx.errors import CollectiveTimeoutError, MisuseError
from phalanx.group import autoload, departures, endings, slow
from phalanx.launch.environment import LOOPBACK, Launcher, Place

_MEET_SECONDS = 300.0  # how long ranks wait for rank 0's store where the user set no timeout
_RESOLVE_SECONDS = 10.0  # a name that appears later than that will not appear
_CONNECT_SECONDS = 2.0
_RETRY_SECONDS = (0.02, 0.5)  # the first pause between attempts, and the longest
_generations = count()
_stores: dict[tuple[Place, int], dist.TCPStore] = {}
_before_shutdown: list[Callable[[], object]] = []


def init(backend: str = "phalanx", timeout: float | timedelta | None = None, slow_after: float | None = None) -> None:
    """Join the world that the launcher made. Collective: every rank, once.

    Without a launcher the world is this process alone, and everything works. If torch.distributed is
    initialized already, that world is taken as it is. `timeout` is in seconds, for meeting and for
    collectives; by default ranks wait 5 minutes for rank 0, and torch's default for collectives. A wait for
    other ranks that takes longer than `slow_after` seconds (PHALANX_SLOW_AFTER, or 10) is reported as a
    warning that says what every rank is doing; `float("inf")` turns that off.

    Raises MisuseError if the launcher's variables are wrong, MASTER_ADDR has no address or rank 0's port
    is taken, and CollectiveTimeoutError if a rank does not arrive in time.
    """
    if slow_after is not None:
        slow.choose(slow_after, list(endings.BOARDS))
    if dist.is_initialized():
        return
    limit = _limit(timeout)
    place = Place.from_environment()
    if place.launcher is Launcher.NONE or (place.world_size == 1 and not place.agent_store):
        store: dist.Store = dist.HashStore()
    else:
        store = _store(place, limit.total_seconds() if limit else _MEET_SECONDS, os.getpid())
        store = dist.PrefixStore(f"phalanx/{place.restart_count}/{next(_generations)}", store)
    autoload.register()  # where Phalanx is not installed but on the path, torch has not done it
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit)
    store.set_timeout(limit or dist.default_pg_timeout)
    atexit.register(_shutdown_of, os.getpid())


def shutdown() -> None:
    """Finish trackers and close the process groups. May be called again, or without `init`; also runs at exit."""
    with contextlib.ExitStack() as stack:  # which runs all, though one raises; the last that was added first
        stack.callback(_close_groups)
        for action in _before_shutdown:
            stack.callback(action)


def before_shutdown(action: Callable[[], object]) -> None:
    """Call `action` whenever `shutdown` is called, before the groups are closed; by any rank of this process."""
    _before_shutdown.append(action)


def rank() -> int:
    """This process's rank; before `init` the one that the launcher has announced."""
    return dist.get_rank() if dist.is_initialized() else Place.from_environment().rank


def world_size() -> int:
    """The number of ranks; before `init` the one that the launcher has announced."""
    return dist.get_world_size() if dist.is_initialized() else Place.from_environment().world_size


def local_rank() -> int:
    """This process's rank among those of its host: the index of its device.

    In a world that was set up without a launcher's variables all ranks are taken to be on one host.
    """
    place = Place.from_environment()
    if not dist.is_initialized() or (place.rank, place.world_size) == (
        dist.get_rank(),
        dist.get_world_size(),
    ):
        return place.local_rank
    return dist.get_rank()


def is_main() -> bool:
    """Whether this is rank 0."""
    return rank() == 0


def _close_groups() -> None:
    slow.choose(None)
    if dist.is_initialized():
        dist.destroy_process_group()


def _shutdown_of(owner: int) -> None:
    """At exit, only in the process that called `init`: a forked child has inherited this hook."""
    if os.getpid() == owner:
        shutdown()


def _limit(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        limit = timeout
    else:
        limit = timedelta(seconds=timeout)
    if limit is not None and limit <= timedelta(0):
        raise MisuseError(f"init: timeout={timeout!r} is not a positive time", "timeout=60.0 (seconds)")
    return limit


def _store(place: Place, seconds: float, process: int) -> dist.TCPStore:
    """The store of a launched world; rank 0 serves it, unless the launcher does.

    Kept per place and process, so that a forked child does not use its parent's.
    """
    if (place, process) not in _stores:
        _stores[place, process] = _open_store(place, seconds)
    return _stores[place, process]


def _open_store(place: Place, seconds: float) -> dist.TCPStore:
    began = time.monotonic()
    _resolve(place, began + min(seconds, _RESOLVE_SECONDS))
    if place.rank == 0 and not place.agent_store:
        return _serve(place, seconds)
    _await_server(place, began, seconds)
    opened: list[dist.TCPStore | Exception] = []

    def construct() -> None:
        try:
            opened.append(_tcp_store(place, str(place.master_addr), seconds, serves=False))
        except Exception as error:  # noqa: BLE001 (raised again below, in the caller's thread)
            opened.append(error)

    # In a thread, because a server that takes the connection and never answers, some other program on
    # that port, holds the constructor for ever. The thread then stays behind.
    worker = threading.Thread(target=construct, name="phalanx-store", daemon=True)
    worker.start()
    worker.join(max(began + seconds - time.monotonic(), _CONNECT_SECONDS))
    if opened and isinstance(opened[0], dist.TCPStore):
        return opened[0]
    waited = time.monotonic() - began
    failed = next((error for error in opened if isinstance(error, Exception)), None)
    raise _unreachable(place, waited, "what listens there does not answer as a store") from failed


def _serve(place: Place, seconds: float) -> dist.TCPStore:
    """Rank 0's store. Where MASTER_ADDR is not an address of this host, it may be one that is forwarded
    to it, which need not work from here; so rank 0 then uses its own server by the loopback address."""
    host = str(place.master_addr)
    if not _is_here(host):
        warnings.warn(
            f"rank 0 runs on {socket.gethostname()}, and {place.address_from} ({host}) is no address of "
            "this host; the other ranks can reach it only if it is forwarded to here",
            stacklevel=4,
        )
        host = LOOPBACK
    try:
        return _tcp_store(place, host, seconds, serves=True)
    except dist.DistNetworkError as error:
        if errno.errorcode[errno.EADDRINUSE] not in str(error):
            raise
        raise MisuseError(
            f"rank 0 cannot open its store: port {place.master_port} ({place.port_from}) is in use by another program",
            "another MASTER_PORT, or `phalanx run`, which finds a free one",
            place.rank,
        ) from None


def _tcp_store(place: Place, host: str, seconds: float, serves: bool) -> dist.TCPStore:
    return dist.TCPStore(
        host,
        place.master_port or 0,
        place.world_size,
        is_master=serves,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,  # share with whatever else this process opens on that port
    )


def _is_here(host: str) -> bool:
    """Whether a socket of this host can have the address."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _await_server(place: Place, began: float, seconds: float) -> None:
    """Wait until somebody listens at rank 0's address.

    Done here, because torch's own waiting passes the timeout by and prints its C++ stacks.
    """
    deadline = began + seconds
    pause = _RETRY_SECONDS[0]
    while True:
        left = deadline - time.monotonic()
        try:
            address = (str(place.master_addr), place.master_port or 0)
            socket.create_connection(address, timeout=min(max(left, 0.01), _CONNECT_SECONDS)).close()
            return
        except OSError as error:
            if time.monotonic() + pause >= deadline:
                raise _unreachable(place, time.monotonic() - began, error.strerror or str(error)) from None
        departures.check(0, place.rank, place.world_size, "phalanx.init")
        time.sleep(pause)
        pause = min(2 * pause, _RETRY_SECONDS[1])


def _resolve(place: Place, deadline: float) -> None:
    pause = _RETRY_SECONDS[0]
    while True:
        try:
            socket.getaddrinfo(place.master_addr, place.master_port, type=socket.SOCK_STREAM)
            return
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() + pause >= deadline:
                raise MisuseError(
                    f"rank 0's host {place.master_addr!r} ({place.address_from}) has no address: {error}",
                    "MASTER_ADDR=<name or address of rank 0's host>",
                    place.rank,
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, _RETRY_SECONDS[1])


def _unreachable(place: Place, seconds: float, why: str) -> CollectiveTimeoutError:
    where = f"{place.master_addr}:{place.master_port}"
    return CollectiveTimeoutError(
        call=f"phalanx.init, connecting to rank 0 at {where},",
        missing=[0],
        rank=place.rank,
        seconds=seconds,
        detail=f"The last attempt said: {why}. Is rank 0 running, and is {where} "
        f"({place.address_from}, {place.port_from}) its host and port?",
    )
