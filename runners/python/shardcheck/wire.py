"""The wire of docs/protocol.md: frames over a local socket, large payloads through files in shared memory,
strided views.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardcheck import safetensors
from shardcheck.dtypes import DTYPES
from shardcheck.tensor import Tensor

MAGIC = b"SCK1"
MIN_HEADER_BYTES = 2
MAX_HEADER_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 64 << 20
INLINE_BYTES = 1 << 20
"""Payloads of at most this size go through the socket to a peer that does not say what it likes."""
MAX_INLINE_BYTES = 4 << 30
SOCKET_BYTES = 4 << 20
"""What the socket takes before a writer waits: a large tensor is then read while it is written."""

_HEAD = struct.Struct("<4sIQ")
_COMPARED_BYTES = 64 << 20
_LARGEST_ELEMENT_BYTES = 8


class ProtocolError(Exception):
    """The peer broke a rule of the protocol: the connection can't go on."""


class NoRoom(Exception):
    """Outputs that are too large for a frame and could not be written into a file."""


@dataclass
class Input:
    """One input: what the engine gets, and the flat bytes behind it, as they came and as they are seen."""

    tensor: Tensor
    came: np.ndarray
    seen: np.ndarray

    def has_changed(self) -> bool:
        """Whether the engine wrote into it, the gaps of a strided view included."""
        for start in range(0, self.came.size, _COMPARED_BYTES):
            piece = slice(start, start + _COMPARED_BYTES)
            if not np.array_equal(self.came[piece], self.seen[piece]):
                return True
        return False


@dataclass
class Message:
    """A frame that came in: its header, and its payload twice, as it came and as a copy to be spoilt."""

    header: dict[str, Any]
    came: memoryview
    copy: memoryview

    def inputs(self) -> dict[str, Input]:
        """The tensors of the payload, strided views made; `ProtocolError` when they don't fit the header."""
        if len(self.came) == 0:
            return {}
        try:
            came, seen = safetensors.parse(self.came), safetensors.parse(self.copy)
        except safetensors.FormatError as error:
            raise ProtocolError(f"payload: {error}") from None
        strided = self.header.get("strided") or {}
        found = {}
        for name, tensor in seen.items():
            flat = _flat_bytes(tensor)
            if name in strided and flat.ctypes.data % _LARGEST_ELEMENT_BYTES:
                # bytes have no alignment of their own, the elements of the view do
                flat = flat.copy()
            view = _strided(name, flat, strided[name]) if name in strided else tensor
            found[name] = Input(view, _flat_bytes(came[name]), flat)
        missing = ", ".join(name for name in strided if name not in found)
        if missing:
            raise ProtocolError(
                f"the header has strided views of tensors that are not in the payload: {missing}"
            )
        return found


class Connection:
    """One end of the socket. Not safe to share between threads."""

    _serial = itertools.count()

    def __init__(self, peer: socket.socket, folder: Path | None) -> None:
        """A connection over a connected socket; `folder` is where large payloads lie, if anywhere."""
        self._socket = peer
        self._folder = folder
        self.inline_bytes = INLINE_BYTES
        """Largest payload that the peer likes in a frame; a larger one goes through a file, if there can be one."""

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def receive(self) -> Message | None:
        """The next message, or None when the peer has closed the socket between two frames.

        `ProtocolError` names the rule that a frame broke. A file that a message names is gone from the folder
        afterwards.
        """
        head = bytearray(_HEAD.size)
        count = self._fill(memoryview(head))
        if count == 0:
            return None
        if count < len(head):
            raise ProtocolError("the connection ended within the head of a frame")
        magic, header_bytes, payload_bytes = _HEAD.unpack(head)
        if magic != MAGIC:
            raise ProtocolError(f"a frame starts with {bytes(magic)!r} instead of {MAGIC!r}")
        if not MIN_HEADER_BYTES <= header_bytes <= MAX_HEADER_BYTES:
            raise ProtocolError(
                f"a header of {header_bytes} bytes: it has {MIN_HEADER_BYTES} to {MAX_HEADER_BYTES}"
            )
        if payload_bytes > MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"a payload of {payload_bytes} bytes: it has at most {MAX_PAYLOAD_BYTES}")
        header = _parse_header(self._exactly(header_bytes, "header"))
        came = self._exactly(payload_bytes, "payload")
        if "file" not in header:
            return Message(header, memoryview(came).toreadonly(), memoryview(bytearray(came)))
        if payload_bytes:
            raise ProtocolError("a frame has both a file and a payload")
        return self._map(header)

    def send(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Sends a message; more than `inline_bytes` of tensors go through a file where there is a folder."""
        if not tensors:
            self._send_frame(header, 0, [])
            return
        size, pieces = safetensors.parts(tensors)
        self.send_image(header, size, pieces)

    def send_image(self, header: Mapping[str, Any], size: int, pieces: list[Any]) -> None:
        """Sends a message whose payload is `pieces`, `size` bytes in all; `NoRoom` when it has no way."""
        limit = max(MAX_PAYLOAD_BYTES, self.inline_bytes)
        if size > self.inline_bytes and self._folder is not None:
            try:
                name = self._write_file(self._folder, pieces)
            except OSError as error:
                # what fits into a frame goes without a file as well
                if size > limit:
                    raise NoRoom(
                        f"{size} bytes can't be written into {self._folder}: {error.strerror}"
                    ) from None
            else:
                self._send_frame({**header, "file": name}, 0, [])
                return
        if size > limit:
            raise NoRoom(f"{size} bytes are too large for a frame, and there is no SHARDCHECK_FOLDER")
        self._send_frame(header, size, pieces)

    def _send_frame(self, header: Mapping[str, Any], payload_bytes: int, pieces: list[Any]) -> None:
        text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode("utf-8")
        if len(text) > MAX_HEADER_BYTES:
            raise ProtocolError(f"a header of {len(text)} bytes: it has at most {MAX_HEADER_BYTES}")
        self._socket.sendall(_HEAD.pack(MAGIC, len(text), payload_bytes) + text)
        for piece in pieces:
            self._socket.sendall(piece)

    def _write_file(self, folder: Path, pieces: list[Any]) -> str:
        """Name of a new file that holds the pieces; nothing is left of it when that fails."""
        name = f"adapter-{os.getpid()}-{next(self._serial)}.safetensors"
        path = folder / name
        try:
            # written, not mapped: a full folder is an error here and would be a bus error there
            with open(path, "xb", buffering=0) as file:
                for piece in pieces:
                    rest = memoryview(piece)
                    while len(rest):
                        rest = rest[file.write(rest) :]
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return name

    def _map(self, header: dict[str, Any]) -> Message:
        name = header["file"]
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ProtocolError(f"{name!r} is no plain file name")
        if self._folder is None:
            raise ProtocolError(f"the message names file {name!r}, but there is no SHARDCHECK_FOLDER")
        path = self._folder / name
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    raise ProtocolError(f"file {name!r} is empty")
                came = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                # pages that the engine spoils are copied by the kernel, the others are shared
                copy = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            path.unlink()
        except OSError as error:
            raise ProtocolError(f"file {name!r} of a message: {error.strerror}") from None
        return Message(header, memoryview(came), memoryview(copy))

    def _exactly(self, count: int, what: str) -> bytearray:
        content = bytearray(count)
        if self._fill(memoryview(content)) < count:
            raise ProtocolError(f"the connection ended within the {what} of a frame")
        return content

    def _fill(self, buffer: memoryview) -> int:
        """Bytes that were read; fewer than asked only when the peer closed the socket."""
        filled = 0
        while filled < len(buffer):
            try:
                count = self._socket.recv_into(buffer[filled:])
            except ConnectionResetError:
                return filled
            if count == 0:
                return filled
            filled += count
        return filled


def connect(address: str, folder: Path | None) -> Connection:
    """Connects to `unix:PATH`. `ProtocolError` for another kind of address, `OSError` when nobody listens."""
    kind, _, path = address.partition(":")
    if kind != "unix" or not path:
        raise ProtocolError(f"address {address!r}: this version knows unix:PATH")
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(path)
    # a system that grants less is slower with large tensors, no more
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    return Connection(peer, folder)


def _parse_header(text: bytearray) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"))
    except ValueError as error:
        raise ProtocolError(f"a header is no JSON: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("type"), str):
        raise ProtocolError("a header is no JSON object with a `type`")
    return header


def _flat_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.codes.reshape(-1).view(np.uint8)


def _strided(name: str, flat: np.ndarray, view: Any) -> Tensor:
    """The strided view over flat bytes; every element has to lie inside."""
    try:
        dtype = DTYPES[view["dtype"]]
        shape, strides = [int(x) for x in view["shape"]], [int(x) for x in view["strides"]]
    except (KeyError, TypeError, ValueError):
        raise ProtocolError(f"strided view {name!r} needs dtype, shape and strides, not {view!r}") from None
    if len(shape) != len(strides) or min([*shape, *strides, 0]) < 0:
        raise ProtocolError(f"strided view {name!r}: shape {shape} and strides {strides} do not fit together")
    last = 0 if 0 in shape else 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides))
    if last * dtype.size_bytes > flat.size:
        raise ProtocolError(f"strided view {name!r} reaches {last * dtype.size_bytes} bytes of {flat.size}")
    elements = flat[: flat.size // dtype.size_bytes * dtype.size_bytes]
    byte_strides = [stride * dtype.size_bytes for stride in strides]
    codes = np.lib.stride_tricks.as_strided(elements.view(dtype.storage), shape, byte_strides)
    return Tensor(dtype.name, codes)
