"""Launches that all ranks of a group make at the same place, run as one: Triton's interpreter takes its time by operations, not by
elements, and ranks that are threads of one process would do the same operations one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardcheck.adapters.collectives import VirtualRanks


@dataclass
class Launch:
    """A rank's launch: its grid, its tensors and numbers by position, its compile-time parameters."""

    grid: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    done: bool = field(default=False, compare=False)

    def numbers(self) -> tuple[Any, ...]:
        """What two launches must agree in to be one: everything but where tensors lie."""
        own = tuple(a.dtype if hasattr(a, "data_ptr") else a for a in self.arguments)
        return self.grid, own, self.constants


class JointKernel:
    """Stands for an interpreted kernel whose launches on different ranks share nothing. `kernel[grid](…)` waits until every rank launches
    it. Ranks whose launches differ in their tensors alone are one block then: each tensor is the block `[ranks, 1, 1]` of its places,
    which broadcasts against rows `[n, 1]` and columns `[D]`. Other launches run one after the other, and a rank that launches while others
    don't runs by itself.

    A block has a power of two of ranks; the last one is there several times then, and stores the same again.
    """

    def __init__(self, kernel: Any, ranks: Callable[[], VirtualRanks | None]) -> None:
        self.kernel = kernel
        self.ranks = ranks

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *arguments: Any, **constants: Any) -> None:
        own, ranks = Launch(grid, arguments, constants), self.ranks()
        launches = [own] if ranks is None else ranks.meet("launch", own)
        first = launches[0]
        if first.done:
            return
        first.done = True
        if len(launches) > 1 and all(other.numbers() == first.numbers() for other in launches):
            together = [
                _places(each) if hasattr(each[0], "data_ptr") else each[0]
                for each in zip(*(launch.arguments for launch in launches), strict=True)
            ]
            self.kernel[grid](*together, **constants)
        else:
            for launch in launches:
                self.kernel[launch.grid](*launch.arguments, **launch.constants)


def _places(tensors: tuple[Any, ...]) -> Any:
    """Where the ranks' tensors lie, a block `[ranks, 1, 1]` of pointers."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.jit import mangle_type

    pointer = tl.str_to_ty(mangle_type(tensors[0]), None)
    count = 1 << (len(tensors) - 1).bit_length()
    places = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
    block = np.pad(places, (0, count - len(places)), mode="edge")[:, None, None]
    return tl.tensor(TensorHandle(block, pointer), tl.block_type(pointer, [count, 1, 1]))
