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


def reduced(engine: Path) -> None:
    """The merge behind an all-reduce with an LSE that is no number on one of two ranks, each with one head of its own."""
    parts = cut(engine / LAYERS / "comm.py", "cp_lse_ag_out_rs_mha")
    print("cp_lse_ag_out_rs_mha of outputs 1 and 3, LSE 0 on rank 0:")
    for value in (INFINITY, NOTHING):
        lses = torch.tensor([0.0, value]).view(2, 1, 1).expand(2, 1, 2).contiguous()
        parts.cp_lse_ag_out_rs_mha.__globals__["_ag_lse"] = lambda *_, lses=lses: lses
        added: list[torch.Tensor] = []

        def all_reduce(out: torch.Tensor, added: list[torch.Tensor] = added) -> torch.Tensor:
            added.append(out)
            return out

        for rank, output in enumerate((1.0, 3.0)):
            group = SimpleNamespace(world_size=2, rank_in_group=rank, all_reduce=all_reduce)
            _, lse = parts.cp_lse_ag_out_rs_mha(torch.full((1, 2, 2), output), lses[rank].clone(), group, return_lse=True)
        print(f"  LSE {value} on rank 1: expected 1.0, 0.0; seen {sum(added)[0, 0, 0].item()}, {lse[0, 0].item()}")


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
    sparse_index(engine)


if __name__ == "__main__":
    main()
