"""Prefill context parallelism as SGLang does it: a strategy on each rank that takes rows out of a batch and puts
gathered ones back."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shardcheck import Unsupported
from shardcheck.adapters.loader import parameters
from shardcheck.adapters.sglang.release import Release
from shardcheck.adapters.sglang.surroundings import Parallel

# The interface's names of the strategies, and the engine's.
_STRATEGIES = {"zigzag": "zigzag", "round_robin": "interleave"}


class PrefillLayout:
    """Shares one batch out over `world` ranks."""

    def __init__(self, world: int, strategy: str, decodes: str, padded_rows: int, has_decodes: bool) -> None:
        if world == 1:
            raise Unsupported("the engine makes no strategy where there is one rank")
        if strategy not in _STRATEGIES:
            raise Unsupported(f"the engine has no strategy {strategy}: it has zigzag and interleave")
        if has_decodes and decodes != "split":
            raise Unsupported(
                "a batch that is shared out has no decodes: each of its rows follows the strategy"
            )
        self.world, self.padded_rows = world, padded_rows
        self.strategy = _STRATEGIES[strategy]

    def share_out(
        self, executor: Any, starts: np.ndarray, computed: np.ndarray
    ) -> tuple[dict[str, np.ndarray], list[int]]:
        """Outputs of the operation, each rank's by its own strategy, and the collectives that each entered."""
        jobs = [RankShare(self, starts, computed) for _ in range(self.world)]
        results, collectives = executor.run(jobs, self.world)
        return {name: np.stack([found[name] for found in results]) for name in results[0]}, collectives


@dataclass
class RankShare:
    """A batch on one rank."""

    layout: PrefillLayout
    starts: np.ndarray
    computed: np.ndarray

    def run(self, release: Release, group: Any) -> dict[str, np.ndarray]:
        """The rank's outputs of the operation."""
        world, rank, name = self.layout.world, group.rank_in_group, self.layout.strategy
        sizes = {"attn_cp_size": world, "attn_cp_rank": rank, "attn_cp_group": group}
        release.groups.act(Parallel(**sizes, enable_prefill_cp=True, cp_strategy=name))
        strategy = _strategy(release, world, name)
        rows, news = int(self.starts[-1]), np.diff(self.starts).tolist()
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_context_parallel_extend=lambda: True),
            extend_seq_lens_cpu=news,
            input_ids=torch.zeros(rows, dtype=torch.int64),
        )
        if not strategy.can_apply(rows, batch):
            raise Unsupported(
                f"{name} does not apply: too few rows, in all or of a request, for {world} ranks"
            )
        totals = (self.computed + np.diff(self.starts)).tolist()
        batch.attn_cp_metadata = strategy.build_metadata(rows, totals, news)
        self._align(release, batch.attn_cp_metadata)
        return self._outputs(strategy, batch, rank)

    def _align(self, release: Release, metadata: Any) -> None:
        """Lets ranks run as many rows as a graph asks for, where that is what the engine aligns them to."""
        wanted = self.layout.padded_rows
        if not wanted:
            return
        release.align_rows(metadata)
        if metadata.max_rank_len[0] != wanted:
            raise Unsupported(
                f"the engine aligns a rank's rows to {metadata.max_rank_len[0]}, it can't be told {wanted}"
            )

    def _outputs(self, strategy: Any, batch: Any, rank: int) -> dict[str, np.ndarray]:
        metadata, world = batch.attn_cp_metadata, self.layout.world
        width = max(metadata.per_rank_actual_token)
        total = int(self.starts[-1])
        of_row = np.repeat(np.arange(len(self.computed)), np.diff(self.starts))
        positions = torch.from_numpy(np.arange(total) - self.starts[of_row] + self.computed[of_row])
        # rows are told from 1: what the engine fills up with is 0
        rows = _padded(strategy.shard_hidden_states(torch.arange(1, total + 1), batch), width) - 1
        seen = self._row_lens(strategy, batch, positions)
        places = torch.arange(rank * width, (rank + 1) * width)
        held = (metadata.per_rank_logical_token or metadata.per_rank_actual_token)[rank]
        # a tensor of a rank's rows, which it pads by itself where ranks have not the same number
        own = places if metadata.per_rank_logical_token else places[:held]
        writers = np.zeros(world * width, np.uint8)
        np.add.at(writers, strategy.gather_kv_cache(own[:, None].clone(), batch)[:, 0].numpy(), 1)
        return {
            "rows": rows.numpy(),
            "positions": _padded(strategy.shard_position_ids(positions, batch), width).numpy(),
            "row_lens": _padded(seen, width).to(torch.int32).numpy(),
            "restore": strategy.gather_hidden_states(own[:, None].clone(), batch)[:, 0].numpy(),
            "kv_writer": writers,
        }

    def _row_lens(self, strategy: Any, batch: Any, positions: torch.Tensor) -> torch.Tensor:
        """Tokens that each of the rank's rows sees: of a block that is attended as one sequence with a causal mask that
        is aligned at the end, or the row's own among those of all rows."""
        metadata = batch.attn_cp_metadata
        if self.layout.strategy == "interleave":
            return strategy.shard_local_tokens(positions + 1)
        blocks = [
            *zip(metadata.kv_len_prev_list, metadata.actual_seq_q_prev_list, strict=True),
            *zip(metadata.kv_len_next_list, metadata.actual_seq_q_next_list, strict=True),
        ]
        return torch.cat([torch.arange(seen - count + 1, seen + 1) for seen, count in blocks])


def _strategy(release: Release, world: int, name: str) -> Any:
    """The strategy of the calling rank. It is one a process in the engine; here ranks take turns, and each binds it anew."""
    bind = release.base.init_cp_strategy
    if "server_args" in parameters(bind):
        bind(SimpleNamespace(enable_prefill_cp=True, attn_cp_size=world, cp_strategy=name))
    else:
        bind(enable_prefill_cp=True, cp_size=world, cp_strategy=name)
    return release.base.get_cp_strategy()


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Rows up to the fullest rank's, of which the operation wants as many from all: zeros."""
    return torch.nn.functional.pad(tensor, (0, width - len(tensor)))
