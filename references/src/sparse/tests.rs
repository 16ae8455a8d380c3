//! Scores and sets against definitions that share nothing with them.

use shardcheck_formats::recipe::Counter;
use shardcheck_formats::{Merge, round_bf16};

use super::*;

/// 32-bit sums in any order, scores that stay in 32 bits.
fn contract() -> Contract {
    Contract { u_acc: U32, output: Dtype::F32, ..Contract::bf16_default(Merge::A2a) }
}

/// Every subset of so many of `count`.
fn subsets(count: usize, size: usize) -> Vec<Vec<usize>> {
    (0..1u32 << count)
        .filter(|mask| mask.count_ones() as usize == size)
        .map(|mask| (0..count).filter(|index| mask >> index & 1 == 1).collect())
        .collect()
}

/// Whether a set is the best for some scores at the ends or the middles of their intervals: with every one tried, no interval is missed,
/// since only the order counts and a set is best first where its own are highest and all others lowest.
fn is_best_somewhere(scores: &[Score], set: &[usize]) -> bool {
    let ways = 3usize.pow(scores.len() as u32);
    (0..ways).any(|way| {
        let value = |index: usize| {
            let end = (way / 3usize.pow(index as u32) % 3) as f64 - 1.0;
            scores[index].value + end * scores[index].error
        };
        let least = set.iter().map(|index| value(*index)).fold(f64::INFINITY, f64::min);
        (0..scores.len()).filter(|index| !set.contains(index)).all(|index| value(index) <= least)
    })
}

#[test]
fn a_set_is_right_if_some_scores_within_the_bounds_make_it_the_best() {
    let mut drawn = Counter::new(3, 1);
    let (mut right, mut wrong) = (0, 0);
    for round in 0..60 {
        let count = 2 + round % 5;
        // few distinct values and wide bounds: ties, overlaps and certain ones
        let scores: Vec<Score> = (0..count)
            .map(|_| Score { value: drawn.below(5) as f64, error: drawn.below(3) as f64 / 2.0 })
            .collect();
        let all: Vec<usize> = (0..count).collect();
        for size in 0..=count {
            for set in subsets(count, size) {
                let wanted = is_best_somewhere(&scores, &set);
                assert_eq!(admits(&scores, &all, &set).is_ok(), wanted, "{scores:?} {set:?}");
                *(if wanted { &mut right } else { &mut wrong }) += 1;
            }
            let always = |token: &usize| {
                subsets(count, size)
                    .iter()
                    .filter(|set| is_best_somewhere(&scores, set))
                    .all(|set| set.contains(token))
            };
            let wanted: Vec<usize> = all.iter().copied().filter(always).collect();
            let seen = certain(&scores, &all, size);
            if size > 0 {
                assert!(
                    seen.iter().all(|token| wanted.contains(token)),
                    "{scores:?} {size}: {seen:?} {wanted:?}"
                );
            }
        }
    }
    assert!(right > 300 && wrong > 300, "{right} {wrong}");
}

#[test]
fn a_refusal_names_the_best_that_is_missing_and_the_worst_that_is_there() {
    let scores = [5.0, 1.0, 4.0, 3.0].map(Score::exact);
    assert_eq!(admits(&scores, &[0, 1, 2, 3], &[1, 3]), Err(Refusal { missing: 0, instead: 1 }));
    assert_eq!(admits(&scores, &[1, 3], &[3]), Ok(()), "what is no candidate is not missing");
    assert_eq!(admits(&scores, &[0, 1, 2, 3], &[]), Ok(()), "nothing can be instead");
    assert_eq!(best(&[5.0, 1.0, 5.0, 3.0], &[0, 1, 2, 3], 3), [0, 2, 3]);
}

/// The same score in exact integers, for queries, keys and weights that are whole.
fn whole_score(query: &[f32], weights: &[f32], key: &[f32]) -> f64 {
    let dots = query.chunks(key.len()).map(|head| {
        let dot: i64 = head.iter().zip(key).map(|(q, k)| (*q as i64) * (*k as i64)).sum();
        dot.max(0)
    });
    dots.zip(weights).map(|(dot, weight)| dot * *weight as i64).sum::<i64>() as f64
}

#[test]
fn a_score_is_the_weighted_sum_of_what_relu_leaves_of_each_head() {
    let mut drawn = Counter::new(4, 1);
    let mut whole = |count: usize| -> Vec<f32> { (0..count).map(|_| drawn.below(7) as f32 - 3.0).collect() };
    for _ in 0..200 {
        let (query, weights, key) = (whole(12), whole(3), whole(4));
        let seen = score(&Heads { query: &query, weights: &weights }, &key, 2.0, &contract());
        assert_eq!(seen.value, 2.0 * whole_score(&query, &weights, &key));
        assert!(seen.error < 1e-4);
    }
    // one head looks away, one has a negative weight
    let heads = Heads { query: &[1.0, 0.0, -1.0, 0.0, 2.0, 0.0], weights: &[3.0, 100.0, -1.0] };
    assert_eq!(score(&heads, &[2.0, 9.0], 1.0, &contract()).value, 3.0 * 2.0 - 4.0);
}

/// Scores in 32 bits: sums from the front, from the back, or by pairs, and the scale in three places.
fn in_32_bits(heads: &Heads<'_, f32>, key: &[f32], scale: f32, way: usize) -> f32 {
    let sum = |mut terms: Vec<f32>| -> f32 {
        match way % 3 {
            0 => terms.iter().fold(0.0, |sum, term| sum + term),
            1 => terms.iter().rev().fold(0.0, |sum, term| sum + term),
            _ => {
                while terms.len() > 1 {
                    terms = terms.chunks(2).map(|pair| pair.iter().sum()).collect();
                }
                terms[0]
            }
        }
    };
    let [of_dot, of_head, of_sum] = [0, 1, 2].map(|place| if way / 3 % 3 == place { scale } else { 1.0 });
    let head = |(query, weight): (&[f32], &f32)| {
        let dot = sum(query.iter().zip(key).map(|(q, k)| q * k).collect());
        weight * (dot * of_dot).max(0.0) * of_head
    };
    sum(heads.query.chunks(key.len()).zip(heads.weights).map(head).collect()) * of_sum
}

#[test]
fn scores_of_any_order_of_summation_lie_within_the_bound_and_not_far_from_it() {
    let mut drawn = Counter::new(5, 1);
    let mut nearest = 0.0f64;
    for _ in 0..4000 {
        let (heads, width) = (1 + drawn.below(4) as usize, 2 + drawn.below(30) as usize);
        let mut values =
            |count: usize| -> Vec<f32> { (0..count).map(|_| round_bf16(drawn.gaussian() as f32)).collect() };
        let (query, weights, key) = (values(heads * width), values(heads), values(width));
        let scale = (0.1 + drawn.unit_f64()) as f32;
        let own = Heads { query: &query, weights: &weights };
        let allowed = score(&own, &key, f64::from(scale), &contract());
        for way in 0..9 {
            let seen = f64::from(in_32_bits(&own, &key, scale, way));
            let share = (seen - allowed.value).abs() / allowed.error;
            assert!(share <= 1.0, "{share}");
            nearest = nearest.max(share);
        }
    }
    // a bound a hundred times too wide would let other sets pass
    assert!(nearest > 0.02, "{nearest}");
}

#[test]
fn the_best_of_each_rank_cover_the_best_of_all() {
    let mut drawn = Counter::new(6, 1);
    for world in [1, 2, 3, 4] {
        for count in [0, 1, 5, 23] {
            let values: Vec<f64> = (0..count).map(|_| drawn.below(9) as f64).collect();
            let all: Vec<usize> = (0..count).collect();
            for k in [1, 3, 8] {
                let of_rank = |rank: usize| {
                    let own: Vec<usize> = all.iter().copied().filter(|token| token % world == rank).collect();
                    best(&values, &own, k)
                };
                let gathered: Vec<usize> = (0..world).flat_map(of_rank).collect();
                let scores: Vec<Score> = values.iter().copied().map(Score::exact).collect();
                assert_eq!(admits(&scores, &all, &best(&values, &gathered, k)), Ok(()));
            }
        }
    }
}
