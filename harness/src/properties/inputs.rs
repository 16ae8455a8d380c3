//! What must hold of every step of every session of a case: its inputs come back as they were given.

use shardcheck_cases::Family;

use super::{Property, always};
use crate::finding::{Failure, Finding, Measured, Stage};
use crate::laboratory::{Change, Halt, Laboratory, Observed};

/// Judged last, so that the steps that other properties asked for count as well.
pub(super) const PROPERTIES: &[Property] = &[Property {
    id: UNCHANGED,
    statement: "every step of a case returns its inputs bit for bit, block tables and lengths included",
    source: "captured metadata is reused by later steps and other layers",
    bugs: &["vllm-ascend#7549", "vllm-ascend#10878", "vllm-ascend#4221"],
    tolerance: "exact: bytes",
    families: &[
        Family::Layout,
        Family::Pcp,
        Family::AttendPcp,
        Family::SelectPcp,
        Family::CompressPcp,
        Family::Route,
        Family::Moe,
        Family::Acceptance,
        Family::SelectSparse,
        Family::AttendSelected,
        Family::AttendSinks,
        Family::IndexLayers,
        Family::Kda,
        Family::Write,
        Family::Decode,
        Family::Verify,
        Family::Draft,
        Family::Context,
        Family::Sequence,
        Family::Stack,
        Family::MergePartials,
        Family::MergeStates,
        Family::MergeSegments,
        Family::PackLse,
    ],
    applies: always,
    check: inputs_unchanged,
}];

/// Id of the property; an engine whose inputs can't be seen is not judged by it.
pub(crate) const UNCHANGED: &str = "inputs.unchanged";

fn inputs_unchanged(laboratory: &Laboratory) -> Result<Finding, Halt> {
    let compared = match laboratory.case.family {
        Family::Write => laboratory.written().map(|written| written.write.reply.outputs.len()),
        Family::Sequence => laboratory.played().and_then(|play| {
            let outputs = |observed: &Observed| observed.reply.outputs.len();
            let seen = play.groups().flat_map(|group| &group.seen);
            let count = seen.map(|seen| outputs(&seen.write) + outputs(&seen.attend)).sum();
            play.halt.clone().map_or(Ok(count), Err)
        }),
        _ => laboratory.observed().map(|observed| observed.reply.outputs.len()),
    };
    let changes = laboratory.engine.changes();
    let Some((first, others)) = changes.split_first() else {
        return compared.map(|count| Finding::Holds(Measured::exact(count.max(1))));
    };
    let mut failure = Failure::because(format!("the engine changed its inputs: {first}")).at(Stage::Output);
    if let Some(turn) = turn_of(laboratory) {
        failure.notes.push(format!("first in {turn}"));
    }
    if !others.is_empty() {
        let texts: Vec<String> = others.iter().take(MOST_NAMED).map(Change::to_string).collect();
        let more = others.len().saturating_sub(MOST_NAMED);
        let more = if more == 0 { String::new() } else { format!("; and {more} times more") };
        failure.notes.push(format!("then {}{more}", texts.join("; ")));
    }
    Err(failure.into())
}

/// Most changes after the first that a failure names.
const MOST_NAMED: usize = 3;

/// The step of a sequence, as it stands in the id, in which inputs first changed.
fn turn_of(laboratory: &Laboratory) -> Option<String> {
    if laboratory.case.family != Family::Sequence {
        return None;
    }
    let (material, play) = (laboratory.sequence(), laboratory.played().ok()?);
    let groups: Vec<_> = material.groups().zip(play.groups()).collect();
    (0..material.turns.len()).find_map(|turn| {
        groups.iter().find_map(|(material, play)| {
            let seen = play.seen.get(turn)?;
            let steps = seen.layout.iter().chain([&seen.write, &seen.attend]);
            steps.into_iter().any(|step| !step.changed_inputs.is_empty()).then(|| material.name(turn))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Failure;
    use crate::properties::find;
    use crate::run::judge_case;
    use shardcheck_cases::{Case, SuiteName, suite};
    use shardcheck_cpu::{CpuEngine, fault};
    use shardcheck_engine::{
        Answer, Configuration, Engine, EngineError, Operation, Profile, Reply, RuleSetName, Session,
        Settings, Tensors, Validation,
    };

    /// The healthy engine, but in one operation it flips a bit of every input.
    struct Flips {
        healthy: CpuEngine,
        operation: Operation,
    }

    struct FlipsInSession {
        healthy: Box<dyn Session>,
        operation: Operation,
    }

    impl Engine for Flips {
        fn profile(&self) -> &Profile {
            self.healthy.profile()
        }

        fn validate(
            &self,
            rules: RuleSetName,
            settings: &Settings,
        ) -> Result<Answer<Validation>, EngineError> {
            self.healthy.validate(rules, settings)
        }

        fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
            Ok(match self.healthy.open(configuration)? {
                Answer::Done(healthy) => {
                    Answer::Done(Box::new(FlipsInSession { healthy, operation: self.operation.clone() }))
                }
                Answer::Unsupported(why) => Answer::Unsupported(why),
            })
        }
    }

    impl Session for FlipsInSession {
        fn step(
            &mut self,
            operation: &Operation,
            inputs: &mut Tensors,
        ) -> Result<Answer<Reply>, EngineError> {
            let answer = self.healthy.step(operation, inputs);
            if *operation == self.operation {
                let names: Vec<String> = inputs.iter().map(|(name, _)| name.to_owned()).collect();
                for name in names {
                    let first = inputs.get_mut(&name).and_then(|tensor| tensor.bytes_mut().first_mut());
                    first.into_iter().for_each(|byte| *byte ^= 1);
                }
            }
            answer
        }
    }

    fn failure(id: &str, engine: &dyn Engine) -> Failure {
        let case: Case = id.parse().unwrap_or_else(|error| panic!("{error}"));
        let result = judge_case(&case, engine, &|property| property.id == UNCHANGED);
        match &result.checks[..] {
            [check] => match &check.finding {
                Finding::Broken(failure) => (**failure).clone(),
                other => panic!("{id}: {other:?}"),
            },
            other => panic!("{id}: {other:?}"),
        }
    }

    const SEQUENCE: &str = "sequence/tiny-mla/tp3.dcp3.h1.s2.b4.bf16.a2a.hi_lo.lat/rejected/v0+5,1+4_v0+4,1+2.pad2_r0-3_v0+2.pad6/7";

    #[test]
    fn a_change_in_a_later_step_of_a_session_names_the_tensor_and_the_step() {
        let engine = CpuEngine::with_fault(fault("later-lengths-counted-up-in-place").unwrap());
        let failure = failure(SEQUENCE, &engine);
        assert!(failure.headline.contains("seq_lens in step "), "{}", failure.headline);
        assert!(failure.headline.ends_with("(layout)"), "{}", failure.headline);
        assert_eq!(failure.notes[0], "first in step 2 (v0+4,1+2.pad2)");
        assert!(failure.notes[1].starts_with("then seq_lens in step "), "{:?}", failure.notes);
    }

    #[test]
    fn a_change_in_a_write_or_a_read_is_seen_in_every_family_that_has_one() {
        let flips = |operation| Flips { healthy: shardcheck_cpu::engine(), operation };
        let write = "write/tiny-mla/tp2.dcp2.h2.s2.b8.n8.bf16.ag_rs/12+3_7+2.seq/gaussian/7";
        let decode = "decode/tiny-mla/tp2.dcp2.h2.s2.b8.n8.bf16.ag_rs/12+1_7+1.seq/gaussian/7";
        for id in [write, decode, SEQUENCE] {
            let failure = failure(id, &flips(Operation::WriteKv));
            assert!(
                failure.headline.contains("positions") && failure.headline.contains("(write_kv)"),
                "{failure:?}"
            );
        }
    }

    #[test]
    fn a_change_in_a_run_that_another_property_asked_for_counts() {
        let id = "decode/tiny-mla/tp2.dcp2.h2.s2.b8.n8.bf16.ag_rs/12+1_7+1.seq/gaussian/7";
        let case: Case = id.parse().unwrap();
        let engine = Flips { healthy: shardcheck_cpu::engine(), operation: Operation::LoadCache };
        let alone = judge_case(&case, &engine, &|property| property.id == UNCHANGED);
        assert!(matches!(alone.checks[0].finding, Finding::Holds(_)), "nothing loads a cache");
        let both =
            judge_case(&case, &engine, &|property| [UNCHANGED, "attend.given-cache"].contains(&property.id));
        let Finding::Broken(failure) = &both.checks[1].finding else { panic!("{:?}", both.checks) };
        assert!(
            failure.headline.contains("key_cache in step 1 of a session (load_cache)"),
            "{}",
            failure.headline
        );
    }

    #[test]
    fn it_is_judged_behind_everything_that_takes_a_step() {
        let last = |case: &Case| crate::properties::of(case).last().map(|property| property.id);
        for case in suite(SuiteName::Gate, 1).iter().filter(|case| case.family != Family::Rules) {
            assert_eq!(last(case), Some(UNCHANGED), "{}", case.id());
        }
        assert!(find(UNCHANGED).is_some());
    }
}
