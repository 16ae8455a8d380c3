"""The layout of a batch as vLLM computes it: local lengths, row lengths, slots."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from shardcheck import Configuration, Unsupported
from shardcheck.adapters.collectives import VirtualGroup, VirtualRanks
from shardcheck.adapters.loader import parameters
from shardcheck.adapters.vllm.release import Release


class Layout:
    """Lengths and slots of one configuration, rank by rank. `member` is a rank's place in its group."""

    def __init__(self, release: Release, configuration: Configuration) -> None:
        self.release = release
        self.configuration = configuration
        self._ranks = VirtualRanks(configuration.dcp)

    def local_lens(self, seq_lens: np.ndarray, member: int) -> torch.Tensor:
        """Tokens of each request on a rank, i32 `[n]`."""
        c = self.configuration
        lens = torch.from_numpy(np.ascontiguousarray(seq_lens, dtype=np.int32))
        return self.release.local_lens(lens, c.dcp, member, c.interleave).to(torch.int32)

    def row_lens(self, seq_lens: np.ndarray, query_lens: np.ndarray, member: int) -> torch.Tensor:
        """Tokens that each causal row sees on a rank, i32 `[rows]`. The engine's function takes one number of
        rows for all requests."""
        c = self.configuration
        total = torch.from_numpy(np.ascontiguousarray(seq_lens, dtype=np.int32))
        count = self.release.verify_row_lens
        uniform = len(set(query_lens.tolist())) == 1
        groups = (
            [(total, int(query_lens[0]))]
            if uniform
            else [(total[i : i + 1], int(q)) for i, q in enumerate(query_lens)]
        )
        rows = [count(lens, rows, c.dcp, member, c.interleave) for lens, rows in groups if rows > 0]
        return torch.cat(rows).to(torch.int32) if rows else torch.zeros(0, dtype=torch.int32)

    def slots(
        self, table: np.ndarray, requests: np.ndarray, positions: np.ndarray, member: int
    ) -> np.ndarray:
        """Slot of each token on a rank, i64 `[N]`, −1 where not owned; tokens of request −1 are not shown to
        the engine."""
        order = np.argsort(requests, kind="stable")
        order = order[requests[order] >= 0]
        slots = np.full(len(requests), -1, dtype=np.int64)
        if len(order):
            slots[order] = self._mapped(table, requests[order], positions[order], member)
        return slots

    def _mapped(
        self, table: np.ndarray, requests: np.ndarray, positions: np.ndarray, member: int
    ) -> np.ndarray:
        """Slots of tokens that are sorted by request."""
        if self.release.runner == "v2":
            return self._mapped_by_runner(table, requests, positions, member)
        c, count, rows = self.configuration, len(requests), len(table)
        values = {
            "block_size": c.block_size,
            "kernel_block_size": c.block_size,
            "max_num_reqs": rows,
            "max_num_blocks_per_req": table.shape[1],
            "max_num_batched_tokens": count,
            "pin_memory": False,
            "device": torch.device(self.release.device),
            "cp_kv_cache_interleave_size": c.interleave,
        }
        wanted = parameters(self.release.block_table)
        self.release.groups.act(VirtualGroup(self._ranks, member))
        try:
            blocks = self.release.block_table(
                **{name: value for name, value in values.items() if name in wanted}
            )
        finally:
            self.release.groups.act(None)
        for row, ids in enumerate(table.tolist()):
            blocks.add_row(ids, row)
        blocks.commit_block_table(rows)
        if "query_start_loc" in inspect.signature(blocks.compute_slot_mapping).parameters:
            starts = np.searchsorted(requests, np.arange(rows + 1)).astype(np.int32)
            device = self.release.device
            blocks.compute_slot_mapping(
                rows, torch.from_numpy(starts).to(device), torch.from_numpy(positions).to(device)
            )
            return blocks.slot_mapping.gpu[:count].cpu().numpy().copy()
        blocks.compute_slot_mapping(requests, positions)
        return blocks.slot_mapping.np[:count].copy()

    def _mapped_by_runner(
        self, table: np.ndarray, requests: np.ndarray, positions: np.ndarray, member: int
    ) -> np.ndarray:
        """The same by the kernel of the newer runner, with one group of caches."""
        c, rows, device = self.configuration, len(table), self.release.device
        on_device = lambda array, dtype: torch.as_tensor(array, dtype=dtype, device=device)  # noqa: E731
        blocks = on_device(table, torch.int32)
        slots = torch.empty(1, len(requests), dtype=torch.int64, device=device)
        size, flag = on_device([c.block_size], torch.int32), on_device([True], torch.bool)
        values = {
            "max_num_tokens": len(requests),
            "idx_mapping": on_device(np.arange(rows), torch.int32),
            "query_start_loc": on_device(np.searchsorted(requests, np.arange(rows + 1)), torch.int32),
            "pos": on_device(positions, torch.int64),
            "block_table_ptrs": on_device([blocks.data_ptr()], torch.int64).view(torch.uint64),
            "block_table_strides": on_device([blocks.stride(0)], torch.int64),
            "block_sizes": size,
            "kernel_block_sizes": size,
            "slot_mapping_enabled": flag,
            "dcp_sharded": flag,
            "slot_mappings_ptr": slots,
            "slot_mappings_stride": slots.stride(0),
            "cp_rank": member,
            "CP_SIZE": c.dcp,
            "CP_INTERLEAVE": c.interleave,
            "PAD_ID": self.release.pad_slot,
            "TRITON_BLOCK_SIZE": 1024,
        }
        kernel = self.release.runner_slots
        if unknown := [name for name in kernel.arg_names if name not in values]:
            raise Unsupported(f"the slot kernel of this release takes {', '.join(unknown)} as well")
        kernel[(1, rows + 1)](**{name: values[name] for name in kernel.arg_names})
        return slots[0].cpu().numpy()


def check_pages(table: np.ndarray, lens: Any, configuration: Configuration) -> None:
    """Raises where a kernel would read a block that the cache doesn't have; `lens` are local lengths, a row
    of `table` each.

    The interpreter reads whatever lies there, or ends the process, where a device would report an illegal
    address.
    """
    for row, length in enumerate(lens.tolist()):
        entries = -(-length // configuration.block_size)
        if entries > table.shape[1]:
            raise RuntimeError(
                f"illegal address: entry {entries - 1} of row {row}, in a table of width {table.shape[1]}"
            )
        read = table[row, :entries]
        bad = (read < 0) | (read >= configuration.blocks)
        if bad.any():
            raise RuntimeError(
                f"illegal address: block {read[bad][0]} of {configuration.blocks}, row {row}, {length} tokens"
            )
