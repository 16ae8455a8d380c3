//! What the oracle allows: the only place where the harness asks the references for values and bounds.

use shardcheck_formats::Contract;
use shardcheck_references::attention::plain::{Problem, Values};
use shardcheck_references::bound::{Certified, certify, interval};
use shardcheck_references::visibility::Visible;

use crate::judge::Allowed;
use crate::material::AttentionMaterial;

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
    /// Larger deviation that is allowed for output `index`; 0 where equality is asked.
    pub fn out_width(&self, index: usize) -> f64 {
        match self.out[index] {
            Allowed::Between { expected, low, high } => (high - expected).max(expected - low),
            _ => 0.0,
        }
    }
}

/// Allowed values of a certified output element.
pub(crate) fn allowed_out(out: f64, pre: f64, dtype: shardcheck_formats::Dtype) -> Allowed {
    let (low, high) = interval(out, pre, dtype);
    // rounding may carry the exact value itself across an end of the interval
    Allowed::Between { expected: out, low: low.min(out), high: high.max(out) }
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
            let problem = problem(material, request, &query);
            let certified =
                certify(&problem, &material.layout, &visible, contract).map_err(|error| error.to_string())?;
            expected.take(material, request, group, &certified, contract);
        }
    }
    Ok(expected.into_expected())
}

/// What may be seen of the state of the cached context alone: every row sees the whole context of its request.
///
/// # Errors
/// Why no bound can be derived.
pub fn context_state(material: &AttentionMaterial, contract: &Contract) -> Result<ExpectedState, String> {
    let _ = contract;
    let _ = material;
    Err("no bound is known for a chain of chunk merges".to_owned())
}

/// Visible set of each row of each request.
fn visible_rows(material: &AttentionMaterial) -> Vec<Vec<Visible>> {
    let mut rows = vec![Vec::new(); material.case.workload.requests.len()];
    for (row, place) in material.rows.iter().enumerate() {
        if let Some((request, _)) = place {
            rows[*request].push(Visible::Prefix(material.visible_tokens(row)));
        }
    }
    rows
}

/// Queries of a request's rows for the heads of one group, `[rows, Hg, Dk]`.
fn query_of(material: &AttentionMaterial, request: usize, group: usize) -> Vec<f32> {
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

fn problem<'a>(material: &'a AttentionMaterial, request: usize, query: &'a [f32]) -> Problem<'a> {
    let configuration = material.configuration();
    let attention = configuration.attention;
    let values = if attention.is_mla() {
        Values::KeyPrefix
    } else {
        Values::Separate(&material.held_values[request])
    };
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

/// Expected values of the whole batch while they are collected; rows that see nothing are filled from the start.
struct Blank {
    out: Vec<Allowed>,
    lse: Vec<Allowed>,
    partials: Vec<ExpectedPartial>,
}

impl Blank {
    fn of(material: &AttentionMaterial) -> Self {
        let states = material.rows.len() * material.heads();
        let dim = material.configuration().attention.value_dim();
        let partial = ExpectedPartial {
            lse: vec![Allowed::NegativeInfinity; states],
            latent: vec![Allowed::Undefined; states * dim],
            projected: None,
        };
        Self {
            out: vec![Allowed::Exactly(0.0); states * dim],
            lse: vec![Allowed::NegativeInfinity; states],
            partials: vec![partial; material.configuration().dcp],
        }
    }

    fn take(
        &mut self,
        material: &AttentionMaterial,
        request: usize,
        group: usize,
        certified: &Certified,
        contract: &Contract,
    ) {
        let dim = certified.v_dim;
        let u = f64::from(f32::EPSILON) / 2.0;
        let rows = (0..material.rows.len()).filter(|row| material.rows[*row].is_some_and(|(r, _)| r == request));
        for (index, row) in rows.enumerate() {
            for head in 0..certified.heads {
                let from = index * certified.heads + head;
                let to = row * material.heads() + group * certified.heads + head;
                if certified.lse[from] == f64::NEG_INFINITY {
                    continue;
                }
                self.lse[to] = Allowed::near(
                    certified.lse[from],
                    certified.practical_lse_bound[from].unwrap_or(certified.lse_bound[from])
                        + u * certified.lse[from].abs(),
                );
                for d in 0..dim {
                    self.out[to * dim + d] = allowed_out(
                        certified.out[from * dim + d],
                        certified.pre[from * dim + d],
                        contract.output,
                    );
                }
                for (partial, part) in self.partials.iter_mut().zip(&certified.partials) {
                    if part.lse[from] == f64::NEG_INFINITY {
                        continue;
                    }
                    let bound = part.practical_lse_bound[from].unwrap_or(part.lse_bound[from]);
                    partial.lse[to] = Allowed::near(part.lse[from], bound + u * part.lse[from].abs());
                    for d in 0..dim {
                        partial.latent[to * dim + d] =
                            Allowed::near(part.out[from * dim + d], part.pre[from * dim + d]);
                    }
                }
            }
        }
    }

    fn into_expected(self) -> Expected {
        Expected { out: self.out, lse: self.lse, partials: self.partials }
    }
}
