//! What a card's arithmetic is seen to be, by small kernels: the width of the matrix units' accumulators, exp and log, casts.

use std::sync::Arc;

use shardcheck_engine::EngineError;
use shardcheck_formats::{Dtype, Overflow, bf16_from_f32, encode_f32};

use crate::batch::crash;
use crate::device::Device;
use crate::profile::attention_contract;
use crate::queue::{Argument, Extent, Queue};
use crate::shape::code_of;

/// One thing that was measured on the card.
#[derive(Debug, Clone, PartialEq)]
pub struct CardReading {
    /// What.
    pub what: &'static str,
    /// What the engine's contract rests on.
    pub declared: String,
    /// What was seen.
    pub seen: String,
    /// Whether it is within what is declared; `None` where nothing rests on it.
    pub agrees: Option<bool>,
}

/// A matrix instruction: the accumulator and the products that are added to it in one go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Warp,
    Warpgroup,
    Byte,
}

impl Unit {
    fn what(self) -> &'static str {
        match self {
            Self::Warp => "matrix unit, bf16 mma.sync",
            Self::Warpgroup => "matrix unit, bf16 wgmma",
            Self::Byte => "matrix unit, e4m3 mma.sync",
        }
    }

    /// Products that one instruction adds.
    fn depth(self) -> usize {
        if self == Self::Byte { 32 } else { 16 }
    }

    /// Rows of the left operand, columns of the right one.
    fn extent(self) -> (usize, usize) {
        match self {
            Self::Warp | Self::Byte => (16, 8),
            Self::Warpgroup => (64, 32),
        }
    }

    /// `c + Σ terms` of each experiment, as the unit computes it. The terms are the first row of the left operand, the right one being ones.
    fn compute(self, queue: &Arc<Queue>, experiments: &[Experiment]) -> Result<Vec<f32>, EngineError> {
        let ((rows, columns), depth) = (self.extent(), self.depth());
        let encode = |value: f32| -> Vec<u8> {
            match self {
                Self::Byte => vec![encode_f32(Dtype::E4m3fn, value, Overflow::Saturate) as u8],
                _ => bf16_from_f32(value).to_le_bytes().to_vec(),
            }
        };
        let (mut left, mut right, mut start) = (Vec::new(), Vec::new(), Vec::new());
        for experiment in experiments {
            for row in 0..rows {
                left.extend((0..depth).flat_map(|at| {
                    let term = experiment.terms.get(at).copied().unwrap_or(0.0);
                    encode(if row == 0 { term } else { 0.0 })
                }));
            }
            right.extend((0..columns * depth).flat_map(|_| encode(experiment.factor)));
            start.extend((0..rows * columns).flat_map(|_| experiment.start.to_le_bytes()));
        }
        let (left, right, start) = (queue.upload(&left)?, queue.upload(&right)?, queue.upload(&start)?);
        let out = queue.allocate(4 * experiments.len() * rows * columns)?;
        queue.fill(&out, 0xFF)?;
        let name = match self {
            Self::Warp => "measure_mma",
            Self::Warpgroup => "measure_warpgroup",
            Self::Byte => "measure_mma_byte",
        };
        let arguments = [
            left.argument(),
            right.argument(),
            start.argument(),
            Argument::Int(experiments.len() as i32),
            out.argument(),
        ];
        queue.launch(name, Extent::blocks(experiments.len(), 1, 1), &arguments)?;
        let bytes = queue.read(&out, out.bytes())?;
        let first = |index: usize| {
            let at = 4 * index * rows * columns;
            f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Ok((0..experiments.len()).map(first).collect())
    }
}

/// A sum that one instruction makes.
#[derive(Debug, Clone)]
struct Experiment {
    start: f32,
    terms: Vec<f32>,
    factor: f32,
}

impl Experiment {
    fn exact(&self) -> f64 {
        f64::from(self.start) + self.terms.iter().map(|term| f64::from(term * self.factor)).sum::<f64>()
    }

    /// 2^-23 of the power of two below the largest term.
    fn unit(&self) -> f64 {
        let terms = self.terms.iter().map(|term| (term * self.factor).abs());
        let largest = terms.fold(self.start.abs(), f32::max);
        f64::from(largest).log2().floor().exp2() * 2f64.powi(-23)
    }
}

/// One large number and many small ones, in every number and size that matters; then random ones.
fn experiments(depth: usize, least_exponent: i32) -> Vec<Experiment> {
    let mut all = Vec::new();
    for exponent in 18..=30 {
        for count in [1, 2, 3, 4, 7, 8, 15, 16, 31, 32].into_iter().filter(|count| *count <= depth) {
            for (mantissa, sign) in [(1.0, 1.0), (1.5, 1.0), (1.75, 1.0), (1.0, -1.0), (1.75, -1.0)] {
                // a term is as small as its type allows; the accumulator is large instead
                let term = mantissa * sign * 2f32.powi(least_exponent);
                let start = 2f32.powi(exponent + least_exponent);
                all.push(Experiment { start, terms: vec![term; count], factor: 1.0 });
                let mut terms = vec![term; count - 1];
                terms.push(term);
                all.push(Experiment { start: start * 1.25, terms, factor: 1.0 });
            }
        }
    }
    let mut state = 0x0123_4567_89AB_CDEF_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..4000 {
        let mut term = || {
            let bits = next();
            let mantissa = 1.0 + (bits & 7) as f32 / 8.0;
            let sign = if bits & 8 == 0 { 1.0 } else { -1.0 };
            sign * mantissa * 2f32.powi(least_exponent + ((bits >> 8) & 7) as i32)
        };
        let terms: Vec<f32> = (0..depth).map(|_| term()).collect();
        let start = term() * 2f32.powi(16 + (terms[0].to_bits() & 7) as i32);
        all.push(Experiment { start, terms, factor: 1.0 });
    }
    all
}

/// Tries the card.
///
/// # Errors
/// What the driver says.
pub fn readings(device: &Arc<Device>) -> Result<Vec<CardReading>, EngineError> {
    let queue = Queue::new(Arc::clone(device))?;
    let mut readings = vec![matrix(&queue, Unit::Warp)?];
    if device.has_warpgroups() {
        readings.push(matrix(&queue, Unit::Warpgroup)?);
    }
    if device.properties.capability >= (8, 9) {
        readings.push(matrix(&queue, Unit::Byte)?);
    }
    readings.extend(transcendental(&queue)?);
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2] {
        readings.push(casts(&queue, dtype)?);
    }
    Ok(readings)
}

fn matrix(queue: &Arc<Queue>, unit: Unit) -> Result<CardReading, EngineError> {
    let least = if unit == Unit::Byte { -6 } else { -20 };
    let experiments = experiments(unit.depth(), least);
    let seen = unit.compute(queue, &experiments)?;
    let (mut worst, mut inexact) = (0.0f64, 0);
    for (experiment, value) in experiments.iter().zip(&seen) {
        let error = f64::from(*value) - experiment.exact();
        worst = worst.max((error / experiment.unit()).abs());
        inexact += usize::from(error != 0.0);
    }
    // the smallest of sixteen equal terms that are seen at all beside a one
    let kept = (8..=30).rev().find(|exponent| {
        let scale = 2f32.powi(least + exponent);
        let terms = vec![2f32.powi(least); unit.depth()];
        let experiment = Experiment { start: scale, terms, factor: 1.0 };
        unit.compute(queue, &[experiment]).is_ok_and(|seen| seen[0] != scale)
    });
    let subnormal = Experiment { start: 0.0, terms: vec![2f32.powi(-70)], factor: 2f32.powi(-70) };
    let flushes = unit != Unit::Byte && unit.compute(queue, &[subnormal])?[0] == 0.0;
    let contract = attention_contract();
    // units of 2^-23 that the contract allows for the products of one instruction
    let declared = (contract.depth_for(16 * 300) - contract.depth_for(0)) as f64 / 300.0
        * contract.u_acc
        * 2f64.powi(23);
    let used = unit != Unit::Byte;
    Ok(CardReading {
        what: unit.what(),
        declared: if used {
            format!(
                "at most {declared:.2} units of 2^-23 of the largest term lost an instruction of {} products",
                unit.depth()
            )
        } else {
            "nothing: no kernel multiplies codes".to_owned()
        },
        seen: format!(
            "{} sums, {inexact} inexact; at most {worst:.3} units lost; {} equal terms are seen beside a large one down to 2^-{} of it{}",
            experiments.len(),
            unit.depth(),
            kept.map_or_else(|| "8".to_owned(), |exponent| exponent.to_string()),
            if unit == Unit::Byte {
                ""
            } else if flushes {
                "; subnormal sums flushed"
            } else {
                "; subnormal sums kept"
            },
        ),
        agrees: used.then_some(worst <= declared),
    })
}

/// Worst error of a function in units of the last place of its f32 result.
fn worst_ulp(pairs: impl Iterator<Item = (f32, f64)>) -> f64 {
    pairs
        .filter(|(_, exact)| exact.abs() >= f64::from(f32::MIN_POSITIVE) && exact.abs() < f64::from(f32::MAX))
        .map(|(seen, exact)| (f64::from(seen) - exact).abs() / (exact.abs().log2().floor() - 23.0).exp2())
        .fold(0.0, f64::max)
}

fn transcendental(queue: &Arc<Queue>) -> Result<Vec<CardReading>, EngineError> {
    let falling: Vec<f32> = (0..1 << 17).map(|step| -87.0 * step as f32 / (1 << 17) as f32).collect();
    let rising: Vec<f32> = (0..1 << 17).map(|step| 1.0 + (step as f32 / 97.0).powi(2)).collect();
    let compute = |x: &[f32]| -> Result<Vec<[f32; 5]>, EngineError> {
        let given = queue.upload(&x.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())?;
        let out = queue.allocate(20 * x.len())?;
        queue.fill(&out, 0xFF)?;
        let arguments = [given.argument(), Argument::Int(x.len() as i32), out.argument()];
        queue.launch("measure_exp", Extent::over(x.len()), &arguments)?;
        let bytes = queue.read(&out, 20 * x.len())?;
        let words: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        Ok(words.as_chunks::<5>().0.to_vec())
    };
    let (down, up) = (compute(&falling)?, compute(&rising)?);
    let of = |x: &[f32], seen: &[[f32; 5]], column: usize, exact: fn(f64) -> f64| {
        worst_ulp(x.iter().zip(seen).map(|(x, seen)| (seen[column], exact(f64::from(*x)))))
    };
    let kexp = attention_contract().kexp;
    let used = |what, worst: f64| CardReading {
        what,
        declared: format!("kexp {kexp}"),
        seen: format!("worst {worst:.3} ulp of {} arguments", falling.len()),
        agrees: Some(worst <= kexp),
    };
    let unused = |what, worst: f64| CardReading {
        what,
        declared: "nothing: no kernel uses it".to_owned(),
        seen: format!("worst {worst:.3} ulp of {} arguments", falling.len()),
        agrees: None,
    };
    Ok(vec![
        used("exp of the kernels, [-87, 0]", of(&falling, &down, 0, f64::exp)),
        used("log of the kernels, from 1 on", of(&rising, &up, 1, f64::ln)),
        used("exp2 of the kernels, [-87, 0]", of(&falling, &down, 2, f64::exp2)),
        unused("the card's ex2.approx, [-87, 0]", of(&falling, &down, 3, f64::exp2)),
        unused("the card's lg2.approx, from 1 on", of(&rising, &up, 4, f64::log2)),
    ])
}

/// Casts of a cache, against the codec bit by bit: over the range of the type, beyond it, and among its subnormals.
fn casts(queue: &Arc<Queue>, dtype: Dtype) -> Result<CardReading, EngineError> {
    let code = code_of(dtype).ok_or_else(|| crash(format!("no kernel casts to {dtype}")))?;
    let mut values = vec![
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        448.0,
        464.0,
        480.0,
        57344.0,
        61440.0,
        1e38,
    ];
    // every 65,537th number of f32, and the neighbourhoods of small ones
    values.extend((0..=u32::MAX / 65_537).map(|step| f32::from_bits(step * 65_537)));
    values.extend((0..4096).flat_map(|step| [step as f32 * 2f32.powi(-20), step as f32 * 2f32.powi(-36)]));
    let given = queue.upload(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())?;
    let (codes, decoded) = (queue.allocate(4 * values.len())?, queue.allocate(4 * values.len())?);
    let arguments = [
        given.argument(),
        Argument::Int(code),
        Argument::Int(values.len() as i32),
        codes.argument(),
        decoded.argument(),
    ];
    queue.launch("measure_codes", Extent::over(values.len()), &arguments)?;
    let words = |bytes: Vec<u8>| -> Vec<u32> {
        bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    };
    let codes = words(queue.read(&codes, 4 * values.len())?);
    let decoded: Vec<f32> =
        words(queue.read(&decoded, 4 * values.len())?).into_iter().map(f32::from_bits).collect();
    let differ = (0..values.len())
        .filter(|at| {
            let expected = encode_f32(dtype, values[*at], Overflow::Saturate);
            let back = shardcheck_formats::decode_f32(dtype, u64::from(codes[*at]));
            u64::from(codes[*at]) != expected
                || !(back == decoded[*at] || (back.is_nan() && decoded[*at].is_nan()))
        })
        .count();
    let of = |value: f32| {
        values.iter().position(|v| v.to_bits() == value.to_bits()).map_or(f32::NAN, |at| decoded[at])
    };
    Ok(CardReading {
        what: match dtype {
            Dtype::Bf16 => "casts to bf16",
            Dtype::F16 => "casts to f16",
            Dtype::E4m3fn => "casts to e4m3fn",
            Dtype::E4m3fnuz => "casts to e4m3fnuz",
            _ => "casts to e5m2",
        },
        declared: "to nearest even, saturating, subnormals kept".to_owned(),
        seen: format!(
            "{differ} of {} codes differ from the codec; 464 reads {}, infinity {}, NaN {}",
            values.len(),
            of(464.0),
            of(f32::INFINITY),
            of(f32::NAN)
        ),
        agrees: Some(differ == 0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_counted_in_units_of_the_result() {
        assert_eq!(worst_ulp([(1.0f32, 1.0f64)].into_iter()), 0.0);
        assert_eq!(worst_ulp([(1.0f32 + f32::EPSILON, 1.0f64)].into_iter()), 1.0);
        assert!((worst_ulp([(0.75f32, 0.75 * (1.0 + 2f64.powi(-23)))].into_iter()) - 1.5).abs() < 1e-6);
    }

    #[test]
    fn experiments_are_exact_in_double_precision_and_small_enough_for_their_types() {
        for (depth, least) in [(16, -20), (32, -6)] {
            let all = experiments(depth, least);
            assert!(all.len() > 4000);
            for experiment in all {
                assert!(experiment.terms.len() <= depth && experiment.unit() > 0.0);
                let back = |term: f32| match depth {
                    32 => shardcheck_formats::decode_f32(
                        Dtype::E4m3fn,
                        encode_f32(Dtype::E4m3fn, term, Overflow::Saturate),
                    ),
                    _ => shardcheck_formats::bf16_to_f32(bf16_from_f32(term)),
                };
                assert!(experiment.terms.iter().all(|term| back(*term) == *term), "{experiment:?}");
            }
        }
    }
}
