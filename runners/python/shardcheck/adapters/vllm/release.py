"""What a release of vLLM has: the functions that an operation runs, found by name and signature, never by
version."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardcheck import Unsupported
from shardcheck.adapters import interpreter
from shardcheck.adapters.launches import join
from shardcheck.adapters.loader import parameters
from shardcheck.adapters.vllm import surroundings
from shardcheck.adapters.vllm.surroundings import Groups


class Release:
    """The engine's functions. `None` where a release lacks one.

    `correct_and_scatter` is `cp_lse_ag_out_rs`, `exchange_and_combine` is `dcp_a2a_lse_reduce`,
    `decode_kernel` is `decode_attention_fwd`, `decode` is the method of the Triton MLA backend that calls it,
    `verify_row_lens` is `dcp_local_verify_row_lens`, `merge_states` is `merge_attn_states`.
    """

    def __init__(self, folder: Path, device: str, runner: str = "v1") -> None:
        # whether the decode kernel is given an LSE in f32, whatever the backend would give it
        self.full_lse = False
        # position of a token that is written with the content of the one before it: a fault on purpose
        self.aliased_token: int | None = None
        self.folder = folder
        self.runner = runner
        self.device = device
        self.triton = interpreter.prepare(device)
        self.groups = Groups()
        self.package = surroundings.package(folder, device, self.triton, self.groups)
        self.package.install()
        first = self.package.first
        self.correct_and_scatter = first(surroundings.CORRECTION, "cp_lse_ag_out_rs")
        self.exchange_and_combine = first(surroundings.ALL_TO_ALL, "dcp_a2a_lse_reduce")
        self.decode_kernel = first(surroundings.DECODE_KERNEL, "decode_attention_fwd")
        backend = first(surroundings.DECODE_BACKEND, "TritonMLAImpl")
        self.mla_backend = backend
        self.decode = next(
            (found for name in ("forward_mqa", "_forward_decode") if (found := vars(backend).get(name))), None
        )
        self.plan_context = first(surroundings.MLA, "build_mla_chunked_context_metadata")
        self.align_workspace = first(surroundings.MLA, "align_mla_chunked_context_workspace_size")
        self.plans_chunks = first(surroundings.MLA, "plan_mla_context_chunks") is not None
        self.key_value_splits = first(surroundings.DECODE_BACKEND, "_compute_num_kv_splits")
        helper = first(surroundings.VERIFY_BACKEND, "AiterMLAHelper")
        self.verify_row_lens = getattr(helper, "dcp_local_verify_row_lens", None)
        self.merge_states = first(surroundings.MERGE, "merge_attn_states")
        self.merge_states_torch = first(surroundings.MERGE, "_merge_attn_states_torch")
        self.merge_kernel = first(surroundings.MERGE_KERNEL, "merge_attn_states_kernel")
        self.merge_segments = first(surroundings.SEGMENTS, "merge_mla_segments_triton")
        self.pack = first(surroundings.ALL_TO_ALL, "_dcp_a2a_pack_send")
        self.block_table = first(surroundings.BLOCK_TABLE, "BlockTable")
        self.prefill_manager = first(surroundings.PREFILL, "PCPManager")
        self.input_batch = first(surroundings.INPUT_BATCH, "InputBatch")
        self.pad_slot = first(surroundings.LENGTHS, "PAD_SLOT_ID")
        self.runner_lens = first(surroundings.RUNNER_LENGTHS, "prepare_dcp_local_seq_lens")
        self.runner_slots = first(surroundings.RUNNER_SLOTS, "_compute_slot_mappings_kernel")
        self._local_lens = first(surroundings.LENGTHS, "get_dcp_local_seq_lens")
        self._cut_lens = None if self._local_lens else self._cut_local_lens()
        if runner == "v2" and (self.runner_lens is None or self.runner_slots is None):
            raise Unsupported("this release has no kernels of a newer model runner")
        surroundings.exchange_virtually(self.package)
        if device == "cpu":
            for name in dict.fromkeys(surroundings.CORRECTION + surroundings.ALL_TO_ALL + surroundings.DECODE_KERNEL):
                join(self.package.load(name), surroundings.JOINT_KERNELS, self.groups.ranks)
        self.copies_plainly = surroundings.copy_plainly(self.package)
        self._observed = threading.local()
        self.observes_lse = self.correct_and_scatter is not None and "return_lse" not in parameters(
            self.correct_and_scatter
        )
        if self.observes_lse:
            self._observe_lse()

    @property
    def device_name(self) -> str:
        """What computes."""
        return "cpu" if self.device == "cpu" else torch.cuda.get_device_name()

    def replaced(self) -> list[str]:
        """What stands in the place of the engine's surroundings, for a profile."""
        lines = self.package.described()
        if self.device == "cpu":
            lines += interpreter.SHIMS
            lines.append("launches of merges and of attention: ranks are programs of one launch, and not one launch after the other")
        if self.copies_plainly:
            lines.append("pcp_manager.async_copy_to_gpu: a plain copy, without pinned memory")
        if self.observes_lse:
            lines.append("correct_attn_out: wrapped to read off the merged LSE, which cp_lse_ag_out_rs drops")
        return lines

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Within, what comes from a stub is an error."""
        return self.package.ledger.watching()

    @property
    def drafts(self) -> bool:
        """Whether the decode backend knows of blocks whose rows all see the same tokens."""
        return self.decode is not None and "causal" in self.decode.__code__.co_names

    @property
    def refuses_quantised_dcp(self) -> bool:
        """Whether the attention layer asserts that caches under DCP are not quantised."""
        modules = [module for module in map(self.package.load, surroundings.MLA) if module is not None]
        return any("DCP not support fp8" in inspect.getsource(module) for module in modules)

    @property
    def has_interleave(self) -> bool:
        """Whether the release knows an interleave size other than 1."""
        return "cp_kv_cache_interleave_size" in parameters(self.block_table)

    @property
    def has_local_lens(self) -> bool:
        """Whether local lengths come from the engine at all."""
        return self._local_lens is not None or self._cut_lens is not None

    def local_lens(self, seq_lens: Any, world: int, rank: int, interleave: int) -> Any:
        """Tokens of each request on a rank, i32 `[n]`: by the newer runner's kernel, by
        `get_dcp_local_seq_lens`, or the statement that older metadata builders had."""
        if self.runner == "v2" and world > 1:
            lens = torch.empty_like(seq_lens, device=self.device)
            self.runner_lens(lens, seq_lens.to(self.device), len(lens), world, rank, interleave)
            return lens.cpu()
        if self._local_lens is not None:
            return self._local_lens(seq_lens, world, rank, interleave)
        if world == 1:
            return seq_lens.clone()
        scope = {"seq_lens": seq_lens.clone(), "num_decodes": len(seq_lens)}
        scope["self"] = SimpleNamespace(dcp_world_size=world, dcp_rank=rank)
        exec(self._cut_lens, {}, scope)  # the engine's own statement, compiled from its file
        return scope["seq_lens"]

    def observed_lse(self) -> Any:
        """What `correct_attn_out` last returned as merged LSE on this thread."""
        return self._observed.lse

    def _observe_lse(self) -> None:
        """Reads the merged LSE off `correct_attn_out`, which returns it to a caller that drops it."""
        module = next(
            m for m in map(self.package.load, surroundings.CORRECTION) if hasattr(m, "correct_attn_out")
        )
        original = module.correct_attn_out

        def observed(*arguments: Any, **named: Any) -> Any:
            out, self._observed.lse = original(*arguments, **named)
            return out, self._observed.lse

        module.correct_attn_out = observed

    def _cut_local_lens(self) -> Any:
        """Compiles `if self.dcp_world_size > 1: seq_lens[:num_decodes] = …` out of the metadata builder of a
        release without a function."""
        builder = self.package.first(surroundings.MLA, "MLACommonMetadataBuilder")
        if builder is None or not hasattr(builder, "build"):
            return None
        tree = ast.parse(textwrap.dedent(inspect.getsource(builder.build)))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.If)
                and ast.unparse(node.test) == "self.dcp_world_size > 1"
                and len(node.body) == 1
            ):
                statement = node.body[0]
                if (
                    isinstance(statement, ast.Assign)
                    and ast.unparse(statement.targets[0]) == "seq_lens[:num_decodes]"
                ):
                    return compile(ast.Module(body=[node], type_ignores=[]), str(self.package.name), "exec")
        return None
