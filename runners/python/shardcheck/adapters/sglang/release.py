"""What a release of SGLang has: the functions that an operation runs, found by name and signature, never by
version."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch

from shardcheck.adapters import interpreter
from shardcheck.adapters.launches import join
from shardcheck.adapters.loader import parameters
from shardcheck.adapters.sglang import surroundings
from shardcheck.adapters.sglang.surroundings import Groups


class Release:
    """The engine's functions. `None` where a release lacks one.

    `merge_reduced` is `cp_lse_ag_out_rs_mha`, `merge_scattered` is `cp_lse_ag_out_rs_mla`, `merge_exchanged` is
    `dcp_a2a_lse_reduce`, `merge_two` is `merge_state_triton`; `backend` is `TritonAttnBackend`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device = "cpu"
        self.triton = interpreter.prepare(self.device)
        self.groups = Groups()
        self.package = surroundings.package(folder, self.groups)
        self.package.install()
        first = self.package.first
        self.local_lens = first(surroundings.LAYOUT, "get_dcp_lens")
        self.localize = first(surroundings.LAYOUT, "localize_dcp_indices")
        self.remap_sparse = first(surroundings.LAYOUT, "remap_dcp_sparse_indices")
        self.chain_lens = first(surroundings.LAYOUT, "get_dcp_chain_spec_lens")
        self.merge_reduced = first(surroundings.EXCHANGE, "cp_lse_ag_out_rs_mha")
        self.merge_scattered = first(surroundings.EXCHANGE, "cp_lse_ag_out_rs_mla")
        self.merge_exchanged = first(surroundings.EXCHANGE, "dcp_a2a_lse_reduce")
        self.merge_two = first(surroundings.MERGE, "merge_state_triton")
        self.pack = first(surroundings.KERNELS, "dcp_pack_a2a_send")
        self.page_table = first(surroundings.KERNELS, "create_mla_kv_page_table_for_dcp")
        self.plan = first(surroundings.PLANNER, "plan_dcp_decode_metadata")
        self.translator = first(surroundings.TRANSLATOR, "KVIndexTranslator")
        self.backend = first(surroundings.DECODE_BACKEND, "TritonAttnBackend")
        self.decode_kernel = first(surroundings.DECODE_KERNEL, "decode_attention_fwd")
        self.attend_context = self._context_method()
        self.context_batch = first(surroundings.CONTEXT_BATCH, "ForwardBatchDeepSeekMHAMixin")
        self.base = self.package.load(surroundings.STRATEGIES[0])
        self.zigzag = first(surroundings.ZIGZAG, "ZigzagCPStrategy")
        self.interleave = first(surroundings.INTERLEAVE, "InterleaveCPStrategy")
        self.align_rows = first(surroundings.PADDING, "pad_logical_token_to_physical")
        scope = {"torch": torch, "Optional": Optional}
        self.new_pages = self.package.cut(surroundings.HELPERS, "get_num_new_pages", scope)
        self._seen = threading.local()
        self._observe()
        for module, kernels in surroundings.JOINT_KERNELS.items():
            join(self.package.load(module), kernels, self.groups.ranks)

    def _context_method(self) -> Any:
        """The MLA layer's attention over a context in chunks, where it merges by Triton and not by a compiled kernel, and
        the ids of chunks are those of the batch."""
        layer = self.package.first(surroundings.CONTEXT_LAYER, "DeepseekMHAForwardMixin")
        method = getattr(layer, "_chunked_prefix_attn_mha", None)
        merges = method is not None and "merge_state" in method.__code__.co_names
        return method if merges and self.translator is not None else None

    def translate(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a rank's cache of widened ids that it owns, by the translator of a pool that moves nothing."""
        return self.static_translator().translate_dcp_read_ids(ids)

    def static_translator(self) -> Any:
        """The translator of such a pool, as its constructor leaves it."""
        found = object.__new__(self.translator)
        vars(found).update(is_translating=False, defer_read_translate=False, _spaces={})
        return found

    @property
    def files(self) -> list[str]:
        """What computes: served modules, and the file that a function is cut from."""
        cut = [] if self.new_pages is None else [str(self.package.path_of(surroundings.HELPERS))]
        return self.package.loaded() + cut

    @property
    def has_interleave(self) -> bool:
        """Whether the layout functions know an interleave size other than 1."""
        return self.localize is not None and "interleave_size" in parameters(self.local_lens)

    def replaced(self) -> list[str]:
        """What stands in the place of the engine's surroundings, for a profile."""
        return [
            *self.package.described(),
            *interpreter.SHIMS,
            "launches of merges and of attention: ranks are programs of one launch, and not one launch after the other",
            "correct_attn_out and dcp_lse_combine_triton: wrapped to read off the merged LSE, which the merges drop",
            "cp_lse_ag_out_rs_mha in the Triton backend: wrapped to read off the partial; where the MLA layer merges "
            "otherwise, that merge in its place",
        ]

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Within, what comes from a stub is an error."""
        return self.package.ledger.watching()

    def observed_lse(self) -> torch.Tensor:
        """The merged LSE of the last merge on this thread."""
        return self._seen.lse

    def exchanging(self, merge: Callable[..., torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """Within, this thread's decode ends in `merge(out, lse, group)` instead of the merge of the backend."""
        return _bound(self._seen, "merge", merge)

    def _observe(self) -> None:
        """Reads merged LSEs off functions that return them to callers which drop them, and lets `exchanging` decide
        where the decode of the backend ends."""
        kernels = self.package.load(surroundings.EXCHANGE[0])
        correct, combine = kernels.correct_attn_out, kernels.dcp_lse_combine_triton

        def corrected(*arguments: Any, **named: Any) -> Any:
            out, self._seen.lse = correct(*arguments, **named)
            return out, self._seen.lse

        def combined(outs: Any, lses: Any, is_lse_base_on_e: bool = True, **named: Any) -> Any:
            # apart from the output, and from LSEs that lie dense: the kernel writes merged ones with the strides of the
            # given ones into a buffer that is dense
            _, self._seen.lse = combine(outs, lses.contiguous(), is_lse_base_on_e, return_lse=True)
            return combine(outs, lses, is_lse_base_on_e=is_lse_base_on_e, **named)

        kernels.correct_attn_out, kernels.dcp_lse_combine_triton = corrected, combined
        choice = self.package.load(surroundings.MERGE_CHOICE[0])
        if choice is not None:
            choose = choice.merge_state

            def chosen(*arguments: Any) -> Any:
                out, self._seen.lse = choose(*arguments)
                return out, self._seen.lse

            choice.merge_state = chosen
        backend = self.package.load(surroundings.DECODE_BACKEND[0])

        def merged(out: Any, lse: Any, group: Any) -> Any:
            return self._seen.merge(out, lse, group)

        if backend is not None:
            backend.cp_lse_ag_out_rs_mha = merged


@contextlib.contextmanager
def _bound(holder: Any, name: str, value: Any) -> Any:
    setattr(holder, name, value)
    try:
        yield
    finally:
        delattr(holder, name)
