//! An oracle with one wrong bound.

use shardcheck_cases::Case;
use shardcheck_engine::Engine;
use shardcheck_formats::Dtype;

use super::canary::{Canary, Change, Code, DECODE, allowed_of, case_of, outside};
use crate::expected::Expected;
use crate::judge::Allowed;
use crate::laboratory::Laboratory;
use crate::material::Material;
use crate::properties;
use crate::status::Status;

const SEED: u64 = 7;

/// The properties that fail on `engine` under an oracle that was changed, in the order in which they are judged.
fn failures(
    case: &Case,
    engine: &dyn Engine,
    change: impl FnOnce(&mut Expected),
) -> Result<Vec<(&'static str, String)>, String> {
    let mut material = Material::of(case, engine.profile())?;
    let Material::Attention(attention) = &mut material else {
        return Err("the case has no attention".to_owned());
    };
    attention.change_expected(change).map_err(|halt| format!("{halt:?}"))?;
    let laboratory = Laboratory::new(case, engine, &material);
    let mut failed = Vec::new();
    for property in properties::of(case) {
        let finding = property.judge(&laboratory);
        if finding.status() == Status::Fail {
            let crate::finding::Finding::Broken(failure) = finding else { continue };
            failed.push((property.id, failure.worst.map(|worst| worst.place).unwrap_or_default()));
        }
    }
    Ok(failed)
}

/// Whether `property` is the first that fails on the healthy engine, at `place`.
fn noticed(property: &str, place: &str, change: impl FnOnce(&mut Expected)) -> Result<String, String> {
    let case = case_of(DECODE, SEED)?;
    let failed = failures(&case, &shardcheck_cpu::engine(), change)?;
    match failed.first() {
        Some((first, found)) if *first == property && found.contains(place) => {
            Ok(format!("{property} failed on the healthy engine at {found}"))
        }
        other => Err(format!("{property} had to fail at {place}; first to fail: {other:?}")),
    }
}

/// The interval behind `allowed`, one width further out.
fn beside(allowed: Allowed) -> Allowed {
    match allowed {
        Allowed::Between { expected, low, high } => {
            let by = 2.0 * (high - low) + f64::MIN_POSITIVE;
            Allowed::Between { expected: expected + by, low: low + by, high: high + by }
        }
        other => other,
    }
}

pub(super) fn too_narrow() -> Result<String, String> {
    noticed("decode.output", "head 0, dim 5", |expected| expected.out[5] = beside(expected.out[5]))
}

pub(super) fn lse_too_narrow() -> Result<String, String> {
    noticed("decode.lse", "head 1", |expected| expected.lse[1] = beside(expected.lse[1]))
}

pub(super) fn not_a_number() -> Result<String, String> {
    noticed("decode.output", "head 0, dim 5", |expected| {
        let value = expected.out[5].expected();
        expected.out[5] = Allowed::Between { expected: value, low: f64::NAN, high: f64::NAN };
    })
}

/// A bound that admits everything is noticed by the canary that it lets through.
pub(super) fn too_wide() -> Result<String, String> {
    let case = case_of(DECODE, SEED)?;
    let canary = || -> Result<Canary, String> {
        let value = outside(allowed_of(&case, false)?, Dtype::Bf16)?;
        Ok(Canary::new(Change { tensor: "out", index: 5, code: Code::To(value) }))
    };
    let heard = |failed: &[(&str, String)]| failed.iter().any(|(property, _)| *property == "decode.output");
    if !heard(&failures(&case, &canary()?, |_| {})?) {
        return Err("the canary is not noticed under the right bound either".to_owned());
    }
    let widened = failures(&case, &canary()?, |expected| {
        expected.out[5] = Allowed::Between { expected: 0.0, low: f64::MIN, high: f64::MAX };
    })?;
    if heard(&widened) {
        return Err("decode.output fails although the bound admits everything".to_owned());
    }
    Ok("the canary of that element goes unnoticed, which the canary check reports as missing".to_owned())
}
