//! Log-probabilities of tokens, from raw logits.

use crate::tokenizer::TokenId;

/// What the model said about one position. Log-probabilities are natural, of the model's own distribution: temperature
/// and truncation do not enter (vLLM's `raw_logprobs`).
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// The token that stands at the position.
    pub token: TokenId,
    /// Its log-probability.
    pub logprob: f64,
    /// 1 + the number of tokens with a larger logit.
    pub rank: usize,
    /// The most likely tokens, most likely first, lower ids first among equals.
    pub top: Vec<(TokenId, f64)>,
}

/// Log-probability and rank of `token`, and of the `top` most likely tokens. Logits must be finite; sums are f64.
pub fn token_logprob(logits: &[f32], token: TokenId, top: usize) -> TokenLogprob {
    let maximum = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from((x - maximum).exp())).sum();
    let normaliser = f64::from(maximum) + sum.ln();
    let logprob = |id: TokenId| f64::from(logits[id as usize]) - normaliser;
    let rank = 1 + logits.iter().filter(|x| **x > logits[token as usize]).count();
    let mut best: Vec<TokenId> = Vec::with_capacity(top + 1);
    for (id, logit) in (0..).zip(logits) {
        if top > 0 && (best.len() < top || *logit > logits[best[top - 1] as usize]) {
            let at = best.partition_point(|other| logits[*other as usize] >= *logit);
            best.insert(at, id);
            best.truncate(top);
        }
    }
    TokenLogprob {
        token,
        logprob: logprob(token),
        rank,
        top: best.iter().map(|id| (*id, logprob(*id))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one_and_ranks_order_them() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 1.7).sin() * 4.0).collect();
        let all: Vec<TokenLogprob> = (0..50).map(|id| token_logprob(&logits, id, 50)).collect();
        let total: f64 = all.iter().map(|t| t.logprob.exp()).sum();
        assert!((total - 1.0).abs() < 1e-6, "{total}");
        for t in &all {
            assert_eq!(t.top[t.rank - 1], (t.token, t.logprob));
            assert!(t.top.windows(2).all(|pair| pair[0].1 >= pair[1].1));
        }
    }

    #[test]
    fn equals_are_listed_by_id_and_share_a_rank() {
        let logits = [1.0, 3.0, 3.0, 0.0, 3.0];
        let seen = token_logprob(&logits, 4, 3);
        assert_eq!(seen.rank, 1);
        assert_eq!(seen.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2, 4]);
        assert!(token_logprob(&logits, 0, 0).top.is_empty());
    }
}
