"""How ranks save and load together: what one of them cannot do, all of them hear of, in the same call.

Every phase ends with an exchange in which each rank says how its part went. While rank 0 works on the disk,
in a thread, the others wait in such exchanges too, one every two seconds: so a disk may take longer than the
group's timeout, and a rank that dies meanwhile is noticed at once.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import cast

import torch
import torch.distributed as dist

from phalanx.checkpoint.failure import CheckpointError
from phalanx.errors import MisuseError, PeerFailedError
from phalanx.group import world
from phalanx.group.process_group import PhalanxProcessGroup, for_process_group

_CHUNK = 64 << 20
_LOOK_SECONDS = 2.0  # less than after which a wait is reported as slow


class _Said(IntEnum):
    """What a rank says in an exchange."""

    DONE = 1
    WORKING = 2
    FAILED = 3


class Job:
    """Work on the disk in a thread, which outlives the main thread if need be: it is not a daemon.

    `work` returns what all ranks are to hear of it.
    """

    def __init__(self, work: Callable[[], bytes], name: str) -> None:
        self._work, self._result = work, b""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def ended(self, seconds: float | None = None) -> bool:
        """Wait, at most so long; say whether the work has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> bytes:
        """Wait, and return what the work returned, or raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 (raised by whoever asks for the result)
            self._error = error


class Ranks:
    """This rank among all of the default process group; a world of one where there is none.

    `call` is what the user called, for errors. All methods but `here` are collective.
    """

    def __init__(self, call: str, group: PhalanxProcessGroup | None) -> None:
        self.call, self._group = call, group
        self.rank = 0 if group is None else group.core.rank
        self.size = 1 if group is None else group.core.size

    @classmethod
    def here(cls, call: str) -> Ranks:
        """Find the group. Raises MisuseError if the ranks have been started and have not met yet."""
        if dist.is_initialized():
            return cls(call, for_process_group(cast(dist.ProcessGroup, dist.group.WORLD), call))
        if world.world_size() > 1:
            raise MisuseError(
                f"{call} before the {world.world_size()} ranks have met", "call phalanx.init() before", world.rank()
            )
        return cls(call, None)

    def gather(self, prepare: Callable[[], bytes]) -> list[bytes]:
        """Run `prepare` on every rank and return what it returned on all. If it raises on one, all raise."""
        try:
            said = bytes([_Said.DONE]) + prepare()
        except Exception as error:
            self._exchange(bytes([_Said.FAILED]) + _told(error))
            raise self._named(error) from error.__cause__
        return [answer[1:] for answer in self._checked(self._exchange(said))]

    def attend(self, job: Job | None) -> bytes:
        """Wait on every rank until the job of rank 0 has ended, and return what it returned; if it failed, all raise.

        If a rank is lost meanwhile, rank 0 first sees the job to its end.
        """
        patience = _LOOK_SECONDS if self._group is None else min(_LOOK_SECONDS, self._group.core.timeout / 3)
        while True:
            said, own = _report(job, patience)
            try:
                answers = self._exchange(said)
            except BaseException:
                if job is not None:
                    job.ended()
                raise
            if own is not None:
                raise self._named(own) from own.__cause__
            if answers[0][0] != _Said.WORKING:
                return self._checked(answers)[0][1:]

    def broadcast(self, flat: torch.Tensor | None, size: int) -> torch.Tensor:
        """Return the `size` bytes that rank 0 has in `flat`, on every rank."""
        whole = torch.empty(size, dtype=torch.uint8) if flat is None else flat
        if self._group is not None and self.size > 1:
            for part in whole.split(_CHUNK):
                self._group.broadcast(part, root=0).wait()
        return whole

    def _exchange(self, payload: bytes) -> list[bytes]:
        if self._group is None:
            return [payload]
        answers = self._group.exchange(payload, self.call)
        for peer, answer in enumerate(answers):
            if not answer:
                raise MisuseError(
                    f"{self.call} while rank {peer} has run out of data and only follows, in join()",
                    f"call {self.call} after the `with ddp.join():` block, on every rank", self.rank,
                )  # fmt: skip
        return answers

    def _checked(self, answers: list[bytes]) -> list[bytes]:
        for peer, answer in enumerate(answers):
            if answer[0] == _Said.FAILED:
                raise self._retold(peer, answer[1:])
        return answers

    def _named(self, error: Exception) -> Exception:
        """This rank's own error, with its rank where it does not say it yet."""
        if isinstance(error, (CheckpointError, MisuseError)) and error.rank is None and self.size > 1:
            return type(error)(error.what, error.instead, self.rank).with_traceback(error.__traceback__)
        return error

    def _retold(self, peer: int, told: bytes) -> Exception:
        fields = json.loads(told)
        for kind in (CheckpointError, MisuseError):
            if fields["kind"] == kind.__name__:
                return kind(f"(rank {peer}) {fields['what']}", fields["instead"], self.rank, peer)
        return PeerFailedError(peer, self.rank, self.call, fields["what"], fields["traceback"])


def _report(job: Job | None, patience: float) -> tuple[bytes, Exception | None]:
    """What to say of a job, after waiting for it a while, and the error if it has failed."""
    if job is None:
        return bytes([_Said.DONE]), None
    if not job.ended(patience):
        return bytes([_Said.WORKING]), None
    try:
        return bytes([_Said.DONE]) + job.result(), None
    except Exception as error:
        return bytes([_Said.FAILED]) + _told(error), error


def _told(error: Exception) -> bytes:
    """An error as bytes, for the ranks that do not have it."""
    if isinstance(error, (CheckpointError, MisuseError)):
        fields = {"kind": type(error).__name__, "what": error.what, "instead": error.instead}
    else:
        text = "".join(traceback.format_exception(error))
        fields = {"kind": "", "what": f"{type(error).__name__}: {error}", "traceback": text}
    return json.dumps(fields).encode()
