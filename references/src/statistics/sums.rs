//! The inner loops: products of rows with vectors, and sums of weighted rows, a tile of tokens at a time.
//!
//! Compiled twice: for AVX2 with FMA, and portably, where a product is never fused (a fused one would be a library call).

/// Widths are multiples of it.
pub(super) const LANES: usize = 8;
/// Rows of a tile; a tile of fewer is filled up with zeros.
pub(super) const TILE: usize = 32;
/// Rows that are read at a time.
const STEP: usize = 4;

/// The part of a tile that a kernel has to read for its first `count` rows.
pub(super) fn filled(rows: &[f64], count: usize, width: usize) -> &[f64] {
    &rows[..count.next_multiple_of(STEP) * width]
}

#[inline(always)]
fn madd<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `out[vector][row] = Σ_d rows[row][d]·vectors[vector][d]`; `rows` is `[≤ TILE][width]`, `out` `[vectors][TILE]`.
pub(super) fn dots(rows: &[f64], vectors: &[f64], width: usize, out: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has the features that the copy is compiled for
        return unsafe { dots_fused(rows, vectors, width, out) };
    }
    dots_body::<{ cfg!(target_arch = "aarch64") }>(rows, vectors, width, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn dots_fused(rows: &[f64], vectors: &[f64], width: usize, out: &mut [f64]) {
    dots_body::<true>(rows, vectors, width, out);
}

#[inline(always)]
fn dots_body<const FMA: bool>(rows: &[f64], vectors: &[f64], width: usize, out: &mut [f64]) {
    for (vector, out) in vectors.chunks_exact(width).zip(out.chunks_exact_mut(TILE)) {
        let vector = vector.as_chunks::<LANES>().0;
        for (rows, out) in rows.chunks_exact(STEP * width).zip(out.chunks_exact_mut(STEP)) {
            let lanes: [&[[f64; LANES]]; STEP] = std::array::from_fn(|i| {
                &rows[i * width..(i + 1) * width].as_chunks::<LANES>().0[..vector.len()]
            });
            let mut sums = [[0.0; LANES]; STEP];
            for d in 0..vector.len() {
                for i in 0..STEP {
                    for j in 0..LANES {
                        sums[i][j] = madd::<FMA>(lanes[i][d][j], vector[d][j], sums[i][j]);
                    }
                }
            }
            for (out, sums) in out.iter_mut().zip(sums) {
                *out =
                    ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
            }
        }
    }
}

/// `sums[vector][d] += Σ_row weights[vector][row]·rows[row][d]`; `rows` is `[≤ TILE][width]`, `weights` `[vectors][TILE]`.
pub(super) fn add_weighted(weights: &[f64], rows: &[f64], width: usize, sums: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has the features that the copy is compiled for
        return unsafe { add_weighted_fused(weights, rows, width, sums) };
    }
    add_weighted_body::<{ cfg!(target_arch = "aarch64") }>(weights, rows, width, sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn add_weighted_fused(weights: &[f64], rows: &[f64], width: usize, sums: &mut [f64]) {
    add_weighted_body::<true>(weights, rows, width, sums);
}

#[inline(always)]
fn add_weighted_body<const FMA: bool>(weights: &[f64], rows: &[f64], width: usize, sums: &mut [f64]) {
    for (weights, sums) in weights.chunks_exact(TILE).zip(sums.chunks_exact_mut(width)) {
        let sums = sums.as_chunks_mut::<LANES>().0;
        for (rows, weights) in rows.chunks_exact(STEP * width).zip(weights.as_chunks::<STEP>().0) {
            if *weights == [0.0; STEP] {
                continue;
            }
            let lanes: [&[[f64; LANES]]; STEP] = std::array::from_fn(|i| {
                &rows[i * width..(i + 1) * width].as_chunks::<LANES>().0[..sums.len()]
            });
            for d in 0..sums.len() {
                let mut sum = sums[d];
                for i in 0..STEP {
                    for j in 0..LANES {
                        sum[j] = madd::<FMA>(weights[i], lanes[i][d][j], sum[j]);
                    }
                }
                sums[d] = sum;
            }
        }
    }
}

/// `Σ a·b`.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_formats::recipe::Counter;

    #[test]
    fn both_loops_give_what_their_definitions_give() {
        let mut random = Counter::new(5, 0);
        let mut draw = |count: usize| (0..count).map(|_| random.gaussian()).collect::<Vec<f64>>();
        let (width, vectors) = (24, 3);
        let (rows, with, weights) = (draw(TILE * width), draw(vectors * width), draw(vectors * TILE));
        let mut products = vec![f64::NAN; vectors * TILE];
        dots(&rows, &with, width, &mut products);
        let mut sums = vec![1.0; vectors * width];
        add_weighted(&weights, &rows, width, &mut sums);
        for vector in 0..vectors {
            for row in 0..TILE {
                let exact = dot(&rows[row * width..][..width], &with[vector * width..][..width]);
                approx::assert_relative_eq!(products[vector * TILE + row], exact, epsilon = 1e-13);
            }
            for d in 0..width {
                let column: Vec<f64> = (0..TILE).map(|row| rows[row * width + d]).collect();
                let exact = 1.0 + dot(&weights[vector * TILE..][..TILE], &column);
                approx::assert_relative_eq!(sums[vector * width + d], exact, epsilon = 1e-12);
            }
        }
    }
}
