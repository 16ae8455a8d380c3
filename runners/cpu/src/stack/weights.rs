//! The weights of a stack as a step brings them, in 32 bits.

use shardcheck_engine::{Attention, Configuration, EngineError, StackPlan, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::mixture::MixtureWeights;
use super::recurrent::RecurrentWeights;
use crate::batch::wrong_shape;
use crate::experts::{Gating, Mlp};

/// Sizes of a stack.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Hidden width h.
    pub hidden: usize,
    /// Tokens V of the vocabulary.
    pub vocabulary: usize,
    /// Positions of the rotary table.
    pub positions: usize,
    /// Rotary width P.
    pub rotary: usize,
    /// Heads of one rank.
    pub heads: usize,
    /// Heads of all ranks.
    pub all_heads: usize,
    /// Width of a query or key.
    pub key_dim: usize,
    /// Width of a head behind the up-projection.
    pub up_dim: usize,
}

/// Weights of one layer with latent attention.
pub struct LatentWeights {
    /// `[Hall, Dk, h]`.
    pub query: Vec<f32>,
    /// `[Dk, h]`.
    pub key: Vec<f32>,
    /// `bf16 [Hall, Dv, Vo]`.
    pub up_projection: Tensor,
    /// `[Hall·Vo, h]`; empty without a gate.
    pub gate: Vec<f32>,
    /// `[h, Hall·Vo]`.
    pub output: Vec<f32>,
}

/// What stands behind attention in a layer.
pub enum FeedForward {
    /// An MLP.
    Mlp(Mlp),
    /// Experts.
    Experts(Box<MixtureWeights>),
}

/// Weights of all layers and of what stands around them.
pub struct Weights {
    /// Sizes.
    pub sizes: Sizes,
    /// `[V, h]`.
    pub embedding: Vec<f32>,
    /// `[2L + 1, h]`, and five of a draft head.
    pub norm: Vec<f32>,
    /// `[positions, P]`.
    pub rotary: Vec<f32>,
    /// Layers with latent attention, that of a draft head last.
    pub latent: Vec<LatentWeights>,
    /// Recurrent layers.
    pub recurrent: Vec<RecurrentWeights>,
    /// What stands behind attention, of all layers, a draft head's last.
    pub feed_forward: Vec<FeedForward>,
    /// `[V, h]`.
    pub head: Vec<f32>,
    /// Of a draft head, `[h, 2h]`; empty without one.
    pub draft: Vec<f32>,
}

impl Weights {
    /// Reads the weights of a plan for a session with latent attention, whose MLPs are gated in one way.
    ///
    /// # Errors
    /// [`EngineError::Input`] for tensors that do not fit the plan, the session or each other.
    pub fn read(
        inputs: &Tensors,
        plan: &StackPlan,
        configuration: &Configuration,
        gating: Gating,
    ) -> Result<Self, EngineError> {
        let pair = |name: &str| -> Result<[usize; 2], EngineError> {
            let tensor = inputs.get(name)?;
            match *tensor.shape() {
                [first, second] => Ok([first, second]),
                _ => Err(wrong_shape(name, tensor, vec![0, 0])),
            }
        };
        let [vocabulary, hidden] = pair("embedding")?;
        let [positions, rotary] = pair("rotary")?;
        let attention = configuration.attention;
        let turned = match attention {
            Attention::Mla { qk_rope_head_dim, .. } => qk_rope_head_dim,
            Attention::Gqa { .. } => 0,
        };
        if rotary != turned || !rotary.is_multiple_of(2) {
            return Err(wrong_shape("rotary", inputs.get("rotary")?, vec![positions, turned / 2 * 2]));
        }
        if plan.pattern.is_some_and(|pattern| pattern.kinds().len() != plan.layers) {
            let text = format!("the pattern of the plan is not one of {} layers", plan.layers);
            return Err(EngineError::Crash { text });
        }
        let recurrent = plan.recurrences().len();
        let sizes = Sizes {
            hidden,
            vocabulary,
            positions,
            rotary,
            heads: configuration.heads_per_rank,
            all_heads: configuration.total_heads(),
            key_dim: attention.qk_dim(),
            up_dim: attention.v_head_dim(),
        };
        let read = |name: &str, dtype: Dtype, shape: &[usize]| -> Result<Vec<f32>, EngineError> {
            Ok(inputs.get(name)?.expect(name, dtype, shape)?.to_f32())
        };
        Ok(Self {
            embedding: read("embedding", Dtype::Bf16, &[vocabulary, hidden])?,
            norm: read("norm_weight", Dtype::F32, &[plan.norms(), hidden])?,
            rotary: read("rotary", Dtype::F32, &[positions, rotary])?,
            latent: latent(inputs, plan, &sizes, attention.value_dim())?,
            recurrent: RecurrentWeights::read(inputs, recurrent, (hidden, configuration.tp))?,
            feed_forward: feed_forwards(inputs, plan, hidden, gating)?,
            head: read("w_head", Dtype::Bf16, &[vocabulary, hidden])?,
            draft: match plan.heads_of_drafts() {
                0 => Vec::new(),
                _ => read("w_draft", Dtype::Bf16, &[hidden, 2 * hidden])?,
            },
            sizes,
        })
    }
}

fn latent(
    inputs: &Tensors,
    plan: &StackPlan,
    sizes: &Sizes,
    latent: usize,
) -> Result<Vec<LatentWeights>, EngineError> {
    let targets = plan.attending().len();
    let layers = targets + plan.heads_of_drafts();
    let Sizes { hidden, all_heads, key_dim, up_dim, .. } = *sizes;
    let read = |name: &str, shape: &[usize]| -> Result<Vec<f32>, EngineError> {
        let shape: Vec<usize> = std::iter::once(layers).chain(shape.iter().copied()).collect();
        Ok(inputs.get(name)?.expect(name, Dtype::Bf16, &shape)?.to_f32())
    };
    let query = read("w_query", &[all_heads, key_dim, hidden])?;
    let key = read("w_key", &[key_dim, hidden])?;
    let up_projection = read("w_uv", &[all_heads, latent, up_dim])?;
    let output = read("w_output", &[hidden, all_heads * up_dim])?;
    let gates = match plan.output_gate {
        true => {
            let shape = [targets, all_heads * up_dim, hidden];
            inputs.get("w_output_gate")?.expect("w_output_gate", Dtype::Bf16, &shape)?.to_f32()
        }
        false => Vec::new(),
    };
    let of = |all: &[f32], layer: usize| part(all, layers, layer);
    let layer = |layer: usize| LatentWeights {
        gate: if layer < targets { part(&gates, targets.max(1), layer) } else { Vec::new() },
        query: of(&query, layer),
        key: of(&key, layer),
        up_projection: Tensor::from_f32(
            Dtype::Bf16,
            &[all_heads, latent, up_dim],
            &of(&up_projection, layer),
        ),
        output: of(&output, layer),
    };
    Ok((0..layers).map(layer).collect())
}

/// One of equal parts.
pub fn part(all: &[f32], parts: usize, index: usize) -> Vec<f32> {
    let size = all.len() / parts;
    all[index * size..(index + 1) * size].to_vec()
}

/// What stands behind attention in each layer: MLPs in the first ones, and in a draft head's.
fn feed_forwards(
    inputs: &Tensors,
    plan: &StackPlan,
    hidden: usize,
    gating: Gating,
) -> Result<Vec<FeedForward>, EngineError> {
    let dense = plan.dense() + plan.heads_of_drafts();
    let inner = |name: &str| -> Result<usize, EngineError> {
        Ok(inputs.get(name)?.shape().last().copied().unwrap_or(0))
    };
    let read = |name: &str, shape: &[usize]| -> Result<Vec<f32>, EngineError> {
        Ok(inputs.get(name)?.expect(name, Dtype::Bf16, shape)?.to_f32())
    };
    let mut found = Vec::new();
    if dense > 0 {
        let inner = inner("w_down")?;
        let [gate, up] = ["w_gate", "w_up"].map(|name| read(name, &[dense, inner, hidden]));
        let (gate, up, down) = (gate?, up?, read("w_down", &[dense, hidden, inner])?);
        found.extend((0..dense).map(|layer| {
            let of = |all: &[f32]| part(all, dense, layer);
            FeedForward::Mlp(Mlp { gate: Some(of(&gate)), up: of(&up), down: of(&down), inner, gating })
        }));
    }
    found.extend(
        MixtureWeights::read(inputs, plan, hidden)?.into_iter().map(Box::new).map(FeedForward::Experts),
    );
    // the MLPs were read together, and a draft head's layer is the last one
    if plan.heads_of_drafts() > 0 {
        let own = found.remove(plan.dense());
        found.push(own);
    }
    Ok(found)
}
