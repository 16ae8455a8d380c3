"""Triton on a machine without a GPU: its interpreter, and the attributes of compiled kernels that interpreted ones lack."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from shardcheck import Unsupported

# What a kernel can't be launched with, and what the interpreter can't do: never a failure of the engine, never a pass.
_LIMITS = {
    "arange's range must be a power of 2": "the kernel takes ranks and widths that are powers of two only",
    "Shape element 0 must be a power of 2": "the kernel takes ranks and widths that are powers of two only",
}


def prepare(device: str) -> Any:
    """Imports Triton for `device` (`cpu` or `cuda`) and returns the module. Must come before anything else imports it."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import triton

    if device == "cpu":
        _complete_interpreted_functions()
    return triton


def _complete_interpreted_functions() -> None:
    """Launchers read `constexprs` of a kernel, the indices of its compile-time parameters, which only compiled ones have."""
    from triton.runtime.interpreter import InterpretedFunction

    if not hasattr(InterpretedFunction, "constexprs"):
        InterpretedFunction.constexprs = property(_constexprs)


def _constexprs(function: Any) -> list[int]:
    annotations = getattr(function.fn, "__annotations__", {})
    return [index for index, name in enumerate(function.arg_names) if "constexpr" in str(annotations.get(name, ""))]


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Turns what a kernel or the interpreter refuses by its nature into `Unsupported`, with the message that it gives."""
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
