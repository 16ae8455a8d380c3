"""Element types: their names, storage, and exact codecs of the 8- and 16-bit floats.

Decoding is by table (every code of an 8- or 16-bit float is an f32 exactly). Encoding rounds to nearest, ties
to even, once, from f64: a value that goes through f32 first may round twice. The formats are IEEE binary16,
bfloat16, the OCP 8-bit formats E4M3 (`e4m3fn`) and E5M2, and `e4m3fnuz` (bias 8, no negative zero, one NaN).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

SATURATE = "saturate"
NON_FINITE = "non_finite"
OVERFLOW_POLICIES = (SATURATE, NON_FINITE)


@dataclass(frozen=True)
class FloatLayout:
    """Bit layout of a narrow float: widths in bits, the largest finite code, and how specials are written.

    `specials` is `ieee` (infinities and NaNs), `nan_only` (no infinity, NaN is all ones behind either sign)
    or `negative_zero_is_nan`.
    """

    bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    specials: str

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def sign_mask(self) -> int:
        """The sign bit."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True)
class Dtype:
    """One element type: names here and in safetensors, numpy type of its codes, layout if narrow."""

    name: str
    safetensors: str
    storage: np.dtype
    layout: FloatLayout | None = None
    unwritten: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return self.storage.itemsize


def _dtypes() -> dict[str, Dtype]:
    half = FloatLayout(16, 10, 15, 0x7BFF, "ieee")
    bfloat = FloatLayout(16, 7, 127, 0x7F7F, "ieee")
    e4m3fn = FloatLayout(8, 3, 7, 0x7E, "nan_only")
    e4m3fnuz = FloatLayout(8, 3, 8, 0x7F, "negative_zero_is_nan")
    e5m2 = FloatLayout(8, 2, 15, 0x7B, "ieee")
    rows = [
        Dtype("f64", "F64", np.dtype("<f8"), None, 0x7FF5_A5A5_A5A5_A5A5),
        Dtype("f32", "F32", np.dtype("<f4"), None, 0x7FA5_A5A5),
        Dtype("f16", "F16", np.dtype("<u2"), half, 0x7DA5),
        Dtype("bf16", "BF16", np.dtype("<u2"), bfloat, 0x7FA5),
        Dtype("e4m3fn", "F8_E4M3", np.dtype("u1"), e4m3fn),
        Dtype("e4m3fnuz", "F8_E4M3FNUZ", np.dtype("u1"), e4m3fnuz),
        Dtype("e5m2", "F8_E5M2", np.dtype("u1"), e5m2),
        Dtype("i64", "I64", np.dtype("<i8"), None, 0xA5A5_A5A5_A5A5_A5A5),
        Dtype("i32", "I32", np.dtype("<i4"), None, 0xA5A5_A5A5),
        Dtype("u16", "U16", np.dtype("<u2")),
        Dtype("u8", "U8", np.dtype("u1")),
    ]
    return {row.name: row for row in rows}


DTYPES: dict[str, Dtype] = _dtypes()
"""Every element type by name."""


def dtype_named(name: str) -> Dtype:
    """The element type of that name; `ValueError` lists the names when there is none."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ValueError(f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}") from None


def decode(name: str, codes: np.ndarray) -> np.ndarray:
    """Values of codes: f32 for the 8- and 16-bit floats (exact), the array itself for every other type."""
    dtype = dtype_named(name)
    if dtype.layout is None:
        return codes
    return np.asarray(_table(name)[codes])


def encode(name: str, values: np.ndarray, overflow: str = NON_FINITE) -> np.ndarray:
    """Codes of values in an element type, rounded to nearest even once.

    Beyond the largest finite value (judged after rounding) `saturate` gives that value, also for an infinity,
    and `non_finite` an infinity, or NaN where the format has none. NaN becomes the quiet NaN without payload
    of the same sign. Integer types take nearest even and saturate; NaN becomes 0.
    """
    if overflow not in OVERFLOW_POLICIES:
        raise ValueError(f"unknown overflow policy {overflow!r}: use one of {', '.join(OVERFLOW_POLICIES)}")
    dtype = dtype_named(name)
    values = np.asarray(values)
    if dtype.layout is not None:
        return np.asarray(_encode_narrow(dtype.layout, values.astype(np.float64), overflow)).astype(
            dtype.storage
        )
    if dtype.storage.kind == "f":
        with np.errstate(over="ignore"):
            rounded = values.astype(dtype.storage)
        if overflow == SATURATE:
            limit = np.finfo(dtype.storage).max
            rounded = np.where(np.isinf(rounded), np.copysign(limit, rounded), rounded).astype(dtype.storage)
        return np.asarray(rounded)
    return _encode_integer(dtype, values)


def _encode_integer(dtype: Dtype, values: np.ndarray) -> np.ndarray:
    bounds = np.iinfo(dtype.storage)
    if values.dtype.kind in "iu":
        return np.asarray(np.clip(values, bounds.min, bounds.max)).astype(dtype.storage)
    nearest = np.nan_to_num(np.rint(values.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
    above, below = nearest >= float(bounds.max), nearest <= float(bounds.min)
    inside = np.where(above | below, 0.0, nearest).astype(dtype.storage)
    return np.asarray(np.where(above, bounds.max, np.where(below, bounds.min, inside))).astype(dtype.storage)


def _encode_narrow(layout: FloatLayout, values: np.ndarray, overflow: str) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint64).reshape(values.shape)
    sign = np.where(bits >> np.uint64(63) != 0, layout.sign_mask, 0).astype(np.int64)
    magnitude = _round_magnitude(layout, bits & np.uint64((1 << 63) - 1))
    beyond = magnitude > layout.max_code
    if overflow == SATURATE:
        magnitude = np.where(beyond, layout.max_code, magnitude)
        codes = sign | magnitude
    elif layout.specials == "negative_zero_is_nan":
        codes = np.where(beyond, layout.sign_mask, sign | magnitude)
    else:
        codes = sign | np.where(beyond, layout.max_code + 1, magnitude)
    if layout.specials == "negative_zero_is_nan":
        codes = np.where(magnitude == 0, 0, codes)
    return np.where(np.isnan(values), _nan_codes(layout, sign), codes)


def _nan_codes(layout: FloatLayout, sign: np.ndarray) -> np.ndarray:
    if layout.specials == "ieee":
        return sign | (layout.max_code + 1) | (1 << (layout.mantissa_bits - 1))
    if layout.specials == "nan_only":
        return sign | (layout.max_code + 1)
    return np.full_like(sign, layout.sign_mask)


def _round_magnitude(layout: FloatLayout, bits: np.ndarray) -> np.ndarray:
    """Code of a magnitude (bits of an f64) in a format whose exponent has no end, rounded to nearest even."""
    exponent = (bits >> np.uint64(52)).astype(np.int64) - 1023
    significand = ((bits & np.uint64((1 << 52) - 1)) | np.uint64(1 << 52)).astype(np.int64)
    step_exponent = np.maximum(exponent, layout.min_exponent)
    # past a shift of 54 nothing is left to round, and an int64 can't be shifted by more than 63
    shift = np.minimum(52 - layout.mantissa_bits + step_exponent - exponent, 60)
    kept = significand >> shift
    rest = significand & ((np.int64(1) << shift) - 1)
    half = np.int64(1) << (shift - 1)
    up = (rest > half) | ((rest == half) & (kept & 1 == 1))
    # the leading 1 in `kept` adds one to the exponent field, and so does a carry out of the fraction
    codes = ((step_exponent - layout.min_exponent) << layout.mantissa_bits) + kept + up
    return np.where(exponent == -1023, 0, codes)


@cache
def _table(name: str) -> np.ndarray:
    """f32 value of every code of a narrow float."""
    layout = DTYPES[name].layout
    assert layout is not None
    codes = np.arange(1 << layout.bits, dtype=np.int64)
    magnitude = codes & (layout.sign_mask - 1)
    negative = codes & layout.sign_mask != 0
    field, fraction = magnitude >> layout.mantissa_bits, magnitude & ((1 << layout.mantissa_bits) - 1)
    significand = np.where(field == 0, fraction, fraction + (1 << layout.mantissa_bits)).astype(np.float64)
    exponent = np.maximum(field, 1) - layout.bias - layout.mantissa_bits
    finite = np.ldexp(significand, exponent)
    finite = np.where(negative, -finite, finite)
    if layout.specials == "ieee":
        infinite = np.where(negative, -np.inf, np.inf)
        finite = np.where(magnitude == layout.max_code + 1, infinite, finite)
        finite = np.where(magnitude > layout.max_code + 1, np.nan, finite)
    elif layout.specials == "nan_only":
        finite = np.where(magnitude > layout.max_code, np.nan, finite)
    else:
        finite = np.where(codes == layout.sign_mask, np.nan, finite)
    with np.errstate(over="ignore"):
        table = finite.astype(np.float32)
    table.setflags(write=False)
    return table
