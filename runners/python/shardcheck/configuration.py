"""What a session is opened with: attention shape, parallel sizes, layout, formats, exchange."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Attention:
    """Attention shape of one layer.

    `kind` is `mla` (absorbed form: one latent KV head of `kv_lora_rank + qk_rope_head_dim` elements, whose
    first `kv_lora_rank` elements are the value as well) or `gqa` (`kv_heads` of each rank, key width
    `head_dim`). Fields of the other kind are 0.
    """

    kind: str
    v_head_dim: int
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    kv_heads: int = 1
    head_dim: int = 0

    @property
    def is_mla(self) -> bool:
        """Whether the value is a prefix of the key, so that there is no second cache."""
        return self.kind == "mla"

    @property
    def qk_dim(self) -> int:
        """Width of a query and of a key."""
        return self.kv_lora_rank + self.qk_rope_head_dim if self.is_mla else self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value as it lies in the cache: the width of a partial output before any projection."""
        return self.kv_lora_rank if self.is_mla else self.v_head_dim


@dataclass(frozen=True)
class Configuration:
    """Everything that is fixed while a session lives. Rank `r` belongs to group `r // dcp`."""

    attention: Attention
    tp: int
    dcp: int
    heads_per_rank: int
    interleave: int
    block_size: int
    blocks: int
    kv_dtype: str
    kv_scale: float
    softmax_scale: float
    comm_backend: str
    lane_order: str
    query_replication: bool
    project_before_merge: bool
    kernel_head_widths: list[int] = field(default_factory=list)
    second_group: Configuration | None = None
    """The second KV group, on the same ranks; only for engines that declare `second_group`."""
    dtype: str = "bf16"
    """Type of activations: `bf16`, or `f16` for operations that declare it."""

    @staticmethod
    def from_json(value: dict[str, Any]) -> Configuration:
        """The configuration of a JSON object; fields that this version does not know are ignored."""
        attention = Attention(**_known(Attention, value["attention"]))
        second = value.get("second_group")
        group = Configuration.from_json(second) if second else None
        return Configuration(
            **{**_known(Configuration, value), "attention": attention, "second_group": group}
        )

    @property
    def gathered_heads(self) -> int:
        """Query heads Hg that one decode-context-parallel group gathers."""
        return self.heads_per_rank * self.dcp

    @property
    def total_heads(self) -> int:
        """Query heads Hall of all ranks."""
        return self.heads_per_rank * self.tp

    @property
    def qk_dim(self) -> int:
        """Width Dk of a query and of a key."""
        return self.attention.qk_dim

    @property
    def value_dim(self) -> int:
        """Width Dv of a value as it lies in the cache."""
        return self.attention.value_dim

    @property
    def kv_heads(self) -> int:
        """KV heads K in a rank's cache: 1 for MLA."""
        return self.attention.kv_heads

    @property
    def virtual_block_tokens(self) -> int:
        """Tokens of one virtual block, which is one entry of a block table: B times W."""
        return self.block_size * self.dcp


def _known(kind: type, value: dict[str, Any]) -> dict[str, Any]:
    names = {entry.name for entry in fields(kind)}
    return {key: content for key, content in value.items() if key in names}
