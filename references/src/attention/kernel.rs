//! The inner loops: products of a tile of keys with packed queries, exponentials, products with a tile of values.
//!
//! One number of a key is broadcast against eight query *vectors* at a time, so keys are read as they lie and scores
//! come out as `[token][vector]`, ready for a softmax that runs over vectors. Register tiles of 6 × 8 keep twelve
//! accumulators of four doubles busy, more than what two fused units of latency four need. Each loop is compiled
//! twice: for AVX2 with FMA, and portably, where a product is never fused (a fused one would be a library call).

/// Query vectors in a packed group.
pub(crate) const LANES: usize = 8;
/// Tokens of a register tile; a tile of keys holds a multiple of it.
pub(crate) const STEP: usize = 6;
/// Value dimensions of a register tile; values are padded to a multiple of it.
pub(crate) const WIDTH: usize = 8;
/// Powers of size and score that are summed: `i + j ≤ 4`.
pub(crate) const POWERS: usize = 15;

/// Vectors of a register tile of outputs.
const ROWS: usize = 6;
/// Exponents below this give exactly zero.
const VANISHED: f64 = -708.0;

/// `a·b + c`, fused where that is an instruction.
#[inline(always)]
fn madd<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
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
    /// `scores[token][vector] = Σ_d keys[token][d]·queries[vector / 8][d][vector mod 8]`.
    ///
    /// `keys` is `[tokens][qk_dim]` with a multiple of [`STEP`] tokens, `queries` `[vectors / 8][qk_dim][8]`, `scores`
    /// `[tokens][vectors]`.
    products, products_fused, products_body(keys: &[f64], queries: &[f64], qk_dim: usize, vectors: usize, scores: &mut [f64])
}

#[inline(always)]
fn products_body<const FMA: bool>(
    keys: &[f64],
    queries: &[f64],
    qk_dim: usize,
    vectors: usize,
    scores: &mut [f64],
) {
    for (block, keys) in keys.chunks_exact(STEP * qk_dim).enumerate() {
        for (group, query) in queries.chunks_exact(LANES * qk_dim).enumerate() {
            let lanes = query.as_chunks::<LANES>().0;
            let rows: [&[f64]; STEP] = std::array::from_fn(|i| &keys[i * qk_dim..][..lanes.len()]);
            let mut sums = [[0.0; LANES]; STEP];
            for d in 0..lanes.len() {
                for i in 0..STEP {
                    for j in 0..LANES {
                        sums[i][j] = madd::<FMA>(rows[i][d], lanes[d][j], sums[i][j]);
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                let start = (block * STEP + i) * vectors + group * LANES;
                scores[start..start + LANES].copy_from_slice(sums);
            }
        }
    }
}

kernel! {
    /// Turns scores, less their vector's maximum, into weights in place, and adds the weights to `sum`.
    ///
    /// `scores` is `[tokens][vectors]`; a score of −inf weighs exactly zero, under any finite maximum.
    weigh, weigh_fused, weigh_body(scores: &mut [f64], max: &[f64], sum: &mut [f64])
}

#[inline(always)]
fn weigh_body<const FMA: bool>(scores: &mut [f64], max: &[f64], sum: &mut [f64]) {
    let (max, sum) = (max.as_chunks::<LANES>().0, sum.as_chunks_mut::<LANES>().0);
    for row in scores.chunks_exact_mut(max.len() * LANES) {
        for ((scores, max), sum) in row.as_chunks_mut::<LANES>().0.iter_mut().zip(max).zip(sum.iter_mut()) {
            for j in 0..LANES {
                scores[j] = exp_nonpositive::<FMA>(scores[j] - max[j]);
                sum[j] += scores[j];
            }
        }
    }
}

/// `e^x` for `x ≤ 0`, within about an ulp; zero below −708, where it would no longer be a normal number; NaN at NaN.
#[inline(always)]
fn exp_nonpositive<const FMA: bool>(x: f64) -> f64 {
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
    let bounded = if x < VANISHED { VANISHED } else { x };
    let shifted = madd::<FMA>(bounded, std::f64::consts::LOG2_E, TO_INTEGER);
    let doublings = shifted - TO_INTEGER;
    let r = madd::<FMA>(-doublings, LN_2_LOW, madd::<FMA>(-doublings, LN_2_HIGH, bounded));
    let mut series = 0.0;
    for coefficient in COEFFICIENTS {
        series = madd::<FMA>(series, r, coefficient);
    }
    let reduced = 1.0 + madd::<FMA>(series * r, r, r);
    let scaled = f64::from_bits(reduced.to_bits().wrapping_add(shifted.to_bits() << 52));
    // the bits of a NaN would not survive the scaling
    if x < VANISHED { 0.0 } else { madd::<FMA>(x, 0.0, scaled) }
}

kernel! {
    /// `out[vector][d] += Σ_token weights[token][vector]·values[token][d]` for the first `used` vectors.
    ///
    /// `weights` is `[tokens][vectors]`, `values` `[tokens][width]`, `out` `[used][width]`; `width` is a multiple of
    /// [`WIDTH`].
    add_values, add_values_fused, add_values_body(weights: &[f64], vectors: usize, values: &[f64], width: usize, out: &mut [f64])
}

#[inline(always)]
fn add_values_body<const FMA: bool>(
    weights: &[f64],
    vectors: usize,
    values: &[f64],
    width: usize,
    out: &mut [f64],
) {
    let used = out.len() / width;
    let mut vector = 0;
    while vector < used {
        let rows = &mut out[vector * width..];
        match used - vector {
            ROWS.. => add_rows::<FMA, ROWS>(weights, vectors, vector, values, width, rows),
            4.. => add_rows::<FMA, 4>(weights, vectors, vector, values, width, rows),
            2.. => add_rows::<FMA, 2>(weights, vectors, vector, values, width, rows),
            _ => add_rows::<FMA, 1>(weights, vectors, vector, values, width, rows),
        }
        vector += match used - vector {
            ROWS.. => ROWS,
            4.. => 4,
            2.. => 2,
            _ => 1,
        };
    }
}

/// The same for `N` vectors from `first` on, whose outputs are at the start of `rows`.
#[inline(always)]
fn add_rows<const FMA: bool, const N: usize>(
    weights: &[f64],
    vectors: usize,
    first: usize,
    values: &[f64],
    width: usize,
    rows: &mut [f64],
) {
    for start in (0..width).step_by(WIDTH) {
        let mut sums = [[0.0; WIDTH]; N];
        for (i, sums) in sums.iter_mut().enumerate() {
            sums.copy_from_slice(&rows[i * width + start..][..WIDTH]);
        }
        for (weights, values) in weights.chunks_exact(vectors).zip(values.chunks_exact(width)) {
            let (weights, values) = (&weights[first..][..N], &values[start..][..WIDTH]);
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
    /// Adds `w·a^i·|s|^j` of a tile of tokens to `powers`, `[POWERS][vectors]`, in the order `i = 0: j = 0..=4, i = 1:
    /// j = 0..=3, …`. The size is `a = key_size[token]·query_size[vector]`; `weights` and `scores` are
    /// `[tokens][vectors]`. Tokens of weight zero add nothing, whatever their score.
    add_powers, add_powers_fused, add_powers_body(weights: &[f64], scores: &[f64], key_size: &[f64], query_size: &[f64], powers: &mut [f64])
}

#[inline(always)]
fn add_powers_body<const FMA: bool>(
    weights: &[f64],
    scores: &[f64],
    key_size: &[f64],
    query_size: &[f64],
    powers: &mut [f64],
) {
    let vectors = query_size.len();
    for group in 0..vectors / LANES {
        let mut sums = [[0.0; LANES]; POWERS];
        for (token, key_size) in key_size.iter().enumerate() {
            let start = token * vectors + group * LANES;
            let (weights, scores) = (&weights[start..][..LANES], &scores[start..][..LANES]);
            let query_size = &query_size[group * LANES..][..LANES];
            for j in 0..LANES {
                let score = if weights[j] == 0.0 { 0.0 } else { scores[j].abs() };
                let (mut by_size, mut index) = (weights[j], 0);
                for i in 0..5 {
                    let mut term = by_size;
                    for _ in 0..5 - i {
                        sums[index][j] += term;
                        term *= score;
                        index += 1;
                    }
                    by_size *= key_size * query_size[j];
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
    /// `spread[d] += Σ_token weights[token·stride]·|values[token][d] − centre[d]|`; lengths as for [`add_values`].
    add_spread, add_spread_fused, add_spread_body(weights: &[f64], stride: usize, values: &[f64], centre: &[f64], spread: &mut [f64])
}

#[inline(always)]
fn add_spread_body<const FMA: bool>(
    weights: &[f64],
    stride: usize,
    values: &[f64],
    centre: &[f64],
    spread: &mut [f64],
) {
    let width = centre.len();
    for start in (0..width).step_by(WIDTH) {
        let centre: [f64; WIDTH] = std::array::from_fn(|j| centre[start + j]);
        let mut sums: [f64; WIDTH] = std::array::from_fn(|j| spread[start + j]);
        for (weight, values) in weights.iter().step_by(stride).zip(values.chunks_exact(width)) {
            let values = &values[start..][..WIDTH];
            for j in 0..WIDTH {
                sums[j] = madd::<FMA>(*weight, (values[j] - centre[j]).abs(), sums[j]);
            }
        }
        spread[start..][..WIDTH].copy_from_slice(&sums);
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

    #[test]
    fn products_are_dot_products() {
        let (tokens, qk_dim, vectors) = (12, 7, 16);
        let (keys, queries) = (drawn(1, tokens * qk_dim), drawn(2, vectors * qk_dim));
        let mut packed = vec![0.0; vectors * qk_dim];
        for vector in 0..vectors {
            for d in 0..qk_dim {
                packed[(vector / LANES * qk_dim + d) * LANES + vector % LANES] = queries[vector * qk_dim + d];
            }
        }
        let (mut scores, mut portable) = (vec![0.0; tokens * vectors], vec![0.0; tokens * vectors]);
        products(&keys, &packed, qk_dim, vectors, &mut scores);
        products_body::<false>(&keys, &packed, qk_dim, vectors, &mut portable);
        let expected: Vec<f64> = keys
            .chunks(qk_dim)
            .flat_map(|key| {
                queries
                    .chunks(qk_dim)
                    .map(move |query| key.iter().zip(query).map(|(a, b)| a * b).sum::<f64>())
            })
            .collect();
        close(&scores, &expected);
        close(&portable, &expected);
    }

    #[test]
    fn exponentials_agree_with_the_platform_down_to_nothing() {
        let mut random = Counter::new(3, 0);
        for i in 0..100_000 {
            let x = -random.unit_f64() * if i % 2 == 0 { 700.0 } else { 3.0 };
            for own in [exp_nonpositive::<true>(x), exp_nonpositive::<false>(x)] {
                assert!((own - x.exp()).abs() <= 1e-15 * x.exp(), "e^{x} = {own}");
            }
        }
        for x in [f64::NEG_INFINITY, -708.1, -1e300] {
            assert_eq!(exp_nonpositive::<false>(x), 0.0);
        }
        assert_eq!(exp_nonpositive::<false>(0.0), 1.0);
        assert!(exp_nonpositive::<false>(f64::NAN).is_nan());
    }

    #[test]
    fn outputs_are_weighted_sums_for_any_number_of_vectors() {
        for used in 1..=8 {
            let (tokens, vectors, width) = (5, 8, 16);
            let (weights, values) = (drawn(4, tokens * vectors), drawn(5, tokens * width));
            let start = drawn(6, used * width);
            let (mut fast, mut portable, mut expected) = (start.clone(), start.clone(), start);
            add_values(&weights, vectors, &values, width, &mut fast);
            add_values_body::<false>(&weights, vectors, &values, width, &mut portable);
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
        let (tokens, vectors) = (4, 8);
        let weights: Vec<f64> = drawn(7, tokens * vectors).iter().map(|x| x.abs()).collect();
        let scores = drawn(8, tokens * vectors);
        let (key_size, query_size) = ([1.0, 2.0, 0.5, 3.0], [1.0, 1.5, 2.0, 0.1, 1.0, 1.0, 4.0, 0.3]);
        let mut powers = vec![0.0; POWERS * vectors];
        add_powers(&weights, &scores, &key_size, &query_size, &mut powers);
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
    fn a_masked_score_of_minus_infinity_adds_no_power() {
        let mut powers = vec![0.0; POWERS * LANES];
        add_powers(&[0.0; LANES], &[f64::NEG_INFINITY; LANES], &[1.0], &[1.0; LANES], &mut powers);
        assert!(powers.iter().all(|power| *power == 0.0));
    }
}
