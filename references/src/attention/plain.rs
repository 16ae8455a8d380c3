//! The specification of attention: a direct softmax over the visible tokens in float64, nothing clever.

use crate::merge::Partial;
use crate::visibility::Visible;

/// The type of a stored number: f32 holds every value that an engine keeps, f64 is for exact intermediate ones.
pub trait Element: Copy + Send + Sync + Into<f64> {}

impl Element for f32 {}
impl Element for f64 {}

/// Where the value vectors lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Values<'a, T = f32> {
    /// An array of its own, `[tokens, kv_heads, v_dim]`.
    Separate(&'a [T]),
    /// The first `v_dim` numbers of each key (absorbed MLA: the latent is both).
    KeyPrefix,
}

/// One attention call: the values that the engine really holds, after their quantisation and rounding.
///
/// Query head `h` reads KV head `h / (heads / kv_heads)`. Tokens that no row sees are never read, so they may
/// hold anything, NaN included.
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a, T = f32> {
    /// Query heads.
    pub heads: usize,
    /// KV heads; divides `heads`.
    pub kv_heads: usize,
    /// Length of a query and key vector.
    pub qk_dim: usize,
    /// Length of a value vector.
    pub v_dim: usize,
    /// Factor on the product of query and key.
    pub scale: f64,
    /// `[rows, heads, qk_dim]`.
    pub query: &'a [T],
    /// `[tokens, kv_heads, qk_dim]`.
    pub key: &'a [T],
    /// The values.
    pub value: Values<'a, T>,
    /// `[heads]`: a logit per head, neither scaled nor masked, that joins the softmax denominator once and adds
    /// no value (gpt-oss attention sinks).
    pub sink: Option<&'a [f64]>,
    /// A score `s` becomes `cap·tanh(s / cap)` before masking (Gemma 2 logit soft-capping).
    pub softcap: Option<f64>,
}

impl<'a, T: Element> Problem<'a, T> {
    /// A problem without sinks and soft-capping.
    ///
    /// # Panics
    /// As [`Self::check`].
    #[expect(clippy::too_many_arguments, reason = "the shape of an attention call")]
    pub fn new(
        heads: usize,
        kv_heads: usize,
        qk_dim: usize,
        v_dim: usize,
        scale: f64,
        query: &'a [T],
        key: &'a [T],
        value: Values<'a, T>,
    ) -> Self {
        let problem =
            Self { heads, kv_heads, qk_dim, v_dim, scale, query, key, value, sink: None, softcap: None };
        problem.check();
        problem
    }

    /// Query rows.
    pub fn rows(&self) -> usize {
        self.query.len() / (self.heads * self.qk_dim)
    }

    /// Tokens of the context.
    pub fn tokens(&self) -> usize {
        self.key.len() / (self.kv_heads * self.qk_dim)
    }

    /// The KV head that query head `head` reads.
    pub fn kv_head(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }

    /// The query vector of a row and head, `[qk_dim]`.
    pub fn query_at(&self, row: usize, head: usize) -> &'a [T] {
        let start = (row * self.heads + head) * self.qk_dim;
        &self.query[start..start + self.qk_dim]
    }

    /// The key vector of a token and KV head, `[qk_dim]`.
    pub fn key_at(&self, token: usize, kv_head: usize) -> &'a [T] {
        let start = (token * self.kv_heads + kv_head) * self.qk_dim;
        &self.key[start..start + self.qk_dim]
    }

    /// The value vector of a token and KV head, `[v_dim]`.
    pub fn value_at(&self, token: usize, kv_head: usize) -> &'a [T] {
        match self.value {
            Values::Separate(value) => {
                let start = (token * self.kv_heads + kv_head) * self.v_dim;
                &value[start..start + self.v_dim]
            }
            Values::KeyPrefix => &self.key_at(token, kv_head)[..self.v_dim],
        }
    }

    /// # Panics
    /// The lengths of the slices do not fit the dimensions, or the dimensions each other.
    pub fn check(&self) {
        let Self { heads, kv_heads, qk_dim, v_dim, .. } = *self;
        assert!(heads > 0 && kv_heads > 0 && qk_dim > 0 && v_dim > 0, "every dimension is at least 1");
        assert!(heads.is_multiple_of(kv_heads), "{heads} heads do not share {kv_heads} KV heads evenly");
        assert!(self.query.len().is_multiple_of(heads * qk_dim), "query is not [rows, {heads}, {qk_dim}]");
        assert!(
            self.key.len().is_multiple_of(kv_heads * qk_dim),
            "key is not [tokens, {kv_heads}, {qk_dim}]"
        );
        match self.value {
            Values::Separate(value) => assert!(
                value.len() == self.tokens() * kv_heads * v_dim,
                "value is not [{}, {kv_heads}, {v_dim}]",
                self.tokens()
            ),
            Values::KeyPrefix => {
                assert!(v_dim <= qk_dim, "a prefix of {v_dim} does not fit a key of {qk_dim}")
            }
        }
        assert!(self.sink.is_none_or(|sink| sink.len() == heads), "one sink per head");
        assert!(self.softcap.is_none_or(|cap| cap > 0.0), "a soft cap is positive");
    }

    /// # Panics
    /// `visible` is not one entry per row, or names a token that does not exist.
    pub fn check_visible(&self, visible: &[Visible]) {
        assert_eq!(visible.len(), self.rows(), "one visible set per query row");
        let end = visible.iter().map(Visible::end).max().unwrap_or(0);
        assert!(end <= self.tokens(), "a row sees token {} of {}", end.max(1) - 1, self.tokens());
    }
}

/// The result of attention.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// `[rows, heads, v_dim]`. Zero where nothing is visible.
    pub out: Vec<f64>,
    /// `[rows, heads]`: natural log of the sum of exponentials, a sink included. −inf where there is neither a
    /// visible token nor a sink.
    pub lse: Vec<f64>,
}

/// The elementary functions that softmax needs, so that the same definition can be run with others.
pub trait Functions {
    /// `e^x`.
    fn exp(x: f64) -> f64;
    /// Natural logarithm.
    fn ln(x: f64) -> f64;
    /// Hyperbolic tangent.
    fn tanh(x: f64) -> f64;
}

/// The functions of the platform's mathematical library.
#[derive(Debug, Clone, Copy)]
pub struct Platform;

impl Functions for Platform {
    fn exp(x: f64) -> f64 {
        x.exp()
    }
    fn ln(x: f64) -> f64 {
        x.ln()
    }
    fn tanh(x: f64) -> f64 {
        x.tanh()
    }
}

/// Attention of every row over its visible tokens.
///
/// # Panics
/// The shapes do not fit ([`Problem::check`], [`Problem::check_visible`]).
pub fn attend<T: Element>(problem: &Problem<T>, visible: &[Visible]) -> Attention {
    attend_with::<Platform, T>(problem, visible)
}

/// [`attend`] with the same bits on every machine: elementary functions of [`crate::exp`], every sum in the order
/// of positions, nothing fused.
///
/// # Panics
/// As [`attend`].
pub fn attend_deterministic<T: Element>(problem: &Problem<T>, visible: &[Visible]) -> Attention {
    attend_with::<crate::exp::Fixed, T>(problem, visible)
}

/// [`attend`] with elementary functions of choice.
pub fn attend_with<F: Functions, T: Element>(problem: &Problem<T>, visible: &[Visible]) -> Attention {
    problem.check();
    problem.check_visible(visible);
    let mut result = Attention { out: Vec::new(), lse: Vec::new() };
    for (row, seen) in visible.iter().enumerate() {
        for head in 0..problem.heads {
            let positions: Vec<usize> = seen.positions().collect();
            let (out, lse) =
                attend_one::<F, T>(problem, row, head, &positions, problem.sink.map(|sink| sink[head]));
            result.out.extend(out);
            result.lse.push(lse);
        }
    }
    result
}

/// What one rank contributes: attention of every row over the visible tokens that it stores, without the sink,
/// which belongs to no rank.
pub fn attend_rank<T: Element>(
    problem: &Problem<T>,
    visible: &[Visible],
    layout: &crate::layout::Layout,
    rank: usize,
) -> Partial {
    let held: Vec<Visible> = visible.iter().map(|seen| seen.on_rank(layout, rank)).collect();
    let Attention { out, lse } = attend(&Problem { sink: None, ..*problem }, &held);
    Partial { out, lse }
}

/// The score of one query with one token, after scaling and soft-capping.
pub fn score<F: Functions, T: Element>(problem: &Problem<T>, row: usize, head: usize, token: usize) -> f64 {
    let key = problem.key_at(token, problem.kv_head(head));
    let mut product = 0.0;
    for (q, k) in problem.query_at(row, head).iter().zip(key) {
        product += (*q).into() * (*k).into();
    }
    let scaled = product * problem.scale;
    match problem.softcap {
        Some(cap) => cap * F::tanh(scaled / cap),
        None => scaled,
    }
}

fn attend_one<F: Functions, T: Element>(
    problem: &Problem<T>,
    row: usize,
    head: usize,
    positions: &[usize],
    sink: Option<f64>,
) -> (Vec<f64>, f64) {
    let mut out = vec![0.0; problem.v_dim];
    let scores: Vec<f64> = positions.iter().map(|&token| score::<F, T>(problem, row, head, token)).collect();
    let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return (out, largest);
    }
    let mut sum = 0.0;
    for s in scores.iter().copied().chain(sink) {
        sum += F::exp(s - largest);
    }
    for (s, &token) in scores.iter().zip(positions) {
        let probability = F::exp(s - largest) / sum;
        for (o, v) in out.iter_mut().zip(problem.value_at(token, problem.kv_head(head))) {
            *o += probability * (*v).into();
        }
    }
    (out, largest + F::ln(sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_scores_average_the_values() {
        let (query, key, value) = ([0.0; 2], [1.0; 6], [1.0, 2.0, 6.0]);
        let problem = Problem::new(1, 1, 2, 1, 1.0, &query, &key, Values::Separate(&value));
        let result = attend(&problem, &[Visible::Prefix(3)]);
        approx::assert_abs_diff_eq!(result.out[0], 3.0, epsilon = 1e-15);
        approx::assert_abs_diff_eq!(result.lse[0], 3f64.ln(), epsilon = 1e-15);
    }

    #[test]
    fn a_row_that_sees_nothing_gives_zero_and_minus_infinity() {
        let (query, key, value) = ([1.0; 2], [1.0; 6], [1.0, 2.0, 6.0]);
        let problem = Problem::new(1, 1, 2, 1, 1.0, &query, &key, Values::Separate(&value));
        let result = attend(&problem, &[Visible::Prefix(0)]);
        assert_eq!((result.out[0], result.lse[0]), (0.0, f64::NEG_INFINITY));
    }

    #[test]
    fn poison_in_a_token_that_no_row_sees_is_not_read() {
        let (query, value) = ([1.0], [1.0, f32::NAN, 3.0]);
        let key = [0.5, f32::NAN, 0.5];
        let problem = Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::Separate(&value));
        let result = attend(&problem, &[Visible::Set(vec![0, 2])]);
        approx::assert_abs_diff_eq!(result.out[0], 2.0, epsilon = 1e-15);
    }

    #[test]
    fn heads_share_kv_heads_in_consecutive_groups() {
        let query = [0.0; 4];
        let (key, value) = ([0.0; 2], [1.0, 2.0]);
        let problem = Problem::new(4, 2, 1, 1, 1.0, &query, &key, Values::Separate(&value));
        assert_eq!(attend(&problem, &[Visible::Prefix(1)]).out, [1.0, 1.0, 2.0, 2.0]);
    }

    #[test]
    fn the_latent_is_both_key_and_value() {
        let query = [1.0, 0.0, 0.0];
        let key = [1.0, 5.0, 9.0, 2.0, 7.0, 9.0];
        let prefix = Problem::new(1, 1, 3, 2, 1.0, &query, &key, Values::KeyPrefix);
        let value = [1.0, 5.0, 2.0, 7.0];
        let separate = Problem::new(1, 1, 3, 2, 1.0, &query, &key, Values::Separate(&value));
        assert_eq!(attend(&prefix, &[Visible::Prefix(2)]), attend(&separate, &[Visible::Prefix(2)]));
    }

    #[test]
    fn a_sink_takes_its_share_and_adds_no_value() {
        let (query, key, value) = ([0.0], [0.0], [4.0]);
        let mut problem = Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::Separate(&value));
        problem.sink = Some(&[0.0]);
        let result = attend(&problem, &[Visible::Prefix(1)]);
        approx::assert_abs_diff_eq!(result.out[0], 2.0, epsilon = 1e-15);
        approx::assert_abs_diff_eq!(result.lse[0], 2f64.ln(), epsilon = 1e-15);
    }

    #[test]
    fn a_sink_belongs_to_no_rank() {
        let (query, key, value) = ([1.0], [0.5, -0.5, 2.0], [4.0, 1.0, 3.0]);
        let without = Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::Separate(&value));
        let with = Problem { sink: Some(&[5.0]), ..without };
        let layout = crate::layout::Layout::new(2, 1, 1).unwrap();
        for rank in 0..2 {
            let of = |problem| attend_rank(problem, &[Visible::Prefix(3)], &layout, rank);
            assert_eq!((of(&with).out, of(&with).lse), (of(&without).out, of(&without).lse));
        }
    }

    #[test]
    fn a_soft_cap_bounds_the_scores() {
        let (query, key, value) = ([100.0], [100.0, -100.0], [1.0, 0.0]);
        let mut problem = Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::Separate(&value));
        problem.softcap = Some(1.0);
        let expected = 1f64.exp() / (1f64.exp() + (-1f64).exp());
        approx::assert_abs_diff_eq!(
            attend(&problem, &[Visible::Prefix(2)]).out[0],
            expected,
            epsilon = 1e-15
        );
    }

    #[test]
    fn huge_scores_do_not_overflow() {
        let (query, key, value) = ([1000.0], [1000.0, 999.0], [1.0, 0.0]);
        let problem = Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::Separate(&value));
        let result = attend(&problem, &[Visible::Prefix(2)]);
        assert_eq!((result.out[0], result.lse[0]), (1.0, 1e6));
    }

    #[test]
    #[should_panic(expected = "sees token")]
    fn a_row_that_sees_a_token_that_does_not_exist_is_a_bug() {
        let (query, key) = ([1.0], [1.0]);
        attend(&Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::KeyPrefix), &[Visible::Prefix(2)]);
    }
}
