//! How prefill context parallelism shares the rows of a batch out over its ranks: the published variants.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use shardcheck_formats::Dtype;

use crate::TensorSpec;
use crate::operation::Provenance::{Given, Observable, Output};
use crate::operation::spec;

/// Which rows of a prompt a rank of prefill context parallelism takes. `P` ranks, `q` new rows of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PcpStrategy {
    /// Each sequence in 2P chunks of ceil(q / 2P) rows, the last ones short or absent; rank r takes chunks r and 2P − 1 − r
    /// (vLLM DualChunkSwap).
    HeadTail,
    /// As [`Self::HeadTail`], but a sequence that would leave a chunk absent is whole on every rank (vLLM with DCP inside PCP).
    HeadTailOrWhole,
    /// Each sequence in 2P blocks that differ by one row at most, the longer ones first; rank r takes blocks r and 2P − 1 − r.
    /// A sequence has no rows or 2P and more (SGLang zigzag).
    Zigzag,
    /// Row i of the flattened batch belongs to rank i mod P, whatever its sequence (ATOM, SGLang).
    RoundRobin,
    /// Each sequence in P chunks of ceil(q / P) rows, the last ones short or absent; rank r takes chunk r.
    Contiguous,
}

impl PcpStrategy {
    /// All strategies, in a stable order.
    pub const ALL: [Self; 5] =
        [Self::HeadTail, Self::HeadTailOrWhole, Self::Zigzag, Self::RoundRobin, Self::Contiguous];

    /// Name as it stands in case ids and on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::HeadTail => "head_tail",
            Self::HeadTailOrWhole => "head_tail_or_whole",
            Self::Zigzag => "zigzag",
            Self::RoundRobin => "round_robin",
            Self::Contiguous => "contiguous",
        }
    }
}

/// What the rows of decodes in a batch of prefill context parallelism do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PcpDecodes {
    /// They are shared out like any other row.
    Split,
    /// Every rank has all of them.
    Replicated,
    /// The d-th decode that has rows, counted from 0, is whole on rank d mod P.
    Owned,
}

impl PcpDecodes {
    /// All of them, in a stable order.
    pub const ALL: [Self; 3] = [Self::Split, Self::Replicated, Self::Owned];

    /// Name as it stands in case ids and on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Split => "split",
            Self::Replicated => "replicated",
            Self::Owned => "owned",
        }
    }
}

impl fmt::Display for PcpStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for PcpDecodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PcpStrategy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|known| known.name() == text).ok_or_else(|| {
            format!("unknown strategy {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

impl FromStr for PcpDecodes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|known| known.name() == text)
            .ok_or_else(|| format!("decodes are {}; not {text:?}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// How a batch is attended to over the ranks of prefill context parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcpPlan {
    /// Ranks P.
    pub world: usize,
    /// Which rows of a prompt a rank takes.
    pub strategy: PcpStrategy,
    /// What the rows of decodes do.
    pub decodes: PcpDecodes,
    /// Rows that a rank runs at least, such as those of a graph; 0 asks for none.
    pub padded_rows: usize,
    /// What queries are cast to before they meet a key: the type of activations, as they are given, or e4m3fn.
    pub query_dtype: Dtype,
    /// The scale of that cast, a power of two: a query is code · scale, the code being cast(value / scale). 1 where they are not cast.
    pub query_scale: f32,
}

pub(crate) const STARTS: TensorSpec =
    spec("query_start_loc", Given, "i32 [n+1]", "first row of each request in the flattened batch of N rows");
pub(crate) const CONTEXTS: TensorSpec =
    spec("context_lens", Given, "i32 [n]", "tokens of each request that were computed before; 0 is legal");
pub(crate) const LOCAL_ROWS: TensorSpec = spec(
    "rows",
    Observable,
    "i64 [P, R]",
    "row of the batch that each local row is, −1 for padding, which comes last",
);
pub(crate) const PREFILLING: TensorSpec =
    spec("is_prefilling", Given, "u8 [n]", "1 for a request whose rows are a prompt's, 0 for a decode");

pub(crate) const LAYOUT: &[TensorSpec] = &[
    STARTS,
    CONTEXTS,
    PREFILLING,
    TensorSpec { provenance: Output, ..LOCAL_ROWS },
    spec(
        "positions",
        Output,
        "i64 [P, R]",
        "position of each local row in its request; anything for padding",
    ),
    spec("row_lens", Output, "i32 [P, R]", "tokens that each local row sees; 0 for padding"),
    spec(
        "restore",
        Output,
        "i64 [P, N]",
        "on each rank, place of every row of the batch among the P·R gathered ones",
    ),
    spec(
        "kv_writer",
        Output,
        "u8 [P, P·R]",
        "on each rank, 1 for the gathered rows whose KV it writes to its cache",
    ),
    spec(
        "groups",
        Output,
        "i32 [P, 2]",
        "only where `overlap` is asked for: requests of the first and of the second group; 0 of the second where the batch is not divided",
    ),
];

pub(crate) const ATTEND: &[TensorSpec] = &[
    spec("query", Given, "dtype [N, Hall, Dk]", "query of every head for the new rows"),
    spec(
        "key",
        Given,
        "dtype [N, K, Dk]",
        "keys of the new rows, each of which a rank takes for its own rows only",
    ),
    spec("value", Given, "dtype [N, K, Dv]", "values of the new rows, likewise; absent for MLA"),
    STARTS,
    CONTEXTS,
    PREFILLING,
    spec("block_table", Given, "i32 [n, width]", "blocks of the cached context in the session's caches"),
    spec(
        "out",
        Output,
        "contract's output type [P, N, Hall, Dv]",
        "on each rank, the output of the whole batch in its order, without padding",
    ),
    spec("lse", Output, "f32 [P, N, Hall]", "its natural LSE"),
    LOCAL_ROWS,
    spec("row_lens", Observable, "i32 [P, R]", "tokens that each local row saw; 0 for padding"),
    spec(
        "kernel_query",
        Observable,
        "f32 [P, R, Hall, Dk]",
        "query of each local row as the kernel read it, scale included; anything for padding",
    ),
    spec(
        "gathered_key",
        Observable,
        "f32 [P, Σ (context_lens + new rows), K, Dk]",
        "on each rank, the keys that its rows attended to: request after request, by position",
    ),
    spec(
        "gathered_value",
        Observable,
        "f32 [P, Σ (context_lens + new rows), K, Dv]",
        "the values beside them; absent for MLA",
    ),
    spec(
        "local_out",
        Observable,
        "contract's output type [P, R, Hall, Dv]",
        "output of each local row, before the last gather",
    ),
    spec("local_lse", Observable, "f32 [P, R, Hall]", "its natural LSE"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_are_those_on_the_wire() {
        for strategy in PcpStrategy::ALL {
            assert_eq!(strategy.name().parse::<PcpStrategy>().unwrap(), strategy);
            assert_eq!(serde_json::to_value(strategy).unwrap(), strategy.name());
        }
        for decodes in PcpDecodes::ALL {
            assert_eq!(decodes.name().parse::<PcpDecodes>().unwrap(), decodes);
            assert_eq!(serde_json::to_value(decodes).unwrap(), decodes.name());
        }
        assert!("stripe".parse::<PcpStrategy>().unwrap_err().contains("round_robin"));
        assert!("none".parse::<PcpDecodes>().unwrap_err().contains("owned"));
    }
}
