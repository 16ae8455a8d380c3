//! The inner loops: products of a tile of keys with packed queries, exponentials, products with a tile of values.
//!
//! One number of a key is broadcast against eight query *vectors* at a time, so keys are read as they lie and the
//! softmax runs over vectors. Register tiles of 6 × 8 keep twelve accumulators of four doubles busy, where two
//! fused units of latency four need eight. Everything that is read in a long loop lies in *panels* of eight
//! columns, `[columns / 8][tokens][8]`: with a power of two between rows, a row-major tile would fall into one
//! set of the cache. Each loop is compiled twice: for AVX2 with FMA, and portably, where a product is never fused
//! (a fused one would be a library call).

/// Query vectors of a panel.
pub(crate) const LANES: usize = 8;
/// Value dimensions of a panel; values are padded to a multiple of it.
pub(crate) const WIDTH: usize = 8;
/// Tokens of a register tile of scores; a tile of keys holds a multiple of it.
pub(crate) const STEP: usize = 6;
/// Powers of size and score that are summed: `i + j ≤ 4`.
pub(crate) const POWERS: usize = 15;

/// Dimensions that are summed at a time: a panel of queries that deep stays in the first-level cache.
const DEPTH: usize = 192;
/// Most tokens of a tile.
pub(crate) const MAX_TOKENS: usize = 8 * STEP;
/// Vectors of a register tile of outputs.
const ROWS: usize = 6;
/// Exponents below this give exactly zero.
const VANISHED: f64 = -708.0;

/// `a·b + c`, fused where that is an instruction.
#[inline(always)]
fn madd<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `[f(0), …, f(7)]`.
#[inline(always)]
fn each(f: impl FnMut(usize) -> f64) -> [f64; LANES] {
    std::array::from_fn(f)
}

/// Declares a kernel by its body: the caller's entry, and the copy for AVX2 with FMA.
macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident, $fused:ident, $body:ident($($arg:ident: $type:ty),* $(,)?)) => {
        $(#[$doc])*
        pub(crate) fn $name($($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: the processor has the features that the copy is compiled for
                return unsafe { $fused($($arg),*) };
            }
            $body::<{ cfg!(target_arch = "aarch64") }>($($arg),*);
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn $fused($($arg: $type),*) {
            $body::<true>($($arg),*);
        }
    };
}

kernel! {
    /// `scores[token, vector] = Σ_d keys[token][d]·queries[d, vector]`.
    ///
    /// `keys` is `[tokens][qk_dim]` with a multiple of [`STEP`] tokens; `queries` are panels over `d` and
    /// `scores` panels over tokens, of vectors.
    products, products_fused, products_body(keys: &[f64], queries: &[f64], qk_dim: usize, scores: &mut [f64])
}

#[inline(always)]
fn products_body<const FMA: bool>(keys: &[f64], queries: &[f64], qk_dim: usize, scores: &mut [f64]) {
    let tokens = keys.len() / qk_dim;
    scores.fill(0.0);
    for start in (0..qk_dim).step_by(DEPTH) {
        let depth = DEPTH.min(qk_dim - start);
        for (query, scores) in
            queries.chunks_exact(LANES * qk_dim).zip(scores.chunks_exact_mut(tokens * LANES))
        {
            let lanes = &query.as_chunks::<LANES>().0[start..start + depth];
            let blocks = scores.as_chunks_mut::<LANES>().0.as_chunks_mut::<STEP>().0;
            for (keys, scores) in keys.chunks_exact(STEP * qk_dim).zip(blocks) {
                let rows: [&[f64]; STEP] =
                    std::array::from_fn(|i| &keys[i * qk_dim + start..][..lanes.len()]);
                let mut sums = *scores;
                for d in 0..lanes.len() {
                    for i in 0..STEP {
                        for j in 0..LANES {
                            sums[i][j] = madd::<FMA>(rows[i][d], lanes[d][j], sums[i][j]);
                        }
                    }
                }
                *scores = sums;
            }
        }
    }
}

kernel! {
    /// Raises `max` to the largest score of each vector; NaN counts as nothing. `scores` are panels over
    /// `tokens`.
    raise, raise_fused, raise_body(scores: &[f64], tokens: usize, max: &mut [f64])
}

#[inline(always)]
fn raise_body<const FMA: bool>(scores: &[f64], tokens: usize, max: &mut [f64]) {
    for (panel, max) in scores.chunks_exact(tokens * LANES).zip(max.as_chunks_mut::<LANES>().0) {
        let mut largest = *max;
        for scores in panel.as_chunks::<LANES>().0 {
            for j in 0..LANES {
                largest[j] = if scores[j] > largest[j] { scores[j] } else { largest[j] };
            }
        }
        *max = largest;
    }
}

kernel! {
    /// Makes weights of scores less their vector's maximum, and adds them to `sum`.
    ///
    /// `scores` and `weights` are panels of vectors over `tokens`; a score of −inf weighs exactly zero, under any
    /// finite maximum.
    weigh, weigh_fused, weigh_body(
        scores: &[f64],
        tokens: usize,
        max: &[f64],
        sum: &mut [f64],
        weights: &mut [f64],
    )
}

#[inline(always)]
fn weigh_body<const FMA: bool>(
    scores: &[f64],
    tokens: usize,
    max: &[f64],
    sum: &mut [f64],
    weights: &mut [f64],
) {
    let lanes = max.as_chunks::<LANES>().0.iter().zip(sum.as_chunks_mut::<LANES>().0);
    let panels = scores.chunks_exact(tokens * LANES).zip(weights.chunks_exact_mut(tokens * LANES));
    for ((scores, weights), (max, sum)) in panels.zip(lanes) {
        let mut total = *sum;
        for (scores, weights) in scores.as_chunks::<LANES>().0.iter().zip(weights.as_chunks_mut::<LANES>().0)
        {
            *weights = exp_nonpositive::<FMA>(each(|j| scores[j] - max[j]));
            total = each(|j| total[j] + weights[j]);
        }
        *sum = total;
    }
}

/// `e^x` for `x ≤ 0`, within about an ulp; zero below −708, where it would no longer be a normal number; NaN at
/// NaN. Lane by lane in every step, or the compiler would not see that the lanes are alike.
#[inline(always)]
fn exp_nonpositive<const FMA: bool>(x: [f64; LANES]) -> [f64; LANES] {
    // adding this leaves the nearest integer in the low bits of the fraction
    const TO_INTEGER: f64 = 6_755_399_441_055_744.0;
    const LN_2_HIGH: f64 = f64::from_bits(0x3FE6_2E42_FEE0_0000);
    const LN_2_LOW: f64 = f64::from_bits(0x3DEA_39EF_3579_3C76);
    const COEFFICIENTS: [f64; 11] = [
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
    ];
    let bounded = each(|j| if x[j] < VANISHED { VANISHED } else { x[j] });
    let shifted = each(|j| madd::<FMA>(bounded[j], std::f64::consts::LOG2_E, TO_INTEGER));
    let doublings = each(|j| TO_INTEGER - shifted[j]);
    let high = each(|j| madd::<FMA>(doublings[j], LN_2_HIGH, bounded[j]));
    let r = each(|j| madd::<FMA>(doublings[j], LN_2_LOW, high[j]));
    let mut series = [0.0; LANES];
    for coefficient in COEFFICIENTS {
        series = each(|j| madd::<FMA>(series[j], r[j], coefficient));
    }
    let square = each(|j| series[j] * r[j]);
    let reduced = each(|j| 1.0 + madd::<FMA>(square[j], r[j], r[j]));
    let scaled = each(|j| f64::from_bits(reduced[j].to_bits().wrapping_add(shifted[j].to_bits() << 52)));
    // the bits of a NaN would not survive the scaling
    let kept = each(|j| madd::<FMA>(x[j], 0.0, scaled[j]));
    each(|j| if x[j] < VANISHED { 0.0 } else { kept[j] })
}

kernel! {
    /// `out[vector][d] += Σ_token weights[token, vector]·values[token, d]` for the first `out.len() / width`
    /// vectors.
    ///
    /// `weights` and `values` are panels over `tokens`, at most [`MAX_TOKENS`]; `out` is `[vectors][width]`.
    add_values, add_values_fused, add_values_body(
        weights: &[f64],
        values: &[f64],
        tokens: usize,
        width: usize,
        out: &mut [f64],
    )
}

#[inline(always)]
fn add_values_body<const FMA: bool>(
    weights: &[f64],
    values: &[f64],
    tokens: usize,
    width: usize,
    out: &mut [f64],
) {
    let mut first = 0;
    let mut rest = out;
    while !rest.is_empty() {
        let left = rest.len() / width;
        let taken = if left >= ROWS { ROWS } else { 1 << left.ilog2() };
        let (rows, after) = rest.split_at_mut(taken * width);
        match taken {
            ROWS => add_rows::<FMA, ROWS>(weights, first, values, tokens, rows),
            4 => add_rows::<FMA, 4>(weights, first, values, tokens, rows),
            2 => add_rows::<FMA, 2>(weights, first, values, tokens, rows),
            _ => add_rows::<FMA, 1>(weights, first, values, tokens, rows),
        }
        (first, rest) = (first + taken, after);
    }
}

/// The same for the `N` vectors from `first` on, whose outputs are `rows`. Their weights are packed before they
/// are broadcast against every panel of values.
#[inline(always)]
fn add_rows<const FMA: bool, const N: usize>(
    weights: &[f64],
    first: usize,
    values: &[f64],
    tokens: usize,
    rows: &mut [f64],
) {
    let width = rows.len() / N;
    let mut packed = [[0.0; N]; MAX_TOKENS];
    let packed = &mut packed[..tokens];
    for i in 0..N {
        let (panel, lane) = ((first + i) / LANES, (first + i) % LANES);
        let column = weights[panel * tokens * LANES..][..tokens * LANES].as_chunks::<LANES>().0;
        for (to, from) in packed.iter_mut().zip(column) {
            to[i] = from[lane];
        }
    }
    for (panel, values) in values.chunks_exact(tokens * WIDTH).enumerate() {
        let start = panel * WIDTH;
        let mut sums = [[0.0; WIDTH]; N];
        for (i, sums) in sums.iter_mut().enumerate() {
            sums.copy_from_slice(&rows[i * width + start..][..WIDTH]);
        }
        for (weights, values) in packed.iter().zip(values.as_chunks::<WIDTH>().0) {
            for i in 0..N {
                for j in 0..WIDTH {
                    sums[i][j] = madd::<FMA>(weights[i], values[j], sums[i][j]);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            rows[i * width + start..][..WIDTH].copy_from_slice(sums);
        }
    }
}

kernel! {
    /// Adds `w·a^i·|s|^j` of a tile of tokens to `powers`, `[POWERS][vectors]`, in the order `i = 0: j = 0..=4, i
    /// = 1: j = 0..=3, …`. The size is `a = key_size[token]·query_size[vector]`; `weights` and `scores` are
    /// panels over the tokens. Tokens of weight zero add nothing, whatever their score.
    add_powers, add_powers_fused, add_powers_body(
        weights: &[f64],
        scores: &[f64],
        key_size: &[f64],
        query_size: &[f64],
        powers: &mut [f64],
    )
}

#[inline(always)]
fn add_powers_body<const FMA: bool>(
    weights: &[f64],
    scores: &[f64],
    key_size: &[f64],
    query_size: &[f64],
    powers: &mut [f64],
) {
    let (vectors, tokens) = (query_size.len(), key_size.len());
    let panels = weights.chunks_exact(tokens * LANES).zip(scores.chunks_exact(tokens * LANES));
    for (group, (weights, scores)) in panels.enumerate() {
        let mut sums = [[0.0; LANES]; POWERS];
        let query_size: [f64; LANES] = std::array::from_fn(|j| query_size[group * LANES + j]);
        let lanes = weights.as_chunks::<LANES>().0.iter().zip(scores.as_chunks::<LANES>().0);
        for ((weights, scores), key_size) in lanes.zip(key_size) {
            let score: [f64; LANES] =
                std::array::from_fn(|j| if weights[j] == 0.0 { 0.0 } else { scores[j].abs() });
            let (mut by_size, mut index) = (*weights, 0);
            for i in 0..5 {
                let mut term = by_size;
                for _ in 0..5 - i {
                    for j in 0..LANES {
                        sums[index][j] += term[j];
                        term[j] *= score[j];
                    }
                    index += 1;
                }
                for j in 0..LANES {
                    by_size[j] *= key_size * query_size[j];
                }
            }
        }
        for (power, sums) in sums.iter().enumerate() {
            for (to, sum) in powers[power * vectors + group * LANES..][..LANES].iter_mut().zip(sums) {
                *to += sum;
            }
        }
    }
}

kernel! {
    /// `spread[d] += Σ_token weights[token, vector]·|values[token, d] − centre[d]|`, for the vector in lane
    /// `lane` of the panel `weights`; `values` are panels over its tokens.
    add_spread, add_spread_fused, add_spread_body(
        weights: &[f64],
        lane: usize,
        values: &[f64],
        centre: &[f64],
        spread: &mut [f64],
    )
}

#[inline(always)]
fn add_spread_body<const FMA: bool>(
    weights: &[f64],
    lane: usize,
    values: &[f64],
    centre: &[f64],
    spread: &mut [f64],
) {
    let weights = weights.as_chunks::<LANES>().0;
    let columns = centre.as_chunks::<WIDTH>().0.iter().zip(spread.as_chunks_mut::<WIDTH>().0);
    for (values, (centre, spread)) in values.chunks_exact(weights.len() * WIDTH).zip(columns) {
        let mut sums = *spread;
        for (weights, values) in weights.iter().zip(values.as_chunks::<WIDTH>().0) {
            for j in 0..WIDTH {
                sums[j] = madd::<FMA>(weights[lane], (values[j] - centre[j]).abs(), sums[j]);
            }
        }
        *spread = sums;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_formats::recipe::Counter;

    fn drawn(seed: u64, count: usize) -> Vec<f64> {
        let mut random = Counter::new(seed, 0);
        (0..count).map(|_| random.gaussian()).collect()
    }

    fn close(a: &[f64], b: &[f64]) {
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(b) {
            assert!((a - b).abs() <= 1e-12 * b.abs().max(1.0), "{a} against {b}");
        }
    }

    /// `[rows][columns]` as panels of eight columns.
    fn panels(x: &[f64], columns: usize) -> Vec<f64> {
        let rows = x.len() / columns;
        let mut packed = vec![0.0; x.len()];
        for row in 0..rows {
            for column in 0..columns {
                packed[(column / 8 * rows + row) * 8 + column % 8] = x[row * columns + column];
            }
        }
        packed
    }

    #[test]
    fn products_are_dot_products() {
        let (tokens, qk_dim, vectors) = (12, 7, 16);
        let (keys, queries) = (drawn(1, tokens * qk_dim), drawn(2, qk_dim * vectors));
        let (mut scores, mut portable) = (vec![0.0; tokens * vectors], vec![0.0; tokens * vectors]);
        products(&keys, &panels(&queries, vectors), qk_dim, &mut scores);
        products_body::<false>(&keys, &panels(&queries, vectors), qk_dim, &mut portable);
        let mut expected = vec![0.0; tokens * vectors];
        for token in 0..tokens {
            for vector in 0..vectors {
                expected[token * vectors + vector] =
                    (0..qk_dim).map(|d| keys[token * qk_dim + d] * queries[d * vectors + vector]).sum();
            }
        }
        close(&scores, &panels(&expected, vectors));
        close(&portable, &panels(&expected, vectors));
    }

    #[test]
    fn exponentials_agree_with_the_platform_down_to_nothing() {
        let mut random = Counter::new(3, 0);
        for i in 0..20_000 {
            let far = if i % 2 == 0 { 700.0 } else { 3.0 };
            let x = std::array::from_fn(|_| -random.unit_f64() * far);
            for own in [exp_nonpositive::<true>(x), exp_nonpositive::<false>(x)] {
                for (x, own) in x.iter().zip(own) {
                    assert!((own - x.exp()).abs() <= 1e-15 * x.exp(), "e^{x} = {own}");
                }
            }
        }
        let ends =
            exp_nonpositive::<false>([f64::NEG_INFINITY, -708.1, -1e300, 0.0, f64::NAN, -1.0, -0.0, -707.9]);
        assert_eq!(ends[..4], [0.0, 0.0, 0.0, 1.0]);
        assert!(ends[4].is_nan() && ends[6] == 1.0 && ends[7] > 0.0);
    }

    #[test]
    fn outputs_are_weighted_sums_for_any_number_of_vectors() {
        for used in 1..=16 {
            let (tokens, vectors, width) = (5, 16, 24);
            let (weights, values) = (drawn(4, tokens * vectors), drawn(5, tokens * width));
            let start = drawn(6, used * width);
            let (mut fast, mut portable, mut expected) = (start.clone(), start.clone(), start);
            let (packed, columns) = (panels(&weights, vectors), panels(&values, width));
            add_values(&packed, &columns, tokens, width, &mut fast);
            add_values_body::<false>(&packed, &columns, tokens, width, &mut portable);
            for token in 0..tokens {
                for vector in 0..used {
                    for d in 0..width {
                        expected[vector * width + d] +=
                            weights[token * vectors + vector] * values[token * width + d];
                    }
                }
            }
            close(&fast, &expected);
            close(&portable, &expected);
        }
    }

    #[test]
    fn powers_are_those_of_the_plain_sum() {
        let (tokens, vectors) = (4, 16);
        let weights: Vec<f64> = drawn(7, tokens * vectors).iter().map(|x| x.abs()).collect();
        let (scores, query_size) = (drawn(8, tokens * vectors), drawn(9, vectors));
        let key_size = [1.0, 2.0, 0.5, 3.0];
        let mut powers = vec![0.0; POWERS * vectors];
        add_powers(
            &panels(&weights, vectors),
            &panels(&scores, vectors),
            &key_size,
            &query_size,
            &mut powers,
        );
        for vector in 0..vectors {
            let mut plain = [[0.0; 5]; 5];
            for token in 0..tokens {
                let at = token * vectors + vector;
                let size = key_size[token] * query_size[vector];
                crate::moments::add_powers(&mut plain, weights[at], size, scores[at].abs());
            }
            let flat: Vec<f64> = (0..5).flat_map(|i| plain[i][..5 - i].to_vec()).collect();
            let own: Vec<f64> = (0..POWERS).map(|power| powers[power * vectors + vector]).collect();
            close(&own, &flat);
        }
    }

    #[test]
    fn a_spread_is_a_weighted_sum_of_distances() {
        let (tokens, width) = (5, 16);
        let (weights, values, centre) = (drawn(10, tokens * 8), drawn(11, tokens * width), drawn(12, width));
        let mut spread = vec![0.0; width];
        add_spread(&weights, 3, &panels(&values, width), &centre, &mut spread);
        let expected: Vec<f64> = (0..width)
            .map(|d| {
                (0..tokens).map(|t| weights[t * 8 + 3] * (values[t * width + d] - centre[d]).abs()).sum()
            })
            .collect();
        close(&spread, &expected);
    }

    #[test]
    fn a_masked_score_of_minus_infinity_adds_no_power() {
        let mut powers = vec![0.0; POWERS * LANES];
        add_powers(&[0.0; LANES], &[f64::NEG_INFINITY; LANES], &[1.0], &[1.0; LANES], &mut powers);
        assert!(powers.iter().all(|power| *power == 0.0));
    }
}
