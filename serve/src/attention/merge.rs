//! The merge of per-rank partials by log-sum-exp, in the two arithmetic orders that engines have.

use std::fmt;
use std::str::FromStr;

use super::dtype::OutputDtype;

/// How partials travel, hence in which order they are scaled, rounded and added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergeOrder {
    /// All-gather of LSE, each rank scales its own output and stores it in the output dtype, reduce-scatter adds in
    /// the output dtype. Source: vLLM and ATOM `cp_lse_ag_out_rs`.
    AgRs,
    /// All-to-all of outputs with their LSE; the receiver scales and adds in f32, rank 0 first, and rounds once.
    /// Source: vLLM `dcp_a2a_lse_reduce`, ATOM `cp_lse_a2a`.
    A2a,
}

impl MergeOrder {
    /// Every order.
    pub const ALL: [Self; 2] = [Self::AgRs, Self::A2a];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::AgRs => "ag-rs",
            Self::A2a => "a2a",
        }
    }
}

impl fmt::Display for MergeOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for MergeOrder {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        Self::ALL
            .into_iter()
            .find(|o| o.name() == name)
            .ok_or_else(|| format!("`{name}` is none of {}", names()))
    }
}

/// Merges W partials of one query row and head.
///
/// `outputs`: `[W, D]`, in `dtype`; `lse`: `[W]`, natural, −∞ for a rank without tokens, whose output is not read;
/// `out`: `[D]`, in `dtype`. With g = ln Σ_r exp(lse_r): out = Σ_r exp(lse_r − g) · outputs_r. NaN and +∞ in an LSE
/// count as −∞ (vLLM's sanitiser); if every LSE is −∞ the result is 0. One rank's partial is passed on untouched.
///
/// # Panics
/// If the lengths do not fit.
pub fn merge(order: MergeOrder, dtype: OutputDtype, outputs: &[f32], lse: &[f32], out: &mut [f32]) {
    let dim = out.len();
    assert_eq!(outputs.len(), lse.len() * dim);
    if lse.len() == 1 {
        out.copy_from_slice(outputs);
        return;
    }
    let weights = rank_weights(lse);
    out.fill(0.0);
    let ranks = weights.into_iter().zip(outputs.chunks_exact(dim)).filter(|(weight, _)| *weight > 0.0);
    match order {
        MergeOrder::AgRs => {
            for (weight, partial) in ranks {
                for (sum, value) in out.iter_mut().zip(partial) {
                    *sum = dtype.round(*sum + dtype.round(value * weight));
                }
            }
        }
        MergeOrder::A2a => {
            for (weight, partial) in ranks {
                for (sum, value) in out.iter_mut().zip(partial) {
                    *sum += value * weight;
                }
            }
            out.iter_mut().for_each(|sum| *sum = dtype.round(*sum));
        }
    }
}

/// exp(lse_r − g) per rank, 0 for ranks without tokens.
fn rank_weights(lse: &[f32]) -> Vec<f32> {
    let clean = |x: f32| if x.is_nan() || x == f32::INFINITY { f32::NEG_INFINITY } else { x };
    let maximum = lse.iter().copied().map(clean).fold(f32::NEG_INFINITY, f32::max);
    if maximum == f32::NEG_INFINITY {
        return vec![0.0; lse.len()];
    }
    let sum: f32 = lse.iter().map(|x| (clean(*x) - maximum).exp()).sum();
    let global = maximum + sum.ln();
    lse.iter().map(|x| (clean(*x) - global).exp()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(order: MergeOrder, dtype: OutputDtype, outputs: &[f32], lse: &[f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; outputs.len() / lse.len()];
        merge(order, dtype, outputs, lse, &mut out);
        out
    }

    #[test]
    fn a_rank_without_tokens_contributes_nothing_even_if_it_holds_nan() {
        for order in MergeOrder::ALL {
            let out = merged(order, OutputDtype::F32, &[1.0, 3.0, f32::NAN], &[0.0, 1.0, f32::NEG_INFINITY]);
            assert!((out[0] - 2.462_117_2).abs() < 1e-6, "{order}: {}", out[0]);
        }
    }

    #[test]
    fn no_tokens_anywhere_give_zero() {
        for order in MergeOrder::ALL {
            let out = merged(order, OutputDtype::F32, &[f32::NAN; 4], &[f32::NEG_INFINITY; 2]);
            assert_eq!(out, [0.0, 0.0]);
        }
    }

    #[test]
    fn large_and_small_lse_do_not_overflow() {
        let out = merged(MergeOrder::A2a, OutputDtype::F32, &[2.0, 4.0], &[1000.0, 1000.0]);
        assert!((out[0] - 3.0).abs() < 1e-3);
        let out = merged(MergeOrder::A2a, OutputDtype::F32, &[2.0, 4.0], &[-1000.0, -2000.0]);
        assert!((out[0] - 2.0).abs() < 1e-3);
    }

    #[test]
    fn one_rank_is_passed_on_untouched() {
        let out = merged(MergeOrder::AgRs, OutputDtype::F32, &[1.1, -0.3], &[f32::NAN]);
        assert_eq!(out, [1.1, -0.3]);
    }

    #[test]
    fn orders_agree_in_f32_and_differ_in_bf16_where_roundings_do() {
        let outputs: Vec<f32> = (0..64).map(|i| OutputDtype::Bf16.round((i as f32 * 0.731).sin())).collect();
        let lse = [0.1, 0.9, -0.4, 0.2];
        let run = |order, dtype| merged(order, dtype, &outputs, &lse);
        let reference = run(MergeOrder::A2a, OutputDtype::F32);
        let worst =
            |seen: &[f32]| seen.iter().zip(&reference).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst(&run(MergeOrder::AgRs, OutputDtype::F32)) < 1e-6);
        let (once, often) = (
            worst(&run(MergeOrder::A2a, OutputDtype::Bf16)),
            worst(&run(MergeOrder::AgRs, OutputDtype::Bf16)),
        );
        assert!(once > 1e-5 && once <= 0.004, "one rounding: {once}");
        assert!(often > once && often <= 0.012, "a rounding per rank: {often}, once {once}");
    }

    #[test]
    fn names_lead_back_to_orders() {
        for order in MergeOrder::ALL {
            assert_eq!(order.name().parse(), Ok(order));
        }
    }
}
