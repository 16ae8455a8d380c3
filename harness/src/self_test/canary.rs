//! Canaries: an engine that is wrong in one element on one seed of a hundred.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use shardcheck_cases::Case;
use shardcheck_cpu::CpuEngine;
use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Operation, Profile, Reply, RuleSetName, Session, Settings,
    Tensor, Tensors, Validation,
};
use shardcheck_formats::Dtype;

use crate::event::CaseResult;
use crate::judge::Allowed;
use crate::laboratory::Halt;
use crate::material::Material;
use crate::run::judge_case;

pub(super) const DECODE: &str = "decode/tiny-mla/tp2.dcp2.h2.s1.b4.n8.bf16.a2a.hi_lo/6+1_3+1.seq/gaussian";
const WRITE: &str = "write/tiny-gqa/tp2.dcp2.h2.s1.b4.n8.bf16.ag_rs/6+1_3+1.seq/gaussian";
const MERGE: &str = "merge_partials/w3.t2.h2.d8.bf16.a2a.hi_lo/random/contiguous";

/// Seeds of which one is wrong.
const SEEDS: u64 = 100;

/// What is changed in an answer.
#[derive(Clone)]
pub(super) struct Change {
    /// Tensor of the reply.
    pub tensor: &'static str,
    /// Flat index; counted among the elements that are numbers where `written` is set.
    pub index: usize,
    /// Code that stands there instead of the right one.
    pub code: Code,
}

/// How a code is changed.
#[derive(Clone, Copy)]
pub(super) enum Code {
    /// To this value.
    To(f64),
    /// By its last bit.
    LastBit,
    /// By one.
    PlusOne,
    /// The last bit of the first code of a slot that was written.
    LastBitOfWritten,
}

/// An engine that changes one element of the first answer that has the tensor.
pub(super) struct Canary {
    engine: CpuEngine,
    change: Change,
    sung: Arc<AtomicBool>,
}

impl Canary {
    pub(super) fn new(change: Change) -> Self {
        Self { engine: shardcheck_cpu::engine(), change, sung: Arc::new(AtomicBool::new(false)) }
    }
}

impl Engine for Canary {
    fn profile(&self) -> &Profile {
        self.engine.profile()
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        self.engine.validate(rules, settings)
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        Ok(match self.engine.open(configuration)? {
            Answer::Unsupported(why) => Answer::Unsupported(why),
            Answer::Done(session) => Answer::Done(Box::new(CanarySession {
                session,
                change: self.change.clone(),
                sung: Arc::clone(&self.sung),
            })),
        })
    }
}

struct CanarySession {
    session: Box<dyn Session>,
    change: Change,
    sung: Arc<AtomicBool>,
}

impl Session for CanarySession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        let mut answer = self.session.step(operation, inputs)?;
        if let Answer::Done(reply) = &mut answer
            && let Some(tensor) = reply.outputs.find(self.change.tensor)
            && let Some(changed) = changed(tensor, &self.change)
            && !self.sung.swap(true, Ordering::Relaxed)
        {
            reply.outputs.insert(self.change.tensor, changed);
        }
        Ok(answer)
    }
}

/// The tensor with its one change; `None` where there is nothing to change yet.
fn changed(tensor: &Tensor, change: &Change) -> Option<Tensor> {
    let mut codes = tensor.to_codes();
    match change.code {
        Code::LastBit => codes[change.index] ^= 1,
        Code::PlusOne => codes[change.index] += 1,
        Code::To(value) => {
            codes[change.index] =
                shardcheck_formats::encode(tensor.dtype(), value, shardcheck_formats::Overflow::NonFinite);
        }
        Code::LastBitOfWritten => {
            let values = tensor.to_f64();
            let written = values.iter().position(|value| value.is_finite() && *value != 0.0)?;
            codes[written] ^= 1;
        }
    }
    Some(Tensor::from_codes(tensor.dtype(), tensor.shape(), &codes))
}

/// Number behind `value` in `dtype`, away from zero; the smallest one above zero for zero.
pub(super) fn beyond(dtype: Dtype, value: f64) -> f64 {
    let code = shardcheck_formats::encode(dtype, value, shardcheck_formats::Overflow::NonFinite);
    shardcheck_formats::decode(dtype, code + 1)
}

/// A value just outside what is allowed, away from zero.
pub(super) fn outside(allowed: Allowed, dtype: Dtype) -> Result<f64, String> {
    let Allowed::Between { expected, low, high } = allowed else {
        return Err(format!("the canary's element has no interval: {allowed:?}"));
    };
    let mut value = if expected < 0.0 { low } else { high };
    for _ in 0..64 {
        value = beyond(dtype, value);
        if !allowed.admits(value) {
            return Ok(value);
        }
    }
    Err(format!("no number of {dtype} lies just outside {allowed:?}"))
}

/// The case of that seed.
pub(super) fn case_of(stem: &str, seed: u64) -> Result<Case, String> {
    format!("{stem}/{seed}").parse().map_err(|error| format!("the case of a canary does not parse: {error}"))
}

/// Judges a hundred seeds, one of them on an engine with a change, and says whether `property` noticed that one alone.
fn hundred(
    stem: &str,
    wrong_seed: u64,
    property: &'static str,
    change: impl Fn(&Case) -> Result<Change, String>,
) -> Result<String, String> {
    let healthy = shardcheck_cpu::engine();
    for seed in 0..SEEDS {
        let case = case_of(stem, seed)?;
        if seed == wrong_seed {
            let result = judge_case(&case, &Canary::new(change(&case)?), &|_| true);
            noticed_first(&result, property)?;
        } else {
            let result = judge_case(&case, &healthy, &|candidate| candidate.id == property);
            if result.status.is_failure() {
                return Err(format!("{property} fails on the healthy engine, seed {seed}"));
            }
        }
    }
    Ok(format!("{property} failed on seed {wrong_seed} of {SEEDS} and on no other"))
}

/// Whether the first property that failed is the one that had to.
pub(super) fn noticed_first(result: &CaseResult, property: &str) -> Result<(), String> {
    match result.failures().next() {
        Some(check) if check.property == property => Ok(()),
        Some(check) => Err(format!("{} failed before {property}", check.property)),
        None => Err(format!("nothing failed on {}", result.id)),
    }
}

/// What the oracle allows for element 5 of rank 0's output, or for its state 1, of the case.
pub(super) fn allowed_of(case: &Case, lse: bool) -> Result<Allowed, String> {
    let words = |halt: Halt| format!("{halt:?}");
    match Material::of(case, shardcheck_cpu::engine().profile())? {
        Material::Attention(material) => {
            let expected = material.expected().map_err(words)?;
            Ok(if lse { expected.lse[1] } else { expected.out[5] })
        }
        Material::Merge(material) => {
            let expected = material.expected().map_err(words)?;
            Ok(if lse { expected.lse[1] } else { expected.out[5] })
        }
        _ => Err("the case has no output of its own".to_owned()),
    }
}

pub(super) fn output() -> Result<String, String> {
    hundred(DECODE, 37, "decode.output", |case| {
        let code = Code::To(outside(allowed_of(case, false)?, Dtype::Bf16)?);
        Ok(Change { tensor: "out", index: 5, code })
    })
}

pub(super) fn lse() -> Result<String, String> {
    hundred(DECODE, 61, "decode.lse", |case| {
        let code = Code::To(outside(allowed_of(case, true)?, Dtype::F32)?);
        Ok(Change { tensor: "lse", index: 1, code })
    })
}

pub(super) fn row_length() -> Result<String, String> {
    hundred(DECODE, 8, "decode.row-lengths", |_| {
        Ok(Change { tensor: "row_lens", index: 1, code: Code::PlusOne })
    })
}

pub(super) fn query() -> Result<String, String> {
    hundred(DECODE, 93, "decode.query", |_| {
        Ok(Change { tensor: "gathered_query", index: 11, code: Code::LastBit })
    })
}

pub(super) fn cache() -> Result<String, String> {
    hundred(WRITE, 50, "write.round-trip", |_| {
        Ok(Change { tensor: "key_cache", index: 0, code: Code::LastBitOfWritten })
    })
}

pub(super) fn merge() -> Result<String, String> {
    hundred(MERGE, 74, "merge.output", |case| {
        let code = Code::To(outside(allowed_of(case, false)?, Dtype::Bf16)?);
        Ok(Change { tensor: "out", index: 5, code })
    })
}
