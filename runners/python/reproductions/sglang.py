"""Findings in SGLang, shown with the release's own functions and nothing of an adapter: torch, numpy and Triton are enough.

    python3 reproductions/sglang.py FOLDER        # an unpacked wheel: the folder that holds `sglang`

Prints what is expected and what is seen.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from cutting import cut

KERNELS, LAYERS = "kernels/ops/attention", "srt/layers/dcp"
INFINITY, NOTHING = float("inf"), float("nan")


def two_states(engine: Path) -> None:
    """A state beside an empty one, and two empty ones."""
    merge = cut(engine / KERNELS / "merge_state.py", "merge_state_kernel", "merge_state_triton").merge_state_triton
    print("merge_state_triton:")
    for what, outs, lses, wanted in (
        ("one empty, output 0", [1.0, 0.0], [0.0, -INFINITY], "1.0, 0.0"),
        ("one empty, output NaN", [1.0, NOTHING], [0.0, -INFINITY], "1.0, 0.0"),
        ("both empty, output 0", [0.0, 0.0], [-INFINITY, -INFINITY], "0.0, -inf"),
    ):
        out, lse = [torch.full((1, 1, 2), value) for value in outs], [torch.full((1, 1), value) for value in lses]
        merged, total = merge(out[0], lse[0], out[1], lse[1])
        print(f"  {what}: expected {wanted}; seen {merged[0, 0, 0].item()}, {total.item()}")


def combined(engine: Path) -> None:
    """What stands behind the all-to-all: empty ranks, and LSEs that do not lie dense."""
    names = ("_dcp_lse_combine_kernel", "dcp_lse_combine_triton")
    combine = cut(engine / KERNELS / "dcp_kernels.py", *names).dcp_lse_combine_triton
    print("dcp_lse_combine_triton:")
    for what, outs, lses, wanted in (
        ("one empty, output NaN", [1.0, NOTHING], [0.0, -INFINITY], "1.0"),
        ("all empty, output 0", [0.0, 0.0], [-INFINITY, -INFINITY], "0.0"),
    ):
        out, lse = torch.tensor(outs).view(2, 1, 1, 1).expand(2, 1, 1, 2).contiguous(), torch.tensor(lses).view(2, 1, 1)
        print(f"  {what}: expected {wanted}; seen {combine(out, lse)[0][0, 0, 0].item()}")
    lse = torch.arange(12.0).view(2, 3, 2).transpose(1, 2)  # rows 2, heads 3, that lie head by head
    _, total = combine(torch.zeros(2, 2, 3, 2), lse, return_lse=True)
    print(f"  merged LSEs of strided ones: expected {torch.logsumexp(lse, 0).tolist()}; seen {total.tolist()}")


def merged(engine: Path, outs: list[torch.Tensor], lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[T, H, D]` of ranks and their LSEs `[ranks, T, H]` through the merge behind an all-reduce: what it adds up, and the last rank's LSE."""
    parts = cut(engine / LAYERS / "comm.py", "cp_lse_ag_out_rs_mha")
    parts.cp_lse_ag_out_rs_mha.__globals__["_ag_lse"] = lambda *_: lses
    added: list[torch.Tensor] = []

    def all_reduce(out: torch.Tensor) -> torch.Tensor:
        added.append(out)
        return out

    for rank, out in enumerate(outs):
        group = SimpleNamespace(world_size=len(outs), rank_in_group=rank, all_reduce=all_reduce)
        _, lse = parts.cp_lse_ag_out_rs_mha(out, lses[rank].clone(), group, return_lse=True)
    return sum(added), lse


def reduced(engine: Path) -> None:
    """The merge behind an all-reduce with an LSE that is no number on one of two ranks, each with one head of its own."""
    print("cp_lse_ag_out_rs_mha of outputs 1 and 3, LSE 0 on rank 0:")
    for value in (INFINITY, NOTHING):
        lses = torch.tensor([0.0, value]).view(2, 1, 1).expand(2, 1, 2).contiguous()
        out, lse = merged(engine, [torch.full((1, 2, 2), output) for output in (1.0, 3.0)], lses)
        print(f"  LSE {value} on rank 1: expected 1.0, 0.0; seen {out[0, 0, 0].item()}, {lse[0, 0].item()}")


def sinks(engine: Path) -> None:
    """Two ranks with one head of their own and one token each, of score 0 and value 1, and a sink of 0: what each rank's kernel makes of the
    gathered heads, and their merge. The backend hands a rank's kernel the sinks of its own heads; NaN stands behind them in memory here."""
    scope = {"_is_hip": False, "_MIN_BLOCK_KV": 32}
    names = ("_fwd_kernel_stage2", "_decode_softmax_reducev_fwd")
    last_stage = cut(engine / KERNELS / "decode_attention.py", *names, **scope)._decode_softmax_reducev_fwd
    outs = []
    for _ in range(2):
        out, value = torch.zeros(1, 2, 2), torch.ones(1, 2, 1, 2)
        memory = torch.tensor([0.0, NOTHING])
        bounds, splits = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        last_stage(value, torch.zeros(1, 2, 1), out, out, 1.0, out, bounds, splits, 1, sinks=memory[:1])
        outs.append(out)
    out, _ = merged(engine, outs, torch.zeros(2, 1, 2))
    print("decode with sinks over two ranks:")
    for head in range(2):
        print(f"  head {head}: expected {2 / 3:.4f}; seen {out[0, head, 0].item():.4f}")


def sparse_index(engine: Path) -> None:
    """The row of a rank's cache of a token behind 2^24."""
    found = vars(cut(engine / LAYERS / "layout.py", "remap_dcp_sparse_indices"))
    print("remap_dcp_sparse_indices of token 16777217 on two ranks: expected [-1] and [8388608]")
    for rank in range(2) if found else ():
        index = torch.tensor([[(1 << 24) + 1]], dtype=torch.int32)
        print(f"  rank {rank}: seen {found['remap_dcp_sparse_indices'](index, 2, rank)[0].tolist()}")


def main() -> None:
    """Shows every finding."""
    engine = Path(sys.argv[1]) / "sglang"
    two_states(engine)
    combined(engine)
    reduced(engine)
    sinks(engine)
    sparse_index(engine)


if __name__ == "__main__":
    main()
