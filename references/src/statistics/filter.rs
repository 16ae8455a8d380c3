//! A matched filter: how much of a template a residual holds.

/// Sums over states and dimensions; filters of the same template over different states add up.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Filter {
    /// `⟨ρ, τ⟩` with `ρ = (out − o)/σ²`.
    pub product: f64,
    /// `⟨τ, τ/σ²⟩`.
    pub energy: f64,
    /// Variance of the product beyond `energy`: roundings of single probabilities, which hit all dimensions alike.
    pub coherent: f64,
}

impl Filter {
    /// The same template over further states.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            product: self.product + other.product,
            energy: self.energy + other.energy,
            coherent: self.coherent + other.coherent,
        }
    }

    /// `⟨ρ, τ⟩ / √(⟨τ, τ/σ²⟩ + coherent)`: standard normal in a conforming engine; 0 for a template that is zero.
    pub fn score(&self) -> f64 {
        if self.energy > 0.0 { self.product / (self.energy + self.coherent).sqrt() } else { 0.0 }
    }

    /// `⟨ρ, τ⟩ / ⟨τ, τ/σ²⟩`: the multiple of the template that the residual holds; 0 for a template that is zero.
    pub fn amplitude(&self) -> f64 {
        if self.energy > 0.0 { self.product / self.energy } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_residual_that_is_a_multiple_of_the_template_has_that_amplitude() {
        let (sigma, template) = ([0.5, 2.0, 1.0], [3.0, -1.0, 0.25]);
        let mut filter = Filter::default();
        for (s, t) in sigma.iter().zip(template) {
            filter = filter.and(Filter {
                product: -0.7 * t * t / (s * s),
                energy: t * t / (s * s),
                coherent: 0.0,
            });
        }
        approx::assert_relative_eq!(filter.amplitude(), -0.7, epsilon = 1e-15);
        approx::assert_relative_eq!(filter.score(), -0.7 * filter.energy.sqrt(), epsilon = 1e-15);
    }

    #[test]
    fn variances_of_further_states_add_up_and_lower_the_score() {
        let one = Filter { product: 6.0, energy: 4.0, coherent: 5.0 };
        let both = one.and(Filter { product: 4.0, energy: 8.0, coherent: 8.0 });
        assert_eq!(both, Filter { product: 10.0, energy: 12.0, coherent: 13.0 });
        assert_eq!((one.score(), both.score(), one.amplitude()), (2.0, 2.0, 1.5));
    }

    #[test]
    fn a_template_of_zero_says_nothing() {
        assert_eq!((Filter::default().score(), Filter::default().amplitude()), (0.0, 0.0));
    }
}
