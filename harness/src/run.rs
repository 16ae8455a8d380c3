//! One case: its material, every property judged on one engine, the verdict.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use shardcheck_cases::{Body, Case, Family};
use shardcheck_engine::{Configuration, Engine, OperationKind, Profile};
use shardcheck_formats::Dtype;

use crate::event::{CaseResult, Check, Coverage};
use crate::finding::Finding;
use crate::laboratory::Laboratory;
use crate::material::Material;
use crate::patience::Patience;
use crate::properties::{self, Property};
use crate::status::Status;

/// Judges every property of `case` on `engine`; `only` restricts them.
///
/// A panic of the harness or of the engine becomes a verdict: what other cases found is never lost to it.
pub fn judge_case(case: &Case, engine: &dyn Engine, only: &dyn Fn(&Property) -> bool) -> CaseResult {
    let started = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        if let Some(what) = undeclared(case, engine.profile()) {
            let finding = Finding::Unsupported(format!("the engine does not declare {what}"));
            return (vec![Check::new("case", finding)], Coverage::default());
        }
        let material = Material::of(case, engine.profile());
        let checks = match &material {
            Err(why) => {
                vec![Check::new("case", Finding::Inconclusive(why.clone()))]
            }
            Ok(material) => {
                let patience = Patience::new(engine);
                let laboratory = Laboratory::new(case, &patience, material);
                properties::of(case)
                    .filter(|property| only(property))
                    .map(|property| Check::new(property.id, property.judge(&laboratory)))
                    .collect()
            }
        };
        (checks, material.as_ref().map_or(Coverage::default(), Material::coverage))
    }));
    let (checks, coverage) = outcome.unwrap_or_else(|panic| {
        let text = format!("the harness panicked: {}", panic_text(panic.as_ref()));
        let finding = Finding::Engine { status: Status::HarnessError, text };
        (vec![Check::new("harness", finding)], Coverage::default())
    });
    CaseResult {
        id: case.id(),
        status: CaseResult::status_of(&checks),
        checks,
        elapsed_s: started.elapsed().as_secs_f64(),
        coverage,
        reason: None,
    }
}

/// The operation without which there is nothing to ask an engine in this case, if its profile lacks that, or the type of activations if
/// it lacks the operation in that type.
fn undeclared(case: &Case, profile: &Profile) -> Option<String> {
    let needed = match &case.body {
        Body::Sequence(_) => Some(OperationKind::WriteKv),
        _ => case.family.operation(),
    };
    let needed = needed?;
    let dtype = case.configuration().map_or(Dtype::Bf16, |configuration| configuration.dtype);
    match profile.operation(needed) {
        None => Some(needed.to_string()),
        Some(operation) if needed.has_activations() && !operation.takes(dtype) => {
            Some(format!("{needed} in {dtype}"))
        }
        Some(_) => None,
    }
}

/// Whether a stored result is not what deciding again comes to, or contradicts the checks that it holds itself.
pub fn contradicts(stored: Option<&CaseResult>, again: &CaseResult) -> bool {
    stored.is_none_or(|stored| {
        stored.status != again.status
            || (!stored.checks.is_empty() && CaseResult::status_of(&stored.checks) != stored.status)
    })
}

/// Text of a panic payload.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "no text".to_owned()
    }
}

/// Whether a case runs at the head count of a published model rather than at a tiny one.
pub fn has_real_heads(case: &Case) -> bool {
    match &case.body {
        Body::Attention(attention) => {
            !matches!(case.family, Family::Layout | Family::Write)
                && attention.configuration.total_heads() >= 32
        }
        _ => false,
    }
}

/// Whether a configuration has so few heads that each may be read by itself.
pub fn has_few_heads(configuration: &Configuration) -> bool {
    configuration.total_heads() <= 48
}

/// Whether a case is so small that variants of it, each with an oracle of its own, cost next to nothing.
pub fn is_small(case: &Case) -> bool {
    match &case.body {
        Body::Attention(attention) => {
            has_few_heads(&attention.configuration) && attention.workload.total_tokens() <= 2048
        }
        _ => true,
    }
}
