//! The moments by their definition against sums written out, and by the fast form against their definition.

use super::*;
use crate::attention::plain::{Platform, Values};
use crate::layout::Layout;
use shardcheck_formats::recipe::Counter;

/// The numbers of a problem.
struct Made {
    heads: usize,
    kv_heads: usize,
    dims: (usize, usize),
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    sink: Vec<f64>,
}

impl Made {
    fn new(rows: usize, tokens: usize, (heads, kv_heads): (usize, usize), dims: (usize, usize)) -> Self {
        let mut random = Counter::new(tokens as u64, 0);
        let mut draw = |count: usize| (0..count).map(|_| random.gaussian() as f32).collect::<Vec<_>>();
        let (query, key) = (draw(rows * heads * dims.0), draw(tokens * kv_heads * dims.0));
        let (value, sink) = (draw(tokens * kv_heads * dims.1), draw(heads));
        Self { heads, kv_heads, dims, query, key, value, sink: sink.into_iter().map(f64::from).collect() }
    }

    fn problem(&self) -> Problem<'_> {
        let values = Values::Separate(self.value.as_slice());
        let (qk_dim, v_dim) = self.dims;
        Problem::new(self.heads, self.kv_heads, qk_dim, v_dim, -0.7, &self.query, &self.key, values)
    }
}

#[track_caller]
fn close(a: f64, b: f64, what: &str) {
    assert!(a == b || (a - b).abs() <= 1e-12 * b.abs().max(1.0), "{what}: {a} against {b}");
}

fn norm(vector: &[f32]) -> f64 {
    vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

/// Score, size and value of each of some tokens.
fn tokens_of(problem: &Problem, row: usize, head: usize, tokens: &[usize]) -> Vec<(f64, f64, Vec<f64>)> {
    let (query, kv_head) = (problem.query_at(row, head), problem.kv_head(head));
    tokens
        .iter()
        .map(|&token| {
            let key = problem.key_at(token, kv_head);
            let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let value = problem.value_at(token, kv_head).iter().map(|v| f64::from(*v)).collect();
            (dot * problem.scale, problem.scale.abs() * norm(query) * norm(key), value)
        })
        .collect()
}

/// Compares one part with sums over its tokens, each written as its field says.
fn check_part(part: &Part, tokens: &[(f64, f64, Vec<f64>)], row_lse: f64) {
    let sum: f64 = tokens.iter().map(|(score, ..)| score.exp()).sum();
    let p = |score: f64| score.exp() / sum;
    let over = |f: &dyn Fn(f64, f64, f64, f64) -> f64, d: usize| -> f64 {
        tokens.iter().map(|(score, size, value)| f(p(*score), *score, *size, value[d])).sum()
    };
    close(part.lse, sum.ln(), "lse");
    close(part.weight, (sum.ln() - row_lse).exp(), "weight");
    let largest = tokens.iter().max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
    close(part.peak, p(largest.0), "peak");
    close(part.peak_a, largest.1, "peak_a");
    close(part.max_a, tokens.iter().map(|token| token.1).fold(0.0, f64::max), "max_a");
    for i in 0..=MAX_POWER {
        for j in 0..=MAX_POWER {
            let power = over(&|p, s, a, _| p * a.powi(i as i32) * s.abs().powi(j as i32), 0);
            close(part.powers[i][j], if i + j > MAX_POWER { 0.0 } else { power }, "powers");
        }
    }
    for d in 0..part.out.len() {
        close(part.out[d], over(&|p, _, _, v| p * v, d), "out");
        close(part.abs[d], over(&|p, _, _, v| p * v.abs(), d), "abs");
        close(part.square[d], over(&|p, _, _, v| p * v * v, d), "square");
        close(part.sum_abs[d], over(&|_, _, _, v| v.abs(), d), "sum_abs");
        close(part.peak_value[d], largest.2[d], "peak_value");
    }
    let statistics = part.statistics.as_ref().unwrap();
    let mean = over(&|p, s, _, _| p * s, 0);
    close(statistics.score_deviation, over(&|p, s, _, _| p * (s - mean).powi(2), 0).sqrt(), "deviation");
    let rest = |score: f64, f: f64| if score == largest.0 { 0.0 } else { f };
    close(statistics.weight_square, over(&|p, s, _, _| rest(s, p * p), 0), "weight_square");
    for d in 0..part.out.len() {
        close(statistics.square[d], over(&|p, s, _, v| rest(s, (p * v).powi(2)), d), "statistics.square");
    }
}

#[test]
fn moments_are_sums_over_the_softmax_of_their_part() {
    let made = Made::new(2, 23, (4, 2), (11, 3));
    let mut problem = made.problem();
    let layout = Layout::new(3, 2, 2).unwrap();
    let visible = Visible::causal(23, 2);
    for sink in [None, Some(made.sink.as_slice())] {
        problem.sink = sink;
        let moments =
            Moments::collect_with::<Platform, f32>(&problem, Split::Ranks(&layout), &visible).unwrap();
        assert_eq!((moments.rows, moments.heads, moments.qk_dim, moments.v_dim), (2, 4, 11, 3));
        for (index, state) in moments.states.iter().enumerate() {
            let (row, head) = (index / 4, index % 4);
            let seen: Vec<usize> = visible[row].positions().collect();
            let all = tokens_of(&problem, row, head, &seen);
            let logit = sink.map(|sink| sink[head]);
            let scores = || all.iter().map(|token| token.0).chain(logit);
            let lse = scores().map(f64::exp).sum::<f64>().ln();
            close(state.lse, lse, "row lse");
            close(state.max_abs_score, scores().map(f64::abs).fold(0.0, f64::max), "max_abs_score");
            let (low, high) = (scores().fold(f64::MAX, f64::min), scores().fold(f64::MIN, f64::max));
            close(state.score_range, high - low, "score_range");
            assert_eq!(state.sink.map(|(logit, _)| logit), logit);
            if let Some((logit, share)) = state.sink {
                close(share, (logit - lse).exp(), "sink share");
            }
            assert_eq!(state.tokens, seen.len());
            for (rank, part) in state.parts.iter().enumerate() {
                let held: Vec<usize> = seen.iter().copied().filter(|&t| layout.owner(t) == rank).collect();
                assert_eq!(part.tokens, held.len());
                check_part(part, &tokens_of(&problem, row, head, &held), lse);
            }
            let centred = state.centred.as_ref().unwrap();
            for d in 0..3 {
                let out: f64 = all.iter().map(|(s, _, v)| (s - lse).exp() * v[d]).sum();
                close(state.out[d], out, "row out");
                let away: f64 = all.iter().map(|(s, _, v)| (s - lse).exp() * (v[d] - out).abs()).sum();
                close(centred.all[d], away, "centred");
                let of_peak = |part: &Part| part.weight * part.peak * (part.peak_value[d] - out).abs();
                close(centred.peaks[d], state.parts.iter().map(of_peak).sum(), "peaks");
            }
        }
    }
}

#[test]
fn of_tokens_with_the_largest_score_the_first_is_the_peak_and_the_others_are_rivals() {
    // keys of equal products with the query and of other lengths; the last one is too far off to be a rival
    let (query, key, value) = ([1.0, 0.0], [2.0, 3.0, 2.0, 5.0, 2.0, 4.0, 1.0, 9.0], [7.0, 1.0, 2.0, 3.0]);
    let problem = Problem::new(1, 1, 2, 1, 1.0, &query, &key, Values::Separate(&value));
    let (layout, visible) = (Layout::single(), [Visible::Prefix(4)]);
    let defined = Moments::collect_with::<Platform, f32>(&problem, Split::Ranks(&layout), &visible).unwrap();
    let fast = Moments::collect(&problem, Split::Ranks(&layout), &visible, Passes::One).unwrap();
    for moments in [defined, fast] {
        let part = &moments.states[0].parts[0];
        assert_eq!((part.peak_a, part.peak_value[0]), (norm(&key[..2]), 7.0));
        assert_eq!((part.rival_a, part.max_a), (Some(norm(&key[2..4])), norm(&key[6..])));
    }
}

#[test]
fn equal_scores_are_one_class_and_their_errors_add_up() {
    let (query, key, value) = ([1.0], [1.0, 0.5, 0.5, 0.25], [1.0, 2.0, -4.0, 8.0]);
    let problem = Problem::new(1, 1, 1, 1, 1.0, &query, &key, Values::Separate(&value));
    let (layout, visible) = (Layout::single(), [Visible::Prefix(4)]);
    let moments = Moments::collect_with::<Platform, f32>(&problem, Split::Ranks(&layout), &visible).unwrap();
    let statistics = moments.states[0].parts[0].statistics.as_ref().unwrap();
    let sum = 1f64.exp() + 2.0 * 0.5f64.exp() + 0.25f64.exp();
    let (half, quarter) = (0.5f64.exp() / sum, 0.25f64.exp() / sum);
    assert_eq!(statistics.distinct, 0.75);
    close(statistics.class_square[0], (6.0 * half).powi(2) + (8.0 * quarter).powi(2), "class_square");
    close(statistics.weight_square, 2.0 * half * half + quarter * quarter, "weight_square");
}

/// Tokens, what each row sees, heads and KV heads, lengths of key and value.
type Setting = (usize, Vec<Visible>, (usize, usize), (usize, usize));

#[test]
fn the_fast_form_takes_the_moments_that_are_defined() {
    // few tokens; more than a chunk, whose running sums are joined; views that are no prefix; ranks without a token
    let sets = vec![
        Visible::set(vec![0, 4, 5, 77]).unwrap(),
        Visible::Prefix(90),
        Visible::Range { start: 3, end: 3 },
    ];
    let problems: [Setting; 4] = [
        (5, Visible::causal(5, 3), (4, 2), (9, 3)),
        (90, sets, (6, 2), (4, 17)),
        (120, Visible::sliding_window(120, 3, 50), (3, 1), (3, 2)),
        (9000, Visible::causal(9000, 1), (2, 1), (2, 3)),
    ];
    for (tokens, visible, heads, dims) in problems {
        let made = Made::new(visible.len(), tokens, heads, dims);
        for (layout, sink, softcap) in
            [(Layout::single(), true, None), (Layout::new(8, 1, 1).unwrap(), false, Some(1.5))]
        {
            let mut problem = made.problem();
            problem.sink = sink.then_some(made.sink.as_slice());
            problem.softcap = softcap;
            let split = Split::Ranks(&layout);
            let defined = Moments::collect_with::<Platform, f32>(&problem, split, &visible).unwrap();
            let fast = Moments::collect(&problem, split, &visible, Passes::Two).unwrap();
            for (fast, defined) in fast.states.iter().zip(&defined.states) {
                assert_same_state(fast, defined);
            }
            let once = Moments::collect(&problem, split, &visible, Passes::One).unwrap();
            assert!(once.states.iter().all(|state| state.centred.is_none()));
        }
    }
}

fn assert_same_state(fast: &State, defined: &State) {
    assert_eq!(fast.tokens, defined.tokens);
    let numbers = |state: &State| {
        let centred = state.centred.as_ref().unwrap();
        let mut numbers = vec![state.lse, state.max_abs_score, state.score_range];
        numbers.extend(state.sink.iter().flat_map(|(logit, share)| [*logit, *share]));
        numbers.extend(state.out.iter().chain(&centred.all).chain(&centred.peaks));
        numbers
    };
    for (fast, defined) in numbers(fast).into_iter().zip(numbers(defined)) {
        close(fast, defined, "state");
    }
    let numbers = |part: &Part| {
        let mut numbers = vec![part.lse, part.weight, part.peak, part.peak_a, part.max_a];
        numbers.extend(part.powers.iter().flatten());
        numbers.extend(part.out.iter().chain(&part.abs).chain(&part.square).chain(&part.sum_abs));
        numbers.extend(&part.peak_value);
        numbers
    };
    for (fast, defined) in fast.parts.iter().zip(&defined.parts) {
        assert_eq!(fast.tokens, defined.tokens);
        for (fast, defined) in numbers(fast).into_iter().zip(numbers(defined)) {
            close(fast, defined, "part");
        }
        // tokens that were rivals of an earlier maximum may be counted too, and nothing else
        assert!(fast.rival_a >= defined.rival_a && fast.rival_a <= Some(fast.max_a), "{fast:?}");
    }
}
