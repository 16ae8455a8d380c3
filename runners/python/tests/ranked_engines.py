"""Engines of one process a rank, for the tests of the control connection and of `Ranks`."""

import contextlib
import os
import time

import numpy as np

import shardcheck
from shardcheck import Operation, Tensor, progress
from shardcheck.adapters.collectives import VirtualExecutor
from shardcheck.adapters.launched import LaunchedExecutor
from shardcheck.ranks import Ranks


class SeveralSession(shardcheck.Session):
    """Does on each rank what `seq_lens[0]` says; no rank needs another."""

    def layout(self, seq_lens, query_start_loc, block_table):
        """0: well; 1, 2: rank 1 fails or refuses while rank 0 answers.

        3: rank 0 fails and rank 1 stays; 4: rank 1 fails and rank 0 stays.

        5: the process of rank 1 ends.
        """
        rank, what = progress.process_rank(), int(seq_lens.codes[0])
        for _ in range(rank + 1):
            progress.enter("all_gather of nothing")
        if what == 1 and rank == 1:
            raise RuntimeError("rank one is ill")
        if what == 2 and rank == 1:
            raise shardcheck.Unsupported("not on an odd rank")
        if (what, rank) == (3, 0):
            raise RuntimeError("rank zero is ill")
        if (what, rank) == (4, 1):
            raise RuntimeError("rank one is ill for good")
        if (what, rank) == (5, 1):
            os._exit(7)
        if what in (3, 4):
            time.sleep(120)
        with open(os.path.join(os.environ["SHARDCHECK_FOLDER"], f"seen-{rank}"), "a") as file:
            file.write(f"{seq_lens.codes.tolist()} {block_table.codes.sum()}\n")
        return {"local_lens": np.zeros((2, 1), np.int32)}


class Several(shardcheck.Engine):
    """Two processes that need no torch."""

    name, version, session_type = "several", "1", SeveralSession
    operations = {"layout": Operation()}


class TogetherSession(shardcheck.Session):
    """Goes through the collectives of `Ranks`."""

    def __init__(self, configuration, ranks):
        super().__init__(configuration)
        self.ranks = ranks

    def pack_lse(self, lse):
        """Every collective, gathered on rank 0."""
        rank, count = self.ranks.rank, self.ranks.count
        mine = lse.torch(self.ranks.device) + rank
        grid = (mine[None] * 10).repeat(count, 1) + 100 * mine.new_tensor(range(count))[:, None]
        self.ranks.barrier()
        outputs = {
            "gathered": self.ranks.all_gather(mine.bfloat16()),
            "exchanged": self.ranks.all_to_all(grid),
            "reduced": self.ranks.reduce_scatter(grid),
            "codes": Tensor.from_f32("e4m3fn", mine.cpu().numpy()),
            "nothing": np.zeros((0, 3), np.float32),
        }
        gathered = {name: self.ranks.gather(value) for name, value in outputs.items()}
        return {name: value for name, value in gathered.items() if value is not None}


class Together(shardcheck.Engine):
    """One process a rank over gloo."""

    name, version = "together", "1"
    operations = {"pack_lse": Operation()}

    def __init__(self, backend="gloo"):
        self.ranks = Ranks.join(backend)

    def open(self, configuration) -> TogetherSession:
        """A session of as many ranks as there are processes."""
        self.ranks.require(configuration.tp)
        return TogetherSession(configuration, self.ranks)


class Exchange:
    """A job that goes through every collective of a group."""

    def __init__(self, value):
        self.value = value

    def run(self, engine, group):
        """What this rank has of each collective, and the engine's word for it."""
        import torch

        scattered = group.reduce_scatter(self.value, dim=1)
        gathered_into = torch.empty(2 * self.value.shape[0], *self.value.shape[1:])
        group.all_gather_into_tensor(gathered_into, self.value)
        parts = [group.all_gather(self.value, dim=1), group.all_reduce(self.value), scattered, gathered_into]
        return torch.cat([part.flatten() for part in parts]) + engine.offset


class Plain:
    """What an executor needs of an engine."""

    offset = 0.5

    @staticmethod
    def watching():
        """Nothing is watched."""
        return contextlib.nullcontext()


class LaunchedSession(shardcheck.Session):
    """The exchange of two ranks, by whatever runs them."""

    def __init__(self, configuration, executor):
        super().__init__(configuration)
        self.executor = executor

    def pack_lse(self, lse):
        """Rank r has the given numbers and 10·r more; `hi` is what rank 0 ends with, `lo` what rank 1 does."""
        value = lse.torch("cpu").reshape(2, 2)
        results, entered = self.executor.run([Exchange(value), Exchange(value + 10)], 2)
        return shardcheck.Reply({"hi": results[0], "lo": results[1]}, {}, entered)


class Launched(shardcheck.Engine):
    """Ranks of `--ranks virtual|launched`."""

    name, version, counts_all_ranks = "launched", "1", True
    operations = {"pack_lse": Operation()}

    def __init__(self, ranks="launched"):
        virtual = ranks == "virtual"
        self.executor = VirtualExecutor(Plain()) if virtual else LaunchedExecutor(Plain, "gloo")

    def open(self, configuration) -> LaunchedSession:
        """A session of two ranks."""
        return LaunchedSession(configuration, self.executor)
