//! The inner loops: products of decoded weights, attention scores, weighted sums, exponentials.
//!
//! Every sum runs in an order that depends on its own length alone, never on how many rows share the call. So a
//! row's result has the same bits alone, in a batch, in a prefill chunk or in a verification step.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod exponential;
mod portable;

use crate::encoding::Encoding;

/// Lanes of every sum; lengths that are summed over must be multiples of it.
pub const LANES: usize = 8;

/// Weight rows that are decoded together and then meet all rows of a batch.
pub const PANEL_ROWS: usize = 12;

/// The instruction set that the inner loops use. A value of the AVX2 kind exists only where the processor has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Simd {
    avx2: bool,
}

impl Simd {
    /// The best set of this processor: AVX2 with FMA, or portable code.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        let avx2 = std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma");
        #[cfg(not(target_arch = "x86_64"))]
        let avx2 = false;
        Self { avx2 }
    }

    /// Portable code. It sums in the same order as AVX2, with two roundings where FMA has one.
    pub fn portable() -> Self {
        Self { avx2: false }
    }

    /// `"avx2+fma"` or `"portable"`.
    pub fn name(self) -> &'static str {
        if self.avx2 { "avx2+fma" } else { "portable" }
    }
}

/// Calls the AVX2 form of a kernel where `$simd` allows it, else the portable one.
macro_rules! dispatch {
    ($simd:expr, $kernel:ident($($argument:expr),*)) => {{
        #[cfg(target_arch = "x86_64")]
        if $simd.avx2 {
            // SAFETY: `Simd::detect` alone sets `avx2`, after it has seen AVX2 and FMA.
            return unsafe { avx2::$kernel($($argument),*) };
        }
        let _ = $simd;
        portable::$kernel($($argument),*)
    }};
}

/// Decodes whole blocks of weights: see [`Encoding::decode`].
pub fn decode(simd: Simd, encoding: Encoding, bytes: &[u8], out: &mut [f32]) {
    dispatch!(simd, decode(encoding, bytes, out))
}

/// `out[c · R + r] = Σ_k panel[c · K + k] · rows[r · K + k]` for C weight rows and R input rows of K elements.
///
/// # Panics
/// If K is no multiple of [`LANES`], or a length is not a whole number of rows, or `out` is not C · R long.
pub fn panel_product(simd: Simd, inputs: usize, panel: &[f32], rows: &[f32], out: &mut [f32]) {
    assert!(inputs > 0 && inputs.is_multiple_of(LANES), "{inputs} inputs are no multiple of {LANES}");
    assert!(panel.len().is_multiple_of(inputs) && rows.len().is_multiple_of(inputs));
    assert_eq!(out.len(), panel.len() / inputs * (rows.len() / inputs));
    dispatch!(simd, panel_product(inputs, panel, rows, out))
}

/// `out[j] = Σ_d query[d] · keys[j · D + d]`.
///
/// # Panics
/// If D = `query.len()` is no multiple of [`LANES`] or `keys` is not `out.len()` · D long.
pub fn scores(simd: Simd, query: &[f32], keys: &[f32], out: &mut [f32]) {
    assert!(query.len().is_multiple_of(LANES));
    assert_eq!(keys.len(), out.len() * query.len());
    dispatch!(simd, scores(query, keys, out))
}

/// `sum[d] += Σ_j weights[j] · values[j · D + d]`, j ascending.
///
/// # Panics
/// If D = `sum.len()` is no multiple of [`LANES`] or `values` is not `weights.len()` · D long.
pub fn add_weighted(simd: Simd, weights: &[f32], values: &[f32], sum: &mut [f32]) {
    assert!(sum.len().is_multiple_of(LANES));
    assert_eq!(values.len(), weights.len() * sum.len());
    dispatch!(simd, add_weighted(weights, values, sum))
}

/// Replaces each x by exp(x − `maximum`), which must be ≤ 1, and returns their sum.
///
/// Relative error of an exponential: below 3 · 10⁻⁷; below exp(−87) it is 0.
///
/// # Panics
/// If the length is no multiple of [`LANES`]; fill the rest with −∞.
pub fn exponentials(simd: Simd, maximum: f32, values: &mut [f32]) -> f32 {
    assert!(values.len().is_multiple_of(LANES));
    dispatch!(simd, exponentials(maximum, values))
}

/// `gate[i] = gate[i] / (1 + exp(−gate[i])) · up[i]`: SwiGLU as Llama has it.
///
/// # Panics
/// If the lengths differ.
pub fn swiglu(simd: Simd, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len());
    dispatch!(simd, swiglu(gate, up))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers in (−1, 1) from a fixed linear congruence.
    fn noise(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn sets() -> Vec<Simd> {
        vec![Simd::detect(), Simd::portable()]
    }

    #[test]
    fn a_panel_product_is_the_matrix_product() {
        for simd in sets() {
            for (columns, rows) in [(12, 1), (12, 2), (12, 3), (12, 9), (7, 5), (1, 1), (5, 4), (11, 2)] {
                let inputs = 96;
                let (panel, x) = (noise(columns * inputs, 1), noise(rows * inputs, 2));
                let mut out = vec![f32::NAN; columns * rows];
                panel_product(simd, inputs, &panel, &x, &mut out);
                for (c, r) in (0..columns).flat_map(|c| (0..rows).map(move |r| (c, r))) {
                    let pair = (0..inputs).map(|k| (panel[c * inputs + k], x[r * inputs + k]));
                    let exact: f64 = pair.map(|(a, b)| f64::from(a) * f64::from(b)).sum();
                    let seen = f64::from(out[c * rows + r]);
                    assert!(
                        (seen - exact).abs() < 1e-5,
                        "{simd:?} {columns}x{rows} [{c}, {r}]: {seen} {exact}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_in_any_batch() {
        let (inputs, columns, rows) = (64, 12, 11);
        let (panel, x) = (noise(columns * inputs, 3), noise(rows * inputs, 4));
        for simd in sets() {
            let mut together = vec![0.0; columns * rows];
            panel_product(simd, inputs, &panel, &x, &mut together);
            for r in 0..rows {
                for count in 1..=columns {
                    let mut alone = vec![0.0; count];
                    let row = &x[r * inputs..(r + 1) * inputs];
                    panel_product(simd, inputs, &panel[..count * inputs], row, &mut alone);
                    for c in 0..count {
                        assert_eq!(alone[c].to_bits(), together[c * rows + r].to_bits(), "{simd:?} {r} {c}");
                    }
                }
            }
        }
    }

    #[test]
    fn scores_and_weighted_sums_do_not_depend_on_how_keys_are_cut() {
        let (dim, keys) = (72, 13);
        let (q, k, w) = (noise(dim, 5), noise(keys * dim, 6), noise(keys, 7));
        for simd in sets() {
            let (mut whole, mut sum) = (vec![0.0; keys], vec![0.0; dim]);
            scores(simd, &q, &k, &mut whole);
            add_weighted(simd, &w, &k, &mut sum);
            for cut in 0..=keys {
                let (mut parts, mut cut_sum) = (vec![0.0; keys], vec![0.0; dim]);
                for range in [0..cut, cut..keys] {
                    let slice = &k[range.start * dim..range.end * dim];
                    scores(simd, &q, slice, &mut parts[range.clone()]);
                    add_weighted(simd, &w[range], slice, &mut cut_sum);
                }
                assert_eq!(parts, whole, "{simd:?} cut at {cut}");
                assert_eq!(cut_sum, sum, "{simd:?} cut at {cut}");
            }
            for j in 0..keys {
                let exact: f64 = (0..dim).map(|d| f64::from(q[d]) * f64::from(k[j * dim + d])).sum();
                assert!((f64::from(whole[j]) - exact).abs() < 1e-5);
            }
            for d in 0..dim {
                let exact: f64 = (0..keys).map(|j| f64::from(w[j]) * f64::from(k[j * dim + d])).sum();
                assert!((f64::from(sum[d]) - exact).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn exponentials_are_right_to_three_parts_in_ten_million() {
        for simd in sets() {
            let inputs: Vec<f32> = (0..8000).map(|i| -0.0109 * i as f32).collect();
            let mut values = inputs.clone();
            let sum = exponentials(simd, 0.0, &mut values);
            let mut exact_sum = 0.0;
            for (x, seen) in inputs.iter().zip(&values) {
                let exact = f64::from(*x).exp();
                exact_sum += exact;
                if *x > -87.0 {
                    assert!((f64::from(*seen) / exact - 1.0).abs() < 3e-7, "exp({x}) = {seen}, {exact}");
                } else {
                    assert!(*seen <= 1.7e-38);
                }
            }
            assert!((f64::from(sum) / exact_sum - 1.0).abs() < 1e-6);
            let mut padded = [2.0, f32::NEG_INFINITY, 2.0, -1e30, 1.0, 2.0, f32::NEG_INFINITY, 2.0];
            let sum = exponentials(simd, 2.0, &mut padded);
            assert_eq!((padded[0], padded[1], padded[3]), (1.0, 0.0, 0.0));
            assert!((f64::from(sum) - 4.0 - (-1f64).exp()).abs() < 1e-6);
        }
    }

    #[test]
    fn a_nan_score_is_not_hidden_by_the_exponential() {
        for simd in sets() {
            let mut values = [0.0, f32::NAN, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
            assert!(exponentials(simd, 0.0, &mut values).is_nan(), "{simd:?}");
        }
    }

    #[test]
    fn swiglu_matches_its_definition_also_far_out() {
        for simd in sets() {
            let gates = [-200.0f32, -90.0, -20.0, -1.5, -0.0, 0.0, 0.7, 3.0, 30.0, 88.0, 500.0];
            let ups: Vec<f32> = (0..gates.len()).map(|i| 1.5 - i as f32).collect();
            let mut out = gates;
            swiglu(simd, &mut out, &ups);
            for i in 0..gates.len() {
                let g = f64::from(gates[i]);
                let exact = g / (1.0 + (-g).exp()) * f64::from(ups[i]);
                let seen = f64::from(out[i]);
                assert!((seen - exact).abs() <= 1e-6 * exact.abs() + 1e-30, "{simd:?} {g}: {seen} {exact}");
            }
        }
    }

    #[test]
    fn both_instruction_sets_decode_alike() {
        let bytes: Vec<u8> = noise(20 * 34 * 8, 9).iter().map(|x| (x * 127.0) as i8 as u8).collect();
        for encoding in Encoding::ALL {
            let blocks = bytes.len() / encoding.block_bytes();
            let bytes = &bytes[..blocks * encoding.block_bytes()];
            let mut outs = [(); 2].map(|()| vec![0.0; blocks * encoding.block_elements()]);
            decode(Simd::detect(), encoding, bytes, &mut outs[0]);
            decode(Simd::portable(), encoding, bytes, &mut outs[1]);
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&outs[0]), bits(&outs[1]), "{}", encoding.name());
        }
    }
}
