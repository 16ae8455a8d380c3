//! A layer of experts over ranks: threads that gather tokens, run their part of the experts, and bring the sums back.
//!
//! Merge 0 and 1 and redundant decodes: ATOM `pcp_moe`; flat ranks `dp·pcp·tp + pcp·tp + tp`: vLLM `FusedMoEParallelConfig`; pad and
//! slice: vllm-ascend `PrepareAndFinalizeWithMC2`. A part is stored in bf16 before it travels, and sums are of bf16, as in a collective.

use std::ops::Range;

use shardcheck_engine::{
    Activation, EngineError, ExpertSharding, MoeExchange, MoePlan, Reply, Router, SharedExpert, Tensor,
    Tensors,
};
use shardcheck_formats::{Dtype, round_bf16};

use crate::communicator::{Link, Ranks, Stop, run_ranks};
use crate::router::{Routed, RouterPolicies, Routing, token_ids};

/// Most ranks of a plan.
const MAX_RANKS: usize = 4096;

/// Where a rank stands in its plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Data-parallel group.
    pub dp: usize,
    /// Rank of prefill context parallelism in it.
    pub pcp: usize,
    /// Tensor-parallel rank in that.
    pub tp: usize,
}

impl Place {
    /// Place of a rank.
    pub fn of(rank: usize, plan: &MoePlan) -> Self {
        Self { dp: rank / (plan.pcp * plan.tp), pcp: rank / plan.tp % plan.pcp, tp: rank % plan.tp }
    }

    /// Rank at this place.
    pub fn rank(self, plan: &MoePlan) -> usize {
        (self.dp * plan.pcp + self.pcp) * plan.tp + self.tp
    }

    /// Ranks of its tensor-parallel group, itself among them.
    fn tensor_parallel_ranks(self, plan: &MoePlan) -> Vec<usize> {
        (0..plan.tp).map(|tp| Self { tp, ..self }.rank(plan)).collect()
    }
}

/// What a layer of experts decides.
#[derive(Clone, Copy, PartialEq)]
pub struct MoePolicies {
    /// The router.
    pub router: RouterPolicies,
    /// Number of a rank among those that share the experts out.
    pub expert_rank: fn(Place, &MoePlan) -> usize,
    /// Part `index` of `parts` of so many experts or inner elements.
    pub part: fn(usize, usize, usize) -> Range<usize>,
    /// What the part of a shared expert is multiplied by.
    pub shared_scale: fn(&MoePlan) -> f32,
    /// Rows that a rank enters the exchange with: `(tokens of each group, its group, plan)`.
    pub slice_rows: fn(&[usize], usize, &MoePlan) -> usize,
    /// Whether rows of padding count as tokens.
    pub counts_padding: bool,
    /// Whether rows are gathered and scattered at all.
    pub gathers: fn(&MoePlan) -> bool,
    /// Token ids of gathered rows: `(those of each rank, own place among them)`.
    pub gathered_ids: fn(&[Vec<i64>], usize) -> Vec<i64>,
    /// The order in which parts are summed: `(own place, parts)`.
    pub order: fn(usize, usize) -> Vec<usize>,
    /// Whether parts are summed over tensor parallelism.
    pub sums_tp: bool,
    /// Rows of the sum that a rank gets back: `(its place among those that were gathered, how many those are, rows of each, own rows)`.
    pub scattered: fn(usize, usize, usize, usize) -> Vec<usize>,
    /// Members that the rows of a rank are summed over: `(all, own, plan)`.
    pub summed: fn(Vec<usize>, usize, &MoePlan) -> Vec<usize>,
    /// Rows of a slice: `(rank, ranks, rows of each)`.
    pub sliced: fn(usize, usize, usize) -> Vec<usize>,
    /// Rows of logits that go with them.
    pub sliced_logits: fn(usize, usize, usize) -> Vec<usize>,
    /// First of the gathered rows that is kept: `(rows, tokens)`.
    pub cut: fn(usize, usize) -> usize,
    /// Order in which results of sent rows are taken back: `(place among those sent to a rank, how many)`.
    pub returned: fn(usize, usize) -> usize,
    /// Expert whose weights a rank takes for an expert: `(expert, experts of the rank)`.
    pub weights_of: fn(usize, &Range<usize>) -> usize,
    /// How a gate and an up-projection go together.
    pub gating: fn(Activation) -> Gating,
}

/// What an inner element is: `(gate, up)`.
pub type Gating = fn(f32, f32) -> f32;

/// How gate and up-projection of a gated activation go together.
pub fn gating(activation: Activation) -> Gating {
    match activation {
        Activation::SituGated => |gate, up| situ(gate) * (25.0 * (up / 25.0).tanh()),
        Activation::SiluGated | Activation::Linear => |gate, up| gate / (1.0 + (-gate).exp()) * up,
    }
}

/// The gate's part of SiTU.
pub fn situ(gate: f32) -> f32 {
    4.0 * (gate / 4.0).tanh() / (1.0 + (-gate).exp())
}

impl MoePolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        router: RouterPolicies::HEALTHY,
        expert_rank: |place, plan| {
            if plan.exchange == MoeExchange::Local { place.tp } else { place.rank(plan) }
        },
        part: |index, parts, count| index * count / parts..(index + 1) * count / parts,
        shared_scale: |plan| match (plan.shared, plan.exchange) {
            (SharedExpert::Replicated, MoeExchange::Gathered | MoeExchange::Redundant) => {
                1.0 / (plan.dp * plan.pcp) as f32
            }
            _ => 1.0,
        },
        slice_rows,
        counts_padding: false,
        gathers: |plan| plan.exchange != MoeExchange::Local,
        gathered_ids: |ids, _| ids.concat(),
        order: |_, parts| (0..parts).collect(),
        sums_tp: true,
        scattered: |place, _, each, own| (place * each..place * each + own).collect(),
        summed: |all, _, _| all,
        sliced: |rank, _, each| (rank * each..(rank + 1) * each).collect(),
        sliced_logits: |rank, _, each| (rank * each..(rank + 1) * each).collect(),
        cut: |_, _| 0,
        returned: |place, _| place,
        weights_of: |expert, _| expert,
        gating,
    };
}

/// As many rows as the fullest rank that takes part in the exchange has.
pub fn slice_rows(tokens: &[usize], group: usize, plan: &MoePlan) -> usize {
    let most = tokens.iter().copied().max().unwrap_or(0);
    match plan.exchange {
        MoeExchange::Local => tokens[group].div_ceil(plan.pcp),
        MoeExchange::Gathered => most.div_ceil(plan.pcp),
        MoeExchange::Redundant => most,
        MoeExchange::Sliced => most.div_ceil(plan.tp),
    }
}

/// Rows of tokens with their logits and ids; padding is zeros.
#[derive(Clone, Default)]
struct Rows {
    hidden: Vec<f32>,
    logits: Vec<f32>,
    ids: Vec<i64>,
    real: Vec<bool>,
}

/// Weights of one MLP.
pub(crate) struct Mlp {
    /// `[inner, hidden]`; without it the MLP is linear.
    pub gate: Option<Vec<f32>>,
    /// `[inner, hidden]`.
    pub up: Vec<f32>,
    /// `[hidden, inner]`.
    pub down: Vec<f32>,
    /// Inner width.
    pub inner: usize,
    /// How gate and up-projection go together.
    pub gating: Gating,
}

/// What all ranks of a layer have in common.
struct Layer<'a> {
    plan: MoePlan,
    routing: Routing<'a>,
    policies: &'a MoePolicies,
    hidden: usize,
    tokens: Vec<usize>,
    all: Rows,
    experts: Vec<Mlp>,
    shared: Option<Mlp>,
}

/// What one rank ends with.
struct Outcome {
    out: Vec<f32>,
    routed: Vec<Routed>,
    expert_tokens: Vec<i32>,
    slice_rows: usize,
}

/// A row on its way to an expert.
#[derive(Clone)]
struct Parcel {
    row: usize,
    place: usize,
    expert: usize,
    is_real: bool,
    hidden: Vec<f32>,
}

/// Runs a layer of experts.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit; what ranks ran into.
pub fn run(
    inputs: &Tensors,
    (router, plan): (Router, MoePlan),
    timeout: std::time::Duration,
    policies: &MoePolicies,
) -> Result<Reply, EngineError> {
    let layer = Layer::read(inputs, router, plan, policies)?;
    let ranks = Ranks { count: plan.ranks(), world: plan.ranks(), timeout };
    let run = run_ranks(ranks, |link| {
        let place = Place::of(link.rank, &plan);
        if plan.exchange == MoeExchange::Sliced { layer.slice(link, place) } else { layer.merge(link, place) }
    })?;
    let most = run.results.iter().map(|outcome| outcome.routed.len()).max().unwrap_or(0);
    let (mut out, mut ids, mut weights, mut counts, mut slices) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for outcome in &run.results {
        out.extend(&outcome.out);
        ids.extend(outcome.routed.iter().flat_map(|r| r.experts.iter().map(|expert| *expert as i32)));
        weights.extend(outcome.routed.iter().flat_map(|r| r.weights.iter().copied()));
        let missing = most - outcome.routed.len();
        out.resize(out.len() + missing * layer.hidden, 0.0);
        ids.resize(ids.len() + missing * router.top_k, 0);
        weights.resize(weights.len() + missing * router.top_k, 0.0);
        counts.extend(&outcome.expert_tokens);
        slices.push(outcome.slice_rows as i32);
    }
    let count = run.results.len();
    let outputs = Tensors::new()
        .with("out", Tensor::from_f32(Dtype::Bf16, &[count, most, layer.hidden], &out))
        .with("expert_tokens", Tensor::from_i32(&[count, layer.routing.experts()], &counts))
        .with("slice_rows", Tensor::from_i32(&[count], &slices))
        .with("topk_ids", Tensor::from_i32(&[count, most, router.top_k], &ids))
        .with("topk_weights", Tensor::from_f32(Dtype::F32, &[count, most, router.top_k], &weights));
    Ok(Reply { outputs, collectives: run.collectives, ..Reply::default() })
}

impl<'a> Layer<'a> {
    fn read(
        inputs: &Tensors,
        router: Router,
        plan: MoePlan,
        policies: &'a MoePolicies,
    ) -> Result<Self, EngineError> {
        let crash = |text: String| EngineError::Crash { text };
        let product = plan.dp.checked_mul(plan.pcp).and_then(|ranks| ranks.checked_mul(plan.tp));
        if product.is_none_or(|ranks| ranks == 0 || ranks > MAX_RANKS) {
            return Err(crash(format!("{plan:?} has no ranks, or too many")));
        }
        let counts = inputs.get("dp_tokens")?.expect("dp_tokens", Dtype::I32, &[plan.dp])?.to_i64();
        let tokens = counts.into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>();
        let tokens = tokens.map_err(|_| crash("a group has fewer than no tokens".to_owned()))?;
        let routing = Routing::read(inputs, router, &policies.router)?;
        let (total, experts) = (tokens.iter().sum(), routing.experts());
        let hidden = inputs.get("hidden")?.shape().last().copied().unwrap_or(0);
        let floats = |name: &str, dtype: Dtype, shape: &[usize]| -> Result<Vec<f32>, EngineError> {
            Ok(inputs.get(name)?.expect(name, dtype, shape)?.to_f32())
        };
        let all = Rows {
            hidden: floats("hidden", Dtype::Bf16, &[total, hidden])?,
            logits: floats("logits", Dtype::F32, &[total, experts])?,
            ids: token_ids(inputs, &router, total)?,
            real: vec![true; total],
        };
        let width = |name: &str| inputs.get(name).map(|tensor| tensor.shape().last().copied().unwrap_or(0));
        let read = |names: [&str; 3], count: usize, inner: usize| -> Result<Vec<Mlp>, EngineError> {
            let single = count == 0;
            let shape = |a: usize, b: usize| if single { vec![a, b] } else { vec![count, a, b] };
            let gate = match plan.activation.is_gated() {
                true => Some(floats(names[0], Dtype::Bf16, &shape(inner, hidden))?),
                false => None,
            };
            let gating = (policies.gating)(plan.activation);
            let up = floats(names[1], Dtype::Bf16, &shape(inner, hidden))?;
            let down = floats(names[2], Dtype::Bf16, &shape(hidden, inner))?;
            let size = inner * hidden;
            let own = |matrix: &Vec<f32>, index: usize| matrix[index * size..(index + 1) * size].to_vec();
            Ok((0..count.max(1))
                .map(|index| Mlp {
                    gate: gate.as_ref().map(|gate| own(gate, index)),
                    up: own(&up, index),
                    down: own(&down, index),
                    inner,
                    gating,
                })
                .collect())
        };
        let mlps = read(["w_gate", "w_up", "w_down"], experts, width("w_down")?)?;
        let shared = match plan.shared {
            SharedExpert::None => None,
            _ => read(["shared_gate", "shared_up", "shared_down"], 0, width("shared_down")?)?.pop(),
        };
        Ok(Self { plan, routing, policies, hidden, tokens, all, experts: mlps, shared })
    }

    /// Rows of a rank: all of its group's, or every pcp-th.
    fn own_rows(&self, place: Place) -> Vec<usize> {
        let first: usize = self.tokens[..place.dp].iter().sum();
        let rows = 0..self.tokens[place.dp];
        match self.plan.exchange {
            MoeExchange::Local | MoeExchange::Gathered => {
                rows.skip(place.pcp).step_by(self.plan.pcp).map(|row| first + row).collect()
            }
            MoeExchange::Redundant | MoeExchange::Sliced => rows.map(|row| first + row).collect(),
        }
    }

    /// The given rows of others, and padding for what is not there.
    fn take(&self, from: &Rows, hidden: &[usize], logits: &[usize]) -> Rows {
        let mut rows = Rows::default();
        let (width, experts) = (self.hidden, self.routing.experts());
        let copy = |from: &[f32], row: usize, width: usize, into: &mut Vec<f32>| match from
            .get(row * width..(row + 1) * width)
        {
            Some(values) => into.extend(values),
            None => into.resize(into.len() + width, 0.0),
        };
        for row in hidden {
            copy(&from.hidden, *row, width, &mut rows.hidden);
            rows.real.push(from.real.get(*row).copied().unwrap_or(false));
            if !self.all.ids.is_empty() {
                rows.ids.push(from.ids.get(*row).copied().unwrap_or(0));
            }
        }
        logits.iter().for_each(|row| copy(&from.logits, *row, experts, &mut rows.logits));
        rows
    }

    /// Own rows and padding up to `count`; those beyond it are lost.
    fn padded(&self, own: &[usize], count: usize) -> Rows {
        let behind_all = self.all.real.len();
        let rows: Vec<usize> =
            (0..count).map(|place| own.get(place).copied().unwrap_or(behind_all)).collect();
        self.take(&self.all, &rows, &rows)
    }

    fn counts(&self, rows: &Rows, row: usize) -> i32 {
        i32::from(rows.real[row] || self.policies.counts_padding)
    }

    /// Merge 0, merge 1, and decodes that every rank of prefill context parallelism has.
    fn merge(&self, link: &Link<'_>, place: Place) -> Result<Outcome, Stop> {
        let (plan, policies) = (&self.plan, self.policies);
        let own = self.own_rows(place);
        let each = (policies.slice_rows)(&self.tokens, place.dp, plan);
        let local = self.padded(&own, each);
        // who has other rows: all of dp × pcp, or of dp where those of pcp are the same
        let sources: Vec<usize> = if (policies.gathers)(plan) {
            let columns =
                if plan.exchange == MoeExchange::Redundant { place.pcp..place.pcp + 1 } else { 0..plan.pcp };
            let of = |dp: usize| columns.clone().map(move |pcp| Place { dp, pcp, tp: place.tp });
            (0..plan.dp).flat_map(of).map(|other| other.rank(plan)).collect()
        } else {
            vec![link.rank]
        };
        let at = sources.iter().position(|source| *source == link.rank).unwrap_or(0);
        let gathered = self.gather(link, local, &sources, at)?;
        let routed = self.routing.route(&gathered.logits, &gathered.ids);
        let mut expert_tokens = vec![0; self.routing.experts()];
        let mut sum = self.partial(place, &gathered, &routed, &mut expert_tokens);
        if plan.expert_ranks() > 1 {
            sum.iter_mut().for_each(|value| *value = round_bf16(*value));
        }
        if plan.tp > 1 && policies.sums_tp {
            sum = link.sum_in_bf16("sum_tp", sum, &place.tensor_parallel_ranks(plan), policies.order)?;
        }
        if plan.exchange != MoeExchange::Local && (policies.gathers)(plan) {
            let all = (0..plan.dp * plan.pcp).map(|index| index * plan.tp + place.tp).collect();
            let members = (policies.summed)(all, link.rank, plan);
            sum = link.sum_in_bf16("reduce_scatter", sum, &members, policies.order)?;
        }
        let rows = (policies.scattered)(at, sources.len(), each, own.len());
        let mut outcome = Outcome { out: Vec::new(), routed: Vec::new(), expert_tokens, slice_rows: each };
        for row in rows {
            // a row that is not there comes out as zeros
            match sum.get(row * self.hidden..(row + 1) * self.hidden) {
                Some(values) => outcome.out.extend(values),
                None => outcome.out.resize(outcome.out.len() + self.hidden, 0.0),
            }
            let nothing = || Routed {
                experts: vec![0; self.routing.top_k()],
                weights: vec![0.0; self.routing.top_k()],
            };
            outcome.routed.push(routed.get(row).cloned().unwrap_or_else(nothing));
        }
        Ok(outcome)
    }

    fn gather(&self, link: &Link<'_>, local: Rows, sources: &[usize], at: usize) -> Result<Rows, Stop> {
        if sources.len() == 1 {
            return Ok(local);
        }
        let received = link.exchange("gather_rows", local)?;
        let parts: Vec<&Rows> = sources.iter().map(|source| &*received[*source]).collect();
        let ids: Vec<Vec<i64>> = parts.iter().map(|part| part.ids.clone()).collect();
        let flat = |of: fn(&Rows) -> &[f32]| parts.iter().flat_map(|part| of(part)).copied().collect();
        Ok(Rows {
            hidden: flat(|rows| &rows.hidden),
            logits: flat(|rows| &rows.logits),
            ids: (self.policies.gathered_ids)(&ids, at),
            real: parts.iter().flat_map(|part| part.real.iter().copied()).collect(),
        })
    }

    /// The rank's part of the outputs of all rows.
    fn partial(&self, place: Place, rows: &Rows, routed: &[Routed], expert_tokens: &mut [i32]) -> Vec<f32> {
        let (plan, policies) = (&self.plan, self.policies);
        let (ranks, count) = (plan.expert_ranks(), self.routing.experts());
        let own = (policies.expert_rank)(place, plan) % ranks;
        let experts = match plan.sharding {
            ExpertSharding::Whole => (policies.part)(own, ranks, count),
            ExpertSharding::Split => 0..count,
        };
        let mut sums = vec![0.0; routed.len() * self.hidden];
        for (row, routed) in routed.iter().enumerate() {
            let x = &rows.hidden[row * self.hidden..(row + 1) * self.hidden];
            let sum = &mut sums[row * self.hidden..(row + 1) * self.hidden];
            for (expert, weight) in routed.experts.iter().zip(&routed.weights) {
                if !experts.contains(expert) {
                    continue;
                }
                expert_tokens[*expert] += self.counts(rows, row);
                let mlp = &self.experts[(policies.weights_of)(*expert, &experts).min(count - 1)];
                let inner = match plan.sharding {
                    ExpertSharding::Whole => 0..mlp.inner,
                    ExpertSharding::Split => (policies.part)(own, ranks, mlp.inner),
                };
                mlp.add(x, inner, *weight, sum);
            }
            if let Some(shared) = &self.shared {
                let inner = match plan.shared {
                    SharedExpert::Sharded => (policies.part)(own, ranks, shared.inner),
                    _ => (policies.part)(place.tp, plan.tp, shared.inner),
                };
                shared.add(x, inner, (policies.shared_scale)(plan), sum);
            }
        }
        sums
    }

    /// Pads, slices over tensor parallelism, sends rows to their experts and back, gathers, cuts.
    fn slice(&self, link: &Link<'_>, place: Place) -> Result<Outcome, Stop> {
        let (plan, policies) = (&self.plan, self.policies);
        let own = self.own_rows(place);
        let each = (policies.slice_rows)(&self.tokens, place.dp, plan);
        let group = self.padded(&own, each * plan.tp);
        let rows = self.take(
            &group,
            &(policies.sliced)(place.tp, plan.tp, each),
            &(policies.sliced_logits)(place.tp, plan.tp, each),
        );
        let routed = self.routing.route(&rows.logits, &rows.ids);
        let mut expert_tokens = vec![0; self.routing.experts()];
        let mut out = self.dispatch(link, &rows, &routed, &mut expert_tokens)?;
        for (row, sum) in out.chunks_exact_mut(self.hidden).enumerate() {
            let x = &rows.hidden[row * self.hidden..(row + 1) * self.hidden];
            if let Some(shared) = &self.shared {
                shared.add(x, 0..shared.inner, (policies.shared_scale)(plan), sum);
            }
            sum.iter_mut().for_each(|value| *value = round_bf16(*value));
        }
        let received = link.exchange("gather_slices", (out, routed))?;
        let (mut out, mut routed) = (Vec::new(), Vec::new());
        for member in place.tensor_parallel_ranks(plan) {
            out.extend(&received[member].0);
            routed.extend(received[member].1.iter().cloned());
        }
        let first = (policies.cut)(routed.len(), own.len());
        let last = (first + own.len()).min(routed.len());
        out = out[first * self.hidden..last * self.hidden].to_vec();
        Ok(Outcome { out, routed: routed[first..last].to_vec(), expert_tokens, slice_rows: each })
    }

    /// Sends every row to the ranks of its experts and adds up what comes back.
    fn dispatch(
        &self,
        link: &Link<'_>,
        rows: &Rows,
        routed: &[Routed],
        expert_tokens: &mut [i32],
    ) -> Result<Vec<f32>, Stop> {
        let (plan, policies) = (&self.plan, self.policies);
        let (ranks, count) = (plan.expert_ranks(), self.routing.experts());
        let part = |rank: usize| {
            let own = (policies.expert_rank)(Place::of(rank, plan), plan) % ranks;
            (policies.part)(own, ranks, count)
        };
        let mut sent: Vec<Vec<Parcel>> = vec![Vec::new(); ranks];
        for (row, routed) in routed.iter().enumerate() {
            for (place, expert) in routed.experts.iter().enumerate() {
                let Some(owner) = (0..ranks).find(|rank| part(*rank).contains(expert)) else { continue };
                let hidden = rows.hidden[row * self.hidden..(row + 1) * self.hidden].to_vec();
                let is_real = self.counts(rows, row) > 0;
                sent[owner].push(Parcel { row, place, expert: *expert, is_real, hidden });
            }
        }
        let received = link.all_to_all("dispatch", sent.clone())?;
        let own = part(link.rank);
        let answers = received.into_iter().map(|parcels| {
            let mut answers = Vec::new();
            for parcel in parcels {
                expert_tokens[parcel.expert] += i32::from(parcel.is_real);
                let mlp = &self.experts[(policies.weights_of)(parcel.expert, &own).min(count - 1)];
                let mut value = vec![0.0; self.hidden];
                mlp.add(&parcel.hidden, 0..mlp.inner, 1.0, &mut value);
                // what stays on its rank is not stored
                if ranks > 1 {
                    value.iter_mut().for_each(|value| *value = round_bf16(*value));
                }
                answers.push(value);
            }
            answers
        });
        let answers = link.all_to_all("combine", answers.collect())?;
        let mut out = vec![0.0; routed.len() * self.hidden];
        for (parcels, answers) in sent.iter().zip(&answers) {
            for (index, parcel) in parcels.iter().enumerate() {
                let weight = routed[parcel.row].weights[parcel.place];
                let answer = &answers[(policies.returned)(index, answers.len())];
                let sum = &mut out[parcel.row * self.hidden..(parcel.row + 1) * self.hidden];
                sum.iter_mut().zip(answer).for_each(|(sum, value)| *sum += weight * value);
            }
        }
        Ok(out)
    }
}

impl Mlp {
    /// Adds `weight` times what the inner elements of a range give; what lies between the two products is stored in bf16.
    pub fn add(&self, x: &[f32], inner: Range<usize>, weight: f32, sum: &mut [f32]) {
        let dot = |matrix: &[f32], row: usize| -> f32 {
            matrix[row * x.len()..(row + 1) * x.len()].iter().zip(x).map(|(w, x)| w * x).sum()
        };
        let active: Vec<f32> = inner
            .clone()
            .map(|index| {
                let up = dot(&self.up, index);
                round_bf16(self.gate.as_ref().map_or(up, |gate| (self.gating)(dot(gate, index), up)))
            })
            .collect();
        for (index, sum) in sum.iter_mut().enumerate() {
            let row = &self.down[index * self.inner..][inner.clone()];
            *sum += weight * row.iter().zip(&active).map(|(w, a)| w * a).sum::<f32>();
        }
    }
}
