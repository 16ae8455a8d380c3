"""What an engine declares of itself: operations, rounding contracts, conventions. Names are those of
docs/protocol.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from shardcheck.dtypes import OVERFLOW_POLICIES, dtype_named

OPERATIONS = (
    "layout",
    "write_kv",
    "read_cache",
    "load_cache",
    "import_cache",
    "decode",
    "verify",
    "draft",
    "context",
    "merge_partials",
    "merge_states",
    "merge_segments",
    "pack_lse",
    "pcp_layout",
    "route",
    "moe",
    "accept_drafts",
    "select_sparse",
    "attend_pcp",
    "select_pcp",
    "compress_pcp",
    "attend_selected",
    "attend_sinks",
    "kda",
    "index_layers",
    "forward",
)
"""Every operation, which is also the name of the session's method."""

MERGES = ("a2a", "ag_rs_f32", "ag_rs_bf16", "ag_rs_f16")
LANE_ORDERS = ("hi_lo", "lo_hi")


def _one_of(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} is {value!r}: use one of {', '.join(accepted)}")


@dataclass(frozen=True)
class PerTile:
    """Longest chain of additions over n summands: n // tile + extra. Usual matrix units: 16 and 16."""

    tile: int
    extra: int


@dataclass(frozen=True, kw_only=True)
class Contract:
    """How results are rounded: the only tolerance there is (docs/tolerance.md).

    One that is looser than the engine hides faults.

    `u_acc` is the unit roundoff of one accumulation (2^-24: f32 to nearest; 2^-23: a truncating matrix unit);
    `depth` the longest chain of additions, `"any"` or `PerTile`; `kexp` the error of exp and log in ulp of
    f32; `tile_min` the fewest tokens between two rescales of a running maximum; `p_dtype` what probabilities
    are rounded to (None: not at all); `p_floor` the floor of that rounding; `exact_max` whether the largest
    probability is exactly 1; `l_rounded` whether the normaliser sums rounded probabilities; `partial` the
    type of a rank's partial output; `merge` the arithmetic of the merge; `lse_rel` the relative error of an
    LSE in transit; `output` the type of `out`.
    """

    u_acc: float
    depth: str | PerTile
    kexp: float
    output: str
    tile_min: int = 1
    p_dtype: str | None = None
    p_floor: float = 0.0
    exact_max: bool = True
    l_rounded: bool = False
    partial: str = "f32"
    merge: str = "a2a"
    lse_rel: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.depth, PerTile):
            _one_of("depth", self.depth, ("any",))
        _one_of("merge", self.merge, MERGES)
        for name in (self.output, self.partial, self.p_dtype):
            if name is not None:
                dtype_named(name)

    @staticmethod
    def f32(output: str = "f32", **fields: Any) -> Contract:
        """Plain f32 arithmetic in any order of summation: u 2^-24, functions within 2 ulp, f32 partials."""
        return replace(Contract(u_acc=2.0**-24, depth="any", kexp=2.0, output=output), **fields)

    @staticmethod
    def bf16(**fields: Any) -> Contract:
        """A usual bf16 kernel: u 2^-23, `PerTile(16, 16)`; P, partials, output in bf16; tiles of 32."""
        usual = Contract(
            u_acc=2.0**-23,
            depth=PerTile(16, 16),
            kexp=2.0,
            tile_min=32,
            p_dtype="bf16",
            partial="bf16",
            output="bf16",
        )
        return replace(usual, **fields)

    def in_f16(self) -> Contract:
        """The same arithmetic on activations of f16: what is rounded to bf16 is rounded to f16 instead, where probabilities have a
        floor of 2^-25, half the spacing of its subnormals."""
        half = {"bf16": "f16", "ag_rs_bf16": "ag_rs_f16"}
        changed = {name: half.get(getattr(self, name), getattr(self, name)) for name in ("p_dtype", "partial", "merge", "output")}
        floor = max(self.p_floor, 2.0**-25) if self.p_dtype == "bf16" else self.p_floor
        return replace(self, **changed, p_floor=floor)

    def to_json(self) -> dict[str, Any]:
        """The contract as it stands in a profile."""
        if isinstance(self.depth, PerTile):
            depth: Any = {"per_tile": {"tile": self.depth.tile, "extra": self.depth.extra}}
        else:
            depth = self.depth
        value: dict[str, Any] = {
            "u_acc": float(self.u_acc),
            "depth": depth,
            "kexp": float(self.kexp),
            "tile_min": self.tile_min,
            "p_floor": float(self.p_floor),
            "exact_max": self.exact_max,
            "l_rounded": self.l_rounded,
            "partial": self.partial,
            "merge": self.merge,
            "lse_rel": float(self.lse_rel),
            "output": self.output,
        }
        if self.p_dtype is not None:
            value["p_dtype"] = self.p_dtype
        return value


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """What differs between engines and is no error.

    `lse_base` (`e`, `two`) is the base of partial LSEs; `empty_partial` (`zero`, `undefined`) what a partial
    holds for a row without tokens; `lane_orders` the lane orders that the packed exchange knows, none where
    LSEs travel as 32-bit; `scale_rounding` (`divide`, `reciprocal`) how the cache scale is applied;
    `overflow` (`saturate`, `non_finite`) what the cast to the cache does beyond its range; `new_tokens` (`on_ranks`, `beside`)
    where a verification attends to its new tokens: on the ranks that own them, or beside them as one more partial.
    """

    lse_base: str = "e"
    empty_partial: str = "undefined"
    lane_orders: list[str] = field(default_factory=list)
    scale_rounding: str = "divide"
    overflow: str = "saturate"
    new_tokens: str = "on_ranks"

    def __post_init__(self) -> None:
        _one_of("lse_base", self.lse_base, ("e", "two"))
        _one_of("empty_partial", self.empty_partial, ("zero", "undefined"))
        _one_of("scale_rounding", self.scale_rounding, ("divide", "reciprocal"))
        _one_of("overflow", self.overflow, OVERFLOW_POLICIES)
        _one_of("new_tokens", self.new_tokens, ("on_ranks", "beside"))
        for order in self.lane_orders:
            _one_of("lane_orders", order, LANE_ORDERS)

    def to_json(self) -> dict[str, Any]:
        """The conventions as they stand in a profile."""
        value: dict[str, Any] = {
            "lse_base": self.lse_base,
            "empty_partial": self.empty_partial,
            "lane_orders": list(self.lane_orders),
            "scale_rounding": self.scale_rounding,
            "overflow": self.overflow,
        }
        # an older harness knows no other place
        return value if self.new_tokens == "on_ranks" else {**value, "new_tokens": self.new_tokens}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What holds for one operation.

    `contract` is None for operations that move or count. `observables` are the optional outputs that replies
    will carry; `absent` the outputs that this engine has nothing to say about. `dtypes` has the types of activations and of
    given states that the operation takes beyond bf16 (and f32 for given states), each with its contract: `{"f16": contract.in_f16()}`,
    or `{"f16": None}` where nothing is rounded. What is not there is never asked for.
    """

    contract: Contract | None = None
    conventions: Conventions = field(default_factory=Conventions)
    observables: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    dtypes: dict[str, Contract | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.dtypes:
            _one_of("dtypes", name, ("f16",))

    def with_f16(self) -> Operation:
        """The same, taking f16 as well, with the arithmetic of its contract in f16."""
        return replace(self, dtypes={"f16": None if self.contract is None else self.contract.in_f16()})

    def to_json(self) -> dict[str, Any]:
        """The operation as it stands in a profile."""
        declared = {
            "contract": None if self.contract is None else self.contract.to_json(),
            "conventions": self.conventions.to_json(),
            "observables": list(self.observables),
            "absent": list(self.absent),
        }
        contracts = {name: contract and contract.to_json() for name, contract in self.dtypes.items()}
        return declared | ({"dtypes": contracts} if contracts else {})


@dataclass(frozen=True, kw_only=True)
class Profile:
    """An engine's declaration. `files` maps a path as it is shown to the sha256 of the file that computed;
    `second_group` says whether a session can hold a second KV group beside the first; `call_file` and `release_folder` are
    paths on this machine, for scripts of cases.
    """

    engine: str
    version: str
    operations: dict[str, Operation]
    revision: str = ""
    files: dict[str, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    own_steps: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    rule_sets: list[str] = field(default_factory=list)
    second_group: bool = False
    call_file: str = ""
    release_folder: str = ""

    def __post_init__(self) -> None:
        for name in self.operations:
            _one_of("operation", name, OPERATIONS)

    def to_json(self) -> dict[str, Any]:
        """The profile as it stands in `hello`."""
        declared = {
            "engine": self.engine,
            "version": self.version,
            "revision": self.revision,
            "files": dict(self.files),
            "devices": list(self.devices),
            "own_steps": list(self.own_steps),
            "replaced": list(self.replaced),
            "rule_sets": list(self.rule_sets),
            "operations": {name: operation.to_json() for name, operation in self.operations.items()},
        }
        optional = {name: getattr(self, name) for name in ("second_group", "call_file", "release_folder")}
        return declared | {name: value for name, value in optional.items() if value}
