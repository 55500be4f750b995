"""One connection between two ranks: whole frames out, frames of all channels in.

A link has a second socket, the side, for descriptors: ancillary data must not meet the frame reader.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections import defaultdict, deque
from typing import Any, Protocol

HEADER = struct.Struct("<IB3xQQ")  # payload length, kind, channel, sequence
TICKET, COMMIT, DESCRIBE, PAYLOAD, FAILED, LEAVING = range(1, 7)
_READ_BYTES = 1 << 18

Frame = tuple[int, int, bytes]  # kind, sequence, payload


class Reader(Protocol):
    """What a link asks of the Switchboard that it belongs to."""

    alarm: bool

    def read(self, link: Link) -> None:
        """Read what has come on a link."""

    def wait_writable(self, sock: socket.socket) -> None:
        """Block until a socket takes more bytes, and read from every link meanwhile."""


class Link:
    """The connection to one other rank. `peer` is its rank in the world that the links span."""

    def __init__(self, peer: int, sock: socket.socket, side: socket.socket, same_host: bool, about: str) -> None:
        self.peer, self.sock, self.side, self.same_host, self.about = peer, sock, side, same_host, about
        self.boxes: defaultdict[int, deque[Frame]] = defaultdict(deque)
        self.lost: str | None = None  # why the connection ended without a word
        self.failed: dict[str, Any] | None = None  # what the peer's FAILED frame said
        self.left = False  # the peer said LEAVING
        self.descriptors: dict[bytes, int] = {}
        self.side_lock, self._reading, self.sending = threading.Lock(), threading.Lock(), threading.Lock()
        self._rest = b""  # the beginning of a frame whose header is not complete yet
        self._pieces: list[bytes] = []  # a frame whose payload is not complete yet
        self._missing = 0
        sock.setblocking(False)
        side.setblocking(True)

    def pump(self) -> int:
        """Read what has come without waiting; return how many frames. Another reader is left alone."""
        if not self._reading.acquire(False):
            return 0
        try:
            missing = self._missing
            data = self.sock.recv(missing if missing > 0 else _READ_BYTES)
            if data:
                if missing > 0:
                    return self._collect(data)
                return self._dispatch(self._rest + data if self._rest else data)
            self.lost = self.lost or "its process ended"
        except BlockingIOError:
            pass
        except OSError as error:
            self.lost = self.lost or (error.strerror or "the connection broke").lower()
        finally:
            self._reading.release()
        return 0

    def _dispatch(self, data: bytes) -> int:
        at, end, frames, header = 0, len(data), 0, HEADER.size
        while end - at >= header:
            length, kind, channel, sequence = HEADER.unpack_from(data, at)
            if end - at < header + length:
                break
            payload = data[at + header : at + header + length]
            at += header + length
            frames += 1
            if kind == FAILED:
                self.failed = json.loads(payload)
            elif kind == LEAVING:
                self.left = True
            else:
                self.boxes[channel].append((kind, sequence, payload))
        rest = data[at:] if at < end else b""
        if len(rest) >= header:
            # A large payload arrives in many reads: collect the pieces, join them once.
            self._missing = header + HEADER.unpack_from(rest)[0] - len(rest)
            self._pieces = [rest]
            rest = b""
        self._rest = rest
        return frames

    def _collect(self, data: bytes) -> int:
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return 0
        whole, self._pieces = b"".join(self._pieces), []
        return self._dispatch(whole)

    def send(self, data: bytes, board: Reader) -> None:
        """Write one frame whole. A broken connection is noted, and raised by whoever waits."""
        with self.sending:
            try:
                sent = self.sock.send(data)
                if sent == len(data):
                    return
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._broken(error, board)
                return
            self._send_rest(memoryview(data)[sent:], board)

    def _send_rest(self, rest: memoryview, board: Reader) -> None:
        while rest:
            board.wait_writable(self.sock)
            try:
                rest = rest[self.sock.send(rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self._broken(error, board)
                return

    def _broken(self, error: OSError, board: Reader) -> None:
        board.read(self)  # its last words may still be there
        self.lost = self.lost or (error.strerror or "the connection broke").lower()
        board.alarm = True

    def close(self) -> None:
        """Close both sockets (never shut down: a forked child shares the connection)."""
        self.sock.close()
        self.side.close()
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()
