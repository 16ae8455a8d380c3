"""What FlashInfer's merges make of exceptional states, shown with the package alone: `python3 reproductions/flashinfer_merges.py`, on a GPU.

Each line gives what is expected and what is seen, for merge_state, merge_state_in_place and merge_states.
"""

from __future__ import annotations

import flashinfer
import torch

WIDTH, INFINITY, NOTHING = 128, float("inf"), float("nan")

# outputs and LSEs in base 2 of two states, and what they merge to
CASES = (
    ("plain: weights 1/2 and 1/2", (1.0, 3.0), (0.0, 0.0), (2.0, 1.0)),
    ("base 2: weights 1/3 and 2/3", (0.0, 3.0), (0.0, 1.0), (2.0, 1.5849626)),
    ("second empty, output 0", (1.0, 0.0), (0.5, -INFINITY), (1.0, 0.5)),
    ("second empty, output NaN", (1.0, NOTHING), (0.5, -INFINITY), (1.0, 0.5)),
    ("first empty, output NaN", (NOTHING, 1.0), (-INFINITY, 0.5), (1.0, 0.5)),
    ("both empty, output 0", (0.0, 0.0), (-INFINITY, -INFINITY), (0.0, -INFINITY)),
    ("both empty, output NaN", (NOTHING, NOTHING), (-INFINITY, -INFINITY), (0.0, -INFINITY)),
    ("second LSE +inf", (1.0, 3.0), (0.5, INFINITY), (1.0, 0.5)),
    ("second LSE NaN", (1.0, 3.0), (0.5, NOTHING), (1.0, 0.5)),
    ("second LSE -50000, output 3", (1.0, 3.0), (0.5, -5e4), (1.0, 0.5)),
    ("both LSE -50000", (1.0, 3.0), (-5e4, -5e4), (2.0, -49999.0)),
    ("gap of 1e30", (1.0, 3.0), (0.0, 1e30), (3.0, 1e30)),
)


def rounding() -> None:
    """Eight states of equal weight, of which the first, the second and the fifth hold anything, for one row and for sixteen."""
    small, width = 2.0**-12, 512
    values = torch.tensor([1.0, -1.0, 0.0, 0.0, small, 0.0, 0.0, 0.0])
    for rows in (1, 16):
        v = values.to("cuda", torch.float16)[None, :, None, None].expand(rows, 8, 1, width).contiguous()
        out, _ = flashinfer.merge_states(v, torch.zeros(rows, 8, 1, device="cuda"))
        print(f"  1, -1 and 2^-12 among eight states, {rows} rows: expected {small / 8}; seen {out[0, 0, 0].item()}")


def strided() -> None:
    """Outputs and LSEs that do not lie dense."""
    v = torch.randn(2, 3, 4, WIDTH, device="cuda").half()
    s = torch.randn(2, 3, 4, device="cuda")
    wide = torch.zeros(2, 3, 4, 2 * WIDTH, device="cuda", dtype=torch.float16)
    wide[..., :WIDTH] = v
    turned = s.transpose(1, 2).contiguous().transpose(1, 2)
    for what, outs, lses in (("outputs in wider rows", wide[..., :WIDTH], s), ("LSEs head by head", v, turned)):
        try:
            flashinfer.merge_state(outs[0], lses[0], outs[1], lses[1])
            print(f"  strided, {what}: taken")
        except Exception as refused:
            print(f"  strided, {what}: refused ({str(refused).splitlines()[0][:100]})")


def many_heads() -> None:
    """More heads than a block has threads for, and more rows than states."""
    for heads in (32, 33):
        v = torch.zeros(4, 2, heads, 512, device="cuda", dtype=torch.float16)
        try:
            flashinfer.merge_states(v, torch.zeros(4, 2, heads, device="cuda"))
            torch.cuda.synchronize()
            print(f"  two states of four rows and {heads} heads of 512: merged")
        except Exception as failed:
            print(f"  two states of four rows and {heads} heads of 512: {str(failed).splitlines()[0][:120]}")


def main() -> None:
    """Every case by every merge."""
    print(f"flashinfer {flashinfer.__version__}, {torch.cuda.get_device_name()}")
    for what, values, lses, wanted in CASES:
        v = [torch.full((1, 1, WIDTH), value, device="cuda", dtype=torch.float16) for value in values]
        s = [torch.full((1, 1), lse, device="cuda") for lse in lses]
        in_place = v[0].clone(), s[0].clone()
        flashinfer.merge_state_in_place(*in_place, v[1], s[1])
        ways = {
            "merge_state": flashinfer.merge_state(v[0], s[0], v[1], s[1]),
            "in place": in_place,
            "merge_states": flashinfer.merge_states(torch.stack(v, 1), torch.stack(s, 1)),
        }
        seen = {name: (out[0, 0, 0].item(), lse[0, 0].item()) for name, (out, lse) in ways.items()}
        print(f"  {what}: expected {wanted}; seen {seen}")
    rounding()
    strided()
    many_heads()


if __name__ == "__main__":
    main()
