"""What stands around vLLM-Ascend's context-parallel code here: which files are served, and what takes the place of vLLM, of
torch_npu and of the rest."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardcheck import Unsupported
from shardcheck.adapters.loader import Package

_CP = "vllm_ascend.attention.context_parallel"

# Where 0.23.0, 0.26.0rc1 and 0.30.0rc2 keep their code. A place that a release doesn't have is passed over.
COMMON = (f"{_CP}.common_cp",)
GROUPED = (f"{_CP}.attention_cp",)
SPARSE = (f"{_CP}.sfa_cp",)
FUSED = ("vllm_ascend.ops.triton.sfa_cp", "vllm_ascend.ops.triton.dcp.dcp_a2a")
# The kernels of the fused exchange.
FUSED_KERNELS = (
    *("_pack_sfa_dcp_output_lse_kernel", "_fused_sfa_dcp_lse_combine_kernel"),
    *("_pack_dcp_output_lse_kernel", "_fused_dcp_lse_combine_kernel"),
)
TABLE = ("vllm_ascend.worker.block_table",)
MANAGER = ("vllm_ascend.worker.dcp_utils", "vllm_ascend.worker.pcp_utils")

# What those import and can be served as it is.
_SUPPORT = ("vllm_ascend.distributed.utils", "vllm_ascend.ops.triton.compute_slot_mapping")
# Packages that those import: stubs stand for them and the attributes below, also where the current folder has a checkout of one.
_STOOD_IN = ("torch_npu", "vllm")
# Programs that a launch of a kernel has at most: the cores of a device. One program then walks all rows, which `rows_at_once` makes one step of.
_CORES = 1


@dataclass(frozen=True)
class Rank:
    """A rank's groups as `get_dcp_group` and `get_pcp_group` give them."""

    dcp: Any
    pcp: Any


class Place:
    """A group of which only sizes are asked."""

    device_group = None

    def __init__(self, world: int, rank: int) -> None:
        self.world_size, self.rank_in_group = world, rank


class Groups:
    """The rank that the calling thread acts for."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextlib.contextmanager
    def acting(self, dcp: Any, pcp: Any = None) -> Iterator[None]:
        """Within, this thread acts for a rank of these groups."""
        before = getattr(self._local, "rank", None)
        self._local.rank = Rank(dcp, pcp if pcp is not None else Place(1, 0))
        try:
            yield
        finally:
            self._local.rank = before

    def dcp(self) -> Any:
        """Stands for `get_dcp_group`."""
        return self._current.dcp

    def ranks(self) -> Any:
        """The ranks that take turns with this thread, or nothing where it acts for none."""
        rank = getattr(self._local, "rank", None)
        return getattr(rank.dcp, "ranks", None) if rank is not None else None

    def pcp(self) -> Any:
        """Stands for `get_pcp_group`."""
        return self._current.pcp

    @property
    def _current(self) -> Rank:
        rank = getattr(self._local, "rank", None)
        assert rank is not None, "no rank acts on this thread"
        return rank


class Buffer:
    """Stands for `CpuGpuBuffer`: one tensor seen three ways, `cpu`, `gpu` and `np`, so that copies have nothing to do."""

    def __init__(self, *size: Any, dtype: torch.dtype, **_: Any) -> None:
        self.cpu = self.gpu = torch.zeros(*size, dtype=dtype)
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, count: int | None = None) -> torch.Tensor:
        """The first entries."""
        return self.gpu if count is None else self.gpu[:count]


class Metadata:
    """Stands for records that are filled and read here: any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class _Silent:
    """Stands for the logger."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_, **__: False


class NpuDevice:
    """What a tensor says of its device to code that takes an NPU's tensors alone."""

    type = "npu"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NpuDevice)

    def __hash__(self) -> int:
        return 0


class NpuTensor(torch.Tensor):
    """A tensor in host memory that says that it lies on an NPU: wrappers of kernels ask, kernels don't."""

    @property
    def device(self) -> Any:
        """An NPU, in name."""
        return NpuDevice()


class NpuTorch:
    """Stands for the module torch in a file that makes its buffers on the device of a given tensor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """A buffer in host memory."""
        return torch.empty(*size, dtype=dtype).as_subclass(NpuTensor)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A buffer of the same shape in host memory."""
        return torch.empty(tensor.shape, dtype=tensor.dtype).as_subclass(NpuTensor)


def package(folder: Path, groups: Groups, triton: Any, update: Callable[..., Any]) -> Package:
    """The release in `folder`, ready to be imported on a CPU. `groups` is what it asks of its ranks, `update` stands for
    `torch_npu.npu_attention_update`."""
    divided_up = lambda a, b: -(-a // b)  # noqa: E731
    metadata = {"AscendPrefillContextParallelMetadata": Metadata, "AscendDCPMetadata": Metadata}
    replaced = {
        "vllm.distributed": {"get_dcp_group": groups.dcp, "get_pcp_group": groups.pcp},
        "vllm.distributed.parallel_state": {"get_dcp_group": groups.dcp, "get_pcp_group": groups.pcp},
        "vllm.logger": {"logger": _Silent()},
        "vllm.triton_utils": {"HAS_TRITON": True, "triton": triton, "tl": triton.language},
        "vllm.utils.math_utils": {"cdiv": divided_up},
        "vllm.utils.torch_utils": {"direct_register_custom_op": lambda **_: None},
        "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1},
        "vllm.v1.utils": {"CpuGpuBuffer": Buffer},
        "torch_npu": {"npu_attention_update": update},
        "vllm_ascend.attention.utils": metadata,
        # A5 has kernels of its own for large batches: none is asked for here
        "vllm_ascend.device.device_config": {"is_950": lambda: False},
        "vllm_ascend.core.kv_cache_interface": {"is_circular_kv_cache_spec": lambda _: False},
        "vllm_ascend.ops.triton.triton_utils": {
            "get_vectorcore_num": lambda: _CORES,
            "init_device_properties_triton": lambda: None,
        },
        "vllm_ascend.utils": {"is_pd_decode_recompute_scheduler_enabled": lambda _: False},
    }
    served = {*COMMON, *GROUPED, *SPARSE, *FUSED, *TABLE, *MANAGER, *_SUPPORT}
    found = Package("vllm_ascend", folder, served, replaced, stood_in=_STOOD_IN)
    if found.path_of(COMMON[0]) is None:
        raise Unsupported("this release has no context parallelism in the place where 0.23.0 and later have it")
    return found
