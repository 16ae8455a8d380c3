"""The progress record: where a rank is, for a harness that waits and wants to know for whom."""

from __future__ import annotations

import mmap
import os
import struct

MAGIC = b"SCKP"
VERSION = 1
HEAD_BYTES = 64
RECORD_BYTES = 64
RECORDS = 1024
_NAME_BYTES = RECORD_BYTES - 8
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def process_rank() -> int:
    """Rank of this process as its launcher (torchrun, mpirun, srun) says; 0 where there is none."""
    return _first_of(_RANK_VARIABLES, 0)


def process_count() -> int:
    """Processes that the launcher started; 1 where there is none."""
    return _first_of(_WORLD_VARIABLES, 1)


def _first_of(variables: tuple[str, ...], otherwise: int) -> int:
    for variable in variables:
        text = os.environ.get(variable, "")
        if text.isdigit():
            return int(text)
    return otherwise


class Progress:
    """The mapped file of `SHARDCHECK_PROGRESS`, and a count of this process for each rank."""

    def __init__(self, path: str | None) -> None:
        """Maps the file; without one, counts stay in this process. `ValueError` when it is another file."""
        self._map: mmap.mmap | None = None
        self._counts: dict[int, int] = {}
        self._records = RECORDS
        if path:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
            magic, version, self._records = struct.unpack_from("<4sII", self._map, 0)
            if (
                magic != MAGIC
                or version != VERSION
                or len(self._map) < HEAD_BYTES + self._records * RECORD_BYTES
            ):
                raise ValueError(f"{path} is no progress file of version {VERSION}")

    def enter(self, what: str, rank: int | None = None) -> None:
        """Counts `rank` (by default this process's) up, and writes what it enters, cut to 56 bytes."""
        rank = process_rank() if rank is None else rank
        self._counts[rank] = self._counts.get(rank, 0) + 1
        if self._map is None or not 0 <= rank < self._records:
            return
        offset = HEAD_BYTES + rank * RECORD_BYTES
        name = (
            what.encode("utf-8")[:_NAME_BYTES]
            .decode("utf-8", "ignore")
            .encode("utf-8")
            .ljust(_NAME_BYTES, b"\0")
        )
        self._map[offset + 8 : offset + RECORD_BYTES] = name
        # the count last: whoever sees it sees the name that belongs to it
        (before,) = struct.unpack_from("<Q", self._map, offset)
        struct.pack_into("<Q", self._map, offset, before + 1)

    def count(self, rank: int | None = None) -> int:
        """How often this process entered something on behalf of `rank`."""
        return self._counts.get(process_rank() if rank is None else rank, 0)


_progress: Progress | None = None


def progress() -> Progress:
    """The progress record of this process, mapped at the first call."""
    global _progress
    if _progress is None:
        _progress = Progress(os.environ.get("SHARDCHECK_PROGRESS"))
    return _progress


def enter(what: str, rank: int | None = None) -> None:
    """Counts a rank up: it enters something that it may wait in, such as a collective."""
    progress().enter(what, rank)
