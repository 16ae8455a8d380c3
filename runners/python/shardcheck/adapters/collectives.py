"""Ranks of one group in one process: a thread each, of which one runs at a time, and collectives between
them.

Only the thread that holds the baton runs; it hands it on when it enters a collective. That makes the order of
events the same each time, needs no process to start, and is safe for engines whose interpreter keeps global
state. A collective is complete when every rank has entered it. Ranks that enter different ones, or end while
others wait, would hang on a real machine: here they get a `CollectiveMismatch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shardcheck import TimedOut


class CollectiveMismatch(TimedOut):
    """The ranks of a group did not enter the same collectives: on a real machine they would wait until
    somebody gives up."""


class _Aborted(BaseException):
    """Unwinds a rank after another one failed."""


class Job(Protocol):
    """What one rank does in a step."""

    def run(self, engine: Any, group: Any) -> Any:
        """The rank's result; `group` is its view of its group."""


class VirtualExecutor:
    """Runs the jobs of all ranks of a step, group after group, in this process."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def run(self, jobs: Sequence[Job], world: int) -> tuple[list[Any], list[int]]:
        """Results of `jobs`, one a rank, and the collectives that each entered; ranks `g·world …` are group
        `g`."""
        results: list[Any] = []
        entered: list[int] = []
        for first in range(0, len(jobs), world):
            ranks = VirtualRanks(world)
            results += ranks.run(
                lambda rank, at=first, ranks=ranks: jobs[at + rank].run(
                    self.engine, VirtualGroup(ranks, rank)
                )
            )
            entered += ranks.entered
        return results, entered

    def close(self) -> None:
        """Nothing to end."""


class VirtualRanks:
    """The ranks of one group. `run` calls a function once for each; `current` is the rank that runs."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.entered = [0] * world
        self._condition = threading.Condition()
        self._turn = 0
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._results: dict[int, Any] = {}
        self._finished: set[int] = set()
        self._meeting: set[int] = set()
        self._failure: BaseException | None = None
        self._local = threading.local()

    @property
    def current(self) -> int:
        """Rank of the calling thread."""
        return self._local.rank

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Results of `function(rank)` in rank order; raises what the first failing rank raised."""
        outcomes: list[Any] = [None] * self.world
        threads = [
            threading.Thread(target=self._rank, args=(rank, function, outcomes)) for rank in range(self.world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return outcomes

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Enters a collective with `value`; returns what all ranks entered it with, in rank order."""
        self.entered[self.current] += 1
        return self._wait(name, value)

    def meet(self, name: str, value: Any) -> list[Any]:
        """Waits until all ranks are here, or can't come because they are in a collective or have ended: no collective, and no failure.
        Returns what the ranks that met brought along, in rank order: all of them, or the calling one alone."""
        self._meeting.add(self.current)
        return self._wait(name, value)

    def _wait(self, name: str, value: Any) -> list[Any]:
        rank = self.current
        with self._condition:
            self._waiting[rank] = (name, value)
            self._resolve()
            self._pass_on()
            self._await(lambda: rank in self._results and self._turn == rank)
            return self._results.pop(rank)

    def _rank(self, rank: int, function: Callable[[int], Any], outcomes: list[Any]) -> None:
        self._local.rank = rank
        try:
            with self._condition:
                self._await(lambda: self._turn == rank)
            outcomes[rank] = function(rank)
        except _Aborted:
            return
        except BaseException as error:
            with self._condition:
                self._fail(error)
            return
        with self._condition:
            self._finished.add(rank)
            self._resolve()
            self._pass_on()

    def _await(self, ready: Callable[[], bool]) -> None:
        self._condition.wait_for(lambda: self._failure is not None or ready())
        if self._failure is not None:
            raise _Aborted

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._condition.notify_all()

    def _resolve(self) -> None:
        """Completes what everybody is in; lets go who meets nobody; names the ranks that would wait for ever."""
        if len(self._waiting) + len(self._finished) < self.world or not self._waiting:
            return
        names = {rank: name for rank, (name, _) in self._waiting.items()}
        apart = bool(self._finished) or len(set(names.values())) > 1
        if apart and self._meeting:
            for rank in self._meeting:
                self._results[rank] = [self._waiting.pop(rank)[1]]
            self._meeting.clear()
            return
        self._meeting.clear()
        if apart:
            where = [
                f"rank {rank} {'waits in ' + names[rank] if rank in names else 'has ended'}"
                for rank in range(self.world)
            ]
            self._fail(CollectiveMismatch("the ranks would wait for ever: " + ", ".join(where), min(names)))
            return
        values = [self._waiting[rank][1] for rank in range(self.world)]
        self._waiting.clear()
        self._results = {rank: values for rank in range(self.world)}

    def _pass_on(self) -> None:
        """Gives the baton to the next rank that can run."""
        for step in range(1, self.world + 1):
            rank = (self._turn + step) % self.world
            if rank not in self._finished and rank not in self._waiting:
                self._turn = rank
                break
        self._condition.notify_all()


class VirtualGroup:
    """One rank's view of a group, with the methods that engines call on their group coordinators. Tensors are
    torch tensors."""

    def __init__(self, ranks: VirtualRanks, rank: int) -> None:
        self.ranks = ranks
        self.rank_in_group = rank
        self.rank = rank
        self.world_size = ranks.world
        self.device_group = self
        self.unique_name = "virtual"

    def size(self) -> int:
        """Ranks of the group."""
        return self.world_size

    def all_gather(self, tensor: Any, dim: int = -1) -> Any:
        """Tensors of all ranks, joined along `dim` in rank order."""
        import torch

        if self.world_size == 1:
            return tensor
        return torch.cat(self.ranks.exchange("all_gather", tensor.clone()), dim=dim)

    def all_reduce(self, tensor: Any) -> Any:
        """Sum over ranks, added in rank order in the tensor's own type."""
        if self.world_size == 1:
            return tensor
        return _sum(self.ranks.exchange("all_reduce", tensor.clone()))

    def reduce_scatter(self, tensor: Any, dim: int = -1) -> Any:
        """This rank's part along `dim` of the sum over ranks, added in rank order in its own type."""
        if self.world_size == 1:
            return tensor
        parts = [
            part.chunk(self.world_size, dim=dim)[self.rank]
            for part in self.ranks.exchange("reduce_scatter", tensor.clone())
        ]
        return _sum(parts).contiguous()

    def reduce_scatter_along_dim(self, tensor: Any, dim: int = -1) -> Any:
        """The same, as another engine's coordinator names it."""
        return self.reduce_scatter(tensor, dim)

    def all_to_all_single(self, output: Any, sent: Any) -> None:
        """Equal parts of `sent`, one for each rank; `output` receives the parts meant for this rank, in rank
        order."""
        import torch

        parts = [
            part.chunk(self.world_size)[self.rank] for part in self.ranks.exchange("all_to_all", sent.clone())
        ]
        output.copy_(torch.cat(parts).view_as(output))

    def all_gather_into_tensor(self, output: Any, sent: Any) -> None:
        """Tensors of all ranks, joined along the first axis, written to `output`."""
        import torch

        output.copy_(torch.cat(self.ranks.exchange("all_gather_into_tensor", sent.clone())).view_as(output))


class VirtualDistributed:
    """Stands for the module `torch.distributed` where an engine calls its functions with a group: those of
    `VirtualGroup`."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def all_to_all_single(
        self, output: Any, input: Any, *_: Any, group: Any = None, async_op: bool = False, **__: Any
    ) -> Any:
        """As `torch.distributed.all_to_all_single`, with equal parts."""
        if not isinstance(group, VirtualGroup):
            return self._module.all_to_all_single(output, input, *_, group=group, async_op=async_op, **__)
        group.all_to_all_single(output, input)
        return _Done() if async_op else None

    def all_gather_into_tensor(
        self, output: Any, input: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        """As `torch.distributed.all_gather_into_tensor`."""
        if not isinstance(group, VirtualGroup):
            return self._module.all_gather_into_tensor(output, input, group=group, async_op=async_op)
        group.all_gather_into_tensor(output, input)
        return _Done() if async_op else None


class _Done:
    """The handle of a collective that is complete."""

    def wait(self) -> bool:
        """Nothing to wait for."""
        return True


def _sum(parts: list[Any]) -> Any:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
