//! Kimi delta attention: short convolution, gates, the delta rule with a decay for each key channel, gated norm; token by token in f64.
//!
//! Of a token, `q`, `k` and `v` are `silu` of a causal depthwise convolution over its channels, taps oldest first; `q` and `k` are divided
//! by `√(Σx² + 1e-6)` over their head, `q` is scaled by `K^−½`. `b = σ(beta)`; `g = lower·σ(exp(A)·(a + bias))`, or
//! `−exp(A)·softplus(a + bias)`, for each key channel of each value head. Value head h uses query and key head `h / (HV / H)`. Then, for
//! the state S `[K, V]` of a head:
//!
//! ```text
//! S ← diag(exp g) S ;   S ← S + b·k (v − Sᵀk)ᵀ ;   core = Sᵀq ;   out = core / √(mean core² + ε) · weight · σ(gate)
//! ```
//!
//! Source: FLA `ops/kda/naive.py` and `gate.py`; transformers `modeling_kimi_linear.py`. Beside every value stands how far a conforming
//! engine may be from it ([`surround`], [`recurrence`]).

pub mod recurrence;
pub mod surround;

use shardcheck_formats::codec::half_ulp;
use shardcheck_formats::contract::Contract;
use shardcheck_formats::dtype::Dtype;

use recurrence::{HeadState, HeadToken};
use surround::{convolve, decay, gated_norm, normalise, sigmoid};

/// Added to the sum of squares of a query or key head.
pub const NORM_FLOOR: f64 = 1e-6;

/// A value, and how far a conforming engine may be from it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Near {
    /// Exact value.
    pub value: f64,
    /// Bound on an engine's distance from it.
    pub error: f64,
}

impl Near {
    /// A value that is known exactly.
    pub fn exact(value: f32) -> Self {
        Self { value: f64::from(value), error: 0.0 }
    }

    /// The value behind its rounding to a type.
    #[must_use]
    pub fn stored(self, dtype: Dtype) -> Self {
        Self { error: self.error + half_ulp(dtype, self.value.abs() + self.error), ..self }
    }
}

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Query and key heads H.
    pub heads: usize,
    /// Value heads HV, a multiple of H.
    pub value_heads: usize,
    /// Width K of a query or key head.
    pub key_dim: usize,
    /// Width V of a value head.
    pub value_dim: usize,
    /// Taps of the convolution, the token's own included.
    pub taps: usize,
}

impl Shape {
    /// Channels of the convolution: `H·K` of queries, `H·K` of keys, `HV·V` of values.
    pub fn channels(&self) -> usize {
        2 * self.heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// How the log of a decay is made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// Between the bound, a negative number, and 0.
    LowerBound(f64),
    /// Any negative number.
    Softplus,
}

/// A layer: its sizes and weights.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Sizes.
    pub shape: Shape,
    /// Which gate.
    pub gate: Gate,
    /// `[channels, taps]`, oldest tap first.
    pub convolution: Vec<f64>,
    /// A, `[HV]`.
    pub a_log: Vec<f64>,
    /// `[HV, K]`.
    pub bias: Vec<f64>,
    /// `[V]`.
    pub norm_weight: Vec<f64>,
    /// ε of the norm.
    pub epsilon: f64,
}

/// What a layer gets of one token.
#[derive(Debug, Clone)]
pub struct Token {
    /// Channels of the convolution.
    pub channels: Vec<f64>,
    /// a, `[HV, K]`.
    pub gate: Vec<f64>,
    /// Logits, `[HV]`.
    pub beta: Vec<f64>,
    /// `[HV, V]`.
    pub output_gate: Vec<f64>,
}

/// What a request has behind its tokens.
#[derive(Debug, Clone)]
pub struct State {
    /// Channels of the last `taps − 1` tokens, oldest first; zeros where there were none.
    pub window: Vec<Vec<f64>>,
    /// State of each value head.
    pub heads: Vec<HeadState>,
}

impl State {
    /// Before the first token.
    pub fn zero(shape: &Shape) -> Self {
        Self {
            window: vec![vec![0.0; shape.channels()]; shape.taps - 1],
            heads: vec![HeadState::zero(shape.key_dim, shape.value_dim); shape.value_heads],
        }
    }
}

/// How an engine computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arithmetic {
    /// Unit roundoff of one addition of a sum.
    pub u_acc: f64,
    /// Largest error of exp and log, in ulp of binary32.
    pub kexp: f64,
    /// What outputs of the convolution, and the core, are stored in.
    pub stored: Dtype,
    /// Most tokens that are computed together; 1 is token by token.
    pub chunk: usize,
}

impl Arithmetic {
    /// That of a contract, with chunks of so many tokens.
    pub fn of(contract: &Contract, chunk: usize) -> Self {
        Self { u_acc: contract.u_acc, kexp: contract.kexp, stored: contract.partial, chunk: chunk.max(1) }
    }
}

/// What comes of one token.
#[derive(Debug, Clone)]
pub struct Row {
    /// `[HV, V]`, before the norm.
    pub core: Vec<Near>,
    /// `[HV, V]`, before the rounding to the output's type.
    pub out: Vec<Near>,
    /// State behind the token.
    pub state: State,
}

/// The rows of tokens that one step takes behind a state. Chunks begin at the first of them.
///
/// # Panics
/// When lengths do not fit the shape.
pub fn advance(layer: &Layer, state: &State, tokens: &[Token], arithmetic: &Arithmetic) -> Vec<Row> {
    let shape = &layer.shape;
    let mut window = state.window.clone();
    let mut windows = Vec::new();
    let mut prepared: Vec<Vec<HeadToken>> = vec![Vec::new(); shape.value_heads];
    for token in tokens {
        window.push(token.channels.clone());
        let mixed = convolve(&window, &layer.convolution, shape.taps, arithmetic);
        window.remove(0);
        windows.push(window.clone());
        for (head, own) in prepared.iter_mut().enumerate() {
            own.push(head_token(layer, token, &mixed, head, arithmetic));
        }
    }
    let mut rows: Vec<Row> = windows
        .into_iter()
        .map(|window| Row { core: vec![], out: vec![], state: State { window, heads: vec![] } })
        .collect();
    for (head, own) in prepared.iter().enumerate() {
        let mut now = state.heads[head].clone();
        let mut first = 0;
        for chunk in own.chunks(arithmetic.chunk) {
            let steps = recurrence::chunk(&now, chunk, arithmetic);
            now = steps.last().map_or(now, |step| step.state.clone());
            for (place, step) in steps.into_iter().enumerate() {
                let row = &mut rows[first + place];
                let gate = &tokens[first + place].output_gate[head * shape.value_dim..][..shape.value_dim];
                row.out.extend(gated_norm(&step.core, &layer.norm_weight, gate, layer.epsilon, arithmetic));
                row.core.extend(step.core);
                row.state.heads.push(step.state);
            }
            first += chunk.len();
        }
    }
    rows
}

fn head_token(
    layer: &Layer,
    token: &Token,
    mixed: &[Near],
    head: usize,
    arithmetic: &Arithmetic,
) -> HeadToken {
    let Shape { heads, value_heads, key_dim, value_dim, .. } = layer.shape;
    let group = head / (value_heads / heads);
    let own = |first: usize, width: usize, index: usize| &mixed[first + index * width..][..width];
    let scale = (key_dim as f64).sqrt().recip();
    HeadToken {
        query: normalise(own(0, key_dim, group), scale, arithmetic),
        key: normalise(own(heads * key_dim, key_dim, group), 1.0, arithmetic),
        value: own(2 * heads * key_dim, value_dim, head).to_vec(),
        decay: (head * key_dim..(head + 1) * key_dim)
            .map(|at| decay(layer.gate, layer.a_log[head], token.gate[at], layer.bias[at], arithmetic))
            .collect(),
        beta: sigmoid(token.beta[head], 0.0, arithmetic),
    }
}

#[cfg(test)]
mod tests;
