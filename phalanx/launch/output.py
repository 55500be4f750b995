"""The output of several ranks on one console: whole lines, prefixed, none cut or mixed.

A complete line goes out at once, in one piece. A line that is not complete yet, a prompt or a
progress bar, is shown after a short rest as a preview; the stream then owns the console's open line. When
another stream has a complete line meanwhile, a terminal gets the preview cleared, the line written
and the preview drawn again below it; a file or pipe, where nothing can be cleared, gets the preview
ended, and the previewed line is repeated in full once it is complete. Thus every line is somewhere
whole. What comes after a carriage return replaces what stood before it, so only the last such piece
is kept.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable

_PREVIEW_AFTER = 0.03  # long enough for the two writes of one print() to meet
_PREVIEW_PLAIN_AFTER = 0.5  # to a file, where a preview cannot be taken back
_TAKE_OVER_AFTER = 0.5  # an open line that rested so long may be ended for another one's preview
_PREVIEW_LIMIT = 4096
_LINE_LIMIT = 16 << 20
_TAIL_BYTES = 4096
_TAIL_LINES = 12
_WRITE_SIZE = 4096  # what a pipe that select calls writable takes without blocking


class Sink:
    """One place that output goes to: a terminal, file or pipe of the launcher.

    `while_blocked` is called when the reader is slow; it returns False to drop the output.
    """

    def __init__(self, fd: int, while_blocked: Callable[[], bool]) -> None:
        self.fd = fd
        self.terminal = os.isatty(fd)
        self.broken = False
        self.error: OSError | None = None  # what broke it
        self.owner: Stream | None = None
        self._while_blocked = while_blocked

    def write(self, data: bytes) -> None:
        """Write everything, however slow the reader; nothing once the reader has gone."""
        rest = memoryview(data)
        while rest and not self.broken:
            if not select.select([], [self.fd], [], 0.1)[1]:
                if not self._while_blocked():
                    return
                continue
            try:
                rest = rest[os.write(self.fd, rest[:_WRITE_SIZE]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self.broken, self.error = True, error

    def tell(self, text: str) -> None:
        """Write words of the launcher's own, on lines of their own."""
        self.close_line()
        self.write(text.encode(errors="backslashreplace"))

    def close_line(self) -> None:
        """End an open preview, so that the launcher's own words begin on a line of their own."""
        if self.owner is not None:
            self.write(b"\n")
            self.owner.shown = 0
            self.owner = None


class Tail:
    """The last lines of a rank's standard error, for a report on one that ended without an exception."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, data: bytes) -> None:
        """Take output as it comes."""
        self._kept += data
        if len(self._kept) > 2 * _TAIL_BYTES:
            del self._kept[:-_TAIL_BYTES]

    def lines(self) -> list[str]:
        """The last lines as they would be read; without empty ones and what was overwritten."""
        text = bytes(self._kept[-_TAIL_BYTES:]).decode(errors="backslashreplace")
        seen = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
        return [line for line in seen if line][-_TAIL_LINES:]


class Stream:
    """One rank's standard output or error on its way to a sink.

    `pending` is the line so far; its first `shown` bytes are on the console, if this stream owns the
    open line.
    """

    def __init__(self, sink: Sink, prefix: str = "") -> None:
        self.sink = sink
        self.prefix = prefix.encode()
        self._same = self.prefix.strip().replace(b" ", b"") + b":"
        self.pending = bytearray()
        self.shown = 0
        self._previewed = 0  # of `pending`, on the console now or before another line took its place
        self._touched = 0.0

    def feed(self, data: bytes, now: float) -> None:
        """Take output of the rank as it comes."""
        self._touched = now
        end = data.rfind(b"\n") + 1
        if end:
            self._complete(bytes(self.pending) + data[:end])
            self.pending = bytearray()
        self.pending += data[end:]
        if len(self.pending) > _PREVIEW_LIMIT and b"\r" in self.pending:
            self._forget_overwritten()
        if len(self.pending) > _LINE_LIMIT:
            self.finish()

    def finish(self) -> None:
        """The stream has ended: what is left is a line without its end."""
        if self.pending:
            self._complete(bytes(self.pending) + b"\n")
            self.pending = bytearray()

    def preview_due(self) -> float | None:
        """When `preview` has something to do, or None."""
        if len(self.pending) <= self._previewed or (len(self.pending) > _PREVIEW_LIMIT and b"\r" not in self.pending):
            return None
        owner = self.sink.owner
        if owner is not None and owner is not self:
            return max(self._touched + _PREVIEW_AFTER, owner._touched + _TAKE_OVER_AFTER)
        quick = self.sink.terminal or self.shown > 0 or b"\r" in self.pending
        return self._touched + (_PREVIEW_AFTER if quick else _PREVIEW_PLAIN_AFTER)

    def preview(self, now: float) -> None:
        """Show the line so far, if it has rested long enough."""
        due = self.preview_due()
        if due is None or now < due:
            return
        if self.sink.owner is self:
            self.sink.write(self._marked(bytes(self.pending[self.shown :])))
        else:
            self._clear_owner()
            self.sink.write(self._fresh(bytes(self.pending)))
            self.sink.owner = self
        self.shown = self._previewed = len(self.pending)
        self._forget_overwritten()

    def _complete(self, lines: bytes) -> None:
        """Write complete lines; the first of them may be on the console in part."""
        other = self.sink.owner
        first, *rest = [line + b"\n" for line in lines[:-1].split(b"\n")]
        if other is self:
            other = None
            first = self._marked(first[self.shown :])
        else:
            self._clear_owner()
            first = self._fresh(first)
        self.shown = self._previewed = 0
        self.sink.owner = None
        self.sink.write(b"".join([first, *(self._fresh(line) for line in rest)]))
        if other is not None and self.sink.terminal:
            self.sink.write(other._fresh(other._last_piece()))
            other.shown = other._previewed = len(other.pending)
            self.sink.owner = other

    def _clear_owner(self) -> None:
        """Take another stream's preview off the console, or end it where that cannot be."""
        owner = self.sink.owner
        if owner is None:
            return
        self.sink.write(b"\r\x1b[K" if self.sink.terminal else b"\n")
        owner.shown = 0
        self.sink.owner = None

    def _fresh(self, piece: bytes) -> bytes:
        """What to write for a piece that begins a line of the console."""
        if not self.prefix:
            return piece
        if piece.startswith(b"\r") and not piece.startswith(b"\r\n"):
            piece = piece[1:]
        if piece.startswith(self._same):  # torch's mark, [rank1]: for [rank 1]
            piece = piece[len(self._same) :].removeprefix(b" ")
        return self.prefix + self._marked(piece)

    def _marked(self, piece: bytes) -> bytes:
        """Repeat the prefix after each carriage return, which goes back to where the prefix stands."""
        if not self.prefix or b"\r" not in piece:
            return piece
        ending = b"\r\n" if piece.endswith(b"\r\n") else b""
        body = piece[: len(piece) - len(ending)]
        return body.replace(b"\r", b"\r" + self.prefix) + ending

    def _last_piece(self) -> bytes:
        return bytes(self.pending).rstrip(b"\r").rpartition(b"\r")[2]

    def _forget_overwritten(self) -> None:
        """Drop what a carriage return has overwritten: a bar that runs for days must not grow."""
        start = self.pending.rstrip(b"\r").rfind(b"\r")
        if start > 0:
            del self.pending[:start]
            self.shown = max(0, self.shown - start)
            self._previewed = max(0, self._previewed - start)
