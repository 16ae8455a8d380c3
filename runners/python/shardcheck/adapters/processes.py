"""Ranks as processes: a pool that stays up, joined by torch.distributed, each process with an engine of its
own.

What `VirtualExecutor` does in one process, `ProcessExecutor` does in as many as a group has ranks: over gloo
on the loopback device, or over NCCL (RCCL on ROCm) with a GPU for each. It is slower and needs more memory; it
is there to show that the simulated collectives of the one are those of the other.
"""

from __future__ import annotations

import datetime
import io
import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardcheck import Unsupported
from shardcheck.adapters.collectives import Job

_WAIT_S = 120.0


class RankFailed(RuntimeError):
    """A rank's process raised what can't be sent, or ended; the text holds its traceback."""


class ProcessExecutor:
    """Runs the jobs of all ranks of a step in processes. `make_engine` is called in each of them and must be
    picklable; on `cuda` rank `r` of a group has GPU `r` of this host."""

    def __init__(self, make_engine: Callable[[], Any], device: str = "cpu") -> None:
        self.make_engine = make_engine
        self.device = device
        self._pools: dict[int, _Pool] = {}

    def run(self, jobs: Sequence[Job], world: int) -> tuple[list[Any], list[int]]:
        """Results of `jobs`, one a rank, and the collectives that each entered; ranks `g·world …` are group
        `g`."""
        if world not in self._pools:
            _require_devices(self.device, world)
            self._pools[world] = _Pool(self.make_engine, self.device, world)
        answers: list[tuple[Any, int]] = []
        try:
            for first in range(0, len(jobs), world):
                answers += self._pools[world].run(jobs[first : first + world])
        except BaseException:
            # ranks that did not fail may wait in a collective: none of them is of use again
            self._pools.pop(world).close()
            raise
        return [answer[0] for answer in answers], [answer[1] for answer in answers]

    def close(self) -> None:
        """Ends all processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class _Pool:
    def __init__(self, make_engine: Callable[[], Any], device: str, world: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="shardcheck-ranks-")
        store = str(Path(self._folder.name) / "store")
        self._links, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, make_engine, device, rank, world, store), daemon=True
            )
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def run(self, jobs: Sequence[Job]) -> list[tuple[Any, int]]:
        for link, job in zip(self._links, jobs, strict=True):
            link.send_bytes(dumps(job))
        answers = []
        for rank in _as_they_answer(self._links):
            try:
                kind, value = pickle.loads(self._links[rank].recv_bytes())
            except EOFError:
                raise RankFailed(
                    f"the process of rank {rank} ended with code {self._processes[rank].exitcode}"
                ) from None
            if kind == "raised":
                raise value
            answers.append((rank, value))
        return [value for _, value in sorted(answers, key=lambda answer: answer[0])]

    def close(self) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.terminate()
                process.join()
        self._folder.cleanup()


def _as_they_answer(links: list[Any]) -> Any:
    """Ranks in the order in which they answer, so that the one that failed is heard while the others still
    wait for it."""
    left = dict(enumerate(links))
    while left:
        ready = multiprocessing.connection.wait(list(left.values()), timeout=_WAIT_S)
        if not ready:
            raise RankFailed(f"ranks {sorted(left)} have not answered for {_WAIT_S:.0f} s")
        for rank in [rank for rank, link in left.items() if link in ready]:
            del left[rank]
            yield rank


def _require_devices(device: str, world: int) -> None:
    if device == "cpu":
        return
    import torch

    if torch.cuda.device_count() < world:
        raise Unsupported(f"{world} ranks as processes need {world} GPUs, there are {torch.cuda.device_count()}")


def _serve(
    link: Any, make_engine: Callable[[], Any], device: str, rank: int, world: int, store: str
) -> None:
    """A rank's process: makes its engine, joins the group, and runs jobs until the link is closed."""
    backend = "gloo"
    if device != "cpu":
        import torch

        # before the engine is made: its kernels go to the GPU that is current
        torch.cuda.set_device(rank)
        backend = "nccl"
    engine = make_engine()
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=_WAIT_S)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout
    )
    while True:
        try:
            job = pickle.loads(link.recv_bytes())
        except (EOFError, OSError):
            break
        group = ProcessGroup(rank, world)
        try:
            with engine.watching():
                result = job.run(engine, group)
            answer = dumps(("done", (result, group.entered)))
        except Exception as error:
            answer = _raised(error)
        try:
            link.send_bytes(answer)
        except OSError:
            break  # the pool is gone, and nobody waits for this
    dist.destroy_process_group()


def _raised(error: Exception) -> bytes:
    """An exception as bytes: itself where it survives the way, else its traceback."""
    try:
        content = pickle.dumps(("raised", error))
        pickle.loads(content)
    except Exception:
        return pickle.dumps(("raised", RankFailed(traceback.format_exc())))
    return content


def dumps(value: Any) -> bytes:
    """A value as bytes, whose tensors on a GPU become tensors on the GPU of the process that reads them."""
    content = io.BytesIO()
    _Pickler(content).dump(value)
    return content.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        import torch

        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return NotImplemented
        # the whole storage, so that a view comes out as the same view
        storage = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
        place = (value.storage_offset(), tuple(value.shape), value.stride())
        return _on_this_gpu, (storage.cpu().numpy(), value.dtype, place)


def _on_this_gpu(content: Any, dtype: Any, place: tuple[int, tuple[int, ...], tuple[int, ...]]) -> Any:
    import torch

    storage = torch.from_numpy(content).cuda().untyped_storage()
    return torch.empty(0, dtype=dtype, device="cuda").set_(storage, *place)


class ProcessGroup:
    """One rank's view of the group of its process, with the methods that engines call on their group
    coordinators."""

    def __init__(self, rank: int, world: int, group: Any = None) -> None:
        """Of `group` of torch.distributed, which is everyone when not given."""
        import torch.distributed as dist

        self._dist = dist
        self._group = dist.group.WORLD if group is None else group
        self.rank = self.rank_in_group = rank
        self.world_size = world
        self.entered = 0

    @property
    def device_group(self) -> Any:
        """The process group, which an engine gives to `torch.distributed`: asking for it counts as entering a
        collective."""
        self.enter("torch.distributed")
        return self._group

    def enter(self, what: str) -> None:
        """Counts a collective that this rank enters."""
        self.entered += 1

    def size(self) -> int:
        """Ranks of the group."""
        return self.world_size

    def all_gather(self, tensor: Any, dim: int = -1) -> Any:
        """Tensors of all ranks, joined along `dim` in rank order."""
        import torch

        if self.world_size == 1:
            return tensor
        self.enter("all_gather")
        parts = [torch.empty_like(tensor.contiguous()) for _ in range(self.world_size)]
        self._dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)

    def all_reduce(self, tensor: Any) -> Any:
        """Sum over ranks."""
        if self.world_size == 1:
            return tensor
        self.enter("all_reduce")
        total = tensor.contiguous().clone()
        self._dist.all_reduce(total, group=self._group)
        return total

    def reduce_scatter(self, tensor: Any, dim: int = -1) -> Any:
        """This rank's part along `dim` of the sum over ranks."""
        if self.world_size == 1:
            return tensor
        self.enter("reduce_scatter")
        moved = tensor.movedim(dim, 0).contiguous()
        part = moved.new_empty(moved.shape[0] // self.world_size, *moved.shape[1:])
        self._dist.reduce_scatter_tensor(part, moved, group=self._group)
        return part.movedim(0, dim).contiguous()

    def all_gather_into_tensor(self, output: Any, sent: Any) -> None:
        """Tensors of all ranks, joined along the first axis, written to `output`."""
        self.enter("all_gather_into_tensor")
        self._dist.all_gather_into_tensor(output, sent.contiguous(), group=self._group)
