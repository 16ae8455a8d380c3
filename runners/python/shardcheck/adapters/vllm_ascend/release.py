"""What a release of vLLM-Ascend has: the functions that an operation runs, found by name and signature, never by version."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardcheck.adapters import interpreter
from shardcheck.adapters.collectives import VirtualDistributed
from shardcheck.adapters.launches import join
from shardcheck.adapters.loader import Stub, parameters
from shardcheck.adapters.vllm_ascend import surroundings
from shardcheck.adapters.vllm_ascend.surroundings import Groups, NpuTorch

# Tokens of a batch at most, and of a request: sizes of the engine's buffers.
MAX_TOKENS = 1 << 14


class Release:
    """The engine's functions. `None` where a release lacks one.

    `table` is `BlockTable`, `manager` is `PCPManager` (0.23.0) or `DCPManager`, `fused` is `sfa_dcp_a2a_fused_combine` or the later
    `dcp_a2a_fused_combine` with its halves `pack` and `combine`, `update` is `_update_out_and_lse`, `context` the class of grouped attention with `_update_global_context_output`, `remap` the method
    `_remap_sparse_indices` of sparse attention.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups = Groups()
        self._seen = threading.local()
        triton = interpreter.prepare("cpu")
        self.package = surroundings.package(folder, self.groups, triton, self._update)
        self.package.install()
        first = self.package.first
        self.table = first(surroundings.TABLE, "BlockTable")
        self.update = first(surroundings.COMMON, "_update_out_and_lse")
        self.process = first(surroundings.COMMON, "_process_attn_out_lse")
        self.weigh = first(surroundings.COMMON, "_npu_attention_update")
        self.manager = first(surroundings.MANAGER, "DCPManager") or first(surroundings.MANAGER, "PCPManager")
        self.fused = first(surroundings.FUSED, "sfa_dcp_a2a_fused_combine") or first(
            surroundings.FUSED, "dcp_a2a_fused_combine"
        )
        self.pack = first(surroundings.FUSED, "pack_dcp_output_lse")
        self.combine = first(surroundings.FUSED, "fused_dcp_lse_combine")
        self.context = self._class_with(surroundings.GROUPED[0], "_update_global_context_output")
        sparse = self._class_with(surroundings.SPARSE[0], "_remap_sparse_indices")
        self.remap = None if sparse is None else sparse._remap_sparse_indices
        for name in (*surroundings.COMMON, *surroundings.GROUPED, *surroundings.FUSED):
            module = self.package.load(name)
            if module is not None:
                module.dist = VirtualDistributed(torch.distributed)
                if name in surroundings.FUSED:
                    self._run_fused_at_once(module)

    def _run_fused_at_once(self, module: Any) -> None:
        """Puts host memory, blocks of rows and joint launches into a file of the fused exchange."""
        module.torch, module.range = NpuTorch(), interpreter.rows_at_once
        join(module, surroundings.FUSED_KERNELS, self.groups.ranks)

    def _class_with(self, module: str, method: str) -> Any:
        loaded = self.package.load(module)
        found = [
            kind
            for kind in vars(loaded).values()
            if isinstance(kind, type) and not isinstance(kind, Stub) and method in vars(kind)
        ]
        return found[0] if found else None

    @property
    def files(self) -> list[str]:
        """What computes: served modules."""
        return self.package.loaded()

    @property
    def has_masks(self) -> bool:
        """Whether a verification has a mask over a rank's tokens."""
        return hasattr(self.manager, "generate_mtp_attention_mask_for_decode")

    @property
    def counts_lens(self) -> bool:
        """Whether local lengths are the release's own, and not vLLM's."""
        vllms = "get_dcp_local_seq_lens"
        method = getattr(self.manager, "_get_dcp_local_seq_lens", None)
        return method is None or not isinstance(method.__globals__.get(vllms), Stub)

    @property
    def merges_by_fused(self) -> bool:
        """Whether attention of every kind merges by the fused exchange."""
        return self.combine is not None

    @property
    def merges_local(self) -> bool:
        """Whether the fused exchange takes a state that every rank has beside what it received."""
        return self.combine is not None and "local_output" in parameters(self.combine)

    @property
    def splits_prefill(self) -> bool:
        """Whether the manager shares prompts out over ranks."""
        return hasattr(self.manager, "update_tokens_for_pcp")

    def replaced(self) -> list[str]:
        """What stands in the place of the engine's surroundings, for a profile."""
        return [
            *self.package.described(),
            *interpreter.SHIMS,
            "torch in the fused exchange: its buffers lie in host memory, and tensors say that they lie on an NPU",
            "range and launches in the fused exchange: rows and ranks, which share nothing there, are one block and not a loop",
            "torch.distributed: ranks are threads of one process, in turns",
        ]

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Within, what comes from a stub is an error."""
        return self.package.ledger.watching()

    def local_lens(self, manager: Any, seq_lens: torch.Tensor, world: int, interleave: int) -> torch.Tensor:
        """Tokens of each request on every rank of a group, `[n, W]`."""
        if hasattr(manager, "_get_dcp_local_seq_lens"):
            return manager._get_dcp_local_seq_lens(seq_lens)
        return manager._get_cp_local_seq_lens(seq_lens, 1, world, interleave)[:, 0]

    def block_table(self, block_size: int, requests: int, width: int, tokens: int, interleave: int) -> Any:
        """The engine's block table of the rank that the calling thread acts for."""
        return self.table(
            block_size,
            max(requests, 1),
            max(width, 1),
            max(tokens, 1),
            False,
            torch.device("cpu"),
            [block_size],
            interleave,
        )

    def new_manager(
        self, dcp: tuple[int, int], pcp: tuple[int, int], sizes: tuple[int, int, int], interleave: int
    ) -> Any:
        """The engine's manager of the rank `(world, rank)` in both groups, for `(requests, rows of a decode, tokens of a
        request)` at most."""
        requests, rows, tokens = sizes
        speculative = SimpleNamespace(num_speculative_tokens=rows - 1)
        model = SimpleNamespace(max_model_len=tokens, hf_config=SimpleNamespace(model_type="shardcheck"))
        limits = SimpleNamespace(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=max(requests, 1))
        config = SimpleNamespace(
            speculative_config=speculative,
            scheduler_config=limits,
            model_config=model,
            parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=interleave),
        )
        given = {
            "pcp_world_size": pcp[0],
            "pcp_rank": pcp[1],
            "dcp_world_size": dcp[0],
            "dcp_rank": dcp[1],
            "max_buffer_num_tokens": MAX_TOKENS,
            "max_num_reqs": max(requests, 1),
            "device": torch.device("cpu"),
            "vllm_config": config,
            "use_async_scheduling": False,
        }
        return self.manager(
            **{name: value for name, value in given.items() if name in parameters(self.manager)}
        )

    def observed_lse(self) -> torch.Tensor:
        """The merged LSE of the last `npu_attention_update` on this thread."""
        return self._seen.lse

    def _update(self, lses: Any, outs: Any, _: int) -> tuple[torch.Tensor, None]:
        """Stands for `torch_npu.npu_attention_update`, a kernel of the device: the merge of outputs `[rows, D]` by LSEs
        `[rows]`, where an empty state weighs nothing."""
        lse, out = torch.stack(list(lses)), torch.stack(list(outs))
        top = lse.amax(0)
        weights = torch.exp(lse - torch.where(torch.isfinite(top), top, 0.0))
        total = weights.sum(0)
        self._seen.lse = torch.where(total > 0, torch.where(torch.isfinite(top), top, 0.0) + total.log(), -torch.inf)
        parts = torch.where(weights[..., None] > 0, out * weights[..., None], 0.0)
        return parts.sum(0) / torch.where(total > 0, total, 1.0)[:, None], None
