//! Every code of the small formats, and every rounding decision against a search over all codes.

use proptest::prelude::*;
use shardcheck_formats::{Dtype, Overflow, decode, decode_f32, encode, encode_f32, round};

const FP8: [Dtype; 3] = [Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2];
const SMALL: [Dtype; 5] = [Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2, Dtype::F16, Dtype::Bf16];

fn code_count(dtype: Dtype) -> u64 {
    1 << (8 * dtype.size_bytes())
}

/// Exponent bias, written again from the format definitions.
fn bias(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::E4m3fn => 7,
        Dtype::E4m3fnuz => 8,
        Dtype::E5m2 | Dtype::F16 => 15,
        Dtype::Bf16 => 127,
        other => panic!("{other} is not one of the small formats"),
    }
}

/// The value of a finite code by the textbook formula, in f64.
fn formula(dtype: Dtype, code: u64) -> f64 {
    let m = dtype.mantissa_bits();
    let magnitude = code & (code_count(dtype) / 2 - 1);
    let sign = if code == magnitude { 1.0 } else { -1.0 };
    let field = (magnitude >> m) as i32;
    let fraction = (magnitude & ((1 << m) - 1)) as f64 / f64::from(1 << m);
    let significand = if field == 0 { fraction } else { 1.0 + fraction };
    sign * significand * 2f64.powi(field.max(1) - bias(dtype))
}

fn is_special(dtype: Dtype, code: u64) -> bool {
    match dtype {
        Dtype::E4m3fn => code & 0x7F == 0x7F,
        Dtype::E4m3fnuz => code == 0x80,
        Dtype::E5m2 => code & 0x7C == 0x7C,
        Dtype::F16 => code & 0x7C00 == 0x7C00,
        Dtype::Bf16 => code & 0x7F80 == 0x7F80,
        other => panic!("{other} is not one of the small formats"),
    }
}

/// Code of `value` found among all codes: count the midpoints between neighbours that lie below |value|.
fn nearest_by_search(dtype: Dtype, value: f64, overflow: Overflow) -> u64 {
    let sign_bit = code_count(dtype) / 2;
    let finite: Vec<u64> = (0..sign_bit).filter(|&code| !is_special(dtype, code)).collect();
    let last = finite.len() - 1;
    let above_last = 2.0 * formula(dtype, last as u64) - formula(dtype, last as u64 - 1);
    let mut code = 0u64;
    for &lower in &finite {
        let upper = if lower as usize == last { above_last } else { formula(dtype, lower + 1) };
        let midpoint = (formula(dtype, lower) + upper) / 2.0;
        let ties_up = lower % 2 == 1;
        code += u64::from(value.abs() > midpoint || (value.abs() == midpoint && ties_up));
    }
    let sign = if value.is_sign_negative() { sign_bit } else { 0 };
    match (code as usize > last, overflow, dtype) {
        (true, Overflow::Saturate, _) => sign | last as u64,
        (true, Overflow::NonFinite, Dtype::E4m3fnuz) => 0x80,
        // the first code after the finite ones: NaN in e4m3fn, infinity in the others
        (true, Overflow::NonFinite, _) => sign | (last as u64 + 1),
        (false, _, Dtype::E4m3fnuz) if code == 0 => 0,
        (false, _, _) => sign | code,
    }
}

#[test]
fn every_finite_code_of_the_small_formats_has_the_value_of_the_formula() {
    let mut seen = 0;
    for dtype in SMALL {
        for code in (0..code_count(dtype)).filter(|&code| !is_special(dtype, code)) {
            let expected = formula(dtype, code);
            assert_eq!(decode(dtype, code).to_bits(), expected.to_bits(), "{dtype} {code:#x}");
            assert_eq!(decode_f32(dtype, code).to_bits(), (expected as f32).to_bits(), "{dtype} {code:#x}");
            seen += 1;
        }
    }
    assert_eq!(seen, 254 + 255 + 248 + 63488 + 65280);
}

#[test]
fn every_code_that_is_no_nan_survives_decoding_and_encoding() {
    for dtype in SMALL {
        let mut nans = 0;
        for code in 0..code_count(dtype) {
            let value = decode(dtype, code);
            if value.is_nan() {
                nans += 1;
                continue;
            }
            assert_eq!(encode(dtype, value, Overflow::NonFinite), code, "{dtype}");
            assert_eq!(encode_f32(dtype, value as f32, Overflow::NonFinite), code, "{dtype}");
            if value.is_finite() {
                assert_eq!(encode(dtype, value, Overflow::Saturate), code, "{dtype}");
                assert_eq!(encode_f32(dtype, value as f32, Overflow::Saturate), code, "{dtype}");
            }
        }
        let expected = match dtype {
            Dtype::E4m3fn => 2,
            Dtype::E4m3fnuz => 1,
            Dtype::E5m2 => 6,
            Dtype::F16 => 2 * 1023,
            _ => 2 * 127,
        };
        assert_eq!(nans, expected, "{dtype}");
    }
}

#[test]
fn every_nan_stays_a_nan_in_every_float_format_under_both_policies() {
    let nans = [f64::NAN, -f64::NAN, f64::from_bits(0x7FF0_0000_0000_0001), f64::from_bits(u64::MAX)];
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.is_float()) {
        for overflow in Overflow::ALL {
            for nan in nans {
                assert!(decode(dtype, encode(dtype, nan, overflow)).is_nan(), "{dtype} {overflow}");
            }
            for bits in [0x7FC0_0000u32, 0x7F80_0001, 0xFFFF_FFFF, 0xFF80_0001] {
                let code = encode_f32(dtype, f32::from_bits(bits), overflow);
                assert!(decode_f32(dtype, code).is_nan(), "{dtype} {overflow} {bits:#x}");
            }
        }
    }
}

#[test]
fn a_nan_keeps_its_sign_where_the_format_has_signed_nans() {
    for (dtype, positive, negative) in [
        (Dtype::E4m3fn, 0x7F, 0xFF),
        (Dtype::E4m3fnuz, 0x80, 0x80),
        (Dtype::E5m2, 0x7E, 0xFE),
        (Dtype::F16, 0x7E00, 0xFE00),
        (Dtype::Bf16, 0x7FC0, 0xFFC0),
        (Dtype::F32, 0x7FC0_0000, 0xFFC0_0000),
    ] {
        for overflow in Overflow::ALL {
            assert_eq!(encode(dtype, f64::NAN.copysign(1.0), overflow), positive, "{dtype}");
            assert_eq!(encode(dtype, f64::NAN.copysign(-1.0), overflow), negative, "{dtype}");
            assert_eq!(encode_f32(dtype, f32::NAN.copysign(1.0), overflow), positive, "{dtype}");
            assert_eq!(encode_f32(dtype, f32::NAN.copysign(-1.0), overflow), negative, "{dtype}");
        }
    }
}

#[test]
fn an_infinity_saturates_or_stays_infinite_or_becomes_nan() {
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.is_float()) {
        for sign in [1.0, -1.0] {
            let saturated = encode(dtype, f64::INFINITY * sign, Overflow::Saturate);
            assert_eq!(decode(dtype, saturated), sign * dtype.max_finite(), "{dtype}");
            assert_eq!(
                encode_f32(dtype, f32::INFINITY * sign as f32, Overflow::Saturate),
                saturated,
                "{dtype}"
            );
            let code = encode(dtype, f64::INFINITY * sign, Overflow::NonFinite);
            assert_eq!(encode_f32(dtype, f32::INFINITY * sign as f32, Overflow::NonFinite), code, "{dtype}");
            let value = decode(dtype, code);
            if matches!(dtype, Dtype::E4m3fn | Dtype::E4m3fnuz) {
                assert!(value.is_nan(), "{dtype}");
            } else {
                assert_eq!(value, sign * f64::INFINITY, "{dtype}");
            }
        }
    }
}

#[test]
fn negative_zero_keeps_its_sign_except_in_e4m3fnuz() {
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.is_float()) {
        let expected = if dtype == Dtype::E4m3fnuz { 0 } else { 1u64 << (8 * dtype.size_bytes() - 1) };
        for overflow in Overflow::ALL {
            assert_eq!(encode(dtype, -0.0, overflow), expected, "{dtype}");
            assert_eq!(encode_f32(dtype, -0.0, overflow), expected, "{dtype}");
            assert_eq!(encode(dtype, 0.0, overflow), 0, "{dtype}");
            if dtype != Dtype::F64 {
                assert_eq!(encode(dtype, -5e-324, overflow), expected, "{dtype} underflow");
            }
            if !matches!(dtype, Dtype::F64 | Dtype::F32) {
                assert_eq!(encode_f32(dtype, -f32::from_bits(1), overflow), expected, "{dtype} underflow");
            }
        }
    }
}

#[test]
fn every_tie_between_neighbours_goes_to_the_even_code_and_a_hair_beside_it_to_the_nearer() {
    for dtype in SMALL {
        for code in 0..code_count(dtype) / 2 - 1 {
            if is_special(dtype, code) || is_special(dtype, code + 1) {
                continue;
            }
            let tie = (formula(dtype, code) + formula(dtype, code + 1)) / 2.0;
            let even = code + code % 2;
            for overflow in Overflow::ALL {
                assert_eq!(encode(dtype, tie, overflow), even, "{dtype} {code:#x}");
                assert_eq!(encode(dtype, tie.next_down(), overflow), code, "{dtype} {code:#x}");
                assert_eq!(encode(dtype, tie.next_up(), overflow), code + 1, "{dtype} {code:#x}");
                if f64::from(tie as f32) == tie {
                    let tie = tie as f32;
                    assert_eq!(encode_f32(dtype, tie, overflow), even, "{dtype} {code:#x}");
                    assert_eq!(encode_f32(dtype, tie.next_down(), overflow), code, "{dtype} {code:#x}");
                    assert_eq!(encode_f32(dtype, tie.next_up(), overflow), code + 1, "{dtype} {code:#x}");
                }
            }
        }
    }
}

#[test]
fn overflow_starts_at_the_rounding_boundary_of_each_format() {
    // (format, largest value that still rounds to a finite one, the finite code)
    for (dtype, last, code) in [
        (Dtype::E4m3fn, 464.0, 0x7E),
        (Dtype::E4m3fnuz, 248f64.next_down(), 0x7F),
        (Dtype::E5m2, 61440f64.next_down(), 0x7B),
        (Dtype::F16, 65520f64.next_down(), 0x7BFF),
    ] {
        for overflow in Overflow::ALL {
            assert_eq!(encode(dtype, last, overflow), code, "{dtype}");
        }
        assert_eq!(encode(dtype, last.next_up(), Overflow::Saturate), code, "{dtype}");
        assert!(!decode(dtype, encode(dtype, last.next_up(), Overflow::NonFinite)).is_finite(), "{dtype}");
        assert!(!round(dtype, -last.next_up()).is_finite(), "{dtype}");
        assert!(round(dtype, -last).is_finite(), "{dtype}");
    }
}

#[test]
fn a_byte_means_twice_as_much_in_e4m3fn_as_in_e4m3fnuz_but_for_three_codes() {
    let mut exceptions = vec![];
    for code in 0..256 {
        let (fn_value, fnuz_value) = (decode(Dtype::E4m3fn, code), decode(Dtype::E4m3fnuz, code));
        if fn_value != 2.0 * fnuz_value {
            exceptions.push(code);
        }
    }
    assert_eq!(exceptions, [0x7F, 0x80, 0xFF]);
    // read as e4m3fnuz, the NaNs of e4m3fn are finite, and its negative zero is NaN
    assert_eq!(decode(Dtype::E4m3fnuz, 0x7F), 240.0);
    assert_eq!(decode(Dtype::E4m3fnuz, 0xFF), -240.0);
    assert!(decode(Dtype::E4m3fnuz, 0x80).is_nan());
}

#[test]
fn f64_rounds_once_where_a_detour_through_f32_rounds_twice() {
    // just above the bf16 tie 1 + 2^-8; f32 cannot hold the excess and lands on the tie
    let value = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
    assert_eq!(round(Dtype::Bf16, value), 1.0 + 2f64.powi(-7));
    assert_eq!(round(Dtype::Bf16, f64::from(value as f32)), 1.0);
    let value = 1.0 + 2f64.powi(-4) + 2f64.powi(-40);
    assert_eq!(round(Dtype::E4m3fn, value), 1.125);
    assert_eq!(round(Dtype::E4m3fn, f64::from(value as f32)), 1.0);
}

#[test]
fn bits_above_the_width_of_a_code_are_ignored() {
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.size_bytes() < 8) {
        let code = encode(dtype, 3.0, Overflow::Saturate);
        let dirty = code | (u64::MAX << (8 * dtype.size_bytes()));
        assert_eq!(decode(dtype, dirty), 3.0, "{dtype}");
        assert_eq!(decode_f32(dtype, dirty), 3.0, "{dtype}");
    }
}

#[test]
fn integers_round_to_even_saturate_and_take_nan_to_zero() {
    for overflow in Overflow::ALL {
        assert_eq!(encode(Dtype::I32, -2.5, overflow), 0xFFFF_FFFE);
        assert_eq!(encode(Dtype::U8, 2.5, overflow), 2);
        assert_eq!(encode(Dtype::U8, 3.5, overflow), 4);
        assert_eq!(encode(Dtype::U8, -1.0, overflow), 0);
        assert_eq!(encode(Dtype::U16, 1e9, overflow), 0xFFFF);
        assert_eq!(encode(Dtype::I64, f64::NEG_INFINITY, overflow), 1 << 63);
        assert_eq!(encode(Dtype::I64, f64::NAN, overflow), 0);
    }
    assert_eq!(decode(Dtype::I32, 0xFFFF_FFFE), -2.0);
    assert_eq!(decode(Dtype::I64, u64::MAX), -1.0);
    assert_eq!(decode(Dtype::U16, 65535), 65535.0);
}

#[test]
fn f32_and_f64_codes_are_the_bits_of_the_numbers() {
    for value in [0.1, -1e300, 1e-310, f64::MAX, 1e39, -3.4028235677973366e38, 1.401298464324817e-45] {
        assert_eq!(encode(Dtype::F64, value, Overflow::NonFinite), value.to_bits());
        assert_eq!(
            encode(Dtype::F32, value, Overflow::NonFinite),
            u64::from((value as f32).to_bits()),
            "{value}"
        );
        assert_eq!(decode(Dtype::F64, value.to_bits()), value);
    }
    assert_eq!(encode(Dtype::F32, 1e39, Overflow::Saturate), 0x7F7F_FFFF);
}

/// Any bit pattern, and values whose magnitude is within reach of the small formats.
fn any_value() -> impl Strategy<Value = f64> {
    prop_oneof![
        any::<u64>().prop_map(f64::from_bits),
        (any::<u32>()).prop_map(|bits| f64::from(f32::from_bits(bits))),
        (-20i32..20, -1.0..1.0f64).prop_map(|(exponent, x)| x * 2f64.powi(exponent)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn fp8_encoding_is_the_nearest_even_code_among_all(value in any_value()) {
        prop_assume!(!value.is_nan());
        for dtype in FP8 {
            for overflow in Overflow::ALL {
                prop_assert_eq!(encode(dtype, value, overflow), nearest_by_search(dtype, value, overflow), "{}", dtype);
            }
        }
    }

    #[test]
    fn encoding_never_reverses_the_order_of_two_values(a in any_value(), b in any_value()) {
        prop_assume!(!a.is_nan() && !b.is_nan());
        let (low, high) = if a <= b { (a, b) } else { (b, a) };
        for dtype in Dtype::ALL {
            let decoded = |value| decode(dtype, encode(dtype, value, Overflow::Saturate));
            prop_assert!(decoded(low) <= decoded(high), "{} {} {}", dtype, low, high);
        }
    }

    #[test]
    fn rounding_twice_is_rounding_once(value in any_value()) {
        for dtype in Dtype::ALL {
            let once = round(dtype, value);
            prop_assert_eq!(round(dtype, once).to_bits(), once.to_bits(), "{} {}", dtype, value);
        }
    }

    #[test]
    fn rounding_is_symmetric_about_zero(value in any_value()) {
        prop_assume!(!value.is_nan());
        for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.is_float()) {
            let (up, down) = (round(dtype, value), round(dtype, -value));
            prop_assert!(up == -down || (up.is_nan() && down.is_nan()), "{} {}", dtype, value);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sixteen_bit_encoding_is_the_nearest_even_code_among_all(value in any_value()) {
        prop_assume!(!value.is_nan());
        for dtype in [Dtype::F16, Dtype::Bf16] {
            for overflow in Overflow::ALL {
                prop_assert_eq!(encode(dtype, value, overflow), nearest_by_search(dtype, value, overflow), "{}", dtype);
            }
        }
    }
}
