//! Two answers to the same question: in what they differ, and whether that is more than conforming engines may.

use shardcheck_engine::{Profile, Reply, Tensor};

use super::replay::is_output;
use super::widths::{Widths, natural};
use crate::recording::{Answered, StepRecord};

/// One part of an answer in which two engines were compared.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Part {
    /// Name of the tensor, or `answer`, `inputs`, `effective path`, `collectives`.
    pub name: String,
    /// Whether it is what the operation is for.
    pub is_output: bool,
    /// Equal to the last bit.
    pub equal: bool,
    /// No element further apart than its width.
    pub within: bool,
    /// Mean of (distance / width)² over the elements that have a width; 0 where all are equal.
    pub distance: f64,
}

impl Part {
    fn exact(name: &str, is_output: bool, equal: bool) -> Self {
        let distance = if equal { 0.0 } else { f64::INFINITY };
        Self { name: name.to_owned(), is_output, equal, within: equal, distance }
    }
}

/// The arithmetic of the two sides.
pub(crate) struct Sides<'a> {
    /// What the engine that was recorded declares.
    pub seen: &'a Profile,
    /// What the embedded engine declares.
    pub mutant: &'a Profile,
    /// Whether both are the embedded engine.
    pub same_arithmetic: bool,
}

/// Compares what was recorded at a step with what a mutant answers.
pub(crate) fn compare(
    step: &StepRecord,
    seen_inputs_changed: bool,
    mutant: (&Answered<Reply>, bool),
    widths: &Widths,
    sides: &Sides<'_>,
) -> Vec<Part> {
    let (seen, mutant_reply) = match (&step.answer, mutant.0) {
        // what the engine under test does not do says nothing of a fault
        (Answered::Unsupported(_), _) => return Vec::new(),
        (Answered::Done(seen), Answered::Done(reply)) => (seen, reply),
        (seen, other) => {
            let equal = same_words(seen, other);
            // an end says nothing but its words: that another mistake ends an engine at the same question explains nothing
            let within = equal || same_kind(seen, other) && !is_end(seen);
            let distance = match (equal, within) {
                (true, _) => 0.0,
                (false, true) => 1.0,
                (false, false) => f64::INFINITY,
            };
            return vec![Part { name: "answer".to_owned(), is_output: true, equal, within, distance }];
        }
    };
    let mut parts = vec![Part::exact("inputs", true, seen_inputs_changed == mutant.1)];
    for (name, tensor) in seen.outputs.iter() {
        if name == "partial_out" && !sides.same_arithmetic {
            // what it holds for a row without tokens is a convention
            continue;
        }
        let is_output = is_output(&step.operation, name);
        match mutant_reply.outputs.find(name) {
            Some(other) => parts.push(tensors(step, name, is_output, tensor, other, widths, sides)),
            None if is_output => parts.push(Part::exact(name, true, false)),
            None => {}
        }
    }
    for (name, _) in mutant_reply.outputs.iter() {
        if is_output(&step.operation, name) && seen.outputs.find(name).is_none() {
            parts.push(Part::exact(name, true, false));
        }
    }
    let effective = if sides.same_arithmetic {
        seen.effective == mutant_reply.effective
    } else {
        seen.effective.iter().all(|(key, value)| mutant_reply.effective.get(key).is_none_or(|v| v == value))
    };
    parts.push(Part::exact("effective path", false, effective));
    if sides.same_arithmetic {
        parts.push(Part::exact("collectives", false, seen.collectives == mutant_reply.collectives));
    }
    parts
}

/// Whether two refusals are of one kind. Texts differ between engines, and several ranks may wait at the same time.
pub(crate) fn same_kind<T, U>(seen: &Answered<T>, other: &Answered<U>) -> bool {
    matches!(
        (seen, other),
        (Answered::Timeout { .. }, Answered::Timeout { .. })
            | (Answered::Crash(_), Answered::Crash(_))
            | (Answered::DeviceLost(_), Answered::DeviceLost(_))
            | (Answered::Input(_), Answered::Input(_))
            | (Answered::Unsupported(_), Answered::Unsupported(_))
            | (Answered::Done(_), Answered::Done(_))
    )
}

/// Whether the engine ended instead of answering.
pub(crate) fn is_end<T>(answer: &Answered<T>) -> bool {
    matches!(answer, Answered::Crash(_) | Answered::DeviceLost(_))
}

/// Whether two refusals say the same, as far as what is waited in goes.
fn same_words<T, U>(seen: &Answered<T>, other: &Answered<U>) -> bool {
    match (seen, other) {
        (Answered::Timeout { waiting_in: a, .. }, Answered::Timeout { waiting_in: b, .. }) => {
            // the collective; which ranks are late depends on the moment
            a.split(" (").next() == b.split(" (").next()
        }
        (Answered::Crash(a), Answered::Crash(b)) => {
            // which rank, block or entry is told first depends on the moment
            let words = |text: &str| text.replace(|c: char| c.is_ascii_digit() || c == '-', "");
            words(a) == words(b)
        }
        // nothing is known of how a device was lost
        (Answered::DeviceLost(_), Answered::DeviceLost(_)) => false,
        _ => same_kind(seen, other),
    }
}

fn tensors(
    step: &StepRecord,
    name: &str,
    is_output: bool,
    seen: &Tensor,
    mutant: &Tensor,
    widths: &Widths,
    sides: &Sides<'_>,
) -> Part {
    if seen.dtype() != mutant.dtype() || seen.shape() != mutant.shape() {
        return Part::exact(name, is_output, false);
    }
    if seen == mutant {
        return Part::exact(name, is_output, true);
    }
    if name.ends_with("_cache") && !sides.same_arithmetic {
        return Part::exact(name, is_output, written_slots_agree(seen, mutant));
    }
    let theirs = natural(sides.mutant, &step.operation, name, mutant.to_f64());
    let Some(widths) = widths.of_tensor(step, name, mutant, &theirs) else {
        return Part::exact(name, is_output, false);
    };
    let ours = natural(sides.seen, &step.operation, name, seen.to_f64());
    let (mut within, mut sum, mut count) = (true, 0.0, 0usize);
    for ((seen, mutant), width) in ours.iter().zip(&theirs).zip(&widths) {
        if width.is_infinite() || seen == mutant || (seen.is_nan() && mutant.is_nan()) {
            continue;
        }
        let distance = (seen - mutant).abs();
        // written so that NaN is outside
        within &= distance <= *width;
        if *width > 0.0 && distance.is_finite() {
            sum += (distance / width).powi(2);
        }
        count += 1;
    }
    let distance = if within { sum / ours.len().max(1) as f64 } else { f64::INFINITY };
    Part { name: name.to_owned(), is_output, equal: count == 0, within, distance }
}

/// Caches of two engines: slots that neither has written may hold anything, and an unwritten slot is one fill code.
fn written_slots_agree(seen: &Tensor, mutant: &Tensor) -> bool {
    let width: usize = seen.shape()[3..].iter().product::<usize>().max(1);
    let filled = |slot: &[u64]| slot.iter().all(|code| *code == slot[0]);
    let (seen, mutant) = (seen.to_codes(), mutant.to_codes());
    let slots = seen.chunks(width).zip(mutant.chunks(width));
    slots.into_iter().all(|(a, b)| a == b || (filled(a) && filled(b)))
}
