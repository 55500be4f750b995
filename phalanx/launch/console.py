"""The launcher's console: pipes from the ranks, their log files, and the launcher's own words.

Rank 0's streams are pseudo-terminals where the launcher's own are terminals, so that its progress bar
and colours work as if there were no launcher; all other streams are pipes.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import termios
import time
import tty
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.launch.output import Sink, Stream, Tail

_READ_SIZE = 1 << 16
_WINDOW = "HHHH"  # rows, columns and two sizes in pixels, as the terminal driver packs them


@dataclass(eq=False)
class Channel:
    """The launcher's end of one stream of a rank, and where its bytes go."""

    fd: int
    streams: Sequence[Stream]
    tail: Tail | None = None  # of standard error
    terminal: int | None = None  # the launcher's own terminal, if this end is a pseudo-terminal
    ends: tuple[int, ...] = ()  # the rank's end, until the rank has started


@dataclass
class Console:
    """All output of one launcher.

    `while_blocked` is called when the reader of the output is slow; it returns False to drop output.
    """

    while_blocked: Callable[[], bool]
    channels: list[Channel] = field(default_factory=list)
    _sinks: dict[int, Sink] = field(default_factory=dict)
    _logs: dict[Sink, str] = field(default_factory=dict)
    _tails: dict[int, Tail] = field(default_factory=dict)

    def open(self, rank: int, prefix: str, interactive: bool, log: str | None) -> tuple[Channel, Channel]:
        """Make the two streams of a rank; `interactive` asks for terminals where the launcher has them.

        Raises OSError if the log file cannot be written, or another launcher is writing it.
        """
        log_sink = None
        if log is not None:
            log_sink = Sink(_open_log(log), lambda: False)
            self._logs[log_sink] = log
        opened = []
        for fd in (1, 2):
            streams = [Stream(self._sink(fd), prefix)]
            if log_sink is not None:
                streams.append(Stream(log_sink))
            opened.append(_open_channel(streams, fd if interactive and os.isatty(fd) else None, len(prefix)))
        self._tails[rank] = opened[1].tail = Tail()
        self.channels += opened
        return opened[0], opened[1]

    def started(self) -> None:
        """The ranks have their ends; close ours of them, so that we see theirs close."""
        for channel in self.channels:
            for fd in channel.ends:
                os.close(fd)
            channel.ends = ()

    def read(self, channel: Channel) -> bool:
        """Pass on what a rank has written; False once it has closed its end."""
        try:
            data = os.read(channel.fd, _READ_SIZE)
        except OSError:
            data = b""  # how a pseudo-terminal says that its other end is closed
        if data:
            for stream in channel.streams:
                stream.feed(data, time.monotonic())
            if channel.tail is not None:
                channel.tail.feed(data)
            self._say_broken_logs()
        if not data or channel.streams[0].sink.broken and len(channel.streams) == 1:
            self.close(channel)  # a broken pipe is passed on: the rank's next write gets it too
            return False
        return True

    def close(self, channel: Channel) -> None:
        """Finish a stream and forget it."""
        for stream in channel.streams:
            stream.finish()
        os.close(channel.fd)
        self.channels.remove(channel)

    def preview_due(self) -> float | None:
        """When `preview` has something to do, or None."""
        times = [due for channel in self.channels for stream in channel.streams if (due := stream.preview_due())]
        return min(times, default=None)

    def preview(self) -> None:
        """Show lines that have begun and rest."""
        now = time.monotonic()
        for channel in self.channels:
            for stream in channel.streams:
                stream.preview(now)

    def drain(self, seconds: float) -> None:
        """Read what is still in the pipes of ranks that have ended, at most so long, and close them."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for channel in self.channels:
                selector.register(channel.fd, selectors.EVENT_READ, channel)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    selector.unregister(key.fd)
                    if self.read(key.data):
                        selector.register(key.fd, selectors.EVENT_READ, key.data)
        for channel in list(self.channels):
            self.close(channel)
        self._say_broken_logs()
        for sink in self._logs:
            os.close(sink.fd)
        self._logs.clear()

    def last_lines(self, rank: int) -> list[str]:
        """The last lines that a rank wrote to standard error; none where it writes there directly."""
        return self._tails[rank].lines() if rank in self._tails else []

    def resize(self) -> None:
        """The launcher's terminal has a new size; tell the ranks that have one of their own."""
        for channel in self.channels:
            if channel.terminal is not None:
                prefix = len(channel.streams[0].prefix)
                _copy_size(channel.terminal, channel.fd, prefix)

    def _say_broken_logs(self) -> None:
        for sink, log in self._logs.items():
            if sink.error is not None:
                self.say(f"phalanx: from here on nothing is written to {log}: {sink.error.strerror}\n")
                sink.error = None

    def say(self, text: str) -> None:
        """The launcher's own words, on standard error."""
        self._sink(2).tell(text)

    def _sink(self, fd: int) -> Sink:
        """The sink of one of our own streams; one for both where both are the same terminal or file."""
        if fd not in self._sinks:
            same = fd == 2 and os.path.sameopenfile(1, 2)
            self._sinks[fd] = self._sink(1) if same else Sink(fd, self.while_blocked)
        return self._sinks[fd]


def _open_log(path: str) -> int:
    """Open a log file and hold it, so that two launchers cannot write the same one."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
    except BlockingIOError as error:
        os.close(fd)
        raise OSError(error.errno, "another run is writing it (give this one a --log-dir of its own)", path) from None
    except OSError:
        pass  # a file system without locks, or no file at all (a terminal, /dev/null)
    return fd


def _open_channel(streams: Sequence[Stream], terminal: int | None, prefix: int) -> Channel:
    if terminal is None:
        ours, theirs = os.pipe()
    else:
        ours, theirs = os.openpty()
        tty.setraw(theirs, termios.TCSANOW)  # the real terminal behind us translates line ends
        _copy_size(terminal, ours, prefix)
    return Channel(ours, streams, None, terminal, (theirs,))


def _copy_size(source: int, target: int, prefix: int) -> None:
    rows, columns, *pixels = struct.unpack(_WINDOW, fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8)))
    fcntl.ioctl(target, termios.TIOCSWINSZ, struct.pack(_WINDOW, rows, max(columns - prefix, 1), *pixels))
