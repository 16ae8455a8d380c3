//! Evidence of one failed case: what its engine answered, and which of those answers the healthy engine does not give.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use shardcheck_cases::Case;
use shardcheck_cpu::{CpuEngine, Fault, FaultClass, engine};
use shardcheck_engine::{Engine, Profile, Tensors, Validation};

use super::comparison::{Part, Sides, compare, is_end, same_kind};
use super::replay::{Played, PlayedStep, play, play_while};
use super::residue::Residual;
use super::widths::Widths;
use crate::event::CaseResult;
use crate::finding::{Finding, Stage};
use crate::material::Material;
use crate::recording::{Answered, Recording, SessionRecord};
use crate::status::Status;

/// How long ranks of a fault that makes them wait are waited for. The recorded run has waited long enough already.
const HANG_WAIT: Duration = Duration::from_millis(300);
/// How long ranks of any other fault may wait for each other.
const RANK_WAIT: Duration = Duration::from_secs(5);
/// Sessions of a hang that are replayed: each costs [`HANG_WAIT`].
const HANG_SESSIONS: usize = 2;

/// A failed case with everything that its engine was asked and answered.
pub struct Evidence {
    /// Case id.
    pub id: String,
    /// The case.
    pub case: Case,
    /// Properties that failed, in the order in which they were judged.
    pub properties: Vec<String>,
    /// First stage that diverges, as the failed properties tell it.
    pub stage: Option<Stage>,
    recording: Recording,
    same_arithmetic: bool,
    hangs: bool,
    widths: Widths,
    own: Profile,
    wrong: Vec<Wrong>,
    /// Where every answer lies within its width: what the outputs have in common.
    residual: Option<Residual>,
}

/// A part of an answer that the healthy engine does not give.
#[derive(Debug, Clone, PartialEq)]
struct Wrong {
    place: Place,
    part: String,
    /// Both lie within the widths, so that bits alone tell them apart.
    bits_alone: bool,
}

/// A question of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Validation(usize),
    Open(usize),
    Step(usize, usize),
}

impl Place {
    fn session(self) -> Option<usize> {
        match self {
            Self::Validation(_) => None,
            Self::Open(session) | Self::Step(session, _) => Some(session),
        }
    }
}

/// How a fault explains a case.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reproduction {
    /// Every answer of the case to the last bit.
    pub exact: bool,
    /// Parts beside the wrong ones in which the fault answers otherwise than was seen.
    pub beside: usize,
    /// Mean square of (distance / width) over the wrong parts.
    pub distance: f64,
    /// Hash of everything that the engine with the fault answers: equal hashes, equal effect on this case.
    pub effect: [u8; 32],
}

impl Evidence {
    /// Evidence of a failed case; `None` for a case that did not fail: nothing is to be explained then.
    pub fn of(case: &Case, result: &CaseResult, recording: Recording) -> Option<Self> {
        let properties: Vec<String> = result.failures().map(|check| check.property.clone()).collect();
        // a failure of the harness is none of the engine's
        if !result.status.is_failure() || result.status == Status::HarnessError || properties.is_empty() {
            return None;
        }
        let stage = result.failures().find_map(|check| match &check.finding {
            Finding::Broken(failure) => failure.stage,
            _ => None,
        });
        let healthy = engine().with_timeout(RANK_WAIT);
        let own = healthy.profile().clone();
        let material = Material::of(case, &recording.profile).ok();
        let mut evidence = Self {
            id: case.id(),
            case: case.clone(),
            properties,
            stage,
            same_arithmetic: recording.profile == own,
            hangs: recording.sessions.iter().any(hangs),
            widths: Widths::of(material.as_ref()),
            recording,
            own,
            wrong: Vec::new(),
            residual: None,
        };
        let differences = evidence.differences(&healthy);
        evidence.wrong = main_parts(differences, evidence.same_arithmetic);
        if evidence.wrong.is_empty() {
            evidence.residual = Residual::of(&evidence.recording.sessions, &healthy);
        }
        Some(evidence)
    }

    /// Whether anything was seen that the healthy engine answers otherwise.
    pub fn is_telling(&self) -> bool {
        !self.wrong.is_empty() || self.residual.is_some()
    }

    /// Whether the engine ended in the case instead of answering all of its questions.
    pub fn ended(&self) -> bool {
        self.recording
            .sessions
            .iter()
            .any(|session| is_end(&session.opened) || session.steps.iter().any(|step| is_end(&step.answer)))
    }

    /// Whether trying a fault on this evidence could show anything: ranks that wait for ever give a timeout, and nothing else does; where no
    /// question asks what the fault changes, every answer is the healthy engine's.
    pub fn concerns(&self, fault: &Fault) -> bool {
        self.hangs == (fault.class == FaultClass::Hang) && is_asked(&self.recording, fault)
    }

    /// Tries a fault: `None` when the engine with that one fault does not give the wrong answers that were seen.
    pub(crate) fn try_fault(&self, fault: &'static Fault) -> Option<Reproduction> {
        if !self.is_telling() || !self.concerns(fault) {
            return None;
        }
        let wait = if fault.class == FaultClass::Hang { HANG_WAIT } else { RANK_WAIT };
        let mutant = CpuEngine::with_fault(fault).with_timeout(wait);
        // a fault that two equal runs must show answers by turns
        let by_turns = fault.killed_by.contains(&"equal.repeat");
        catch_unwind(AssertUnwindSafe(|| self.reproduce(&mutant, by_turns))).ok().flatten()
    }

    fn reproduce(&self, mutant: &dyn Engine, by_turns: bool) -> Option<Reproduction> {
        let mut reproduction = Reproduction { exact: true, beside: 0, distance: 0.0, effect: [0; 32] };
        let mut hasher = blake3::Hasher::new();
        self.validations(mutant, &mut reproduction, &mut hasher)?;
        let mut sessions: Vec<usize> = self.wrong.iter().filter_map(|wrong| wrong.place.session()).collect();
        sessions.dedup();
        // most faults end with the first wrong answer: what comes to one soonest is tried first
        sessions.sort_by_key(|session| self.way_to_wrong(*session));
        if self.hangs {
            sessions.truncate(HANG_SESSIONS);
        } else {
            // wrong answers first, because most faults end there
            let others = (0..self.recording.sessions.len()).filter(|session| !sessions.contains(session));
            sessions = sessions.iter().copied().chain(others.collect::<Vec<_>>()).collect();
        }
        let mut distances = Vec::new();
        for session in sessions {
            let played = self.matching(mutant, session, by_turns)?;
            digest(&mut hasher, session, &played.0);
            for (place, part) in played.1 {
                reproduction.exact &= part.equal;
                if self.wrong_at(place, &part.name).is_some() {
                    distances.push(part.distance);
                } else {
                    reproduction.beside += usize::from(!part.within);
                }
            }
        }
        reproduction.distance = distances.iter().sum::<f64>() / distances.len().max(1) as f64;
        reproduction.effect = *hasher.finalize().as_bytes();
        if let Some(residual) = &self.residual {
            reproduction.distance = residual.left_by(&self.recording.sessions, mutant)?;
        }
        Some(reproduction)
    }

    /// The mutant's answers to a session, when they are as wrong as those that were seen.
    fn matching(
        &self,
        mutant: &dyn Engine,
        session: usize,
        by_turns: bool,
    ) -> Option<(Played, Vec<(Place, Part)>)> {
        let holds = |(place, part): &(Place, Part)| match self.wrong_at(*place, &part.name) {
            None => true,
            Some(wrong) if wrong.bits_alone => part.equal,
            Some(_) => part.within,
        };
        // a mutant that does not answer where a wrong answer was seen has not given it
        let gives = |parts: &[(Place, Part)], wrong: &Wrong| {
            parts.iter().any(|(place, part)| *place == wrong.place && part.name == wrong.part)
        };
        for _ in 0..if by_turns { 2 } else { 1 } {
            let mut parts = Vec::new();
            let played = play_while(mutant, &self.recording.sessions[session], &mut |step, answer| {
                let place = Place::Step(session, step);
                let here = self.step_differences(session, step, answer);
                let mut wanted = self.wrong.iter().filter(|wrong| wrong.place == place);
                let goes_on = here.iter().all(holds) && wanted.all(|wrong| gives(&here, wrong));
                parts.extend(here);
                goes_on
            });
            let Some(played) = played else { continue };
            parts.extend(self.unanswered(session, &played));
            let mut wanted = self.wrong.iter().filter(|wrong| wrong.place.session() == Some(session));
            if wanted.all(|wrong| gives(&parts, wrong)) && parts.iter().all(holds) {
                return Some((played, parts));
            }
        }
        None
    }

    /// Elements that are put to an engine until the first wrong answer of a session.
    fn way_to_wrong(&self, session: usize) -> usize {
        let step = |wrong: &Wrong| match wrong.place {
            Place::Step(of, step) if of == session => Some(step + 1),
            _ => None,
        };
        let steps = self.wrong.iter().filter_map(step).min().unwrap_or(0);
        let elements = |inputs: &Tensors| inputs.iter().map(|(_, tensor)| tensor.len()).sum::<usize>();
        self.recording.sessions[session].steps.iter().take(steps).map(|step| elements(&step.inputs)).sum()
    }

    fn wrong_at(&self, place: Place, part: &str) -> Option<&Wrong> {
        self.wrong.iter().find(|wrong| wrong.place == place && wrong.part == part)
    }

    fn validations(
        &self,
        mutant: &dyn Engine,
        reproduction: &mut Reproduction,
        hasher: &mut blake3::Hasher,
    ) -> Option<()> {
        for (index, part) in self.validation_differences(mutant, hasher) {
            let place = Place::Validation(index);
            let wanted = self.wrong.iter().any(|wrong| wrong.place == place);
            if wanted && !part.within {
                return None;
            }
            reproduction.exact &= part.equal;
            reproduction.beside += usize::from(!part.within);
        }
        Some(())
    }

    fn validation_differences(&self, engine: &dyn Engine, hasher: &mut blake3::Hasher) -> Vec<(usize, Part)> {
        let mut parts = Vec::new();
        for (index, record) in self.recording.validations.iter().enumerate() {
            let answer = match engine.validate(record.rules, &record.settings) {
                Ok(shardcheck_engine::Answer::Done(answer)) => answer,
                _ => continue,
            };
            hasher.update(format!("{answer:?}").as_bytes());
            let Answered::Done(seen) = &record.answer else { continue };
            let equal = *seen == answer;
            // reasons are worded by each engine; decision and what is switched off are not
            let within = seen.decision == answer.decision && features(seen) == features(&answer);
            parts.push((index, part("answer", equal, within)));
        }
        parts
    }

    /// Everything in which `engine` was compared with what was seen.
    fn differences(&self, engine: &dyn Engine) -> Vec<(Place, Part)> {
        let mut all: Vec<(Place, Part)> = self
            .validation_differences(engine, &mut blake3::Hasher::new())
            .into_iter()
            .map(|(index, part)| (Place::Validation(index), part))
            .collect();
        for (session, record) in self.recording.sessions.iter().enumerate() {
            all.extend(self.session_differences(session, &play(engine, record)));
        }
        all
    }

    fn session_differences(&self, session: usize, played: &Played) -> Vec<(Place, Part)> {
        let steps = played.steps.iter().enumerate();
        steps
            .flat_map(|(step, answer)| self.step_differences(session, step, answer))
            .chain(self.unanswered(session, played))
            .collect()
    }

    fn step_differences(&self, session: usize, step: usize, answer: &PlayedStep) -> Vec<(Place, Part)> {
        let record = &self.recording.sessions[session].steps[step];
        let sides =
            Sides { seen: &self.recording.profile, mutant: &self.own, same_arithmetic: self.same_arithmetic };
        let mutant = (&answer.0, answer.1.is_some());
        let parts = compare(record, record.inputs_after.is_some(), mutant, &self.widths, &sides);
        parts.into_iter().map(|part| (Place::Step(session, step), part)).collect()
    }

    /// How the session opened, and the questions that were not answered any more.
    fn unanswered(&self, session: usize, played: &Played) -> Vec<(Place, Part)> {
        let record = &self.recording.sessions[session];
        if matches!(record.opened, Answered::Unsupported(_)) {
            return Vec::new();
        }
        let opened = same_kind(&record.opened, &played.opened);
        let missing = (played.steps.len()..record.steps.len())
            .map(|step| (Place::Step(session, step), part("answer", false, false)));
        [(Place::Open(session), part("answer", opened, opened))].into_iter().chain(missing).collect()
    }
}

/// Whether a question of the recording asks what the fault changes.
pub(super) fn is_asked(recording: &Recording, fault: &Fault) -> bool {
    let mut steps = recording.sessions.iter().flat_map(|session| &session.steps);
    !recording.sessions.is_empty() && fault.is_asked_at_opening()
        || steps.any(|step| fault.is_asked_in(&step.operation))
        || !recording.validations.is_empty() && fault.is_asked_by_rules()
}

fn features(validation: &Validation) -> Vec<&str> {
    validation.disabled.iter().map(|disabled| disabled.feature.as_str()).collect()
}

fn part(name: &str, equal: bool, within: bool) -> Part {
    let distance = if within { 0.0 } else { f64::INFINITY };
    Part { name: name.to_owned(), is_output: true, equal, within, distance }
}

/// What of the healthy engine's differences counts as wrong: anything at all where both have the same arithmetic, what no
/// conforming engine may answer elsewhere. Observables count where the outputs of their question are right.
fn main_parts(differences: Vec<(Place, Part)>, same_arithmetic: bool) -> Vec<Wrong> {
    let is_wrong = |part: &Part| if same_arithmetic { !part.equal } else { !part.within };
    let found: Vec<(Place, Part)> = differences.into_iter().filter(|(_, part)| is_wrong(part)).collect();
    let with_output: Vec<Place> =
        found.iter().filter(|(_, part)| part.is_output).map(|(place, _)| *place).collect();
    found
        .into_iter()
        .filter(|(place, part)| part.is_output || !with_output.contains(place))
        .map(|(place, part)| Wrong { place, part: part.name, bits_alone: part.within })
        .collect()
}

fn hangs(record: &SessionRecord) -> bool {
    record.steps.iter().any(|step| matches!(step.answer, Answered::Timeout { .. }))
}

fn digest(hasher: &mut blake3::Hasher, session: usize, played: &Played) {
    hasher.update(&session.to_le_bytes());
    for (answer, changed) in &played.steps {
        hasher.update(&[u8::from(changed.is_some())]);
        match answer {
            Answered::Done(reply) => {
                for (name, tensor) in reply.outputs.iter() {
                    hasher.update(name.as_bytes());
                    hasher.update(format!("{} {:?}", tensor.dtype(), tensor.shape()).as_bytes());
                    hasher.update(tensor.bytes());
                }
                hasher.update(format!("{} {:?}", reply.effective, reply.collectives).as_bytes());
            }
            Answered::Timeout { rank, waiting_in, .. } => {
                hasher.update(format!("timeout {rank:?} {waiting_in}").as_bytes());
            }
            Answered::Crash(text) => {
                hasher.update(text.as_bytes());
            }
            Answered::Unsupported(_)
            | Answered::DeviceLost(_)
            | Answered::Interrupted(_)
            | Answered::Input(_) => {
                hasher.update(b"no answer");
            }
        }
    }
}
