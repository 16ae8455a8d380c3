//! The exact one-sided McNemar test on discordant pairs, and its power.

use super::binomial::LogFactorials;

/// The p-value of `worse` pairs right only in A against `better` pairs right only in B.
///
/// Under equal quality each discordant pair falls on either side with probability ½, so the p-value is
/// `P(X ≥ worse)` for `X ~ Binomial(worse + better, ½)` (McNemar 1947, exact form). It holds as well for pairs
/// of several runs over the same questions, since every pair is symmetric by itself.
pub fn p_value(worse: u64, better: u64) -> f64 {
    let discordant = worse + better;
    LogFactorials::up_to(discordant).at_least(discordant, worse, 0.5)
}

/// The smallest number of pairs right only in A that is significant among `discordant` pairs.
///
/// `None` when even all of them would not be.
pub fn critical_count(discordant: u64, alpha: f64) -> Option<u64> {
    critical_with(&LogFactorials::up_to(discordant), discordant, alpha)
}

/// The probability that the test at level `alpha` finds a drop, for `pairs` questions.
///
/// `churn` is the share of questions that change between two runs of equal quality, half of them each way;
/// `drop` is added to the side that gets worse.
pub fn power(pairs: u64, churn: f64, drop: f64, alpha: f64) -> f64 {
    power_with(&LogFactorials::up_to(pairs), pairs, churn, drop, alpha)
}

pub(super) fn power_with(table: &LogFactorials, pairs: u64, churn: f64, drop: f64, alpha: f64) -> f64 {
    let (worse, better) = (0.5 * churn + drop, 0.5 * churn);
    let discordance = worse + better;
    if discordance <= 0.0 {
        return 0.0;
    }
    let share = worse / discordance;
    let expected = pairs as f64 * discordance;
    let spread = 12.0 * (expected + 1.0).sqrt();
    let from = (expected - spread).max(0.0) as u64;
    let to = ((expected + spread) as u64).min(pairs);
    (from..=to)
        .map(|discordant| {
            critical_with(table, discordant, alpha).map_or(0.0, |critical| {
                table.probability(pairs, discordant, discordance)
                    * table.at_least(discordant, critical, share)
            })
        })
        .sum()
}

fn critical_with(table: &LogFactorials, discordant: u64, alpha: f64) -> Option<u64> {
    let mut tail = 0.0;
    let mut critical = None;
    for count in (0..=discordant).rev() {
        tail += table.probability(discordant, count, 0.5);
        if tail > alpha {
            break;
        }
        critical = Some(count);
    }
    critical
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_significant_splits_are_the_tabulated_ones() {
        let table = [(10, 10), (20, 16), (26, 20), (30, 22), (42, 29), (60, 40), (70, 46)];
        for (discordant, critical) in table {
            assert_eq!(critical_count(discordant, 0.01), Some(critical));
            assert!(p_value(critical, discordant - critical) <= 0.01);
            assert!(p_value(critical - 1, discordant + 1 - critical) > 0.01);
        }
        assert_eq!(critical_count(6, 0.01), None);
        assert_eq!(critical_count(7, 0.01), Some(7));
    }

    #[test]
    fn no_discordant_pair_is_no_evidence() {
        assert_eq!(p_value(0, 0), 1.0);
        assert_eq!(power(1319, 0.0, 0.0, 0.01), 0.0);
    }

    #[test]
    fn without_a_drop_the_test_rejects_less_often_than_its_level() {
        for churn in [0.005, 0.02, 0.053, 0.3] {
            let size = power(1319, churn, 0.0, 0.01);
            assert!(size > 0.001 && size <= 0.01, "churn {churn}: {size}");
        }
    }
}
