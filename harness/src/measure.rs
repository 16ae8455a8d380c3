//! What an engine's contract is seen to be: crafted decode steps and writes whose answers show one rounding each.
//!
//! A certified bound takes the engine's word for how it rounds. Here the word is tried: sums in which small terms are lost to a large one,
//! exponentials over their range, probabilities that cancel against their own rounding, casts beyond the range of the cache. What is
//! seen beyond the bound of the declared contract is a false declaration.

mod bench;

use shardcheck_engine::{Engine, OperationKind, ScaleRounding};
use shardcheck_formats::{Dtype, Overflow, encode, round};
use shardcheck_references::attention::plain::{Problem, Values};
use shardcheck_references::bound::certify;
use shardcheck_references::layout::Layout;
use shardcheck_references::visibility::Visible;

use bench::{Row, SCORE_DIM, VALUE_DIM, stored};

/// One thing that was measured.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Reading {
    /// What.
    pub what: &'static str,
    /// What the profile says.
    pub declared: String,
    /// What was seen, or why nothing was.
    pub seen: String,
    /// Whether the two agree; `None` where nothing was seen.
    pub agrees: Option<bool>,
}

/// Tries the contract and the conventions of decode and of the cache.
pub fn measure(engine: &dyn Engine) -> Vec<Reading> {
    let sums = [
        ("sums of scores", score_sums()),
        ("exponential and logarithm", exponentials()),
        ("sums of values", value_sums()),
    ];
    let mut readings: Vec<Reading> =
        sums.into_iter().map(|(what, rows)| against_bound(engine, what, &rows)).collect();
    readings.push(probabilities(engine));
    readings.push(overflow(engine));
    readings.push(scale_rounding(engine));
    readings
}

fn unseen(what: &'static str, declared: String, why: String) -> Reading {
    Reading { what, declared, seen: format!("not measured: {why}"), agrees: None }
}

/// One token is large and the others are lost to it, in every place of the vector: the LSE of a row that sees one token is its score.
fn score_sums() -> Vec<Row> {
    let small = [2f32.powi(-24), 2f32.powi(-25), 1.5 * 2f32.powi(-25), 2f32.powi(-20)];
    let places = [0, 1, 15, 16, 31, SCORE_DIM - 1];
    let rows = small.into_iter().flat_map(|small| places.map(|large_at| (small, large_at)));
    rows.map(|(small, large_at)| {
        let mut key = vec![small; SCORE_DIM];
        key[large_at] = 1.0;
        Row { query: vec![1.0; SCORE_DIM], keys: vec![key], values: vec![vec![1.0; VALUE_DIM]] }
    })
    .collect()
}

/// Two tokens whose scores differ by 0 to 20: the LSE is ln(1 + e^-d) above the larger.
fn exponentials() -> Vec<Row> {
    let gaps = (0..96).map(|step| step as f32 * 0.21 + 0.013 * (step % 7) as f32);
    gaps.map(|gap| {
        let key = |score: f32| {
            let mut key = vec![0.0; SCORE_DIM];
            key[0] = score;
            key
        };
        let mut query = vec![0.0; SCORE_DIM];
        query[0] = 1.0;
        Row {
            query,
            keys: vec![key(0.0), key(-gap)],
            values: vec![vec![0.0; VALUE_DIM], vec![1.0; VALUE_DIM]],
        }
    })
    .collect()
}

/// Equal scores; one large value, many small ones, and the large one taken away again: what is left are the small ones that were kept.
fn value_sums() -> Vec<Row> {
    let counts = [18, 66, 258, 1026];
    let smalls = [2f32.powi(-24), 2f32.powi(-22), 2f32.powi(-16)];
    let rows = counts.into_iter().flat_map(|count| smalls.map(|small| (count, small)));
    rows.map(|(count, small)| {
        let value = |token: usize| match token {
            0 => 1.0,
            token if token + 1 == count => -1.0,
            _ => small,
        };
        let values = (0..count).map(|token| vec![value(token); VALUE_DIM]).collect();
        Row { query: vec![0.0; SCORE_DIM], keys: vec![vec![0.0; SCORE_DIM]; count], values }
    })
    .collect()
}

/// Decodes the rows and compares outputs and LSEs with the certified bound of the declared contract.
fn against_bound(engine: &dyn Engine, what: &'static str, rows: &[Row]) -> Reading {
    let Some(contract) =
        engine.profile().operation(OperationKind::Decode).and_then(|decode| decode.contract.clone())
    else {
        return unseen(what, "no contract for decode".to_owned(), "nothing is declared".to_owned());
    };
    let declared =
        format!("u_acc 2^{}, depth {:?}, kexp {}", contract.u_acc.log2(), contract.depth, contract.kexp);
    let (outs, lses) = match bench::decode(engine, rows) {
        Ok(seen) => seen,
        Err(why) => return unseen(what, declared, why),
    };
    let (mut share, mut worst_out, mut worst_lse) = (0.0f64, 0.0f64, 0.0f64);
    for (row, (out, lse)) in rows.iter().zip(outs.iter().zip(&lses)) {
        let (query, key, value) = row.stored();
        let problem = Problem::new(1, 1, SCORE_DIM, VALUE_DIM, 1.0, &query, &key, Values::Separate(&value));
        let layout = Layout::new(1, 1, bench::BLOCK_TOKENS).expect("one rank is a layout");
        let certified = match certify(&problem, &layout, &[Visible::Prefix(row.keys.len())], &contract) {
            Ok(certified) => certified,
            Err(why) => return unseen(what, declared, why.to_string()),
        };
        for (dim, seen) in out.iter().enumerate() {
            let (low, high) = certified.intervals(contract.output)[dim];
            share = share.max(shardcheck_references::bound::ratio(*seen, certified.out[dim], low, high));
            worst_out = worst_out.max((seen - certified.out[dim]).abs());
        }
        let error = (lse - certified.lse[0]).abs();
        // the LSE is stored in f32 after it was bounded
        let allowed = certified.lse_bound[0] + certified.lse[0].abs() * 2f64.powi(-24);
        share = share.max(if error == 0.0 { 0.0 } else { error / allowed });
        worst_lse = worst_lse.max(error);
    }
    let seen = format!(
        "{} rows: output off by up to {worst_out:.2e}, LSE by {worst_lse:.2e} ({:.1} units of 2^-24); at most {share:.3} of what is allowed",
        rows.len(),
        worst_lse * 2f64.powi(24)
    );
    Reading { what, declared, seen, agrees: Some(share <= 1.0) }
}

/// Two tokens, p = 1 and p = e^-d; values 1 and −p rounded to bf16 cancel exactly if P is rounded so.
fn probabilities(engine: &dyn Engine) -> Reading {
    let what = "probabilities before P·V";
    let declared =
        engine.profile().operation(OperationKind::Decode).and_then(|decode| decode.contract.clone());
    let Some(contract) = declared else {
        return unseen(what, "no contract for decode".to_owned(), "nothing is declared".to_owned());
    };
    let declared = contract.p_dtype.map_or_else(|| "f32, not rounded".to_owned(), |dtype| dtype.to_string());
    let gaps: Vec<f32> = (1..=48).map(|step| stored(step as f32 * 0.061)).collect();
    let rows: Vec<Row> = gaps
        .iter()
        .map(|gap| {
            let key = |score: f32| [vec![score], vec![0.0; SCORE_DIM - 1]].concat();
            let p = round(Dtype::Bf16, f64::from(-gap).exp()) as f32;
            Row {
                query: key(1.0),
                keys: vec![key(0.0), key(-gap)],
                values: vec![vec![-p; VALUE_DIM], vec![1.0; VALUE_DIM]],
            }
        })
        .collect();
    let outs = match bench::decode(engine, &rows) {
        Ok((outs, _)) => outs,
        Err(why) => return unseen(what, declared, why),
    };
    let candidates = [None, Some(Dtype::F16), Some(Dtype::Bf16), Some(Dtype::E4m3fn)];
    let distance = |candidate: Option<Dtype>| -> f64 {
        let rows = gaps.iter().zip(&outs);
        rows.map(|(gap, out)| {
            let p = f64::from(-gap).exp();
            let used = candidate.map_or(p, |dtype| round(dtype, p));
            ((used - round(Dtype::Bf16, p)) / (1.0 + p) - out[0]).abs()
        })
        .sum()
    };
    let nearest = candidates.into_iter().min_by(|a, b| distance(*a).total_cmp(&distance(*b))).flatten();
    let seen = nearest.map_or_else(|| "f32, not rounded".to_owned(), |dtype| format!("rounded to {dtype}"));
    // a finer P than declared keeps the contract
    let unit = |dtype: Option<Dtype>| dtype.map_or(0.0, Dtype::unit_roundoff);
    Reading { what, declared, seen, agrees: Some(unit(nearest) <= unit(contract.p_dtype)) }
}

/// A value far beyond the largest of e4m3, written and read back.
fn overflow(engine: &dyn Engine) -> Reading {
    let what = "cast beyond the range of e4m3fn";
    let declared = engine.profile().operation(OperationKind::WriteKv).map(|write| write.conventions.overflow);
    let Some(overflow) = declared else {
        return unseen(what, "no write_kv".to_owned(), "nothing is declared".to_owned());
    };
    let codes = match bench::written(engine, Dtype::E4m3fn, 1.0, &[1000.0, -1000.0]) {
        Ok(codes) => codes,
        Err(why) => return unseen(what, format!("{overflow:?}"), why),
    };
    let of = |policy: Overflow| [1000.0, -1000.0].map(|value| encode(Dtype::E4m3fn, value, policy)).to_vec();
    let known = [Overflow::Saturate, Overflow::NonFinite];
    let seen = known.into_iter().find(|policy| of(*policy) == codes);
    Reading {
        what,
        declared: format!("{overflow:?}"),
        seen: seen.map_or_else(|| format!("codes {codes:02x?}"), |policy| format!("{policy:?}")),
        agrees: Some(seen == Some(overflow)),
    }
}

/// Values that a division by the scale and a multiplication by its reciprocal cast to different codes.
fn scale_rounding(engine: &dyn Engine) -> Reading {
    const SCALE: f32 = 0.03;
    let what = "scale on write";
    let declared =
        engine.profile().operation(OperationKind::WriteKv).map(|write| write.conventions.scale_rounding);
    let Some(declared) = declared else {
        return unseen(what, "no write_kv".to_owned(), "nothing is declared".to_owned());
    };
    let code = |value: f32, rounding: ScaleRounding| {
        let scaled = match rounding {
            ScaleRounding::Divide => value / SCALE,
            ScaleRounding::Reciprocal => value * (1.0 / SCALE),
        };
        encode(Dtype::E4m3fn, f64::from(scaled), Overflow::Saturate)
    };
    // every positive bf16 below the largest that the cache holds
    let values: Vec<f32> = (0x3000..0x4150u32)
        .map(|bits| f32::from_bits(bits << 16))
        .filter(|value| code(*value, ScaleRounding::Divide) != code(*value, ScaleRounding::Reciprocal))
        .take(VALUE_DIM)
        .collect();
    let codes = match bench::written(engine, Dtype::E4m3fn, SCALE, &values) {
        Ok(codes) => codes,
        Err(why) => return unseen(what, format!("{declared:?}"), why),
    };
    let known = [ScaleRounding::Divide, ScaleRounding::Reciprocal];
    let seen = known
        .into_iter()
        .find(|rounding| values.iter().zip(&codes).all(|(value, seen)| code(*value, *rounding) == *seen));
    Reading {
        what,
        declared: format!("{declared:?}"),
        seen: format!(
            "{} ({} values that tell)",
            seen.map_or_else(|| "neither".to_owned(), |rounding| format!("{rounding:?}")),
            values.len()
        ),
        agrees: (!values.is_empty()).then_some(seen == Some(declared)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_cpu::CpuEngine;

    #[test]
    fn the_embedded_engine_is_what_it_declares() {
        for reading in measure(&shardcheck_cpu::engine()) {
            assert_eq!(reading.agrees, Some(true), "{reading:?}");
        }
    }

    #[test]
    fn a_cast_that_is_not_as_declared_is_seen() {
        let fault = shardcheck_cpu::fault("scale-inverted-on-write").expect("a known fault");
        let reading = scale_rounding(&CpuEngine::with_fault(fault));
        assert_eq!(reading.agrees, Some(false), "{reading:?}");
    }

    #[test]
    fn probabilities_that_are_rounded_although_none_are_declared_are_seen() {
        struct Boaster(CpuEngine, shardcheck_engine::Profile);
        impl Engine for Boaster {
            fn profile(&self) -> &shardcheck_engine::Profile {
                &self.1
            }
            fn validate(
                &self,
                rules: shardcheck_engine::RuleSetName,
                settings: &shardcheck_engine::Settings,
            ) -> Result<
                shardcheck_engine::Answer<shardcheck_engine::Validation>,
                shardcheck_engine::EngineError,
            > {
                self.0.validate(rules, settings)
            }
            fn open(
                &self,
                configuration: &shardcheck_engine::Configuration,
            ) -> Result<
                shardcheck_engine::Answer<Box<dyn shardcheck_engine::Session>>,
                shardcheck_engine::EngineError,
            > {
                self.0.open(configuration)
            }
        }
        let engine = shardcheck_cpu::engine();
        let mut profile = engine.profile().clone();
        let decode = profile.operations.get_mut(&OperationKind::Decode).expect("it decodes");
        decode.contract.as_mut().expect("with a contract").p_dtype = None;
        let reading = probabilities(&Boaster(engine, profile));
        assert_eq!(reading.agrees, Some(false), "{reading:?}");
    }
}
