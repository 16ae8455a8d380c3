//! A case: configuration × workload × probe × seed, as a value that holds everything.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use shardcheck_engine::{CommBackend, Configuration, LaneOrder, RuleSetName, Settings, Validation};
use shardcheck_formats::Dtype;

use crate::{Probe, Workload};

/// Version of the case JSON. A reader refuses a version it does not know.
pub const CASE_SCHEMA_VERSION: u32 = 1;

/// What a case asks the engine to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Layout metadata.
    Layout,
    /// KV write and read back.
    Write,
    /// Decode, one row a request.
    Decode,
    /// Causal verification, several rows a request.
    Verify,
    /// Bidirectional draft block.
    Draft,
    /// Cached context gathered in chunks, plus new tokens.
    Context,
    /// Merge of given partials over ranks.
    MergePartials,
    /// Merge of two given states.
    MergeStates,
    /// Merge of given kernel segments.
    MergeSegments,
    /// Packing of the LSE.
    PackLse,
    /// Configuration rules.
    Rules,
}

impl Family {
    /// All families, in the order in which a new engine is brought up.
    pub const ALL: [Self; 11] = [
        Self::Layout,
        Self::Write,
        Self::PackLse,
        Self::MergeStates,
        Self::MergeSegments,
        Self::MergePartials,
        Self::Decode,
        Self::Verify,
        Self::Draft,
        Self::Context,
        Self::Rules,
    ];

    /// Name as it stands in case ids and filters.
    pub fn name(self) -> &'static str {
        match self {
            Self::Layout => "layout",
            Self::Write => "write",
            Self::Decode => "decode",
            Self::Verify => "verify",
            Self::Draft => "draft",
            Self::Context => "context",
            Self::MergePartials => "merge_partials",
            Self::MergeStates => "merge_states",
            Self::MergeSegments => "merge_segments",
            Self::PackLse => "pack_lse",
            Self::Rules => "rules",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Family {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|family| family.name() == text).ok_or_else(|| {
            format!("unknown family {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// Attention on an engine with caches: families layout, write, decode, verify, draft, context.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionCase {
    /// Name of the model whose shape this is, or `custom`.
    pub model: String,
    /// What the session is opened with.
    pub configuration: Configuration,
    /// The batch.
    pub workload: Workload,
    /// How the inputs are drawn.
    pub probe: Probe,
}

/// What the states to be merged look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MergePattern {
    /// All states hold something, LSEs of unit spread.
    Random,
    /// LSEs up to 80 apart, so that weights underflow.
    LargeGaps,
    /// Some states are empty (LSE −inf); their output is NaN.
    SomeEmpty,
    /// All states of some rows are empty.
    AllEmpty,
    /// NaN and +inf LSEs on single ranks, which the published merges treat as empty.
    BrokenLse,
    /// Equal LSEs and outputs that spell their rank and head: any permutation shows exactly.
    Tagged,
    /// Bit patterns of the LSE whose 16-bit halves are bf16 NaNs or infinities.
    NanHalves,
}

impl MergePattern {
    /// All patterns, in a stable order.
    pub const ALL: [Self; 7] = [
        Self::Random,
        Self::LargeGaps,
        Self::SomeEmpty,
        Self::AllEmpty,
        Self::BrokenLse,
        Self::Tagged,
        Self::NanHalves,
    ];

    /// Name as it stands in case ids.
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::LargeGaps => "large_gaps",
            Self::SomeEmpty => "some_empty",
            Self::AllEmpty => "all_empty",
            Self::BrokenLse => "broken_lse",
            Self::Tagged => "tagged",
            Self::NanHalves => "nan_halves",
        }
    }
}

/// How a given state lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateView {
    /// Row-major, no gaps.
    Contiguous,
    /// Heads outermost in memory.
    HeadMajor,
    /// A slice of a wider buffer, NaN in the gaps.
    Sliced,
}

impl StateView {
    /// All views, in a stable order.
    pub const ALL: [Self; 3] = [Self::Contiguous, Self::HeadMajor, Self::Sliced];

    /// Name as it stands in case ids.
    pub fn name(self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous",
            Self::HeadMajor => "head_major",
            Self::Sliced => "sliced",
        }
    }
}

/// Merge of given states: families merge_partials, merge_states, merge_segments, pack_lse.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeCase {
    /// Ranks W, or segments.
    pub world: usize,
    /// Query rows.
    pub rows: usize,
    /// Query heads of one rank.
    pub heads_per_rank: usize,
    /// Width of an output.
    pub dim: usize,
    /// Element type of the given outputs.
    pub dtype: Dtype,
    /// Collectives (merge_partials only).
    pub comm_backend: CommBackend,
    /// Lane order (merge_partials with A2A, pack_lse).
    pub lane_order: LaneOrder,
    /// What the states look like.
    pub pattern: MergePattern,
    /// How they lie in memory.
    pub view: StateView,
}

/// Launch settings and what their owner must say to them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleCase {
    /// Name of the rule, unique in its set.
    pub rule: String,
    /// Whose rules.
    pub rules: RuleSetName,
    /// What the user asks for.
    pub settings: Settings,
    /// What must be answered. Reasons are not compared word for word.
    pub expected: Validation,
}

/// The part of a case that depends on its family.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Body {
    /// Attention on an engine with caches.
    Attention(AttentionCase),
    /// Merge of given states.
    Merge(MergeCase),
    /// Configuration rules.
    Rules(RuleCase),
}

/// One thing to try.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Version of this format: [`CASE_SCHEMA_VERSION`].
    pub schema_version: u32,
    /// What is asked.
    pub family: Family,
    /// With what.
    pub body: Body,
    /// Seed of everything that is drawn.
    pub seed: u64,
}

/// A case that can't be used, and what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CaseError {
    /// Not the JSON of a case.
    #[error("malformed case: {0}; `shardcheck explain case-json` shows the format")]
    Malformed(String),
    /// Written by another version.
    #[error("case has schema version {found}, this program reads {CASE_SCHEMA_VERSION}: export it again")]
    Version {
        /// Version in the file.
        found: u64,
    },
    /// A value contradicts another.
    #[error("case is out of range: {0}")]
    OutOfRange(String),
    /// An id that does not parse.
    #[error("case id {id:?} does not parse: {reason}; `shardcheck list` prints ids")]
    Id {
        /// The id.
        id: String,
        /// What is wrong with it.
        reason: String,
    },
}
