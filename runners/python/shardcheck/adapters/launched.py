"""Ranks as the processes of a job that torchrun, mpirun or srun started, one a GPU where there are GPUs.

Every process is asked every question and holds a session of its own. Of a step it runs the part of its own rank, over gloo
or NCCL, and then gets what the others computed, so that all of them end the step with the same state.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from shardcheck import Unsupported, progress
from shardcheck.adapters.collectives import Job
from shardcheck.adapters.processes import ProcessGroup, dumps
from shardcheck.ranks import Ranks


class LaunchedExecutor:
    """Runs of each step the job of this process's rank. `make_engine` is called once the process has its GPU."""

    def __init__(self, make_engine: Callable[[], Any], backend: str) -> None:
        import torch.distributed as distributed

        self.ranks = Ranks.join(backend)
        self.engine = make_engine()
        self._distributed = distributed
        # results are told over the host: no engine's collective stands between two of these
        self._results = distributed.new_group(backend="gloo")
        self._groups: dict[int, list[Any]] = {}

    def require(self, ranks: int) -> None:
        """`Unsupported` where there are more ranks than processes; where there are fewer, the other processes look on."""
        if ranks > self.ranks.count:
            raise Unsupported(f"{ranks} ranks, but {self.ranks.count} processes were started")

    def run(self, jobs: Sequence[Job], world: int) -> tuple[list[Any], list[int]]:
        """Results of `jobs`, one a rank, and the collectives that each entered; ranks `g·world …` are group `g`."""
        rank, count = self.ranks.rank, self.ranks.count
        self.require(len(jobs))
        group = self._group_of(world)
        mine = None
        if rank < len(jobs):
            view = _CountedGroup(rank, world, group)
            with self.engine.watching():
                mine = (jobs[rank].run(self.engine, view), view.entered)
        told: list[Any] = [None] * count
        progress.enter("all_gather of results", rank)
        self._distributed.all_gather_object(told, dumps(mine), group=self._results)
        answers = [pickle.loads(content) for content in told[: len(jobs)]]
        return [answer[0] for answer in answers], [answer[1] for answer in answers]

    def _group_of(self, world: int) -> Any:
        """This process's group of `world` ranks. All processes make all groups, in one order, as torch asks for."""
        count = self.ranks.count
        if count % world:
            raise Unsupported(f"{count} processes are no groups of {world}")
        if world not in self._groups:
            starts = range(0, count, world)
            self._groups[world] = [
                self._distributed.new_group(list(range(start, start + world))) for start in starts
            ]
        return self._groups[world][self.ranks.rank // world]

    def close(self) -> None:
        """Leaves the job."""
        self._distributed.destroy_process_group()


class _CountedGroup(ProcessGroup):
    """A group whose every collective stands in the progress record, under the rank that enters it."""

    def __init__(self, rank: int, world: int, group: Any) -> None:
        super().__init__(rank % world, world, group)
        self._process = rank

    def enter(self, what: str) -> None:
        """Counts this rank up."""
        super().enter(what)
        progress.enter(what, self._process)
