//! The bench asks an engine each thing once, and turns what is wrong with an answer into a finding of the engine's.

use std::sync::Arc;
use std::sync::Mutex;

use super::*;
use shardcheck_cases::Family;
use shardcheck_cpu::hostile::{Hostility, hostile};
use shardcheck_engine::{Profile, RuleSetName, Settings, TensorError, Validation};

use crate::properties;

const VERIFY: &str = "verify/tiny-mla/tp2.dcp2.h2.s2.b8.n8.bf16.ag_rs/12+3_7+2.seq/gaussian/7";
const POISONED: &str = "decode/tiny-mla/tp2.dcp2.h2.s2.b8.n8.bf16.ag_rs/12+1_7+1.seq/forbidden-poison/7";

/// The healthy engine, and the operations that it was asked for.
struct Counting {
    healthy: shardcheck_cpu::CpuEngine,
    asked: Arc<Mutex<Vec<Operation>>>,
}

struct CountingSession {
    healthy: Box<dyn Session>,
    asked: Arc<Mutex<Vec<Operation>>>,
}

impl Engine for Counting {
    fn profile(&self) -> &Profile {
        self.healthy.profile()
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        self.healthy.validate(rules, settings)
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        Ok(match self.healthy.open(configuration)? {
            Answer::Done(healthy) => {
                Answer::Done(Box::new(CountingSession { healthy, asked: Arc::clone(&self.asked) }))
            }
            Answer::Unsupported(why) => Answer::Unsupported(why),
        })
    }
}

impl Session for CountingSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        self.asked.lock().unwrap().push(operation.clone());
        self.healthy.step(operation, inputs)
    }
}

fn counting() -> (Counting, Arc<Mutex<Vec<Operation>>>) {
    let asked = Arc::default();
    (Counting { healthy: shardcheck_cpu::engine(), asked: Arc::clone(&asked) }, asked)
}

fn case(id: &str) -> Case {
    id.parse().unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn properties_that_look_at_one_step_share_it() {
    let (engine, asked) = counting();
    let case = case(VERIFY);
    let material = Material::of(&case, engine.profile()).unwrap();
    let laboratory = Laboratory::new(&case, &engine, &material);
    for id in ["verify.row-lengths", "verify.query", "verify.partial-lse", "verify.lse", "verify.output"] {
        let finding = properties::find(id).unwrap().judge(&laboratory);
        assert!(matches!(finding, Finding::Holds(_)), "{id}: {finding:?}");
    }
    let attend = laboratory.attention().operation();
    assert_eq!(*asked.lock().unwrap(), [Operation::WriteKv, attend]);
    laboratory.caches_after().unwrap();
    assert_eq!(asked.lock().unwrap().last(), Some(&Operation::ReadCache), "in the session of that step");
    assert_eq!(asked.lock().unwrap().len(), 3);
}

#[test]
fn stale_tokens_are_written_before_all_others() {
    let (engine, asked) = counting();
    let case = case(POISONED);
    let material = Material::of(&case, engine.profile()).unwrap();
    let laboratory = Laboratory::new(&case, &engine, &material);
    assert!(laboratory.attention().stale_inputs().is_some());
    laboratory.observed().unwrap();
    let attend = laboratory.attention().operation();
    assert_eq!(*asked.lock().unwrap(), [Operation::WriteKv, Operation::WriteKv, attend]);
}

#[test]
fn the_caches_are_read_before_and_after_the_write() {
    let (engine, asked) = counting();
    let case = case(&VERIFY.replace("verify", "write"));
    let material = Material::of(&case, engine.profile()).unwrap();
    let laboratory = Laboratory::new(&case, &engine, &material);
    let (before, after) = {
        let written = laboratory.written().unwrap();
        (written.before.clone(), written.after.clone())
    };
    assert_ne!(before.outputs, after.outputs);
    laboratory.written().unwrap();
    assert_eq!(*asked.lock().unwrap(), [Operation::ReadCache, Operation::WriteKv, Operation::ReadCache]);
    assert!(
        laboratory.attention().caches_are_right(&after) && !laboratory.attention().caches_are_right(&before)
    );
}

#[test]
fn a_failed_step_fails_every_property_the_same_way() {
    let case = case(VERIFY);
    let engine = crate::guard::Guarded::new(hostile(Hostility::Panics), std::time::Duration::from_secs(60));
    let material = Material::of(&case, engine.profile()).unwrap();
    let laboratory = Laboratory::new(&case, &engine, &material);
    let texts: Vec<String> = (0..2)
        .map(|_| match laboratory.observed() {
            Err(Halt::Engine(Status::Crash, text)) => text.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn changed_inputs_are_named() {
    let case = case("merge_states/w2.t4.h2.d16.bf16.ag_rs/random/contiguous/7");
    let engine = hostile(Hostility::ChangesInput);
    let material = Material::of(&case, engine.profile()).unwrap();
    let laboratory = Laboratory::new(&case, engine.as_ref(), &material);
    let changed = &laboratory.observed().unwrap().changed_inputs;
    assert_eq!(*changed, ["prefix_lse", "prefix_out", "suffix_lse", "suffix_out"]);
}

#[test]
fn what_an_output_lacks_is_the_engines_failure_and_what_an_observable_lacks_is_not() {
    let reply = Reply {
        outputs: Tensors::new().with("out", Tensor::from_f32(Dtype::F32, &[2, 3], &[0.0; 6])),
        ..Reply::default()
    };
    let observed = Observed::of(reply);
    assert!(observed.output("out", Dtype::F32, &[2, 3]).is_ok());
    let broken = |result: Result<&Tensor, Halt>| match result {
        Err(Halt::Broken(failure)) => failure.headline,
        other => panic!("{other:?}"),
    };
    assert!(broken(observed.output("lse", Dtype::F32, &[2])).contains("\"lse\" is missing"));
    assert!(broken(observed.output("out", Dtype::Bf16, &[2, 3])).contains("dtype f32, expected bf16"));
    assert!(broken(observed.output("out", Dtype::F32, &[3, 2])).contains("shape [2, 3], expected [3, 2]"));
    assert!(broken(observed.observable("out", Dtype::F32, &[6])).contains("shape"));
    let Err(Halt::Unsupported(why)) = observed.observable("partial_out", Dtype::F32, &[2]) else {
        panic!("an observable is optional")
    };
    assert!(why.contains("partial_out"), "{why}");
}

#[test]
fn each_failure_of_an_engine_has_a_verdict_of_its_own() {
    let text = String::new;
    let missing = TensorError::Missing { name: text(), present: text() };
    for (error, expected) in [
        (EngineError::Crash { text: text() }, Status::Crash),
        (EngineError::Timeout { rank: None, waiting_in: text(), waited_s: 1.0 }, Status::Timeout),
        (EngineError::DeviceLost { text: text() }, Status::DeviceLost),
        (EngineError::Input(missing), Status::HarnessError),
    ] {
        let finding = Finding::from(Halt::from(error));
        assert_eq!(finding.status(), expected);
    }
    assert_eq!(Finding::from(Halt::Unsupported(text())).status(), Status::Unsupported);
    assert_eq!(Finding::from(Halt::Inconclusive(text())).status(), Status::Inconclusive);
    assert_eq!(Finding::from(Halt::from(Failure::because("x"))).status(), Status::Fail);
}

#[test]
fn a_configuration_that_the_engine_does_not_run_is_unsupported() {
    let engine = shardcheck_cpu::engine();
    let mut configuration = case(VERIFY).configuration().unwrap();
    configuration.blocks = 1 << 24;
    let Err(Halt::Unsupported(why)) = Run::open(&Watched::new(&engine), &configuration) else {
        panic!("it cannot be opened")
    };
    assert!(why.contains("bytes"), "{why}");
}

#[test]
fn a_case_of_rules_has_no_step() {
    let case = Case::rules(shardcheck_cases::rules::rule_set(RuleSetName::Atom)[0].clone());
    assert_eq!(case.family, Family::Rules);
    let engine = shardcheck_cpu::engine();
    let laboratory = Laboratory::new(&case, &engine, &Material::Rules);
    assert!(matches!(laboratory.observed(), Err(Halt::Inconclusive(_))));
}
