"""What stands around vLLM's context-parallel code here: which files are served, and what takes the place of
the rest."""

from __future__ import annotations

import enum
import logging
import math
import threading
from pathlib import Path
from typing import Any

from shardcheck.adapters.collectives import VirtualDistributed
from shardcheck.adapters.loader import Package
from shardcheck.adapters.vllm.cache import gather_rows

_OPS = "vllm.v1.attention.ops"
_BACKENDS = "vllm.v1.attention.backends"

# Where each version keeps its code, newest place first. A place that a release doesn't have is passed over.
CORRECTION = (f"{_OPS}.dcp", f"{_OPS}.common", "vllm.attention.ops.common")
ALL_TO_ALL = (f"{_OPS}.dcp", f"{_OPS}.dcp_alltoall")
DECODE_KERNEL = (f"{_OPS}.triton_decode_attention", "vllm.attention.ops.triton_decode_attention")
MERGE = (f"{_OPS}.merge_attn_states", "vllm.attention.ops.merge_attn_states")
MERGE_KERNEL = (f"{_OPS}.triton_merge_attn_states", "vllm.attention.ops.triton_merge_attn_states")
LENGTHS = (f"{_BACKENDS}.utils",)
BLOCK_TABLE = ("vllm.v1.worker.block_table",)
DECODE_BACKEND = (f"{_BACKENDS}.mla.triton_mla",)
VERIFY_BACKEND = (f"{_BACKENDS}.mla.rocm_aiter_mla",)
MLA = ("vllm.model_executor.layers.attention.mla_attention", f"{_BACKENDS}.mla.common")
RUNNER_LENGTHS = ("vllm.v1.worker.gpu.cp_utils",)
RUNNER_SLOTS = ("vllm.v1.worker.gpu.block_table",)
SEGMENTS = (f"{_OPS}.rocm_aiter_mla_merge",)
PREFILL = ("vllm.v1.worker.gpu.pcp_manager",)
INPUT_BATCH = ("vllm.v1.worker.gpu.input_batch",)
# Kernels that all ranks of a group launch at the same place, of their own tensors.
JOINT_KERNELS = (
    *("_correct_attn_cp_out_kernel", "_dcp_a2a_pack_send_kernel", "_dcp_a2a_unpack_combine_kernel"),
    *("_fwd_kernel_stage1", "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2"),
)

_PLACES = (
    *(CORRECTION + ALL_TO_ALL + DECODE_KERNEL + MERGE + MERGE_KERNEL + LENGTHS + BLOCK_TABLE),
    *(
        DECODE_BACKEND
        + VERIFY_BACKEND
        + MLA
        + SEGMENTS
        + RUNNER_LENGTHS
        + RUNNER_SLOTS
        + PREFILL
        + INPUT_BATCH
    ),
)
# Packages that those import and that nothing which runs here needs: stubs where they are not installed.
_FOREIGN = (
    "aiter",
    "cachetools",
    "cloudpickle",
    "msgspec",
    "psutil",
    "pydantic",
    "regex",
    "tqdm",
    "uvloop",
    "zmq",
)
# What those import and can be served as it is.
_SUPPORT = (
    "vllm.envs",
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.warmup.jit_warmup_triton_helper",
    "vllm.utils.math_utils",
    "vllm.v1.attention.backend",
    "vllm.v1.utils",
    "vllm.v1.worker.cp_utils",
    "vllm.v1.worker.gpu.buffer_utils",
    "vllm.v1.worker.workspace",
    f"{_OPS}.cp_common",
    f"{_OPS}.pcp",
)


class GraphMode(enum.Enum):
    """Stands for `CUDAGraphMode`: whether a step is one of a graph, with its padding."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class Groups:
    """The group that the engine's getters return: that of the rank which the calling thread acts for."""

    def __init__(self) -> None:
        self._local = threading.local()

    def act(self, group: Any) -> None:
        """From now on this thread acts for the rank of `group`."""
        self._local.group = group

    def ranks(self) -> Any:
        """The ranks that take turns with this thread, or nothing where it acts for none."""
        return getattr(getattr(self._local, "group", None), "ranks", None)

    def decode_group(self) -> Any:
        """Stands for `get_dcp_group`, which asserts that there is one."""
        group = getattr(self._local, "group", None)
        assert group is not None, "decode context parallel group is not initialized"
        return group

    @staticmethod
    def prefill_group() -> Any:
        """Stands for `get_pcp_group`: there is none, which the engine takes for a group of one."""
        raise AssertionError("prefill context parallel group is not initialized")


class Platform:
    """Stands for `current_platform`: no platform at all, so that the engine takes its Triton code, or ROCm on
    an AMD device, whose tiles are others."""

    def __init__(self, device: str) -> None:
        import torch

        self._is = {"is_rocm", "is_cuda_alike"} if device == "cuda" and torch.version.hip else set()
        self.device_type = device
        self.dispatch_key = "CPU" if device == "cpu" else "CUDA"
        self._fp8 = torch.float8_e4m3fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda *_, **__: name in self._is
        raise AttributeError(name)

    def fp8_dtype(self) -> Any:
        """The 8-bit float of the platform."""
        return self._fp8


class _Logger(logging.LoggerAdapter):
    """The engine's logger has methods that log a message once."""

    def debug_once(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    info_once = warning_once = debug_once


def _to_device(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """Stands for a copy to the device through pinned memory."""
    import torch

    tensor = torch.as_tensor(data, dtype=dtype)
    return out.copy_(tensor) if out is not None else tensor.to(device)


def _is_quantized(kv_cache_dtype: str) -> bool:
    """Stands for a look at the name of a cache's type: caches here are as wide as the model."""
    return kv_cache_dtype != "auto"


def package(folder: Path, device: str, triton: Any, groups: Groups) -> Package:
    """The release in `folder`, ready to be imported for `device`, with `groups` for its group getters."""
    import torch

    getters = {"get_dcp_group": groups.decode_group, "get_pcp_group": groups.prefill_group}
    replaced = {
        "vllm.config": {"CUDAGraphMode": GraphMode},
        "vllm.distributed": getters,
        "vllm.distributed.parallel_state": getters,
        "vllm._custom_ops": {"cp_gather_cache": gather_rows, "gather_and_maybe_dequant_cache": gather_rows},
        "vllm.logger": {"init_logger": lambda name: _Logger(logging.getLogger(name), {})},
        "vllm.platforms": {"current_platform": Platform(device)},
        "vllm.utils.torch_utils": {
            "PIN_MEMORY": False,
            "async_tensor_h2d": _to_device,
            "np_to_pinned_tensor": torch.from_numpy,
            "is_quantized_kv_cache": _is_quantized,
        },
        "vllm.v1.kv_cache_interface": {"is_quantized_kv_cache": _is_quantized},
        "vllm.triton_utils": {
            "tl": triton.language,
            "triton": triton,
            "HAS_TRITON": True,
            "LOGE2": math.log(2.0),
        },
    }
    served = {*_PLACES, *_SUPPORT}
    return Package("vllm", folder, served, replaced, foreign=_FOREIGN)


def copy_plainly(release: Package) -> bool:
    """Lets the manager of prefill context parallelism copy to the device without pinned memory; whether it
    has such a copy of its own."""
    module = next((found for found in map(release.load, PREFILL) if found is not None), None)
    if not hasattr(module, "async_copy_to_gpu"):
        return False

    def copy(x: Any, out: Any = None, device: Any = None) -> Any:
        return _to_device(x, device, out=out)

    module.async_copy_to_gpu = copy
    return True


def exchange_virtually(release: Package) -> None:
    """Lets collectives that the engine starts through `torch.distributed` go between the ranks of this
    process."""
    for name in ALL_TO_ALL:
        module = release.load(name)
        if module is not None and hasattr(module, "dist"):
            module.dist = VirtualDistributed(module.dist)
