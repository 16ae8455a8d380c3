//! Sums of products as matrix units and plain loops form them, in binary32.

/// Products that one matrix instruction adds at once.
pub(super) const BLOCK: usize = 16;
/// Dimensions that are worked on together.
const LANES: usize = 8;
/// Bits of a double that a value of 24 significant bits leaves zero.
const BEYOND_SINGLE: u64 = (1 << 29) - 1;

/// How a sum of products is accumulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sums {
    /// Blocks of sixteen, exact inside, added to an accumulator that is cut to 24 bits toward zero (tensor cores, as measured by
    /// Fasi, Higham, Mikaitis & Pranesh 2021).
    Truncating,
    /// Blocks of sixteen, exact inside, added to an accumulator that rounds to nearest.
    Rounding,
    /// Blocks of sixteen by a binary tree, each addition rounded to nearest, and a chain over blocks.
    Tree,
    /// One after another, each addition rounded to nearest.
    Sequential,
}

impl Sums {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Truncating, Self::Rounding, Self::Tree, Self::Sequential];

    /// Unit roundoff of an accumulation.
    pub fn unit_roundoff(self) -> f64 {
        let single = 1.0 / (1u64 << 24) as f64;
        if self == Self::Truncating { 2.0 * single } else { single }
    }
}

/// A double cut to 24 significant bits, toward zero.
#[inline(always)]
fn cut(x: f64) -> f64 {
    f64::from_bits(x.to_bits() & !BEYOND_SINGLE)
}

#[inline(always)]
fn stored<const TRUNCATE: bool>(x: f64) -> f64 {
    if TRUNCATE { cut(x) } else { f64::from(x as f32) }
}

macro_rules! compiled_twice {
    ($(#[$doc:meta])* $name:ident, $fused:ident, $body:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?) => {
        $(#[$doc])*
        pub(super) fn $name($($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has the feature that the copy is compiled for
                return unsafe { $fused($($arg),*) };
            }
            $body($($arg),*)
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn $fused($($arg: $type),*) $(-> $result)? {
            $body($($arg),*)
        }
    };
}

compiled_twice! {
    /// `Σ_d a[d]·b[d]`.
    product, product_fused, product_body(a: &[f32], b: &[f32], sums: Sums) -> f32
}

compiled_twice! {
    /// `sum[d] += Σ weights[t]·rows[t][d]` over at most [`BLOCK`] rows; every number of `sum` is one of binary32.
    add_block, add_block_fused, add_block_body(weights: &[f32], rows: &[&[f32]], sums: Sums, sum: &mut [f64])
}

#[inline(always)]
fn product_body(a: &[f32], b: &[f32], sums: Sums) -> f32 {
    match sums {
        Sums::Truncating => product_of_blocks::<true>(a, b),
        Sums::Rounding => product_of_blocks::<false>(a, b),
        Sums::Tree => {
            let blocks = a.chunks(BLOCK).zip(b.chunks(BLOCK));
            blocks.fold(0.0, |sum, (a, b)| {
                let mut products = [0.0; BLOCK];
                products.iter_mut().zip(a.iter().zip(b)).for_each(|(p, (a, b))| *p = a * b);
                sum + tree(&mut products)
            })
        }
        Sums::Sequential => a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b),
    }
}

#[inline(always)]
fn product_of_blocks<const TRUNCATE: bool>(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<BLOCK>(), b.as_chunks::<BLOCK>());
    let mut sum = 0.0;
    for (a, b) in a.iter().zip(b) {
        let mut lanes = [0.0f64; 4];
        for i in 0..BLOCK {
            lanes[i % 4] += f64::from(a[i]) * f64::from(b[i]);
        }
        sum = stored::<TRUNCATE>(sum + ((lanes[0] + lanes[2]) + (lanes[1] + lanes[3])));
    }
    if !a_rest.is_empty() {
        let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        sum = stored::<TRUNCATE>(sum + rest);
    }
    sum as f32
}

#[inline(always)]
fn add_block_body(weights: &[f32], rows: &[&[f32]], sums: Sums, sum: &mut [f64]) {
    match sums {
        Sums::Truncating => add_exact_block::<true>(weights, rows, sum),
        Sums::Rounding => add_exact_block::<false>(weights, rows, sum),
        Sums::Tree => add_tree_block(weights, rows, sum),
        Sums::Sequential => {
            for (weight, row) in weights.iter().zip(rows) {
                for (sum, x) in sum.iter_mut().zip(*row) {
                    *sum = f64::from(*sum as f32 + weight * x);
                }
            }
        }
    }
}

#[inline(always)]
fn add_exact_block<const TRUNCATE: bool>(weights: &[f32], rows: &[&[f32]], sum: &mut [f64]) {
    let (chunks, rest) = sum.as_chunks_mut::<LANES>();
    for (index, sum) in chunks.iter_mut().enumerate() {
        let mut block = [0.0f64; LANES];
        for (weight, row) in weights.iter().zip(rows) {
            let (weight, row) = (f64::from(*weight), &row[index * LANES..][..LANES]);
            for j in 0..LANES {
                block[j] += weight * f64::from(row[j]);
            }
        }
        for j in 0..LANES {
            sum[j] = stored::<TRUNCATE>(sum[j] + block[j]);
        }
    }
    let first = chunks.len() * LANES;
    for (index, sum) in rest.iter_mut().enumerate() {
        let products =
            weights.iter().zip(rows).map(|(weight, row)| f64::from(*weight) * f64::from(row[first + index]));
        *sum = stored::<TRUNCATE>(*sum + products.sum::<f64>());
    }
}

#[inline(always)]
fn add_tree_block(weights: &[f32], rows: &[&[f32]], sum: &mut [f64]) {
    for (index, sum) in sum.iter_mut().enumerate() {
        let mut products = [0.0; BLOCK];
        for (product, (weight, row)) in products.iter_mut().zip(weights.iter().zip(rows)) {
            *product = weight * row[index];
        }
        *sum = f64::from(*sum as f32 + tree(&mut products));
    }
}

/// Sum of sixteen numbers by a binary tree.
#[inline(always)]
pub(super) fn tree(terms: &mut [f32; BLOCK]) -> f32 {
    let mut width = BLOCK;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            terms[i] += terms[i + width];
        }
    }
    terms[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_formats::Counter;

    #[test]
    fn every_way_to_sum_is_right_to_its_unit_roundoff_and_truncation_goes_toward_zero() {
        let mut random = Counter::new(3, 0);
        let mut draw = |count: usize| (0..count).map(|_| random.gaussian() as f32).collect::<Vec<f32>>();
        let (a, b) = (draw(100), draw(100));
        let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let size: f64 = a.iter().zip(&b).map(|(a, b)| (f64::from(*a) * f64::from(*b)).abs()).sum();
        for sums in Sums::ALL {
            let seen = f64::from(product(&a, &b, sums));
            assert!((seen - exact).abs() <= 100.0 * sums.unit_roundoff() * size, "{sums:?}: {seen} {exact}");
        }
        let ones = [1.0f32; 40];
        // 1 + 2^-30 · 39: cut away, or rounded away, in every block
        let mut tiny = [2f32.powi(-30); 40];
        tiny[0] = 1.0;
        assert_eq!(product(&ones, &tiny, Sums::Truncating), 1.0);
        let mut sum = [1.0; 9];
        let rows = [[0.75f32 * 2f32.powi(-23); 9]; 1];
        add_block(&[1.0], &[&rows[0]], Sums::Truncating, &mut sum);
        assert_eq!(sum, [1.0; 9]);
        add_block(&[1.0], &[&rows[0]], Sums::Rounding, &mut sum);
        assert_eq!(sum, [1.0 + 2f64.powi(-23); 9]);
    }

    #[test]
    fn blocks_of_rows_agree_with_products_of_columns() {
        let mut random = Counter::new(4, 0);
        let mut draw = |count: usize| (0..count).map(|_| random.gaussian() as f32).collect::<Vec<f32>>();
        let (weights, rows) = (draw(BLOCK), draw(BLOCK * 11));
        let rows: Vec<&[f32]> = rows.chunks(11).collect();
        for sums in Sums::ALL {
            let mut sum = vec![0.0; 11];
            add_block(&weights, &rows, sums, &mut sum);
            for d in 0..11 {
                let column: Vec<f32> = rows.iter().map(|row| row[d]).collect();
                let wanted = f64::from(product(&weights, &column, sums));
                assert!((sum[d] - wanted).abs() < 1e-5, "{sums:?} {d}: {} {wanted}", sum[d]);
            }
        }
    }
}
