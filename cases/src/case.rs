//! A case: configuration × workload × probe × seed, as a value that holds everything.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use shardcheck_engine::{
    Attention, CommBackend, Configuration, LaneOrder, LseBase, Mask, Operation, OperationKind, RuleSetName,
    Settings, Validation,
};
use shardcheck_formats::Dtype;

use crate::json::{other_kind, read_as, read_json};
use crate::{
    AcceptanceCase, AttendPcpCase, CaseError, CompressPcpCase, IndexLayersCase, KdaCase, MoeCase, PcpCase,
    Probe, RouteCase, SelectCase, SelectPcpCase, SelectedTokens, SequenceCase, StackCase, Workload,
};

/// Version of the case JSON. A reader refuses a version it does not know.
pub const CASE_SCHEMA_VERSION: u32 = 1;

/// What a case asks the engine to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Layout metadata.
    Layout,
    /// Rows of a batch over the ranks of prefill context parallelism.
    Pcp,
    /// Attention of rows that lie on the ranks of prefill context parallelism.
    AttendPcp,
    /// Selection of tokens for the rows of a shared batch.
    SelectPcp,
    /// Compression of the tokens of a shared batch.
    CompressPcp,
    /// Acceptance of drafted tokens.
    Acceptance,
    /// Selection of the tokens that rows attend to.
    SelectSparse,
    /// Attention over the tokens that were selected for a row.
    AttendSelected,
    /// Attention of heads that have sinks.
    AttendSinks,
    /// Layers that share a selection.
    IndexLayers,
    /// Kimi delta attention.
    Kda,
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
    /// Steps of one session.
    Sequence,
    /// Steps of one session through all layers of a transformer.
    Stack,
    /// Merge of given partials over ranks.
    MergePartials,
    /// Merge of two given states.
    MergeStates,
    /// Merge of given kernel segments.
    MergeSegments,
    /// Packing of the LSE.
    PackLse,
    /// Experts of given logits.
    Route,
    /// A layer of experts over ranks.
    Moe,
    /// Configuration rules.
    Rules,
}

impl Family {
    /// All families, in the order in which a new engine is brought up.
    pub const ALL: [Self; 25] = [
        Self::Layout,
        Self::Pcp,
        Self::Acceptance,
        Self::SelectSparse,
        Self::IndexLayers,
        Self::SelectPcp,
        Self::CompressPcp,
        Self::Kda,
        Self::Write,
        Self::PackLse,
        Self::MergeStates,
        Self::MergeSegments,
        Self::MergePartials,
        Self::Decode,
        Self::Verify,
        Self::Draft,
        Self::Context,
        Self::AttendPcp,
        Self::AttendSelected,
        Self::AttendSinks,
        Self::Route,
        Self::Moe,
        Self::Sequence,
        Self::Stack,
        Self::Rules,
    ];

    /// Name as it stands in case ids and filters.
    pub fn name(self) -> &'static str {
        match self {
            Self::Layout => "layout",
            Self::Pcp => "pcp",
            Self::AttendPcp => "attend_pcp",
            Self::SelectPcp => "select_pcp",
            Self::CompressPcp => "compress_pcp",
            Self::Acceptance => "acceptance",
            Self::SelectSparse => "select_sparse",
            Self::AttendSelected => "attend_selected",
            Self::AttendSinks => "attend_sinks",
            Self::IndexLayers => "index_layers",
            Self::Kda => "kda",
            Self::Write => "write",
            Self::Decode => "decode",
            Self::Verify => "verify",
            Self::Draft => "draft",
            Self::Context => "context",
            Self::Sequence => "sequence",
            Self::Stack => "stack",
            Self::MergePartials => "merge_partials",
            Self::MergeStates => "merge_states",
            Self::MergeSegments => "merge_segments",
            Self::PackLse => "pack_lse",
            Self::Route => "route",
            Self::Moe => "moe",
            Self::Rules => "rules",
        }
    }

    /// The operation that a case of this family is about; `None` for sequences, which are of several, and for rules, which no
    /// session answers.
    pub fn operation(self) -> Option<OperationKind> {
        match self {
            Self::Layout => Some(OperationKind::Layout),
            Self::Pcp => Some(OperationKind::PcpLayout),
            Self::AttendPcp => Some(OperationKind::AttendPcp),
            Self::SelectPcp => Some(OperationKind::SelectPcp),
            Self::CompressPcp => Some(OperationKind::CompressPcp),
            Self::Acceptance => Some(OperationKind::AcceptDrafts),
            Self::SelectSparse => Some(OperationKind::SelectSparse),
            Self::AttendSelected => Some(OperationKind::AttendSelected),
            Self::AttendSinks => Some(OperationKind::AttendSinks),
            Self::IndexLayers => Some(OperationKind::IndexLayers),
            Self::Kda => Some(OperationKind::Kda),
            Self::Stack => Some(OperationKind::Forward),
            Self::Write => Some(OperationKind::WriteKv),
            Self::Decode => Some(OperationKind::Decode),
            Self::Verify => Some(OperationKind::Verify),
            Self::Draft => Some(OperationKind::Draft),
            Self::Context => Some(OperationKind::Context),
            Self::MergePartials => Some(OperationKind::MergePartials),
            Self::MergeStates => Some(OperationKind::MergeStates),
            Self::MergeSegments => Some(OperationKind::MergeSegments),
            Self::PackLse => Some(OperationKind::PackLse),
            Self::Route => Some(OperationKind::Route),
            Self::Moe => Some(OperationKind::Moe),
            Self::Sequence | Self::Rules => None,
        }
    }

    /// Whether a case of this family holds an [`AttentionCase`].
    pub fn is_attention(self) -> bool {
        matches!(
            self,
            Self::Layout
                | Self::Write
                | Self::Decode
                | Self::Verify
                | Self::Draft
                | Self::Context
                | Self::AttendSelected
                | Self::AttendSinks
        )
    }

    /// Whether the keys of the new rows come with the step, so that the cache holds the context alone.
    pub fn brings_new_keys(self) -> bool {
        matches!(self, Self::Context | Self::AttendPcp)
    }

    /// Whether a case of this family holds a [`MergeCase`].
    pub fn is_merge(self) -> bool {
        matches!(self, Self::MergePartials | Self::MergeStates | Self::MergeSegments | Self::PackLse)
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

/// Attention on an engine with caches: families layout, write, decode, verify, draft, context, attend_selected, attend_sinks.
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
    /// MLA: no up-projection is given and the output stays in the latent space. Always so in the context family, whose
    /// operation takes no up-projection.
    #[serde(default)]
    pub latent_output: bool,
    /// Tokens that the rows attend to, in the family attend_selected; all that they see elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selected: Option<SelectedTokens>,
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
    /// Bit patterns of the LSE whose 16-bit halves are NaNs or infinities of bf16, and of f16 where the states are.
    NanHalves,
    /// Outputs at both ends of f16: row by row near its largest value, and among its subnormals.
    Extremes,
}

impl MergePattern {
    /// All patterns, in a stable order.
    pub const ALL: [Self; 8] = [
        Self::Random,
        Self::LargeGaps,
        Self::SomeEmpty,
        Self::AllEmpty,
        Self::BrokenLse,
        Self::Tagged,
        Self::NanHalves,
        Self::Extremes,
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
            Self::Extremes => "extremes",
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
    /// Element type of the given outputs: f32, bf16 or f16.
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

impl MergeCase {
    /// Tokens of one tile of a split kernel (merge_segments): the tile of vLLM's segmented MLA decode.
    pub const TILE_TOKENS: usize = 64;

    /// What a session for this merge is opened with: `world` ranks without sequence (one rank for the families that merge
    /// on one rank), one KV head of width `dim`.
    pub fn configuration(&self, family: Family) -> Configuration {
        let ranks = if family == Family::MergePartials { self.world } else { 1 };
        let dtype = if self.dtype == Dtype::F16 { Dtype::F16 } else { Dtype::Bf16 };
        Configuration {
            attention: Attention::Gqa { kv_heads: 1, head_dim: self.dim, v_head_dim: self.dim },
            tp: ranks,
            dcp: ranks,
            heads_per_rank: self.heads_per_rank,
            interleave: 1,
            block_size: 1,
            blocks: 1,
            dtype,
            kv_dtype: dtype,
            kv_scale: 1.0,
            softmax_scale: 1.0,
            comm_backend: self.comm_backend,
            lane_order: self.lane_order,
            query_replication: false,
            project_before_merge: false,
            kernel_head_widths: Vec::new(),
            second_group: None,
        }
    }
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
    /// Rows of a batch over the ranks of prefill context parallelism.
    Pcp(PcpCase),
    /// Attention of rows that lie on the ranks of prefill context parallelism.
    AttendPcp(AttendPcpCase),
    /// Selection of tokens for the rows of a shared batch.
    SelectPcp(SelectPcpCase),
    /// Compression of the tokens of a shared batch.
    CompressPcp(CompressPcpCase),
    /// Experts of given logits.
    Route(RouteCase),
    /// A layer of experts over ranks.
    Moe(MoeCase),
    /// Acceptance of drafted tokens.
    Acceptance(AcceptanceCase),
    /// Selection of the tokens that rows attend to.
    SelectSparse(SelectCase),
    /// Layers that share a selection.
    IndexLayers(IndexLayersCase),
    /// Steps of a session of Kimi delta attention.
    Kda(KdaCase),
    /// Steps of one session.
    Sequence(SequenceCase),
    /// Steps of a session through all layers of a transformer.
    Stack(Box<StackCase>),
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

impl Case {
    /// A case of the current schema version, whose body is one of the family's.
    pub(crate) fn of(family: Family, body: Body, seed: u64) -> Self {
        Self { schema_version: CASE_SCHEMA_VERSION, family, body, seed }
    }

    /// The case of an id, which spells it again, as its JSON does.
    #[cfg(test)]
    pub(crate) fn read_back(id: &str) -> Self {
        let case: Self = id.parse().unwrap();
        assert_eq!(case.id(), id);
        assert_eq!(Self::from_json(&case.to_json()).unwrap(), case);
        case
    }

    /// An attention case of the current schema version.
    pub fn attention(family: Family, body: AttentionCase, seed: u64) -> Self {
        Self::of(family, Body::Attention(body), seed)
    }

    /// A merge case of the current schema version.
    pub fn merge(family: Family, body: MergeCase, seed: u64) -> Self {
        Self::of(family, Body::Merge(body), seed)
    }

    /// A sequence case of the current schema version.
    pub fn sequence(body: SequenceCase, seed: u64) -> Self {
        Self::of(Family::Sequence, Body::Sequence(body), seed)
    }

    /// A rule case of the current schema version. Nothing is drawn, so its seed is 0.
    pub fn rules(body: RuleCase) -> Self {
        Self::of(Family::Rules, Body::Rules(body), 0)
    }

    /// The operation that the case is about, with its parameters; `None` for sequences and rules. The rows that a rank of
    /// prefill context parallelism is padded to depend on those of the fullest one and are left out here.
    pub fn operation(&self) -> Option<Operation> {
        let chunk_budget_tokens = match &self.body {
            Body::Pcp(case) => return Some(case.operation(0)),
            Body::AttendPcp(case) => return Some(case.operation(0)),
            Body::SelectPcp(case) => return Some(case.operation(0)),
            Body::CompressPcp(case) => return Some(case.operation(0)),
            Body::Acceptance(case) => return Some(case.operation()),
            Body::SelectSparse(case) => return Some(case.operation()),
            Body::IndexLayers(case) => return Some(case.operation()),
            Body::Kda(case) => return Some(case.operation()),
            Body::Stack(case) => return Some(case.operation()),
            Body::Route(case) => return Some(case.operation()),
            Body::Moe(case) => return Some(case.operation()),
            Body::Attention(AttentionCase { selected: Some(tokens), .. }) => return Some(tokens.operation()),
            Body::Attention(case) => case.workload.chunk_budget_tokens,
            _ => 0,
        };
        Some(match self.family {
            Family::Layout => Operation::Layout,
            Family::Write => Operation::WriteKv,
            Family::Decode | Family::Verify => Operation::Attend { mask: Mask::Causal },
            Family::AttendSinks => Operation::AttendSinks,
            Family::Draft => Operation::Attend { mask: Mask::Bidirectional },
            Family::Context => Operation::AttendContext { chunk_budget_tokens },
            Family::MergePartials => Operation::MergePartials { lse_base: LseBase::E },
            Family::MergeStates => Operation::MergeStates,
            Family::MergeSegments => Operation::MergeSegments { tile_tokens: MergeCase::TILE_TOKENS },
            Family::PackLse => Operation::PackLse,
            Family::Pcp
            | Family::AttendPcp
            | Family::SelectPcp
            | Family::CompressPcp
            | Family::Acceptance
            | Family::SelectSparse
            | Family::AttendSelected
            | Family::IndexLayers
            | Family::Kda
            | Family::Route
            | Family::Moe
            | Family::Sequence
            | Family::Stack
            | Family::Rules => return None,
        })
    }

    /// What a session for this case is opened with; `None` for rules.
    pub fn configuration(&self) -> Option<Configuration> {
        match &self.body {
            Body::Attention(case) => Some(case.configuration.clone()),
            Body::Merge(case) => Some(case.configuration(self.family)),
            Body::Pcp(case) => Some(case.configuration()),
            Body::SelectPcp(case) => Some(case.batch.configuration()),
            Body::CompressPcp(case) => Some(case.batch.configuration()),
            Body::AttendPcp(case) => Some(case.configuration.clone()),
            Body::Route(case) => Some(case.configuration()),
            Body::Moe(case) => Some(case.configuration()),
            Body::Acceptance(case) => Some(case.configuration()),
            Body::SelectSparse(case) => Some(case.configuration()),
            Body::IndexLayers(case) => Some(case.configuration()),
            Body::Kda(case) => Some(case.configuration()),
            Body::Sequence(case) => Some(case.configuration.clone()),
            Body::Stack(case) => Some(case.configuration().clone()),
            Body::Rules(_) => None,
        }
    }

    /// The case as JSON, one value that holds everything.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a case has no map with keys that are not strings")
    }

    /// Reads a case and checks it.
    ///
    /// # Errors
    /// [`CaseError::Version`] for another schema version, [`CaseError::UnknownValue`] for a name that is none of its
    /// axis, [`CaseError::Malformed`] for anything else that is not a case, and what [`Case::check`] says.
    pub fn from_json(text: &str) -> Result<Self, CaseError> {
        let value = read_json(text).map_err(CaseError::Malformed)?;
        let Some(version) = value.get("schema_version").and_then(serde_json::Value::as_u64) else {
            return Err(CaseError::Malformed("there is no whole number `schema_version`".to_owned()));
        };
        if version != u64::from(CASE_SCHEMA_VERSION) {
            return Err(CaseError::Version { found: version });
        }
        let case: Self = read_as(value.clone()).map_err(|message| {
            if message.contains("unknown name") {
                CaseError::UnknownValue(message)
            } else {
                CaseError::Malformed(message)
            }
        })?;
        // values of an object in the order of its keys would be taken for it
        let canonical =
            serde_json::to_value(&case).map_err(|error| CaseError::Malformed(error.to_string()))?;
        if let Some((place, why)) = other_kind(&value, &canonical) {
            return Err(CaseError::Malformed(format!("`{place}` {why}")));
        }
        case.check()?;
        Ok(case)
    }
}
