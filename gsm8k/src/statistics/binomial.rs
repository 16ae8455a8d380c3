//! The binomial distribution, exactly: point probabilities, tails, and the Clopper–Pearson limits.

/// Natural logarithms of factorials up to a fixed number, computed once.
#[derive(Debug, Clone)]
pub struct LogFactorials(Vec<f64>);

impl LogFactorials {
    /// The logarithms of `0!` to `max!`.
    pub fn up_to(max: u64) -> Self {
        let mut logs = vec![0.0];
        let mut sum = 0.0;
        let mut carry = 0.0;
        for k in 1..=max {
            // compensated (Kahan), so that the last digits do not drift over thousands of terms
            let term = (k as f64).ln() - carry;
            let next = sum + term;
            carry = (next - sum) - term;
            sum = next;
            logs.push(sum);
        }
        Self(logs)
    }

    /// `P(X = k)` for `X ~ Binomial(n, p)`.
    ///
    /// # Panics
    /// When `n` exceeds the table or `k` exceeds `n`.
    pub fn probability(&self, n: u64, k: u64, p: f64) -> f64 {
        self.log_probability(n, k, p).exp()
    }

    /// `P(X ≥ k)` for `X ~ Binomial(n, p)`.
    ///
    /// # Panics
    /// When `n` exceeds the table.
    pub fn at_least(&self, n: u64, k: u64, p: f64) -> f64 {
        if k == 0 {
            return 1.0;
        }
        // Sum the smaller tail: the terms of the other nearly cancel against 1.
        if k as f64 > n as f64 * p { self.sum(n, k, n, p) } else { 1.0 - self.sum(n, 0, k - 1, p) }
    }

    /// `P(X ≤ k)` for `X ~ Binomial(n, p)`.
    ///
    /// # Panics
    /// When `n` exceeds the table.
    pub fn at_most(&self, n: u64, k: u64, p: f64) -> f64 {
        if k >= n {
            return 1.0;
        }
        if (k as f64) < n as f64 * p { self.sum(n, 0, k, p) } else { 1.0 - self.sum(n, k + 1, n, p) }
    }

    fn sum(&self, n: u64, from: u64, to: u64, p: f64) -> f64 {
        if from > to { 0.0 } else { (from..=to).map(|k| self.probability(n, k, p)).sum() }
    }

    fn log_probability(&self, n: u64, k: u64, p: f64) -> f64 {
        assert!(k <= n, "{k} of {n}");
        let (hits, misses) = (k as f64, (n - k) as f64);
        let choose = self.0[n as usize] - self.0[k as usize] - self.0[(n - k) as usize];
        // 0·ln 0 is 0: an impossible event that was not observed costs nothing
        let hit_term = if k == 0 { 0.0 } else { hits * p.ln() };
        let miss_term = if k == n { 0.0 } else { misses * (-p).ln_1p() };
        choose + hit_term + miss_term
    }
}

/// The one-sided lower confidence limit of a probability after `k` hits in `n` (Clopper & Pearson 1934).
///
/// The largest `p` that makes `k` or more hits no more likely than `alpha`.
pub fn lower_limit(k: u64, n: u64, alpha: f64) -> f64 {
    if k == 0 {
        return 0.0;
    }
    let table = LogFactorials::up_to(n);
    bisect(|p| table.at_least(n, k, p) < alpha)
}

/// The one-sided upper confidence limit of a probability after `k` hits in `n` (Clopper & Pearson 1934).
pub fn upper_limit(k: u64, n: u64, alpha: f64) -> f64 {
    if k == n {
        return 1.0;
    }
    let table = LogFactorials::up_to(n);
    bisect(|p| table.at_most(n, k, p) > alpha)
}

/// The point in `(0, 1)` where a predicate that holds below and fails above changes.
pub(super) fn bisect(holds: impl Fn(f64) -> bool) -> f64 {
    bisect_between(0.0, 1.0, holds)
}

/// As [`bisect`], between two given points.
pub(super) fn bisect_between(mut low: f64, mut high: f64, holds: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if holds(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails_of_a_fair_coin_are_the_counted_ones() {
        let table = LogFactorials::up_to(20);
        // 20 tosses: 1 + 20 + 190 + 1140 + 4845 of 2^20 sequences have at most four heads
        let expected = 6196.0 / 1_048_576.0;
        assert!((table.at_most(20, 4, 0.5) - expected).abs() < 1e-15);
        assert!((table.at_least(20, 16, 0.5) - expected).abs() < 1e-15);
        assert!((table.at_least(20, 4, 0.5) - (1.0 - 1351.0 / 1_048_576.0)).abs() < 1e-12);
    }

    #[test]
    fn certain_events_are_certain() {
        let table = LogFactorials::up_to(9);
        assert_eq!(table.probability(9, 0, 0.0), 1.0);
        assert_eq!(table.probability(9, 9, 1.0), 1.0);
        assert_eq!(table.at_most(9, 9, 0.3), 1.0);
        assert_eq!(table.at_least(9, 0, 0.3), 1.0);
    }

    #[test]
    fn no_hit_gives_the_rule_of_three() {
        // upper limit p with (1-p)^n = alpha
        let n = 1319;
        let expected = 1.0 - 0.01f64.powf(1.0 / n as f64);
        assert!((upper_limit(0, n, 0.01) - expected).abs() < 1e-12);
        assert_eq!(lower_limit(0, n, 0.01), 0.0);
        assert!((lower_limit(n, n, 0.01) - (1.0 - expected)).abs() < 1e-12);
    }
}
