//! Expected results together with their bounds.

use super::accumulation::HalfUlp;
use super::output::{StateBound, Terms, bound_state};
use crate::attention::plain::{Element, Problem};
use crate::layout::Layout;
use crate::moments::{Moments, Passes, Underivable};
use crate::split::Split;
use crate::visibility::Visible;
use shardcheck_formats::codec::round;
use shardcheck_formats::contract::Contract;
use shardcheck_formats::dtype::Dtype;

/// What one rank may return.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CertifiedPart {
    /// `[rows, heads, v_dim]`: exact partial output; zero where the rank sees no token.
    pub out: Vec<f64>,
    /// `[rows, heads]`: exact natural LSE; −inf where the rank sees no token.
    pub lse: Vec<f64>,
    /// `[rows, heads]`: merge weight, `e^(lse − row's lse)`.
    pub weight: Vec<f64>,
    /// `[rows, heads, v_dim]`: bound on the partial output, its rounding to the contract's partial format
    /// included.
    pub pre: Vec<f64>,
    /// `[rows, heads]`: certified bound on the LSE.
    pub lse_bound: Vec<f64>,
    /// `[rows, heads]`: practical bound on the LSE, where its gate holds.
    pub practical_lse_bound: Vec<Option<f64>>,
}

/// What a conforming engine may return.
#[derive(Debug, Clone, PartialEq)]
pub struct Certified {
    /// Query rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Length of an output vector.
    pub v_dim: usize,
    /// Number of parts that are merged.
    pub world: usize,
    /// `[rows, heads, v_dim]`: exact output.
    pub out: Vec<f64>,
    /// `[rows, heads]`: exact natural LSE.
    pub lse: Vec<f64>,
    /// `[rows, heads, v_dim]`: bound on the output before its final rounding.
    pub pre: Vec<f64>,
    /// `[rows, heads]`: certified bound on the LSE.
    pub lse_bound: Vec<f64>,
    /// `[rows, heads]`: practical bound on the LSE: tighter, calibrated instead of proved, `None` where it must
    /// not be used (then take `lse_bound`).
    pub practical_lse_bound: Vec<Option<f64>>,
    /// `[world]`.
    pub partials: Vec<CertifiedPart>,
    /// `[rows, heads]`: the terms of `pre`, where they were asked for.
    pub terms: Option<Vec<Terms>>,
}

impl Certified {
    /// The values that `output` may hold: [`interval`] of every element, as `(lo, hi)`.
    pub fn intervals(&self, output: Dtype) -> Vec<(f64, f64)> {
        self.out.iter().zip(&self.pre).map(|(out, pre)| interval(*out, *pre, output)).collect()
    }
}

/// The interval of values in `dtype` that an exact value of `out`, wrong by at most `pre`, may round to:
/// `(RN(out − pre), RN(out + pre))`. Rounding is monotone, so this is exact.
pub fn interval(out: f64, pre: f64, dtype: Dtype) -> (f64, f64) {
    (round(dtype, out - pre), round(dtype, out + pre))
}

/// How much of its interval an observed value uses: `|observed − out|` over the distance from `out` to the end of
/// the interval on that side; above 1 iff the value lies outside. 0 where the value is exact, infinite where it
/// is NaN.
pub fn ratio(observed: f64, out: f64, lo: f64, hi: f64) -> f64 {
    if observed.is_nan() {
        return f64::INFINITY;
    }
    if observed == out {
        return 0.0;
    }
    let reach = if observed > out { hi - out } else { out - lo };
    let used = (observed - out).abs() / reach;
    // with an interval of one value the reach may round to the other side of that value
    match (lo <= observed && observed <= hi, used) {
        (true, used) if used >= 0.0 => used.min(1.0),
        (true, _) => 1.0,
        (false, used) if used > 1.0 => used,
        (false, _) => f64::INFINITY,
    }
}

/// The bound of every result of a problem sharded as `layout`, row `i` seeing `visible[i]`.
///
/// # Errors
/// [`Underivable`]: then the case is inconclusive.
///
/// # Panics
/// The shapes do not fit.
pub fn certify<T: Element>(
    problem: &Problem<T>,
    layout: &Layout,
    visible: &[Visible],
    contract: &Contract,
) -> Result<Certified, Underivable> {
    certify_split(problem, Split::Ranks(layout), visible, contract)
}

/// The same of a problem whose parts are those of `split`.
///
/// # Errors
/// [`Underivable`]: then the case is inconclusive.
///
/// # Panics
/// The shapes do not fit.
pub fn certify_split<T: Element>(
    problem: &Problem<T>,
    split: Split,
    visible: &[Visible],
    contract: &Contract,
) -> Result<Certified, Underivable> {
    let passes = Passes::needed_by(contract);
    certify_moments(&Moments::collect(problem, split, visible, passes)?, contract, false)
}

/// The bound from moments that were taken before, with the terms if `keep_terms`.
///
/// # Errors
/// [`Underivable`].
pub fn certify_moments(
    moments: &Moments,
    contract: &Contract,
    keep_terms: bool,
) -> Result<Certified, Underivable> {
    let mut certified = Certified::empty(moments, keep_terms);
    for row in 0..moments.rows {
        for head in 0..moments.heads {
            let bound = bound_state(moments, contract, row, head)?;
            certified.push(moments, contract, row * moments.heads + head, bound);
        }
    }
    Ok(certified)
}

impl Certified {
    /// Without any state yet.
    pub(super) fn empty(moments: &Moments, keep_terms: bool) -> Self {
        Self {
            rows: moments.rows,
            heads: moments.heads,
            v_dim: moments.v_dim,
            world: moments.parts,
            out: Vec::new(),
            lse: Vec::new(),
            pre: Vec::new(),
            lse_bound: Vec::new(),
            practical_lse_bound: Vec::new(),
            partials: vec![CertifiedPart::default(); moments.parts],
            terms: keep_terms.then(Vec::new),
        }
    }

    /// Appends the state `index` of `moments` with its bound.
    pub(super) fn push(&mut self, moments: &Moments, contract: &Contract, index: usize, bound: StateBound) {
        let (state, half_ulp) = (&moments.states[index], HalfUlp::of(contract.partial));
        self.out.extend(&state.out);
        self.lse.push(state.lse);
        self.pre.extend(&bound.pre);
        self.lse_bound.push(bound.lse_bound);
        self.practical_lse_bound.push(bound.practical_lse_bound);
        for ((certified, part), bound) in self.partials.iter_mut().zip(&state.parts).zip(bound.parts) {
            certified.out.extend(&part.out);
            certified.lse.push(part.lse);
            certified.weight.push(part.weight);
            certified
                .pre
                .extend(part.out.iter().zip(&bound.pre).map(|(out, pre)| pre + half_ulp.at(out.abs() + pre)));
            certified.lse_bound.push(bound.lse_bound);
            certified.practical_lse_bound.push(bound.practical_lse_bound);
        }
        if let Some(terms) = &mut self.terms {
            terms.push(bound.terms);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::plain::Values;
    use crate::bound::U32;
    use shardcheck_formats::contract::{Depth, Merge};

    #[test]
    fn an_interval_rounds_its_ends_to_the_format() {
        assert_eq!(interval(1.0, 0.003, Dtype::Bf16), (0.99609375, 1.0));
        assert_eq!(interval(1.0, 0.0, Dtype::Bf16), (1.0, 1.0));
    }

    #[test]
    fn a_ratio_of_one_is_the_end_of_the_interval() {
        let (lo, hi) = interval(1.0, 0.01, Dtype::Bf16);
        assert_eq!(ratio(hi, 1.0, lo, hi), 1.0);
        assert_eq!(ratio(1.0, 1.0, lo, hi), 0.0);
        assert!(ratio(hi.next_up(), 1.0, lo, hi) > 1.0);
        assert!(ratio(lo.next_down(), 1.0, lo, hi) > 1.0);
    }

    #[test]
    fn nan_uses_more_than_any_interval() {
        assert_eq!(ratio(f64::NAN, 0.0, -1.0, 1.0), f64::INFINITY);
    }

    #[test]
    fn a_value_that_rounds_past_its_exact_value_is_inside() {
        // exact 1.001 with no error at all: bf16 can only say 1.0
        let (lo, hi) = interval(1.001, 0.0, Dtype::Bf16);
        assert_eq!((lo, hi), (1.0, 1.0));
        assert!(ratio(1.0, 1.001, lo, hi) <= 1.0);
        assert!(ratio(1.0078125, 1.001, lo, hi) > 1.0);
        assert!(ratio(0.99609375, 1.001, lo, hi) > 1.0);
    }

    /// A first token with all the weight and no value, and one whose probability no 32-bit format holds.
    fn vanishing(depth: Depth, tokens: usize) -> Certified {
        let contract = Contract { depth, ..Contract::bf16_default(Merge::A2a) };
        let (mut key, mut value) = (vec![-100.0f32; tokens], vec![1.0f32; tokens]);
        (key[0], value[0]) = (0.0, 0.0);
        let problem = Problem::new(1, 1, 1, 1, 1.0, &[1.0], &key, Values::Separate(&value));
        certify(&problem, &Layout::new(2, tokens, tokens).unwrap(), &[Visible::Prefix(tokens)], &contract)
            .unwrap()
    }

    #[test]
    fn probabilities_that_underflow_may_be_missing_from_a_partial_as_from_the_output() {
        let certified = vanishing(Depth::PerTile { tile: 16, extra: 16 }, 2);
        let exact = certified.out[0];
        assert!(exact > 0.0 && exact < f64::from(f32::MIN_POSITIVE), "{exact:e}");
        assert!(certified.pre[0] >= exact && certified.partials[0].pre[0] >= exact);
    }

    #[test]
    fn every_element_has_the_interval_of_its_own_bound() {
        let (query, key, value) = ([1.0], [0.3, -0.2, 1.0], [2.0, -5.0, 0.5]);
        let problem = Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::Separate(&value));
        let contract = Contract::bf16_default(Merge::A2a);
        let certified = certify(&problem, &Layout::single(), &[Visible::Prefix(3)], &contract).unwrap();
        let expected = interval(certified.out[0], certified.pre[0], Dtype::Bf16);
        assert_eq!(certified.intervals(Dtype::Bf16), [expected]);
        assert!(expected.0 < certified.out[0] && certified.out[0] < expected.1, "{expected:?}");
    }

    #[test]
    fn a_practical_bound_knows_of_sums_that_go_one_after_another() {
        let practical = |depth| vanishing(depth, 4096).practical_lse_bound[0].unwrap();
        let (blocked, sequential) =
            (practical(Depth::PerTile { tile: 16, extra: 16 }), practical(Depth::Any));
        assert!(sequential > blocked + 300.0 * U32, "{blocked:e} {sequential:e}");
    }
}
