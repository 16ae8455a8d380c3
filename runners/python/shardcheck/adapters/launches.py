"""Launches that all ranks of a group make at the same place, run as one: Triton's interpreter takes its time by operations, not by
elements, and ranks that are threads of one process would do the same operations one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

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
    it. Ranks whose launches differ in their tensors alone are one launch then, with programs of all ranks. Other launches run one after the
    other, and a rank that launches while others don't runs by itself.
    """

    def __init__(self, kernel: Any, ranks: Callable[[], VirtualRanks | None]) -> None:
        self.kernel = kernel
        self.ranks = ranks

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *arguments: Any, **constants: Any) -> None:
        own, ranks = Launch(grid, arguments, constants), self.ranks()
        launches = [own] if ranks is None else ranks.meet(f"launch of {self.kernel.__name__}", own)
        first = launches[0]
        if first.done:
            return
        first.done = True
        if len(launches) > 1 and all(other.numbers() == first.numbers() for other in launches):
            from shardcheck.adapters import lockstep

            together = [
                lockstep.of_ranks(each) if hasattr(each[0], "data_ptr") else each[0]
                for each in zip(*(launch.arguments for launch in launches), strict=True)
            ]
            self.kernel[grid](*together, **constants)
        else:
            for launch in launches:
                self.kernel[launch.grid](*launch.arguments, **launch.constants)


def join(module: Any, names: Iterable[str], ranks: Callable[[], VirtualRanks | None]) -> None:
    """Lets the ranks of a group launch kernels of a module as one; those that a release lacks are passed over."""
    for name in names:
        if hasattr(module, name):
            setattr(module, name, JointKernel(getattr(module, name), ranks))
