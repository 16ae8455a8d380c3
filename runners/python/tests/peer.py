"""A peer that plays the harness over a socket. It frames by itself, so that no mistake of the SDK's is made
on both sides.
"""

import contextlib
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from shardcheck import Tensor, safetensors

ROOT = Path(__file__).resolve().parent.parent
ANSWER_TIMEOUT_S = 60.0
TOKEN = "a-word-of-this-start"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]

CONFIGURATION = {
    "attention": {"kind": "mla", "kv_lora_rank": 4, "qk_rope_head_dim": 2, "v_head_dim": 3},
    "tp": 2,
    "dcp": 2,
    "heads_per_rank": 1,
    "interleave": 1,
    "block_size": 4,
    "blocks": 4,
    "kv_dtype": "bf16",
    "kv_scale": 1.0,
    "softmax_scale": 0.5,
    "comm_backend": "a2a",
    "lane_order": "lo_hi",
    "query_replication": False,
    "project_before_merge": False,
    "kernel_head_widths": [],
}


class Ended(Exception):
    """The adapter closed the connection."""


class Harness:
    """Listens, starts an adapter, and asks it."""

    def __init__(
        self, words: list[str], launcher: list[str] | None = None, environment: dict[str, str] | None = None
    ):
        self._temporary = tempfile.TemporaryDirectory(
            prefix="shardcheck-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
        )
        self.folder = Path(self._temporary.name) / "payloads"
        self.folder.mkdir()
        address = Path(self._temporary.name) / "harness.sock"
        self.progress_path = Path(self._temporary.name) / "progress"
        self.progress_path.write_bytes(
            struct.pack("<4sII", b"SCKP", 1, 1024).ljust(64, b"\0") + bytes(1024 * 64)
        )
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(address))
        self._listener.listen(1)
        self._listener.settimeout(ANSWER_TIMEOUT_S)
        self.log_path = Path(self._temporary.name) / "log"
        self._log = open(self.log_path, "wb")
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "SHARDCHECK_ADDRESS": f"unix:{address}",
            "SHARDCHECK_TOKEN": TOKEN,
            "SHARDCHECK_FOLDER": str(self.folder),
            "SHARDCHECK_PROGRESS": str(self.progress_path),
            **(environment or {}),
        }
        command = launcher or [sys.executable]
        self.process = subprocess.Popen(
            [*command, "-m", "shardcheck.adapter", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=ROOT,
            start_new_session=True,
        )
        self.connection: socket.socket | None = None
        self._id = 0

    def __enter__(self) -> "Harness":
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        self._listener.close()
        self._log.close()
        self._temporary.cleanup()

    def hello(self) -> dict:
        """Waits for the connection and for hello."""
        self.connection, _ = self._listener.accept()
        self.connection.settimeout(ANSWER_TIMEOUT_S)
        header, _ = self.receive()
        return header

    def start(self) -> dict:
        """Shakes hands; the result is hello."""
        hello = self.hello()
        self.send({"type": "welcome", "protocol": 1})
        return hello

    def ask(
        self, header: dict, tensors: dict[str, Tensor] | None = None, via_file: bool = False
    ) -> tuple[dict, dict[str, Tensor]]:
        """Asks a question and waits for its reply."""
        self._id += 1
        self.send({**header, "id": self._id}, tensors, via_file)
        reply, outputs = self.receive()
        assert reply["type"] == "reply" and reply["id"] == self._id, reply
        return reply, outputs

    def open(self, session: int = 1, **changes: object) -> dict:
        """Opens a session."""
        return self.ask({"type": "open", "session": session, "configuration": {**CONFIGURATION, **changes}})[
            0
        ]

    def step(
        self,
        kind: str,
        tensors: dict[str, Tensor] | None = None,
        session: int = 1,
        via_file: bool = False,
        **more,
    ):
        """Performs an operation by the name of its kind."""
        operation = {"operation": kind}
        if kind in ("decode", "verify", "draft"):
            operation = {"operation": "attend", "mask": "bidirectional" if kind == "draft" else "causal"}
        if kind == "context":
            operation = {
                "operation": "attend_context",
                "chunk_budget_tokens": more.pop("chunk_budget_tokens"),
            }
        if kind in ("pcp_layout", "attend_pcp", "select_pcp", "compress_pcp", "accept_drafts", "select_sparse", "attend_selected", "attend_sinks", "index_layers", "kda", "forward", "route", "moe"):
            operation = {"operation": kind, **more}
            more = {}
        header = {"type": "step", "session": session, "operation": operation, "kind": kind, **more}
        return self.ask(header, tensors, via_file)

    def send(self, header: dict, tensors: dict[str, Tensor] | None = None, via_file: bool = False) -> None:
        """Sends one frame."""
        image = safetensors.image(tensors) if tensors else b""
        if via_file:
            (self.folder / "question").write_bytes(image)
            header, image = {**header, "file": "question"}, b""
        text = json.dumps(header).encode()
        self.send_bytes(b"SCK1" + struct.pack("<IQ", len(text), len(image)) + text + image)

    def send_bytes(self, content: bytes) -> None:
        """Sends bytes as they are."""
        self.connection.sendall(content)

    def receive(self) -> tuple[dict, dict[str, Tensor]]:
        """The next frame; `Ended` when there is none."""
        head = self._exactly(16)
        magic, header_bytes, payload_bytes = head[:4], *struct.unpack("<IQ", head[4:])
        assert magic == b"SCK1", head
        header = json.loads(self._exactly(header_bytes))
        image = self._exactly(payload_bytes)
        if "file" in header:
            path = self.folder / header["file"]
            image = path.read_bytes()
            path.unlink()
        return header, safetensors.parse(memoryview(image)) if image else {}

    def hang_up(self) -> None:
        """Closes the connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def exit_code(self) -> int:
        """Waits for the process to end by itself."""
        return self.process.wait(ANSWER_TIMEOUT_S)

    def log(self) -> str:
        """What the process has printed."""
        return self.log_path.read_text(errors="replace")

    def record(self, rank: int) -> tuple[int, str]:
        """Count and name in the progress record of a rank."""
        with (
            open(self.progress_path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            start = 64 + 64 * rank
            (count,) = struct.unpack_from("<Q", content, start)
            return count, content[start + 8 : start + 64].rstrip(b"\0").decode()

    def wait_for_record(self, rank: int, count: int) -> str:
        """Waits until a rank has counted that far; what it is in."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while self.record(rank)[0] < count:
            assert time.monotonic() < deadline, f"rank {rank} stays at {self.record(rank)}"
            time.sleep(0.01)
        return self.record(rank)[1]

    def _exactly(self, count: int) -> bytes:
        content = b""
        while len(content) < count:
            piece = self.connection.recv(min(count - len(content), 1 << 20))
            if not piece:
                raise Ended
            content += piece
        return content


def i32(*values: int) -> Tensor:
    """A 32-bit integer tensor of one axis."""
    return Tensor("i32", np.array(values, np.int32))
