//! Sinks of heads: a logit that takes its share of a row's softmax and adds no value.
//!
//! A sink belongs to no rank. Kernels of ranks know nothing of it; it enters the merge over ranks as one more LSE whose output is
//! nothing, which is the same as dividing the merged output by one more exponential (gpt-oss; TokenSpeed's kernel behind its merge).

use shardcheck_engine::{Configuration, EngineError, Tensors};
use shardcheck_formats::Dtype;

/// Weights of partials and the merged LSE: `(LSEs, weights to fill)`.
pub type Combine = fn(&[f32], &mut [f32]) -> f32;

/// How sinks are read and counted.
#[derive(Clone, Copy, PartialEq)]
pub struct SinkPolicies {
    /// Sinks of a group's heads, from all: `(sinks, first head of the group, own heads, world, member)`.
    pub of_group: fn(&[f32], usize, usize, usize, usize) -> Vec<f32>,
    /// A sink as a score: `(sink, factor of scores)`.
    pub logit: fn(f32, f32) -> f32,
    /// Factor of a rank's partial output and its LSE, where there are several: `(its LSE, sink)`.
    pub in_partial: fn(f32, f32) -> (f32, f32),
    /// As the merge's own, with a sink: `(that, LSEs, sink, weights to fill)`.
    pub combine: fn(Combine, &[f32], f32, &mut [f32]) -> f32,
    /// Factor of the output and LSE of a rank that merges with nobody: `(LSE, sink)`.
    pub alone: fn(f32, f32) -> (f32, f32),
}

impl SinkPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        of_group: |sinks, first, own, world, _| sinks[first..first + own * world].to_vec(),
        logit: |sink, _| sink,
        in_partial: |lse, _| (1.0, lse),
        combine,
        alone,
    };
}

/// The sinks of a group's gathered heads.
#[derive(Clone)]
pub struct Sinks {
    /// By gathered head.
    pub logits: Vec<f32>,
    /// How they count.
    pub policies: SinkPolicies,
}

/// All sinks of a step `[heads of all ranks]`.
///
/// # Errors
/// [`EngineError::Input`] for a tensor that is missing or does not fit.
pub fn read_sinks(inputs: &Tensors, configuration: &Configuration) -> Result<Vec<f32>, EngineError> {
    let heads = [configuration.total_heads()];
    Ok(inputs.get("sinks")?.expect("sinks", Dtype::F32, &heads)?.to_f32())
}

impl Sinks {
    /// What a rank's kernel makes of its heads' outputs `[heads, width]` and LSEs: all that there is to do in a world of one, where
    /// nothing is merged, and nothing elsewhere.
    pub fn take_share(&self, world: usize, out: &mut [f32], lses: &mut [f32]) {
        let width = out.len() / lses.len().max(1);
        for ((lse, sink), row) in lses.iter_mut().zip(&self.logits).zip(out.chunks_exact_mut(width.max(1))) {
            if *lse == f32::NEG_INFINITY {
                continue;
            }
            let take = if world > 1 { self.policies.in_partial } else { self.policies.alone };
            let (factor, with_sink) = take(*lse, *sink);
            *lse = with_sink;
            row.iter_mut().for_each(|value| *value *= factor);
        }
    }

    /// Weights of partials, and the merged LSE, of a gathered head.
    pub fn combined(&self, combine: Combine, lses: &[f32], head: usize, weights: &mut [f32]) -> f32 {
        (self.policies.combine)(combine, lses, self.logits[head], weights)
    }
}

/// Rows that see nothing anywhere are padding and stay empty; elsewhere a sink is one LSE more.
pub fn combine(by: Combine, lses: &[f32], sink: f32, weights: &mut [f32]) -> f32 {
    if lses.iter().all(|lse| *lse == f32::NEG_INFINITY) {
        return by(lses, weights);
    }
    let (mut all, mut shares) = (lses.to_vec(), vec![0.0; lses.len() + 1]);
    all.push(sink);
    let lse = by(&all, &mut shares);
    weights.copy_from_slice(&shares[..lses.len()]);
    lse
}

/// The same of one LSE.
pub fn alone(lse: f32, sink: f32) -> (f32, f32) {
    let mut weight = [1.0];
    let merged = combine(crate::merge::combine, &[lse], sink, &mut weight);
    (weight[0], merged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sink_takes_its_share_once_however_many_ranks_there_are() {
        let sink = 0.5f32;
        let lses = [1.0f32, f32::NEG_INFINITY, -2.0];
        let mut weights = [f32::NAN; 3];
        let lse = combine(crate::merge::combine, &lses, sink, &mut weights);
        let sum: f64 = [1.0f64, -2.0, 0.5].iter().map(|x| x.exp()).sum();
        assert!((f64::from(lse) - sum.ln()).abs() < 1e-6, "{lse}");
        assert!((f64::from(weights[0]) - 1f64.exp() / sum).abs() < 1e-6);
        assert_eq!(weights[1], 0.0);
        let (factor, merged) = alone(1.0, sink);
        assert!((f64::from(factor) - 1f64.exp() / (1f64.exp() + 0.5f64.exp())).abs() < 1e-6, "{factor}");
        assert!((f64::from(merged) - (1f64.exp() + 0.5f64.exp()).ln()).abs() < 1e-6, "{merged}");
    }

    #[test]
    fn a_row_of_padding_has_no_sink_and_one_far_above_leaves_nothing() {
        let mut weights = [f32::NAN; 2];
        let empty = [f32::NEG_INFINITY; 2];
        assert_eq!(combine(crate::merge::combine, &empty, 3.0, &mut weights), f32::NEG_INFINITY);
        assert_eq!(weights, [0.0; 2]);
        let lse = combine(crate::merge::combine, &[1.0, 2.0], 200.0, &mut weights);
        assert_eq!((lse, weights), (200.0, [0.0; 2]));
        let lse = combine(crate::merge::combine, &[1.0, 1.0], -200.0, &mut weights);
        assert!((lse - (1.0 + 2f32.ln())).abs() < 1e-6 && (weights[0] - 0.5).abs() < 1e-6);
    }
}
