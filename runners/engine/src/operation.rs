//! What an engine is asked to compute: one closed list, each entry with its tensors.

mod tensors;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{
    AcceptanceMethod, CompressPlan, IndexPlan, IndexSharing, KdaPlan, LseBase, MoePlan, PcpDecodes, PcpPlan,
    PcpStrategy, Router, Selector, SlotList, StackPlan, Tensor, Tensors,
};
use crate::{acceptance, indexing, kda, moe, prefill, sharing, sparse, stack};

use tensors::{
    ATTEND, ATTEND_SINKS, CONTEXT, IMPORT_CACHE, LAYOUT, LOAD_CACHE, MERGE_PARTIALS, MERGE_SEGMENTS,
    MERGE_STATES, PACK_LSE, READ_CACHE, WRITE_KV,
};
pub(crate) use tensors::{
    BLOCK_TABLE, GATHERED_QUERY, LSE, OUT, PARTIAL_LSE, PARTIAL_OUT, QUERY, QUERY_START, SEQ_LENS,
    UP_PROJECTION, spec,
};

/// Which keys a query row of a multi-token request sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// Row `t` of `q` sees the positions below `L − q + 1 + t` (decode and target verification).
    Causal,
    /// Every row sees all `L` positions (a draft block that is filled in one pass, as in DSpark and DFlash).
    Bidirectional,
}

/// How the caches of another session are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheLayout {
    /// Decode-context-parallel size W of that session.
    pub dcp: usize,
    /// Its interleave size S in tokens.
    pub interleave: usize,
    /// Its physical block size B in tokens.
    pub block_size: usize,
}

/// One operation of a session.
///
/// Shapes use: `n` requests, `T` query rows (graph padding included), `ranks = tp`, `Hall = heads_per_rank·tp` query heads,
/// `H = heads_per_rank`, `Hg = H·dcp`, `K` KV heads, `Dk` and `Dv` key and value width, `V` width after the up-projection,
/// `B` block size. [`OperationKind::tensors`] lists them by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "operation", deny_unknown_fields)]
pub enum Operation {
    /// Derive the layout metadata of a batch: lengths, slots, pages.
    Layout,
    /// Append tokens to the caches through the slot mapping that the engine derives.
    WriteKv,
    /// Return the caches as they are.
    ReadCache,
    /// Replace the caches by the given ones.
    LoadCache,
    /// Take requests over from a session of another layout: every token of the given caches goes to the slot that it has in this
    /// session's layout, as the bytes that it is; every other slot stays as it was.
    ImportCache {
        /// Layout of the given caches.
        source: CacheLayout,
    },
    /// Attention of new rows over the cached tokens of their request: decode (q = 1), verify (q > 1), draft block.
    Attend {
        /// Which keys a row sees.
        mask: Mask,
    },
    /// Attention of new tokens over a cached context, gathered in chunks, merged with the new tokens' own causal attention.
    AttendContext {
        /// Workspace of one gather, in tokens over all ranks and requests.
        chunk_budget_tokens: usize,
    },
    /// Merge the given partials of all ranks of one group.
    MergePartials {
        /// Base of the given LSEs and of the merged one.
        #[serde(default, skip_serializing_if = "LseBase::is_e")]
        lse_base: LseBase,
    },
    /// Merge two attention states (a prefix and a suffix).
    MergeStates,
    /// Merge the unreduced segments of a split kernel, given base-2 statistics.
    MergeSegments {
        /// Tokens of one tile, which decides how many segments are active.
        tile_tokens: usize,
    },
    /// Split 32-bit LSEs into two 16-bit lanes and join them again.
    PackLse,
    /// An operation on one of several KV groups, its shapes being those of the group's own configuration. An operation by itself is
    /// on the first group.
    InGroup {
        /// Number of the group: 0 or 1.
        group: usize,
        /// The operation.
        step: Box<Operation>,
    },
    /// Share the rows of a batch out over the ranks of prefill context parallelism, and say how they come back.
    ///
    /// `P = world`, `R` rows of a rank with padding: as many as the fullest rank has, or `padded_rows` where that is more.
    PcpLayout {
        /// Ranks P.
        world: usize,
        /// Which rows of a prompt a rank takes.
        strategy: PcpStrategy,
        /// What the rows of decodes do.
        decodes: PcpDecodes,
        /// Rows that a rank runs at least, such as those of a graph.
        #[serde(default, skip_serializing_if = "is_zero")]
        padded_rows: usize,
        /// Whether the batch is divided between requests into two groups that overlap, each shared out and padded by itself; R is the sum
        /// of their rows then, those of the first group before those of the second.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        overlap: bool,
    },
    /// Attention of a batch whose rows are shared out over the ranks of prefill context parallelism: each rank has the queries, keys and
    /// values of its rows, gathers the keys and values of all, and attends for its own rows over the positions before them, the cached
    /// ones among them; outputs are gathered and brought back into the batch's order.
    ///
    /// `P`, `R` and `N` as in [`Self::PcpLayout`]; the ranks of the session only say where the cached context lies. Each of the P ranks has
    /// all `Hall` heads.
    AttendPcp {
        /// How rows are shared out, and what queries are cast to.
        plan: PcpPlan,
    },
    /// Select the tokens that each row of a shared batch attends to: each rank scores its own rows by the gathered keys of all positions
    /// before them, and what is selected is gathered and brought back into the batch's order.
    ///
    /// `P`, `R` and `N` as in [`Self::PcpLayout`]; `I`, `D` and `k` as in [`Self::SelectSparse`]. No rank of the session is asked for.
    SelectPcp {
        /// How rows are shared out, and how many tokens they select.
        plan: IndexPlan,
    },
    /// Compress the tokens of a shared batch: blocks of `m` consecutive tokens of a request are pooled into an entry each by softmax gates,
    /// whatever ranks their rows are on (DeepSeek-V4 `Compressor`, without the norm, the rotation and the cast behind it).
    ///
    /// `P`, `R` and `N` as in [`Self::PcpLayout`]; `d` columns of an entry. No rank of the session is asked for.
    CompressPcp {
        /// How rows are shared out, and what a block is.
        plan: CompressPlan,
    },
    /// Choose the experts of given logits: `N` tokens, `E` experts, `k` of them for each token.
    Route {
        /// How they are chosen and weighed.
        router: Router,
    },
    /// A layer of experts over all ranks of a plan.
    ///
    /// `N` tokens of all data-parallel groups, one group after the other, `h` hidden width, `I` inner width of an expert, `J` of the shared
    /// one. The rows of a rank: those of its group whose place in it is its rank of prefill context parallelism modulo their number, or
    /// all of its group where rows are redundant or sliced; `R`, as many as the fullest rank has.
    Moe {
        /// How experts are chosen and weighed.
        router: Router,
        /// How ranks share tokens and experts out.
        plan: MoePlan,
    },
    /// Accept or reject the drafted tokens of a batch by the target's logits, and draw the token behind them.
    ///
    /// `P = ranks`, `K` most drafts of a request, `V = vocabulary`. Rank r has the logits of the tokens from r·ceil(V / P) on;
    /// every rank emits the same tokens.
    AcceptDrafts {
        /// How drafts are accepted.
        method: AcceptanceMethod,
        /// Tensor-parallel ranks P that the vocabulary is sharded over.
        ranks: usize,
    },
    /// Select the tokens that each row attends to by the scores of an indexer, whose keys lie in the session's layout, and list the
    /// slots of those that a rank owns.
    ///
    /// The score of a row for a token is Σ w·relu(q·k)·scale over `I` heads of width `D`. Row `t` of the `q` of a request of length `L`
    /// sees the positions below `L − q + 1 + t`, and selects `k = top_k` of them.
    SelectSparse {
        /// How tokens are selected and listed.
        selector: Selector,
    },
    /// Attention of new rows over the tokens that were selected for them, by the slots that each rank lists of them. MLA alone.
    ///
    /// `k` columns of selected tokens. A row of a request attends to positions that it sees: those below L − q + 1 + t.
    AttendSelected {
        /// How a rank lists the slots of the tokens that it owns.
        list: SlotList,
        /// Whether the layer shares the selection and the lists of the last one that brought its own (IndexShare); `topk` is not given
        /// then.
        #[serde(default, skip_serializing_if = "is_false")]
        shared: bool,
    },
    /// Causal attention of new rows whose heads have sinks: a logit of each head that takes its share of the softmax and adds no
    /// value (gpt-oss). One or several rows a request.
    ///
    /// A sink belongs to no rank and counts once: partial outputs and LSEs are without it, the merged ones with it.
    AttendSinks,
    /// Kimi delta attention of new rows behind the states of their requests: short convolution, delta rule with decays, gated norm.
    ///
    /// `P = ranks = tp`, `H` query and key heads of all ranks, `HV` value heads, `K` and `V` their widths; `taps` of the convolution. Rank r has
    /// the r-th H / P and HV / P heads, with their states whole: decode context parallelism shards none of it.
    Kda {
        /// How decays are made, and what the session keeps.
        plan: KdaPlan,
    },
    /// Say which layers of a model compute a selection and which attend by that of a layer before them (IndexShare).
    ///
    /// `n` layers, those of the model first, then those of its drafts.
    IndexLayers {
        /// What the model's configuration says of it, and whose reading of it is asked for.
        sharing: IndexSharing,
    },
    /// One step of new rows through all layers of a small transformer, from token ids to the greedy token behind each row.
    ///
    /// `L` layers, `V` tokens of the vocabulary, `h` hidden width, `I` inner width of an MLP, `P` rotary width, `Vo` width of a head behind the
    /// up-projection. Row `t` of the `q` of a request of length `S` stands at position `S − q + t`, whose key it writes and sees.
    Forward {
        /// Which layers there are.
        plan: StackPlan,
    },
}

fn is_false(value: &bool) -> bool {
    !*value
}

fn is_zero(value: &usize) -> bool {
    *value == 0
}

/// Names of the operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OperationKind {
    /// [`Operation::Layout`].
    Layout,
    /// [`Operation::WriteKv`].
    WriteKv,
    /// [`Operation::ReadCache`].
    ReadCache,
    /// [`Operation::LoadCache`].
    LoadCache,
    /// [`Operation::ImportCache`].
    ImportCache,
    /// [`Operation::Attend`] with a causal mask and one row a request.
    Decode,
    /// [`Operation::Attend`] with a causal mask and several rows a request.
    Verify,
    /// [`Operation::Attend`] with a bidirectional mask.
    Draft,
    /// [`Operation::AttendContext`].
    Context,
    /// [`Operation::MergePartials`].
    MergePartials,
    /// [`Operation::MergeStates`].
    MergeStates,
    /// [`Operation::MergeSegments`].
    MergeSegments,
    /// [`Operation::PackLse`].
    PackLse,
    /// [`Operation::PcpLayout`].
    PcpLayout,
    /// [`Operation::AttendPcp`].
    AttendPcp,
    /// [`Operation::SelectPcp`].
    SelectPcp,
    /// [`Operation::CompressPcp`].
    CompressPcp,
    /// [`Operation::Route`].
    Route,
    /// [`Operation::Moe`].
    Moe,
    /// [`Operation::AcceptDrafts`].
    AcceptDrafts,
    /// [`Operation::SelectSparse`].
    SelectSparse,
    /// [`Operation::AttendSelected`].
    AttendSelected,
    /// [`Operation::AttendSinks`].
    AttendSinks,
    /// [`Operation::Kda`].
    Kda,
    /// [`Operation::IndexLayers`].
    IndexLayers,
    /// [`Operation::Forward`].
    Forward,
}

/// Who makes a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Provenance {
    /// The harness gives it and the engine must take it as it is.
    Given,
    /// The harness gives it, but an engine may derive it from the others; tampering with it is NotApplicable then.
    Derived,
    /// The engine must return it.
    Output,
    /// The engine returns it where it can: it localises a failure.
    Observable,
}

/// One tensor of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TensorSpec {
    /// Name in [`crate::Tensors`].
    pub name: &'static str,
    /// Who makes it.
    pub provenance: Provenance,
    /// Element type and shape in the words of [`Operation`].
    pub shape: &'static str,
    /// What it holds.
    pub meaning: &'static str,
}

impl Operation {
    /// Name of the operation in a profile. `inputs` decide whether rows under a causal mask are decode or verify: with at most one row a
    /// request it is decode.
    pub fn kind(&self, inputs: &Tensors) -> OperationKind {
        match self {
            Self::Layout => OperationKind::Layout,
            Self::WriteKv => OperationKind::WriteKv,
            Self::ReadCache => OperationKind::ReadCache,
            Self::LoadCache => OperationKind::LoadCache,
            Self::ImportCache { .. } => OperationKind::ImportCache,
            Self::Attend { mask: Mask::Bidirectional } => OperationKind::Draft,
            Self::Attend { mask: Mask::Causal } => {
                let starts = inputs.find("query_start_loc").map(Tensor::to_i64).unwrap_or_default();
                if starts.windows(2).all(|pair| pair[1] - pair[0] <= 1) {
                    OperationKind::Decode
                } else {
                    OperationKind::Verify
                }
            }
            Self::AttendContext { .. } => OperationKind::Context,
            Self::MergePartials { .. } => OperationKind::MergePartials,
            Self::MergeStates => OperationKind::MergeStates,
            Self::MergeSegments { .. } => OperationKind::MergeSegments,
            Self::PackLse => OperationKind::PackLse,
            Self::InGroup { step, .. } => step.kind(inputs),
            Self::PcpLayout { .. } => OperationKind::PcpLayout,
            Self::AttendPcp { .. } => OperationKind::AttendPcp,
            Self::SelectPcp { .. } => OperationKind::SelectPcp,
            Self::CompressPcp { .. } => OperationKind::CompressPcp,
            Self::Route { .. } => OperationKind::Route,
            Self::Moe { .. } => OperationKind::Moe,
            Self::AcceptDrafts { .. } => OperationKind::AcceptDrafts,
            Self::SelectSparse { .. } => OperationKind::SelectSparse,
            Self::AttendSelected { .. } => OperationKind::AttendSelected,
            Self::AttendSinks => OperationKind::AttendSinks,
            Self::Kda { .. } => OperationKind::Kda,
            Self::IndexLayers { .. } => OperationKind::IndexLayers,
            Self::Forward { .. } => OperationKind::Forward,
        }
    }

    /// The operation as it is on a KV group by its number.
    #[must_use]
    pub fn in_group(self, group: usize) -> Self {
        if group == 0 { self } else { Self::InGroup { group, step: Box::new(self) } }
    }
}

impl OperationKind {
    /// All operations, in a stable order.
    pub const ALL: [Self; 26] = [
        Self::Layout,
        Self::WriteKv,
        Self::ReadCache,
        Self::LoadCache,
        Self::ImportCache,
        Self::Decode,
        Self::Verify,
        Self::Draft,
        Self::Context,
        Self::MergePartials,
        Self::MergeStates,
        Self::MergeSegments,
        Self::PackLse,
        Self::PcpLayout,
        Self::AttendPcp,
        Self::SelectPcp,
        Self::CompressPcp,
        Self::Route,
        Self::Moe,
        Self::AcceptDrafts,
        Self::SelectSparse,
        Self::AttendSelected,
        Self::AttendSinks,
        Self::Kda,
        Self::IndexLayers,
        Self::Forward,
    ];

    /// Name as it stands in profiles and case ids.
    pub fn name(self) -> &'static str {
        match self {
            Self::Layout => "layout",
            Self::WriteKv => "write_kv",
            Self::ReadCache => "read_cache",
            Self::LoadCache => "load_cache",
            Self::ImportCache => "import_cache",
            Self::Decode => "decode",
            Self::Verify => "verify",
            Self::Draft => "draft",
            Self::Context => "context",
            Self::MergePartials => "merge_partials",
            Self::MergeStates => "merge_states",
            Self::MergeSegments => "merge_segments",
            Self::PackLse => "pack_lse",
            Self::PcpLayout => "pcp_layout",
            Self::AttendPcp => "attend_pcp",
            Self::SelectPcp => "select_pcp",
            Self::CompressPcp => "compress_pcp",
            Self::Route => "route",
            Self::Moe => "moe",
            Self::AcceptDrafts => "accept_drafts",
            Self::SelectSparse => "select_sparse",
            Self::AttendSelected => "attend_selected",
            Self::AttendSinks => "attend_sinks",
            Self::Kda => "kda",
            Self::IndexLayers => "index_layers",
            Self::Forward => "forward",
        }
    }

    /// Whether what the operation is given, or what its result travels behind, has the type of a session's activations, so that an
    /// engine declares which types it takes.
    pub fn has_activations(self) -> bool {
        matches!(
            self,
            Self::WriteKv
                | Self::Decode
                | Self::Verify
                | Self::Draft
                | Self::Context
                | Self::AttendPcp
                | Self::AttendSelected
                | Self::MergePartials
                | Self::MergeStates
                | Self::PackLse
        )
    }

    /// The tensors of the operation, inputs first.
    pub fn tensors(self) -> &'static [TensorSpec] {
        match self {
            Self::Layout => LAYOUT,
            Self::WriteKv => WRITE_KV,
            Self::ReadCache => READ_CACHE,
            Self::LoadCache => LOAD_CACHE,
            Self::ImportCache => IMPORT_CACHE,
            Self::Decode | Self::Verify | Self::Draft => ATTEND,
            Self::Context => CONTEXT,
            Self::MergePartials => MERGE_PARTIALS,
            Self::MergeStates => MERGE_STATES,
            Self::MergeSegments => MERGE_SEGMENTS,
            Self::PackLse => PACK_LSE,
            Self::PcpLayout => prefill::LAYOUT,
            Self::AttendPcp => prefill::ATTEND,
            Self::SelectPcp => indexing::SELECT,
            Self::CompressPcp => indexing::COMPRESS,
            Self::Route => moe::ROUTE,
            Self::Moe => moe::MOE,
            Self::AcceptDrafts => acceptance::TENSORS,
            Self::SelectSparse => sparse::SELECT,
            Self::AttendSelected => sparse::ATTEND,
            Self::AttendSinks => ATTEND_SINKS,
            Self::Kda => kda::TENSORS,
            Self::IndexLayers => sharing::TENSORS,
            Self::Forward => stack::TENSORS,
        }
    }
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for OperationKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            format!("unknown operation {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

#[cfg(test)]
mod tests;
