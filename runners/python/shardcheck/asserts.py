"""Assertions for tests of attention functions, in the place of `assert_close(…, atol=2e-2)`.

    assert_decode(q, kv_cache, block_table, seq_lens, out, lse, kv_lora_rank=512, softmax_scale=scale)

Tensors are torch tensors of any device or numpy arrays. Each element of the output is judged by its own
interval, computed in float64 from the values that the block table addresses; a failure names token, head,
rank, stage and the known slip that gives what was seen (docs/check.md). The judge is the program
`shardcheck`: `SHARDCHECK_BIN`, or the one on `PATH`.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import operator
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import numpy as np

from shardcheck.dtypes import DTYPES, Dtype, dtype_named
from shardcheck.profile import Contract
from shardcheck.safetensors import parts
from shardcheck.tensor import Tensor

Array = Any
"""A torch tensor, a numpy array, or a `shardcheck.Tensor`."""
ContractLike = Union[str, Contract, Mapping[str, Any]]
"""`"bf16"`, `"f16"`, `"f32"`, `"fp8"`, a `shardcheck.Contract`, or a mapping with all fields of one."""

_KV_DTYPES = {"fp8": "e4m3fn", "fp8_e4m3": "e4m3fn", "fp8_e5m2": "e5m2", "bfloat16": "bf16", "float16": "f16"}
_FAILED, _USAGE, _UNDECIDED = 1, 2, 3


class CheckFailed(AssertionError):
    """A call whose output is not what it may be.

    `finding` is the report, as `shardcheck check --json` gives it.
    """

    def __init__(self, text: str, finding: dict[str, Any]) -> None:
        super().__init__(text)
        self.finding = finding


class CheckUndecided(CheckFailed):
    """A call that can't be judged: an input that is read is no number, or no bound follows."""


class CheckError(ValueError):
    """Arguments that do not fit each other: nothing was judged."""


class BinaryNotFound(RuntimeError):
    """The program `shardcheck` is nowhere to be found, or can't be run."""


def _answers(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Turns what arrays say that can't be read as they are into a `CheckError`; a name that is no argument stays a `TypeError`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def answering(*given: Any, **named: Any) -> dict[str, Any]:
        signature.bind(*given, **named)
        try:
            return function(*given, **named)
        except (CheckFailed, CheckError, BinaryNotFound):
            raise
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            kind = type(error).__name__
            raise CheckError(f"the arguments can't be read as arrays and numbers: {kind}: {error}") from error

    return answering


@_answers
def assert_decode(
    q: Array,
    kv_cache: Array | Sequence[Array],
    block_table: Array,
    seq_lens: Array,
    out: Array | Sequence[Array],
    lse: Array | Sequence[Array] | None = None,
    contract: ContractLike = "bf16",
    *,
    softmax_scale: float | None = None,
    sm_scale: float | None = None,
    kv_lora_rank: int | None = None,
    query_start_loc: Array | None = None,
    layout: str = "NHD",
    k_scale: float = 1.0,
    v_scale: float | None = None,
    kv_dtype: str | None = None,
    dtype: str | None = None,
    world_size: int = 1,
    interleave: int = 1,
    per_rank: bool | None = None,
    merge: str | None = None,
    lse_base: str = "e",
    lse_layout: str | None = None,
    empty_rows: str = "zeros",
    statistics: bool = True,
) -> dict[str, Any]:
    """Asserts that `out` (and `lse`) is attention of each new token to its request's paged cache.

    Shapes, with `T` rows of `n` requests, `H` query heads, `K` KV heads, block size `B`:

    * `q` `[T, H, D]`. MLA: the absorbed query with its rotary part, `[T, H, kv_lora_rank + rope]`, or the
      pair of both parts.
    * `kv_cache`. MLA (`kv_lora_rank` given): `[blocks, B, D]`. Otherwise the pair `(keys, values)`, each
      `[blocks, B, K, D]` (`layout="NHD"`) or `[blocks, K, B, D]` (`"HND"`), or both in one tensor
      `[2, blocks, …]` or `[blocks, 2, …]`. With an axis of ranks in front, or a list of one cache a rank,
      each rank's cache holds its own tokens, dealt in runs of `interleave`. One cache without that axis and
      `world_size > 1` is the whole context, of which the ranks had their shares.
    * `block_table` `[n, width]`, `seq_lens` `[n]`: tokens of each request, the new ones included;
      `query_start_loc` `[n + 1]` where requests have different numbers of rows (else `T / n` each). Rows
      beyond its end are padding and not judged.
    * `out` `[T, H, Dv]` or `[T, H·Dv]`, or one a rank: `[ranks, T, H / ranks, Dv]` (heads dealt) or
      `[ranks, T, H, Dv]` (all alike).
    * `lse` `[T, H]` or `[H, T]` in f32 (`lse_layout="TH"`/`"HT"` where T equals H); `lse_base` is
      `"e"` or `"2"`.

    `softmax_scale` (or `sm_scale`) is the factor on scores, 1/√D by default without MLA. `k_scale` and
    `v_scale` multiply stored keys and values. `dtype` says what 16-bit codes in `uint16` arrays are,
    `kv_dtype` what 8-bit codes in a cache are (`"fp8"` is e4m3fn). `contract` says how the call rounds; the
    output's type is that of `out`. `merge` (`"a2a"`, `"ag_rs_f32"`, `"ag_rs_bf16"`, `"ag_rs_f16"`) says in which arithmetic
    ranks are merged. `empty_rows="undefined"` leaves rows without tokens alone; else they are zero with LSE
    −inf. `statistics=False` judges elements alone: with it, the errors of the whole output are examined too,
    which see a lost token of a long context that no element shows.

    Returns the report. Raises `CheckFailed` (an `AssertionError`), `CheckUndecided`, `CheckError` for
    arguments that do not fit.
    """
    return _attention("decode", **{**locals(), "causal": True})


@_answers
def assert_verify(
    q: Array,
    kv_cache: Array | Sequence[Array],
    block_table: Array,
    seq_lens: Array,
    out: Array | Sequence[Array],
    lse: Array | Sequence[Array] | None = None,
    contract: ContractLike = "bf16",
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    sm_scale: float | None = None,
    kv_lora_rank: int | None = None,
    query_start_loc: Array | None = None,
    layout: str = "NHD",
    k_scale: float = 1.0,
    v_scale: float | None = None,
    kv_dtype: str | None = None,
    dtype: str | None = None,
    world_size: int = 1,
    interleave: int = 1,
    per_rank: bool | None = None,
    merge: str | None = None,
    lse_base: str = "e",
    lse_layout: str | None = None,
    empty_rows: str = "zeros",
    statistics: bool = True,
) -> dict[str, Any]:
    """Asserts that `out` is attention of several rows a request, such as drafts under verification.

    Arguments are those of `assert_decode`. Row `t` of the last `q` tokens of a request of `L` tokens sees
    `L − q + 1 + t` of them; with `causal=False` every row sees all `L`, as in a draft block that is filled
    in one pass.
    """
    return _attention("verify", **locals())


@_answers
def assert_merge(
    partial_out: Array | Sequence[Array],
    partial_lse: Array | Sequence[Array],
    out: Array | Sequence[Array],
    lse: Array | Sequence[Array] | None = None,
    contract: ContractLike = "bf16",
    *,
    merge: str | None = None,
    dtype: str | None = None,
    lse_base: str = "e",
    lse_layout: str | None = None,
    empty_rows: str = "zeros",
) -> dict[str, Any]:
    """Asserts that `out` (and `lse`) is what partial results join to by their log-sum-exp.

    `partial_out` `[N, T, H, D]` and `partial_lse` `[N, T, H]` or `[N, H, T]` (or lists of N), `out`
    `[T, H, D]` or with ranks in front as in `assert_decode`. A part with LSE −inf holds no token, and what
    stands beside it is ignored. All LSEs are in `lse_base`.
    """
    header = _header("merge", contract, merge, lse_base, lse_layout, empty_rows)
    tensors = {
        "partial_out": _float(_stacked(partial_out), dtype),
        "partial_lse": _float(_stacked(partial_lse), None),
        "out": _float(_stacked(out), dtype),
    }
    if lse is not None:
        tensors["lse"] = _float(_stacked(lse), None)
    return _judged(header, tensors)


@_answers
def assert_layout(
    seq_lens: Array,
    *,
    world_size: int,
    interleave: int = 1,
    block_size: int | None = None,
    local_lens: Array | None = None,
    slot_mapping: Array | None = None,
    row_lens: Array | None = None,
    block_table: Array | None = None,
    query_start_loc: Array | None = None,
    rank: int | None = None,
    causal: bool = True,
) -> dict[str, Any]:
    """Asserts the integers of a sharded cache: any of `local_lens`, `slot_mapping`, `row_lens`.

    * `local_lens` `[world_size, n]`: how many of a request's `seq_lens` tokens each rank stores.
    * `slot_mapping` `[world_size, T]`: the row of each rank's cache where the key of each of the step's rows
      belongs, −1 where another rank stores it; needs `block_table` `[n, width]` and `block_size`. Padding at
      its end is −1.
    * `row_lens` `[world_size, T]`: how many tokens of each rank each of the step's rows sees.

    With `rank`, each is that of one rank, `[n]` or `[T]`. Rows are the last tokens of each request,
    `query_start_loc` `[n + 1]` says how many. Tokens are dealt to ranks in runs of `interleave`.
    """
    header = {
        "schema_version": 1,
        "check": "layout",
        "world": _count("world_size", world_size),
        "interleave": _count("interleave", interleave),
        "block_size": None if block_size is None else _count("block_size", block_size),
        "rank": None if rank is None else _count("rank", rank),
        "mask": "causal" if causal else "bidirectional",
    }
    given = {
        "seq_lens": seq_lens,
        "local_lens": local_lens,
        "slot_mapping": slot_mapping,
        "row_lens": row_lens,
        "block_table": block_table,
        "query_start_loc": query_start_loc,
    }
    return _judged(header, {name: _integers(value) for name, value in given.items() if value is not None})


def block_table_of(
    kv_indptr: Array, kv_indices: Array, kv_last_page_len: Array, page_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """`block_table` and `seq_lens` out of FlashInfer's ragged page lists.

    Request `i` has the pages `kv_indices[kv_indptr[i]:kv_indptr[i + 1]]`, of which the last holds
    `kv_last_page_len[i]` tokens. What a row has beyond its pages is −1, which no assertion reads.
    """
    starts, pages, last = (_integers(value).codes for value in (kv_indptr, kv_indices, kv_last_page_len))
    ascending = starts.shape == (len(last) + 1,) and (np.diff(starts) >= 0).all()
    if not ascending or starts[-1] > len(pages):
        wanted = f"{len(last) + 1} ascending offsets into kv_indices"
        raise CheckError(f"kv_indptr is {starts.tolist()}: give {wanted}")
    counts = np.diff(starts)
    table = np.full((len(last), max(int(counts.max(initial=0)), 1)), -1, np.int64)
    for request, count in enumerate(counts):
        table[request, :count] = pages[starts[request] : starts[request + 1]]
    return table, np.where(counts > 0, (counts - 1) * page_size + last, 0)


def _attention(check: str, **given: Any) -> dict[str, Any]:
    header = _header(
        check, given["contract"], given["merge"], given["lse_base"], given["lse_layout"], given["empty_rows"]
    )
    latent, layout = given["kv_lora_rank"] is not None, str(given["layout"]).upper()
    if layout not in ("NHD", "HND"):
        raise CheckError(f"layout is {given['layout']!r}: use NHD or HND")
    v_scale = given["v_scale"]
    if v_scale is None:
        v_scale = given["k_scale"] if latent else 1.0
    header |= {
        "kv_lora_rank": given["kv_lora_rank"],
        "kv_layout": layout,
        "k_scale": _number("k_scale", given["k_scale"]),
        "v_scale": _number("v_scale", v_scale),
        "world": _count("world_size", given["world_size"]),
        "interleave": _count("interleave", given["interleave"]),
        "mask": "causal" if given["causal"] else "bidirectional",
        "statistics": bool(given["statistics"]),
    }
    q = given["q"]
    if isinstance(q, (tuple, list)):
        q = _concatenated(q)
    tensors = {"q": _float(q, given["dtype"]), "out": _float(_stacked(given["out"]), given["dtype"])}
    if given["lse"] is not None:
        tensors["lse"] = _float(_stacked(given["lse"]), None)
    for name in ("block_table", "seq_lens", "query_start_loc"):
        if given[name] is not None:
            tensors[name] = _integers(given[name])
    if given["softmax_scale"] is not None and given["sm_scale"] is not None:
        raise CheckError("softmax_scale and sm_scale are one argument by two names: give one of them")
    scale = given["softmax_scale"] if given["softmax_scale"] is not None else given["sm_scale"]
    if scale is None:
        if latent:
            raise CheckError("softmax_scale is needed for MLA: the width behind it is not that of the cache")
        scale = 1.0 / math.sqrt(q.shape[-1])
    header["softmax_scale"] = _number("softmax_scale", scale)
    caches = _caches(given["kv_cache"], latent)
    _add_caches(header, tensors, caches, given)
    return _judged(header, tensors)


def _header(
    check: str,
    contract: ContractLike,
    merge: str | None,
    lse_base: str,
    lse_layout: str | None,
    empty_rows: str,
) -> dict[str, Any]:
    if isinstance(contract, Contract):
        contract = contract.to_json()
    bases = {"e": "e", "2": "two", "two": "two"}
    if str(lse_base) not in bases:
        raise CheckError(f"lse_base is {lse_base!r}: use 'e' or '2'")
    return {
        "schema_version": 1,
        "check": check,
        "contract": contract if isinstance(contract, str) else dict(contract),
        "merge": merge,
        "lse_base": bases[str(lse_base)],
        "lse_layout": lse_layout,
        "empty_rows": empty_rows,
    }


def _caches(kv_cache: Any, latent: bool) -> dict[str, Array]:
    """The caches by their names in the image, lists of ranks stacked."""
    if latent:
        return {"kv_cache": _stacked(kv_cache)}
    if isinstance(kv_cache, (tuple, list)):
        if len(kv_cache) != 2:
            count = len(kv_cache)
            raise CheckError(f"without kv_lora_rank, kv_cache is a pair (keys, values), not {count} tensors")
        keys, values = kv_cache
    else:
        shape = tuple(kv_cache.shape)
        in_front, within = shape[:1] == (2,), shape[1:2] == (2,)
        if len(shape) != 5 or in_front == within:
            raise CheckError(
                f"kv_cache has shape {list(shape)}: give the pair (keys, values), or both in one tensor "
                "[2, blocks, …] or [blocks, 2, …], or kv_lora_rank for MLA"
            )
        keys, values = (kv_cache[0], kv_cache[1]) if in_front else (kv_cache[:, 0], kv_cache[:, 1])
    return {"key_cache": _stacked(keys), "value_cache": _stacked(values)}


def _add_caches(
    header: dict[str, Any], tensors: dict[str, Tensor], caches: dict[str, Array], given: dict[str, Any]
) -> None:
    """Adds the pages that the block table can lead to: a real cache is larger than any file should be."""
    latent, world = "kv_cache" in caches, header["world"]
    first = next(iter(caches.values()))
    shape = tuple(first.shape)
    per_rank = given["per_rank"]
    if per_rank is None:
        per_rank = len(shape) == 5 or (latent and len(shape) == 4 and world > 1 and shape[0] == world)
    axis = 1 if per_rank else 0
    if len(shape) < axis + 3 or len(shape) > 5:
        axes = "blocks, tokens of a block, heads and numbers"
        raise CheckError(f"a cache has shape {list(shape)}: it has axes for {axes}")
    header["per_rank"] = bool(per_rank)
    heads_first = header["kv_layout"] == "HND" and not (latent and len(shape) == axis + 3)
    block = shape[axis + 2] if heads_first else shape[axis + 1]
    header["cache_blocks"] = shape[axis]
    needed = _needed_blocks(tensors, block * world if per_rank else block, shape[axis])
    tensors["blocks"] = Tensor.of(needed)
    for name, cache in caches.items():
        if cache.shape[axis] != shape[axis]:
            raise CheckError(f"{name} has {cache.shape[axis]} blocks, the other cache {shape[axis]}")
        stored = _float(_taken(cache, needed, axis), given["kv_dtype"] or given["dtype"])
        if given["kv_dtype"] and stored.dtype != _named(given["kv_dtype"]).name:
            raise CheckError(f"kv_dtype is {given['kv_dtype']!r}, but {name} holds {stored.dtype}")
        tensors[name] = stored


def _needed_blocks(tensors: dict[str, Tensor], span: int, blocks: int) -> np.ndarray:
    """Numbers of the blocks that hold the longest request, in every row of the table, and one token more."""
    table, lens = tensors["block_table"].codes, tensors["seq_lens"].codes
    if table.ndim != 2 or span <= 0:
        raise CheckError(f"block_table has shape {list(table.shape)}: it is [requests, width]")
    columns = int(max(lens.max(initial=0), 0)) // span + 1
    numbers = np.unique(table[:, :columns].astype(np.int64))
    # what names no block is for the judge to refuse
    return numbers[(numbers >= 0) & (numbers < blocks)]


def _taken(cache: Array, numbers: np.ndarray, axis: int) -> Array:
    if isinstance(cache, Tensor):
        return Tensor(cache.dtype, np.take(cache.codes, numbers, axis=axis))
    if isinstance(cache, np.ndarray):
        return np.take(cache, numbers, axis=axis)
    torch = sys.modules["torch"]
    index = torch.from_numpy(numbers).to(cache.device)
    if cache.element_size() == 1:
        # not every 8-bit type can be indexed, bytes can
        return cache.view(torch.uint8).index_select(axis, index).view(cache.dtype)
    return cache.index_select(axis, index)


def _stacked(value: Any) -> Array:
    """A list of one array a rank as one array with ranks in front."""
    if not isinstance(value, (tuple, list)):
        return value
    if not value:
        raise CheckError("a list of arrays is empty: give one array a rank")
    if isinstance(value[0], np.ndarray):
        return np.stack(value)
    if isinstance(value[0], Tensor):
        return Tensor(value[0].dtype, np.stack([part.codes for part in value]))
    torch = sys.modules["torch"]
    if value[0].element_size() == 1:
        return torch.stack([part.view(torch.uint8) for part in value]).view(value[0].dtype)
    return torch.stack(list(value))


def _concatenated(values: Sequence[Array]) -> Array:
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values, axis=-1)
    if isinstance(values[0], Tensor):
        return Tensor(values[0].dtype, np.concatenate([part.codes for part in values], axis=-1))
    return sys.modules["torch"].cat(list(values), dim=-1)


def _float(value: Array, dtype: str | None) -> Tensor:
    """A tensor of floats; integer codes are read as `dtype`."""
    try:
        tensor = Tensor.of(value)
    except TypeError as error:
        raise CheckError(str(error)) from None
    if dtype is None:
        return tensor
    named = _named(dtype)
    if tensor.dtype not in ("u8", "u16"):
        return tensor
    if named.storage != DTYPES[tensor.dtype].storage:
        raise CheckError(f"codes of {dtype} have {named.size_bytes} bytes, those of {tensor.dtype} don't")
    return Tensor(named.name, tensor.codes)


def _named(dtype: str) -> Dtype:
    try:
        return dtype_named(_KV_DTYPES.get(dtype, dtype))
    except ValueError as error:
        raise CheckError(str(error)) from None


def _integers(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "detach"):
        value = value.detach().to("cpu").numpy()
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "iu":
        raise CheckError(f"lengths, tables and slots are integers, not {array.dtype}")
    return Tensor.of(array.astype(np.int64))


def _number(name: str, value: Any) -> float:
    """A finite number out of a number, or out of a tensor that holds one."""
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        raise CheckError(f"{name} is {value!r}: give one number") from None
    if not math.isfinite(number):
        raise CheckError(f"{name} is {number}: give a finite number")
    return number


def _count(name: str, value: Any) -> int:
    """A whole number, of numpy or torch as well."""
    try:
        return operator.index(value.item() if hasattr(value, "item") else value)
    except TypeError:
        raise CheckError(f"{name} is {value!r}: give a whole number") from None


def _binary() -> str:
    named = os.environ.get("SHARDCHECK_BIN")
    if named:
        if not os.path.isfile(named):
            raise BinaryNotFound(f"SHARDCHECK_BIN is {named}, which is no file")
        return named
    found = shutil.which("shardcheck")
    if found is None:
        raise BinaryNotFound(
            "the program `shardcheck`, which judges, is not on PATH: build it in a checkout with "
            "`cargo build --release` and set SHARDCHECK_BIN to target/release/shardcheck, or run "
            "`cargo install --path harness`"
        )
    return found


def _write(file: Any, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The image: what `parts` gives, with the header in its metadata."""
    _, pieces = parts(tensors)
    entries = json.loads(bytes(pieces[0][8:]))
    said = {name: value for name, value in header.items() if value is not None}
    entries["__metadata__"] = {"shardcheck": json.dumps(said)}
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for piece in pieces[1:]:
        file.write(piece)


def _judged(header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    binary, kept = _binary(), os.environ.get("SHARDCHECK_KEEP")
    prefix = f"shardcheck-{header['check']}-"
    if kept:
        os.makedirs(kept, exist_ok=True)
    descriptor, path = tempfile.mkstemp(prefix=prefix, suffix=".safetensors", dir=kept or None)
    keep = False
    try:
        with os.fdopen(descriptor, "wb") as file:
            _write(file, header, tensors)
        try:
            command = [binary, "check", "--json", path]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise BinaryNotFound(f"{binary} can't be run: {error}") from None
        if done.returncode == _USAGE and "unrecognized subcommand" in done.stderr:
            raise BinaryNotFound(f"{binary} is older than this package, and knows no `check`: build it anew")
        if done.returncode == _USAGE:
            raise CheckError(done.stderr.strip().removeprefix("error: "))
        if done.returncode not in (0, _FAILED, _UNDECIDED):
            raise BinaryNotFound(f"{binary} check ended with {done.returncode}: {done.stderr.strip() or 'no word'}")
        try:
            report: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            raise BinaryNotFound(f"{binary} is not shardcheck: it answers {done.stdout[:60]!r}") from None
        if done.returncode == 0:
            return report
        keep = kept is not None
        text = report["text"].rstrip()
        if keep:
            text += f"\n  again      shardcheck check {path}"
        raise (CheckFailed if done.returncode == _FAILED else CheckUndecided)(text, report)
    finally:
        if not keep:
            os.unlink(path)
