//! Rules by which outputs are accepted: ours, and those of published tests, side by side.

use std::fmt;
use std::str::FromStr;

use shardcheck_formats::{Dtype, round_bf16};
use shardcheck_references::attention::plain::Problem;
use shardcheck_references::bound::{Certified, interval};
use shardcheck_references::statistics::{Detector, Examination};
use shardcheck_references::visibility::Visible;

use super::simulation::Simulated;
use super::within;

/// A rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scheme {
    /// The certified interval of every element.
    Certified,
    /// The probable interval of every element.
    Probable,
    /// `|error| ≤ 1e-2(1 + |expected|)`.
    Fixed1,
    /// `|error| ≤ 2e-2(1 + |expected|)`.
    Fixed2,
    /// FlashAttention: largest error at most twice that of the same attention in bf16, plus rounding.
    Twice,
    /// aiter: at most 5 % of elements beyond 1e-2(1 + |expected|).
    FivePercent,
    /// Relative error in the Frobenius norm above 1e-2.
    Frobenius,
    /// Cosine distance above 1e-5.
    Cosine,
    /// Mean squared deviation of the case, or of a state.
    ChiSquare,
    /// Matched filter of a token or a block.
    Token,
    /// Matched filter of a rank's LSE.
    Rank,
    /// Matched filter of the scale of values or keys.
    Scale,
    /// The bound of the merged LSE and of every rank's.
    Lse,
    /// What a case is failed for: the certified interval, the LSE, or a finding in the residual.
    Combined,
}

impl Scheme {
    /// All of them, in the order of a table.
    pub const ALL: [Self; 14] = [
        Self::Certified,
        Self::Probable,
        Self::Fixed1,
        Self::Fixed2,
        Self::Twice,
        Self::FivePercent,
        Self::Frobenius,
        Self::Cosine,
        Self::ChiSquare,
        Self::Token,
        Self::Rank,
        Self::Scale,
        Self::Lse,
        Self::Combined,
    ];

    /// Heading of its column.
    pub fn name(self) -> &'static str {
        match self {
            Self::Certified => "B",
            Self::Probable => "B_prob",
            Self::Fixed1 => "1e-2",
            Self::Fixed2 => "2e-2",
            Self::Twice => "FA-2x",
            Self::FivePercent => "aiter-5%",
            Self::Frobenius => "relFro>1e-2",
            Self::Cosine => "cos>1e-5",
            Self::ChiSquare => "chi2",
            Self::Token => "token-z",
            Self::Rank => "rank-z",
            Self::Scale => "scale-z",
            Self::Lse => "LSE",
            Self::Combined => "combined",
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Scheme {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|scheme| scheme.name() == text).ok_or_else(|| {
            format!("unknown scheme {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// What the rules need to know of one answer.
pub struct Answer<'a> {
    /// What the engine returned.
    pub seen: &'a Simulated,
    /// Exact values and certified bounds.
    pub certified: &'a Certified,
    /// Probable bound of every element, where it was made.
    pub probable: Option<&'a [f64]>,
    /// Its residual.
    pub examination: &'a Examination,
    /// Largest error that FlashAttention's rule allows, where it was made.
    pub twice: Option<f64>,
    /// Format of the outputs.
    pub output: Dtype,
}

impl Answer<'_> {
    /// Whether a rule rejects the answer.
    pub fn is_rejected_by(&self, scheme: Scheme) -> bool {
        match scheme {
            Scheme::Certified => self.is_outside(&self.certified.pre),
            Scheme::Probable => self.probable.is_some_and(|pre| self.is_outside(pre)),
            Scheme::Fixed1 => self.share_beyond(1e-2) > 0.0,
            Scheme::Fixed2 => self.share_beyond(2e-2) > 0.0,
            Scheme::Twice => self.twice.is_some_and(|limit| !within(self.largest_error(), limit)),
            Scheme::FivePercent => self.share_beyond(1e-2) > 0.05,
            Scheme::Frobenius => !within(self.relative_norm(), 1e-2),
            Scheme::Cosine => !within(self.cosine_distance(), 1e-5),
            Scheme::ChiSquare => self.alarms(&[Detector::ChiSquare, Detector::RowChiSquare]),
            Scheme::Token => self.alarms(&[Detector::Token, Detector::Block]),
            Scheme::Rank => self.alarms(&[Detector::RankLse]),
            Scheme::Scale => self.alarms(&[Detector::ValueScale, Detector::KeyScale]),
            Scheme::Lse => self.lse_is_outside(),
            Scheme::Combined => {
                self.is_outside(&self.certified.pre) || self.lse_is_outside() || self.alarms(&Detector::ALL)
            }
        }
    }

    fn pairs(&self) -> impl Iterator<Item = (f64, f64)> {
        self.seen.out.iter().copied().zip(self.certified.out.iter().copied())
    }

    fn is_outside(&self, pre: &[f64]) -> bool {
        self.pairs().zip(pre).any(|((seen, out), pre)| {
            let (low, high) = interval(out, *pre, self.output);
            !(low <= seen && seen <= high)
        })
    }

    fn share_beyond(&self, tolerance: f64) -> f64 {
        let beyond =
            self.pairs().filter(|(seen, out)| !within((seen - out).abs(), tolerance * (1.0 + out.abs())));
        beyond.count() as f64 / self.seen.out.len().max(1) as f64
    }

    fn largest_error(&self) -> f64 {
        self.pairs().map(|(seen, out)| (seen - out).abs()).fold(0.0, |a, b| if a > b { a } else { b })
    }

    fn relative_norm(&self) -> f64 {
        let error: f64 = self.pairs().map(|(seen, out)| (seen - out).powi(2)).sum();
        let size: f64 = self.pairs().map(|(_, out)| out * out).sum();
        (error / size).sqrt()
    }

    /// `1 − 2Σxy/Σ(x² + y²)`, as aiter and FlashMLA compute it.
    fn cosine_distance(&self) -> f64 {
        let product: f64 = self.pairs().map(|(x, y)| x * y).sum();
        let size: f64 = self.pairs().map(|(x, y)| x * x + y * y).sum();
        1.0 - 2.0 * product / size
    }

    fn alarms(&self, detectors: &[Detector]) -> bool {
        self.examination.alarms().iter().any(|alarm| detectors.contains(&alarm.detector))
    }

    fn lse_is_outside(&self) -> bool {
        let beyond = |seen: f64, exact: f64, bound: f64, practical: Option<f64>| {
            seen != exact && !within((seen - exact).abs(), practical.unwrap_or(bound))
        };
        let certified = self.certified;
        let merged = self.seen.lse.iter().zip(&certified.lse).enumerate();
        let mut any = merged.into_iter().any(|(state, (seen, exact))| {
            beyond(*seen, *exact, certified.lse_bound[state], certified.practical_lse_bound[state])
        });
        for (seen, part) in self.seen.partials.iter().zip(&certified.partials) {
            any |= seen.lse.iter().zip(&part.lse).enumerate().any(|(state, (seen, exact))| {
                beyond(*seen, *exact, part.lse_bound[state], part.practical_lse_bound[state])
            });
        }
        any
    }
}

/// The largest error that FlashAttention's tests allow (`test_flash_attn_output`): twice that of the same attention with every
/// tensor in bf16, and twice that of adding and subtracting 0.3.
pub fn twice_the_usual_error(problem: &Problem, visible: &[Visible], exact: &[f64]) -> f64 {
    let v_dim = problem.v_dim;
    let mut largest = 0.0f64;
    let scale = problem.scale as f32;
    for (row, seen) in visible.iter().enumerate() {
        let positions: Vec<usize> = seen.positions().collect();
        for head in 0..problem.heads {
            let kv_head = problem.kv_head(head);
            let query = problem.query_at(row, head);
            let scores: Vec<f32> = positions
                .iter()
                .map(|&token| {
                    let key = problem.key_at(token, kv_head);
                    let products = query.iter().zip(key).map(|(q, k)| q * round_bf16(k * scale));
                    round_bf16(products.sum())
                })
                .collect();
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum: f32 = weights.iter().sum();
            let mut out = vec![0.0f32; v_dim];
            for (&token, weight) in positions.iter().zip(&weights) {
                let p = round_bf16(weight / sum);
                out.iter_mut().zip(problem.value_at(token, kv_head)).for_each(|(out, v)| *out += p * v);
            }
            let base = (row * problem.heads + head) * v_dim;
            for (out, exact) in out.iter().zip(&exact[base..base + v_dim]) {
                largest = largest.max((f64::from(round_bf16(*out)) - exact).abs());
            }
        }
    }
    let shifted = |exact: &f64| {
        let exact = round_bf16(*exact as f32);
        f64::from((round_bf16(round_bf16(exact + 0.3) - 0.3) - exact).abs())
    };
    2.0 * largest + 2.0 * exact.iter().map(shifted).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::inputs::{CacheFormat, Family, Shape, Tensors};
    use crate::bench::simulation::{Knobs, Tampering, simulate};
    use shardcheck_formats::{Contract, Merge};
    use shardcheck_references::bound::certify;
    use shardcheck_references::layout::Layout;
    use shardcheck_references::statistics::Model;

    const SHAPE: Shape =
        Shape { rows: 2, heads: 4, kv_heads: 2, qk_dim: 64, v_dim: 128, latent: false, tokens: 200 };

    fn rejected(change: impl Fn(&mut Simulated)) -> Vec<Scheme> {
        let tensors = Tensors::drawn(Family::Gauss, SHAPE, CacheFormat::BF16, 4);
        let (problem, layout) = (tensors.problem(), Layout::new(4, 1, 1).unwrap());
        let visible = Visible::causal(200, 2);
        let contract = Contract::bf16_default(Merge::A2a);
        let engine = (&contract, &Knobs::USUAL);
        let mut seen = simulate(&problem, &layout, &visible, engine, &Tampering::default(), 1);
        change(&mut seen);
        let certified = certify(&problem, &layout, &visible, &contract).unwrap();
        let model = Model::new(&problem, &layout, &visible, &contract).unwrap();
        let answer = Answer {
            seen: &seen,
            certified: &certified,
            probable: Some(&model.probable().pre),
            examination: &model.examine(&seen.out).unwrap(),
            twice: Some(twice_the_usual_error(&problem, &visible, &certified.out)),
            output: Dtype::Bf16,
        };
        Scheme::ALL.into_iter().filter(|scheme| answer.is_rejected_by(*scheme)).collect()
    }

    #[test]
    fn no_rule_but_cosine_rejects_a_conforming_answer() {
        let schemes = rejected(|_| {});
        assert!(schemes.iter().all(|scheme| *scheme == Scheme::Cosine), "{schemes:?}");
    }

    #[test]
    fn a_gross_error_is_rejected_by_all_rules_for_outputs_and_one_far_off_element_by_those_for_elements() {
        let schemes = rejected(|seen| seen.out.iter_mut().for_each(|x| *x *= 2.0));
        let expected: Vec<Scheme> = Scheme::ALL
            .into_iter()
            .filter(|scheme| !matches!(scheme, Scheme::Lse | Scheme::Token | Scheme::Rank))
            .filter(|scheme| schemes.contains(scheme))
            .collect();
        assert_eq!(expected.len(), 11, "{schemes:?}");
        let one = rejected(|seen| seen.out[7] += 0.5);
        assert!(one.contains(&Scheme::Certified) && one.contains(&Scheme::Fixed2), "{one:?}");
        assert!(!one.contains(&Scheme::FivePercent) && !one.contains(&Scheme::Lse), "{one:?}");
    }

    #[test]
    fn an_lse_that_is_off_is_rejected_by_its_rule_alone() {
        let merged = rejected(|seen| seen.lse[3] += 1e-3);
        assert!(merged.contains(&Scheme::Lse) && !merged.contains(&Scheme::Certified), "{merged:?}");
        let partial = rejected(|seen| seen.partials[2].lse[1] -= 1e-3);
        assert!(partial.contains(&Scheme::Lse) && partial.contains(&Scheme::Combined), "{partial:?}");
    }

    #[test]
    fn rules_are_known_by_name() {
        for scheme in Scheme::ALL {
            assert_eq!(scheme.to_string().parse(), Ok(scheme));
        }
        assert!("psnr".parse::<Scheme>().is_err());
    }
}
