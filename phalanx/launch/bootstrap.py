"""The first code of a rank: tie its life to the launcher, run the user's script, record how it failed.

The launcher starts `python -u bootstrap.py RUN_DIR RANK LAUNCHER_PID script|module TARGET ARGS...` by
path, so that nothing of the current directory can take its place, and it imports the standard library
only. The script must not be able to tell: sys.argv, sys.path[0] and __main__ are what plain `python
TARGET ARGS` would give it, and errors end the process as they would there. What is added are records
in RUN_DIR: of the uncaught exception, from which the launcher finds the rank that failed first, or of
the moment when all was done. Where the disk is full they are missing, and nothing else goes wrong.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator

# On this signal a rank writes the Python stacks of its threads to RUN_DIR. A real-time signal, because
# scripts and schedulers give SIGUSR1 and SIGUSR2 meanings of their own.
STACK_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
RUN_DIR = "PHALANX_RUN_DIR"  # the variable in which a rank finds its launcher's folder
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HERE = os.path.dirname(os.path.abspath(__file__))
_ERRORS = "phalanx.errors"
_LONGEST_MESSAGE = 10_000  # characters; what is longer loses its middle
_LONGEST_TRACEBACK = 50_000


def record_path(run_dir: str, rank: int) -> str:
    """Where a rank records how it failed."""
    return os.path.join(run_dir, f"rank-{rank}.json")


def stack_path(run_dir: str, rank: int) -> str:
    """Where a rank writes its stacks on STACK_SIGNAL."""
    return os.path.join(run_dir, f"rank-{rank}.stack")


def done_path(run_dir: str, rank: int) -> str:
    """Where a rank writes when its script had come to a good end, on the monotonic clock."""
    return os.path.join(run_dir, f"rank-{rank}.done")


def gone_path(run_dir: str, rank: int) -> str:
    """Where the launcher writes the exit code of a rank that has ended, for ranks that wait for it."""
    return os.path.join(run_dir, f"rank-{rank}.gone")


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends; end now if it has ended."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Ask the kernel to make orphaned descendants children of this process, so that it can reap them."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def enable_stacks(run_dir: str, rank: int) -> None:
    """Print Python stacks on a crash, and write them to RUN_DIR when the launcher asks."""
    try:
        faulthandler.enable()
    except (AttributeError, ValueError, io.UnsupportedOperation):
        pass  # no stderr to write to, as under plain python
    if STACK_SIGNAL is not None:
        try:
            stacks = open(stack_path(run_dir, rank), "w")  # noqa: SIM115 (open for as long as the process lives)
        except OSError:
            return  # the launcher sees that there is no file to ask for
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)


def recorded(run_dir: str, rank: int, run: Callable[[], None]) -> None:
    """Call `run`; record and print an uncaught exception as the interpreter would, without our frames."""
    owner = os.getpid()
    try:
        run()
    except SystemExit as stop:
        _record_exit(run_dir, rank, stop, owner)
        raise
    except BaseException as error:
        shown = error.with_traceback(_users_frames(error.__traceback__))
        interrupted = isinstance(error, KeyboardInterrupt)
        _write(run_dir, rank, shown, 128 + signal.SIGINT if interrupted else 1, owner)
        try:
            sys.excepthook(type(error), shown, shown.__traceback__)
        except Exception:
            sys.__excepthook__(type(error), shown, shown.__traceback__)
        # Raised again, so that the interpreter chooses the exit code and runs its exit handlers; it is
        # printed already.
        sys.excepthook = _printed
        raise
    _put(done_path(run_dir, rank), str(time.monotonic()), owner)


def _record_exit(run_dir: str, rank: int, stop: SystemExit, owner: int) -> None:
    code = _exit_code(stop.code)
    if code == 0:
        _put(done_path(run_dir, rank), str(time.monotonic()), owner)
    else:
        _write(run_dir, rank, stop, code, owner)


def _printed(*_: object) -> None:
    """Take the place of sys.excepthook once the exception has been printed."""


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _users_frames(tb: types.TracebackType | None) -> types.TracebackType | None:
    while tb is not None and _is_ours(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


def _is_ours(filename: str) -> bool:
    return filename == runpy.run_module.__code__.co_filename or os.path.dirname(filename) == _HERE


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it was raised from, newest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _write(run_dir: str, rank: int, error: BaseException, code: int, owner: int) -> None:
    """Record the exception that ends this rank."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__", None):
        name = f"{kind.__module__}.{name}"
    tb = _users_frames(error.__traceback__)
    leaving = isinstance(error, SystemExit)
    blamed, named = _spoken_of(error)
    record = {
        "time": time.monotonic(),
        "exception": name,
        "message": _cut(_text(error), _LONGEST_MESSAGE),
        "traceback": "" if leaving and tb is None else _cut(_formatted(error, tb), _LONGEST_TRACEBACK),
        "blames": blamed,
        "code": code,
        "names": named,
    }
    _put(record_path(run_dir, rank), json.dumps(record), owner)


def _formatted(error: BaseException, tb: types.TracebackType | None) -> str:
    try:
        lines = traceback.format_exception(type(error), error, tb, chain=not isinstance(error, SystemExit))
    except Exception:  # noqa: BLE001 (an exception that cannot be formatted must still be recorded)
        lines = [*traceback.format_tb(tb), f"{type(error).__qualname__}: {_text(error)}\n"]
    return "".join(lines)


def _spoken_of(error: BaseException) -> tuple[int | None, list[int]]:
    """The rank that an exception, or one among its causes, came from, and all ranks that it was waiting for.

    Both are read from the fields of Phalanx's errors. A rank may be told of an error that another one had, and wait
    for nobody.
    """
    blamed, named = None, set()
    for link in _chain(error):
        kinds = {base.__name__ for base in type(link).__mro__ if base.__module__ == _ERRORS}
        if "PhalanxError" in kinds:
            peer = getattr(link, "peer", None)
            blamed = peer if isinstance(peer, int) else blamed
            missed = (peer,) if "PeerError" in kinds else ()
            spoken_of = (*missed, *getattr(link, "calls", ()), *getattr(link, "missing", ()))
            named |= {each for each in spoken_of if isinstance(each, int)}
    return blamed, sorted(named)


def _cut(text: str, longest: int) -> str:
    half = longest // 2
    if len(text) <= longest:
        return text
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"


def _put(path: str, text: str, owner: int) -> None:
    """Write a file that is there whole or not at all; a process forked from the rank writes none."""
    if os.getpid() != owner:
        return
    try:
        with open(path + ".part", "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(path + ".part", path)
    except OSError:
        pass  # a full disk must not hide the error itself; the launcher still sees the exit code


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<its text cannot be formatted>"


def run_script(path: str, args: list[str]) -> None:
    """Run a script, a folder or a zip file as `python PATH ARGS` does."""
    sys.argv = [path, *args]
    if pkgutil.get_importer(path) is not None:  # a folder or an archive with a __main__.py
        sys.path[0] = os.path.abspath(path)
        _new_main()
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # what `python FOLDER` itself calls
        return
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    full = os.path.abspath(path)
    main = _new_main()
    main.__dict__.update(
        __file__=full,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", full),
    )
    with io.open_code(full) as file:
        source = file.read()
    exec(compile(source, full, "exec", dont_inherit=True), main.__dict__)


def run_module(name: str, args: list[str]) -> None:
    """Run a module as `python -m NAME ARGS` does."""
    sys.argv = ["-m", *args]
    sys.path[0] = os.getcwd()
    _new_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` itself calls


def _new_main() -> types.ModuleType:
    """Put a fresh __main__ in place for good: the script's names must outlive its last line."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    sys.modules["__phalanx_bootstrap__"] = sys.modules["__main__"]
    sys.modules["__main__"] = main
    return main


def main() -> None:
    """Run the target that the launcher has put on the command line."""
    run_dir, rank, parent, mode, target, *args = sys.argv[1:]
    die_with(int(parent))
    enable_stacks(run_dir, int(rank))
    run = run_module if mode == "module" else run_script
    recorded(run_dir, int(rank), lambda: run(target, args))


if __name__ == "__main__":
    main()
