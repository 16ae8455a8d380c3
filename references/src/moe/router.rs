//! Choice and weights of the experts of one token.
//!
//! A score that an engine forms in 32 bits may lie anywhere in an interval around the exact one, so a set of experts is right if *some*
//! scores within the intervals make it the best: near the cut, and where scores are equal, several sets are. With `kexp` and every
//! roundoff at zero an interval is a point, and only exact ties are left.

use crate::bound::{TINY32, U32, gamma};

/// What logits become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// `exp(x_i) / Σ exp(x_j)`.
    Softmax,
    /// `1 / (1 + exp(−x))`.
    Sigmoid,
}

/// What experts are chosen by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Scores; a group counts by its largest one.
    Scores,
    /// Score plus bias; a group counts by the sum of its two largest.
    Biased,
    /// The experts are given.
    Given,
}

/// What stands for choices in a group that is not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// 0.
    Zero,
    /// −∞.
    NegativeInfinity,
}

/// What weights are divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renormalise {
    /// Nothing.
    Raw,
    /// Their sum.
    Sum,
    /// Their sum and 1e-20.
    SumAndTiny,
}

/// How a router works.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// What logits become.
    pub scoring: Scoring,
    /// What experts are chosen by.
    pub choice: Choice,
    /// Experts of a token.
    pub top_k: usize,
    /// Groups of equal size.
    pub groups: usize,
    /// Groups that are kept.
    pub top_groups: usize,
    /// What stands for choices of the others.
    pub fill: Fill,
    /// What weights are divided by.
    pub renormalise: Renormalise,
    /// What weights are multiplied by at last.
    pub scale: f64,
}

/// Scores of one token, and how far those of an engine may be off.
#[derive(Debug, Clone, PartialEq)]
pub struct Scores {
    /// Exact scores, `[experts]`.
    pub value: Vec<f64>,
    /// Relative bound on the error of each in binary32.
    pub relative: Vec<f64>,
    /// Absolute bound beside it: what is below the normal numbers may be flushed.
    pub absolute: f64,
}

impl Scores {
    /// Bound on the error of one score.
    pub fn error(&self, expert: usize) -> f64 {
        self.value[expert] * self.relative[expert] + self.absolute
    }

    /// The same scores as numbers that an engine holds exactly.
    pub fn exact(&self) -> Self {
        Self { value: self.value.clone(), relative: vec![0.0; self.value.len()], absolute: 0.0 }
    }
}

/// Scores of logits, the exponential being right to `kexp` units in the last place of binary32.
///
/// Sigmoid: exp, one addition, one division, in either of its two forms: (4·kexp + 4)u. Softmax: the difference to the maximum, its exp,
/// a sum of E terms in any order, one division: u|x − m| + 2·kexp·u of the term and the largest of that of a term of the sum,
/// γ(E, u) + 2u. Second order is covered by a factor of 1.001.
pub fn scores(scoring: Scoring, logits: &[f32], kexp: f64) -> Scores {
    let x: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
    match scoring {
        Scoring::Sigmoid => Scores {
            value: x.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
            relative: vec![1.001 * (4.0 * kexp + 4.0) * U32; x.len()],
            absolute: TINY32,
        },
        Scoring::Softmax => {
            let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let exps: Vec<f64> = x.iter().map(|x| (x - most).exp()).collect();
            let sum: f64 = exps.iter().sum();
            let of_term = |x: f64| (most - x + 2.0 * kexp) * U32;
            // weighted by the terms, as the error of their sum is
            let of_sum = x.iter().zip(&exps).map(|(x, exp)| exp / sum * of_term(*x)).sum::<f64>()
                + gamma(x.len(), U32)
                + 2.0 * U32;
            Scores {
                value: exps.iter().map(|exp| exp / sum).collect(),
                relative: x.iter().map(|x| 1.001 * (of_term(*x) + of_sum)).collect(),
                absolute: TINY32,
            }
        }
    }
}

/// A number between two others.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Range {
    low: f64,
    high: f64,
}

/// Most sets that are listed for a token.
const MOST_SETS: usize = 64;

/// Sets of `count` of the ranges that may be the largest; `None` where there are more than [`MOST_SETS`].
fn largest(ranges: &[Range], count: usize) -> Option<Vec<Vec<usize>>> {
    let others = |own: usize| (0..ranges.len()).filter(move |other| *other != own);
    let above = |own: usize| others(own).filter(|other| ranges[*other].low > ranges[own].high).count();
    let not_below = |own: usize| others(own).filter(|other| ranges[*other].high >= ranges[own].low).count();
    let certain: Vec<usize> = (0..ranges.len()).filter(|own| not_below(*own) < count).collect();
    let open: Vec<usize> =
        (0..ranges.len()).filter(|own| above(*own) < count && !certain.contains(own)).collect();
    let mut sets = Vec::new();
    let mut stack = vec![(certain, 0)];
    while let Some((set, from)) = stack.pop() {
        if set.len() == count {
            if is_largest(ranges, &set) {
                sets.push(set);
            }
            if sets.len() > MOST_SETS {
                return None;
            }
            continue;
        }
        for next in (from..open.len()).rev() {
            let mut larger = set.clone();
            larger.push(open[next]);
            stack.push((larger, next + 1));
        }
        if stack.len() > MOST_SETS * MOST_SETS {
            return None;
        }
    }
    Some(sets)
}

/// Whether some numbers within the ranges make `set` the largest.
fn is_largest(ranges: &[Range], set: &[usize]) -> bool {
    let least = set.iter().map(|index| ranges[*index].high).fold(f64::INFINITY, f64::min);
    (0..ranges.len()).filter(|index| !set.contains(index)).all(|index| ranges[index].low <= least)
}

/// Where the choice of each expert lies.
fn choices(rule: &Rule, scores: &Scores, bias: &[f32]) -> Vec<Range> {
    let rounded = rounding(scores);
    (0..scores.value.len())
        .map(|expert| {
            let bias = if rule.choice == Choice::Biased { f64::from(bias[expert]) } else { 0.0 };
            let error = scores.error(expert);
            let sum = scores.value[expert] + bias;
            let room = if bias == 0.0 { error } else { error + rounded * (sum.abs() + error) };
            Range { low: sum - room, high: sum + room }
        })
        .collect()
}

/// Choices after each way in which groups may be kept; `None` where there are too many.
fn filled(rule: &Rule, choices: &[Range], rounded: f64) -> Option<Vec<Vec<Range>>> {
    if rule.groups <= 1 || rule.top_groups >= rule.groups {
        return Some(vec![choices.to_vec()]);
    }
    let size = choices.len() / rule.groups;
    let counted = if rule.choice == Choice::Biased { 2.min(size) } else { 1 };
    let of_group = |group: &[Range]| {
        let best = |end: fn(&Range) -> f64| {
            let mut ends: Vec<f64> = group.iter().map(end).collect();
            ends.sort_unstable_by(|a, b| b.total_cmp(a));
            ends[..counted].iter().sum::<f64>()
        };
        let (low, high) = (best(|range| range.low), best(|range| range.high));
        let room = if counted > 1 { rounded * low.abs().max(high.abs()) } else { 0.0 };
        Range { low: low - room, high: high + room }
    };
    let groups: Vec<Range> = choices.chunks(size).map(of_group).collect();
    let fill = match rule.fill {
        Fill::Zero => 0.0,
        Fill::NegativeInfinity => f64::NEG_INFINITY,
    };
    let masked = |kept: &Vec<usize>| {
        let of = |(expert, range): (usize, &Range)| {
            if kept.contains(&(expert / size)) { *range } else { Range { low: fill, high: fill } }
        };
        choices.iter().enumerate().map(of).collect()
    };
    Some(largest(&groups, rule.top_groups)?.iter().map(masked).collect())
}

/// Every set of experts that a token may have, ids rising; `None` where there are too many to list.
///
/// # Panics
/// When the rule takes its experts from elsewhere, or asks for more than there are.
pub fn selections(rule: &Rule, scores: &Scores, bias: &[f32]) -> Option<Vec<Vec<usize>>> {
    assert!(rule.choice != Choice::Given && rule.top_k <= scores.value.len(), "nothing to choose");
    let mut sets = Vec::new();
    for ranges in filled(rule, &choices(rule, scores, bias), rounding(scores))? {
        for mut set in largest(&ranges, rule.top_k)? {
            set.sort_unstable();
            if !sets.contains(&set) {
                sets.push(set);
            }
        }
    }
    (sets.len() <= MOST_SETS).then_some(sets)
}

/// Whether a token may have these experts, which must be distinct and in range; `None` where it can't be told.
pub fn admits(rule: &Rule, scores: &Scores, bias: &[f32], set: &[usize]) -> Option<bool> {
    let ways = filled(rule, &choices(rule, scores, bias), rounding(scores))?;
    Some(ways.iter().any(|ranges| is_largest(ranges, set)))
}

/// Roundoff of a sum of two choices: none where scores are exact.
fn rounding(scores: &Scores) -> f64 {
    if scores.absolute == 0.0 { 0.0 } else { U32 }
}

/// Weights of the experts of a token, and how far those of an engine may be off.
#[derive(Debug, Clone, PartialEq)]
pub struct Weights {
    /// In the order of the experts that were given.
    pub value: Vec<f64>,
    /// Absolute bounds.
    pub error: Vec<f64>,
}

/// Weights of the given experts: their scores, divided by their sum if so, scaled. k + 1 additions, a division and a product.
pub fn weights(rule: &Rule, scores: &Scores, experts: &[usize]) -> Weights {
    let own: Vec<f64> = experts.iter().map(|expert| scores.value[*expert]).collect();
    let tiny = if rule.renormalise == Renormalise::SumAndTiny { 1e-20 } else { 0.0 };
    let (sum, sum_error) = match rule.renormalise {
        Renormalise::Raw => (1.0, 0.0),
        _ => {
            let errors: f64 = experts.iter().map(|expert| scores.error(*expert)).sum();
            let sum = own.iter().sum::<f64>() + tiny;
            (sum, errors + gamma(experts.len() + 1, U32) * (sum + errors))
        }
    };
    let weight = |(expert, own): (&usize, &f64)| {
        let value = own / sum * rule.scale;
        let error = scores.error(*expert);
        // the sum is positive; where it may vanish nothing is known of the quotient
        let quotient = if sum_error < sum {
            ((own + error) / (sum - sum_error) * (1.0 + 2.0 * U32) - own / sum)
                .max(own / sum - (own - error) / (sum + sum_error) * (1.0 - 2.0 * U32))
        } else {
            f64::INFINITY
        };
        (value, rule.scale.abs() * (quotient * (1.0 + U32) + own / sum * U32) + TINY32)
    };
    let (value, error) = experts.iter().zip(&own).map(weight).unzip();
    Weights { value, error }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(seen: f64, wanted: f64) {
        assert!((seen - wanted).abs() <= 1e-11 * wanted.abs(), "{seen} {wanted}");
    }

    const RULE: Rule = Rule {
        scoring: Scoring::Sigmoid,
        choice: Choice::Scores,
        top_k: 2,
        groups: 1,
        top_groups: 1,
        fill: Fill::Zero,
        renormalise: Renormalise::Sum,
        scale: -2.5,
    };

    #[test]
    fn scores_are_off_by_their_exponentials_their_sum_and_their_division() {
        let unit = 2f64.powi(-24);
        let sigmoid = scores(Scoring::Sigmoid, &[0.0, 2.0], 3.0);
        near(sigmoid.value[1], 1.0 / (1.0 + (-2f64).exp()));
        sigmoid.relative.iter().for_each(|relative| near(*relative, 1.001 * 16.0 * unit));
        near(sigmoid.error(0), 0.5 * 1.001 * 16.0 * unit + TINY32);
        let (softmax, rest) = (scores(Scoring::Softmax, &[-2.0, 0.0], 3.0), (-2f64).exp());
        near(softmax.value[0], rest / (1.0 + rest));
        near(softmax.value[1], 1.0 / (1.0 + rest));
        let of_sum = (rest * 8.0 + 6.0) / (1.0 + rest) * unit + 2.0 * unit / (1.0 - 2.0 * unit) + 2.0 * unit;
        near(softmax.relative[0], 1.001 * (8.0 * unit + of_sum));
        near(softmax.relative[1], 1.001 * (6.0 * unit + of_sum));
        let exact = softmax.exact();
        assert_eq!((exact.value.clone(), exact.error(0), exact.error(1)), (softmax.value, 0.0, 0.0));
    }

    #[test]
    fn weights_are_off_by_their_score_the_sum_of_scores_and_three_roundings() {
        let unit = 2f64.powi(-24);
        let given = Scores { value: vec![0.5, 0.125, 0.25], relative: vec![1e-3, 1.0, 4e-3], absolute: 1e-4 };
        let errors = [0.5e-3 + 1e-4, 1e-3 + 1e-4];
        for (renormalise, sum) in
            [(Renormalise::Raw, 1.0), (Renormalise::Sum, 0.75), (Renormalise::SumAndTiny, 0.75)]
        {
            let found = weights(&Rule { renormalise, ..RULE }, &given, &[0, 2]);
            let all = errors[0] + errors[1];
            let gamma = 3.0 * unit / (1.0 - 3.0 * unit);
            let of_sum = if renormalise == Renormalise::Raw { 0.0 } else { all + gamma * (sum + all) };
            for (index, own) in [0.5, 0.25].into_iter().enumerate() {
                let most = (own + errors[index]) / (sum - of_sum) * (1.0 + 2.0 * unit);
                near(found.value[index], own / sum * -2.5);
                near(
                    found.error[index],
                    2.5 * ((most - own / sum) * (1.0 + unit) + own / sum * unit) + TINY32,
                );
            }
        }
    }

    #[test]
    fn of_a_sum_that_may_vanish_no_quotient_is_known() {
        let given = Scores { value: vec![0.5, 0.25], relative: vec![2.0, 2.0], absolute: 0.0 };
        assert_eq!(weights(&RULE, &given, &[0, 1]).error, [f64::INFINITY; 2]);
        let tiny = Scores { value: vec![1e-20, 2e-20], relative: vec![0.0; 2], absolute: 0.0 };
        let rule = Rule { renormalise: Renormalise::SumAndTiny, ..RULE };
        near(weights(&rule, &tiny, &[0, 1]).value[1], -1.25);
    }

    #[test]
    fn a_choice_with_a_bias_is_rounded_once_more_and_a_pair_of_choices_again() {
        let unit = 2f64.powi(-24);
        let given = Scores { value: vec![0.5, 0.25], relative: vec![1e-3, 1e-3], absolute: 1e-4 };
        let rule = Rule { choice: Choice::Biased, groups: 2, top_groups: 1, top_k: 1, ..RULE };
        let found = choices(&rule, &given, &[-2.0, 0.0]);
        let (error, sum) = (0.5e-3 + 1e-4, -1.5f64);
        let room = error + unit * (sum.abs() + error);
        for (range, low, high) in
            [(found[0], sum - room, sum + room), (found[1], 0.25 - 0.35e-3, 0.25 + 0.35e-3)]
        {
            near(range.low, low);
            near(range.high, high);
        }
        let plain = choices(&RULE, &given, &[]);
        near(plain[0].high, 0.5 + error);
        let exact = choices(&rule, &given.exact(), &[-2.0, 0.0]);
        assert_eq!(exact, [Range { low: -1.5, high: -1.5 }, Range { low: 0.25, high: 0.25 }]);
    }

    #[test]
    fn groups_whose_pairs_differ_by_less_than_their_rounding_are_both_kept() {
        let range = |at: f64| Range { low: at, high: at };
        let rule =
            Rule { choice: Choice::Biased, groups: 2, top_groups: 1, fill: Fill::NegativeInfinity, ..RULE };
        let kept = |second: f64, rounded: f64| {
            let choices = [3.0, 1.0, 2.0, second].map(range);
            filled(&rule, &choices, rounded).unwrap().len()
        };
        // pairs of 4 and of a little less, each with a room of 4u
        let unit = 2f64.powi(-24);
        assert_eq!(kept(2.0, 0.0), 2, "a tie");
        assert_eq!((kept(2.0 - unit, 0.0), kept(2.0 + unit, 0.0)), (1, 1));
        assert_eq!((kept(2.0 - 7.9 * unit, unit), kept(2.0 + 7.9 * unit, unit)), (2, 2));
        assert_eq!((kept(2.0 - 8.1 * unit, unit), kept(2.0 + 8.1 * unit, unit)), (1, 1));
    }

    #[test]
    fn as_many_sets_are_listed_as_may_be_and_of_more_none() {
        let alike = |count: usize| vec![Range { low: 1.0, high: 1.0 }; count];
        assert_eq!(largest(&alike(MOST_SETS), 1).unwrap().len(), MOST_SETS);
        assert_eq!(largest(&alike(MOST_SETS + 1), 1), None);
        let given =
            |count: usize| Scores { value: vec![0.5; count], relative: vec![0.0; count], absolute: 0.0 };
        let rule = Rule { top_k: 1, ..RULE };
        assert_eq!(selections(&rule, &given(MOST_SETS), &[]).unwrap().len(), MOST_SETS);
        assert_eq!(selections(&rule, &given(MOST_SETS + 1), &[]), None);
    }
}
