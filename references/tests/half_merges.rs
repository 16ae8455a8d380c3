//! Merges in f16 against arithmetic that rounds by the definition: sums at both ends of the format's range.

use shardcheck_formats::contract::{Contract, Merge};
use shardcheck_formats::recipe::Counter;
use shardcheck_formats::{Dtype, decode};
use shardcheck_references::bound::{MergeInputs, certify_merge, interval};
use shardcheck_references::moments::Underivable;

/// The largest finite f16 value, and the smallest one above zero.
const LARGEST: f64 = 65504.0;
const SMALLEST: f64 = 1.0 / (1u64 << 24) as f64;

/// The nearest f16 value by the definition: a multiple of the step of its binade, which is 2^-24 at the least; ties to even. From
/// half a step above the largest finite value on, an infinity.
fn nearest(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let mut step = SMALLEST;
    while x.abs() >= 2048.0 * step {
        step *= 2.0;
    }
    let rounded = (x / step).round_ties_even() * step;
    if rounded.abs() > LARGEST { f64::INFINITY.copysign(x) } else { rounded }
}

/// A merge of states in f16 as engines do it, in any order of summation: weights in f32; products and sums in f16 where the
/// contract adds in it, in f32 elsewhere; one rounding at the end.
fn merged(contract: &Contract, states: &[(f32, f32)], random: &mut Counter) -> f64 {
    let max = states.iter().map(|state| state.1).fold(f32::NEG_INFINITY, f32::max);
    let lse = max + states.iter().map(|state| (state.1 - max).exp()).sum::<f32>().ln();
    let in_f16 = contract.merge == Merge::AgRsF16;
    let store = |x: f32| if in_f16 { nearest(f64::from(x)) as f32 } else { x };
    let mut terms: Vec<f32> = states.iter().map(|(out, own)| store((own - lse).exp() * out)).collect();
    while terms.len() > 1 {
        let term = terms.swap_remove(random.below(terms.len() as u64) as usize);
        let into = random.below(terms.len() as u64) as usize;
        terms[into] = store(terms[into] + term);
    }
    nearest(f64::from(terms[0]))
}

fn allowed(contract: &Contract, states: &[(f32, f32)]) -> Result<(f64, f64, f64), Underivable> {
    let (out, lse): (Vec<f64>, Vec<f64>) =
        states.iter().map(|(out, lse)| (f64::from(*out), f64::from(*lse))).unzip();
    let given = MergeInputs { rows: 1, heads: 1, v_dim: 1, out: &out, lse: &lse };
    let certified = certify_merge(&given, contract, false)?;
    let (low, high) = interval(certified.out[0], certified.pre[0], contract.output);
    Ok((certified.out[0], low, high))
}

#[test]
fn the_codec_rounds_as_the_definition_does_between_all_neighbouring_codes() {
    for code in 0..0x7C00u64 {
        let (below, above) = (decode(Dtype::F16, code), decode(Dtype::F16, code + 1));
        let above = if above.is_finite() { above } else { 65536.0 };
        let middle = (below + above) / 2.0;
        for x in [below, middle.next_down(), middle, middle.next_up(), above.next_down()] {
            for signed in [x, -x] {
                assert_eq!(shardcheck_formats::round(Dtype::F16, signed), nearest(signed), "{signed:e}");
            }
        }
    }
}

#[test]
fn merges_of_any_f16_values_stay_inside_and_no_relative_bound_would_hold() {
    let mut random = Counter::new(41, 0);
    let (mut elements, mut beyond_relative, mut overflows, mut subnormal) = (0, 0, 0, 0);
    for run in 0..60_000 {
        let merge = [Merge::A2a, Merge::AgRsF32, Merge::AgRsF16, Merge::AgRsF16][run % 4];
        let contract = Contract::bf16_default(merge).in_f16();
        let world = 2 + random.below(7) as usize;
        // codes of a few binades, so that states meet others of their size: subnormal, usual and nearly infinite ones; and
        // among the smallest ones of all
        let (first, span) = if run % 8 < 6 { (random.below(0x7C00), 0x0C00) } else { (0, 0x20) };
        let states: Vec<(f32, f32)> = (0..world)
            .map(|_| {
                let code = (first + random.below(span)).min(0x7BFF) | random.below(2) << 15;
                (decode(Dtype::F16, code) as f32, (random.gaussian() * 2.0) as f32)
            })
            .collect();
        let (exact, low, high) = match allowed(&contract, &states) {
            Ok(allowed) => allowed,
            Err(Underivable::Overflow { .. }) => {
                overflows += 1;
                continue;
            }
            Err(error) => panic!("{error}: {states:?}"),
        };
        let seen = merged(&contract, &states, &mut random);
        assert!(low <= seen && seen <= high, "{seen:e} not in {low:e}..{high:e}: {contract:?} {states:?}");
        let largest = states.iter().map(|state| f64::from(state.0.abs())).fold(0.0, f64::max);
        beyond_relative += usize::from((seen - exact).abs() > 2.0 * world as f64 * largest * 2f64.powi(-11));
        subnormal += usize::from(seen != 0.0 && seen.abs() < 2f64.powi(-14));
        elements += 1;
    }
    assert!(elements > 50_000 && subnormal > 1_000, "{elements} {subnormal}");
    assert!(beyond_relative > 20 && overflows > 0, "{beyond_relative} {overflows}");
}

#[test]
fn every_code_beside_its_negative_and_beside_nothing_comes_out_as_it_is() {
    for merge in [Merge::A2a, Merge::AgRsF32, Merge::AgRsF16] {
        let contract = Contract::bf16_default(merge).in_f16();
        for code in (0..0x7C00u64).chain(0x8000..0xFC00) {
            let value = decode(Dtype::F16, code) as f32;
            let (_, low, high) = allowed(&contract, &[(value, 0.5), (0.0, f32::NEG_INFINITY)]).unwrap();
            let kept = f64::from(value);
            assert!(low <= kept && kept <= high, "{value:e}: {low:e}..{high:e}");
            if merge != Merge::AgRsF16 {
                // products and sums of f32 are so much finer that only one value is left
                assert_eq!((low, high), (kept, kept), "{value:e}");
            }
            let (_, low, high) = allowed(&contract, &[(value, 1.0), (-value, 1.0)]).unwrap();
            assert!(low <= 0.0 && 0.0 <= high && high - low <= kept.abs().max(8.0 * SMALLEST), "{value:e}");
        }
    }
}

#[test]
fn what_is_beyond_the_largest_value_may_be_infinite_from_half_a_step_on() {
    let of = |out, pre| interval(out, pre, Dtype::F16);
    assert_eq!(of(LARGEST, 15.9), (LARGEST, LARGEST));
    assert_eq!(of(LARGEST, 16.0), (65472.0, f64::INFINITY));
    assert_eq!(of(65520.0, 0.0), (f64::INFINITY, f64::INFINITY));
    assert_eq!(of(-70000.0, 6000.0), (f64::NEG_INFINITY, -64000.0));
    assert_eq!(of(0.4 * SMALLEST, 0.2 * SMALLEST), (0.0, SMALLEST));
}

#[test]
fn a_sum_that_may_leave_the_range_on_its_way_has_no_bound_in_f16_and_one_in_f32() {
    // three states that are each almost all there is cannot be: weights add up to 1; one that dwarfs the others can
    let states = [(65504.0f32, 30.0f32), (65504.0, 0.0), (-65504.0, 0.0)];
    let of = |merge| allowed(&Contract::bf16_default(merge).in_f16(), &states);
    assert!(matches!(of(Merge::AgRsF16), Err(Underivable::Overflow { .. })));
    for merge in [Merge::A2a, Merge::AgRsF32] {
        let (_, low, high) = of(merge).unwrap();
        assert_eq!((low, high), (LARGEST, LARGEST), "{merge}");
    }
}
