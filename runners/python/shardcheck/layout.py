"""Integers of the interleaved KV layout: who owns a position, where it lies, how much a rank holds.

Formulas as published by ATOM (`dcp_ops.py`: owner, local index, local lengths) and vLLM (`cp_utils.py`:
`cp_local_slot`). All take numbers or numpy arrays. W is the number of ranks of a group (`dcp`), S the
interleave size, B the block size in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardcheck.configuration import Configuration


@dataclass(frozen=True)
class Layout:
    """Sizes of the layout of one decode-context-parallel group."""

    world: int
    interleave: int
    block: int

    @staticmethod
    def of(configuration: Configuration) -> Layout:
        """The layout of a configuration."""
        return Layout(configuration.dcp, configuration.interleave, configuration.block_size)

    @property
    def virtual_block(self) -> int:
        """Tokens of one entry of a block table: B·W."""
        return self.block * self.world

    def owner(self, position: Any) -> Any:
        """Rank within the group that stores a position: ⌊p / S⌋ mod W."""
        return position // self.interleave % self.world

    def local_index(self, position: Any) -> Any:
        """Index of a position among the tokens of its owner: ⌊p / (S·W)⌋·S + p mod S."""
        return position // (self.interleave * self.world) * self.interleave + position % self.interleave

    def local_length(self, length: Any, member: int) -> Any:
        """Tokens that rank `member` of the group stores of the first `length`."""
        rounds, rest = np.divmod(length, self.interleave * self.world)
        return rounds * self.interleave + np.clip(rest - member * self.interleave, 0, self.interleave)

    def positions(self, length: int, member: int) -> np.ndarray:
        """Positions below `length` that rank `member` stores, in the order in which they lie in its pages."""
        every = np.arange(length)
        return every[self.owner(every) == member]

    def table_entry(self, position: Any) -> Any:
        """Entry of the block table that a position lies in: ⌊p / (B·W)⌋."""
        return position // self.virtual_block

    def slot(self, position: Any, block: Any) -> Any:
        """Slot of a position on its owner, given its table entry's block: block·B + local index mod B."""
        return block * self.block + self.local_index(position) % self.block

    def blocks_needed(self, length: Any) -> Any:
        """Block-table entries of a request: what rank 0, the fullest, needs."""
        return -(-self.local_length(length, 0) // self.block)
