"""Triton on a machine without a GPU: its interpreter, what kernels lack in it, and where it rounds unlike any
device."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from shardcheck import Unsupported
from shardcheck.dtypes import decode, encode

# Triton's names of 8-bit floats, and ours.
_NARROW = {"float8e4nv": "e4m3fn", "float8e4b8": "e4m3fnuz", "float8e5": "e5m2"}

# What a kernel can't be launched with, and what the interpreter can't do: never a failure of the engine,
# never a pass.
_LIMITS = {
    "arange's range must be a power of 2": "the kernel takes ranks and widths that are powers of two only",
    "Shape element 0 must be a power of 2": "the kernel takes ranks and widths that are powers of two only",
    "to ir type": "this release of Triton's interpreter knows no such type",
    "CompilationError": "the kernel does not compile for these widths on this device",
    "to have matching head strides": "the engine asserts equal head strides of both states",
}


def prepare(device: str) -> Any:
    """Imports Triton for `device` (`cpu` or `cuda`) and returns the module. Must come before anything else
    imports it."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import triton

    if device == "cpu":
        _mend()
    return triton


@functools.cache
def _mend() -> None:
    """Mends the interpreter, once: a second time would mend what is mended."""
    from shardcheck.adapters import lockstep

    _complete_interpreted_functions()
    _convert_as_devices_do()
    _remember_types()
    _check_overflow_at_once()
    lockstep.install()


SHIMS = (
    "Triton's interpreter: kernels get the attribute `constexprs` that compiled ones have",
    "Triton's interpreter: f32 is rounded to bf16 to nearest even, as devices do; it truncates by itself",
    "Triton's interpreter: combined flags stay flags; by themselves they become bytes, which are no masks",
    "Triton's interpreter: 8-bit floats that are NaN are read as NaN; it reads them as numbers by itself",
    "Triton's interpreter: programs of a launch run together as long as they go the same way; by itself it runs one after the other",
)
"""What `prepare` changes on a CPU, for a profile."""


def rows_at_once(start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
    """Stands for `range` in a module whose kernels walk independent rows by it: gives all rows as one block `[n, 1]` of i32, which
    broadcasts against a row's columns `[D]`. The interpreter's time goes by operations and not by elements, so that a loop costs what one
    row costs. A block has a power of two of rows; the last one is there several times then. So rows must share nothing: none may load what
    one stores, and a row that runs twice must store the same."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    rows = np.arange(operator.index(start), operator.index(stop), operator.index(step), dtype=np.int32)
    if len(rows):
        count = 1 << (len(rows) - 1).bit_length()
        block = np.pad(rows, (0, count - len(rows)), mode="edge")[:, None]
        yield tl.tensor(TensorHandle(block, tl.int32), tl.block_type(tl.int32, [count, 1]))


def _remember_types() -> None:
    """The interpreter asks with every operation which numpy type stands for a type, and makes the whole table anew each time: a tenth of
    the time of a small kernel. Names of types are unique, so an answer holds for good."""
    from triton.runtime import interpreter

    asked = getattr(interpreter, "_get_np_dtype", None)
    if asked is None:
        return
    known: dict[str, Any] = {}

    def remembered(of: Any) -> Any:
        found = known.get(of.name)
        if found is None:
            found = known[of.name] = asked(of)
        return found

    interpreter._get_np_dtype = remembered


def _check_overflow_at_once() -> None:
    """The interpreter asks of every sum, difference and product of integers whether it overflows, by ten operations of its own. The same
    question to numpy takes a fiftieth of the time."""
    from triton.language import semantic

    # a class from Triton 3.4 on
    of_language = getattr(semantic, "TritonSemantic", None)
    asked = getattr(of_language, "binary_op_sanitize_overflow_impl", None)
    if asked is None:
        return
    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def at_once(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        kind, operation = lhs.type.scalar, exact.get(binary_op.__name__)
        if operation is None or kind.int_bitwidth > 32 or kind != rhs.type.scalar:
            asked(self, lhs, rhs, binary_op)
            return
        result = operation(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        fits = kind.get_int_min_value() <= result.min() and result.max() <= kind.get_int_max_value()
        assert fits, f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"

    of_language.binary_op_sanitize_overflow_impl = at_once


def _complete_interpreted_functions() -> None:
    """Launchers read `constexprs` of a kernel, the indices of its compile-time parameters, which only
    compiled ones have."""
    from triton.runtime.interpreter import InterpretedFunction

    if not hasattr(InterpretedFunction, "constexprs"):
        InterpretedFunction.constexprs = property(_constexprs)


def _constexprs(function: Any) -> list[int]:
    annotations = getattr(function.fn, "__annotations__", {})
    return [
        index
        for index, name in enumerate(function.arg_names)
        if "constexpr" in str(annotations.get(name, ""))
    ]


def _convert_as_devices_do() -> None:
    """The interpreter casts f32 to bf16 by cutting bits off, every device by rounding; NaN of an 8-bit float
    is a number to it, and flags from memory that are combined are bytes."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.cast_impl
    original_convert = InterpreterBuilder.create_fp_to_fp
    narrow = {getattr(tl, theirs): ours for theirs, ours in _NARROW.items() if hasattr(tl, theirs)}

    def cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return TensorHandle(encode("bf16", source.data), tl.bfloat16)
        return original(self, source, target)

    def convert(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        name = narrow.get(source.dtype.scalar)
        if name is not None and target.scalar == tl.float32:
            return TensorHandle(decode(name, source.data.view("uint8")), tl.float32)
        return original_convert(self, source, target, rounding)

    def of_flags(name: str) -> Any:
        combine = getattr(InterpreterBuilder, name)

        def combined(self: Any, left: Any, right: Any) -> Any:
            result = combine(self, left, right)
            both = left.data.dtype == bool and right.data.dtype == bool
            return TensorHandle(result.data.astype(bool), tl.int1) if both else result

        return combined

    for name in ("create_and", "create_or", "create_xor"):
        setattr(InterpreterBuilder, name, of_flags(name))
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = convert


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Turns what a kernel or the interpreter refuses by its nature into `Unsupported`, with the message that
    it gives."""
    try:
        yield
    except Exception as error:
        text = _chain(error)
        for sign, meaning in _LIMITS.items():
            if sign in text:
                raise Unsupported(f"{meaning}: {_last_line(text)}") from error
        raise


def _chain(error: BaseException | None) -> str:
    parts = []
    while error is not None:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


def _last_line(text: str) -> str:
    return next(line for line in reversed(text.splitlines()) if line.strip())[:300]
