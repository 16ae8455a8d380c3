//! The model of a session against the embedded engine, step by step: whatever a scheduler may do, in any order. A failing session is
//! shrunk to the fewest and smallest acts that still fail.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{TestError, TestRunner};
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};
use shardcheck_cases::{Body, Case, NewTokens, RunKind, SequenceCase, Step, turns};
use shardcheck_cpu::{CpuEngine, engine, fault};
use shardcheck_engine::{CacheLayout, Engine};

use super::{Play, SECOND_GROUP_SEED, SequenceMaterial, TurnMaterial};
use crate::finding::Finding;
use crate::laboratory::{Run, Watched};
use crate::properties::judge_turn;

const SEED: u64 = 7;
/// Requests that live at the same time, at most.
const MOST_REQUESTS: usize = 3;
/// Tokens beyond which a request does not grow.
const MOST_TOKENS: usize = 40;

/// Sessions that are opened: sharded ones, one with an 8-bit cache, one with a replicated group beside the sharded one.
const SESSIONS: [&str; 4] = [
    "tiny-mla/tp3.dcp3.h1.s2.b4.n16.bf16.a2a.hi_lo.lat",
    "tiny-gqa/tp2.dcp2.h1.s1.b4.n24.e4m3fn@0.5.ag_rs",
    "tiny-gqa/tp4.dcp2.h1.s2.b2.n40.bf16.a2a.lo_hi.qrep",
    "tiny-mla/tp3.dcp3.h1.s1.b2.n30.bf16.ag_rs.lat~gqa2x16v12.tp3.dcp1.h2.s1.b6.n30.bf16.ag_rs",
];
/// Layouts that requests come from.
const SOURCES: [(usize, usize, usize); 3] = [(1, 1, 4), (4, 2, 2), (3, 1, 8)];

/// What a scheduler does at once.
#[derive(Clone)]
struct Act(Vec<Step>);

impl fmt::Debug for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(Step::to_string).collect::<Vec<_>>().join("_"))
    }
}

/// The engine that a session runs on.
trait Under: fmt::Debug + Clone + 'static {
    fn engine() -> CpuEngine;
}

#[derive(Debug, Clone)]
struct Healthy;

impl Under for Healthy {
    fn engine() -> CpuEngine {
        engine()
    }
}

/// An engine that keeps a rejected token in its slot.
#[derive(Debug, Clone)]
struct KeepsRejected;

impl Under for KeepsRejected {
    fn engine() -> CpuEngine {
        CpuEngine::with_fault(fault("rejected-token-kept").unwrap())
    }
}

/// A session as the scheduler sees it: what it was opened with, what it did, and how many tokens of each request are cached.
#[derive(Debug, Clone)]
struct Model<U> {
    case: SequenceCase,
    cached: BTreeMap<usize, usize>,
    next_request: usize,
    under: PhantomData<U>,
}

/// What decides the next act: its kind, two choices among what there is, tokens, padding.
type Choice = (u8, Index, Index, usize, usize);

impl<U: Under> Model<U> {
    fn open(session: &str) -> Self {
        let (model, configuration) = session.split_once('/').unwrap();
        let case: Case = format!("sequence/{model}/{configuration}/machine/v0+1/{SEED}").parse().unwrap();
        let Body::Sequence(case) = case.body else { panic!("a sequence") };
        let case = SequenceCase { steps: Vec::new(), ..case };
        Self { case, cached: BTreeMap::new(), next_request: 0, under: PhantomData }
    }

    fn act(&self, (kind, first, second, tokens, padded_rows): Choice) -> Act {
        let alive: Vec<usize> = self.cached.keys().copied().collect();
        let begins = alive.is_empty() || (kind < 3 && alive.len() < MOST_REQUESTS);
        let new = vec![NewTokens { request: self.next_request, tokens }];
        if begins {
            let (dcp, interleave, block_size) = SOURCES[second.index(SOURCES.len())];
            let source = CacheLayout { dcp, interleave, block_size };
            let decode = self.run(RunKind::Decode, vec![NewTokens { tokens: 1, ..new[0] }], padded_rows);
            return Act(match kind {
                1 if self.case.configuration.second_group.is_none() => {
                    vec![Step::Import { batch: new, source }, decode]
                }
                0 => vec![self.run(RunKind::Verify, new, padded_rows)],
                _ => vec![self.run(RunKind::Prefill, new, 0)],
            });
        }
        let request = alive[first.index(alive.len())];
        let other = alive[second.index(alive.len())];
        let both = |tokens: usize| {
            let mut batch = vec![NewTokens { request, tokens }];
            batch.extend((other != request).then_some(NewTokens { request: other, tokens: 1 }));
            batch
        };
        Act(match kind {
            3 | 4 => vec![self.run(RunKind::Decode, both(1), padded_rows)],
            5 => vec![self.run(RunKind::Verify, both(tokens.min(4)), padded_rows)],
            6 => vec![self.run(RunKind::Draft, both(tokens.min(4)), padded_rows)],
            7 => vec![self.run(RunKind::Prefill, both(tokens), 0)],
            8 => vec![Step::Reject { request, tokens: tokens.min(4) }],
            9 => vec![
                Step::Hit { request: self.next_request, source: request, blocks: 1 + tokens % 2 },
                self.run(RunKind::Verify, new, padded_rows),
            ],
            10 => vec![Step::Evict { request }],
            _ => vec![Step::Free { request }],
        })
    }

    fn run(&self, kind: RunKind, batch: Vec<NewTokens>, padded_rows: usize) -> Step {
        let chunk_budget_tokens = if kind == RunKind::Prefill { 13 } else { 0 };
        Step::Run { kind, batch, padded_rows, chunk_budget_tokens }
    }

    fn with(&self, act: &Act) -> SequenceCase {
        SequenceCase { steps: [&self.case.steps[..], &act.0].concat(), ..self.case.clone() }
    }
}

impl<U: Under> ReferenceStateMachine for Model<U> {
    type State = Self;
    type Transition = Act;

    fn init_state() -> BoxedStrategy<Self> {
        (0..SESSIONS.len()).prop_map(|session| Self::open(SESSIONS[session])).boxed()
    }

    fn transitions(state: &Self) -> BoxedStrategy<Act> {
        let state = state.clone();
        // what is done is left as it is: an act that turned into another one would no longer fit those behind it
        let index = || any::<Index>().no_shrink();
        let choice = ((0..12u8).no_shrink(), index(), index(), 1..15usize, 0..3usize);
        choice.prop_map(move |choice| state.act(choice)).boxed()
    }

    fn preconditions(state: &Self, act: &Act) -> bool {
        let case = Case::sequence(state.with(act), SEED);
        let grows = |(request, cached): (&usize, &usize)| {
            let new: usize = act.0.iter().map(|step| new_tokens(step, *request)).sum();
            cached + new > MOST_TOKENS
        };
        !state.cached.iter().any(grows) && case.check().is_ok()
    }

    fn apply(mut state: Self, act: &Act) -> Self {
        state.case = state.with(act);
        let virtual_block = state.case.configuration.virtual_block_tokens();
        for step in &act.0 {
            match step {
                Step::Run { batch, .. } | Step::Import { batch, .. } => {
                    batch.iter().for_each(|new| *state.cached.entry(new.request).or_default() += new.tokens);
                }
                Step::Reject { request, tokens } => *state.cached.entry(*request).or_default() -= tokens,
                Step::Hit { request, blocks, .. } => {
                    state.cached.insert(*request, blocks * virtual_block);
                }
                Step::Free { request } => {
                    state.cached.remove(request);
                }
                Step::Evict { request } => {
                    state.cached.insert(*request, 0);
                }
            }
        }
        state.next_request = state.next_request.max(state.cached.keys().max().map_or(0, |last| last + 1));
        state
    }
}

fn new_tokens(step: &Step, request: usize) -> usize {
    match step {
        Step::Run { batch, .. } => {
            batch.iter().filter(|new| new.request == request).map(|new| new.tokens).sum()
        }
        _ => 0,
    }
}

/// A session of the engine, what it was given and what it was seen to do.
struct Driven {
    engine: CpuEngine,
    run: Run,
    material: SequenceMaterial,
    play: Play,
}

impl Driven {
    fn open(engine: CpuEngine, case: &SequenceCase) -> Self {
        let of = |group: usize, case: SequenceCase| SequenceMaterial {
            case,
            turns: Vec::new(),
            second: None,
            group,
        };
        let mut material = of(0, case.clone());
        material.second = case.in_second_group().unwrap().map(|second| Box::new(of(1, second)));
        let mut run = Run::open(&Watched::new(&engine), &case.configuration).unwrap();
        let play = Play::begin(&mut run, &material).unwrap();
        Self { engine, run, material, play }
    }

    /// Takes what was added to the steps, and judges each turn of it.
    fn go_on(&mut self, case: &SequenceCase) {
        let profile = self.engine.profile();
        let second = case.in_second_group().unwrap();
        add(&mut self.material, case, SEED, profile);
        if let (Some(material), Some(second)) = (&mut self.material.second, second) {
            add(material, &second, SEED + SECOND_GROUP_SEED, profile);
        }
        while self.play.seen.len() < self.material.turns.len() {
            let turn = self.play.seen.len();
            self.play.go_on(&mut self.run, &self.material);
            assert!(self.play.halt.is_none(), "{:?}", self.play.halt);
            match judge_turn(&self.material, &self.play, turn) {
                Ok(Finding::Holds(_)) => {}
                wrong => panic!("{}: {wrong:?}", self.material.name(turn)),
            }
        }
    }
}

/// The material of the turns that are new.
fn add(
    material: &mut SequenceMaterial,
    case: &SequenceCase,
    seed: u64,
    profile: &shardcheck_engine::Profile,
) {
    material.case = case.clone();
    for turn in turns(case, seed).unwrap().into_iter().skip(material.turns.len()) {
        material.turns.push(TurnMaterial::new(turn, case, seed, profile).unwrap());
    }
}

struct Sessions<U>(PhantomData<U>);

impl<U: Under> StateMachineTest for Sessions<U> {
    type SystemUnderTest = Driven;
    type Reference = Model<U>;

    fn init_test(model: &Model<U>) -> Driven {
        Driven::open(U::engine(), &model.case)
    }

    fn apply(mut driven: Driven, model: &Model<U>, _: Act) -> Driven {
        driven.go_on(&model.case);
        driven
    }

    fn check_invariants(driven: &Driven, model: &Model<U>) {
        let last = driven.material.turns.last();
        let held = last.map(|last| last.turn.requests.iter().zip(&last.turn.tokens));
        // a run that nothing followed holds what the model says
        if let (Some(held), Some(Step::Run { .. })) = (held, model.case.steps.last()) {
            held.for_each(|(request, tokens)| assert_eq!(tokens.len(), model.cached[request]));
        }
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_scheduler_does_the_engine_does_what_the_model_says(sequential 1..10 => Sessions<Healthy>);
}

#[test]
fn a_session_that_fails_is_shrunk_to_the_acts_that_it_needs() {
    let config = ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new_with_rng(
        config.clone(),
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let strategy = Model::<KeepsRejected>::sequential_strategy(1..12);
    let failed = runner.run(&strategy, |(model, acts, seen)| {
        Sessions::<KeepsRejected>::test_sequential(config.clone(), model, acts, seen);
        Ok(())
    });
    let Err(TestError::Fail(why, (model, acts, _))) = failed else { panic!("nothing was found: {failed:?}") };
    assert!(why.to_string().contains("a token in the cache is not what was written"), "{why}");
    // a request, its last token rejected or all of it freed, and another token in the slot
    let steps: Vec<String> = acts.iter().map(|act| format!("{act:?}")).collect();
    let needed = acts.len() == 3 && steps[1].starts_with(['r', 'f']);
    assert!(needed && acts.iter().flat_map(|act| &act.0).map(run_tokens).sum::<usize>() <= 4, "{steps:?}");
    // the shrunk session fails by itself
    let session =
        || Sessions::<KeepsRejected>::test_sequential(config.clone(), model.clone(), acts.clone(), None);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(session)).is_err(), "{steps:?} passes");
}

fn run_tokens(step: &Step) -> usize {
    match step {
        Step::Run { batch, .. } => batch.iter().map(|new| new.tokens).sum(),
        _ => 0,
    }
}
