"""One question, many processes: rank 0 passes on what the harness asks, and makes one answer of all.

It has its own socket and needs no collective, so that it works under any launcher and leaves the engine's
process groups alone.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardcheck.desk import Answer, Desk
from shardcheck.wire import Connection, Message, ProtocolError

JOIN_TIMEOUT_S = 110.0
"""How long ranks wait for each other at the start: a little less than the harness waits for `hello`."""
GRACE_S = 5.0
"""How long rank 0 may go on after another rank has failed, before it answers for it and ends."""


def control_path(folder: Path | None, token: str) -> Path:
    """Where rank 0 listens for the other ranks."""
    name = f"ranks-{hashlib.sha256(token.encode()).hexdigest()[:16]}.sock"
    path = (folder or Path(tempfile.gettempdir())) / name
    # the address of a local socket has room for 107 bytes
    return path if len(os.fsencode(path)) < 104 else Path(tempfile.gettempdir()) / name


class Leader:
    """Rank 0's side: connections to all other ranks, by rank."""

    def __init__(self, path: Path, count: int) -> None:
        """Listens for `count` other ranks; call `gather_ranks` to wait for them."""
        self._path = path
        self._count = count
        self._peers: dict[int, Connection] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(count)

    def gather_ranks(self, folder: Path | None, token: str) -> None:
        """Waits until every rank has joined; `TimeoutError` says how many did not."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        try:
            while len(self._peers) < self._count:
                self._listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    peer, _ = self._listener.accept()
                except TimeoutError:
                    raise TimeoutError(f"{self._count - len(self._peers)} ranks did not join") from None
                peer.settimeout(None)
                connection = Connection(peer, folder)
                joined = connection.receive()
                if joined is None or joined.header.get("token") != token:
                    connection.close()
                    continue
                self._peers[int(joined.header["rank"])] = connection
        finally:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    def ask_all(self, message: Message, desk: Desk, send: Callable[[Answer], None]) -> Answer:
        """One answer of all ranks to a question, this process's own among them.

        Where a rank has failed and others stay in a collective, the process can't go on: `Stuck` holds the
        answer that is still to be given; if it is rank 0 that stays, the answer goes through `send` and the
        process ends.
        """
        header = {key: value for key, value in message.header.items() if key != "file"}
        for peer in self._peers.values():
            peer.send_image(header, len(message.came), [message.came] if len(message.came) else [])
        collection = Collection(self._peers)
        threading.Thread(target=_watch, args=(collection, send), daemon=True).start()
        own = desk.answer(message)
        collection.claim()
        others = collection.wait(None if own.is_ok else GRACE_S)
        answer = combine(own, others)
        if len(others) < len(self._peers) or collection.peer_ended:
            raise Stuck(answer)
        if not answer.is_ok and "session" in message.header:
            desk.end(message.header["session"])
            for peer in self._peers.values():
                peer.send({"type": "end_session", "session": message.header["session"]})
        return answer

    def close(self) -> None:
        """Lets the other ranks end."""
        for peer in self._peers.values():
            peer.close()


class Stuck(Exception):
    """Ranks wait for one that failed or is gone: `answer` is still to be given, then the process must end."""

    def __init__(self, answer: Answer) -> None:
        super().__init__("ranks wait for a rank that failed or is gone")
        self.answer = answer


class Collection:
    """The answers of all other ranks to one question, read in the background."""

    def __init__(self, peers: dict[int, Connection]) -> None:
        self._peers = peers
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._claimed = False
        self.peer_ended = False
        for rank, peer in peers.items():
            threading.Thread(target=self._read, args=(rank, peer), daemon=True).start()

    def claim(self) -> None:
        """Takes the right to answer the harness; never returns when the watcher has it, which ends all."""
        with self._changed:
            self._changed.wait_for(lambda: not self._claimed)
            self._claimed = True
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> dict[int, dict[str, Any]]:
        """Every rank's answer, or those that came in time."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._answers) == len(self._peers), timeout_s)
            return dict(self._answers)

    def has_failed_alone(self, grace_s: float) -> bool:
        """True when another rank fails and rank 0 stays away, false when it is back or all are well."""
        with self._changed:
            self._changed.wait_for(lambda: self._claimed or self._is_decided())
            if self._claimed or not self._has_failure():
                return False
            if self._changed.wait_for(lambda: self._claimed, grace_s):
                return False
            self._claimed = True
            return True

    def _has_failure(self) -> bool:
        return any(fields["status"] != "ok" for fields in self._answers.values())

    def _is_decided(self) -> bool:
        return len(self._answers) == len(self._peers) or self._has_failure()

    def _read(self, rank: int, peer: Connection) -> None:
        try:
            message = peer.receive()
            text = "the process ended"
        except (OSError, ProtocolError) as error:
            message, text = None, str(error)
        if message is None:
            self.peer_ended = True
        fields = {"status": "error", "class": "crash", "text": text} if message is None else message.header
        with self._changed:
            self._answers[rank] = fields
            self._changed.notify_all()


def combine(own: Answer, others: dict[int, dict[str, Any]]) -> Answer:
    """One answer of all: the first error by rank, else the first refusal, else rank 0's with all counts."""
    everyone = {0: own.fields, **others}
    for status in ("error", "unsupported"):
        for rank in sorted(everyone):
            fields = everyone[rank]
            if fields["status"] == status:
                return _of_rank(rank, fields)
    counts = [count for rank in sorted(everyone) for count in everyone[rank].get("collectives", [])]
    fields = {**own.fields, "collectives": counts} if "collectives" in own.fields else own.fields
    return Answer(fields, own.tensors)


def follow(desk: Desk, path: Path, folder: Path | None, token: str, rank: int) -> None:
    """The loop of a rank other than 0: joins, answers every question, and ends when rank 0 does."""
    connection = _join(path, folder)
    connection.send({"type": "join", "rank": rank, "token": token})
    while (message := connection.receive()) is not None:
        if message.header["type"] == "end_session":
            desk.end(message.header["session"])
            continue
        answer = desk.answer(message)
        connection.send({**answer.fields, "type": "reply"})


def _join(path: Path, folder: Path | None) -> Connection:
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.connect(str(path))
            return Connection(peer, folder)
        except OSError:
            peer.close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 does not listen at {path}") from None
            time.sleep(0.05)


def _of_rank(rank: int, fields: dict[str, Any]) -> Answer:
    kept: dict[str, Any] = {
        key: fields[key] for key in ("status", "class", "reason", "text", "rank") if key in fields
    }
    for key in ("reason", "text"):
        if key in kept and rank > 0:
            kept[key] = f"rank {rank}: {kept[key]}"
    if kept["status"] == "error" and kept.get("class") == "timeout":
        kept.setdefault("rank", rank)
    return Answer(kept)


def _watch(collection: Collection, send: Callable[[Answer], None]) -> None:
    """While rank 0 works: when another rank fails and rank 0 stays away, answers for it and ends."""
    if collection.has_failed_alone(GRACE_S):
        send(combine(Answer({"status": "ok"}), collection.wait(0)))
        print(
            "shardcheck: rank 0 waits for a rank that failed; the process ends", file=sys.stderr, flush=True
        )
        os._exit(1)
