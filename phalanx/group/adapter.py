"""What a c10d process group of Phalanx is besides its collectives: its making, its names, its end.

Facts about c10d behind the oddities here: a Python process group has to answer for its own devices and names
(functional collectives, device meshes and FSDP2 ask), must always return a Work, and is shut down in any
order, once or several times, by destroy_process_group or by nobody.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work, distributed_c10d

from phalanx.errors import MisuseError
from phalanx.group import arguments, factory, profiling, rank_zero_block, ticket
from phalanx.group.accelerator import Accelerator
from phalanx.group.autoload import NAME
from phalanx.group.collectives import Collectives
from phalanx.group.group import Group
from phalanx.group.links import Switchboard
from phalanx.group.messages import checked_tag
from phalanx.group.parts import Parts
from phalanx.group.slow import who_is_late
from phalanx.group.ticket import Operation
from phalanx.group.works import DoneWork, ManyWorks, PendingWork, seconds_of
from phalanx.launch.environment import variable
from phalanx.transport.hosts import Hosts
from phalanx.transport.protocol import Transport
from phalanx.transport.reductions import Reduction
from phalanx.transport.shm import SharedMemory

Nccl = tuple[Any, ...]  # the method of an NCCL group and its arguments
_CPU = torch.device("cpu")
_SHUT_DOWN = "the process group has been shut down"


class Adapter(dist.ProcessGroup):
    """A process group without its collectives.

    `core` agrees and fences, `transport` moves CPU tensors, `board` holds the links; `closed` says why the
    group is closed, and is empty while it is not. `owns_board` is for the group that a world began with.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, core: Group, kind: str, transport: Transport, store: dist.Store, owns_board: bool) -> None:
        super().__init__(core.rank, core.size)  # type: ignore[call-arg]  # the stubs know another constructor only
        self.core, self.board, self.transport = core, core.board, transport
        self.transport_kind = kind
        core.transport = transport
        self.collectives = Collectives(core, transport)
        self.names: Counter[str] = Counter()
        self._store = store
        self._parts = Parts(core, transport, Accelerator(core, store), owns_board)
        self._worker, self._messages = self._parts.worker, self._parts.messages
        self._checked: set[tuple[torch.dtype, Reduction]] = set()
        self._coalesced: list[Any] | None = None
        self._count = 0
        self._name, self._description = core.name, "undefined"
        self._finalizer = weakref.finalize(self, self._parts.close, "the process group is no more")
        self._finalizer.atexit = False  # at exit the links say farewell themselves

    # -- running calls -------------------------------------------------------------------------------

    def _launch(
        self, opts: Any, result: Sequence[Tensor], tensor: Tensor | None, wire: bytes, nccl: Nccl,
        body: Callable[..., None], *arguments: Any,
    ) -> Work:  # fmt: skip
        """Run `body(wire, *arguments)`, here or in the worker, or `nccl` if `tensor` is on a CUDA device."""
        if profiling.is_on():
            operation = ticket.decode(wire).operation
            shown = result if operation is Operation.ALL_REDUCE else [] if tensor is None else [tensor]
            if operation in (Operation.ALL_GATHER, Operation.ALL_TO_ALL):
                shown = [nccl[2]] if isinstance(nccl[2], Tensor) else nccl[2]  # the whole input
            with profiling.event(f"{self._said_backend()}:{profiling.name_of(operation)}", shown):
                return self._start(opts, result, tensor, wire, nccl, body, arguments)
        return self._start(opts, result, tensor, wire, nccl, body, arguments)

    def _said_backend(self) -> str:
        """What torch.distributed calls this group's backend."""
        known = distributed_c10d._world.pg_map.get(self)
        return str(known[0]) if known else NAME

    def _start(
        self, opts: Any, result: Sequence[Tensor], tensor: Tensor | None, wire: bytes, nccl: Nccl,
        body: Callable[..., None], arguments: Sequence[Any],
    ) -> Work:  # fmt: skip
        self._refuse_if_closed()
        self._count += 1
        if tensor is not None and not tensor.is_cpu:
            return self._accelerated(result, wire, nccl)
        seconds = seconds_of(opts.timeout)
        if not opts.asyncOp:
            if self._worker.pending:
                self._worker.drain()
            self._run(seconds, body, wire, arguments)
            work: Any = DoneWork()
            work.tensors = result
            return self._noted(work)
        if rank_zero_block.current() is not None:
            self.core.tickets(wire)  # says what is wrong; the worker's thread is in no block
        pending = PendingWork(result, body.__name__, self.core.rank, partial(who_is_late, self.core))
        return self._noted(self._worker.submit(lambda: self._run(seconds, body, wire, arguments), pending))

    def _run(self, seconds: float | None, body: Callable[..., None], wire: bytes, arguments: Sequence[Any]) -> None:
        if seconds is None:
            body(wire, *arguments)
            return
        core = self.core
        with core.lock:  # one call at a time, so the group's timeout may be the call's for as long
            usual, core.timeout = core.timeout, seconds
            try:
                body(wire, *arguments)
            finally:
                core.timeout = usual

    def _accelerated(self, result: Sequence[Tensor], wire: bytes | None, nccl: Nccl) -> Work:
        if self._worker.pending:
            self._worker.drain()
        work = self._parts.accelerator.call(nccl[0], wire, nccl[1:])
        if work is None:
            work = DoneWork()
            work.tensors = result
        return self._noted(work)

    def _noted(self, work: Any) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work  # type: ignore[no-any-return]

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise MisuseError(f"a call of {self}: {self.closed}", rank=self.core.rank)
        if self.board.closed and self.core.size > 1:
            raise MisuseError(self.board.closed, rank=self.core.rank)

    def drain(self) -> None:
        """Wait until every asynchronous collective has run, so that this thread's is next on all ranks."""
        if self._worker.pending:
            self._worker.drain()

    def exchange(self, payload: bytes, call: str) -> list[bytes]:
        """Give `payload` to every rank after all asynchronous collectives; see Group.exchange."""
        self.drain()
        return self.core.exchange(payload, call)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return ManyWorks(works)

    # -- messages ------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Send a tensor to one rank. The work is done when the tensor may be changed."""
        tensor = self._message(tensors, [dst], tag, "send")
        if not tensor.is_cpu:
            return self._accelerated([tensor], None, ("send", [tensor], dst, tag))
        with self._message_event("send", tensor):
            return self._noted(self._messages.send(dst, tensor, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receive a tensor from one rank."""
        tensor = self._message(tensors, [src], tag, "recv")
        if not tensor.is_cpu:
            return self._accelerated([tensor], None, ("recv", [tensor], src, tag))
        with self._message_event("recv", tensor):
            return self._noted(self._messages.receive(tensor, [src], tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive a tensor from whichever rank sends one with this tag."""
        tensor = self._message(tensors, [], tag, "recv")
        if not tensor.is_cpu:
            raise arguments.ArgumentError("recv from any source: NCCL cannot; name the source of CUDA tensors")
        peers = [place for place in range(self.core.size) if place != self.core.rank] or [self.core.rank]
        with self._message_event("recvAnySource", tensor):
            return self._noted(self._messages.receive(tensor, peers, tag))

    def _message_event(self, name: str, tensor: Tensor) -> AbstractContextManager[None]:
        return profiling.event(f"{self._said_backend()}:{name}", [tensor]) if profiling.is_on() else nullcontext()

    def _message(self, tensors: Any, places: Sequence[int], tag: int, call: str) -> Tensor:
        self._refuse_if_closed()
        tensor = arguments.dense(arguments.single(tensors, call), call)
        arguments.code(tensor, call)
        checked_tag(tag)
        for place in places:
            arguments.root_rank(place, self.core.size, call)
        self._count += 1
        return tensor

    # -- what Phalanx asks ---------------------------------------------------------------------------

    @property
    def closed(self) -> str:
        """Why the group is closed; empty while it is open."""
        return self._parts.closed

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks of each host share memory."""
        return isinstance(self.transport, (SharedMemory, Hosts))

    def transport_for(self, device: torch.device) -> Transport:
        """The transport for tensors of a device."""
        return self.transport if device.type == "cpu" else self._parts.accelerator.transport()

    def announce_failure(self, error: BaseException) -> None:
        """Tell every rank that this one has raised `error`."""
        self.board.fail(error)

    # -- what c10d asks ------------------------------------------------------------------------------

    def name(self) -> str:
        """The name of the backend."""
        return "phalanx"

    getBackendName = _get_backend_name = name

    def getGroupName(self) -> str:
        """The name that torch.distributed has given to the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take the name that torch.distributed gives."""
        self._name = name

    def getGroupDesc(self) -> str:
        """The user's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Take the user's description."""
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc  # type: ignore[assignment]  # names of arguments

    @property
    def group_name(self) -> distributed_c10d.GroupName:
        """As getGroupName."""
        return distributed_c10d.GroupName(self._name)

    @property
    def group_desc(self) -> str:
        """As getGroupDesc."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, torch.device("cuda")] if torch.cuda.is_available() else [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type not in [each.type for each in self._device_types]:
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self.drain()

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: all ranks count from zero."""

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def get_group_store(self) -> dist.Store:
        """The store that the group was made from."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call waits for other ranks."""
        self.core.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group. Harmless when repeated; other ranks are told that this one leaves."""
        self._finalizer.detach()
        self._parts.close(_SHUT_DOWN)

    abort = shutdown


_Made = TypeVar("_Made", bound=Adapter)


def made_by(cls: type[_Made], options: Any, kind: Any) -> _Made:
    """Make the process group that torch.distributed asks for.

    A sub-group of a world of Phalanx uses the world's links; any other group meets over its store. `kind`
    names a transport.
    """
    world, members = distributed_c10d._world.default_pg, list(options.global_ranks_in_group)
    if members and isinstance(world, Adapter) and not world.closed:
        world.names[options.group_id] += 1
        name = f"{options.group_id}#{world.names[options.group_id]}"  # a name may come again
        kind = world.transport_kind if kind is None else kind
        return _made(cls, world.board, members, name, options.timeout, options.store, kind, owns_board=False)
    board = factory.connect(options.store, options.group_rank, options.group_size, options.timeout)
    members = list(range(options.group_size))
    kind = variable("PHALANX_TRANSPORT", factory.AUTO) if kind is None else kind
    return _made(cls, board, members, options.group_id, options.timeout, options.store, kind, owns_board=True)


def _made(
    cls: type[_Made], board: Switchboard, members: Sequence[int], name: str, timeout: timedelta,
    store: dist.Store, kind: str, owns_board: bool,
) -> _Made:  # fmt: skip
    try:
        core = Group(board, members, name, timeout.total_seconds())
        transport = factory.transport_for(core, store, kind)
    except BaseException as error:
        if owns_board:
            board.fail(error)
            board.leave("the process group could not be made")
        raise
    return cls(core, kind, transport, store, owns_board)


_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, Adapter] = weakref.WeakKeyDictionary()
_beside_lock = threading.Lock()


def beside(cls: type[_Made], group: dist.ProcessGroup, purpose: str) -> _Made:
    """Return the Phalanx group of the same ranks as `group`, of another backend; made at the first call."""
    with _beside_lock:
        found = _beside.get(group)
    if found is not None and not found.closed:
        return found  # type: ignore[return-value]
    known = distributed_c10d._world.pg_map.get(group)
    if known is None:
        raise MisuseError(
            f"{purpose}: process_group={group!r} is none that torch.distributed knows of",
            "a group made by torch.distributed.init_process_group or new_group",
        )
    backend, store = known
    if str(backend) == "fake":
        what = f"{purpose} on a process group of backend 'fake', which has no other ranks"
        raise MisuseError(what, "gloo or phalanx")
    timeout = _timeout_of(group)
    store = dist.PrefixStore("phalanx", store)
    board = factory.connect(store, group.rank(), group.size(), timeout)
    members = range(group.size())
    made = _made(cls, board, members, f"beside {backend}", timeout, store, factory.AUTO, owns_board=True)
    with _beside_lock:
        _beside[group] = made
    weakref.finalize(group, made.shutdown).atexit = False
    return made


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout  # type: ignore[no-any-return]
    return distributed_c10d.default_pg_timeout
