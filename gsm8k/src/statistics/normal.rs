//! The standard normal distribution: tail probability and quantile.

use std::f64::consts::{PI, SQRT_2};

/// `P(Z > z)` for a standard normal `Z`, relative accuracy about 1e-11.
pub fn upper_tail(z: f64) -> f64 {
    0.5 * erfc(z / SQRT_2)
}

/// The `z` with `P(Z > z) = tail`, for `tail` in `(0, 1)`.
///
/// Newton's method on [`upper_tail`], from a start by Abramowitz & Stegun 26.2.23.
///
/// # Panics
/// When `tail` is not strictly between 0 and 1.
pub fn upper_quantile(tail: f64) -> f64 {
    assert!(tail > 0.0 && tail < 1.0, "a quantile needs a probability strictly between 0 and 1, not {tail}");
    if tail > 0.5 {
        return -upper_quantile(1.0 - tail);
    }
    let t = (-2.0 * tail.ln()).sqrt();
    let numerator = 2.515517 + t * (0.802853 + t * 0.010328);
    let denominator = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308));
    let mut z = t - numerator / denominator;
    for _ in 0..6 {
        let density = (-0.5 * z * z).exp() / (2.0 * PI).sqrt();
        z += (upper_tail(z) - tail) / density;
    }
    z
}

/// The complementary error function: a series near zero, the continued fraction in the tail.
fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    if x < 2.0 { 1.0 - erf_series(x) } else { erfc_fraction(x) }
}

fn erf_series(x: f64) -> f64 {
    // erf(x) = 2/√π · exp(-x²) · Σ 2ⁿ x²ⁿ⁺¹ / (1·3·…·(2n+1)): all terms positive, so that nothing cancels
    let mut term = x;
    let mut sum = x;
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
        if term < 1e-17 * sum {
            break;
        }
    }
    2.0 / PI.sqrt() * (-x * x).exp() * sum
}

fn erfc_fraction(x: f64) -> f64 {
    // erfc(x) = exp(-x²)/√π · 1/(x + (1/2)/(x + (2/2)/(x + (3/2)/(x + …))))
    let mut tail = 0.0;
    for k in (1..=400).rev() {
        tail = 0.5 * f64::from(k) / (x + tail);
    }
    (-x * x).exp() / PI.sqrt() / (x + tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_quantiles_come_out_to_ten_digits() {
        // Tabulated: z(0.01) = 2.3263478740, z(0.005) = 2.5758293035, z(0.1) = 1.2815515655.
        for (tail, z) in [(0.01, 2.3263478740), (0.005, 2.5758293035), (0.1, 1.2815515655), (0.5, 0.0)] {
            assert!((upper_quantile(tail) - z).abs() < 5e-11, "{tail}: {}", upper_quantile(tail));
        }
        assert!((upper_quantile(0.99) + 2.3263478740).abs() < 5e-11);
    }

    #[test]
    fn tail_and_quantile_undo_each_other_over_many_decades() {
        for exponent in 1..60 {
            let tail = 10f64.powf(-f64::from(exponent) / 4.0);
            let back = upper_tail(upper_quantile(tail));
            assert!((back / tail - 1.0).abs() < 1e-9, "{tail:e}: {back:e}");
        }
    }

    #[test]
    fn series_and_fraction_meet_where_they_change_over() {
        let (below, above) = (1.0 - erf_series(2.0), erfc_fraction(2.0));
        assert!((below / above - 1.0).abs() < 1e-11, "{below:e} {above:e}");
    }
}
