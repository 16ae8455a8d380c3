#!/usr/bin/env python3
"""One case of a context-parallel attention engine by itself. @NEEDS@

@USE@ It ends with 0 when every element is allowed, with 1 and the worst elements when
not, with 2 when the question could not be asked. `--self` holds the plain reference against what is allowed,
`--seen` what the engine answered when the case was recorded. shardcheck wrote this file: its command
`shardcheck explain operations` says what each tensor holds.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import sys
import traceback
from pathlib import Path

MISSING = [name for name in "@PACKAGES@".split() if importlib.util.find_spec(name) is None]
if MISSING:
    print(f"{sys.executable} has no {', no '.join(MISSING)}, which this script needs", file=sys.stderr)
    sys.exit(2)

import numpy as np

DATA = json.loads(r"""@DATA@""")

@ENGINE@


# ----------------------------------------------------------------------------------------------------------
# Nothing below needs a change.

FLOATS = {"f64": "<f8", "f32": "<f4", "f16": "<f2", "i64": "<i8", "i32": "<i4", "u16": "<u2", "u8": "|u1"}
SIGNIFICANT_BITS = {"bf16": 8, "f16": 11, "f32": 24}


def load_archive() -> dict:
    """Arrays that lie beside this file, where they are too large to lie in it."""
    name = DATA["archive"]
    return dict(np.load(Path(__file__).resolve().parent / name)) if name else {}


ARCHIVE = load_archive()


def array(entry: dict) -> np.ndarray:
    """An embedded array; bf16 as the float32 that it is the upper half of."""
    raw = ARCHIVE[entry["key"]].tobytes() if "key" in entry else base64.b64decode(entry["base64"])
    if entry["dtype"] == "bf16":
        bits = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(entry["shape"])
    return np.frombuffer(raw, FLOATS[entry["dtype"]]).reshape(entry["shape"]).copy()


def arrays(entries: dict) -> dict:
    """Embedded arrays by name."""
    return {name: array(entry) for name, entry in entries.items()}


CASE = DATA["case"]
FAMILY = DATA["family"]
CONFIGURATION = DATA["configuration"]
WANTED = DATA["wanted"]


def inputs_of_case() -> dict:
    """What `engine` is given."""
    inputs = arrays(DATA["inputs"])
    if DATA["writes"]:
        inputs["writes"] = [arrays(write) for write in DATA["writes"]]
    return inputs


def softmax_state(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """Attention output and natural LSE of one row; zeros and -inf where nothing is visible."""
    if scores.size == 0:
        return np.zeros(values.shape[1]), -np.inf
    most = scores.max()
    weights = np.exp(scores - most)
    return weights @ values / weights.sum(), most + np.log(weights.sum())


def reference_attention() -> dict:
    """Global attention in float64 over what the cache holds, rank r keeping heads [r*H, (r+1)*H). A head's sink is one
    more score of each row, whose value is zero."""
    own = DATA["attention"]
    query = array(own["query"]).astype(np.float64)
    keys = [array(entry).astype(np.float64) for entry in own["keys"]]
    values = [array(entry).astype(np.float64) for entry in own["values"]]
    up = array(own["w_uv"]).astype(np.float64) if own["w_uv"] else None
    ranks, heads = own["ranks"], own["heads"]
    gathered, kv_heads = own["gathered_heads"], own["kv_heads"]
    rows = len(own["rows"])
    width = up.shape[2] if up is not None else own["value_dim"]
    out, lse = np.zeros((ranks, rows, heads, width)), np.full((ranks, rows, heads), -np.inf)
    for row, place in enumerate(own["rows"]):
        if place is None:
            continue
        request, visible = place
        for head in range(ranks * heads):
            kv = head % gathered * kv_heads // gathered
            seen_keys = keys[request][:visible, kv]
            seen_values = values[request][:visible, kv] if values else seen_keys[:, : own["value_dim"]]
            state, scale = softmax_state(seen_keys @ query[row, head] * own["softmax_scale"], seen_values)
            if own["sinks"]:
                total = np.logaddexp(scale, own["sinks"][head])
                state, scale = state * np.exp(scale - total), total
            at = (head // heads, row, head % heads)
            out[at] = state @ up[head] if up is not None else state
            lse[at] = scale
    return {"out": out, "lse": lse}


def merged(outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge of states on the first axis; one whose LSE is not finite is empty, whatever its output holds."""
    counts = np.isfinite(lses)
    most = np.where(counts, lses, -np.inf).max(axis=0)
    some = np.isfinite(most)
    base = np.where(some, most, 0.0)
    weights = np.where(counts, np.exp(np.where(counts, lses, 0.0) - base), 0.0)
    total = weights.sum(axis=0)
    safe = np.where(some, total, 1.0)
    terms = np.where(counts[..., None], outs, 0.0) * weights[..., None]
    return terms.sum(axis=0) / safe[..., None], np.where(some, base + np.log(safe), -np.inf)


def reference_merge() -> dict:
    """The merge in float64: of two states, or over ranks, rank j keeping heads [j*H, (j+1)*H)."""
    inputs = {name: value.astype(np.float64) for name, value in inputs_of_case().items()}
    if FAMILY == "merge_states":
        outs = np.stack([inputs["prefix_out"], inputs["suffix_out"]])
        out, lse = merged(outs, np.stack([inputs["prefix_lse"], inputs["suffix_lse"]]))
        return {"out": out[None], "lse": lse[None]}
    out, lse = merged(inputs["partial_out"], inputs["partial_lse"])
    ranks, heads = len(inputs["partial_out"]), out.shape[1] // len(inputs["partial_out"])
    split = [slice(rank * heads, (rank + 1) * heads) for rank in range(ranks)]
    return {"out": np.stack([out[:, own] for own in split]), "lse": np.stack([lse[:, own] for own in split])}


def reference_layout() -> dict:
    """Position p lies on rank (p div S) mod W of a group, in the block of table entry p div (B*W); a row sees the
    positions up to its own."""
    inputs = inputs_of_case()
    lens, starts, table = inputs["seq_lens"], inputs["query_start_loc"], inputs["block_table"]
    size, world, block = CONFIGURATION["interleave"], CONFIGURATION["dcp"], CONFIGURATION["block_size"]
    ranks, rows = np.arange(CONFIGURATION["tp"]) % world, int(starts[-1])
    found = {
        "local_lens": np.zeros((len(ranks), len(lens))),
        "row_lens": np.zeros((len(ranks), rows)),
        "slots": np.full((len(ranks), int(lens.sum())), -1.0),
    }
    found["row_mask"] = np.zeros(WANTED["row_mask"]["shape"] if "row_mask" in WANTED else (len(ranks), rows, int(lens.max(initial=0))))
    for index, rank in enumerate(ranks):
        for request, length in enumerate(lens.tolist()):
            positions = np.arange(length)
            own = positions // size % world == rank
            local = positions // (size * world) * size + positions % size
            slot = table[request, positions // (block * world)] * block + local % block
            begin = int(lens[:request].sum())
            found["local_lens"][index, request] = own.sum()
            found["slots"][index, begin : begin + length] = np.where(own, slot, -1)
            for row in range(starts[request], starts[request + 1]):
                seen = positions[own] <= length - starts[request + 1] + row
                found["row_lens"][index, row] = seen.sum()
                found["row_mask"][index, row, : own.sum()] = seen
    return {name: value for name, value in found.items() if name in WANTED}


def reference() -> dict:
    """What is expected, not rounded."""
    if FAMILY == "layout":
        return reference_layout()
    return reference_merge() if FAMILY.startswith("merge") else reference_attention()


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded once to a float type, to nearest with ties to even."""
    if dtype not in SIGNIFICANT_BITS:
        return values
    fraction, exponent = np.frexp(values)
    bits = SIGNIFICANT_BITS[dtype]
    return np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)


def honest() -> dict:
    """The reference as an engine would return it: in the types that are asked for."""
    found = reference()
    return {name: rounded(found[name], wanted["dtype"]) for name, wanted in WANTED.items() if name in found}


AXES = {
    "local_lens": ["rank", "request"],
    "slots": ["rank", "token of the batch"],
    "row_mask": ["rank", "row", "token of its request on the rank"],
}


def place(name: str, flat: int) -> str:
    """An element's place in words."""
    axes = AXES.get(name, ["rank", "row", "head", "dim"])
    index = np.unravel_index(flat, WANTED[name]["shape"])
    return f"{name} at " + ", ".join(f"{axis} {at}" for axis, at in zip(axes, index))


def line(name: str, flat: int) -> str:
    """What is expected and allowed of an element; a low of NaN means that anything is, `or_nan` that NaN is too."""
    allowed = {key: array(WANTED[name][key]).reshape(-1)[flat] for key in ("expected", "low", "high")}
    expected, low, high = allowed["expected"], allowed["low"], allowed["high"]
    return f"{place(name, flat)}: expected {expected!s}, allowed {low!s} .. {high!s}"


def as_numbers(values: object) -> np.ndarray:
    """An output as float64, whether it is numpy's or torch's."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def verdict(outputs: dict, whose: str) -> int:
    """Prints what is wrong with outputs; the exit code."""
    wrong = 0
    for name, wanted in WANTED.items():
        if name not in outputs:
            print(f"{whose}: {name} is missing" + ("" if wanted["required"] else ", and not judged"))
            wrong += wanted["required"]
            continue
        seen = as_numbers(outputs[name])
        if list(seen.shape) != wanted["shape"]:
            print(f"{whose}: {name} has shape {list(seen.shape)}, expected {wanted['shape']}")
            wrong += 1
            continue
        low, high, expected = array(wanted["low"]), array(wanted["high"]), array(wanted["expected"])
        inside = (low <= seen) & (seen <= high) | np.isnan(low)
        if "or_nan" in wanted:
            inside |= np.isnan(seen) & (array(wanted["or_nan"]) > 0)
        finite = np.where(np.isfinite(expected), expected, 0.0)
        off = np.abs(np.where(np.isfinite(seen), seen, np.inf) - finite)
        bad = np.flatnonzero(~inside)
        wrong += len(bad)
        for flat in sorted(bad, key=lambda at: -off.reshape(-1)[at])[:10]:
            print(f"{whose}: seen {seen.reshape(-1)[flat]!s}; {line(name, flat)}")
        print(f"{whose}: {name}: {len(bad)} of {seen.size} elements are not allowed")
    return 1 if wrong else 0


def command_line() -> argparse.ArgumentParser:
    """What the script may be told."""
    parser = argparse.ArgumentParser(
        description=f"One case by itself: {CASE}",
        epilog="Ends with 0 when every element is allowed, with 1 when not, with 2 when the question could not be asked.",
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--self", action="store_true", help="hold the plain reference against what is allowed")
    ways.add_argument("--seen", action="store_true", help="hold what the engine answered when the case was recorded")
    if DATA["is_called"]:
        parser.add_argument(
            "folder",
            metavar="FOLDER",
            nargs="?",
            default=DATA["release"],
            help=f"an unpacked release of {DATA['engine']}; when not given: {DATA['release'] or 'none'}",
        )
    return parser


def not_asked(reason: object) -> int:
    """Says why the engine was not asked, after what it should have given."""
    for name, wanted in WANTED.items():
        for flat in range(min(8, int(np.prod(wanted["shape"])))):
            print(line(name, flat))
    if DATA["seen"]:
        verdict(arrays(DATA["seen"]), "seen")
    sys.stdout.flush()
    print(f"not asked: {reason}", file=sys.stderr)
    return 2


def main() -> int:
    """Runs what the command line asks for."""
    options = command_line().parse_args()
    print(CASE + (f", as {DATA['property']} asks it: queries are zeros" if DATA["property"] else ""))
    if options.self:
        return verdict(honest(), "reference")
    if options.seen:
        if not DATA["seen"]:
            print("nothing was recorded with this case", file=sys.stderr)
            return 2
        return verdict(arrays(DATA["seen"]), "seen")
    try:
        outputs = engine(inputs_of_case())
    except (NotImplementedError, ImportError) as reason:
        return not_asked(reason)
    except Exception:
        traceback.print_exc()
        print("engine: gives no answer, but the error above")
        return 1
    return verdict(outputs, "engine")


if __name__ == "__main__":
    sys.exit(main())
