"""`Ranks`: a helper over torch.distributed for engines that run one process a rank.

Every collective that goes through it counts in the progress record, so that the harness can name the rank it
waits for. Data is moved as bytes: no backend rounds it, and every element type travels on every backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shardcheck import progress
from shardcheck.engine import Unsupported
from shardcheck.tensor import Tensor


class Ranks:
    """The processes of one job: this one's `rank`, their `count`, and the `device` where its tensors lie."""

    def __init__(self, device: str = "cpu", group: Any = None) -> None:
        """Ranks of a process group of torch.distributed that is already there (the default group if None)."""
        import torch.distributed as distributed

        self._distributed = distributed
        self._group = group
        self.device = device
        self.rank: int = distributed.get_rank(group)
        self.count: int = distributed.get_world_size(group)

    @staticmethod
    def join(backend: str | None = None) -> Ranks:
        """Joins the job that torchrun, mpirun or srun started; a process of its own is a job of one.

        `backend` is `gloo` or `nccl` (which is RCCL on ROCm); without one, `nccl` where there is a GPU for
        each rank of the host. A default group that exists already is taken as it is. `Unsupported` where
        torch has no such backend.
        """
        import torch
        import torch.distributed as distributed

        rank, count = progress.process_rank(), progress.process_count()
        if backend is None:
            backend = "nccl" if 0 < count <= torch.cuda.device_count() else "gloo"
        if not distributed.is_backend_available(backend):
            raise Unsupported(f"this torch has no backend {backend!r}")
        device = "cpu"
        if backend == "nccl":
            local = int(os.environ.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count())))
            torch.cuda.set_device(local)
            device = f"cuda:{local}"
        if not distributed.is_initialized():
            distributed.init_process_group(
                backend, init_method=_meeting_place(count), rank=rank, world_size=count
            )
        return Ranks(device)

    def require(self, ranks: int) -> None:
        """`Unsupported` unless the job has exactly `ranks` processes: call it in `open` with `tp`."""
        if ranks != self.count:
            raise Unsupported(f"the session has {ranks} ranks, but {self.count} processes were started")

    @contextmanager
    def entering(self, what: str) -> Iterator[None]:
        """Counts this rank up around a collective of the engine's own, such as `reduce_scatter`."""
        progress.enter(what, self.rank)
        yield

    def barrier(self) -> None:
        """Waits for all ranks."""
        with self.entering("barrier"):
            self._distributed.barrier(self._group)

    def all_gather(self, tensor: Any) -> Any:
        """`[ranks, …]` of every rank's torch tensor of one shape and dtype."""
        import torch

        mine = tensor.contiguous()
        flat = mine.reshape(-1).view(torch.uint8)
        pieces = [torch.empty_like(flat) for _ in range(self.count)]
        with self.entering("all_gather"):
            self._distributed.all_gather(pieces, flat, group=self._group)
        return torch.stack(pieces).view(mine.dtype).reshape(self.count, *mine.shape)

    def all_to_all(self, tensor: Any) -> Any:
        """`[ranks, …]`: entry `j` of the result is what rank `j` had as entry `rank` of its `[ranks, …]`."""
        import torch

        mine = tensor.contiguous()
        flat = mine.reshape(self.count, -1).view(torch.uint8)
        received = torch.empty_like(flat)
        with self.entering("all_to_all"):
            self._distributed.all_to_all_single(received, flat, group=self._group)
        return received.view(mine.dtype).reshape(mine.shape)

    def reduce_scatter(self, tensor: Any) -> Any:
        """Sum of entry `rank` of every rank's `[ranks, …]`, in the order and dtype of the backend."""
        import torch

        mine = tensor.contiguous()
        total = torch.empty_like(mine[0])
        with self.entering("reduce_scatter"):
            self._distributed.reduce_scatter_tensor(total.reshape(-1), mine.reshape(-1), group=self._group)
        return total

    def gather(self, value: Any) -> Tensor | None:
        """Per-rank results on a leading rank axis, on rank 0; None on every other rank.

        `value` is a numpy array, a torch tensor or a `shardcheck.Tensor`, of the same shape and dtype on
        every rank.
        """
        import torch

        mine = Tensor.of(value)
        flat = torch.from_numpy(np.frombuffer(bytearray(mine.to_bytes()), dtype=np.uint8)).to(self.device)
        pieces = [torch.empty_like(flat) for _ in range(self.count)]
        with self.entering("all_gather of results"):
            # a gather to one rank is not in every backend
            self._distributed.all_gather(pieces, flat, group=self._group)
        if self.rank != 0:
            return None
        content = torch.stack(pieces).cpu().numpy().reshape(-1)
        return Tensor(mine.dtype, content.view(mine.codes.dtype).reshape(self.count, *mine.shape))


def _meeting_place(count: int) -> str:
    """Where processes find each other: torchrun says it, other launchers get a file beside the payloads."""
    if "MASTER_ADDR" in os.environ:
        return "env://"
    folder = os.environ.get("SHARDCHECK_FOLDER")
    if count > 1 and folder is None:
        raise Unsupported("MASTER_ADDR is not set: start the ranks with torchrun, or say where they meet")
    if folder is None:
        return "tcp://127.0.0.1:0"
    return (Path(folder).resolve() / "torch-rendezvous").as_uri()
