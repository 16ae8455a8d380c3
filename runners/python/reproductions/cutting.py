"""Takes functions of a release out of their file by name, whatever that file imports, and runs ranks without processes: torch, numpy and
Triton are enough for either, on a CPU, and numpy alone for functions that need no more."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

# before anything imports Triton
os.environ["TRITON_INTERPRET"] = "1"

HEAD = """from __future__ import annotations
from typing import Optional
import numpy as np
"""
HEADS = {"torch": "import torch\n", "triton": "import triton\nimport triton.language as tl\n"}


def cut(path: Path, *names: str, **scope: object) -> SimpleNamespace:
    """Functions, methods and classes of a file by name, in a module of their own that sees `scope` besides; those that it doesn't have are left out."""
    found = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names
    ]
    return taken(path, found, scope)


def whole(path: Path, **scope: object) -> SimpleNamespace:
    """All functions that a file defines at its outermost level, bare or as kernels of Triton, beside its constants that are plain values."""
    nodes = ast.parse(path.read_text()).body
    constants = {
        node.targets[0].id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    functions = [
        node
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and all(ast.unparse(mark).startswith("triton.") for mark in node.decorator_list)
    ]
    return taken(path, functions, constants | scope)


def taken(path: Path, found: list, scope: dict) -> SimpleNamespace:
    """What definitions of a file's syntax tree are, in a module that sees `scope` besides."""
    if importlib.util.find_spec("triton") is not None:
        round_as_devices_do()
    lines = path.read_text().splitlines()
    bodies = [HEAD, *(line for module, line in HEADS.items() if importlib.util.find_spec(module))]
    for node in found:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        bodies.append("\n".join(line[node.col_offset :] for line in lines[first : node.end_lineno]))
    # Triton reads the source of a kernel off its file
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write("\n\n".join(bodies) + "\n")
    spec = importlib.util.spec_from_file_location("cut", file.name)
    module = importlib.util.module_from_spec(spec)
    vars(module).update(scope)
    spec.loader.exec_module(module)
    return SimpleNamespace(**{node.name: getattr(module, node.name) for node in found})


def stand_in(name: str, **members: object) -> None:
    """A module of that name with those members and nothing else, for imports within functions."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    vars(sys.modules[name]).update(members)


@functools.cache
def round_as_devices_do() -> None:
    """Triton's interpreter makes bf16 of f32 by cutting bits off, every device by rounding to nearest even: from now on it does so too."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.cast_impl

    def cast(self: object, source: object, target: object) -> object:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return original(self, source, target)
        bits = np.asarray(source.data, np.float32).view(np.uint32)
        codes = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return TensorHandle(np.where(np.isnan(source.data), 0x7FC0, codes).astype(np.uint16), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast


class RankGroup:
    """A rank's group as engines ask of theirs: collectives of ranks that are threads of one process and compute by turns."""

    def __init__(self, world: int, rank: int, shared: SimpleNamespace) -> None:
        self.world_size, self.rank_in_group, self.shared, self.device_group = world, rank, shared, self

    def exchanged(self, value: object) -> list:
        """What each rank brings to its next collective."""
        shared = self.shared
        shared.brought[self.rank_in_group] = value
        shared.turn.release()
        shared.barrier.wait()
        values = list(shared.brought)
        shared.barrier.wait()
        shared.turn.acquire()
        return values

    def all_gather(self, tensor: object, dim: int = 0) -> object:
        """All ranks' parts behind each other."""
        import torch

        return torch.cat(self.exchanged(tensor), dim)

    def all_reduce(self, tensor: object) -> object:
        """The sum over ranks, in the tensor's own type."""
        first, *others = self.exchanged(tensor.clone())
        return sum(others, start=first)

    def reduce_scatter_along_dim(self, tensor: object, dim: int = 0) -> object:
        """The rank's own part of the sum over ranks."""
        return self.all_reduce(tensor).chunk(self.world_size, dim)[self.rank_in_group].contiguous()

    def reduce_scatter(self, tensor: object, dim: int = 0) -> object:
        """The same, as another engine's group names it."""
        return self.reduce_scatter_along_dim(tensor, dim)

    def all_to_all_single(self, output: object, tensor: object, group: object = None) -> None:
        """Part j of the first axis goes to rank j."""
        import torch

        parts = [
            sent.chunk(self.world_size, 0)[self.rank_in_group] for sent in self.exchanged(tensor.clone())
        ]
        output.copy_(torch.cat(parts, 0).view(output.shape))


def on_ranks(world: int, run: object) -> list:
    """What `run(group)` gives on each rank."""
    shared = SimpleNamespace(brought=[None] * world, barrier=threading.Barrier(world), turn=threading.Lock())
    results: list = [None] * world
    failures: list = []

    def of_rank(rank: int) -> None:
        with shared.turn:
            try:
                results[rank] = run(RankGroup(world, rank, shared))
            except BaseException as error:
                failures.append(error)
                shared.barrier.abort()

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
    return results
