//! Properties of accepting drafts on the embedded engine, on its faults, and on engines that declare themselves.

use std::collections::BTreeSet;

use shardcheck_cases::{AcceptancePattern, Body, Case, Family, SuiteName, suite};
use shardcheck_cpu::{CpuEngine, faults};
use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Operation, Profile, Reply, RuleSetName, Session, Settings,
    Tensor, Tensors, Validation,
};
use shardcheck_formats::{Counter, Dtype};

use crate::status::Status;
use crate::verdicts::{failures, judged};

fn cases(name: SuiteName, seed: u64) -> Vec<Case> {
    suite(name, seed).into_iter().filter(|case| case.family == Family::Acceptance).collect()
}

#[test]
fn the_embedded_engine_accepts_every_batch_of_the_gate_rightly() {
    let engine = shardcheck_cpu::engine();
    for seed in [1, 2] {
        let cases = cases(SuiteName::Gate, seed);
        assert!(cases.len() >= 38, "{}", cases.len());
        for case in &cases {
            let wrong: Vec<_> =
                judged(&engine, case).into_iter().filter(|(_, status)| *status != Status::Pass).collect();
            assert!(wrong.is_empty(), "{}: {wrong:?}", case.id());
        }
    }
}

#[test]
fn every_fault_of_acceptance_fails_every_property_that_it_names_on_the_gate() {
    let cases = cases(SuiteName::Gate, 1);
    let (mut tried, mut unseen) = (0, Vec::new());
    for fault in faults().iter().filter(|fault| fault.killed_by[0].starts_with("acceptance.")) {
        let engine = CpuEngine::with_fault(fault);
        let failed: BTreeSet<&str> = cases.iter().flat_map(|case| failures(&engine, case)).collect();
        let left: Vec<&str> = fault.killed_by.iter().copied().filter(|id| !failed.contains(id)).collect();
        if !left.is_empty() {
            unseen.push(format!("{} is not seen by {}, but by {failed:?}", fault.name, left.join(", ")));
        }
        tried += 1;
    }
    assert!(unseen.is_empty(), "{}", unseen.join("\n"));
    assert!(tried >= 25, "{tried}");
}

#[test]
fn few_outcomes_are_left_open_but_where_laws_are_equal_or_numbers_at_their_edges() {
    let (mut open, mut all) = (0, 0);
    for case in cases(SuiteName::Gate, 1) {
        let Body::Acceptance(body) = &case.body else { panic!("a case of another family") };
        if matches!(body.pattern, AcceptancePattern::Equal | AcceptancePattern::Edges) {
            continue;
        }
        let material = super::AcceptanceMaterial::new(body, case.seed);
        all += material.count();
        open +=
            material.outcomes().iter().filter(|found| found.len() > 1 || found[0].tokens.len() > 1).count();
    }
    assert!(all > 5000 && open * 500 < all, "{open} of {all} are open");
}

/// The embedded engine with numbers of its own, or with a word about itself in its effective path.
struct Declaring {
    engine: CpuEngine,
    word: (&'static str, &'static str),
    own_numbers: bool,
}

struct DeclaringSession {
    session: Box<dyn Session>,
    word: (&'static str, &'static str),
    own_numbers: bool,
}

impl Engine for Declaring {
    fn profile(&self) -> &Profile {
        self.engine.profile()
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        self.engine.validate(rules, settings)
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        let (word, own_numbers) = (self.word, self.own_numbers);
        Ok(match self.engine.open(configuration)? {
            Answer::Done(session) => Answer::Done(Box::new(DeclaringSession { session, word, own_numbers })),
            Answer::Unsupported(why) => Answer::Unsupported(why),
        })
    }
}

impl Session for DeclaringSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        let mut given = inputs.clone();
        let mut counter = Counter::new(4711, 3);
        let mut drawn = |name: &str, make: fn(f64) -> f64| {
            if let Some(tensor) = inputs.find(name) {
                let values: Vec<f32> = (0..tensor.len()).map(|_| make(counter.unit_f64()) as f32).collect();
                given.insert(name, Tensor::from_f32(Dtype::F32, tensor.shape(), &values));
            }
        };
        if self.own_numbers {
            drawn("uniform", |part| part.min(0.999_999));
            drawn("noise", |part| -(-part.max(1e-12).ln()).ln());
        }
        Ok(match self.session.step(operation, &mut given)? {
            Answer::Done(mut reply) => {
                reply.effective = reply.effective.with(self.word.0, self.word.1);
                Answer::Done(reply)
            }
            other => other,
        })
    }
}

#[test]
fn an_engine_with_numbers_of_its_own_is_judged_by_its_law_and_not_by_its_decisions() {
    let of_decisions = ["acceptance.decision", "acceptance.token", "acceptance.enumeration"];
    let (word, own_numbers) = (("numbers", "own"), true);
    let engine = Declaring { engine: shardcheck_cpu::engine(), word, own_numbers };
    for case in cases(SuiteName::Gate, 1) {
        for (property, status) in judged(&engine, &case) {
            let wanted = if of_decisions.contains(&property) { Status::Unsupported } else { Status::Pass };
            assert_eq!(status, wanted, "{property} on {}", case.id());
        }
    }
    let fault = shardcheck_cpu::fault("accept-residual-is-target").unwrap();
    let engine = Declaring { engine: CpuEngine::with_fault(fault), word, own_numbers };
    let failed: BTreeSet<&str> =
        cases(SuiteName::Gate, 1).iter().flat_map(|case| failures(&engine, case)).collect();
    assert!(failed.contains("acceptance.law") && failed.contains("acceptance.support"), "{failed:?}");
    let silent = Declaring { engine: shardcheck_cpu::engine(), word: ("numbers", "given"), own_numbers };
    let failed: BTreeSet<&str> =
        cases(SuiteName::Gate, 1).iter().flat_map(|case| failures(&silent, case)).collect();
    assert!(failed.contains("acceptance.decision") && failed.contains("acceptance.token"), "{failed:?}");
}

#[test]
fn an_engine_that_declares_relaxed_acceptance_is_lossy_and_judged_by_ranks_counts_and_figures_alone() {
    let fault = shardcheck_cpu::fault("accept-relaxed-unsaid").unwrap();
    let word = ("acceptance", "relaxed");
    let engine = Declaring { engine: CpuEngine::with_fault(fault), word, own_numbers: false };
    let left = ["acceptance.identities", "acceptance.ranks", "acceptance.statistics", "inputs.unchanged"];
    for case in cases(SuiteName::Gate, 1) {
        for (property, status) in judged(&engine, &case) {
            let wanted = if left.contains(&property) { Status::Pass } else { Status::Unsupported };
            assert_eq!(status, wanted, "{property} on {}", case.id());
        }
    }
}
