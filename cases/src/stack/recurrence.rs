//! Recurrent layers of a stack: their sizes, how they stand in an id, and their weights.

use serde::{Deserialize, Serialize};
use shardcheck_engine::{KdaGate, KdaPlan, LayerKind, LayerPattern, Tensor, Tensors};
use shardcheck_formats::{Dtype, round_bf16};

use super::{StackCase, StackSelection};
use crate::stream::Stream;
use crate::tokens::Tokens;
use crate::{CaseError, Step};

/// Widest head, most taps and longest chunk.
const MAX_WIDTH: usize = 1 << 8;

/// Sizes of the recurrent layers of a stack, alike in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackRecurrence {
    /// How decays are made.
    pub gate: KdaGate,
    /// Query and key heads H of all ranks.
    pub heads: usize,
    /// Value heads HV of all ranks.
    pub value_heads: usize,
    /// Width K of a query or key head.
    pub key_dim: usize,
    /// Width V of a value head.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub taps: usize,
    /// Most tokens that are computed together.
    pub chunk: usize,
    /// Most rows of a step that can be taken back.
    pub drafts: usize,
}

impl StackRecurrence {
    /// Channels of the convolution.
    pub fn channels(&self) -> usize {
        2 * self.heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Behind the pattern of an id: `qh2.vh4.qd8.vd6.t4.c4.u3.softplus`.
    pub(super) fn spell(&self) -> String {
        let Self { gate, heads, value_heads, key_dim, value_dim, taps, chunk, drafts } = self;
        format!(".qh{heads}.vh{value_heads}.qd{key_dim}.vd{value_dim}.t{taps}.c{chunk}.u{drafts}.{gate}")
    }

    pub(super) fn read(tokens: &mut Tokens) -> Result<Self, String> {
        Ok(Self {
            gate: tokens.need("gate", &KdaGate::ALL, KdaGate::name)?,
            heads: tokens.need_number("qh")?,
            value_heads: tokens.need_number("vh")?,
            key_dim: tokens.need_number("qd")?,
            value_dim: tokens.need_number("vd")?,
            taps: tokens.need_number("t")?,
            chunk: tokens.need_number("c")?,
            drafts: tokens.need_number("u")?,
        })
    }
}

/// What stands in an id of kinds of layers.
type Kinds = (Option<LayerPattern>, Option<StackRecurrence>, Option<StackSelection>);

/// Takes the pattern of layers from an id, the sizes of its recurrent layers, and the tokens of those that select.
pub(super) fn read_pattern(tokens: &mut Tokens) -> Result<Kinds, String> {
    // a pattern is letters alone, and no other token that is begins with one of its letters
    let pattern: Option<LayerPattern> = tokens.take(|token| token.parse().ok());
    let has = |kind| pattern.is_some_and(|pattern: LayerPattern| pattern.kinds().contains(&kind));
    let recurrence = has(LayerKind::Recurrent).then(|| StackRecurrence::read(tokens)).transpose()?;
    let selection = has(LayerKind::Selecting).then(|| StackSelection::read(tokens)).transpose()?;
    Ok((pattern, recurrence, selection))
}

impl StackCase {
    /// What the recurrent layers of the steps are asked for.
    pub(super) fn recurrent_plan(&self) -> Option<KdaPlan> {
        let StackRecurrence { gate, chunk, drafts, .. } = self.recurrence?;
        let mut requests: Vec<usize> = Vec::new();
        for step in &self.session.steps {
            if let Step::Run { batch, .. } = step {
                requests.extend(batch.iter().map(|entry| entry.request));
            }
        }
        requests.sort_unstable();
        requests.dedup();
        Some(KdaPlan { gate, slots: requests.len().max(1), drafts, chunk })
    }

    /// Shapes of the weights of the recurrent layers, with their mean and deviation, by name.
    fn recurrent_weights(&self) -> Vec<(&'static str, Dtype, Vec<usize>, [f64; 2])> {
        let Some(own) = self.recurrence else { return Vec::new() };
        let StackRecurrence { heads, value_heads, key_dim, value_dim, taps, .. } = own;
        let (layers, hidden) = (self.plan().recurrences().len(), self.hidden);
        let unit = (hidden as f64).powf(-0.5);
        let values = value_heads * value_dim;
        vec![
            ("kda_query", Dtype::Bf16, vec![layers, heads, key_dim, hidden], [0.0, unit]),
            ("kda_key", Dtype::Bf16, vec![layers, heads, key_dim, hidden], [0.0, unit]),
            ("kda_value", Dtype::Bf16, vec![layers, value_heads, value_dim, hidden], [0.0, unit]),
            ("kda_gate", Dtype::Bf16, vec![layers, value_heads, key_dim, hidden], [0.0, 1.2 * unit]),
            ("kda_beta", Dtype::Bf16, vec![layers, value_heads, hidden], [0.0, 1.5 * unit]),
            ("kda_output_gate", Dtype::Bf16, vec![layers, value_heads, value_dim, hidden], [0.0, 1.5 * unit]),
            ("kda_convolution", Dtype::F32, vec![layers, own.channels(), taps], [0.0, 0.6]),
            ("kda_a_log", Dtype::F32, vec![layers, value_heads], [0.0, 0.5]),
            // decays that leave a state some tokens
            ("kda_bias", Dtype::F32, vec![layers, value_heads, key_dim], [-2.5, 0.5]),
            ("kda_norm", Dtype::F32, vec![layers, value_dim], [1.0, 0.2]),
            (
                "kda_output",
                Dtype::Bf16,
                vec![layers, hidden, values],
                [0.0, 2.0 * (values as f64).powf(-0.5)],
            ),
        ]
    }

    /// Adds the weights of the recurrent layers.
    pub(super) fn add_recurrent_weights(&self, seed: u64, tensors: &mut Tensors) {
        let mut counter = Stream::StackRecurrence.counter(seed);
        for (name, dtype, shape, [mean, deviation]) in self.recurrent_weights() {
            let draw = |_| {
                let value = (mean + counter.gaussian() * deviation) as f32;
                if dtype == Dtype::Bf16 { round_bf16(value) } else { value }
            };
            let values: Vec<f32> = (0..shape.iter().product()).map(draw).collect();
            tensors.insert(name, Tensor::from_f32(dtype, &shape, &values));
        }
    }

    /// Checks the pattern of the layers, sizes of the recurrent ones, and that their states are there in every step.
    pub(super) fn check_pattern(&self) -> Result<(), CaseError> {
        let fail = |reason: String| Err(CaseError::OutOfRange(reason));
        if let Some(pattern) = self.pattern
            && (pattern.kinds().len() != self.layers || !pattern.kinds().iter().any(|kind| kind.attends()))
        {
            return fail(format!(
                "the pattern {pattern} of {} layers must have a letter for each, and a layer that attends (m, s)",
                self.layers
            ));
        }
        self.check_selection()?;
        let recurrent = self.plan().recurrences();
        let Some(own) = self.recurrence else {
            return match recurrent.first() {
                None => Ok(()),
                Some(layer) => fail(format!("layer {layer} is recurrent and has no sizes")),
            };
        };
        if recurrent.is_empty() {
            return fail("there are sizes of recurrent layers, and none in the pattern".to_owned());
        }
        let StackRecurrence { heads, value_heads, key_dim, value_dim, taps, chunk, drafts, .. } = own;
        for (name, value, least) in [
            ("qh", heads, 1),
            ("vh", value_heads, 1),
            ("qd", key_dim, 1),
            ("vd", value_dim, 1),
            ("t", taps, 1),
            ("c", chunk, 1),
            ("u", drafts, 0),
        ] {
            if value < least || value > MAX_WIDTH {
                return fail(format!("{name} is {value}; it must be between {least} and {MAX_WIDTH}"));
            }
        }
        let tp = self.configuration().tp;
        if !value_heads.is_multiple_of(heads) || !heads.is_multiple_of(tp) {
            return fail(format!(
                "{tp} ranks do not share {heads} heads, or these {value_heads} value heads, evenly"
            ));
        }
        super::slots::state_turns(&self.session, drafts).map(|_| ()).map_err(CaseError::OutOfRange)
    }

    /// Elements that the recurrent layers hold and show, of rows and of runs of so many requests.
    pub(super) fn recurrent_elements(&self, rows: usize, requests: usize) -> usize {
        let Some(own) = self.recurrence else { return 0 };
        let layers = self.plan().recurrences().len();
        let state = own.value_heads * own.key_dim * own.value_dim + own.channels() * own.taps;
        let row = own.channels() + own.value_heads * (own.key_dim + 2 * own.value_dim + 1);
        layers * (rows * row + requests * state)
    }
}
