"""What stands around SGLang's context-parallel code here: which files are served, and what takes the place of
the rest."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcheck import Unsupported
from shardcheck.adapters.loader import Package

_DCP = "sglang.srt.layers.dcp"
_CP = "sglang.srt.layers.cp"
_KERNELS = "sglang.kernels.ops.attention"

# Where 0.5.17 to 0.5.23 keep their code. A place that a release doesn't have is passed over.
LAYOUT = (f"{_DCP}.layout",)
EXCHANGE = (f"{_DCP}.comm",)
PLANNER = (f"{_DCP}.planner",)
KERNELS = (f"{_KERNELS}.dcp_kernels",)
MERGE = (f"{_KERNELS}.merge_state",)
MERGE_CHOICE = ("sglang.srt.layers.attention.merge_state",)
CONTEXT_LAYER = ("sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha",)
CONTEXT_BATCH = ("sglang.srt.model_executor.forward_batch_deepseek_mha_mixin",)
DECODE_KERNEL = (f"{_KERNELS}.decode_attention",)
DECODE_BACKEND = ("sglang.srt.layers.attention.triton_backend",)
TRANSLATOR = ("sglang.srt.mem_cache.kv_index_translator",)
STRATEGIES = (f"{_CP}.base",)
ZIGZAG = (f"{_CP}.zigzag",)
INTERLEAVE = (f"{_CP}.interleave",)
PADDING = (f"{_CP}.padding",)
# a module of helpers that imports half of the world; one function is cut out of it
HELPERS = "sglang.srt.utils.common"

_PLACES = (
    *(LAYOUT + EXCHANGE + PLANNER + KERNELS + MERGE + DECODE_KERNEL + DECODE_BACKEND + TRANSLATOR),
    *(STRATEGIES + ZIGZAG + INTERLEAVE + PADDING + MERGE_CHOICE + CONTEXT_LAYER + CONTEXT_BATCH),
)
# Kernels that all ranks of a group launch at the same place, of their own tensors.
JOINT_KERNELS = {
    KERNELS[0]: ("_correct_attn_cp_out_kernel", "_dcp_pack_a2a_send_kernel", "_dcp_lse_combine_kernel"),
    DECODE_KERNEL[0]: ("_fwd_kernel_stage1", "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2"),
}
# What those import and can be served as it is.
_SUPPORT = (
    _DCP,
    f"{_DCP}.metadata",
    f"{_KERNELS}.score_mod",
    f"{_KERNELS}.metadata",
    f"{_KERNELS}.kv_indices",
    "sglang.kernels.ops.kvcache.kv_indices",
    "sglang.srt.environ",
)
# Packages that those import and that nothing which runs here needs: stubs where they are not installed.
_FOREIGN = ("msgspec", "psutil", "pydantic", "sgl_kernel", "tqdm", "transformers", "zmq")


@dataclass(frozen=True)
class Parallel:
    """Stands for `get_parallel()`: sizes and groups as the rank sees them that the calling thread acts for, and for what
    a forward has around it: its attention backend, its cache and its table of tokens."""

    dcp_size: int = 1
    dcp_rank: int = 0
    dcp_group: Any = None
    attn_cp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_group: Any = None
    enable_prefill_cp: bool = False
    cp_strategy: str = "zigzag"
    backend: Any = None
    pool: Any = None
    request_pool: Any = None

    @property
    def dcp_enabled(self) -> bool:
        """Whether the cache is spread over ranks."""
        return self.dcp_size > 1

    @property
    def attn_dcp_size(self) -> int:
        """Ranks that share a cache."""
        return self.dcp_size

    @property
    def attn_dcp_rank(self) -> int:
        """The rank's place among them."""
        return self.dcp_rank


class Groups:
    """What `get_parallel` returns: that of the rank which the calling thread acts for."""

    def __init__(self) -> None:
        self._local = threading.local()

    def act(self, parallel: Parallel | None) -> None:
        """From now on this thread acts for a rank."""
        self._local.parallel = parallel

    def current(self) -> Parallel:
        """Stands for `get_parallel`."""
        parallel = getattr(self._local, "parallel", None)
        assert parallel is not None, "no rank acts on this thread"
        return parallel

    def ranks(self) -> Any:
        """The ranks that take turns with this thread, or nothing where it acts for none."""
        parallel = getattr(self._local, "parallel", None)
        return None if parallel is None else getattr(parallel.dcp_group, "ranks", None)

    def device(self) -> Any:
        """Stands for `get_device`."""
        return _DEVICE

    def gather_prefill(self, output: Any, sent: Any) -> None:
        """Stands for `attn_cp_all_gather_into_tensor`, one line of the group coordinator."""
        self.current().attn_cp_group.all_gather_into_tensor(output, sent)


@dataclass(frozen=True)
class _Device:
    device: str = "cpu"


_DEVICE = _Device()


class LatentPool:
    """Stands for `MLATokenToKVPool`, the cache of an MLA model: the chunk plan asks whether it is one."""


class _Nothing:
    """Stands for classes that objects are asked to be of, and that none here is of."""


class WriteLocation:
    """Stands for `KVWriteLoc`, a record: the rows of a cache that tokens are written to."""

    def __init__(self, loc: Any, *_: Any, **__: Any) -> None:
        self.loc = loc


def _no_symmetric_memory(*_: Any, **__: Any) -> Any:
    """Stands for `use_symmetric_memory`: tensors lie where they lie."""
    return contextlib.nullcontext()


def _no(*_: Any, **__: Any) -> bool:
    """Answers what the machine is: none of the accelerators that the engine has code for."""
    return False


def package(folder: Path, groups: Groups) -> Package:
    """The release in `folder`, ready to be imported on a CPU, with `groups` for what it asks of its ranks."""
    platforms = ("is_cuda", "is_hip", "is_npu", "is_xpu", "is_cpu", "is_musa")
    chips = ("is_gfx95_supported", "is_gfx942_supported", "is_gfx1250_supported")
    replaced = {
        "sglang.srt.runtime_context": {"get_parallel": groups.current, "get_device": groups.device},
        "sglang.srt.utils": {
            **{name: _no for name in platforms + chips},
            "get_device_core_count": lambda *_: 0,
        },
        "sglang.srt.distributed.device_communicators.pynccl_allocator": {
            "use_symmetric_memory": _no_symmetric_memory
        },
        "sglang.srt.layers.dp_attention": {
            "is_allocation_symmetric": _no,
            "attn_cp_all_gather_into_tensor": groups.gather_prefill,
        },
        "sglang.srt.mem_cache.memory_pool": {
            "KVWriteLoc": WriteLocation,
            "MLATokenToKVPool": LatentPool,
            "HybridLinearKVPool": _Nothing,
        },
        "sglang.srt.model_executor.forward_context": {
            "get_attn_backend": lambda: groups.current().backend,
            "get_token_to_kv_pool": lambda: groups.current().pool,
            "get_req_to_token_pool": lambda: groups.current().request_pool,
        },
        "sglang.srt.layers.attention.tbo_backend": {"TboAttnBackend": _Nothing},
        "sglang.srt.models.deepseek_common.utils": {
            name: False for name in ("_is_cuda", "_is_hip", "_is_musa", "_is_npu", "_use_aiter_gfx95")
        },
        "sglang.srt.model_executor.runner_utils.capture_mode": {"get_is_capture_mode": _no},
        # where 0.5.17 asks which strategy runs
        "sglang.srt.layers.attention.dsa.utils": {"is_dsa_prefill_cp_in_seq_split": _no},
        "sglang.srt.layers.utils.cp_utils": {
            "is_prefill_cp_in_seq_split": lambda: groups.current().cp_strategy == "zigzag"
        },
    }
    served = {*_PLACES, *_SUPPORT}
    found = Package("sglang", folder, served, replaced, foreign=_FOREIGN)
    if found.path_of(LAYOUT[0]) is None:
        raise Unsupported(
            "this release has no decode context parallelism in the place where 0.5.17 and later have it"
        )
    return found
