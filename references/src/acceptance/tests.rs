//! The oracle against rational enumeration, published toy values, and the arithmetic of 32 bits in other orders.

use std::collections::BTreeMap;

use super::*;

/// A fraction in lowest terms, not negative.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ratio(i128, i128);

impl Ratio {
    fn new(over: i128, under: i128) -> Self {
        let (mut a, mut b) = (over.abs(), under.abs());
        while b != 0 {
            (a, b) = (b, a % b);
        }
        Self(over / a.max(1), under / a.max(1))
    }
    fn add(self, o: Self) -> Self {
        Self::new(self.0 * o.1 + o.0 * self.1, self.1 * o.1)
    }
    fn minus_or_zero(self, o: Self) -> Self {
        let over = self.0 * o.1 - o.0 * self.1;
        if over <= 0 { Self(0, 1) } else { Self::new(over, self.1 * o.1) }
    }
    fn times(self, o: Self) -> Self {
        Self::new(self.0 * o.0, self.1 * o.1)
    }
    fn over(self, o: Self) -> Self {
        Self::new(self.0 * o.1, self.1 * o.0)
    }
    fn least(self, o: Self) -> Self {
        if self.0 * o.1 < o.0 * self.1 { self } else { o }
    }
    fn value(self) -> f64 {
        self.0 as f64 / self.1 as f64
    }
}

const ZERO: Ratio = Ratio(0, 1);
const ONE: Ratio = Ratio(1, 1);

fn sum(terms: &[Ratio]) -> Ratio {
    terms.iter().fold(ZERO, |all, term| all.add(*term))
}

type Row = Vec<Ratio>;

fn row(parts: &[i128]) -> Row {
    let all: i128 = parts.iter().sum();
    parts.iter().map(|part| Ratio::new(*part, all)).collect()
}

/// Laws of two drafts over V tokens: a first row, and a second one for each first token.
struct Laws {
    target: (Row, Vec<Row>),
    draft: (Row, Vec<Row>),
}

fn left(prefix: Ratio, target: &Row, draft: &Row) -> Row {
    target.iter().zip(draft).map(|(t, d)| prefix.times(*t).minus_or_zero(*d)).collect()
}

/// Chances of accepting exactly 0, 1 and 2 drafts, and the weights of what is drawn behind 0 and 1: the definition, in fractions.
fn chances(method: Method, one_hot: bool, laws: &Laws, x: [usize; 2]) -> ([Ratio; 3], [Row; 2]) {
    let point =
        |token: usize| (0..laws.target.0.len()).map(|t| if t == token { ONE } else { ZERO }).collect::<Row>();
    let targets = [&laws.target.0, &laws.target.1[x[0]]];
    let drafts =
        if one_hot { [point(x[0]), point(x[1])] } else { [laws.draft.0.clone(), laws.draft.1[x[0]].clone()] };
    let ratio = |i: usize| targets[i][x[i]].over(drafts[i][x[i]]);
    if method == Method::Standard {
        let (first, second) = (ratio(0).least(ONE), ratio(1).least(ONE));
        let none = ONE.minus_or_zero(first);
        let one = first.times(ONE.minus_or_zero(second));
        let behind = [0, 1].map(|i| left(ONE, targets[i], &drafts[i]));
        return ([none, one, first.times(second)], behind);
    }
    let first = ratio(0).least(ONE);
    let second = first.times(ratio(1)).least(ONE);
    let rest = left(first, targets[1], &drafts[1]);
    let mass = sum(&rest);
    let room = mass.add(ONE).minus_or_zero(first);
    let passes = if room == ZERO { ONE } else { mass.over(room) };
    let none = ONE.minus_or_zero(second).times(ONE.minus_or_zero(passes));
    let one = ONE.minus_or_zero(second).times(passes);
    ([none, one, second], [left(ONE, targets[0], &drafts[0]), rest])
}

fn normal(weights: &Row) -> Row {
    let all = sum(weights);
    weights.iter().map(|weight| if all == ZERO { ZERO } else { weight.over(all) }).collect()
}

/// The law of the first two tokens, the target continuing where only one was emitted.
fn emitted_law(method: Method, laws: &Laws) -> BTreeMap<[usize; 2], Ratio> {
    let vocabulary = laws.target.0.len();
    let mut law = BTreeMap::new();
    let mut add = |tokens: [usize; 2], chance: Ratio| {
        let known = law.entry(tokens).or_insert(ZERO);
        *known = known.add(chance);
    };
    for x in (0..vocabulary * vocabulary).map(|index| [index / vocabulary, index % vocabulary]) {
        let drawn = laws.draft.0[x[0]].times(laws.draft.1[x[0]][x[1]]);
        let ([none, one, both], [first, second]) = chances(method, false, laws, x);
        add(x, drawn.times(both));
        for (token, chance) in normal(&second).into_iter().enumerate() {
            add([x[0], token], drawn.times(one).times(chance));
        }
        for (token, chance) in normal(&first).into_iter().enumerate() {
            for next in 0..vocabulary {
                let rest = chance.times(laws.target.1[token][next]);
                add([token, next], drawn.times(none).times(rest));
            }
        }
    }
    law
}

fn drawn_laws(seed: &mut u64, vocabulary: usize) -> Laws {
    let mut next = || {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1 + (*seed >> 33) as i128 % 4
    };
    let mut one = || row(&(0..vocabulary).map(|_| next()).collect::<Vec<_>>());
    let mut set = || (one(), (0..vocabulary).map(|_| one()).collect());
    Laws { target: set(), draft: set() }
}

#[test]
fn the_law_of_emitted_tokens_is_the_targets_in_fractions() {
    let mut seed = 5;
    for vocabulary in [2, 3, 2, 3, 2] {
        let laws = drawn_laws(&mut seed, vocabulary);
        for method in [Method::Standard, Method::Block] {
            for (tokens, chance) in emitted_law(method, &laws) {
                let wanted = laws.target.0[tokens[0]].times(laws.target.1[tokens[0]][tokens[1]]);
                assert_eq!(chance, wanted, "{method:?} {tokens:?}");
            }
        }
    }
}

/// A request of two drafts with these laws, every number given.
fn with_request<T>(
    laws: &Laws,
    (one_hot, x): (bool, [usize; 2]),
    uniform: [f32; 2],
    noise: &[f32],
    judge: impl Fn(&Request<'_>) -> T,
) -> T {
    let logits = |row: &Row| row.iter().map(|p| p.value().ln() as f32).collect::<Vec<_>>();
    let target = [logits(&laws.target.0), logits(&laws.target.1[x[0]]), logits(&laws.target.0)].concat();
    let draft = [logits(&laws.draft.0), logits(&laws.draft.1[x[0]])].concat();
    judge(&Request {
        vocabulary: laws.target.0.len(),
        drafts: &x.map(|token| token as i64),
        target: &target,
        draft: (!one_hot).then_some(&draft[..]),
        temperature: 1.0,
        uniform: &[uniform[0], uniform[1], 0.0],
        noise: &noise.repeat(3),
    })
}

#[test]
fn the_oracle_decides_as_the_fractions_do_beside_every_threshold() {
    let (mut seed, mut decided) = (9, 0);
    for vocabulary in [2, 3, 3, 4] {
        let laws = drawn_laws(&mut seed, vocabulary);
        for (method, one_hot) in [
            (Method::Standard, false),
            (Method::Block, false),
            (Method::Standard, true),
            (Method::Block, true),
        ] {
            for x in (0..vocabulary * vocabulary).map(|index| [index / vocabulary, index % vocabulary]) {
                let ([none, one, both], behind) = chances(method, one_hot, &laws, x);
                // thresholds of the two numbers, from the chances of what they decide
                let rest = none.add(one);
                let (first, second) = match method {
                    Method::Standard => {
                        (one.add(both), if one.add(both) == ZERO { ZERO } else { both.over(one.add(both)) })
                    }
                    _ => (if rest == ZERO { ONE } else { one.over(rest) }, both),
                };
                for u in [first, second].map(|t| [t.value() - 1e-3, t.value() + 1e-3]).concat() {
                    for v in [first, second].map(|t| [t.value() - 1e-3, t.value() + 1e-3]).concat() {
                        let [u, v] = [u, v].map(|number| number.clamp(1e-4, 0.9999));
                        let (passes, whole) = (u < first.value(), v < second.value());
                        let wanted = match method {
                            Method::Standard => usize::from(passes) + usize::from(passes && whole),
                            _ if whole => 2,
                            _ => usize::from(passes),
                        };
                        let found = with_request(
                            &laws,
                            (one_hot, x),
                            [u as f32, v as f32],
                            &vec![0.0; vocabulary],
                            |r| outcomes(method, r),
                        );
                        assert_eq!(found.len(), 1, "{method:?} {x:?} {u} {v} {found:?}");
                        assert_eq!(found[0].accepted, wanted, "{method:?} {one_hot} {x:?} {u} {v}");
                        let weights = if wanted < 2 { &behind[wanted] } else { &laws.target.0 };
                        let most = weights.iter().map(|w| w.value()).fold(0.0, f64::max);
                        if most > 0.0 {
                            let best: Vec<usize> = (0..vocabulary)
                                .filter(|t| (weights[*t].value() - most).abs() < 1e-9)
                                .collect();
                            assert_eq!(found[0].tokens, best, "{method:?} {x:?}");
                        }
                        decided += 1;
                    }
                }
            }
        }
    }
    assert!(decided > 2000, "{decided}");
}

#[test]
fn a_published_toy_of_the_block_method_comes_out() {
    let laws = Laws {
        target: (row(&[6, 4]), vec![row(&[5, 5]), row(&[5, 5])]),
        draft: (row(&[8, 2]), vec![row(&[3, 7]), row(&[3, 7])]),
    };
    with_request(&laws, (false, [0, 1]), [0.5, 0.5], &[0.0, 0.0], |request| {
        let prefixes = prefixes(request);
        let mass = mass(request, prefixes[0], 1);
        let h = continued(prefixes[0], mass);
        for (seen, wanted) in
            [(prefixes[0], 0.75), (prefixes[1], 0.535_714_285), (mass, 0.075), (h, 0.230_769_23)]
        {
            assert!(
                seen.low < wanted && wanted < seen.high && seen.high - seen.low < 1e-4,
                "{seen:?} {wanted}"
            );
        }
    });
}

#[test]
fn a_greedy_request_takes_the_first_argmax_and_stops_at_a_draft_that_is_none() {
    let target = [1.0, 1.0, 0.0, 0.0, 2.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let request = |drafts: &'static [i64]| Request {
        vocabulary: 3,
        drafts,
        target: &target,
        draft: None,
        temperature: 0.0,
        uniform: &[],
        noise: &[],
    };
    let one = |drafts| {
        let found = outcomes(Method::Block, &request(drafts));
        (found[0].accepted, found[0].tokens[0], found.len())
    };
    assert_eq!(one(&[0, 1, 0]), (3, 0, 1));
    assert_eq!(one(&[1, 1, 0]), (0, 0, 1));
    assert_eq!(one(&[0, -1, 0]), (1, 1, 1));
    assert_eq!(one(&[0, 2, 0]), (1, 1, 1));
    assert_eq!(one(&[]), (0, 0, 1));
}

#[test]
fn a_draft_of_probability_zero_is_not_accepted_even_by_the_number_zero() {
    let inf = f32::NEG_INFINITY;
    let target = [0.0, inf, 0.0, 0.0, 0.0, 0.0];
    for method in [Method::Standard, Method::Block] {
        for draft in [None, Some(&[0.0, 0.0, 0.0][..])] {
            let request = Request {
                vocabulary: 3,
                drafts: &[1],
                target: &target,
                draft,
                temperature: 1.0,
                uniform: &[0.0, 0.0],
                noise: &[0.0, 9.0, -1.0, 0.0, 0.0, 0.0],
            };
            assert_eq!(outcomes(method, &request), [Outcome { accepted: 0, tokens: vec![0] }]);
        }
    }
}

#[test]
fn beside_a_threshold_within_rounding_both_outcomes_are_allowed_and_equal_laws_accept() {
    let logits = [0.5f32.ln(), 0.25f32.ln(), 0.25f32.ln(), 0.0, 0.0, 0.0];
    let draft = [0.25f32.ln(), 0.5f32.ln(), 0.25f32.ln()];
    let found = |method, token: &'static [i64], draft, uniform: f32| {
        let request = Request {
            vocabulary: 3,
            drafts: token,
            target: &logits,
            draft: Some(draft),
            temperature: 1.0,
            uniform: &[uniform, 0.0],
            noise: &[0.0; 6],
        };
        outcomes(method, &request).iter().map(|outcome| outcome.accepted).collect::<Vec<_>>()
    };
    for method in [Method::Standard, Method::Block] {
        assert_eq!(found(method, &[1], &draft, 0.5), [0, 1]);
        assert_eq!(found(method, &[1], &draft, 0.4999), [1]);
        assert_eq!(found(method, &[1], &draft, 0.5001), [0]);
        assert_eq!(found(method, &[2], &logits[..3], 0.999), [1]);
    }
}

#[test]
fn a_block_that_only_the_number_zero_takes_is_open_and_any_token_of_the_target_may_follow() {
    // the first draft has a quarter of its probability left, of which the second row's drafter leaves nothing over
    let logs = |law: &[f32]| law.iter().map(|chance| chance.ln()).collect::<Vec<_>>();
    let target = logs(&[0.2, 0.8, 0.0, 0.5, 0.5, 0.0, 1.0, 0.0, 0.0]);
    let draft = logs(&[0.8, 0.2, 0.0, 0.5, 0.5, 0.0]);
    let found = |uniform: f32| {
        let request = Request {
            vocabulary: 3,
            drafts: &[0, 1],
            target: &target,
            draft: Some(&draft),
            temperature: 1.0,
            uniform: &[uniform, 0.9, 0.0],
            // a draw from the target would take the second token of the second row, and no engine need draw from it
            noise: &[0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0],
        };
        outcomes(Method::Block, &request)
    };
    let rejected = Outcome { accepted: 0, tokens: vec![1] };
    assert_eq!(found(1e-3), std::slice::from_ref(&rejected));
    assert_eq!(found(0.0), [rejected, Outcome { accepted: 1, tokens: vec![0, 1] }]);
}

/// Softmax in 32 bits, summed in another order, as `(ln p, p)`.
fn single(logits: &[f32], temperature: f32, backwards: bool) -> Vec<(f32, f32)> {
    let z: Vec<f32> = logits.iter().map(|l| l * (1.0 / temperature)).collect();
    let most = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let terms: Vec<f32> = z.iter().map(|z| (z - most).exp()).collect();
    let sum: f32 = if backwards { terms.iter().rev().sum() } else { terms.iter().sum() };
    z.iter().zip(&terms).map(|(z, term)| (z - (most + sum.ln()), term / sum)).collect()
}

#[test]
fn probabilities_in_thirty_two_bits_lie_within_their_intervals() {
    let mut seed = 3u64;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((seed >> 40) as f32 / (1u32 << 24) as f32 - 0.5) * 30.0
    };
    for temperature in [0.3, 0.7, 1.0, 1.9] {
        for vocabulary in [2, 7, 300] {
            let logits: Vec<f32> = (0..vocabulary).map(|_| next()).collect();
            let law = law_of_row(&logits, temperature);
            for backwards in [false, true] {
                for (interval, (log, p)) in law.iter().zip(single(&logits, temperature, backwards)) {
                    for seen in [f64::from(p), f64::from(log).exp()] {
                        assert!(interval.low <= seen && seen <= interval.high, "{interval:?} {seen}");
                    }
                    let width = interval.high / interval.low.max(f64::MIN_POSITIVE);
                    assert!(interval.low < 1e-30 || width < 1.001, "{interval:?}");
                }
            }
        }
    }
}

#[test]
fn a_token_may_be_drawn_as_long_as_its_score_lies_within_the_rounding_of_both() {
    let may = |weights: [f64; 2], noise: [f32; 2]| drawn(&weights.map(Interval::point), &noise);
    let unit = U as f32;
    // scores of 0 from −4 + 4 and of d: 4·(4 + 1) and 4 units of rounding
    let small = |units: f32| may([(-4f64).exp(), 1.0], [4.0, units * unit]);
    assert_eq!((small(23.0), small(25.0), small(-25.0)), (vec![0, 1], vec![1], vec![0]));
    // scores of 8 and 8 + d: 4·(8 + 8 + 1) units each
    let large = |units: f32| may([1.0, 1.0], [8.0, 8.0 + units * unit]);
    assert_eq!((large(128.0), large(144.0), large(-144.0)), (vec![0, 1], vec![1], vec![0]));
    assert_eq!(may([0.0, 1e-30], [9.0, -9.0]), [1], "what has no weight is not drawn");
}
