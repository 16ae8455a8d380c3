"""What the adapter declares: the operations, how they round, and what the adapter does itself."""

from __future__ import annotations

from shardcheck import Contract, Conventions, Operation, PerTile

OWN_STEPS = (
    "layout and slots of a cache that is shared out over ranks, by the SDK's integers; scatter of keys into the caches",
    "pages and local length of each row: a row of a step over several ranks is a request of one row to the kernel; over one rank a verification is the "
    "kernel's own causal mask",
    "choice of a rank's query heads, and of its own heads of what is merged",
    "the exchange: partials of all ranks are handed to merge_states, dense and as many heads at a time as a block has threads for",
    "LSEs from base 2 to natural ones where an output asks for those, and back where natural ones are given: one rounding each",
    "up-projection of merged outputs, in f32",
)

# natural to base 2 or back, and the kernels' own logarithm
_CONVERTED = 2.0**-23


def operations(backend: str, device: str) -> dict[str, Operation]:
    """Capabilities of the package with one of its kernels."""
    exact = device == "cpu"
    fast = 2.0 if exact else 16.0
    # FA2 sums the probabilities that it has rounded, FA3 those that it hasn't; both rescale by tiles of at least 16 tokens
    rounded = Contract.bf16(depth=PerTile(16, 16), kexp=fast, tile_min=16, l_rounded=backend == "fa2", lse_rel=_CONVERTED)
    attention = Contract.f32("bf16", partial="bf16", lse_rel=_CONVERTED) if exact else rounded
    merge = Contract.f32("f32", kexp=fast, lse_rel=_CONVERTED)
    base_2 = Conventions(lse_base="two")
    observables = ["partial_out", "partial_lse", "row_lens", "gathered_query"]
    step = Operation(contract=attention, conventions=base_2, observables=observables).with_f16()
    return {
        "write_kv": Operation().with_f16(),
        "read_cache": Operation(),
        "load_cache": Operation(),
        "decode": step,
        "verify": step,
        "merge_partials": Operation(contract=merge, conventions=Conventions()).with_f16(),
        "merge_states": Operation(contract=merge).with_f16(),
    }
