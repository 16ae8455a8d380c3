"""ring-flash-attn: the merge of its ring of partial attention, from an unpacked release.

    python3 -m shardcheck.adapter shardcheck.adapters.ring_flash_attn:Engine --release 0.1.8

`update_out_and_lse` folds one block into a running state. Two blocks are a merge of two states; W blocks, one after the other, are what a rank
of the ring holds after its last step, so the merge over ranks is asked of it too: every rank folds the same blocks and keeps its own heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import shardcheck
from shardcheck import Configuration, Contract, Conventions, Operation, Tensor, Unsupported
from shardcheck.adapters.loader import Package
from shardcheck.fetch import engine_folder, read_manifest

_MODULE = "ring_flash_attn.utils"


class MergeSession(shardcheck.Session):
    """Merges by the release's function; there is no cache."""

    def __init__(self, configuration: Configuration, engine: Engine) -> None:
        super().__init__(configuration)
        self.engine = engine

    def merge_states(
        self, prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor
    ) -> dict[str, Any]:
        """Folds the suffix into the prefix."""
        out, lse = self._fold([(prefix_out.torch(), prefix_lse.torch()), (suffix_out.torch(), suffix_lse.torch())])
        return {"out": out[None].to(prefix_out.torch().dtype), "lse": lse[None]}

    def merge_partials(self, partial_out: Tensor, partial_lse: Tensor) -> dict[str, Any]:
        """Folds the partials of all ranks in rank order, and gives each rank its heads."""
        outs, lses = partial_out.torch(), partial_lse.torch()
        world, own = len(outs), self.configuration.heads_per_rank
        out, lse = self._fold(list(zip(outs, lses)))
        heads = [slice(rank * own, (rank + 1) * own) for rank in range(world)]
        return {
            "out": torch.stack([out[:, part] for part in heads]).to(outs.dtype),
            "lse": torch.stack([lse[:, part] for part in heads]),
        }

    def _fold(self, blocks: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs `[T, H, D]` and LSEs `[T, H]` of the blocks together."""
        out = lse = None
        with self.engine.package.ledger.watching():
            for block_out, block_lse in blocks:
                # the engine's axes: [batch, T, H, D] and [batch, H, T]
                out, lse = self.engine.update(out, lse, block_out[None].clone(), block_lse.T[None].clone())
        return out[0], lse[0, :, :, 0].float()


class Engine(shardcheck.Engine):
    """A release of ring-flash-attn."""

    name = "ring-flash-attn"
    # out − σ·(out − block) multiplies what an empty block holds by zero, so the block must hold zeros
    operations = {
        "merge_states": Operation(contract=Contract.f32("f32"), conventions=Conventions(empty_partial="zero")).with_f16(),
        "merge_partials": Operation(
            contract=Contract.f32("f32", merge="a2a", partial="f32"), conventions=Conventions(empty_partial="zero")
        ).with_f16(),
    }
    own_steps = (
        "transposition of LSEs to the engine's [batch, heads, rows]",
        "the blocks of a ring, one after the other in rank order, and the choice of a rank's heads",
        "rounding of the running f32 state to the type of the given outputs",
    )

    def __init__(self, release: str = "0.1.8", folder: str = "") -> None:
        place = Path(folder) if folder else engine_folder("ring-flash-attn", release)
        if not (place / "ring_flash_attn").is_dir():
            raise Unsupported(
                f"no unpacked ring-flash-attn in {place}: run `shardcheck engines fetch ring-flash-attn=={release}`"
            )
        torch.set_num_threads(1)
        manifest = read_manifest(place) or {}
        self.version = str(manifest.get("version", release))
        self.revision = f"wheel sha256:{manifest['wheel_sha256']}" if manifest else ""
        self.package = Package("ring_flash_attn", place, [_MODULE], {})
        self.package.install()
        self.update = self.package.first([_MODULE], "update_out_and_lse")
        if self.update is None:
            raise Unsupported(f"{place} has no update_out_and_lse")
        self.files = [str(self.package.path_of(_MODULE))]
        self.replaced = self.package.described()

    def open(self, configuration: Configuration) -> MergeSession:
        """A session."""
        return MergeSession(configuration, self)
