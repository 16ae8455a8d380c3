//! An adapter in Rust: any engine of this process answers for itself over the harness's socket.

use std::collections::BTreeMap;
use std::env;
use std::io::{BufReader, BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::thread;

use serde::Serialize;
use shardcheck_engine::{Answer, EffectivePath, Engine, EngineError, Operation, Session, Tensors};

use crate::eager::Eager;
use crate::frame::{self, FrameError, Head, MAX_INLINE_BYTES};
use crate::hostile::Strike;
use crate::message::{
    self, ErrorClass, Hello, INLINE_BYTES, MessageError, Outcome, Parcel, Question, Reply, Said,
};
use crate::progress::Progress;
use crate::{ADDRESS_VARIABLE, FOLDER_VARIABLE, PROGRESS_VARIABLE, PROTOCOL, TOKEN_VARIABLE};

/// What is read ahead, and what is written together.
const BUFFER_BYTES: usize = 64 << 10;

/// Why an adapter ends early.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// Nobody started it.
    #[error("{0} is not set: an adapter is started by `shardcheck run --engine exec:CMD`")]
    NotStarted(&'static str),
    /// The socket.
    #[error("no connection to the harness at {address}: {reason}")]
    Unreachable {
        /// Where it should be.
        address: String,
        /// What the system says.
        reason: String,
    },
    /// The harness refuses.
    #[error("the harness refuses this adapter: {0}")]
    Refused(String),
    /// A message.
    #[error("{0}")]
    Message(#[from] MessageError),
}

/// Answers until the harness says goodbye or leaves. With a strike it misbehaves on purpose.
///
/// # Errors
/// [`AdapterError`].
pub fn answer_for(engine: &dyn Engine, strike: Option<Strike>) -> Result<(), AdapterError> {
    let mut desk = Desk::connect(engine, strike)?;
    loop {
        let head = match frame::read_head(&mut desk.stream) {
            Ok(head) => head,
            Err(FrameError::Closed | FrameError::Broken(_)) => return Ok(()),
            Err(error) => return Err(MessageError::from(error).into()),
        };
        match message::parse::<Question>(&head)? {
            Question::Bye => return Ok(()),
            Question::Refused { reason } => return Err(AdapterError::Refused(reason)),
            question => desk.answer(question, &head)?,
        }
        // questions that came together are answered together
        if desk.stream.buffer().is_empty() {
            desk.flush()?;
        }
    }
}

struct Desk<'a> {
    engine: &'a dyn Engine,
    stream: BufReader<Eager>,
    replies: BufWriter<UnixStream>,
    /// Largest payload that the harness likes in a frame.
    inline_bytes: u64,
    folder: PathBuf,
    progress: Option<Progress>,
    sessions: BTreeMap<u64, Box<dyn Session>>,
    steps: u64,
    strike: Option<Strike>,
}

impl<'a> Desk<'a> {
    fn connect(engine: &'a dyn Engine, mut strike: Option<Strike>) -> Result<Self, AdapterError> {
        let variable = |name| env::var(name).map_err(|_| AdapterError::NotStarted(name));
        let (address, token) = (variable(ADDRESS_VARIABLE)?, variable(TOKEN_VARIABLE)?);
        let folder = PathBuf::from(variable(FOLDER_VARIABLE)?);
        let progress = env::var(PROGRESS_VARIABLE).ok();
        let unreachable = |reason: String| AdapterError::Unreachable { address: address.clone(), reason };
        let path = address.strip_prefix("unix:").ok_or_else(|| unreachable("not unix:PATH".to_owned()))?;
        let stream = UnixStream::connect(path).map_err(|error| unreachable(error.to_string()))?;
        let progress = progress.and_then(|path| Progress::open(path.as_ref()).ok());
        let mut hello = Hello {
            token,
            protocol: [PROTOCOL, PROTOCOL],
            sdk: concat!("rust ", env!("CARGO_PKG_VERSION")).to_owned(),
            inline_bytes: MAX_INLINE_BYTES,
            profile: Box::new(engine.profile().clone()),
        };
        if let Some(strike) = &mut strike {
            strike.on_hello(&mut hello);
        }
        let replies = stream.try_clone().map_err(|error| unreachable(error.to_string()))?;
        let mut desk = Self {
            engine,
            stream: BufReader::with_capacity(BUFFER_BYTES, Eager(stream)),
            replies: BufWriter::with_capacity(BUFFER_BYTES, replies),
            inline_bytes: INLINE_BYTES,
            folder,
            progress,
            sessions: BTreeMap::new(),
            steps: 0,
            strike,
        };
        desk.send(&Said::Hello(hello), &Parcel::empty())?;
        desk.flush()?;
        Ok(desk)
    }

    fn answer(&mut self, question: Question, head: &Head) -> Result<(), AdapterError> {
        let (id, outcome, outputs) = match question {
            Question::Validate { id, rules, settings } => {
                let validation = caught(|| self.engine.validate(rules, &settings));
                (id, outcome(validation, |validation| ok(Some(validation))), Tensors::new())
            }
            Question::Open { id, session, configuration } => {
                let opened = caught(|| self.engine.open(&configuration));
                let sessions = &mut self.sessions;
                let outcome = outcome(opened, |opened| {
                    sessions.insert(session, opened);
                    ok(None)
                });
                (id, outcome, Tensors::new())
            }
            Question::Step { id, session, operation, kind, attached } => {
                self.steps += 1;
                if let Some(progress) = &self.progress {
                    // progress is a courtesy to whoever waits
                    let _ = progress.enter(0, self.steps, kind.name());
                }
                let inputs = message::tensors(&mut self.stream, head, &attached, &self.folder)?;
                let (outcome, outputs) = self.step(session, &operation, inputs);
                (id, outcome, outputs)
            }
            Question::Close { id, session } => {
                self.sessions.remove(&session);
                let text = "the communicator is still in use".to_owned();
                let refusal = Outcome::Error { class: ErrorClass::Crash, text, rank: None };
                let strike = self.strike.take_if(|strike| strike.is_due_at_the_end());
                (id, strike.map_or_else(|| ok(None), |_| refusal), Tensors::new())
            }
            Question::Welcome { inline_bytes, .. } => {
                self.inline_bytes = inline_bytes.min(MAX_INLINE_BYTES);
                return Ok(());
            }
            Question::Refused { .. } | Question::Bye => return Ok(()),
        };
        self.reply(id, outcome, outputs)
    }

    fn reply(&mut self, id: u64, outcome: Outcome, mut outputs: Tensors) -> Result<(), AdapterError> {
        let mut strike = self.strike.take_if(|strike| strike.is_due(&outputs));
        if let Some(strike) = &mut strike {
            self.flush()?;
            strike.before_reply(id, &mut outputs, &mut self.stream.get_mut().0, &self.folder);
        }
        let name = format!("outputs-{id}");
        let parcel = Parcel::of(&outputs, &self.folder, &name, self.inline_bytes)?;
        let mut reply = Reply { id, outcome, attached: parcel.attached.clone() };
        if let Some(strike) = &mut strike {
            strike.on_reply(&mut reply);
        }
        let another = strike.and_then(|strike| strike.another(&reply));
        self.send(&Said::Reply(Box::new(reply)), &parcel)?;
        if let Some((after, another)) = another {
            self.flush()?;
            thread::sleep(after);
            self.send(&Said::Reply(Box::new(another)), &parcel)?;
        }
        Ok(())
    }

    fn step(&mut self, session: u64, operation: &Operation, mut inputs: Tensors) -> (Outcome, Tensors) {
        let Some(open) = self.sessions.get_mut(&session) else {
            let text = format!("there is no session {session}");
            return (Outcome::Error { class: ErrorClass::Input, text, rank: None }, Tensors::new());
        };
        // a gigabyte of keys is not kept twice to see that it did not change
        let before: Vec<[u64; 4]> = inputs.iter().map(|(_, tensor)| fingerprint(tensor.bytes())).collect();
        let mut tensors = Tensors::new();
        let answer = caught(|| open.step(operation, &mut inputs));
        let outcome = outcome(answer, |reply| {
            tensors = reply.outputs;
            Outcome::Ok { effective: reply.effective, collectives: reply.collectives, result: None }
        });
        for ((name, tensor), before) in inputs.iter().zip(&before) {
            if fingerprint(tensor.bytes()) != *before {
                tensors.insert(&format!("input_after.{name}"), tensor.clone());
            }
        }
        (outcome, tensors)
    }

    fn send(&mut self, message: &impl Serialize, parcel: &Parcel<'_>) -> Result<(), AdapterError> {
        let header = serde_json::to_vec(message).map_err(MessageError::Header)?;
        Ok(frame::write(&mut self.replies, &header, &parcel.pieces()).map_err(MessageError::from)?)
    }

    fn flush(&mut self) -> Result<(), AdapterError> {
        Ok(self.replies.flush().map_err(|error| MessageError::from(FrameError::from(error)))?)
    }
}

/// 256 bits that a change of any word changes: each word is mixed in by a multiplication that can be undone. Four lanes, so that
/// it keeps up with memory.
fn fingerprint(bytes: &[u8]) -> [u64; 4] {
    const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
    let length = bytes.len() as u64;
    let mut state = [length, !length, length.rotate_left(32), !length.rotate_left(32)];
    let (blocks, rest) = bytes.as_chunks::<32>();
    let mut last = [0u8; 32];
    last[..rest.len()].copy_from_slice(rest);
    for block in blocks.iter().chain([&last]) {
        for (lane, word) in state.iter_mut().zip(block.as_chunks::<8>().0) {
            *lane = (*lane ^ u64::from_le_bytes(*word)).wrapping_mul(ODD).rotate_left(29);
        }
    }
    state
}

fn ok(result: Option<shardcheck_engine::Validation>) -> Outcome {
    Outcome::Ok { effective: EffectivePath::new(), collectives: Vec::new(), result }
}

fn outcome<T>(answer: Result<Answer<T>, EngineError>, done: impl FnOnce(T) -> Outcome) -> Outcome {
    let error = |class, text, rank| Outcome::Error { class, text, rank };
    match answer {
        Ok(Answer::Done(value)) => done(value),
        Ok(Answer::Unsupported(reason)) => Outcome::Unsupported { reason },
        Err(EngineError::Timeout { rank, waiting_in, .. }) => error(ErrorClass::Timeout, waiting_in, rank),
        Err(EngineError::DeviceLost { text }) => error(ErrorClass::DeviceLost, text, None),
        Err(EngineError::Input(fault)) => error(ErrorClass::Input, fault.to_string(), None),
        Err(EngineError::Crash { text } | EngineError::Interrupted { text }) => {
            error(ErrorClass::Crash, text, None)
        }
    }
}

fn caught<T>(ask: impl FnOnce() -> Result<T, EngineError>) -> Result<T, EngineError> {
    catch_unwind(AssertUnwindSafe(ask)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "a panic without a text".to_owned());
        Err(EngineError::Crash { text })
    })
}

#[cfg(test)]
mod tests {
    use super::fingerprint;

    #[test]
    fn every_single_bit_that_changes_changes_the_fingerprint() {
        let bytes: Vec<u8> = (0..61).collect();
        let original = fingerprint(&bytes);
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(fingerprint(&changed), original, "bit {bit}");
        }
        assert_ne!(fingerprint(&bytes[..60]), original, "a byte less");
        let zeros = [fingerprint(&[0; 32]), fingerprint(&[0; 64]), fingerprint(&[])];
        assert!(zeros[0] != zeros[1] && zeros[0] != zeros[2], "zeros of another length");
    }
}
