//! The f32 fast paths against the f64 codec, over a sweep of the whole f32 range.

use shardcheck_formats::{
    Dtype, Overflow, bf16_from_f32, bf16_to_f32, decode, decode_f32, encode, encode_f32, f16_from_f32,
    f16_to_f32, round_bf16,
};

/// Every 1009th f32 (4.3 million, an odd prime step, so all low-bit patterns occur), and 2^16 around each power of two.
fn sweep() -> impl Iterator<Item = f32> {
    let strided = (0..=u32::MAX).step_by(1009);
    let around_powers = (0..=255u32)
        .flat_map(|field| (0..64u32).map(move |i| (field << 23).wrapping_add(i).wrapping_sub(32)));
    strided
        .chain(around_powers.clone())
        .chain(around_powers.map(|bits| bits | 0x8000_0000))
        .map(f32::from_bits)
}

#[test]
fn the_fast_encoders_agree_with_the_codec_on_a_sweep_of_all_f32() {
    for dtype in Dtype::ALL {
        for overflow in Overflow::ALL {
            let mut count = 0u32;
            for value in sweep() {
                let (fast, exact) =
                    (encode_f32(dtype, value, overflow), encode(dtype, f64::from(value), overflow));
                if value.is_nan() && dtype.is_float() {
                    assert!(decode(dtype, fast).is_nan() && decode(dtype, exact).is_nan(), "{dtype}");
                } else {
                    assert_eq!(fast, exact, "{dtype} {overflow} {value:e}");
                }
                count += 1;
            }
            assert!(count > 4_250_000);
        }
    }
}

#[test]
fn the_16_bit_shortcuts_agree_with_the_codec_on_a_sweep_of_all_f32() {
    for value in sweep().filter(|value| !value.is_nan()) {
        let exact = encode(Dtype::Bf16, f64::from(value), Overflow::NonFinite);
        assert_eq!(u64::from(bf16_from_f32(value)), exact, "{value:e}");
        assert_eq!(round_bf16(value).to_bits(), bf16_to_f32(exact as u16).to_bits(), "{value:e}");
        let exact = encode(Dtype::F16, f64::from(value), Overflow::NonFinite);
        assert_eq!(u64::from(f16_from_f32(value)), exact, "{value:e}");
    }
}

#[test]
fn every_16_bit_code_decodes_alike_on_both_paths() {
    for code in 0..=u16::MAX {
        for (dtype, fast) in [(Dtype::Bf16, bf16_to_f32(code)), (Dtype::F16, f16_to_f32(code))] {
            let exact = decode(dtype, u64::from(code));
            assert_eq!(fast.is_nan(), exact.is_nan());
            assert!(fast.is_nan() || f64::from(fast).to_bits() == exact.to_bits(), "{dtype} {code:#x}");
            assert_eq!(decode_f32(dtype, u64::from(code)).to_bits(), fast.to_bits(), "{dtype} {code:#x}");
        }
    }
}

#[test]
fn a_nan_stays_a_quiet_nan_of_its_sign_in_the_16_bit_shortcuts() {
    for bits in [0x7F80_0001u32, 0x7FC0_0000, 0x7FFF_FFFF, 0xFF80_0001, 0xFFFF_FFFF] {
        let nan = f32::from_bits(bits);
        let sign = (bits >> 16) as u16 & 0x8000;
        assert_eq!(bf16_from_f32(nan) & 0xFFC0, sign | 0x7FC0, "{bits:#x}");
        assert_eq!(f16_from_f32(nan) & 0xFE00, sign | 0x7E00, "{bits:#x}");
        assert!(round_bf16(nan).is_nan());
        assert_eq!(round_bf16(nan).to_bits() & 0xFFFF, bits & 0xFFFF & round_bf16(nan).to_bits());
    }
}

#[test]
fn the_16_bit_shortcuts_overflow_to_infinity() {
    assert_eq!(f16_from_f32(65519.996), 0x7BFF);
    assert_eq!(f16_from_f32(65520.0), 0x7C00);
    assert_eq!(f16_from_f32(-f32::MAX), 0xFC00);
    assert_eq!(bf16_from_f32(f32::MAX), 0x7F80);
    assert_eq!(bf16_from_f32(f32::from_bits(0x7F7F_7FFF)), 0x7F7F);
    assert_eq!(round_bf16(-f32::MAX), f32::NEG_INFINITY);
}

#[test]
fn subnormals_round_to_the_subnormal_step() {
    assert_eq!(f16_from_f32(2f32.powi(-24)), 1);
    assert_eq!(f16_from_f32(2f32.powi(-25)), 0, "a tie with zero goes to zero");
    assert_eq!(f16_from_f32(2f32.powi(-25).next_up()), 1);
    assert_eq!(f16_from_f32(1.5 * 2f32.powi(-24)), 2, "a tie goes to the even code");
    assert_eq!(bf16_from_f32(f32::from_bits(0x0000_8000)), 0);
    assert_eq!(bf16_from_f32(f32::from_bits(0x0001_8000)), 2);
    assert_eq!(encode_f32(Dtype::E4m3fn, 2f32.powi(-10), Overflow::Saturate), 0);
    assert_eq!(encode_f32(Dtype::E4m3fn, 2f32.powi(-10).next_up(), Overflow::Saturate), 1);
    assert_eq!(encode_f32(Dtype::E4m3fnuz, -2f32.powi(-11), Overflow::Saturate), 0);
    assert_eq!(encode_f32(Dtype::E4m3fnuz, -2f32.powi(-11).next_up(), Overflow::Saturate), 0x81);
    assert_eq!(encode_f32(Dtype::E5m2, 2f32.powi(-17), Overflow::Saturate), 0);
    // the largest value below the normal range rounds up into it
    assert_eq!(encode_f32(Dtype::E5m2, 2f32.powi(-14).next_down(), Overflow::Saturate), 4);
}
