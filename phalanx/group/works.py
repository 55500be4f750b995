"""Works: what a collective returns, and the thread that runs the asynchronous ones.

A collective that has run in the calling thread returns a DoneWork. An asynchronous one is queued to its
group's Worker, a daemon thread that starts when it is first needed and takes its jobs in order. A job that
is submitted from the worker itself (by a callback of a future) runs at once: waiting for its turn would be
waiting for itself, and on every rank such a callback comes directly after its job.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from phalanx.errors import CollectiveTimeoutError, MisuseError
from phalanx.group import call_site

Job = Callable[[], Any]
_STOP_SECONDS = 2.0


def seconds_of(timeout: timedelta | None) -> float | None:
    """A timeout of torch.distributed in seconds; None where none was given (torch says 0 or -1 ms)."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return timeout.total_seconds()


class Gathered(list[Any]):
    """The outputs of all_gather, whose future holds them stacked in one tensor, as NCCL's does.

    torch's quantisation hooks read it so.
    """


def _value_of(tensors: Sequence[Any]) -> list[Any]:
    return [torch.stack(list(tensors))] if isinstance(tensors, Gathered) else list(tensors)


class DoneWork(Work):
    """A collective that has finished without an error; `tensors` are its outputs."""

    tensors: Sequence[Any] = ()
    source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Say that it is."""
        return True

    def is_success(self) -> bool:
        """Say that it is."""
        return True

    def exception(self) -> BaseException | None:
        """There is none."""
        return None

    def result(self) -> list[Any]:
        """Return the outputs."""
        return list(self.tensors)

    def get_future(self) -> Future[Any]:
        """Return a completed future of the outputs."""
        future: Future[Any] = Future()
        future.set_result(_value_of(self.tensors))
        return future

    def source_rank(self) -> int:
        """Return the rank of the group that sent what a recv has received."""
        return self.source

    _source_rank = source_rank


class PendingWork(Work):
    """A collective that another thread runs; `late` says which ranks it waits for, with a report."""

    def __init__(
        self, tensors: Sequence[Any], call: str, rank: int, late: Callable[[], tuple[list[int], str]] | None = None
    ) -> None:
        super().__init__()
        self.tensors, self.source = tensors, -1
        self._call, self._rank, self._late = call, rank, late
        self._gate = threading.Lock()  # held until the work is done; cheaper than an Event
        self._gate.acquire()
        self._finished = False
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None
        self._making = threading.Lock()

    def finish(self, error: BaseException | None = None) -> None:
        """Open the gate, then complete the future, whose callbacks run here."""
        self._error = error
        with self._making:
            self._finished = True
            future = self._future
        self._gate.release()
        if future is not None:
            self._complete(future)

    def _complete(self, future: Future[Any]) -> None:
        if self._error is None:
            future.set_result(_value_of(self.tensors))
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done; raises what the collective raised."""
        if not self._finished:
            seconds = seconds_of(timeout)
            if not self._gate.acquire(timeout=-1 if seconds is None else seconds):
                missing, report = self._late() if self._late is not None else ([], "")
                raise CollectiveTimeoutError(
                    f"wait({seconds:g} s) for {self._call}", missing or [self._rank], self._rank, seconds or 0,
                    report=report,
                )  # fmt: skip
            self._gate.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Say whether it is done, with or without an error."""
        return self._finished

    def is_success(self) -> bool:
        """Say whether it is done without an error."""
        return self._finished and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of a work that is done, if it has one."""
        return self._error

    def result(self) -> list[Any]:
        """Return the outputs of a work that is done."""
        if not self._finished:
            raise RuntimeError(
                "Work needs to be completed before calling result(). Should call wait() before result()."
            )
        return list(self.tensors)

    def get_future(self) -> Future[Any]:
        """Return a future of the outputs."""
        with self._making:
            made = self._future is None
            if self._future is None:
                self._future = Future()
            future, finished = self._future, self._finished
        if made and finished:
            self._complete(future)
        return future

    def source_rank(self) -> int:
        """Return the rank of the group that sent what a recv has received."""
        return self.source

    _source_rank = source_rank


class ManyWorks(Work):
    """Several works as one: done when all are."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(timeout) if timeout is not None else work.wait()
        return True

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Say whether all are done."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Say whether all are done without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the first error, if there is one."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Any]:
        """Return all outputs, in order."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[Any]:
        """Return a future of all outputs."""
        if not self._works:
            future: Future[Any] = Future()
            future.set_result([])
            return future
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda done: [tensor for one in done.wait() for tensor in one.wait()]
        )


class Worker:
    """One daemon thread that runs jobs in the order in which they were submitted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.pending = 0  # jobs that have not finished; read without the lock on the fast path
        self._jobs: deque[tuple[Job, PendingWork, str, bool]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = ""

    def submit(self, job: Job, work: PendingWork) -> PendingWork:
        """Run `job` after all jobs submitted before it; `work` is finished with its outcome."""
        inference = torch.is_inference_mode_enabled()
        if self._thread is threading.current_thread():
            self._run(job, work, inference)
            return work
        with self._changed:
            if self._stopped:
                raise MisuseError(self._stopped)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._jobs.append((job, work, call_site.here(), inference))
            self.pending += 1
            self._changed.notify_all()
        return work

    def drain(self) -> None:
        """Wait until every job has finished. In the worker's own thread there is nothing to wait for."""
        if self._thread is threading.current_thread():
            return
        with self._changed:
            while self.pending:
                self._changed.wait()

    def stop(self, reason: str) -> None:
        """End the thread; jobs that have not begun fail with `reason`."""
        with self._changed:
            self._stopped = self._stopped or reason
            left, self._jobs = list(self._jobs), deque()
            self.pending -= len(left)
            thread = self._thread
            self._changed.notify_all()
        for _, work, _, _ in left:
            work.finish(MisuseError(reason))
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopped:
                    self._changed.wait()
                if not self._jobs:
                    return
                job, work, site, inference = self._jobs.popleft()
            call_site.set_for_this_thread(site)
            self._run(job, work, inference, counted=True)
            del job, work  # a waiting thread must not keep the last tensors alive

    def _run(self, job: Job, work: PendingWork, inference: bool, counted: bool = False) -> None:
        error: BaseException | None = None
        try:
            if inference:
                with torch.inference_mode():
                    job()
            else:
                job()
        except BaseException as raised:
            error = raised
        if counted:
            with self._changed:
                self.pending -= 1
                self._changed.notify_all()
        work.finish(error)
