//! What the oracle allows: the only place where the harness asks the references for values and bounds.

use shardcheck_cases::Family;
use shardcheck_formats::Contract;
use shardcheck_references::attention::plain::{Problem, Values};
use shardcheck_references::bound::{
    Certified, ProjectionOrder, UpProjection, certify, certify_chain, certify_projected, certify_split,
    interval,
};
use shardcheck_references::chunk::ChunkPlan;
use shardcheck_references::layout::Layout;
use shardcheck_references::split::Split;
use shardcheck_references::visibility::Visible;

use crate::judge::Allowed;
use crate::material::AttentionMaterial;

/// Half a unit in the last place of f32, relative: LSEs and partial states are stored in f32 after they were bounded.
const U32: f64 = 1.0 / (1u64 << 24) as f64;

/// What may be seen of a step, over all heads of all ranks.
#[derive(Debug, Clone)]
pub struct Expected {
    /// `[T, Hall, D]`.
    pub out: Vec<Allowed>,
    /// `[T, Hall]`.
    pub lse: Vec<Allowed>,
    /// By rank within its group.
    pub partials: Vec<ExpectedPartial>,
}

/// What a rank's partial may be, over all heads of all groups.
#[derive(Debug, Clone)]
pub struct ExpectedPartial {
    /// `[T, Hall]`, natural.
    pub lse: Vec<Allowed>,
    /// `[T, Hall, Dv]` as attention gives it.
    pub latent: Vec<Allowed>,
    /// `[T, Hall, V]` after the up-projection, where there is one.
    pub projected: Option<Vec<Allowed>>,
}

impl ExpectedPartial {
    /// The partial of that width.
    pub fn exchanged(&self, dim: usize) -> Option<&[Allowed]> {
        let states = self.lse.len().max(1);
        if self.latent.len() == states * dim {
            return Some(&self.latent);
        }
        self.projected.as_deref().filter(|projected| projected.len() == states * dim)
    }
}

/// What a state may be: `[T, Hall, D]` and `[T, Hall]`.
#[derive(Debug, Clone)]
pub struct ExpectedState {
    /// Outputs.
    pub out: Vec<Allowed>,
    /// Natural LSEs.
    pub lse: Vec<Allowed>,
}

impl Expected {
    /// Smallest and largest value that output `index` may have.
    pub fn out_interval(&self, index: usize) -> (f64, f64) {
        match self.out[index] {
            Allowed::Between { low, high, .. } | Allowed::OrNan { low, high, .. } => (low, high),
            Allowed::Exactly(value) => (value, value),
            Allowed::NegativeInfinity => (f64::NEG_INFINITY, f64::NEG_INFINITY),
            Allowed::Undefined => (f64::NEG_INFINITY, f64::INFINITY),
        }
    }
}

/// Allowed values of a certified output element.
pub(crate) fn allowed_out(out: f64, pre: f64, dtype: shardcheck_formats::Dtype) -> Allowed {
    let (low, high) = interval(out, pre, dtype);
    Allowed::Between { expected: out, low, high }
}

/// What may be seen of the step of an attention case.
///
/// # Errors
/// Why no bound can be derived.
pub fn attention(material: &AttentionMaterial, contract: &Contract) -> Result<Expected, String> {
    let mut expected = Blank::of(material);
    for (request, visible) in visible_rows(material).into_iter().enumerate() {
        if visible.is_empty() {
            continue;
        }
        for group in 0..material.ranks() / material.configuration().dcp {
            let query = query_of(material, request, group);
            let sinks = material.sinks(group);
            let problem = Problem { sink: sinks.as_deref(), ..problem(material, request, &query) };
            let place = Place { material, request, group };
            if material.family.brings_new_keys() {
                let chunks = chunk_tokens(material, request, true);
                let certified = certify_chain(&problem, &chunks, &visible, contract, false)
                    .map_err(|error| error.to_string())?;
                expected.take_output(place, &certified, contract);
                if material.family == Family::AttendPcp {
                    // rows that are shared out may attend in one pass as well, or merge what they have for a context
                    let one_pass = Layout::new(1, 1, 1).map_err(|error| error.to_string())?;
                    let certified = certify(&problem, &one_pass, &visible, contract)
                        .map_err(|error| error.to_string())?;
                    expected.widen_output(place, &certified, contract);
                }
            } else if let Some(weights) = material.up_projection(group) {
                let v_dim = material.configuration().attention.v_head_dim();
                let order = if material.configuration().project_before_merge {
                    ProjectionOrder::BeforeMerge
                } else {
                    ProjectionOrder::AfterMerge
                };
                let projection = UpProjection { weights, v_dim };
                let split = split(material, request);
                let both = certify_projected(&problem, split, &visible, contract, &projection, order)
                    .map_err(|error| error.to_string())?;
                expected.take_output(place, &both.projected, contract);
                expected.take_partials(place, &both.latent, false);
                expected.take_partials(place, &both.projected, true);
            } else {
                let certified = certify_split(&problem, split(material, request), &visible, contract)
                    .map_err(|error| error.to_string())?;
                expected.take_output(place, &certified, contract);
                expected.take_partials(place, &certified, false);
            }
        }
    }
    Ok(expected.into_expected())
}

/// What may be seen of the state of the cached context alone: every row sees the whole context of its request.
///
/// # Errors
/// Why no bound can be derived.
pub fn context_state(material: &AttentionMaterial, contract: &Contract) -> Result<ExpectedState, String> {
    let states = material.rows.len() * material.heads();
    let dim = material.configuration().attention.value_dim();
    let mut expected = ExpectedState {
        out: vec![Allowed::Undefined; states * dim],
        lse: vec![Allowed::NegativeInfinity; states],
    };
    for (request, spec) in material.case.workload.requests.iter().enumerate() {
        if spec.context_tokens == 0 || spec.query_tokens == 0 {
            continue;
        }
        let visible = vec![Visible::Prefix(spec.context_tokens); spec.query_tokens];
        for group in 0..material.ranks() / material.configuration().dcp {
            let query = query_of(material, request, group);
            let problem = problem(material, request, &query);
            let chunks = chunk_tokens(material, request, false);
            let certified = certify_chain(&problem, &chunks, &visible, contract, false)
                .map_err(|error| error.to_string())?;
            let place = Place { material, request, group };
            for (from, to) in place.states(&certified) {
                expected.lse[to] = allowed_lse(&certified.lse, &certified.lse_bound, from);
                for d in 0..dim {
                    let out = certified.out[from * dim + d];
                    expected.out[to * dim + d] =
                        Allowed::near(out, certified.pre[from * dim + d] + U32 * out.abs());
                }
            }
        }
    }
    Ok(expected)
}

/// Partial results that a step merges for a request.
fn split(material: &AttentionMaterial, request: usize) -> Split<'_> {
    let layout = &material.layout;
    match material.beside_from(request) {
        Some(from) => Split::RanksBeside { layout, from },
        None => Split::Ranks(layout),
    }
}

/// Tokens of each chunk of a request's context, and of the new rows as the last part where they are merged.
fn chunk_tokens(material: &AttentionMaterial, request: usize, with_new: bool) -> Vec<usize> {
    let cached: Vec<usize> = material.case.workload.requests.iter().map(|r| r.context_tokens).collect();
    let plan = ChunkPlan::block_padded(&material.layout, &cached, material.case.workload.chunk_budget_tokens);
    let mut tokens: Vec<usize> = plan.chunks.iter().map(|chunk| chunk.tokens(request)).collect();
    if with_new {
        tokens.push(material.case.workload.requests[request].query_tokens);
    }
    tokens
}

fn allowed_lse(lse: &[f64], bound: &[f64], index: usize) -> Allowed {
    Allowed::near(lse[index], bound[index] + U32 * lse[index].abs())
}

/// Visible set of each row of each request.
pub(crate) fn visible_rows(material: &AttentionMaterial) -> Vec<Vec<Visible>> {
    let mut rows = vec![Vec::new(); material.case.workload.requests.len()];
    for (row, place) in material.rows.iter().enumerate() {
        if let Some((request, _)) = place {
            rows[*request].push(material.visible(row));
        }
    }
    rows
}

/// Queries of a request's rows for the heads of one group, `[rows, Hg, Dk]`.
pub(crate) fn query_of(material: &AttentionMaterial, request: usize, group: usize) -> Vec<f32> {
    let gathered = material.configuration().gathered_heads();
    let mut query = Vec::new();
    for (row, place) in material.rows.iter().enumerate() {
        if place.is_some_and(|(index, _)| index == request) {
            for head in group * gathered..(group + 1) * gathered {
                query.extend_from_slice(material.query(row, head));
            }
        }
    }
    query
}

/// The problem of one request for the heads of one group, whose queries are `query`.
pub(crate) fn problem<'a>(material: &'a AttentionMaterial, request: usize, query: &'a [f32]) -> Problem<'a> {
    let configuration = material.configuration();
    let attention = configuration.attention;
    let values =
        if attention.is_mla() { Values::KeyPrefix } else { Values::Separate(&material.held_values[request]) };
    Problem::new(
        configuration.gathered_heads(),
        attention.kv_heads(),
        attention.qk_dim(),
        attention.value_dim(),
        f64::from(configuration.softmax_scale),
        query,
        &material.held_keys[request],
        values,
    )
}

/// Where the results of one problem belong: the rows of a request, the heads of a group.
#[derive(Clone, Copy)]
struct Place<'a> {
    material: &'a AttentionMaterial,
    request: usize,
    group: usize,
}

impl Place<'_> {
    /// `(state of the problem, state of the batch)` of every row and head that sees something.
    fn states(self, certified: &Certified) -> Vec<(usize, usize)> {
        let material = self.material;
        let rows = (0..material.rows.len())
            .filter(|row| material.rows[*row].is_some_and(|(request, _)| request == self.request));
        let mut states = Vec::new();
        for (index, row) in rows.enumerate() {
            for head in 0..certified.heads {
                let from = index * certified.heads + head;
                if certified.lse[from] != f64::NEG_INFINITY {
                    states.push((from, row * material.heads() + self.group * certified.heads + head));
                }
            }
        }
        states
    }
}

/// Expected values of the whole batch while they are collected; rows that see nothing are filled from the start.
struct Blank {
    out: Vec<Allowed>,
    lse: Vec<Allowed>,
    partials: Vec<ExpectedPartial>,
}

impl Blank {
    fn of(material: &AttentionMaterial) -> Self {
        let states = material.rows.len() * material.heads();
        let attention = material.configuration().attention;
        let before = material.is_projected() && material.configuration().project_before_merge;
        let projected = before.then(|| vec![Allowed::Undefined; states * attention.v_head_dim()]);
        let partial = ExpectedPartial {
            lse: vec![Allowed::NegativeInfinity; states],
            latent: vec![Allowed::Undefined; states * attention.value_dim()],
            projected,
        };
        let partials = if material.family.brings_new_keys() { 0 } else { material.configuration().dcp };
        let dim = if material.is_projected() { attention.v_head_dim() } else { attention.value_dim() };
        Self {
            out: vec![Allowed::Exactly(0.0); states * dim],
            lse: vec![Allowed::NegativeInfinity; states],
            partials: vec![partial; partials],
        }
    }

    fn take_output(&mut self, place: Place<'_>, certified: &Certified, contract: &Contract) {
        let dim = certified.v_dim;
        for (from, to) in place.states(certified) {
            // the practical bound is tighter where its gate holds; it is calibrated, the other one is proved
            let bound = certified.practical_lse_bound[from].unwrap_or(certified.lse_bound[from]);
            self.lse[to] = allowed_lse(&certified.lse[from..=from], &[bound], 0);
            for d in 0..dim {
                let (out, pre) = (certified.out[from * dim + d], certified.pre[from * dim + d]);
                self.out[to * dim + d] = allowed_out(out, pre, contract.output);
            }
        }
    }

    /// Allows what another way of computing may give as well.
    fn widen_output(&mut self, place: Place<'_>, certified: &Certified, contract: &Contract) {
        let dim = certified.v_dim;
        for (from, to) in place.states(certified) {
            let bound = certified.practical_lse_bound[from].unwrap_or(certified.lse_bound[from]);
            self.lse[to] = self.lse[to].or(allowed_lse(&certified.lse[from..=from], &[bound], 0));
            for d in 0..dim {
                let (out, pre) = (certified.out[from * dim + d], certified.pre[from * dim + d]);
                self.out[to * dim + d] = self.out[to * dim + d].or(allowed_out(out, pre, contract.output));
            }
        }
    }

    fn take_partials(&mut self, place: Place<'_>, certified: &Certified, projected: bool) {
        let dim = certified.v_dim;
        for (from, to) in place.states(certified) {
            for (partial, part) in self.partials.iter_mut().zip(&certified.partials) {
                if part.lse[from] == f64::NEG_INFINITY {
                    continue;
                }
                let target = match &mut partial.projected {
                    Some(target) if projected => target,
                    None if projected => continue,
                    _ => {
                        let bound = part.practical_lse_bound[from].unwrap_or(part.lse_bound[from]);
                        partial.lse[to] = allowed_lse(&part.lse[from..=from], &[bound], 0);
                        &mut partial.latent
                    }
                };
                for d in 0..dim {
                    target[to * dim + d] = Allowed::near(part.out[from * dim + d], part.pre[from * dim + d]);
                }
            }
        }
    }

    fn into_expected(self) -> Expected {
        Expected { out: self.out, lse: self.lse, partials: self.partials }
    }
}
