//! Laws of emitted tokens: how far counts may be from a law, and the figures that serving reports.

/// Chance that [`largest_gap`] of counts of the law itself exceeds [`gap_bound`].
pub const FALSE_ALARM: f64 = 1e-9;

/// Largest difference of the two distribution functions: of `counts` (drawn tokens) and of `law`, tokens taken in the given order.
pub fn largest_gap(counts: &[u64], law: &[f64], order: &[usize]) -> f64 {
    let (drawn, total): (u64, f64) = (counts.iter().sum(), law.iter().sum());
    let (mut seen, mut wanted, mut gap) = (0, 0.0, 0.0f64);
    for token in order {
        seen += counts[*token];
        wanted += law[*token] / total;
        gap = gap.max((seen as f64 / drawn.max(1) as f64 - wanted).abs());
    }
    gap
}

/// Bound that [`largest_gap`] of `drawn` independent tokens exceeds with a chance of at most `alpha`: Dvoretzky, Kiefer and
/// Wolfowitz with Massart's constant, `√(ln(2/α)/(2n))`, for any law and any n.
pub fn gap_bound(drawn: u64, alpha: f64) -> f64 {
    ((2.0 / alpha).ln() / (2.0 * drawn as f64)).sqrt()
}

/// `1 + Σ accepted / requests` and `Σ accepted / Σ drafted`; the second is 0 without drafts.
pub fn statistics(accepted: &[usize], drafted: &[usize]) -> (f64, f64) {
    let (all, of) = (accepted.iter().sum::<usize>() as f64, drafted.iter().sum::<usize>() as f64);
    (1.0 + all / accepted.len().max(1) as f64, if of == 0.0 { 0.0 } else { all / of })
}

/// Unconditional acceptance rates of k drafts with a given mean acceptance length and the least variance of the length: 1 for each
/// whole accepted draft, then the rest, then 0 (forced acceptance of a benchmark).
pub fn forced_rates(mean_length: f64, drafts: usize) -> Vec<f64> {
    (0..drafts).map(|index| (mean_length - 1.0 - index as f64).clamp(0.0, 1.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_figures_come_out() {
        // lengths 0, 1 and 2 in 6.1, 13.7 and 80.3 per cent of the steps: 1.74 accepted of two drafts, 87.1 per cent
        let (mut accepted, mut drafted) = (Vec::new(), Vec::new());
        for (length, count) in [(0, 61), (1, 137), (2, 803)] {
            accepted.extend(std::iter::repeat_n(length, count));
            drafted.extend(std::iter::repeat_n(2, count));
        }
        let (mean, rate) = statistics(&accepted, &drafted);
        assert!((mean - 2.741).abs() < 1e-3 && (rate - 0.8706).abs() < 1e-3, "{mean} {rate}");
        assert_eq!(statistics(&[0, 0], &[0, 0]), (1.0, 0.0));
    }

    #[test]
    fn forced_rates_have_the_mean_that_is_asked_for() {
        let rates = forced_rates(2.6, 3);
        assert!(
            rates.iter().zip([1.0, 0.6, 0.0]).all(|(seen, wanted)| (seen - wanted).abs() < 1e-12),
            "{rates:?}"
        );
        for mean in [1.0, 1.25, 2.0, 3.99, 4.0] {
            assert!((1.0 + forced_rates(mean, 3).iter().sum::<f64>() - mean).abs() < 1e-12);
        }
    }

    #[test]
    fn a_gap_is_the_largest_difference_along_the_order() {
        assert_eq!(largest_gap(&[1, 1, 2], &[0.25, 0.25, 0.5], &[0, 1, 2]), 0.0);
        assert_eq!(largest_gap(&[4, 0, 0], &[0.25, 0.25, 0.5], &[2, 1, 0]), 0.75);
        assert!((gap_bound(10_000, 1e-9) - 0.0327).abs() < 1e-4);
    }
}
