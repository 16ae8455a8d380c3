"""`Tensor`: a named element type over raw codes, possibly strided; the only thing that travels to and from an
engine.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from shardcheck.dtypes import DTYPES, NON_FINITE, Dtype, decode, dtype_named, encode

_FROM_NUMPY = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "int64": "i64",
    "int32": "i32",
    "uint16": "u16",
    "uint8": "u8",
    # types that ml_dtypes registers with numpy
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3fn",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e5m2": "e5m2",
}
_TORCH_NAMES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "e4m3fn": "float8_e4m3fn",
    "e4m3fnuz": "float8_e4m3fnuz",
    "e5m2": "float8_e5m2",
    "i64": "int64",
    "i32": "int32",
    "u16": "uint16",
    "u8": "uint8",
}


class Tensor:
    """An array of `dtype` elements.

    `codes` is the numpy array of raw codes: `uint16` for `bf16` and `f16`, `uint8` for the 8-bit floats, the
    natural numpy type otherwise. It may be a strided view.
    """

    __slots__ = ("_dtype", "codes")

    def __init__(self, dtype: str, codes: np.ndarray) -> None:
        """A tensor over `codes`, not copied; `TypeError` when they aren't of the storage type of `dtype`."""
        self._dtype: Dtype = dtype_named(dtype)
        if not isinstance(codes, np.ndarray) or codes.dtype != self._dtype.storage:
            found = getattr(codes, "dtype", type(codes).__name__)
            raise TypeError(f"codes of {dtype} are an array of {self._dtype.storage}, not {found}")
        self.codes = codes

    @staticmethod
    def from_f32(dtype: str, values: Any, overflow: str = NON_FINITE) -> Tensor:
        """Values rounded once to `dtype`, to nearest even; `overflow` is `saturate` or `non_finite`."""
        return Tensor(dtype, encode(dtype, np.asarray(values), overflow))

    @staticmethod
    def of(value: Any) -> Tensor:
        """A tensor of what an engine returned: a `Tensor`, a numpy array or a torch tensor of any device."""
        if isinstance(value, Tensor):
            return value
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return _of_torch(torch, value)
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
            name = _FROM_NUMPY.get(array.dtype.name)
            if name is None:
                raise TypeError(
                    f"no dtype for an array of {array.dtype}: use one of {', '.join(_FROM_NUMPY)}"
                )
            storage = DTYPES[name].storage
            if array.dtype.byteorder == ">":
                array = array.astype(array.dtype.newbyteorder("<"))
            return Tensor(name, array if array.dtype == storage else array.view(storage))
        raise TypeError(
            f"an output is a numpy array, a torch tensor or a shardcheck.Tensor, not {type(value).__name__}"
        )

    @property
    def dtype(self) -> str:
        """Name of the element type, such as `bf16`."""
        return self._dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each axis."""
        return self.codes.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance of neighbours along each axis, in elements."""
        return tuple(stride // self._dtype.size_bytes for stride in self.codes.strides)

    def numpy(self) -> np.ndarray:
        """Values: f32 for 8- and 16-bit floats (exact, a new array), else the codes themselves."""
        return decode(self.dtype, self.codes)

    def torch(self, device: str = "cpu") -> Any:
        """A torch tensor of the matching dtype with the same strides; on the CPU it shares the memory.

        On another device the gaps of a strided view are copied along, so that the strides survive.
        """
        import torch

        target = getattr(torch, _TORCH_NAMES[self.dtype])
        carrier = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[self._dtype.size_bytes]
        if str(device) == "cpu" or self.codes.flags.c_contiguous:
            return torch.from_numpy(self.codes.view(carrier)).view(target).to(device)
        span = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides)) + 1
        if self.codes.size == 0:
            return torch.empty_strided(self.shape, self.strides, dtype=target, device=device)
        flat = np.lib.stride_tricks.as_strided(self.codes, (span,), (self._dtype.size_bytes,))
        return (
            torch.from_numpy(flat.view(carrier)).view(target).to(device).as_strided(self.shape, self.strides)
        )

    def to_bytes(self) -> bytes:
        """Elements in row-major order, little-endian."""
        return self.codes.tobytes()

    def __repr__(self) -> str:
        return f"Tensor({self.dtype} {list(self.shape)})"


def unwritten(dtype: str, shape: tuple[int, ...] | list[int]) -> Tensor:
    """An output buffer full of the pattern that means *never written* (docs/protocol.md).

    Types of 8 bits and `u16` have no such pattern, since any content may be data; their buffer is zero.
    """
    found = dtype_named(dtype)
    unsigned = np.dtype(f"<u{found.size_bytes}")
    return Tensor(dtype, np.full(tuple(shape), found.unwritten or 0, dtype=unsigned).view(found.storage))


def _of_torch(torch: Any, value: Any) -> Tensor:
    names = {getattr(torch, name): ours for ours, name in _TORCH_NAMES.items() if hasattr(torch, name)}
    name = names.get(value.dtype)
    if name is None:
        raise TypeError(
            f"no dtype for a torch tensor of {value.dtype}: use one of {', '.join(map(str, names))}"
        )
    storage = DTYPES[name].storage
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[storage.itemsize]
    array = value.detach().to("cpu").contiguous().view(carrier).numpy()
    return Tensor(name, array.view(storage))
