//! Mixtures of experts of a stack: sizes, how they stand in an id, and the weights around the experts.

use serde::{Deserialize, Serialize};
use shardcheck_engine::{
    ExpertChoice, MaskedFill, Renormalise, Router, Scoring, StackExperts, Tensor, Tensors,
};
use shardcheck_formats::{Dtype, round_bf16};

use super::{MAX_STACK_WIDTH, StackCase};
use crate::CaseError;
use crate::stream::Stream;
use crate::tokens::Tokens;

/// Layers of a stack that have experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackMixture {
    /// Experts E of a layer, each as wide as an MLP.
    pub experts: usize,
    /// Experts k of a row.
    pub top_k: usize,
    /// Layers, the first ones, that have an MLP.
    pub dense: usize,
    /// Layers, the first of those with experts, that are routed by token id.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hashed: usize,
    /// Inner width J of the expert that every row has; 0: there is none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared: usize,
    /// Width z that experts read and write; 0: that of the stream.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub latent: usize,
    /// Whether experts are chosen by score and bias.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub biased: bool,
}

fn is_zero(value: &usize) -> bool {
    *value == 0
}

impl StackMixture {
    /// Whether there are experts and a router, and nothing around them.
    pub(super) fn is_plain(&self) -> bool {
        self.hashed == 0 && self.shared == 0 && self.latent == 0 && !self.biased
    }

    /// What the steps are asked for.
    pub(super) fn plan(&self) -> StackExperts {
        let router = Router {
            scoring: Scoring::Sigmoid,
            choice: if self.biased { ExpertChoice::Biased } else { ExpertChoice::Scores },
            top_k: self.top_k,
            groups: 1,
            top_groups: 1,
            fill: MaskedFill::NegativeInfinity,
            renormalise: Renormalise::Sum,
            scale: 1.0,
        };
        let (hashed, latent, shared) = (self.hashed, self.latent > 0, self.shared > 0);
        StackExperts { dense: self.dense, router, hashed, latent, shared }
    }

    pub(super) fn check(&self, layers: usize) -> Result<(), CaseError> {
        let Self { experts, top_k, dense, hashed, shared, latent, .. } = *self;
        let behind = layers.saturating_sub(dense);
        for (name, value, least, most) in [
            ("e (experts)", experts, 1, MAX_STACK_WIDTH),
            ("k (experts of a row)", top_k, 1, experts),
            ("d (layers in front of those with experts)", dense, 0, layers.saturating_sub(1)),
            ("y (layers routed by token id)", hashed, 0, behind),
            ("j (width of the shared expert)", shared, 0, MAX_STACK_WIDTH),
            ("z (width of latent experts)", latent, 0, MAX_STACK_WIDTH),
        ] {
            if !(least..=most).contains(&value) {
                return Err(CaseError::OutOfRange(format!(
                    "{name} is {value}; it must be between {least} and {most}"
                )));
            }
        }
        Ok(())
    }

    /// Behind the stream of an id: `.e6.k2.d1`, with `.y2` for layers by token id, `.j7` for a shared expert, `.z10` for latent ones.
    pub(super) fn spell(&self) -> String {
        let Self { experts, top_k, dense, hashed, shared, latent, biased } = self;
        let mut text = format!(".e{experts}.k{top_k}.d{dense}");
        for (letter, value) in [('y', hashed), ('j', shared), ('z', latent)] {
            if *value > 0 {
                text += &format!(".{letter}{value}");
            }
        }
        if *biased { text + ".biased" } else { text }
    }

    pub(super) fn read(tokens: &mut Tokens) -> Result<Option<Self>, String> {
        let Some(experts) = tokens.take_number("e") else { return Ok(None) };
        Ok(Some(Self {
            experts,
            top_k: tokens.need_number("k")?,
            dense: tokens.need_number("d")?,
            hashed: tokens.take_number("y").unwrap_or(0),
            shared: tokens.take_number("j").unwrap_or(0),
            latent: tokens.take_number("z").unwrap_or(0),
            biased: tokens.take(|token| (token == "biased").then_some(())).is_some(),
        }))
    }
}

impl StackCase {
    /// Adds the weights that stand around experts: bias, table, shared expert, latent projections.
    pub(super) fn add_mixture_weights(&self, seed: u64, tensors: &mut Tensors) {
        let Some(own) = self.mixture else { return };
        let mut counter = Stream::StackMixture.counter(seed);
        let (layers, hidden) = (self.plan().mixtures(), self.hidden);
        let mut draw = |shape: &[usize], mean: f64, deviation: f64, dtype: Dtype| {
            let value = |_| {
                let value = (mean + counter.gaussian() * deviation) as f32;
                if dtype == Dtype::Bf16 { round_bf16(value) } else { value }
            };
            let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
            Tensor::from_f32(dtype, shape, &values)
        };
        let unit = |width: usize| (width as f64).powf(-0.5);
        if own.biased {
            tensors.insert("router_bias", draw(&[layers, own.experts], 0.0, 0.3, Dtype::F32));
        }
        if own.shared > 0 {
            let rows = [layers, own.shared, hidden];
            tensors.insert("shared_gate", draw(&rows, 0.0, unit(hidden), Dtype::Bf16));
            tensors.insert("shared_up", draw(&rows, 0.0, unit(hidden), Dtype::Bf16));
            let down = draw(&[layers, hidden, own.shared], 0.0, 2.0 * unit(own.shared), Dtype::Bf16);
            tensors.insert("shared_down", down);
        }
        if own.latent > 0 {
            tensors
                .insert("latent_down", draw(&[layers, own.latent, hidden], 0.0, unit(hidden), Dtype::Bf16));
            tensors.insert("latent_norm", draw(&[layers, own.latent], 1.0, 0.25, Dtype::F32));
            tensors
                .insert("latent_up", draw(&[layers, hidden, own.latent], 0.0, unit(own.latent), Dtype::Bf16));
        }
        if own.hashed > 0 {
            let mut entries = Vec::new();
            for _ in 0..own.hashed * self.vocabulary {
                // experts of a token differ
                let mut rest: Vec<i32> = (0..own.experts as i32).collect();
                entries.extend(
                    (0..own.top_k).map(|_| rest.swap_remove(counter.below(rest.len() as u64) as usize)),
                );
            }
            let shape = [own.hashed, self.vocabulary, own.top_k];
            tensors.insert("hash_table", Tensor::from_i32(&shape, &entries));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::{Body, Case, generate_stack};

    const ID: &str = "stack/l4.h24.i20.v37.whole.e6.k2.d1.y2.j7.z10.biased/tiny-mla/tp2.dcp2.h1.s2.b4.n9.bf16.a2a.hi_lo/mixtures/v0+5_d0/7";

    #[test]
    fn an_id_reads_back_and_weights_have_the_width_of_experts() {
        let case = Case::read_back(ID);
        let Body::Stack(body) = &case.body else { panic!("another body") };
        let inputs = generate_stack(body, 3).unwrap();
        let shape = |name: &str| inputs.weights.get(name).unwrap().shape().to_vec();
        assert_eq!(shape("expert_down"), [3, 6, 10, 20]);
        assert_eq!((shape("shared_gate"), shape("latent_up")), (vec![3, 7, 24], vec![3, 24, 10]));
        assert_eq!((shape("router_bias"), shape("hash_table")), (vec![3, 6], vec![2, 37, 2]));
        let table = inputs.weights.get("hash_table").unwrap().to_i64();
        assert!(table.chunks(2).all(|own| own.iter().collect::<BTreeSet<_>>().len() == 2));
        assert!(table.iter().all(|expert| (0..6).contains(expert)));
    }
}
