//! Partial attention results and how they join: by their log-sum-exp, in float64.
//!
//! Two partials over disjoint token sets with LSEs `a` and `b` join to the softmax over the union with weights
//! `e^(a−g)` and `e^(b−g)`, where `g = ln(e^a + e^b)` (FlashAttention split-KV; ATOM `cp_lse_ag_out_rs`,
//! vLLM `dcp_a2a_lse_reduce`, FlashInfer `merge_state`).

/// A partial result. The neutral element is an LSE of −inf; what stands beside it in `out` is ignored.
#[derive(Debug, Clone, PartialEq)]
pub struct Partial {
    /// `[rows, heads, v_dim]`.
    pub out: Vec<f64>,
    /// `[rows, heads]`: natural log-sum-exp.
    pub lse: Vec<f64>,
}

impl Partial {
    /// The neutral element: no token at all, for `states` (rows · heads) states of `v_dim` numbers.
    pub fn empty(states: usize, v_dim: usize) -> Self {
        Self { out: vec![0.0; states * v_dim], lse: vec![f64::NEG_INFINITY; states] }
    }

    /// Numbers of one state.
    ///
    /// # Panics
    /// `out` is not a whole number of states, or there are none.
    pub fn v_dim(&self) -> usize {
        assert!(
            !self.lse.is_empty() && self.out.len().is_multiple_of(self.lse.len()),
            "out is not [states, v_dim]"
        );
        self.out.len() / self.lse.len()
    }
}

/// `ln Σ e^lse`: −inf if every entry is −inf (or there is none).
pub fn log_sum_exp(lse: impl IntoIterator<Item = f64> + Clone) -> f64 {
    let largest = lse.clone().into_iter().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return largest;
    }
    largest + lse.into_iter().map(|value| (value - largest).exp()).sum::<f64>().ln()
}

/// Joins any number of partials over disjoint token sets.
///
/// A state whose LSE is −inf in every partial comes out as zero with LSE −inf. A NaN beside an LSE of −inf is
/// ignored: engines may leave an empty shard's output undefined.
///
/// # Panics
/// There is no partial, or the shapes differ.
pub fn merge(partials: &[Partial]) -> Partial {
    let first = partials.first().expect("at least one partial");
    let (states, v_dim) = (first.lse.len(), if first.lse.is_empty() { 0 } else { first.v_dim() });
    for partial in partials {
        assert!(
            partial.lse.len() == states && partial.out.len() == states * v_dim,
            "partials differ in shape"
        );
    }
    let mut merged = Partial::empty(states, v_dim);
    for state in 0..states {
        let total = log_sum_exp(partials.iter().map(|partial| partial.lse[state]));
        merged.lse[state] = total;
        for partial in partials {
            if partial.lse[state] == f64::NEG_INFINITY {
                continue;
            }
            let weight = (partial.lse[state] - total).exp();
            let range = state * v_dim..(state + 1) * v_dim;
            for (sum, value) in merged.out[range.clone()].iter_mut().zip(&partial.out[range]) {
                *sum += weight * value;
            }
        }
    }
    merged
}

/// Joins two partials (vLLM and SGLang `merge_attn_states`: prefix and suffix).
///
/// # Panics
/// The shapes differ.
pub fn merge_two(prefix: &Partial, suffix: &Partial) -> Partial {
    merge(&[prefix.clone(), suffix.clone()])
}

/// Adds a sink logit per state to the denominator: no value, one more exponential.
///
/// # Panics
/// `sink` is not one logit per state.
pub fn merge_sink(partial: &Partial, sink: &[f64]) -> Partial {
    assert_eq!(sink.len(), partial.lse.len(), "one sink logit per state");
    let nothing = Partial { out: vec![0.0; partial.out.len()], lse: sink.to_vec() };
    merge_two(partial, &nothing)
}

/// A base-2 LSE (FlashInfer, TensorRT-LLM) as a natural one.
pub fn natural_from_base_2(lse: f64) -> f64 {
    lse * std::f64::consts::LN_2
}

/// A natural LSE as a base-2 one.
pub fn base_2_from_natural(lse: f64) -> f64 {
    lse * std::f64::consts::LOG2_E
}

/// The statistics that one segment of a split-KV kernel leaves (vLLM `_merge_mla_segments_kernel`).
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    /// Largest base-2 score.
    pub max: f64,
    /// Sum of `2^(score − max)`.
    pub sum: f64,
    /// `[v_dim]`: sum of `2^(score − max)·v`, not normalised.
    pub acc: Vec<f64>,
}

/// Joins the segments of one state to `(out [v_dim], natural LSE)`. Without any weight: zeros and −inf.
///
/// # Panics
/// There is no segment.
pub fn merge_segments(segments: &[Segment]) -> (Vec<f64>, f64) {
    let v_dim = segments.first().expect("at least one segment").acc.len();
    let held = || segments.iter().filter(|segment| segment.sum > 0.0);
    let largest = held().map(|segment| segment.max).fold(f64::NEG_INFINITY, f64::max);
    let (mut out, mut sum) = (vec![0.0; v_dim], 0.0);
    for segment in held() {
        let weight = (segment.max - largest).exp2();
        sum += segment.sum * weight;
        for (total, acc) in out.iter_mut().zip(&segment.acc) {
            *total += acc * weight;
        }
    }
    if sum == 0.0 {
        return (out, f64::NEG_INFINITY);
    }
    out.iter_mut().for_each(|value| *value /= sum);
    (out, natural_from_base_2(largest + sum.log2()))
}

/// How a split-KV kernel cuts a row of `len` tokens into at most `segments` segments of whole tiles:
/// `(tiles per segment, segments in use)` (vLLM `_merge_mla_segments_kernel`). Only those in use are written.
///
/// # Panics
/// `segments` or `tile_tokens` is zero.
pub fn active_segments(len: usize, segments: usize, tile_tokens: usize) -> (usize, usize) {
    let tiles_per_segment = len.div_ceil(segments * tile_tokens).max(1);
    (tiles_per_segment, len.div_ceil(tiles_per_segment * tile_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_abs_diff_eq;

    fn state(out: f64, lse: f64) -> Partial {
        Partial { out: vec![out], lse: vec![lse] }
    }

    #[test]
    fn a_worked_merge_of_two_ranks_and_an_empty_one_that_holds_nan() {
        let merged = merge(&[state(1.0, 0.0), state(3.0, 1.0), state(f64::NAN, f64::NEG_INFINITY)]);
        assert_abs_diff_eq!(merged.lse[0], 1.313_261_7, epsilon = 1e-7);
        assert_abs_diff_eq!(merged.out[0], 0.268_941_4 + 3.0 * 0.731_058_6, epsilon = 1e-6);
        assert_abs_diff_eq!(merged.out[0], 2.462_117_2, epsilon = 1e-7);
    }

    #[test]
    fn a_rank_without_tokens_contributes_nothing() {
        let some = state(2.5, -3.0);
        assert_eq!(merge(&[some.clone(), Partial::empty(1, 1)]), some);
        assert_eq!(merge_two(&Partial::empty(1, 1), &some), some);
    }

    #[test]
    fn nothing_and_nothing_is_zero_with_minus_infinity() {
        let merged = merge_two(&state(f64::NAN, f64::NEG_INFINITY), &Partial::empty(1, 1));
        assert_eq!((merged.out[0], merged.lse[0]), (0.0, f64::NEG_INFINITY));
    }

    #[test]
    fn a_nan_beside_a_finite_lse_is_not_hidden() {
        assert!(merge_two(&state(f64::NAN, 0.0), &state(1.0, 0.0)).out[0].is_nan());
    }

    #[test]
    fn lse_far_from_zero_neither_overflows_nor_vanishes() {
        let merged = merge_two(&state(1.0, 800.0), &state(3.0, 800.0));
        assert_abs_diff_eq!(merged.out[0], 2.0, epsilon = 1e-12);
        let merged = merge_two(&state(1.0, -800.0), &state(3.0, -880.0));
        assert_abs_diff_eq!(merged.out[0], 1.0, epsilon = 1e-15);
        assert_abs_diff_eq!(merged.lse[0], -800.0, epsilon = 1e-12);
    }

    #[test]
    fn merging_is_associative_and_does_not_mind_the_order() {
        let parts = [state(1.0, 0.3), state(-2.0, 1.7), state(0.5, -4.0), state(9.0, f64::NEG_INFINITY)];
        let whole = merge(&parts);
        let pairs = merge_two(&merge_two(&parts[3], &parts[1]), &merge_two(&parts[2], &parts[0]));
        assert_abs_diff_eq!(whole.out[0], pairs.out[0], epsilon = 1e-14);
        assert_abs_diff_eq!(whole.lse[0], pairs.lse[0], epsilon = 1e-14);
    }

    #[test]
    fn a_base_2_lse_used_as_a_natural_one_gives_other_weights() {
        let natural = merge_two(&state(0.0, 1.0), &state(1.0, 2.0));
        let mistaken =
            merge_two(&state(0.0, base_2_from_natural(1.0)), &state(1.0, base_2_from_natural(2.0)));
        assert!((natural.out[0] - mistaken.out[0]).abs() > 0.05);
        assert_abs_diff_eq!(natural_from_base_2(base_2_from_natural(1.25)), 1.25, epsilon = 1e-15);
    }

    #[test]
    fn a_sink_is_one_more_exponential_without_a_value() {
        let with_sink = merge_sink(&state(4.0, 0.0), &[0.0]);
        assert_abs_diff_eq!(with_sink.out[0], 2.0, epsilon = 1e-15);
        assert_abs_diff_eq!(with_sink.lse[0], 2f64.ln(), epsilon = 1e-15);
    }

    #[test]
    fn worked_segments() {
        let segment = |max, acc| Segment { max, sum: 1.0, acc: vec![acc] };
        let (out, lse) = merge_segments(&[segment(0.0, 1.0), segment(1.0, 3.0)]);
        assert_abs_diff_eq!(out[0], 7.0 / 3.0, epsilon = 1e-15);
        assert_abs_diff_eq!(lse, 3f64.ln(), epsilon = 1e-15);
    }

    #[test]
    fn a_segment_without_weight_is_ignored_whatever_it_holds() {
        let used = Segment { max: 2.0, sum: 1.5, acc: vec![3.0] };
        let unused = Segment { max: f64::NAN, sum: 0.0, acc: vec![f64::NAN] };
        assert_eq!(merge_segments(&[used.clone(), unused.clone()]), merge_segments(&[used]));
        assert_eq!(merge_segments(&[unused]), (vec![0.0], f64::NEG_INFINITY));
    }

    #[test]
    fn worked_segment_counts() {
        assert_eq!(active_segments(130, 16, 64), (1, 3));
        assert_eq!(active_segments(5000, 16, 64), (5, 16));
        assert_eq!(active_segments(0, 16, 64), (1, 0));
    }

    #[test]
    #[should_panic(expected = "differ in shape")]
    fn partials_of_different_shape_are_a_bug() {
        merge(&[Partial::empty(2, 1), Partial::empty(1, 1)]);
    }
}
