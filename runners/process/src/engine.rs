//! An engine behind a command: started, asked, killed when it does not answer, started anew for the next case.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Operation, OperationKind, Profile, Provenance,
    Reply as StepReply, RuleSetName, Session, Settings, Tensor, TensorSpec, Tensors, Validation,
};

use crate::child::Child;
use crate::connection::{AskError, Connection, Pending};
use crate::log::{EngineLog, legible};
use crate::message::{ErrorClass, Outcome, Parcel, Question, Reply};
use crate::unwritten::unwritten_elements;

/// Starts in a row that may fail before the engine is given up for good.
const MAX_FAILED_STARTS: u32 = 3;
/// How long a command may take to end after a farewell.
const FAREWELL: Duration = Duration::from_secs(5);
/// Configurations of a process that are remembered as ones that it takes.
const REMEMBERED: usize = 8;
const ENDED: &str = "the engine's process has ended";
/// Prefix of the name of an input that an engine changed.
const CHANGED_INPUT: &str = "input_after.";

/// How a command is started and how long it is waited for.
#[derive(Debug, Clone)]
pub struct ProcessOptions {
    /// Command line, for the shell.
    pub command: String,
    /// Longest time to its hello.
    pub start_timeout: Duration,
    /// Longest time to an answer.
    pub question_timeout: Duration,
}

/// A command that could not be made an engine of.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The system.
    #[error("the engine can't be started: {0}")]
    System(std::io::Error),
    /// The command ended before it said hello.
    #[error("{how} before it said hello{turned_away}{}", quoted(said))]
    Ended {
        /// In words.
        how: String,
        /// What it printed last.
        said: String,
        /// Whether somebody else said hello, in words.
        turned_away: &'static str,
    },
    /// The command ended with the status that says: not on this machine.
    #[error("the adapter says that it can't run here{}", quoted(said))]
    CannotRunHere {
        /// What it printed last.
        said: String,
    },
    /// No hello.
    #[error(
        "no hello within {waited_s} s: the command must connect to SHARDCHECK_ADDRESS (docs/protocol.md); --start-timeout-s gives it more time{turned_away}{}",
        quoted(said)
    )]
    Silent {
        /// Seconds.
        waited_s: f64,
        /// What it printed last.
        said: String,
        /// Whether somebody else said hello, in words.
        turned_away: &'static str,
    },
    /// A hello that is not accepted.
    #[error("the adapter is refused: {reason}")]
    Refused {
        /// Why.
        reason: String,
    },
}

impl StartError {
    /// Adds what the command printed last.
    fn quoting(mut self, log: &EngineLog) -> Self {
        if let Self::Ended { said, .. } | Self::CannotRunHere { said } | Self::Silent { said, .. } = &mut self
        {
            // its last words may still be on their way through the pipe
            thread::sleep(Duration::from_millis(50));
            *said = log.tail();
        }
        self
    }
}

fn quoted(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!("; it printed last:\n{said}") }
}

/// An engine behind a command. Each thread that asks has a process of its own, so that threads neither wait for each
/// other nor lose their sessions to each other.
pub struct ProcessEngine {
    shared: Arc<Shared>,
    profile: Profile,
    lanes: Mutex<Lanes>,
}

struct Shared {
    options: ProcessOptions,
    log: EngineLog,
}

#[derive(Default)]
struct Lanes {
    by_thread: HashMap<ThreadId, Arc<Lane>>,
    /// The lane of the first start, until a thread takes it.
    spare: Option<Arc<Lane>>,
}

#[derive(Default)]
struct Lane(Mutex<LaneState>);

#[derive(Default)]
struct LaneState {
    running: Option<Running>,
    /// Counts starts, so that a session knows whether its process is still the one it was opened in.
    generation: u64,
    failed_starts: u32,
}

struct Running {
    // the connection goes first: a process that sees its end needs no signal
    connection: Connection,
    child: Child,
    next_session: u64,
    /// Configurations that it opened sessions for: the next session of such a one is not waited for.
    taken: VecDeque<Configuration>,
}

impl ProcessEngine {
    /// Starts the command and takes its profile.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(options: ProcessOptions) -> Result<Self, StartError> {
        let shared = Arc::new(Shared { options, log: EngineLog::default() });
        let (running, profile) = shared.start()?;
        let lane = Lane(Mutex::new(LaneState { running: Some(running), generation: 1, failed_starts: 0 }));
        let lanes = Lanes { by_thread: HashMap::new(), spare: Some(Arc::new(lane)) };
        Ok(Self { shared, profile, lanes: Mutex::new(lanes) })
    }

    /// What the command prints.
    pub fn log(&self) -> EngineLog {
        self.shared.log.clone()
    }

    fn lane(&self) -> Arc<Lane> {
        let mut lanes = lock(&self.lanes);
        let spare = lanes.spare.take();
        let (lane, left) = match lanes.by_thread.get(&thread::current().id()) {
            Some(lane) => (Arc::clone(lane), spare),
            None => (spare.unwrap_or_default(), None),
        };
        lanes.spare = left;
        lanes.by_thread.insert(thread::current().id(), Arc::clone(&lane));
        lane
    }

    /// Sees to it that the lane has a process that can be asked.
    fn ready(&self, lane: &mut LaneState) -> Result<(), EngineError> {
        if let Some(running) = &lane.running {
            match running.connection.unasked() {
                Pending::Nothing => return Ok(()),
                // it ended after its last case had its verdict
                Pending::End => lane.running = None,
                Pending::Something => {
                    lane.running = None;
                    let text = "after its last answer to an earlier case the adapter said something that nobody asked for";
                    return Err(EngineError::Crash { text: text.to_owned() });
                }
            }
        }
        if lane.failed_starts >= MAX_FAILED_STARTS {
            let text = format!(
                "the command could not be started {MAX_FAILED_STARTS} times in a row and is given up"
            );
            return Err(EngineError::Crash { text });
        }
        lane.failed_starts += 1;
        let (running, profile) =
            self.shared.start().map_err(|error| EngineError::Crash { text: error.to_string() })?;
        if profile != self.profile {
            let text = "the command declares another profile than at its first start".to_owned();
            return Err(EngineError::Crash { text });
        }
        lane.failed_starts = 0;
        lane.generation += 1;
        lane.running = Some(running);
        Ok(())
    }
}

impl Engine for ProcessEngine {
    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn validate(&self, rules: RuleSetName, settings: &Settings) -> Result<Answer<Validation>, EngineError> {
        if !self.profile.rule_sets.contains(&rules) {
            return Ok(Answer::Unsupported(format!("the engine answers for no rule set {rules}")));
        }
        let lane = self.lane();
        let mut lane = lock(&lane.0);
        self.ready(&mut lane)?;
        let settings = settings.clone();
        let question = |id| Question::Validate { id, rules, settings };
        let (reply, _) = self.shared.ask(&mut lane, "validate", question, &Parcel::empty())?;
        match done(reply)? {
            Answer::Unsupported(why) => Ok(Answer::Unsupported(why)),
            Answer::Done(Done { result: Some(validation), .. }) => Ok(Answer::Done(validation)),
            Answer::Done(_) => {
                Err(EngineError::Crash { text: "the reply to validate has no result".to_owned() })
            }
        }
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        let lane = self.lane();
        let mut state = lock(&lane.0);
        self.ready(&mut state)?;
        let (session, opened) = self.shared.open(&mut state, configuration)?;
        let open_id = match opened {
            Opened::Yes => None,
            Opened::Expected(id) => Some(id),
            Opened::No(why) => return Ok(Answer::Unsupported(why)),
        };
        let (shared, generation) = (Arc::clone(&self.shared), state.generation);
        drop(state);
        Ok(Answer::Done(Box::new(ProcessSession { shared, lane, generation, session, open_id, ended: None })))
    }
}

/// What is known of a session that was asked for.
enum Opened {
    Yes,
    /// The answer to the question of this number has not come.
    Expected(u64),
    No(String),
}

impl Drop for ProcessEngine {
    fn drop(&mut self) {
        let mut lanes = lock(&self.lanes);
        let spare = lanes.spare.take();
        for lane in lanes.by_thread.drain().map(|(_, lane)| lane).chain(spare) {
            if let Some(mut running) = lock(&lane.0).running.take() {
                running.connection.bye();
                running.child.wait(FAREWELL);
            }
        }
    }
}

impl Shared {
    fn start(&self) -> Result<(Running, Profile), StartError> {
        let (mut child, listener) =
            Child::start(&self.options.command, &self.log).map_err(StartError::System)?;
        let (connection, profile) = Connection::establish(&listener, &mut child, self.options.start_timeout)
            .map_err(|error| error.quoting(&self.log))?;
        Ok((Running { connection, child, next_session: 0, taken: VecDeque::new() }, profile))
    }

    /// Opens a session, whose number it gives.
    fn open(
        &self,
        lane: &mut LaneState,
        configuration: &Configuration,
    ) -> Result<(u64, Opened), EngineError> {
        let Some(running) = &mut lane.running else {
            return Err(EngineError::Crash { text: ENDED.to_owned() });
        };
        running.next_session += 1;
        let session = running.next_session;
        let question = |id| Question::Open { id, session, configuration: Box::new(configuration.clone()) };
        if running.taken.contains(configuration) {
            let id = running.connection.number();
            running
                .connection
                .tell(id, &question(id))
                .map_err(|error| self.failure(error, running, "open"))?;
            return Ok((session, Opened::Expected(id)));
        }
        let (reply, _) = self.ask(lane, "open", question, &Parcel::empty())?;
        match done(reply)? {
            Answer::Unsupported(why) => Ok((session, Opened::No(why))),
            Answer::Done(_) => {
                if let Some(running) = &mut lane.running {
                    running.taken.truncate(REMEMBERED - 1);
                    running.taken.push_front(configuration.clone());
                }
                Ok((session, Opened::Yes))
            }
        }
    }

    /// Asks; a lane whose process fails has none afterwards.
    fn ask(
        &self,
        lane: &mut LaneState,
        what: &str,
        question: impl FnOnce(u64) -> Question,
        parcel: &Parcel<'_>,
    ) -> Result<(Reply, Tensors), EngineError> {
        let Some(running) = &mut lane.running else {
            return Err(EngineError::Crash { text: ENDED.to_owned() });
        };
        let id = running.connection.number();
        let patience = self.options.question_timeout;
        let error = match running.connection.ask(id, &question(id), parcel, &running.child, patience) {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        let failure = self.failure(error, running, what);
        lane.running = None;
        Err(failure)
    }

    fn failure(&self, error: AskError, running: &mut Running, what: &str) -> EngineError {
        match error {
            AskError::TimedOut => {
                let (rank, waiting_in) = match running.child.progress.straggler() {
                    Some((rank, place)) => (Some(rank), format!("{what}, in {place}")),
                    None => (None, what.to_owned()),
                };
                let waited_s = self.options.question_timeout.as_secs_f64();
                EngineError::Timeout { rank, waiting_in, waited_s }
            }
            AskError::Closed => {
                let how = running.child.ending();
                EngineError::Crash { text: format!("{how} during {what}{}", quoted(&self.log.tail())) }
            }
            AskError::Violation(how) => {
                EngineError::Crash { text: format!("the adapter broke the protocol during {what}: {how}") }
            }
            AskError::Unsendable(why) => {
                EngineError::Crash { text: format!("the question {what} can't be sent: {why}") }
            }
        }
    }
}

struct ProcessSession {
    shared: Arc<Shared>,
    lane: Arc<Lane>,
    generation: u64,
    session: u64,
    /// Number of the question that opened it, while its answer is not known.
    open_id: Option<u64>,
    /// What the session failed with: it must not be used again.
    ended: Option<EngineError>,
}

impl Session for ProcessSession {
    fn step(
        &mut self,
        operation: &Operation,
        inputs: &mut Tensors,
    ) -> Result<Answer<StepReply>, EngineError> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        let lane = Arc::clone(&self.lane);
        let answer = self.perform(&mut lock(&lane.0), operation, inputs);
        answer.inspect_err(|error| self.ended = Some(error.clone()))
    }
}

impl ProcessSession {
    fn perform(
        &mut self,
        lane: &mut LaneState,
        operation: &Operation,
        inputs: &mut Tensors,
    ) -> Result<Answer<StepReply>, EngineError> {
        let kind = operation.kind(inputs);
        let Some(running) = lane.running.as_ref().filter(|_| lane.generation == self.generation) else {
            let text = "the process ended while another session was asked".to_owned();
            return Err(EngineError::Interrupted { text });
        };
        let name = format!("inputs-{}", self.session);
        let inline_bytes = running.connection.inline_bytes();
        let parcel = Parcel::of(inputs, running.child.folder(), &name, inline_bytes)
            .map_err(|error| EngineError::Crash { text: format!("inputs can't be sent: {error}") })?;
        let (session, operation, attached) = (self.session, operation.clone(), parcel.attached.clone());
        let question = |id| Question::Step { id, session, operation: Box::new(operation), kind, attached };
        let (reply, tensors) = self.shared.ask(lane, kind.name(), question, &parcel)?;
        let refusal = |id| lane.running.as_mut().and_then(|running| running.connection.refusal(id));
        // what a session that was never opened says to its first step is of no interest
        let reply = self.open_id.take().and_then(refusal).unwrap_or(reply);
        let done = match done(reply)? {
            Answer::Unsupported(why) => return Ok(Answer::Unsupported(why)),
            Answer::Done(done) => done,
        };
        let outputs = sort(kind, tensors, inputs)?;
        if let Some(said) = unwritten_elements(kind, &outputs) {
            return Err(EngineError::Crash { text: said });
        }
        let Done { effective, collectives, .. } = done;
        Ok(Answer::Done(StepReply { outputs, effective, collectives }))
    }
}

impl Drop for ProcessSession {
    fn drop(&mut self) {
        let mut lane = lock(&self.lane.0);
        if lane.generation != self.generation {
            return;
        }
        if let Some(running) = &mut lane.running {
            let id = running.connection.number();
            let close = Question::Close { id, session: self.session };
            // nobody waits for the answer, and the next question meets the consequences of a failure here
            let _ = running.connection.tell(id, &close);
        }
    }
}

/// Outputs of a reply; changed inputs go to where they came from.
fn sort(kind: OperationKind, mut tensors: Tensors, inputs: &mut Tensors) -> Result<Tensors, EngineError> {
    let known = |name: &str| {
        let returned =
            |spec: &TensorSpec| matches!(spec.provenance, Provenance::Output | Provenance::Observable);
        kind.tensors().iter().any(|spec| spec.name == name && returned(spec))
    };
    let mut outputs = Tensors::new();
    let names: Vec<String> = tensors.iter().map(|(name, _)| name.to_owned()).collect();
    for name in names {
        // moved, not copied: a cache that is read back may be a gigabyte
        let Some(tensor) = tensors.remove(&name) else { continue };
        let changed = name.strip_prefix(CHANGED_INPUT);
        match changed.and_then(|input| Some((input, inputs.find(input)?))) {
            Some((input, sent)) if alike(sent, &tensor) => inputs.insert(input, tensor),
            Some(_) => {
                let text = format!(
                    "the reply has {name:?} as {} {:?}, which is not what was sent",
                    tensor.dtype(),
                    tensor.shape()
                );
                return Err(EngineError::Crash { text });
            }
            None if changed.is_none() && known(&name) => outputs.insert(&name, tensor),
            None => {
                let text = format!("the reply has a tensor {name:?} that {kind} does not have");
                return Err(EngineError::Crash { text });
            }
        }
    }
    Ok(outputs)
}

fn alike(sent: &Tensor, returned: &Tensor) -> bool {
    sent.dtype() == returned.dtype() && sent.shape() == returned.shape()
}

/// What a reply says when all went well.
struct Done {
    effective: shardcheck_engine::EffectivePath,
    collectives: Vec<u64>,
    result: Option<Validation>,
}

fn done(reply: Reply) -> Result<Answer<Done>, EngineError> {
    match reply.outcome {
        Outcome::Ok { effective, collectives, result } => {
            Ok(Answer::Done(Done { effective, collectives, result }))
        }
        Outcome::Unsupported { reason } => Ok(Answer::Unsupported(legible(&reason))),
        Outcome::Error { class: ErrorClass::Timeout, text, rank } => {
            Err(EngineError::Timeout { rank, waiting_in: legible(&text), waited_s: 0.0 })
        }
        Outcome::Error { class: ErrorClass::DeviceLost, text, .. } => {
            Err(EngineError::DeviceLost { text: legible(&text) })
        }
        Outcome::Error { class: ErrorClass::Crash | ErrorClass::Input, text, .. } => {
            Err(EngineError::Crash { text: legible(&text) })
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // whoever panicked left a lane that says itself whether its process can be asked
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
