//! Selection of the tokens that a row attends to: scores of an indexer, and which sets of tokens they allow.
//!
//! Score of a row for a token (DeepSeek-V3.2, `fp8_mqa_logits`): Σ_h w_h·relu(q_h·k)·scale. A score that an engine forms in 32 bits may
//! lie anywhere in an interval around the exact one, so a set is right if *some* scores within the intervals make it the best: near the
//! cut, and where relu makes scores equal, several are.

use shardcheck_formats::{Contract, Dtype};

use crate::bound::{TINY32, U32, gamma};

/// An exact score, and how far an engine's may be from it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Σ w·relu(q·k)·scale.
    pub value: f64,
    /// Absolute bound on the error.
    pub error: f64,
}

impl Score {
    /// A score that an engine holds exactly.
    pub fn exact(value: f64) -> Self {
        Self { value, error: 0.0 }
    }

    fn low(&self) -> f64 {
        self.value - self.error
    }

    fn high(&self) -> f64 {
        self.value + self.error
    }
}

/// What a key is scored by: the heads of one row.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a, T> {
    /// Query heads, `[I, D]`.
    pub query: &'a [T],
    /// Weight of each head, `[I]`.
    pub weights: &'a [T],
}

/// Score of a key `[D]` with its scale.
///
/// Bound: the product of two 8- or 16-bit numbers is exact in 32 bits, their sum has γ(D, u) of the magnitudes; relu moves no two numbers
/// apart; product by the weight, sum over I heads and product by the scale (before or after relu, which is the same for a scale above 0)
/// have γ(I + 2, u) of what is added up. A format of scores that is coarser than 32 bits rounds once more.
pub fn score<T: Copy + Into<f64>>(heads: &Heads<'_, T>, key: &[T], scale: f64, contract: &Contract) -> Score {
    let (width, count) = (key.len(), heads.weights.len());
    let of_dot = gamma(width, contract.u_acc);
    let (mut value, mut from_dots, mut size, mut steepest) = (0.0, 0.0, 0.0, 0.0f64);
    for (query, weight) in heads.query.chunks_exact(width).zip(heads.weights) {
        let (mut dot, mut magnitude) = (0.0, 0.0);
        for (q, k) in query.iter().zip(key) {
            let product: f64 = (*q).into() * (*k).into();
            dot += product;
            magnitude += product.abs();
        }
        let (weight, error): (f64, f64) = ((*weight).into(), of_dot * magnitude);
        value += weight * dot.max(0.0);
        from_dots += weight.abs() * error;
        // a head that is below zero for every rounding adds nothing
        size += weight.abs() * (dot + error).max(0.0);
        steepest = steepest.max(weight.abs());
    }
    let sums = gamma(count + 2, contract.u_acc.max(U32));
    let flushed = TINY32 * (count * (width + 3)) as f64 * (1.0 + steepest);
    let mut error = scale * (from_dots + sums * (size + from_dots) + flushed) + TINY32;
    value *= scale;
    if contract.output.unit_roundoff() > Dtype::F32.unit_roundoff() {
        error += contract.output.unit_roundoff() * (value.abs() + error);
    }
    // what 64 bits lose here
    error += 1e-15 * (width + count) as f64 * scale * size;
    Score { value, error }
}

/// Why a set of tokens is not the best: a token that is missing, and one that has its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// Token outside the set.
    pub missing: usize,
    /// Token in it whose score can't reach that of the missing one.
    pub instead: usize,
}

/// Whether some scores within the bounds make `set` the best of `candidates` of its size.
///
/// # Errors
/// The two tokens between which it fails: the best that is missing, the worst that is there.
pub fn admits(scores: &[Score], candidates: &[usize], set: &[usize]) -> Result<(), Refusal> {
    let mut chosen = vec![false; scores.len()];
    set.iter().for_each(|token| chosen[*token] = true);
    let worst = set.iter().copied().min_by(|a, b| scores[*a].high().total_cmp(&scores[*b].high()));
    let outside = candidates.iter().copied().filter(|token| !chosen[*token]);
    let best = outside.max_by(|a, b| scores[*a].low().total_cmp(&scores[*b].low()));
    match (worst, best) {
        (Some(instead), Some(missing)) if scores[missing].low() > scores[instead].high() => {
            Err(Refusal { missing, instead })
        }
        _ => Ok(()),
    }
}

/// The `k` best of `candidates`, the best first; of equal ones the lower position first.
pub fn best(values: &[f64], candidates: &[usize], k: usize) -> Vec<usize> {
    let mut order = candidates.to_vec();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
    order.truncate(k);
    order
}

/// Tokens among the `k` best of `candidates` whatever the rounding: those that fewer than k others can reach.
pub fn certain(scores: &[Score], candidates: &[usize], k: usize) -> Vec<usize> {
    let mut highs: Vec<f64> = candidates.iter().map(|token| scores[*token].high()).collect();
    highs.sort_by(f64::total_cmp);
    let reaching = |low: f64| highs.len() - highs.partition_point(|high| *high < low);
    // each reaches itself
    candidates.iter().copied().filter(|token| reaching(scores[*token].low()) <= k).collect()
}

#[cfg(test)]
mod tests;
