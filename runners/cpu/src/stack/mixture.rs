//! Mixtures of experts of a stack: routers, what is routed by token id, the expert of every row, experts in a latent space.
//!
//! Order: DeepSeek-V3 and -V4 in vLLM (`DeepseekV2MoE`); latent experts: Kimi-K3 in ATOM (`kimi_k3`), whose sum over ranks comes before the
//! norm.

use std::ops::Range;

use shardcheck_engine::{
    EngineError, ExpertChoice, ExpertSharding, MoeExchange, MoePlan, Router, SharedExpert, StackPlan, Tensor,
    Tensors,
};
use shardcheck_formats::{Dtype, round_bf16};

use super::lanes::Lane;
use super::weights::{FeedForward, part};
use super::worker::{Part, Worker, dot};
use super::{Passage, Step};
use crate::communicator::Stop;
use crate::experts::{self, Gating, Mlp, MoePolicies};
use crate::kda::normed as unit;

/// What a mixture of a stack decides. Layers are numbers among all; the second number is the first layer that has experts.
#[derive(Clone, Copy, PartialEq)]
pub struct MixturePolicies {
    /// Layer whose bias a router adds.
    pub bias: fn(usize, usize) -> usize,
    /// Layer whose table has the experts of token ids.
    pub table: fn(usize, usize) -> usize,
    /// Whether a layer is routed by token id: `(its number among those with experts, how many are)`.
    pub hashed: fn(usize, usize) -> bool,
    /// Token by which a row is looked up.
    pub token: fn(&[usize], usize) -> usize,
    /// Layer whose projections lie around latent experts.
    pub latent: fn(usize, usize) -> usize,
    /// Whether what latent experts give is summed over ranks before the norm.
    pub sums: bool,
    /// Whether there is a norm behind latent experts.
    pub norms: bool,
    /// Columns of the up-projection on a rank: `(rank, ranks, width)`.
    pub columns: fn(usize, usize, usize) -> Range<usize>,
    /// Inner elements, on a rank, of the expert that every row has beside latent ones: likewise.
    pub shared: fn(usize, usize, usize) -> Range<usize>,
}

impl MixturePolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        bias: |layer, _| layer,
        table: |layer, _| layer,
        hashed: |mixture, hashed| mixture < hashed,
        token: |tokens, row| tokens[row],
        latent: |layer, _| layer,
        sums: true,
        norms: true,
        columns: |rank, ranks, width| rank * width / ranks..(rank + 1) * width / ranks,
        shared: |rank, ranks, inner| rank * inner / ranks..(rank + 1) * inner / ranks,
    };
}

/// Weights of one layer of experts.
pub struct MixtureWeights {
    /// `[E, h]`.
    router: Vec<f32>,
    bias: Option<Tensor>,
    /// `[V, k]`.
    table: Option<Tensor>,
    /// Weights of the experts, as a layer of them is given them.
    experts: Tensors,
    /// The expert that every row has, likewise.
    shared: Option<Tensors>,
    latent: Option<Latent>,
}

/// What lies around experts in a latent space.
struct Latent {
    /// `[z, h]`.
    down: Vec<f32>,
    /// `[z]`.
    norm: Vec<f32>,
    /// `[h, z]`.
    up: Vec<f32>,
}

impl MixtureWeights {
    /// Weights of all layers with experts.
    ///
    /// # Errors
    /// [`EngineError::Input`] for tensors that do not fit.
    pub fn read(inputs: &Tensors, plan: &StackPlan, hidden: usize) -> Result<Vec<Self>, EngineError> {
        let (Some(own), mixtures) = (plan.experts, plan.mixtures()) else { return Ok(Vec::new()) };
        if mixtures == 0 {
            return Ok(Vec::new());
        }
        let axis = |name: &str, axis: usize| -> Result<usize, EngineError> {
            Ok(inputs.get(name)?.shape().get(axis).copied().unwrap_or(0))
        };
        let (count, inner) = (axis("w_router", 1)?, axis("expert_down", 3)?);
        let width = if own.latent { axis("latent_down", 1)? } else { hidden };
        // parts of a tensor by layer
        let layers = |name: &str, dtype: Dtype, shape: &[usize]| -> Result<Vec<Tensor>, EngineError> {
            let whole: Vec<usize> = std::iter::once(mixtures).chain(shape.iter().copied()).collect();
            let values = inputs.get(name)?.expect(name, dtype, &whole)?.to_f32();
            Ok((0..mixtures).map(|at| Tensor::from_f32(dtype, shape, &part(&values, mixtures, at))).collect())
        };
        let half = |name: &str, shape: &[usize]| layers(name, Dtype::Bf16, shape);
        let router = half("w_router", &[count, hidden])?;
        let (gate, up) =
            (half("expert_gate", &[count, inner, width])?, half("expert_up", &[count, inner, width])?);
        let down = half("expert_down", &[count, width, inner])?;
        let bias = match own.router.choice {
            ExpertChoice::Biased => Some(layers("router_bias", Dtype::F32, &[count])?),
            _ => None,
        };
        let shared = own.shared.then(|| -> Result<_, EngineError> {
            let inner = axis("shared_down", 2)?;
            let (gate, up) = (half("shared_gate", &[inner, hidden])?, half("shared_up", &[inner, hidden])?);
            Ok([gate, up, half("shared_down", &[hidden, inner])?])
        });
        let shared = shared.transpose()?;
        let latent = own.latent.then(|| -> Result<_, EngineError> {
            let norm = layers("latent_norm", Dtype::F32, &[width])?;
            Ok([half("latent_down", &[width, hidden])?, norm, half("latent_up", &[hidden, width])?])
        });
        let latent = latent.transpose()?;
        let tables = tables(inputs, own.hashed, own.router.top_k)?;
        let layer = |at: usize| Self {
            router: router[at].to_f32(),
            bias: bias.as_ref().map(|bias| bias[at].clone()),
            table: tables.get(at).cloned(),
            experts: Tensors::new()
                .with("w_gate", gate[at].clone())
                .with("w_up", up[at].clone())
                .with("w_down", down[at].clone()),
            shared: shared.as_ref().map(|[gate, up, down]| {
                Tensors::new()
                    .with("shared_gate", gate[at].clone())
                    .with("shared_up", up[at].clone())
                    .with("shared_down", down[at].clone())
            }),
            latent: latent.as_ref().map(|[down, norm, up]| Latent {
                down: down[at].to_f32(),
                norm: norm[at].to_f32(),
                up: up[at].to_f32(),
            }),
        };
        Ok((0..mixtures).map(layer).collect())
    }
}

/// Tables of the layers that are routed by token id, `[V, k]` each.
fn tables(inputs: &Tensors, hashed: usize, top_k: usize) -> Result<Vec<Tensor>, EngineError> {
    if hashed == 0 {
        return Ok(Vec::new());
    }
    let table = inputs.get("hash_table")?;
    let ids = table.shape().get(1).copied().unwrap_or(0);
    let entries: Vec<i32> = table
        .expect("hash_table", Dtype::I32, &[hashed, ids, top_k])?
        .to_i64()
        .into_iter()
        .map(|entry| entry as i32)
        .collect();
    Ok(entries.chunks_exact((ids * top_k).max(1)).map(|own| Tensor::from_i32(&[ids, top_k], own)).collect())
}

impl Worker<'_> {
    /// All rows in the latent space, `[T, z]`.
    fn lowered(&self, normed: &[f32], latent: &Latent) -> Vec<f32> {
        let hidden = self.weights.sizes.hidden;
        let row = |x: &[f32]| -> Vec<f32> {
            latent.down.chunks_exact(hidden).map(|w| round_bf16(dot(w, x))).collect()
        };
        normed.chunks_exact(hidden).flat_map(row).collect()
    }

    /// What latent experts and the expert of every row add to the stream, given the normed sum of the former and the normed rows.
    fn lifted(
        &self,
        stream: &[f32],
        (sums, normed): (&[f32], &[f32]),
        latent: &Latent,
        shared: Option<&Mlp>,
    ) -> Result<Vec<f32>, Stop> {
        let (hidden, width) = (self.weights.sizes.hidden, latent.norm.len());
        let (rank, ranks) = (self.link.member, self.link.world);
        let columns = (self.policies.mixtures.columns)(rank, ranks, width);
        let mut all = Vec::new();
        for (sum, x) in sums.chunks_exact(width).zip(normed.chunks_exact(hidden)) {
            let of_row = |row: &[f32]| dot(&row[columns.clone()], &sum[columns.clone()]);
            let mut own: Vec<f32> = latent.up.chunks_exact(width).map(of_row).collect();
            if let Some(shared) = shared {
                let inner = (self.policies.mixtures.shared)(rank, ranks, shared.inner);
                shared.add(x, inner, 1.0, &mut own);
            }
            all.extend(own);
        }
        self.update(Part::FeedForward, stream, all)
    }
}

impl Step<'_> {
    fn mixture_of(&self, layer: usize) -> Result<&MixtureWeights, EngineError> {
        match &self.weights.feed_forward[layer] {
            FeedForward::Experts(own) => Ok(own),
            FeedForward::Mlp(_) => Err(EngineError::Crash { text: format!("layer {layer} has no experts") }),
        }
    }

    /// What a layer of experts adds to the stream of each rank; it is given the rows and logits of the first rank of each rank of prefill context
    /// parallelism, as the operation has them.
    pub(super) fn mixture(
        &self,
        layer: usize,
        normed: &[Vec<f32>],
        passage: &mut Passage,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let (stack, first) = (&self.scene.policies.stack, self.plan.dense());
        let [router_of, experts_of] = stack.mixture.map(|of| of(layer, first));
        let (router, experts) = (self.mixture_of(router_of)?, self.mixture_of(experts_of)?);
        let logits = passage.all(self, |worker, stream| {
            Ok(worker.router_logits(stream, &normed[worker.link.rank], &router.router))
        })?;
        let hidden = self.weights.sizes.hidden;
        let around = self.mixture_of((stack.mixtures.latent)(layer, first))?.latent.as_ref();
        let lowered = match around {
            None => Vec::new(),
            Some(latent) => {
                passage.all(self, |worker, _| Ok(worker.lowered(&normed[worker.link.rank], latent)))?
            }
        };
        let plan = self.experts_plan(experts.shared.is_some() && around.is_none());
        let (router, mut inputs) = self.routed(layer, &logits, &plan)?;
        let (width, given) = around.map_or((hidden, normed), |latent| (latent.norm.len(), &lowered));
        let given: Vec<&[f32]> = given.iter().step_by(plan.tp).map(Vec::as_slice).collect();
        let given = self.interleaved(&given, &plan);
        inputs.insert("hidden", Tensor::from_f32(Dtype::Bf16, &[given.len() / width, width], &given));
        inputs.insert("dp_tokens", Tensor::from_i32(&[1], &[(given.len() / width) as i32]));
        experts.experts.iter().for_each(|(name, tensor)| inputs.insert(name, tensor.clone()));
        let beside = experts.shared.as_ref().filter(|_| around.is_none());
        for (name, tensor) in beside.into_iter().flat_map(Tensors::iter) {
            inputs.insert(name, tensor.clone());
        }
        let moe = self.scene.policies.moe;
        let moe = MoePolicies { sums_tp: moe.sums_tp && (around.is_none() || stack.mixtures.sums), ..moe };
        let (rows, top_k) = (self.lanes.all[0].rows.tokens.len(), router.top_k);
        let reply = experts::run(&inputs, (router, plan), self.scene.ranks.timeout, &moe)?;
        passage.count(&reply.collectives);
        let (out, ids) = (reply.outputs.get("out")?.to_f32(), reply.outputs.get("topk_ids")?.to_i64());
        let of_rank = |rank: usize| &out[rank * rows * width..(rank + 1) * rows * width];
        for (rank, (seen, logits)) in passage.seen.iter_mut().zip(logits).enumerate() {
            seen.router_logits.extend(logits);
            seen.topk_ids.extend(ids[rank * rows * top_k..][..rows * top_k].iter().map(|id| *id as i32));
        }
        match around {
            None => passage.all(self, |worker, _| Ok(worker.scattered(of_rank(worker.link.rank)))),
            Some(latent) => self.lift(normed, (lowered, &of_rank), (latent, experts), passage),
        }
    }

    /// How experts are shared out, with one that every row has beside them or without.
    fn experts_plan(&self, shared: bool) -> MoePlan {
        let merged = self.plan.pcp.is_some_and(|pcp| pcp.merged);
        MoePlan {
            dp: 1,
            pcp: self.lanes.all.len(),
            tp: self.scene.configuration.tp,
            exchange: match (merged, self.lanes.is_whole()) {
                (false, _) => MoeExchange::Local,
                (true, false) => MoeExchange::Gathered,
                // every rank has all rows
                (true, true) => MoeExchange::Redundant,
            },
            sharding: ExpertSharding::Whole,
            shared: if shared { SharedExpert::Sharded } else { SharedExpert::None },
            activation: self.plan.activation,
        }
    }

    /// What the ranks of prefill context parallelism have of each row, as a layer of experts is given it: by turns, or that of one where every
    /// rank has all rows.
    fn interleaved<T: Copy>(&self, of_lanes: &[&[T]], plan: &MoePlan) -> Vec<T> {
        let lanes = if plan.exchange == MoeExchange::Redundant { &of_lanes[..1] } else { of_lanes };
        let rows = self.lanes.all[0].rows.tokens.len();
        let width = lanes[0].len() / rows.max(1);
        let of_row = |row: usize| lanes.iter().flat_map(move |own| &own[row * width..(row + 1) * width]);
        (0..rows).flat_map(of_row).copied().collect()
    }

    /// Router of a layer, and what it is given: logits of the rows, with a bias, or with a table and the tokens.
    fn routed(
        &self,
        layer: usize,
        logits: &[Vec<f32>],
        plan: &MoePlan,
    ) -> Result<(Router, Tensors), EngineError> {
        let crash = |text: &str| EngineError::Crash { text: format!("layer {layer} {text}") };
        let own = self.plan.experts.ok_or_else(|| crash("has no plan of experts"))?;
        let (stack, first) = (&self.scene.policies.stack, self.plan.dense());
        let rows = self.lanes.all[0].rows.tokens.len();
        let count = logits[0].len().checked_div(rows).unwrap_or(0);
        let routed_by = |logits: &Vec<f32>| -> Vec<f32> {
            let of_row = |row: usize| &logits[(stack.routed_by)(row, rows) * count..][..count];
            (0..rows).flat_map(of_row).copied().collect()
        };
        let routed_by: Vec<Vec<f32>> = logits.iter().step_by(plan.tp).map(routed_by).collect();
        let routed_by: Vec<&[f32]> = routed_by.iter().map(Vec::as_slice).collect();
        let routed_by = self.interleaved(&routed_by, plan);
        let all = routed_by.len().checked_div(count).unwrap_or(0);
        let given = Tensors::new().with("logits", Tensor::from_f32(Dtype::F32, &[all, count], &routed_by));
        if (stack.mixtures.hashed)(layer - first, own.hashed) {
            let table = self.mixture_of((stack.mixtures.table)(layer, first))?.table.clone();
            let of_lane = |lane: &Lane| -> Vec<i64> {
                (0..rows).map(|row| (stack.mixtures.token)(&lane.rows.tokens, row) as i64).collect()
            };
            let ids: Vec<Vec<i64>> = self.lanes.all.iter().map(of_lane).collect();
            let ids: Vec<&[i64]> = ids.iter().map(Vec::as_slice).collect();
            let ids = self.interleaved(&ids, plan);
            let given = given
                .with("hash_table", table.ok_or_else(|| crash("has no table of token ids"))?)
                .with("token_ids", Tensor::from_i64(&[all], &ids));
            return Ok((Router { choice: ExpertChoice::Hashed, ..own.router }, given));
        }
        let bias = self.mixture_of((stack.mixtures.bias)(layer, first))?.bias.clone();
        Ok((own.router, bias.into_iter().fold(given, |given, bias| given.with("bias", bias))))
    }

    /// Brings what latent experts give of each rank back into the stream.
    fn lift<'o>(
        &self,
        normed: &[Vec<f32>],
        (lowered, out_of): (Vec<Vec<f32>>, &dyn Fn(usize) -> &'o [f32]),
        (latent, experts): (&Latent, &MixtureWeights),
        passage: &mut Passage,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let row = |sum: &[f32]| -> Vec<f32> {
            if !self.scene.policies.stack.mixtures.norms {
                return sum.to_vec();
            }
            let unit = unit(sum, StackPlan::EPSILON);
            unit.iter().zip(&latent.norm).map(|(x, w)| round_bf16(x * w)).collect()
        };
        let sums: Vec<Vec<f32>> = (0..normed.len())
            .map(|rank| out_of(rank).chunks_exact(latent.norm.len()).flat_map(row).collect())
            .collect();
        for (rank, (seen, lowered)) in passage.seen.iter_mut().zip(lowered).enumerate() {
            seen.latent.extend(lowered);
            seen.latent_sum.extend(out_of(rank));
            seen.latent_normed.extend(&sums[rank]);
        }
        let gating = (self.scene.policies.moe.gating)(self.plan.activation);
        let shared = experts.shared.as_ref().map(|shared| mlp(shared, gating)).transpose()?;
        passage.all(self, |worker, stream| {
            let rank = worker.link.rank;
            worker.lifted(stream, (&sums[rank], &normed[rank]), latent, shared.as_ref())
        })
    }
}

/// The expert that every row has.
fn mlp(shared: &Tensors, gating: Gating) -> Result<Mlp, EngineError> {
    let values = |name: &str| -> Result<Vec<f32>, EngineError> { Ok(shared.get(name)?.to_f32()) };
    let inner = shared.get("shared_up")?.shape()[0];
    Ok(Mlp {
        gate: Some(values("shared_gate")?),
        up: values("shared_up")?,
        down: values("shared_down")?,
        inner,
        gating,
    })
}
