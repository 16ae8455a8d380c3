"""Findings in vLLM-Ascend, shown with the release's own functions and nothing of an adapter: torch, numpy and Triton are enough.

    python3 reproductions/vllm_ascend.py FOLDER        # an unpacked wheel: the folder that holds `vllm_ascend`

Prints what is expected and what is seen.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cutting import cut

CONTEXT = "attention/context_parallel"
MASKED = ("worker/dcp_utils.py", "worker/pcp_utils.py")
# files of the fused exchange, what its kernels are called after, and whether they take a state of the rank's own
FUSED = (("ops/triton/sfa_cp.py", "sfa_dcp", False), ("ops/triton/dcp/dcp_a2a.py", "dcp", True))


def verify_mask(engine: Path, world: int, interleave: int, history: int, rows: int) -> None:
    """What each row of a verification may see of each rank, by the mask and by counting."""
    path = next(engine / name for name in MASKED if (engine / name).is_file())
    name = "generate_mtp_attention_mask_for_decode"
    method = vars(cut(path, name)).get(name)
    if method is None:
        print("this release has no mask of a verification")
        return
    common = cut(engine / CONTEXT / "common_cp.py", "get_dcp_local_seq_lens")
    method.__globals__.update(vars(common))
    print(f"verification: {world} ranks, interleave size {interleave}, {rows} rows behind {history} tokens")
    for rank in range(world):
        parallel = SimpleNamespace(cp_kv_cache_interleave_size=interleave)
        buffer = torch.zeros(1, rows, history + rows, dtype=torch.bool)
        manager = SimpleNamespace(
            pcp_world_size=1,
            pcp_world_rank=0,
            dcp_world_size=world,
            dcp_world_rank=rank,
            num_decode_reqs=1,
            vllm_config=SimpleNamespace(parallel_config=parallel),
            dcp_mtp_attn_mask=SimpleNamespace(cpu=buffer, np=buffer.numpy()),
        )
        mask = method(manager, [history], np.array([rows], np.int32))[0]
        held = [p for p in range(history + rows) if p // interleave % world == rank]
        for row in range(rows):
            bound = history + row
            seen = [p for index, p in enumerate(held) if not mask[row, index]]
            wanted = [p for p in held if p <= bound]
            note = "" if seen == wanted else "   <-- wrong"
            print(f"  rank {rank}, row at position {bound}: must see {wanted}, sees {seen}{note}")


def two_states(engine: Path) -> None:
    """A state beside an empty one, both empty, and an LSE that is no finite number."""
    update = cut(engine / CONTEXT / "common_cp.py", "_update_out_and_lse")._update_out_and_lse
    infinity, nothing = float("inf"), float("nan")
    print("_update_out_and_lse of a state of output 1 and LSE 0 (but where both are empty) and another:")
    for what, outs, lses, wanted in (
        ("empty, output 0", [1.0, 0.0], [0.0, -infinity], "1.0, 0.0"),
        ("empty, output NaN", [1.0, nothing], [0.0, -infinity], "1.0, 0.0"),
        ("both empty, output 0", [0.0, 0.0], [-infinity, -infinity], "0.0, -inf"),
        ("LSE of +inf", [1.0, 3.0], [0.0, infinity], "1.0, 0.0"),
        ("LSE of NaN", [1.0, 3.0], [0.0, nothing], "1.0, 0.0"),
    ):
        out, lse = update(torch.tensor(outs).view(2, 1, 1, 1), torch.tensor(lses).view(2, 1, 1, 1))
        print(f"  {what}: expected {wanted}; seen {out.item()}, {lse.item()}")


def packed_lse(engine: Path) -> None:
    """A rank of output 1 and a tiny LSE beside an empty rank, in 16 bits: packed, sent, combined."""
    found = [fused for fused in FUSED if (engine / fused[0]).is_file()]
    if not found:
        print("this release has no fused exchange")
        return
    path, what, local = found[0]
    names = (f"_pack_{what}_output_lse_kernel", f"_fused_{what}_lse_combine_kernel")
    pack, combine = (vars(cut(engine / path, *names))[name] for name in names)
    print("fused exchange in bf16, LSE of rank 0 beside an empty rank; expected output 1:")
    for value in (1.0, 2.0**-104, 2.0**-105, 0.0, -(2.0**-110)):
        parts = [_send(pack, 1.0, value), _send(pack, 0.0, -float("inf"))]
        # rank 0 receives part 0 of either
        received = torch.stack([sent[0] for sent in parts]).contiguous()
        out = torch.full((1, 1, 2), float("nan"), dtype=torch.bfloat16)
        # no state of the rank's own: any pointers
        own = (received, received, 0, 0, 0, 0, 0) if local else ()
        combine[(1,)](
            *(received, out, *own, *received.stride(), *out.stride(), 2, 1, 1),
            DCP_SIZE=2,
            SCATTER_TOKENS=False,
            LSE_PACK_DIM=4,
            BLOCK_D=2,
        )
        print(f"  LSE {value:g}: seen {out[0, 0].tolist()}")


def _send(pack: Any, value: float, lse: float) -> torch.Tensor:
    """What a rank with one row and two heads sends: `[ranks, heads, rows, D + 4]`."""
    out = torch.full((1, 2, 2), value, dtype=torch.bfloat16)
    lses = torch.full((1, 2, 1), lse)
    sent = torch.zeros(2, 1, 1, 6, dtype=torch.bfloat16)
    pack[(1,)](
        *(out, lses, sent, *out.stride(), lses.stride(0), lses.stride(1), *sent.stride(), 1, 2, 2, 2),
        SCATTER_TOKENS=False,
        LSE_PACK_DIM=4,
        BLOCK_D=2,
    )
    return sent


def sparse_index(engine: Path) -> None:
    """The row of a rank's cache of a token behind 2^24, where Triton is not used."""
    name = "_remap_sparse_indices"
    method = vars(cut(engine / CONTEXT / "sfa_cp.py", name))[name]
    method.__globals__["HAS_TRITON"] = False
    index = torch.tensor([[(1 << 24) + 1]], dtype=torch.int32)
    print(f"{name} of token 16777217 on two ranks: expected [-1] and [8388608]")
    for rank in range(2):
        layer = SimpleNamespace(dcp_size=2, dcp_rank=rank, _dcp_interleave_size=1, _dcp_index_topk=1)
        layer._remap_order, layer._remap_invalid_index = torch.zeros(1), torch.tensor(-1.0)
        print(f"  rank {rank}: seen {method(layer, index)[0].tolist()}")


def main() -> None:
    """Shows every finding."""
    engine = Path(sys.argv[1]) / "vllm_ascend"
    verify_mask(engine, world=3, interleave=1, history=1, rows=2)
    verify_mask(engine, world=2, interleave=4, history=3, rows=2)
    verify_mask(engine, world=2, interleave=4, history=8, rows=2)
    two_states(engine)
    packed_lse(engine)
    sparse_index(engine)


if __name__ == "__main__":
    main()
