//! Elementary functions with a fixed order of operations: the same bits on every IEEE 754 machine.
//!
//! A platform's own `exp` and `ln` differ in the last place from one library to the next. Stored vectors must
//! come out the same wherever they are made, so these use nothing but additions, multiplications, divisions and
//! exact scaling, never a fused operation. Both are within 2 ulp; they are not meant to be fast.

use crate::attention::plain::Functions;

/// High part of ln 2: its last 20 bits are zero, so that products with exponents are exact.
const LN_2_HIGH: f64 = f64::from_bits(0x3FE6_2E42_FEE0_0000);
/// ln 2 less [`LN_2_HIGH`].
const LN_2_LOW: f64 = f64::from_bits(0x3DEA_39EF_3579_3C76);
/// Past this, `e^x` is infinite.
const LARGEST_EXPONENT: f64 = 709.782_712_893_384;
/// Below this, `e^x` is less than half the smallest subnormal.
const SMALLEST_EXPONENT: f64 = -745.133_219_101_941_2;

/// The functions of this module, for [`crate::attention::plain::attend_with`].
#[derive(Debug, Clone, Copy)]
pub struct Fixed;

impl Functions for Fixed {
    fn exp(x: f64) -> f64 {
        exp(x)
    }
    fn ln(x: f64) -> f64 {
        ln(x)
    }
    fn tanh(x: f64) -> f64 {
        tanh(x)
    }
}

/// `e^x`: reduced to `|r| ≤ ln 2 / 2`, there by its Taylor polynomial.
pub fn exp(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x > LARGEST_EXPONENT {
        return f64::INFINITY;
    }
    if x < SMALLEST_EXPONENT {
        return 0.0;
    }
    let doublings = (x * std::f64::consts::LOG2_E).round();
    let high = x - doublings * LN_2_HIGH;
    let low = doublings * LN_2_LOW;
    let r = high - low;
    // 1 + r + rest, the rounding of r = high − low put back
    let rest = r * r * taylor(r);
    scale(1.0 + (high + (rest - low)), doublings as i32)
}

/// `ln x`, from the series of `2·artanh((m − 1)/(m + 1))` for `m` in `[√½, √2)`.
pub fn ln(x: f64) -> f64 {
    if x.is_nan() || x == f64::INFINITY {
        return x;
    }
    if x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    let (x, shift) = if x < f64::MIN_POSITIVE { (x * 2f64.powi(54), 54) } else { (x, 0) };
    let mut exponent = ((x.to_bits() >> 52) as i32) - 1023 - shift;
    let mut mantissa = f64::from_bits((x.to_bits() & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let f = mantissa - 1.0;
    let s = f / (2.0 + f);
    let square = s * s;
    // 2(s²/3 + s⁴/5 + …): what artanh adds to its first term
    let mut series = 0.0;
    for k in (1..=11).rev() {
        series = (series + 2.0 / f64::from(2 * k + 1)) * square;
    }
    let half_square = 0.5 * f * f;
    let exponent = f64::from(exponent);
    exponent * LN_2_HIGH + (f - (half_square - (s * (half_square + series) + exponent * LN_2_LOW)))
}

/// `tanh x`, from `e^2x − 1` so that small arguments keep their digits.
pub fn tanh(x: f64) -> f64 {
    if x.is_nan() || x == 0.0 {
        return x;
    }
    let magnitude = x.abs();
    let result = if magnitude > 20.0 {
        1.0
    } else {
        let twice = 2.0 * magnitude;
        let e = if twice < 0.3 { twice + twice * twice * taylor(twice) } else { exp(twice) - 1.0 };
        e / (e + 2.0)
    };
    if x < 0.0 { -result } else { result }
}

/// `(e^r − 1 − r)/r²` for `|r| ≤ 0.35`: `1/2! + r/3! + …`, the last term below 1e-17 of the sum.
fn taylor(r: f64) -> f64 {
    const INVERSE_FACTORIALS: [f64; 13] = [
        1.0 / 87_178_291_200.0,
        1.0 / 6_227_020_800.0,
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
    let mut sum = 0.0;
    for coefficient in INVERSE_FACTORIALS {
        sum = sum * r + coefficient;
    }
    sum
}

/// `x·2^exponent` for `x` in `[½, 2)`, rounding once where the result is subnormal.
fn scale(x: f64, exponent: i32) -> f64 {
    let power = |exponent: i32| f64::from_bits(((exponent + 1023) as u64) << 52);
    match exponent {
        ..-1021 => x * power(exponent + 54) * power(-54),
        -1021..=1022 => x * power(exponent),
        _ => x * 2.0 * power(exponent - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_formats::recipe::Counter;

    /// Distance in representable values.
    fn ulps(a: f64, b: f64) -> u64 {
        let key = |x: f64| {
            let bits = x.to_bits() as i64;
            if bits < 0 { i64::MIN - bits } else { bits }
        };
        key(a).abs_diff(key(b))
    }

    #[test]
    fn attention_with_fixed_functions_uses_those_of_this_module() {
        for x in [-1.5, 0.0, 0.7, 3.0] {
            assert_eq!((Fixed::exp(x), Fixed::ln(exp(x)), Fixed::tanh(x)), (exp(x), ln(exp(x)), tanh(x)));
        }
        assert!(
            ulps(Fixed::exp(1.0), std::f64::consts::E) <= 2
                && ulps(Fixed::ln(2.0), std::f64::consts::LN_2) <= 2
        );
    }

    #[test]
    fn exp_is_within_two_ulp_of_the_platform() {
        let mut random = Counter::new(1, 0);
        for i in 0..200_000 {
            let x = match i % 4 {
                0 => -50.0 * random.unit_f64(),
                1 => 1400.0 * random.unit_f64() - 700.0,
                2 => random.gaussian() * 1e-3,
                _ => random.gaussian(),
            };
            assert!(ulps(exp(x), x.exp()) <= 2, "exp({x}) = {} against {}", exp(x), x.exp());
        }
    }

    #[test]
    fn exp_reaches_its_ends() {
        assert_eq!((exp(0.0), exp(f64::NEG_INFINITY), exp(f64::INFINITY)), (1.0, 0.0, f64::INFINITY));
        assert_eq!((exp(710.0), exp(-746.0)), (f64::INFINITY, 0.0));
        assert!(exp(f64::NAN).is_nan());
        for x in [709.7, -708.3, -710.0, -740.0, -745.1, 709.782] {
            assert!(ulps(exp(x), x.exp()) <= 2, "exp({x}) = {:e} against {:e}", exp(x), x.exp());
        }
    }

    #[test]
    fn ln_is_within_two_ulp_of_the_platform() {
        let mut random = Counter::new(2, 0);
        for i in 0..200_000 {
            let x = match i % 4 {
                0 => random.unit_f64() + 0.5,
                1 => 1.0 + random.gaussian() * 1e-6,
                2 => (1400.0 * random.unit_f64() - 700.0).exp(),
                _ => 1.0 + 1e6 * random.unit_f64(),
            };
            assert!(ulps(ln(x), x.ln()) <= 2, "ln({x}) = {} against {}", ln(x), x.ln());
        }
    }

    #[test]
    fn ln_reaches_its_ends() {
        assert_eq!((ln(1.0), ln(0.0), ln(f64::INFINITY)), (0.0, f64::NEG_INFINITY, f64::INFINITY));
        assert!(ln(-1.0).is_nan() && ln(f64::NAN).is_nan());
        assert!(ulps(ln(5e-324), 5e-324f64.ln()) <= 2 && ulps(ln(f64::MAX), f64::MAX.ln()) <= 2);
    }

    #[test]
    fn tanh_is_within_four_ulp_of_the_platform() {
        let mut random = Counter::new(3, 0);
        for i in 0..100_000 {
            let x = if i % 2 == 0 { random.gaussian() * 1e-4 } else { random.gaussian() * 5.0 };
            assert!(ulps(tanh(x), x.tanh()) <= 4, "tanh({x}) = {} against {}", tanh(x), x.tanh());
        }
        assert_eq!((tanh(40.0), tanh(-40.0), tanh(0.0)), (1.0, -1.0, 0.0));
    }

    #[test]
    fn the_bits_are_those_that_every_machine_gives() {
        // found equal by the same algorithm in another language (Python); another value here means that stored
        // vectors would not regenerate
        let mut hash = 0u64;
        let mut random = Counter::new(4, 0);
        for _ in 0..10_000 {
            let x = random.gaussian() * 10.0;
            for bits in [exp(x), ln(x.abs()), tanh(x)].map(f64::to_bits) {
                hash = hash.rotate_left(7) ^ bits;
            }
        }
        assert_eq!(hash, 0x71de_083e_fd7d_5d07, "{hash:#x}");
    }
}
