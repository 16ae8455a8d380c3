"""Engines with one peculiarity each, for the tests of the adapter process."""

import ctypes
import os
import sys
import time

import numpy as np

import shardcheck
from shardcheck import Contract, Operation, progress


class EchoSession(shardcheck.Session):
    """Gives back what it gets, and does odd things on demand."""

    closed: list[int] = []

    def pack_lse(self, lse, **others):
        """The tensor as it is seen, its strides, and the sum of its values."""
        values = lse.numpy()
        return {
            "same": lse,
            "strides": np.array(lse.strides),
            "sum": values.astype(np.float64).sum()[None],
            **others,
        }

    def layout(self, seq_lens, query_start_loc, block_table):
        """Spoils its inputs."""
        seq_lens.codes[0] = 99
        block_table.numpy()[...] += 1
        return {}

    def read_cache(self):
        """Prints where the protocol must not be."""
        print("from print")
        os.write(1, b"from the descriptor\n")
        ctypes.CDLL(None).puts(b"from C")
        ctypes.CDLL(None).fflush(None)
        return {"key_cache": np.zeros((2, 1), np.float32)}

    def load_cache(self, key_cache):
        """More than a megabyte of outputs."""
        return {"twice": np.concatenate([key_cache.codes, key_cache.codes])}

    def decode(self, query, seq_lens, query_start_loc, block_table, w_uv=None):
        """Fails in the way that the first element of `seq_lens` names."""
        which = int(seq_lens.codes[0])
        failures = [
            lambda: 1 // 0,
            lambda: sys.exit(3),
            lambda: (_ for _ in ()).throw(shardcheck.Unsupported("no kernel for three rows")),
            lambda: (_ for _ in ()).throw(shardcheck.DeviceLost("the driver says no")),
            lambda: (_ for _ in ()).throw(shardcheck.TimedOut("gave rank 1 up", rank=1)),
            lambda: (_ for _ in ()).throw(
                RuntimeError("CUDA error: an illegal memory access was encountered")
            ),
            lambda: {"out": [1, 2]},
            lambda: 7,
        ]
        return failures[which]()

    def verify(self, query):
        """Says which mask it got; asks for fewer tensors than there are."""
        return {}

    def draft(self, query, seq_lens, query_start_loc, block_table, mask, w_uv=None):
        """Waits in a collective until told to go on by a file."""
        progress.enter("all_gather query", rank=0)
        progress.enter("all_gather query", rank=1)
        progress.enter("all_to_all partials", rank=1)
        while not os.path.exists(os.path.join(os.environ["SHARDCHECK_FOLDER"], "go")):
            time.sleep(0.005)
        return shardcheck.Reply({"out": np.zeros(2, np.float32)}, {"mask": mask, "graph": True, "chunks": 3})

    def close(self):
        """Leaves a trace."""
        print(f"session of {self.configuration.tp} ranks closed", file=sys.stderr, flush=True)


class Echo(shardcheck.Engine):
    """The engine of these sessions."""

    name, version, revision = "echo", "0.0", "abc"
    own_steps, replaced = ["nothing of its own"], ["everything"]
    files = [np, "tests/peer.py"]
    session_type = EchoSession

    def __init__(self, flavour: str = "plain", top_k: str = "1"):
        self.devices = [flavour, top_k]
        contract = Contract.f32(output="bf16")
        moves = ("layout", "pack_lse", "read_cache", "load_cache")
        self.operations = {name: Operation(contract=contract) for name in ("decode", "verify", "draft")}
        self.operations |= {name: Operation(absent=["units"] if name == "layout" else []) for name in moves}

    def open(self, configuration):
        """Refuses three ranks."""
        if configuration.tp == 3:
            raise shardcheck.Unsupported("three ranks are not a power of two")
        if configuration.tp == 5:
            raise RuntimeError("five is too much")
        return super().open(configuration)

    def close(self):
        """Leaves a trace."""
        print("engine closed", file=sys.stderr, flush=True)


class TwoGroupsSession(EchoSession):
    """Says which KV group a step is for."""

    def read_cache(self, group):
        """The number of the group and the block size that its configuration has."""
        of_group = [self.configuration, self.configuration.second_group][group]
        return {"key_cache": np.array([[group, of_group.block_size]], np.float32)}

    def load_cache(self, key_cache):
        """Does not ask for the group."""
        return {}


class TwoGroups(Echo):
    """Holds two KV groups."""

    second_group = True
    session_type = TwoGroupsSession


class Lacking(Echo):
    """Declares what its sessions can't do."""

    def __init__(self):
        super().__init__()
        self.operations["write_kv"] = Operation()


class Modest(Echo):
    """Declares less than its sessions can do."""

    def __init__(self):
        super().__init__()
        del self.operations["draft"]


class Elsewhere(Echo):
    """Needs another machine."""

    def __init__(self):
        raise shardcheck.Unsupported("there is no GPU")


class Broken(Echo):
    """Can't be made."""

    def __init__(self):
        raise RuntimeError("the library is missing")


class Nameless(shardcheck.Engine):
    """Has no name."""
