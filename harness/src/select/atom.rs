//! Atoms of a filter expression: an axis, and what its value must be.

use std::fmt;

use shardcheck_cases::{
    AttentionCase, Body, CUSTOM_MODEL, Case, Family, MergeCase, MergePattern, Model, Placement, Probe,
    StateView,
};
use shardcheck_engine::{CommBackend, Configuration, LaneOrder, RuleSetName};
use shardcheck_formats::Dtype;

use super::Subject;
use super::glob::glob_matches;

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
    /// What given states look like.
    Pattern,
    /// How given states lie in memory.
    View,
    /// Order of the two lanes of a packed LSE.
    Lane,
    /// Owner of configuration rules.
    Rules,
}

/// An axis whose values are whole numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumberAxis {
    /// W.
    World,
    /// Ranks.
    Tp,
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
    pub const ALL: [Self; 27] = [
        Self::Choice(ChoiceAxis::Family),
        Self::Text(TextAxis::Model),
        Self::Choice(ChoiceAxis::Probe),
        Self::Choice(ChoiceAxis::Kv),
        Self::Choice(ChoiceAxis::Backend),
        Self::Choice(ChoiceAxis::Lane),
        Self::Number(NumberAxis::World),
        Self::Number(NumberAxis::Tp),
        Self::Number(NumberAxis::Interleave),
        Self::Number(NumberAxis::Block),
        Self::Number(NumberAxis::Q),
        Self::Number(NumberAxis::Heads),
        Self::Number(NumberAxis::Tokens),
        Self::Number(NumberAxis::Rows),
        Self::Number(NumberAxis::Requests),
        Self::Number(NumberAxis::Padded),
        Self::Choice(ChoiceAxis::Placement),
        Self::Truth(TruthAxis::Qrep),
        Self::Truth(TruthAxis::Pbm),
        Self::Truth(TruthAxis::Latent),
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
        match self {
            Self::Choice(axis) => match axis {
                ChoiceAxis::Family => "family",
                ChoiceAxis::Probe => "probe",
                ChoiceAxis::Kv => "kv",
                ChoiceAxis::Dtype => "dtype",
                ChoiceAxis::Backend => "backend",
                ChoiceAxis::Placement => "placement",
                ChoiceAxis::Pattern => "pattern",
                ChoiceAxis::View => "view",
                ChoiceAxis::Lane => "lane",
                ChoiceAxis::Rules => "rules",
            },
            Self::Number(axis) => match axis {
                NumberAxis::World => "world",
                NumberAxis::Tp => "tp",
                NumberAxis::Interleave => "interleave",
                NumberAxis::Block => "block",
                NumberAxis::Q => "q",
                NumberAxis::Heads => "heads",
                NumberAxis::Tokens => "tokens",
                NumberAxis::Rows => "rows",
                NumberAxis::Requests => "requests",
                NumberAxis::Padded => "padded",
                NumberAxis::Seed => "seed",
            },
            Self::Truth(TruthAxis::Qrep) => "qrep",
            Self::Truth(TruthAxis::Pbm) => "pbm",
            Self::Truth(TruthAxis::Latent) => "latent",
            Self::Text(TextAxis::Id) => "id",
            Self::Text(TextAxis::Model) => "model",
            Self::Text(TextAxis::Prop) => "prop",
        }
    }

    /// What the axis is, for `explain filter-expressions` and the docs.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Choice(axis) => match axis {
                ChoiceAxis::Family => "what the engine is asked",
                ChoiceAxis::Probe => "how queries, keys and values are drawn",
                ChoiceAxis::Kv => "element type of the KV cache",
                ChoiceAxis::Dtype => "element type of activations, or of the states that a merge is given",
                ChoiceAxis::Backend => "collectives that merge the partials",
                ChoiceAxis::Placement => "where the blocks of the requests lie",
                ChoiceAxis::Pattern => "what the states of a merge look like",
                ChoiceAxis::View => "how the states of a merge lie in memory",
                ChoiceAxis::Lane => "order of the two lanes of a packed LSE",
                ChoiceAxis::Rules => "whose configuration rules are asked",
            },
            Self::Number(axis) => match axis {
                NumberAxis::World => {
                    "decode-context-parallel size W, the number of states of a merge, the ranks of prefill context parallelism, or all ranks of a layer of experts"
                }
                NumberAxis::Tp => "tensor-parallel size: ranks of the session",
                NumberAxis::Interleave => "KV interleave size S in tokens",
                NumberAxis::Block => "block size B in tokens",
                NumberAxis::Q => "query rows of the longest request",
                NumberAxis::Heads => "query heads that a group gathers: heads of a rank times W",
                NumberAxis::Tokens => "tokens of the longest request, new rows included",
                NumberAxis::Rows => "query rows of all requests, without padding",
                NumberAxis::Requests => "requests of the batch",
                NumberAxis::Padded => "graph-padding rows behind the last request",
                NumberAxis::Seed => "seed of the case",
            },
            Self::Truth(TruthAxis::Qrep) => "query replication is asked for",
            Self::Truth(TruthAxis::Pbm) => "projection before the merge is asked for",
            Self::Truth(TruthAxis::Latent) => "the output stays in the latent space",
            Self::Text(TextAxis::Id) => "case id: a part of it unless marked",
            Self::Text(TextAxis::Model) => "model whose shape it is: the whole name unless marked",
            Self::Text(TextAxis::Prop) => {
                "property id: selects properties of the cases, the whole id unless marked"
            }
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

/// Names of the models that cases come from.
fn known_models() -> Vec<&'static str> {
    Model::all().iter().map(|model| model.name.as_str()).chain([CUSTOM_MODEL]).collect()
}

/// Element types that a KV cache may have, as `Configuration::check` takes them.
const KV_DTYPES: [Dtype; 6] =
    [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2];
/// Element types of activations and of the states that a merge is given.
const STATE_DTYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

impl ChoiceAxis {
    /// The names that the axis can have.
    pub fn values(self) -> Vec<&'static str> {
        match self {
            Self::Family => Family::ALL.map(Family::name).to_vec(),
            Self::Probe => Probe::ALL.map(Probe::name).to_vec(),
            Self::Kv => KV_DTYPES.map(Dtype::name).to_vec(),
            Self::Dtype => STATE_DTYPES.map(Dtype::name).to_vec(),
            Self::Backend => CommBackend::ALL.map(CommBackend::name).to_vec(),
            Self::Placement => Placement::ALL.map(Placement::name).to_vec(),
            Self::Pattern => MergePattern::ALL.map(MergePattern::name).to_vec(),
            Self::View => StateView::ALL.map(StateView::name).to_vec(),
            Self::Lane => LaneOrder::ALL.map(LaneOrder::name).to_vec(),
            Self::Rules => RuleSetName::ALL.map(RuleSetName::name).to_vec(),
        }
    }

    /// Value of a case; `None` where the axis means nothing.
    pub fn of(self, case: &Case) -> Option<&'static str> {
        match self {
            Self::Family => Some(case.family.name()),
            Self::Probe => match &case.body {
                Body::AttendPcp(c) => Some(c.probe.name()),
                _ => attention(case).map(|c| c.probe.name()),
            },
            Self::Kv => session(case).map(|c| c.kv_dtype.name()),
            Self::Placement => match &case.body {
                Body::AttendPcp(c) => Some(c.placement.name()),
                _ => attention(case).map(|c| c.workload.placement.name()),
            },
            Self::Dtype => match merge(case) {
                Some(states) => Some(states.dtype.name()),
                None => session(case).map(|c| c.dtype.name()),
            },
            Self::Pattern => merge(case).map(|c| c.pattern.name()),
            Self::View => merge(case).map(|c| c.view.name()),
            Self::Backend => exchange(case).map(|(backend, _)| backend.name()),
            Self::Lane => match exchange(case) {
                Some((CommBackend::A2a, lane)) => Some(lane.name()),
                Some(_) => None,
                None => merge(case).filter(|_| case.family == Family::PackLse).map(|c| c.lane_order.name()),
            },
            Self::Rules => match &case.body {
                Body::Rules(rules) => Some(rules.rules.name()),
                _ => None,
            },
        }
    }
}

impl TruthAxis {
    /// Value of a case; `None` where the axis means nothing.
    pub fn of(self, case: &Case) -> Option<bool> {
        let latent = match &case.body {
            Body::Attention(c) => c.latent_output,
            Body::Sequence(c) => c.latent_output,
            Body::Stack(c) => c.session.latent_output,
            _ => return None,
        };
        session(case).map(|c| match self {
            Self::Qrep => c.query_replication,
            Self::Pbm => c.project_before_merge,
            Self::Latent => latent,
        })
    }
}

fn attention(case: &Case) -> Option<&AttentionCase> {
    match &case.body {
        Body::Attention(attention) => Some(attention),
        _ => None,
    }
}

fn model(case: &Case) -> Option<&str> {
    match &case.body {
        Body::Attention(c) => Some(&c.model),
        Body::AttendPcp(c) => Some(&c.model),
        Body::Sequence(c) => Some(&c.model),
        Body::Stack(c) => Some(&c.session.model),
        _ => None,
    }
}

/// What a case with caches opens its session with.
fn session(case: &Case) -> Option<&Configuration> {
    match &case.body {
        Body::Attention(c) => Some(&c.configuration),
        Body::AttendPcp(c) => Some(&c.configuration),
        Body::Sequence(c) => Some(&c.configuration),
        Body::Stack(c) => Some(c.configuration()),
        _ => None,
    }
}

fn merge(case: &Case) -> Option<&MergeCase> {
    match &case.body {
        Body::Merge(merge) => Some(merge),
        _ => None,
    }
}

fn exchange(case: &Case) -> Option<(CommBackend, LaneOrder)> {
    match &case.body {
        Body::Attention(_) | Body::Sequence(_) | Body::Stack(_) => {
            session(case).map(|c| (c.comm_backend, c.lane_order))
        }
        Body::Merge(c) if case.family == Family::MergePartials => Some((c.comm_backend, c.lane_order)),
        _ => None,
    }
}

/// What a number must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumberTest {
    /// `4`
    Is(u64),
    /// `!=4`
    Not(u64),
    /// `<4`
    Below(u64),
    /// `<=4`
    AtMost(u64),
    /// `>4`
    Above(u64),
    /// `>=4`
    AtLeast(u64),
    /// `2..=8`
    Between(u64, u64),
}

impl NumberTest {
    /// Whether the number is as it must be.
    pub fn holds(self, value: u64) -> bool {
        match self {
            Self::Is(n) => value == n,
            Self::Not(n) => value != n,
            Self::Below(n) => value < n,
            Self::AtMost(n) => value <= n,
            Self::Above(n) => value > n,
            Self::AtLeast(n) => value >= n,
            Self::Between(low, high) => (low..=high).contains(&value),
        }
    }
}

impl fmt::Display for NumberTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Is(n) => write!(f, "{n}"),
            Self::Not(n) => write!(f, "!={n}"),
            Self::Below(n) => write!(f, "<{n}"),
            Self::AtMost(n) => write!(f, "<={n}"),
            Self::Above(n) => write!(f, ">{n}"),
            Self::AtLeast(n) => write!(f, ">={n}"),
            Self::Between(low, high) => write!(f, "{low}..={high}"),
        }
    }
}

/// What a text must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextTest {
    /// `~part`
    Contains(String),
    /// `=whole`
    Is(String),
    /// `/glob/`: the whole text, `*` for any characters and `?` for one.
    Glob(String),
}

impl TextTest {
    /// Whether the text is as it must be.
    pub fn holds(&self, text: &str) -> bool {
        match self {
            Self::Contains(part) => text.contains(part.as_str()),
            Self::Is(whole) => text == whole,
            Self::Glob(pattern) => {
                glob_matches(&pattern.chars().collect::<Vec<_>>(), &text.chars().collect::<Vec<_>>())
            }
        }
    }
}

impl fmt::Display for TextTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Contains(text) => write!(f, "~{}", quoted(text)),
            Self::Is(text) => write!(f, "={}", quoted(text)),
            Self::Glob(text) => write!(f, "/{}/", quoted(text)),
        }
    }
}

/// The text itself where it can stand bare, else in quotes.
fn quoted(text: &str) -> String {
    let bare = |c: char| c.is_alphanumeric() || "._-+@=*?".contains(c);
    if !text.is_empty() && text.chars().all(bare) {
        return text.to_owned();
    }
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// One atom: an axis, and tests of which one must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Atom {
    /// `probe(cold | hot)`
    Choice(ChoiceAxis, Vec<&'static str>),
    /// `world(2 | >=8)`
    Number(NumberAxis, Vec<NumberTest>),
    /// `qrep(true)`
    Truth(TruthAxis, bool),
    /// `id(~part)`
    Text(TextAxis, Vec<TextTest>),
}

impl Atom {
    /// The axis.
    pub fn axis(&self) -> Axis {
        match self {
            Self::Choice(axis, _) => Axis::Choice(*axis),
            Self::Number(axis, _) => Axis::Number(*axis),
            Self::Truth(axis, _) => Axis::Truth(*axis),
            Self::Text(axis, _) => Axis::Text(*axis),
        }
    }

    /// Whether the atom holds; `None` for `prop(…)` while no property is in question. An axis that means nothing for the
    /// case does not hold.
    pub fn holds(&self, subject: &Subject<'_>) -> Option<bool> {
        Some(match self {
            Self::Choice(axis, names) => axis.of(subject.case).is_some_and(|value| names.contains(&value)),
            Self::Number(axis, tests) => {
                axis.of(subject.case).is_some_and(|value| tests.iter().any(|test| test.holds(value)))
            }
            Self::Truth(axis, wanted) => axis.of(subject.case) == Some(*wanted),
            Self::Text(axis, tests) => {
                let text = match axis {
                    TextAxis::Id => Some(subject.id),
                    TextAxis::Model => model(subject.case),
                    TextAxis::Prop => Some(subject.property?),
                };
                text.is_some_and(|text| tests.iter().any(|test| test.holds(text)))
            }
        })
    }
}

impl fmt::Display for Atom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values: Vec<String> = match self {
            Self::Choice(_, names) => names.iter().map(|name| (*name).to_owned()).collect(),
            Self::Number(_, tests) => tests.iter().map(NumberTest::to_string).collect(),
            Self::Truth(_, wanted) => vec![wanted.to_string()],
            Self::Text(_, tests) => tests.iter().map(TextTest::to_string).collect(),
        };
        write!(f, "{}({})", self.axis().name(), values.join(" | "))
    }
}
