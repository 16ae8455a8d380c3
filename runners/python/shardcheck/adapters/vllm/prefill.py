"""Prefill context parallelism as vLLM's newer model runner does it: a manager on each rank that rewrites the batch."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shardcheck import Unsupported
from shardcheck.adapters.loader import parameters
from shardcheck.adapters.vllm.release import Release
from shardcheck.adapters.vllm.surroundings import GraphMode


class PrefillLayout:
    """Shares one batch out over `world` ranks."""

    def __init__(self, release: Release, world: int, strategy: str, decodes: str, padded_rows: int) -> None:
        manager = release.prefill_manager
        if world == 1:
            raise Unsupported("the engine makes no manager where there is one rank")
        if strategy not in ("head_tail", "head_tail_or_whole"):
            raise Unsupported(f"the engine has no strategy {strategy}: it takes chunks from both ends")
        if strategy == "head_tail_or_whole" and not hasattr(manager, "replicated_requests"):
            raise Unsupported("this release cuts every prompt, however short")
        if decodes == "owned" and "shard_decode_requests" not in parameters(manager):
            raise Unsupported("this release has every decode on every rank")
        self.release, self.world, self.padded_rows = release, world, padded_rows
        self._options = {
            "shard_decode_requests": decodes == "owned",
            "dcp_world_size": world if strategy == "head_tail_or_whole" else 1,
        }
        taken = parameters(manager.partition_batch)
        if padded_rows and not taken & {"batch_desc", "padded_num_tokens"}:
            raise Unsupported("this release pads to the fullest rank alone")

    def share_out(
        self, starts: np.ndarray, computed: np.ndarray, prefills: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Outputs of the operation, each rank's by its own manager."""
        ranks = [self._of_rank(rank, starts, computed, prefills) for rank in range(self.world)]
        return {name: np.stack([found[name] for found in ranks]) for name in ranks[0]}

    def _of_rank(
        self, rank: int, starts: np.ndarray, computed: np.ndarray, prefills: np.ndarray
    ) -> dict[str, Any]:
        manager = self._manager(rank, len(computed), int(starts[-1]))
        batch = self._batch(starts, computed, prefills)
        try:
            local = manager.partition_batch(batch, **self._graph())
        except NotImplementedError as refused:
            raise Unsupported(str(refused)) from None
        gathered = manager._padded_gather_idx.cpu().numpy().reshape(self.world, -1)
        padding = local.is_padding.cpu().numpy()
        bounds = np.zeros(len(padding), np.int32)
        firsts, lens = local.query_start_loc.cpu().numpy(), local.seq_lens.cpu().numpy()
        for segment in range(local.num_reqs):
            first, end = firsts[segment], firsts[segment + 1]
            bounds[first:end] = lens[segment] - np.arange(end - first - 1, -1, -1)
        return {
            "rows": np.where(padding, -1, gathered[rank]),
            "positions": local.positions.cpu().numpy().copy(),
            "row_lens": bounds,
            "restore": manager._hidden_restore_idx.cpu().numpy(),
            "kv_writer": manager._gathered_kv_write_mask.cpu().numpy().astype(np.uint8),
        }

    def _manager(self, rank: int, requests: int, rows: int) -> Any:
        device = torch.device(self.release.device)
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=device)  # noqa: E731
        states = SimpleNamespace(
            last_sampled_tokens=zeros(requests, 1),
            prefill_len=SimpleNamespace(gpu=zeros(requests).to(torch.int32)),
            draft_tokens=zeros(requests, 1),
        )
        values = {
            "pcp_world_size": self.world,
            "pcp_rank": rank,
            "device": device,
            "req_states": states,
            # a rank without a row has one empty request
            "max_num_reqs": max(requests, 1),
            "max_num_tokens": max(rows, self.padded_rows, 1),
            **self._options,
        }
        taken = parameters(self.release.prefill_manager)
        return self.release.prefill_manager(
            **{name: value for name, value in values.items() if name in taken}
        )

    def _graph(self) -> dict[str, Any]:
        """What tells the manager of a graph, in the words of the release."""
        taken = parameters(self.release.prefill_manager.partition_batch)
        if "batch_desc" in taken:
            mode = GraphMode.PIECEWISE if self.padded_rows else GraphMode.NONE
            return {"batch_desc": SimpleNamespace(cg_mode=mode, num_tokens=self.padded_rows, num_reqs=None)}
        return {"padded_num_tokens": self.padded_rows} if self.padded_rows else {}

    def _batch(self, starts: np.ndarray, computed: np.ndarray, prefills: np.ndarray) -> Any:
        """The batch as the runner has it before the split; what the manager doesn't read is `None`."""
        device, count, rows = torch.device(self.release.device), len(computed), int(starts[-1])
        on_device = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)  # noqa: E731
        query_lens = np.diff(starts).astype(np.int32)
        of_row = np.repeat(np.arange(count), query_lens)
        # as many as the graph has, where that is more
        padded = max(rows, self.padded_rows)
        positions = np.zeros(padded, np.int64)
        positions[:rows] = np.arange(rows) - starts[of_row] + computed[of_row]
        seq_lens = (computed + query_lens).astype(np.int32)
        prompt_lens = np.where(prefills, seq_lens, computed).astype(np.int32)
        numbers = np.arange(count, dtype=np.int32)
        drafts = np.where(prefills, 0, np.maximum(query_lens - 1, 0))
        values = {
            "req_ids": [str(request) for request in range(count)],
            "num_reqs": count,
            "num_reqs_after_padding": count,
            "idx_mapping": on_device(numbers),
            "idx_mapping_np": numbers,
            "expanded_idx_mapping": on_device(numbers),
            "expanded_local_pos": on_device(np.zeros(count, np.int32)),
            "num_scheduled_tokens": query_lens,
            "num_tokens": rows,
            "num_tokens_after_padding": padded,
            "num_draft_tokens": int(drafts.sum()),
            "num_draft_tokens_per_req": drafts if drafts.any() else None,
            "query_start_loc": on_device(starts.astype(np.int32)),
            "query_start_loc_np": starts.astype(np.int32),
            "seq_lens": on_device(seq_lens),
            "seq_lens_cpu_upper_bound": torch.from_numpy(seq_lens),
            "num_computed_tokens_np": computed.astype(np.int32),
            "prefill_len_np": prompt_lens,
            "num_computed_prefill_tokens_np": np.minimum(computed, prompt_lens).astype(np.int32),
            "is_prefilling_np": prefills.astype(bool),
            "has_prefill": bool(prefills.any()),
            "input_ids": on_device(np.arange(padded, dtype=np.int32)),
            "positions": on_device(positions),
            "is_padding": on_device(np.arange(padded) >= rows),
        }
        fields = {field.name for field in dataclasses.fields(self.release.input_batch)}
        return self.release.input_batch(**{name: values.get(name) for name in fields})
