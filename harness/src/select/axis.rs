//! The axes of a filter expression: their names, what they are, and the values that they can have.

use shardcheck_cases::{
    AcceptancePattern, Body, CUSTOM_MODEL, Case, Family, GatePattern, IndexPattern, KdaPattern, LogitPattern,
    MergePattern, Model, Placement, Probe, StateView,
};
use shardcheck_engine::{
    AcceptanceMethod, CommBackend, LaneOrder, PcpDecodes, PcpStrategy, RuleSetName, StreamLayout,
};
use shardcheck_formats::Dtype;

/// An axis whose values are the names of a closed list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChoiceAxis {
    /// What is asked.
    Family,
    /// How inputs are drawn.
    Probe,
    /// Element type of the KV cache.
    Kv,
    /// Element type of activations and of given states.
    Dtype,
    /// Collectives of the merge.
    Backend,
    /// Where blocks lie.
    Placement,
    /// How what a case gives is drawn, where that is no probe.
    Pattern,
    /// How given states lie in memory.
    View,
    /// Order of the two lanes of a packed LSE.
    Lane,
    /// Split of prefill context parallelism.
    Strategy,
    /// What decodes do in it.
    Decodes,
    /// Where the rows of a stack lie between layers.
    Stream,
    /// How drafts are accepted.
    Method,
    /// Owner of configuration rules.
    Rules,
}

/// An axis whose values are whole numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumberAxis {
    /// W, or what stands for it.
    World,
    /// W.
    Dcp,
    /// P.
    Pcp,
    /// Ranks.
    Tp,
    /// Data-parallel groups.
    Dp,
    /// S.
    Interleave,
    /// B.
    Block,
    /// Rows of the longest request.
    Q,
    /// Gathered query heads.
    Heads,
    /// Tokens of the longest request.
    Tokens,
    /// Query rows.
    Rows,
    /// Requests.
    Requests,
    /// Graph-padding rows.
    Padded,
    /// Steps of a session.
    Steps,
    /// Layers.
    Layers,
    /// Experts of a layer.
    Experts,
    /// Experts of a token.
    Topk,
    /// Tokens that a row has selected.
    Selected,
    /// Drafts of a request.
    Drafts,
    /// Seed.
    Seed,
}

/// An axis that is on or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TruthAxis {
    /// Query replication.
    Qrep,
    /// Project before merge.
    Pbm,
    /// No up-projection.
    Latent,
    /// Weights that are laid out.
    Wired,
}

/// An axis of free text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextAxis {
    /// Case id.
    Id,
    /// Model name.
    Model,
    /// Property id: selects properties of a case.
    Prop,
}

/// Any axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Closed list of names.
    Choice(ChoiceAxis),
    /// Whole number.
    Number(NumberAxis),
    /// On or off.
    Truth(TruthAxis),
    /// Free text.
    Text(TextAxis),
}

impl Axis {
    /// All axes, in the order of the documentation.
    pub const ALL: [Self; 41] = [
        Self::Choice(ChoiceAxis::Family),
        Self::Text(TextAxis::Model),
        Self::Choice(ChoiceAxis::Probe),
        Self::Choice(ChoiceAxis::Kv),
        Self::Choice(ChoiceAxis::Backend),
        Self::Choice(ChoiceAxis::Lane),
        Self::Number(NumberAxis::World),
        Self::Number(NumberAxis::Dcp),
        Self::Number(NumberAxis::Pcp),
        Self::Number(NumberAxis::Tp),
        Self::Number(NumberAxis::Dp),
        Self::Choice(ChoiceAxis::Strategy),
        Self::Choice(ChoiceAxis::Decodes),
        Self::Number(NumberAxis::Interleave),
        Self::Number(NumberAxis::Block),
        Self::Number(NumberAxis::Q),
        Self::Number(NumberAxis::Heads),
        Self::Number(NumberAxis::Tokens),
        Self::Number(NumberAxis::Rows),
        Self::Number(NumberAxis::Requests),
        Self::Number(NumberAxis::Padded),
        Self::Number(NumberAxis::Steps),
        Self::Choice(ChoiceAxis::Placement),
        Self::Truth(TruthAxis::Qrep),
        Self::Truth(TruthAxis::Pbm),
        Self::Truth(TruthAxis::Latent),
        Self::Number(NumberAxis::Layers),
        Self::Choice(ChoiceAxis::Stream),
        Self::Truth(TruthAxis::Wired),
        Self::Number(NumberAxis::Experts),
        Self::Number(NumberAxis::Topk),
        Self::Number(NumberAxis::Selected),
        Self::Number(NumberAxis::Drafts),
        Self::Choice(ChoiceAxis::Method),
        Self::Choice(ChoiceAxis::Dtype),
        Self::Choice(ChoiceAxis::Pattern),
        Self::Choice(ChoiceAxis::View),
        Self::Choice(ChoiceAxis::Rules),
        Self::Number(NumberAxis::Seed),
        Self::Text(TextAxis::Id),
        Self::Text(TextAxis::Prop),
    ];

    /// Name in front of the parentheses.
    pub fn name(self) -> &'static str {
        self.entry().0
    }

    /// What the axis is, for `explain filter-expressions` and the docs.
    pub fn meaning(self) -> &'static str {
        self.entry().1
    }

    /// The name, and what it is.
    fn entry(self) -> (&'static str, &'static str) {
        match self {
            Self::Choice(axis) => axis.entry(),
            Self::Number(axis) => axis.entry(),
            Self::Truth(axis) => match axis {
                TruthAxis::Qrep => ("qrep", "query replication is asked for"),
                TruthAxis::Pbm => ("pbm", "projection before the merge is asked for"),
                TruthAxis::Latent => ("latent", "the output stays in the latent space"),
                TruthAxis::Wired => ("wired", "the weights of a stack are laid out, not drawn"),
            },
            Self::Text(axis) => match axis {
                TextAxis::Id => ("id", "case id: a part of it unless marked"),
                TextAxis::Model => ("model", "model whose shape it is: the whole name unless marked"),
                TextAxis::Prop => {
                    ("prop", "property id: selects properties of the cases, the whole id unless marked")
                }
            },
        }
    }

    /// The axis of that name.
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|axis| axis.name() == name)
    }

    /// Value of a case as text; `None` where the axis means nothing, and for `id` and `prop`, which a case does not hold.
    pub fn value_of(self, case: &Case) -> Option<String> {
        match self {
            Self::Choice(axis) => axis.of(case).map(str::to_owned),
            Self::Number(axis) => axis.of(case).map(|value| value.to_string()),
            Self::Truth(axis) => axis.of(case).map(|value| value.to_string()),
            Self::Text(TextAxis::Model) => model(case).map(str::to_owned),
            Self::Text(_) => None,
        }
    }

    /// Names and values of all axes that mean something for a case.
    pub fn values_of(case: &Case) -> Vec<(&'static str, String)> {
        Self::ALL.into_iter().filter_map(|axis| Some((axis.name(), axis.value_of(case)?))).collect()
    }

    /// The names that the axis can have, where they are a closed list.
    pub fn values(self) -> Vec<&'static str> {
        match self {
            Self::Choice(axis) => axis.values(),
            Self::Truth(_) => vec!["true", "false"],
            Self::Text(TextAxis::Model) => known_models(),
            Self::Number(_) | Self::Text(_) => Vec::new(),
        }
    }
}

/// Names that people give to an axis elsewhere, in launch arguments, configurations of models and papers.
pub(super) const ELSEWHERE: [(&str, &[&str]); 24] = [
    ("world", &["w", "cp", "ranks", "world_size"]),
    ("dcp", &["dcp_size", "decode_context_parallel_size"]),
    ("pcp", &["p", "pcp_size", "prefill_context_parallel_size"]),
    ("tp", &["tp_size", "tensor_parallel_size"]),
    ("dp", &["dp_size", "data_parallel_size"]),
    ("strategy", &["split", "sharding", "shard", "load_balance"]),
    ("interleave", &["s", "interleave_size", "cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"]),
    ("block", &["b", "block_size", "page", "page_size"]),
    ("q", &["q_len", "qlen", "query", "query_len", "max_query_len"]),
    ("heads", &["h", "num_heads", "head"]),
    ("tokens", &["context", "ctx", "context_len", "seq_len", "seqlen", "seq_lens", "length", "len"]),
    ("rows", &["num_tokens", "query_tokens"]),
    ("requests", &["batch", "batch_size", "bs", "num_reqs"]),
    ("padded", &["pad", "padding", "padded_rows", "graph"]),
    ("kv", &["kv_dtype", "kv_cache_dtype", "cache", "cache_dtype"]),
    ("backend", &["comm", "comm_backend", "dcp_comm_backend", "exchange"]),
    ("layers", &["l", "num_layers", "num_hidden_layers"]),
    ("experts", &["e", "num_experts", "n_routed_experts"]),
    ("topk", &["k", "top_k", "num_experts_per_tok"]),
    ("selected", &["index_topk", "index_top_k", "sparse"]),
    ("drafts", &["spec", "mtp", "num_speculative_tokens", "speculative"]),
    ("qrep", &["query_replication"]),
    ("pbm", &["project_before_merge"]),
    ("prop", &["property", "properties"]),
];

/// What a name that is no axis was most likely meant to be: an axis that is called so elsewhere, a value of one, or nearly one's name.
pub(super) fn meant_by(name: &str) -> Option<String> {
    let lower = name.to_lowercase().replace('-', "_");
    if Axis::find(&lower).is_some() {
        return Some(lower);
    }
    let known = ELSEWHERE.iter().find(|(_, names)| names.contains(&lower.as_str()));
    if let Some((axis, _)) = known {
        return Some((*axis).to_owned());
    }
    let is_value = |axis: &Axis| !matches!(axis, Axis::Truth(_)) && axis.values().contains(&name);
    if let Some(axis) = Axis::ALL.into_iter().find(is_value) {
        return Some(format!("{}({name})", axis.name()));
    }
    crate::nearest::nearest(&lower, Axis::ALL.map(Axis::name)).map(str::to_owned)
}

/// Names of the models that cases come from.
fn known_models() -> Vec<&'static str> {
    Model::all().iter().map(|model| model.name.as_str()).chain([CUSTOM_MODEL]).collect()
}

/// Name of the model of a case, where it has one.
pub(super) fn model(case: &Case) -> Option<&str> {
    match &case.body {
        Body::Attention(c) => Some(&c.model),
        Body::AttendPcp(c) => Some(&c.model),
        Body::Sequence(c) => Some(&c.model),
        Body::Stack(c) => Some(&c.session.model),
        _ => None,
    }
}

/// Element types that a KV cache may have, as `Configuration::check` takes them.
const KV_DTYPES: [Dtype; 6] =
    [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2];
/// Element types of activations and of the states that a merge is given.
const STATE_DTYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

impl ChoiceAxis {
    fn entry(self) -> (&'static str, &'static str) {
        match self {
            Self::Family => ("family", "what the engine is asked"),
            Self::Probe => ("probe", "how queries, keys and values are drawn"),
            Self::Kv => ("kv", "element type of the KV cache"),
            Self::Dtype => ("dtype", "element type of activations, or of the states that a merge is given"),
            Self::Backend => ("backend", "collectives that merge the partials"),
            Self::Placement => ("placement", "where the blocks of the requests lie"),
            Self::Pattern => (
                "pattern",
                "what the states of a merge look like; how logits, drafts, gates or an indexer's values are drawn",
            ),
            Self::View => ("view", "how the states of a merge lie in memory"),
            Self::Lane => ("lane", "order of the two lanes of a packed LSE"),
            Self::Strategy => {
                ("strategy", "which rows of a prompt a rank of prefill context parallelism takes")
            }
            Self::Decodes => ("decodes", "what the rows of decodes do in prefill context parallelism"),
            Self::Stream => ("stream", "where the rows of a stack lie between layers"),
            Self::Method => ("method", "how drafts are accepted"),
            Self::Rules => ("rules", "whose configuration rules are asked"),
        }
    }

    /// The names that the axis can have.
    pub fn values(self) -> Vec<&'static str> {
        match self {
            Self::Family => Family::ALL.map(Family::name).to_vec(),
            Self::Probe => Probe::ALL.map(Probe::name).to_vec(),
            Self::Kv => KV_DTYPES.map(Dtype::name).to_vec(),
            Self::Dtype => STATE_DTYPES.map(Dtype::name).to_vec(),
            Self::Backend => CommBackend::ALL.map(CommBackend::name).to_vec(),
            Self::Placement => Placement::ALL.map(Placement::name).to_vec(),
            Self::Pattern => patterns(),
            Self::View => StateView::ALL.map(StateView::name).to_vec(),
            Self::Lane => LaneOrder::ALL.map(LaneOrder::name).to_vec(),
            Self::Strategy => PcpStrategy::ALL.map(PcpStrategy::name).to_vec(),
            Self::Decodes => PcpDecodes::ALL.map(PcpDecodes::name).to_vec(),
            Self::Stream => StreamLayout::ALL.map(StreamLayout::name).to_vec(),
            Self::Method => AcceptanceMethod::ALL.map(AcceptanceMethod::name).to_vec(),
            Self::Rules => RuleSetName::ALL.map(RuleSetName::name).to_vec(),
        }
    }
}

/// Names of the patterns of all families, each once.
fn patterns() -> Vec<&'static str> {
    let mut names: Vec<&'static str> = Vec::new();
    for own in [
        MergePattern::ALL.map(MergePattern::name).to_vec(),
        LogitPattern::ALL.map(LogitPattern::name).to_vec(),
        AcceptancePattern::ALL.map(AcceptancePattern::name).to_vec(),
        IndexPattern::ALL.map(IndexPattern::name).to_vec(),
        GatePattern::ALL.map(GatePattern::name).to_vec(),
        KdaPattern::ALL.map(KdaPattern::name).to_vec(),
    ] {
        for name in own {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    names
}

impl NumberAxis {
    fn entry(self) -> (&'static str, &'static str) {
        match self {
            Self::World => (
                "world",
                "decode-context-parallel size W, the number of states of a merge, the ranks of prefill context parallelism of a batch by itself, or all ranks of a layer of experts",
            ),
            Self::Dcp => ("dcp", "decode-context-parallel size W, where the case has one"),
            Self::Pcp => {
                ("pcp", "prefill-context-parallel size P, where the case has one; 1 for a stack without")
            }
            Self::Tp => ("tp", "tensor-parallel size: ranks of the session"),
            Self::Dp => ("dp", "data-parallel groups of a layer of experts"),
            Self::Interleave => ("interleave", "KV interleave size S in tokens"),
            Self::Block => ("block", "block size B in tokens"),
            Self::Q => ("q", "query rows of the longest request; the most of any step"),
            Self::Heads => ("heads", "query heads that a group gathers: heads of a rank times W"),
            Self::Tokens => ("tokens", "tokens of the longest request, new rows included"),
            Self::Rows => ("rows", "query rows of all requests and steps, without padding"),
            Self::Requests => ("requests", "requests of the batch; the most of any step"),
            Self::Padded => ("padded", "graph-padding rows behind the last request; the most of any step"),
            Self::Steps => ("steps", "steps of a session that run the engine"),
            Self::Layers => ("layers", "layers of a stack, or of a model whose layers share a selection"),
            Self::Experts => ("experts", "experts of a layer; 0 for a stack without"),
            Self::Topk => ("topk", "experts of a token"),
            Self::Selected => ("selected", "most tokens that a row has selected (sparse attention)"),
            Self::Drafts => ("drafts", "most drafts of a request"),
            Self::Seed => ("seed", "seed of the case"),
        }
    }
}
