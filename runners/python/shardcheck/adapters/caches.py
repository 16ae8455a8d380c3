"""The per-rank paged caches of an adapter. Scattering tokens into them by the engine's slots is its own step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shardcheck import Configuration, InputError, Tensor


class Caches:
    """Caches of all ranks as codes, `[ranks, blocks, B, K, width]`; each slot is NaN until it is written."""

    def __init__(self, configuration: Configuration) -> None:
        c = configuration
        shape = (c.tp, c.blocks, c.block_size, c.kv_heads)
        widths = {"key_cache": c.qk_dim} | ({} if c.attention.is_mla else {"value_cache": c.value_dim})
        nan = Tensor.from_f32(c.kv_dtype, np.float32(np.nan)).codes
        self.dtype, self.scale = c.kv_dtype, c.kv_scale
        self.codes = {name: np.full((*shape, width), nan, dtype=nan.dtype) for name, width in widths.items()}

    def write(self, rank: int, slots: np.ndarray, key: Tensor, value: Tensor | None) -> None:
        """Writes the tokens that have a slot, in order."""
        given = {"key_cache": key} | ({} if value is None else {"value_cache": value})
        for name, tensor in given.items():
            cache = self.codes[name][rank]
            flat = cache.reshape(-1, *cache.shape[2:])
            if slots.max(initial=-1) >= len(flat):
                raise RuntimeError(f"illegal address: slot {slots.max()} of a cache of {len(flat)}")
            values = self._cast(tensor)
            owned = slots >= 0
            flat[slots[owned]] = values[owned]

    def load(self, name: str, tensor: Tensor) -> None:
        """Replaces a cache by a given one."""
        if tensor.dtype != self.dtype or tensor.shape != self.codes[name].shape:
            raise InputError(
                f"{name} is {tensor.dtype} {tensor.shape}, not {self.dtype} {self.codes[name].shape}"
            )
        self.codes[name] = tensor.codes.copy()

    def tensors(self) -> dict[str, Tensor]:
        """The caches as they are."""
        return {name: Tensor(self.dtype, codes.copy()) for name, codes in self.codes.items()}

    def of_rank(self, rank: int) -> RankCache:
        """The caches of one rank."""
        return RankCache(self.dtype, {name: codes[rank] for name, codes in self.codes.items()})

    def _cast(self, tensor: Tensor) -> np.ndarray:
        if tensor.dtype == self.dtype:
            return tensor.codes
        return Tensor.from_f32(self.dtype, tensor.numpy() / np.float32(self.scale), "saturate").codes


@dataclass
class RankCache:
    """The caches of one rank as codes, `[blocks, B, K, width]`."""

    dtype: str
    codes: dict[str, np.ndarray]

    def read(self, name: str, device: str) -> torch.Tensor:
        """A cache for the kernel, `[blocks, B, K, width]`: as it is on a GPU, values of bf16 exactly in f32 on
        a CPU, where numpy has no such type."""
        tensor = Tensor(self.dtype, self.codes[name])
        if device == "cpu" and not is_narrow(self.dtype) and self.dtype != "f16":
            return torch.from_numpy(np.ascontiguousarray(tensor.numpy(), dtype=np.float32))
        return tensor.torch(device)


def is_narrow(dtype: str) -> bool:
    """Whether a cache of that type is quantised."""
    return dtype not in ("bf16", "f16", "f32")
