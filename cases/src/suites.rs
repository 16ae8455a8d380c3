//! Suites: named lists of cases, made from `suites/*.toml` and a seed.

mod acceptance;
mod experts;
mod half;
mod index_layers;
mod kda;
mod prefill;
mod selected;
mod sparse;

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use shardcheck_engine::{Configuration, RuleSetName};
use shardcheck_formats::{Counter, Dtype};

use crate::axes::{Axes, Batch, Budget, Exchange, Interleave, Length, Limits, Projection};
use crate::covering::covering;
use crate::stream::Stream;
use crate::{
    Body, Case, Family, MergeCase, MergePattern, Model, Placement, Probe, StateView, generate_sequence,
    rules, usual_patterns,
};

/// Most rounds of covering arrays that a part is filled from before its count is given up.
const MAX_ROUNDS: u64 = 64;
/// Case seeds are drawn below this, so that they stay short in ids.
const CASE_SEEDS: u64 = 10_000;

/// Names of the suites.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SuiteName {
    /// Every change: every family, probe and world size, pairs of all axes, small shapes.
    Gate,
    /// Every night: triples of all axes, longer contexts, more real shapes.
    Nightly,
    /// A few tiny cases for engines that take seconds a call.
    EngineSmoke,
    /// An engine on its device: real dimensions, contexts up to 2^20.
    EngineDevice,
    /// The configurations that the project's source documents report, at real head counts.
    Seeds,
    /// The ladder of a new engine: what it must pass, easiest first.
    MustPass,
}

impl SuiteName {
    /// All suites, in a stable order.
    pub const ALL: [Self; 6] =
        [Self::Gate, Self::Nightly, Self::EngineSmoke, Self::EngineDevice, Self::Seeds, Self::MustPass];

    /// Name as it stands on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate",
            Self::Nightly => "nightly",
            Self::EngineSmoke => "engine-smoke",
            Self::EngineDevice => "engine-device",
            Self::Seeds => "seeds",
            Self::MustPass => "mustpass",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Gate => include_str!("../suites/gate.toml"),
            Self::Nightly => include_str!("../suites/nightly.toml"),
            Self::EngineSmoke => include_str!("../suites/engine-smoke.toml"),
            Self::EngineDevice => include_str!("../suites/engine-device.toml"),
            Self::Seeds => include_str!("../suites/seeds.toml"),
            Self::MustPass => include_str!("../suites/mustpass.toml"),
        }
    }
}

impl fmt::Display for SuiteName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SuiteName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|suite| suite.name() == text).ok_or_else(|| {
            format!("unknown suite {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// The cases of a suite, by family in the order of bring-up and then by configuration, so that an engine that compiles for a
/// configuration meets equal ones in a row. Equal arguments give equal cases; no two cases have the same id.
///
/// # Panics
/// When a suite file that the crate ships is not well formed.
pub fn suite(name: SuiteName, seed: u64) -> Vec<Case> {
    let file: SuiteFile = toml::from_str(name.text())
        .unwrap_or_else(|error| panic!("suite file of {name} is not well formed: {error}"));
    let mut suite =
        Collector { seeds: Stream::CaseSeeds.counter(seed), known: HashSet::new(), cases: Vec::new() };
    for edge in &file.edge {
        edge.collect(&mut suite);
    }
    for part in &file.attention {
        part.collect(&file.axes, seed, &mut suite);
    }
    for part in &file.merge {
        part.collect(seed, &mut suite);
    }
    for part in file.sequence.iter().chain(&file.stack) {
        part.collect(&mut suite);
    }
    for part in &file.pcp {
        part.collect(seed, &mut suite);
    }
    for part in &file.route {
        part.collect(seed, &mut suite);
    }
    for part in &file.moe {
        part.collect(seed, &mut suite);
    }
    for part in &file.acceptance {
        part.collect(seed, &mut suite);
    }
    for part in &file.select_sparse {
        part.collect(seed, &mut suite);
    }
    for part in &file.attend_selected {
        part.collect(seed, &mut suite);
    }
    for part in &file.kda {
        part.collect(seed, &mut suite);
    }
    if let Some(part) = &file.generated {
        part.collect(seed, &mut suite);
    }
    for part in &file.index_layers {
        part.collect(seed, &mut suite);
    }
    // behind all others, whose cases keep the seeds that they had without these
    for part in &file.attend_pcp {
        part.collect(seed, &mut suite);
    }
    for part in &file.shared {
        part.collect(seed, &mut suite);
    }
    file.f16.collect(&file.axes, seed, &mut suite);
    for set in &file.rules {
        for rule in rules::rule_set(*set) {
            suite.cases.push(Case::rules(rule.clone()));
        }
    }
    let mut cases = suite.cases;
    cases.sort_by_cached_key(|case| (place_of(case.family), compile_key(case), case.id()));
    cases
}

fn place_of(family: Family) -> usize {
    Family::ALL.iter().position(|other| *other == family).expect("ALL has every family")
}

/// What an engine may compile anew for.
fn compile_key(case: &Case) -> Vec<String> {
    match &case.body {
        Body::Attention(body) => key_of(&body.model, &body.configuration),
        Body::Sequence(body) => key_of(&body.model, &body.configuration),
        Body::Stack(body) => key_of(&body.session.model, body.configuration()),
        Body::Merge(body) => {
            [body.world, body.heads_per_rank, body.dim].map(|size| format!("{size:08}")).to_vec()
        }
        Body::IndexLayers(body) => vec![body.sharing.rule.to_string()],
        Body::Kda(body) => {
            [body.tp, body.dcp, body.key_dim, body.value_dim].map(|size| format!("{size:08}")).to_vec()
        }
        Body::Acceptance(body) => vec![format!("{} {:08} {:08}", body.method, body.ranks, body.vocabulary)],
        Body::SelectSparse(body) => key_of("", &body.configuration()),
        Body::AttendPcp(body) => key_of(&body.model, &body.configuration),
        Body::SelectPcp(body) => vec![format!("{:08}", body.top_k)],
        Body::CompressPcp(body) => vec![format!("{:08}", body.ratio)],
        Body::Pcp(body) => vec![format!("{} {:08}", body.strategy, body.world)],
        Body::Route(body) => vec![format!("{:08} {:08}", body.experts, body.router.top_k)],
        Body::Moe(body) => [body.hidden, body.inner, body.experts].map(|size| format!("{size:08}")).to_vec(),
        Body::Rules(_) => Vec::new(),
    }
}

fn key_of(model: &str, c: &Configuration) -> Vec<String> {
    let sizes = [c.dcp, c.tp, c.heads_per_rank, c.interleave, c.block_size];
    let mut key = vec![model.to_owned()];
    key.extend(sizes.map(|size| format!("{size:08}")));
    key.push(format!("{} {} {} {:?} {:?}", c.dtype, c.kv_dtype, c.kv_scale, c.comm_backend, c.lane_order));
    key
}

/// Cases as they come, without repetition.
struct Collector {
    seeds: Counter,
    known: HashSet<String>,
    cases: Vec<Case>,
}

impl Collector {
    /// Adds a case under a seed of its own, unless there is one that differs in the seed alone.
    fn add(&mut self, mut case: Case) -> bool {
        case.seed = 0;
        if !self.known.insert(case.id()) {
            return false;
        }
        // nothing is drawn for the layout of a batch and for layers
        if !matches!(case.body, Body::Pcp(_) | Body::IndexLayers(_)) {
            case.seed = self.seeds.below(CASE_SEEDS);
        }
        if let Err(error) = case.check() {
            panic!("a suite has the case {}: {error}", case.id());
        }
        self.cases.push(case);
        true
    }

    /// Adds the whole first array, then cases of further ones until there are `count`.
    fn fill(&mut self, count: usize, mut array: impl FnMut(u64) -> Vec<Case>) {
        let mut added = 0;
        for round in 0..MAX_ROUNDS {
            for case in array(round) {
                if round > 0 && added >= count {
                    return;
                }
                added += usize::from(self.add(case));
            }
            if added >= count {
                return;
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SuiteFile {
    #[serde(default)]
    rules: Vec<RuleSetName>,
    #[serde(default)]
    axes: BTreeMap<String, AxesFile>,
    #[serde(default)]
    attention: Vec<AttentionPart>,
    #[serde(default)]
    merge: Vec<MergePart>,
    #[serde(default)]
    pcp: Vec<prefill::PcpPart>,
    #[serde(default)]
    attend_pcp: Vec<prefill::AttendPcpPart>,
    #[serde(default)]
    shared: Vec<prefill::SharedPart>,
    #[serde(default)]
    route: Vec<experts::RoutePart>,
    #[serde(default)]
    moe: Vec<experts::MoePart>,
    #[serde(default)]
    acceptance: Vec<acceptance::AcceptancePart>,
    #[serde(default)]
    select_sparse: Vec<sparse::SelectPart>,
    #[serde(default)]
    attend_selected: Vec<selected::SelectedPart>,
    #[serde(default)]
    index_layers: Vec<index_layers::IndexLayersPart>,
    #[serde(default)]
    kda: Vec<kda::KdaPart>,
    #[serde(default)]
    edge: Vec<Edge>,
    #[serde(default)]
    sequence: Vec<WrittenSequence>,
    #[serde(default)]
    stack: Vec<WrittenSequence>,
    generated: Option<GeneratedSequences>,
    #[serde(default)]
    f16: half::HalfParts,
}

/// A case by hand, such as a session of a sequence or of a stack: the id up to the seed, and why it is there.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenSequence {
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers of the file"))]
    why: String,
    case: String,
}

impl WrittenSequence {
    fn collect(&self, suite: &mut Collector) {
        let id = format!("{}/0", self.case);
        suite.add(id.parse().unwrap_or_else(|error| panic!("a suite has a session by hand: {error}")));
    }
}

/// Drawn sequences.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GeneratedSequences {
    count: usize,
    /// Runs of the engine in each.
    runs: usize,
}

impl GeneratedSequences {
    fn collect(&self, seed: u64, suite: &mut Collector) {
        let mut counter = Stream::Sequences.counter(seed);
        for _ in 0..self.count {
            suite.add(Case::sequence(generate_sequence(self.runs, &mut counter), 0));
        }
    }
}

/// A case by hand: the id up to the workload, the probes to try, and why it is there.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Edge {
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers of the file"))]
    why: String,
    case: String,
    probes: Vec<Probe>,
}

impl Edge {
    fn collect(&self, suite: &mut Collector) {
        for probe in &self.probes {
            let id = format!("{}/{probe}/0", self.case);
            let case = id.parse().unwrap_or_else(|error| panic!("a suite has a case by hand: {error}"));
            suite.add(case);
        }
    }
}

/// A covering array over the axes of an attention family.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AttentionPart {
    family: Family,
    axes: String,
    strength: usize,
    count: usize,
    #[serde(default)]
    only: AxesFile,
}

impl AttentionPart {
    fn axes(&self, known: &BTreeMap<String, AxesFile>) -> Axes {
        let base = known.get(&self.axes).unwrap_or_else(|| panic!("a suite has no axes {:?}", self.axes));
        self.only.clone().over(base.clone()).axes(self.family)
    }

    fn collect(&self, known: &BTreeMap<String, AxesFile>, seed: u64, suite: &mut Collector) {
        let axes = self.axes(known);
        suite.fill(self.count, |round| {
            let rows = covering(
                &axes.levels(),
                self.strength,
                &|row| axes.allow(row),
                seed.wrapping_add(round << 32),
            );
            rows.iter().map(|row| Case::attention(self.family, axes.case(row), 0)).collect()
        });
    }
}

macro_rules! axes_file {
    ($($field:ident: $type:ty,)+) => {
        /// Values of the axes as a suite file gives them; a part may replace some of them.
        #[derive(Deserialize, Clone, Default)]
        #[serde(deny_unknown_fields)]
        struct AxesFile {
            $($field: Option<$type>,)+
        }

        impl AxesFile {
            /// These values, and those of `base` where there are none.
            fn over(self, base: Self) -> Self {
                Self { $($field: self.$field.or(base.$field),)+ }
            }
        }
    };
}

axes_file! {
    models: Vec<String>,
    dcp: Vec<usize>,
    groups: Vec<usize>,
    heads: Vec<usize>,
    blocks: Vec<usize>,
    interleaves: Vec<Interleave>,
    lengths: Vec<Length>,
    batches: Vec<Batch>,
    rows: Vec<usize>,
    caches: Vec<String>,
    exchanges: Vec<Exchange>,
    replications: Vec<bool>,
    projections: Vec<Projection>,
    widths: Vec<Vec<usize>>,
    placements: Vec<String>,
    paddings: Vec<usize>,
    probes: Vec<Probe>,
    budgets: Vec<Budget>,
    limits: Limits,
}

impl AxesFile {
    fn axes(self, family: Family) -> Axes {
        fn given<T>(name: &str, value: Option<T>) -> T {
            value.unwrap_or_else(|| panic!("a suite gives no values to the axis {name}"))
        }
        let model =
            |name: &String| Model::find(name).unwrap_or_else(|| panic!("a suite names the model {name:?}"));
        let placement = |name: &String| {
            let found = Placement::ALL.into_iter().find(|placement| placement.name() == name);
            found.unwrap_or_else(|| panic!("a suite names the placement {name:?}"))
        };
        Axes {
            family,
            models: given("models", self.models).iter().map(model).collect(),
            dcp: given("dcp", self.dcp),
            groups: given("groups", self.groups),
            heads: given("heads", self.heads),
            blocks: given("blocks", self.blocks),
            interleaves: given("interleaves", self.interleaves),
            lengths: given("lengths", self.lengths),
            batches: given("batches", self.batches),
            rows: given("rows", self.rows),
            caches: given("caches", self.caches)
                .iter()
                .map(|cache| {
                    cache.parse().unwrap_or_else(|error| panic!("a suite names the cache {cache:?}: {error}"))
                })
                .collect(),
            exchanges: given("exchanges", self.exchanges),
            replications: given("replications", self.replications),
            projections: given("projections", self.projections),
            widths: given("widths", self.widths),
            placements: given("placements", self.placements).iter().map(placement).collect(),
            paddings: given("paddings", self.paddings),
            probes: given("probes", self.probes),
            budgets: given("budgets", self.budgets),
            limits: given("limits", self.limits),
        }
    }
}

/// A covering array over the axes of a merge family; its patterns are all that the family knows for any type of states, unless it says
/// otherwise.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MergePart {
    family: Family,
    strength: usize,
    count: usize,
    worlds: Vec<usize>,
    rows: Vec<usize>,
    heads: Vec<usize>,
    dims: Vec<usize>,
    dtypes: Vec<Dtype>,
    exchanges: Vec<Exchange>,
    views: Vec<StateView>,
    /// Patterns to keep to.
    patterns: Option<Vec<MergePattern>>,
}

impl MergePart {
    fn collect(&self, seed: u64, suite: &mut Collector) {
        let patterns = self.patterns.clone().unwrap_or_else(|| usual_patterns(self.family));
        let patterns = patterns.as_slice();
        let levels = [
            self.worlds.len(),
            patterns.len(),
            self.rows.len(),
            self.heads.len(),
            self.dims.len(),
            self.dtypes.len(),
            self.exchanges.len(),
            self.views.len(),
        ];
        // a single state that is broken or empty leaves nothing to merge
        let allow = |row: &[Option<usize>]| {
            let alone = row[0].is_some_and(|index| self.worlds[index] == 1) && self.family != Family::PackLse;
            let needs_two = |pattern| matches!(pattern, MergePattern::SomeEmpty | MergePattern::BrokenLse);
            !(alone && row[1].is_some_and(|index| needs_two(patterns[index])))
        };
        suite.fill(self.count, |round| {
            let rows = covering(&levels, self.strength, &allow, seed.wrapping_add(round << 32));
            rows.iter().map(|row| Case::merge(self.family, self.case(row, patterns), 0)).collect()
        });
    }

    fn case(&self, row: &[usize], patterns: &[MergePattern]) -> MergeCase {
        let (comm_backend, lane_order) = self.exchanges[row[6]].settings();
        MergeCase {
            world: self.worlds[row[0]],
            pattern: patterns[row[1]],
            rows: self.rows[row[2]],
            heads_per_rank: self.heads[row[3]],
            dim: self.dims[row[4]],
            dtype: self.dtypes[row[5]],
            comm_backend,
            lane_order,
            view: self.views[row[7]],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::covering::prove;

    /// Ids of a suite's cases without their seeds.
    fn seedless(name: SuiteName, seed: u64) -> HashSet<String> {
        let without_seed = |mut case: Case| {
            case.seed = 0;
            case.id()
        };
        suite(name, seed).into_iter().map(without_seed).collect()
    }

    fn prove_parts(name: SuiteName, seed: u64) -> usize {
        let file: SuiteFile = toml::from_str(name.text()).unwrap();
        let known = seedless(name, seed);
        let mut proven = 0;
        for part in &file.attention {
            let axes = part.axes(&file.axes);
            let allow = |row: &[Option<usize>]| axes.allow(row);
            let rows = covering(&axes.levels(), part.strength, &allow, seed);
            proven += prove(&axes.levels(), part.strength, &allow, &rows);
            for row in rows {
                let case = Case::attention(part.family, axes.case(&row), 0);
                assert!(known.contains(&case.id()), "{name} lacks {}", case.id());
            }
        }
        proven
    }

    #[test]
    fn every_possible_pair_of_axis_values_stands_in_the_gate() {
        assert!(prove_parts(SuiteName::Gate, 1) > 10_000);
        assert!(prove_parts(SuiteName::Gate, 2) > 10_000);
    }

    #[test]
    fn every_possible_triple_of_axis_values_stands_in_the_nightly_suite() {
        assert!(prove_parts(SuiteName::Nightly, 1) > 100_000);
    }

    #[test]
    fn every_possible_pair_of_merge_values_stands_in_the_gate() {
        let file: SuiteFile = toml::from_str(SuiteName::Gate.text()).unwrap();
        let cases = suite(SuiteName::Gate, 3);
        for part in &file.merge {
            let merges = || {
                cases.iter().filter(|case| case.family == part.family).map(|case| match &case.body {
                    Body::Merge(body) => body,
                    other => panic!("{other:?} in {}", part.family),
                })
            };
            for pattern in &part.patterns.clone().unwrap_or_else(|| usual_patterns(part.family)) {
                for view in &part.views {
                    let together = merges().any(|m| m.pattern == *pattern && m.view == *view);
                    assert!(together, "{} {} {}", part.family, pattern.name(), view.name());
                }
                for exchange in &part.exchanges {
                    let together = merges().any(|m| {
                        m.pattern == *pattern && (m.comm_backend, m.lane_order) == exchange.settings()
                    });
                    assert!(together, "{} {} {exchange}", part.family, pattern.name());
                }
            }
        }
    }

    #[test]
    fn suite_names_parse_back() {
        for name in SuiteName::ALL {
            assert_eq!(name.name().parse::<SuiteName>().unwrap(), name);
        }
        assert!("smoke".parse::<SuiteName>().unwrap_err().contains("engine-smoke"));
    }

    #[test]
    fn every_hand_picked_case_says_why_it_is_there() {
        for name in SuiteName::ALL {
            let file: SuiteFile = toml::from_str(name.text()).unwrap();
            assert!(file.edge.iter().all(|edge| edge.why.len() > 10), "{name}");
            let written = file.sequence.iter().chain(&file.stack).chain(&file.f16.written);
            assert!(written.into_iter().all(|own| own.why.len() > 10), "{name}");
            assert!(file.f16.edge.iter().all(|edge| edge.why.len() > 10), "{name}");
        }
    }
}
