"""Images of safetensors files, read and written with numpy alone.

The format: eight bytes of header length (little-endian), a JSON object that maps each name to `dtype`,
`shape` and `data_offsets`, then the data, without gaps. https://github.com/huggingface/safetensors describes
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardcheck.dtypes import DTYPES, Dtype
from shardcheck.tensor import Tensor

_BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES.values()}
_MAX_HEADER_BYTES = 100 << 20


class FormatError(Exception):
    """Bytes that are not the image of a safetensors file."""


def parse(image: memoryview) -> dict[str, Tensor]:
    """Tensors by name, as views of `image` (a copy where an element would not be aligned).

    `FormatError` says which rule is broken: a header that is short or no JSON, an unknown dtype, a shape and
    a range of bytes that disagree, ranges that overlap, leave gaps or end elsewhere than the image.
    """
    total = len(image)
    if total < 8:
        raise FormatError(f"an image of {total} bytes has no room for the header length")
    length = int.from_bytes(image[:8], "little")
    if length > min(total - 8, _MAX_HEADER_BYTES):
        raise FormatError(f"a header of {length} bytes does not fit into {total} bytes")
    try:
        header = json.loads(bytes(image[8 : 8 + length]).decode("utf-8"))
    except ValueError as error:
        raise FormatError(f"the header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError("the header is no JSON object")
    header.pop("__metadata__", None)
    entries = [(name, *_entry(name, entry)) for name, entry in header.items()]
    end = 0
    for name, _, _, (start, stop) in sorted(entries, key=lambda entry: entry[3]):
        if start != end:
            raise FormatError(
                f"tensor {name!r} starts at byte {start} of the data, but the one before ends at {end}"
            )
        end = stop
    data = image[8 + length :]
    if end != len(data):
        raise FormatError(f"the tensors end at byte {end} of the data, which has {len(data)}")
    return {name: _view(data, dtype, shape, span) for name, dtype, shape, span in entries}


def parts(tensors: Mapping[str, Tensor]) -> tuple[int, list[Any]]:
    """Byte count and pieces, in order, of the image of `tensors`; wide elements first, so all are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].codes.itemsize, item[0]))
    header: dict[str, Any] = {}
    pieces: list[Any] = []
    offset = 0
    for name, tensor in ordered:
        array = np.ascontiguousarray(tensor.codes)
        dtype = DTYPES[tensor.dtype].safetensors
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
        if array.nbytes:
            pieces.append(array.reshape(-1).view(np.uint8).data)
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return 8 + len(text) + offset, [len(text).to_bytes(8, "little") + text, *pieces]


def image(tensors: Mapping[str, Tensor]) -> bytes:
    """The whole image as bytes."""
    return b"".join(parts(tensors)[1])


def _entry(name: str, entry: Any) -> tuple[Dtype, list[int], tuple[int, int]]:
    if not isinstance(entry, dict):
        raise FormatError(f"the entry of tensor {name!r} is no JSON object")
    dtype = _BY_SAFETENSORS.get(entry.get("dtype", ""))
    if dtype is None:
        raise FormatError(
            f"tensor {name!r} has dtype {entry.get('dtype')!r}: known are {', '.join(_BY_SAFETENSORS)}"
        )
    shape, span = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if shape is None:
        raise FormatError(f"tensor {name!r} has shape {entry.get('shape')!r}, which is no list of counts")
    if span is None or len(span) != 2 or span[0] > span[1]:
        raise FormatError(
            f"tensor {name!r} has data_offsets {entry.get('data_offsets')!r}: give start and end"
        )
    needed = dtype.size_bytes
    for extent in shape:
        needed *= extent
    if span[1] - span[0] != needed:
        raise FormatError(f"tensor {name!r} needs {needed} bytes but has {span[1] - span[0]}")
    return dtype, shape, (span[0], span[1])


def _counts(value: Any) -> list[int] | None:
    are_counts = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    return value if are_counts else None


def _view(data: memoryview, dtype: Dtype, shape: list[int], span: tuple[int, int]) -> Tensor:
    codes = np.frombuffer(data[span[0] : span[1]], dtype=dtype.storage).reshape(shape)
    return Tensor(dtype.name, codes if codes.flags.aligned else codes.copy())
