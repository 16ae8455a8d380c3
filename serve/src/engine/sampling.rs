//! The choice of the next token from its logits.

use crate::tokenizer::TokenId;

/// How a token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 chooses the largest logit, the lowest id of equals; above it logits are divided by the temperature.
    pub temperature: f64,
    /// Only the k most likely tokens; 0 means all.
    pub top_k: usize,
    /// Only the most likely tokens whose probabilities reach this sum; 1 means all.
    pub top_p: f64,
    /// Seed. The draw for a position depends on seed and position alone, not on batch or speculation.
    pub seed: u64,
}

impl Sampling {
    /// The largest logit.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

    /// The token for `position` (of the whole sequence). Logits must be finite.
    pub fn choose(&self, logits: &[f32], position: usize) -> TokenId {
        if self.temperature == 0.0 {
            return argmax(logits);
        }
        let mut candidates: Vec<TokenId> = (0..logits.len() as TokenId).collect();
        let maximum = f64::from(logits[argmax(logits) as usize]);
        let weight = |id: TokenId| ((f64::from(logits[id as usize]) - maximum) / self.temperature).exp();
        if self.top_k > 0 || self.top_p < 1.0 {
            candidates.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
            if self.top_k > 0 {
                candidates.truncate(self.top_k);
            }
            let enough = self.top_p * candidates.iter().map(|id| weight(*id)).sum::<f64>();
            let mut reached = 0.0;
            let kept = candidates.iter().position(|id| {
                reached += weight(*id);
                reached >= enough
            });
            candidates.truncate(kept.map_or(candidates.len(), |last| last + 1));
        }
        let total: f64 = candidates.iter().map(|id| weight(*id)).sum();
        let target = uniform(self.seed, position as u64) * total;
        let mut reached = 0.0;
        let drawn = candidates.iter().find(|id| {
            reached += weight(**id);
            reached > target
        });
        // Rounding of the sum can leave the target just out of reach: then the last candidate it is.
        drawn.or(candidates.last()).copied().expect("a vocabulary is not empty")
    }
}

/// The largest logit's id, the lowest of equals.
fn argmax(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as TokenId
}

/// A number in [0, 1) that depends on seed and position: two rounds of SplitMix64's finaliser (Steele, Lea, Flood 2014).
fn uniform(seed: u64, position: u64) -> f64 {
    let mix = |mut x: u64| {
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    };
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let bits = mix(mix(seed.wrapping_add(GOLDEN)).wrapping_add(position.wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(sampling: Sampling, logits: &[f32], draws: usize) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        for position in 0..draws {
            counts[sampling.choose(logits, position) as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_equals() {
        assert_eq!(Sampling::GREEDY.choose(&[0.5, 2.0, 2.0, -1.0], 7), 1);
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.0, 1.0f32, -1.0, 2.0];
        let draws = 40_000;
        for temperature in [1.0, 0.5, 2.0] {
            let sampling = Sampling { temperature, seed: 3, ..Sampling::GREEDY };
            let counts = counts(sampling, &logits, draws);
            let weights = logits.map(|l| (f64::from(l) / temperature).exp());
            for (count, weight) in counts.iter().zip(weights) {
                let p = weight / weights.iter().sum::<f64>();
                let deviation = (*count as f64 - p * draws as f64) / (p * (1.0 - p) * draws as f64).sqrt();
                assert!(deviation.abs() < 4.5, "T{temperature}: {count} of {draws}, p = {p}");
            }
        }
    }

    #[test]
    fn top_k_and_top_p_leave_out_the_tail() {
        let logits = [0.0, 1.0, -1.0, 2.0]; // probabilities .087 .237 .032 .644
        let base = Sampling { temperature: 1.0, seed: 5, ..Sampling::GREEDY };
        let seen = |sampling| counts(sampling, &logits, 3000).iter().map(|c| *c > 0).collect::<Vec<_>>();
        assert_eq!(seen(base), [true; 4]);
        assert_eq!(seen(Sampling { top_k: 2, ..base }), [false, true, false, true]);
        assert_eq!(seen(Sampling { top_p: 0.9, ..base }), [true, true, false, true]);
        assert_eq!(seen(Sampling { top_p: 0.6, ..base }), [false, false, false, true]);
        assert_eq!(seen(Sampling { top_p: 1e-9, ..base }), [false, false, false, true]);
    }

    #[test]
    fn a_seed_repeats_and_another_differs() {
        let logits = [0.0f32; 64];
        let run = |seed| {
            let sampling = Sampling { temperature: 1.0, seed, ..Sampling::GREEDY };
            (0..32).map(|position| sampling.choose(&logits, position)).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }
}
