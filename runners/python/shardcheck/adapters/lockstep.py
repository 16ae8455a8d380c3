"""Programs of a launch taken through a kernel together, under Triton's interpreter.

The interpreter runs a grid's programs one after the other and spends some 80 µs on an operation, however many elements it has. Here a
value that programs differ in has an axis more, in front, which the kernel doesn't see: one operation serves all of them. Where they part,
at a branch or a bound of a loop, what they stored is taken back and each part starts again by itself. What can't be done so is done one
program after the other. Programs of a device have no order; a kernel whose programs read what others write is a race there, and here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

PROGRAMS_AT_ONCE = 64
"""Programs that run together at most: a block of each is held at a time, and by then an operation's time is that of its elements."""

SWITCH = "SHARDCHECK_LOCKSTEP"
"""The environment variable that `0` keeps programs apart by."""

# Operations that happen once for each program, or whose arrays are laid out by hand.
_ALONE = (
    *("create_atomic", "create_descriptor", "create_make_", "create_print", "create_histogram", "create_extern", "create_inline"),
    "create_dot_scaled",
)


class Own(TensorHandle):
    """A value that each program has its own of: `data` is `[programs, *shape]`, a scalar's `[programs, 1]`."""


class OfRanks(TensorHandle):
    """An argument that each rank has its own of: `data` is `[ranks]`."""


class _Parted(BaseException):
    """Programs don't go the same way: `values` has what each decides by. Not an `Exception`, since the interpreter wraps those."""

    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.values = values


class _Alone(BaseException):
    """The kernel does what programs can only do one by one."""


class _Run:
    """The programs that run now, `[4, n]`: their places in the grid and their rank; what their stores overwrote."""

    def __init__(self, programs: np.ndarray) -> None:
        self.programs = programs
        self.overwritten: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def take_back(self) -> None:
        """Undoes all stores, the last one first."""
        for places, values, mask in reversed(self.overwritten):
            interpreter._interpreter.store(places, values, mask)


_running: _Run | None = None
# Modules of device functions that this launch has patched already.
_patched: set[int] = set()
# Kernels that were found to do what programs can only do one by one.
_kept_apart: set[Callable[..., Any]] = set()


def of_ranks(tensors: tuple[Any, ...]) -> Any:
    """An argument of a launch that is one for several ranks: where their tensors lie."""
    pointer = interpreter._implicit_cvt(tensors[0]).type
    return tl.tensor(OfRanks(np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64), pointer), pointer)


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """Within, each program runs by itself."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


class _Grid:
    """Stands for a launch's grid, which the interpreter asks for once the arguments are there: runs the programs, and leaves none."""

    def __init__(self, function: Callable[..., Any], grid: Any) -> None:
        self.function = function
        self.grid = grid
        self.apart = os.environ.get(SWITCH) == "0"

    def __call__(self, arguments: dict[str, Any]) -> tuple[int, ...]:
        grid = tuple(self.grid(arguments) if callable(self.grid) else self.grid)
        grid += (1,) * (3 - len(grid))
        interpreter.interpreter_builder.set_grid_dim(*grid)
        self.arguments = arguments
        ranks = max((len(a.handle.data) for a in arguments.values() if _is(a, OfRanks)), default=1)
        # in the interpreter's order, a rank after the other
        rank, *places = np.indices((ranks, *grid)).reshape(4, -1)
        programs = np.stack([*places, rank])
        for first in range(0, programs.shape[1], PROGRAMS_AT_ONCE):
            self._run(programs[:, first : first + PROGRAMS_AT_ONCE])
        return (0, 1, 1)

    def _run(self, programs: np.ndarray) -> None:
        waiting = [programs]
        while waiting:
            some = waiting.pop()
            if some.shape[1] > 1 and not self.apart and self.function not in _kept_apart:
                waiting += reversed(self._together(some))
            else:
                for program in some.T:
                    self._alone(program)

    def _alone(self, program: np.ndarray) -> None:
        interpreter.interpreter_builder.set_grid_idx(*program[:3].tolist())
        self.function(**{name: self._of_rank(value, program[3:]) for name, value in self.arguments.items()})

    def _together(self, programs: np.ndarray) -> list[np.ndarray]:
        """Runs programs together; returns those that have to run again, in parts."""
        global _running
        _running = run = _Run(programs)
        try:
            self.function(**{name: self._of_rank(value, programs[3]) for name, value in self.arguments.items()})
        except _Parted as parted:
            run.take_back()
            return [programs[:, parted.values == value] for value in dict.fromkeys(parted.values.tolist())]
        except _Alone:
            run.take_back()
            _kept_apart.add(self.function)
            return [programs]
        except Exception:
            # a program by itself says better what is wrong
            run.take_back()
            self.apart = True
            return [programs]
        finally:
            _running = None
        return []

    def _of_rank(self, value: Any, ranks: np.ndarray) -> Any:
        if not _is(value, OfRanks):
            return value
        data, kind = value.handle.data[ranks], value.handle.dtype
        handle = TensorHandle(data, kind) if len(ranks) == 1 else Own(data[:, None], kind)
        return tl.tensor(handle, value.type)


def install() -> None:
    """Lets every launch take its programs together. To be called once, when the interpreter is as it should be otherwise."""
    for name, method in inspect.getmembers(InterpreterBuilder, inspect.isfunction):
        if name.startswith("create_"):
            setattr(InterpreterBuilder, name, _for_all(name, method))
    for kind in (ReduceOps, ScanOps):
        kind.apply_impl = _along_axis(kind.apply_impl)
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._patch_lang_tensor = _with_common_values(interpreter._patch_lang_tensor)
    interpreter._patch_lang_core = _with_common_counts(interpreter._patch_lang_core)
    prepared, called = GridExecutor.__init__, GridExecutor.__call__

    def prepare(self: Any, function: Any, names: Any, grid: Any, *rest: Any, **named: Any) -> None:
        prepared(self, function, names, _Grid(function, grid), *rest, **named)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        _patched.clear()
        # `range` is a function of the language in a kernel, and of Python around it
        scope = self.fn.__globals__
        own_range = scope.get("range")
        scope["range"] = own_range or _range
        try:
            return called(self, *arguments, **named)
        finally:
            if own_range is None:
                del scope["range"]

    GridExecutor.__init__, GridExecutor.__call__ = prepare, call


def _range(*bounds: Any) -> Iterable[Any]:
    """Python's `range`, or the one of the language, whose steps programs take together though they begin at places of their own: they part
    only where they take more or fewer of them."""
    if not any(_is(bound, Own) for bound in bounds):
        return range(*bounds)
    first, end, step = (bounds if len(bounds) == 3 else (*bounds, 1)) if len(bounds) > 1 else (0, bounds[0], 1)
    begin, until, by = (_numbers(bound) for bound in (first, end, step))
    counts = np.maximum(0, -((begin - until) // by))
    if (counts != counts[0]).any():
        raise _Parted(counts)
    kind = first.type if _is(first, Own) else end.type if _is(end, Own) else tl.int32
    dtype = interpreter._get_np_dtype(kind)
    return (tl.tensor(Own((begin + index * by).astype(dtype)[:, None], kind), kind) for index in range(counts[0]))


def _numbers(bound: Any) -> np.ndarray:
    """What a bound of a loop is for each program."""
    assert _running is not None
    if _is(bound, Own):
        return bound.handle.data[:, 0].astype(np.int64)
    return np.full(_running.programs.shape[1], operator.index(getattr(bound, "value", bound)), dtype=np.int64)


def _with_common_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's patch of the language, whose loops programs then take together."""

    def patch(language: Any, *rest: Any) -> None:
        original(language, *rest)
        one = language.range

        def own_range(arg1: Any, arg2: Any = None, step: Any = None, **named: Any) -> Iterable[Any]:
            bounds = (0, arg1, step or 1) if arg2 is None else (arg1, arg2, step or 1)
            return _range(*bounds) if any(_is(bound, Own) for bound in bounds) else one(arg1, arg2, step, **named)

        language.range = language.static_range = own_range

    return patch


def _once_a_launch(original: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter patches the language before each call of a device function, which takes longer than most of them: once a launch will do."""

    def patch(function: Any) -> Any:
        module = id(function.__globals__)
        if module in _patched:
            return None
        scope = original(function)
        _patched.add(module)
        return scope

    return patch


def _is(value: Any, kind: type) -> bool:
    return isinstance(getattr(value, "handle", None), kind)


def _for_all(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of the interpreter, for values of all programs too."""
    alone = name.startswith(_ALONE) and name != "create_make_range"
    shaped = _refused if alone else _SHAPED.get(name, _element_by_element)

    @functools.wraps(method)
    def operation(self: Any, *arguments: Any, **named: Any) -> Any:
        if _running is None:
            return method(self, *arguments, **named)
        return shaped(functools.partial(method, self), *arguments, **named)

    return operation


def _element_by_element(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    result = method(*arguments, **named)
    if isinstance(result, TensorHandle) and _any_own(*arguments, *named.values()):
        return Own(result.data, result.dtype)
    return result


def _any_own(*values: Any) -> bool:
    return any(isinstance(value, Own) for value in values)


def _where_own(change: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that knows the axes of its arguments: `change(…)` is it where programs have values of their own among them."""

    def shaped(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if not _any_own(*arguments):
            return method(*arguments, **named)
        return change(*arguments, **named)

    return shaped


def _refused(*_: Any, **__: Any) -> Any:
    raise _Alone


def _program_id(_: Callable[..., Any], axis: int) -> Any:
    assert _running is not None
    return Own(_running.programs[axis].astype(np.int32)[:, None], tl.int32)


def _masked_load(method: Callable[..., Any], places: Any, mask: Any, other: Any, *rest: Any) -> Any:
    given = [handle for handle in (places, mask, other) if handle is not None]
    if not _any_own(*given):
        return method(places, mask, other, *rest)
    data = np.broadcast_arrays(*(handle.data for handle in given))
    whole = [TensorHandle(np.ascontiguousarray(part), handle.dtype) for part, handle in zip(data, given, strict=True)]
    found = method(*whole, *[None] * (3 - len(whole)), *rest)
    return Own(found.data, found.dtype)


def _masked_store(_: Callable[..., Any], places: Any, value: Any, mask: Any, *__: Any) -> Any:
    at, what, where = (np.ascontiguousarray(part) for part in np.broadcast_arrays(places.data, value.data, mask.data))
    assert _running is not None
    before = interpreter._interpreter.load(at, where, np.zeros_like(what), what.dtype)
    _running.overwritten.append((at, before, where))
    return interpreter._interpreter.store(at, what, where)


def _splat(handle_type: Any, scalar: Any) -> Any:
    shape = tuple(handle_type.shape)
    data = scalar.data.reshape(-1, *(1,) * len(shape))
    return Own(np.ascontiguousarray(np.broadcast_to(data, (len(data), *shape))), scalar.dtype.scalar)


def _concatenated(left: Any, right: Any) -> Any:
    both = [_spread(handle) for handle in (left, right)]
    return Own(np.concatenate(both, axis=1), left.dtype.scalar)


def _joined(left: Any, right: Any) -> Any:
    return Own(np.stack([_spread(left), _spread(right)], axis=-1), left.dtype.scalar)


def _split(value: Any) -> Any:
    kind = value.dtype.scalar
    halves = value.data[..., 0], value.data[..., 1]
    return tuple(Own(half if half.ndim > 1 else half[:, None], kind) for half in halves)


def _gathered(source: Any, indices: Any, axis: int) -> Any:
    return Own(np.take_along_axis(_spread(source), _spread(indices), axis=axis + 1), source.dtype.scalar)


def _spread(handle: Any) -> np.ndarray:
    """A value's data with the axis of programs, whether they differ in it or not."""
    assert _running is not None
    if isinstance(handle, Own):
        return handle.data
    return np.broadcast_to(handle.data, (_running.programs.shape[1], *handle.data.shape))


def _own(data: np.ndarray, like: Any) -> Own:
    return Own(data, like.dtype.scalar)


_SHAPED: dict[str, Callable[..., Any]] = {
    "create_get_program_id": _program_id,
    "create_masked_load": _masked_load,
    "create_masked_store": _masked_store,
    "create_expand_dims": _where_own(lambda a, axis: _own(np.expand_dims(a.data, axis + 1 if axis >= 0 else axis), a)),
    "create_broadcast": _where_own(lambda a, shape: _own(np.broadcast_to(a.data, (len(a.data), *shape)), a)),
    "create_reshape": _where_own(lambda a, shape, *_: _own(a.data.reshape(len(a.data), *shape), a)),
    "create_trans": _where_own(lambda a, order: _own(np.transpose(a.data, (0, *(axis + 1 for axis in order))), a)),
    "create_unsplat": _where_own(lambda a: _own(a.data.reshape(len(a.data), -1)[:, :1], a)),
    "create_splat": _where_own(_splat),
    "create_cat": _where_own(_concatenated),
    "create_join": _where_own(_joined),
    "create_split": _where_own(_split),
    "create_gather": _where_own(_gathered),
}
"""Operations that know the axes of their values; all others go element by element."""


def _along_axis(original: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction or a scan along an axis, one further on where programs have values of their own."""

    def apply_impl(self: Any, given: Any) -> Any:
        inputs = given if isinstance(given, tuple) else (given,)
        if _running is None or not _any_own(*(each.handle for each in inputs)):
            return original(self, given)
        data = [_spread(each.handle) for each in inputs]
        axis = self.axis
        if axis is None:
            if getattr(self, "keep_dims", False):
                raise _Alone
            data, axis = [part.reshape(len(part), -1) for part in data], 0
        axis = axis % (data[0].ndim - 1) + 1
        further = (axis, self.combine_fn, *(getattr(self, name) for name in ("keep_dims", "reverse") if hasattr(self, name)))
        spread = tuple(tl.tensor(TensorHandle(part, each.dtype), each.type) for part, each in zip(data, inputs, strict=True))
        of_all = type(self)(*further)
        one = of_all.to_tensor
        of_all.to_tensor = lambda ret, dtype: _typed(ret, dtype) if np.ndim(ret) else one(ret, dtype)
        return original(of_all, spread)

    return apply_impl


def _typed(found: np.ndarray, kind: Any) -> Any:
    """A result `[programs, *shape]` as a value of the kernel's, of type `shape`."""
    data = found.astype(interpreter._get_np_dtype(kind))
    if data.ndim == 1:
        return tl.tensor(Own(data[:, None], kind.scalar), kind)
    return tl.tensor(Own(data, kind.scalar), tl.block_type(kind, list(data.shape[1:])))


def _with_common_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's patch of tensors, whose truth, index and transpose then are those that programs have in common."""

    def patch(tensor: Any, *rest: Any) -> None:
        original(tensor, *rest)
        truth, index, transposed = tensor.__bool__, tensor.__index__, tensor.T

        def common(self: Any, convert: Callable[[np.ndarray], np.ndarray]) -> Any:
            values = convert(self.handle.data.reshape(len(self.handle.data), -1)[:, 0])
            if (values != values[0]).any():
                raise _Parted(values)
            return values[0].item()

        def own_truth(self: Any) -> bool:
            if not isinstance(self.handle, Own):
                return truth(self)
            # a block is true, whatever it holds
            return True if self.handle.data[0].size > 1 else common(self, lambda values: values.astype(bool))

        def own_index(self: Any) -> int:
            return common(self, np.asarray) if isinstance(self.handle, Own) else index(self)

        def own_transposed(self: Any) -> Any:
            if not isinstance(self.handle, Own):
                return transposed.fget(self)
            axes = range(1, self.handle.data.ndim)
            handle = _own(np.transpose(self.handle.data, (0, *reversed(axes))), self.handle)
            return tl.tensor(handle, tl.block_type(self.dtype, list(reversed(self.type.shape))))

        tensor.__bool__, tensor.__index__, tensor.T = own_truth, own_index, property(own_transposed)

    return patch
