//! `half_ulp` against the distances between neighbouring codes, and as the bound on a rounding error it is used for.

use proptest::prelude::*;
use shardcheck_formats::{Dtype, decode, half_ulp, round};

const NARROW: [Dtype; 6] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2];

#[test]
fn half_an_ulp_is_half_the_way_to_the_next_larger_code() {
    for dtype in NARROW.into_iter().filter(|dtype| dtype.size_bytes() <= 2) {
        let mut compared = 0;
        for code in 1..(1u64 << (8 * dtype.size_bytes() - 1)) - 1 {
            let (value, next) = (decode(dtype, code), decode(dtype, code + 1));
            if !value.is_finite() || !next.is_finite() {
                continue;
            }
            for signed in [value, -value] {
                assert_eq!(half_ulp(dtype, signed), (next - value) / 2.0, "{dtype} {code:#x}");
            }
            compared += 1;
        }
        assert!(compared > 120, "{dtype} {compared}");
    }
}

#[test]
fn zero_has_no_spacing_and_subnormals_have_their_own() {
    for dtype in Dtype::ALL {
        assert_eq!(half_ulp(dtype, 0.0), 0.0);
        assert_eq!(half_ulp(dtype, -0.0).to_bits(), 0);
        assert!(half_ulp(dtype, f64::NAN).is_nan());
        assert_eq!(half_ulp(dtype, f64::NEG_INFINITY), f64::INFINITY);
    }
    assert_eq!(half_ulp(Dtype::E4m3fn, 2f64.powi(-9)), 2f64.powi(-10));
    assert_eq!(half_ulp(Dtype::E4m3fn, 1e-300), 2f64.powi(-10));
    assert_eq!(half_ulp(Dtype::F16, 2f64.powi(-20)), 2f64.powi(-25));
    assert_eq!(half_ulp(Dtype::Bf16, 1e-39), 2f64.powi(-134));
    assert_eq!(half_ulp(Dtype::F32, f64::from_bits(1)), 2f64.powi(-150));
    assert_eq!(half_ulp(Dtype::F64, 1.0), f64::EPSILON / 2.0);
    assert_eq!(half_ulp(Dtype::F64, 1e-310), f64::from_bits(1));
}

#[test]
fn a_power_of_two_has_the_spacing_above_it() {
    for dtype in NARROW {
        let u = dtype.unit_roundoff();
        assert_eq!(half_ulp(dtype, 1.0), u, "{dtype}");
        assert_eq!(half_ulp(dtype, 1f64.next_down()), u / 2.0, "{dtype}");
        assert_eq!(half_ulp(dtype, -4.0), 4.0 * u, "{dtype}");
    }
}

#[test]
fn beyond_the_largest_finite_value_the_spacing_keeps_growing() {
    assert_eq!(half_ulp(Dtype::E4m3fn, 448.0), 16.0);
    assert_eq!(half_ulp(Dtype::E4m3fn, 512.0), 32.0);
    assert_eq!(half_ulp(Dtype::F16, 1e6), 256.0);
}

#[test]
fn an_integer_rounds_by_half_a_unit() {
    for dtype in [Dtype::I64, Dtype::I32, Dtype::U16, Dtype::U8] {
        assert_eq!(half_ulp(dtype, 7.25), 0.5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn rounding_anything_no_larger_in_magnitude_errs_by_at_most_half_an_ulp(
        exponent in -30i32..16, fraction in 0.5..1.0f64, part in -1.0..=1.0f64,
    ) {
        let x = fraction * 2f64.powi(exponent);
        let y = part * x;
        for dtype in NARROW {
            let error = (round(dtype, y) - y).abs();
            // beyond the largest finite value there is nothing to round to
            prop_assert!(y.abs() > dtype.max_finite() || error <= half_ulp(dtype, x), "{} {} {}", dtype, x, y);
        }
    }

    #[test]
    fn half_an_ulp_never_falls_as_the_magnitude_grows(a in any::<f64>(), b in any::<f64>()) {
        prop_assume!(!a.is_nan() && !b.is_nan());
        let (small, large) = if a.abs() <= b.abs() { (a, b) } else { (b, a) };
        for dtype in Dtype::ALL {
            prop_assert!(half_ulp(dtype, small) <= half_ulp(dtype, large), "{} {} {}", dtype, small, large);
        }
    }
}
