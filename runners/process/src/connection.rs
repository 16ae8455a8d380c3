//! The connection to one running command: the handshake, and one question at a time.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use shardcheck_engine::{Profile, Tensors};

use crate::child::{Child, in_words};
use crate::engine::StartError;
use crate::frame::{self, Frame, FrameError};
use crate::message::{self, MessageError, Question, Reply, Said};
use crate::{CANNOT_RUN_HERE, PROTOCOL};

/// A connection on which a hello was accepted.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    next_id: u64,
}

/// Why a question has no answer. The connection can't be used after any of them.
#[derive(Debug)]
pub enum AskError {
    /// No answer in time.
    TimedOut,
    /// The connection was closed.
    Closed,
    /// What came is no answer, in words.
    Violation(String),
    /// The inputs could not be sent.
    Unsendable(String),
}

impl From<MessageError> for AskError {
    fn from(error: MessageError) -> Self {
        match error {
            MessageError::Frame(FrameError::TimedOut) => Self::TimedOut,
            MessageError::Frame(FrameError::Closed | FrameError::Broken(_)) => Self::Closed,
            other => Self::Violation(other.to_string()),
        }
    }
}

impl From<FrameError> for AskError {
    fn from(error: FrameError) -> Self {
        MessageError::from(error).into()
    }
}

impl Connection {
    /// Waits for the command to connect and to say hello, and answers it.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn establish(
        listener: &UnixListener,
        child: &mut Child,
        patience: Duration,
    ) -> Result<(Self, Profile), StartError> {
        let until = Instant::now() + patience;
        listener.set_nonblocking(true).map_err(StartError::System)?;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(StartError::System)?;
                    let mut connection = Self { stream, next_id: 1 };
                    if let Some(profile) = connection.greet(child, until)? {
                        return Ok((connection, profile));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    thread::sleep(Duration::from_millis(2))
                }
                Err(error) => return Err(StartError::System(error)),
            }
            if let Some(status) = child.ended() {
                return Err(match status.code() {
                    Some(CANNOT_RUN_HERE) => StartError::CannotRunHere { said: String::new() },
                    _ => StartError::Ended { how: in_words(status), said: String::new() },
                });
            }
            if Instant::now() >= until {
                let waited_s = patience.as_secs_f64();
                return Err(StartError::Silent { waited_s, said: String::new() });
            }
        }
    }

    /// `None` for a peer that is not the one that was started.
    fn greet(&mut self, child: &Child, until: Instant) -> Result<Option<Profile>, StartError> {
        let hello = frame::read(&mut Timed { stream: &self.stream, until })
            .map_err(MessageError::from)
            .and_then(|frame| message::parse::<Said>(&frame));
        let refuse = |connection: &mut Self, reason: String| {
            // the peer is told if it listens; the verdict does not depend on it
            let _ = connection.send(&Question::Refused { reason: reason.clone() }, &[], until);
            StartError::Refused { reason }
        };
        match hello {
            Err(error) => Err(refuse(self, format!("its hello is not understood: {error}"))),
            Ok(Said::Reply(_)) => Err(refuse(self, "its first message is no hello".to_owned())),
            Ok(Said::Hello(hello)) if hello.token != child.token => {
                refuse(self, "this is another start's token".to_owned());
                Ok(None)
            }
            Ok(Said::Hello(hello)) if !(hello.protocol[0]..=hello.protocol[1]).contains(&PROTOCOL) => {
                let [lowest, highest] = hello.protocol;
                let reason = format!("it speaks protocol {lowest} to {highest}, this program {PROTOCOL}");
                Err(refuse(self, reason))
            }
            Ok(Said::Hello(hello)) => {
                if let Err(why) = hello.profile.check() {
                    return Err(refuse(self, format!("its profile is refused: {why}")));
                }
                self.send(&Question::Welcome { protocol: PROTOCOL }, &[], until)
                    .map_err(|_| StartError::Refused { reason: "it left after its hello".to_owned() })?;
                Ok(Some(*hello.profile))
            }
        }
    }

    /// The number of the next question.
    pub fn number(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    /// Asks the question of number `id`, and waits for its answer.
    ///
    /// # Errors
    /// [`AskError`].
    pub fn ask(
        &mut self,
        id: u64,
        question: &Question,
        payload: &[u8],
        child: &Child,
        patience: Duration,
    ) -> Result<(Reply, Tensors), AskError> {
        let until = Instant::now() + patience;
        self.send(question, payload, until)?;
        let frame: Frame = frame::read(&mut Timed { stream: &self.stream, until })?;
        let reply = match message::parse::<Said>(&frame)? {
            Said::Reply(reply) => *reply,
            Said::Hello(_) => return Err(AskError::Violation("it said hello a second time".to_owned())),
        };
        if reply.id != id {
            let text = format!("its reply bears number {}, the question had {id}", reply.id);
            return Err(AskError::Violation(text));
        }
        if !reply.attached.strided.is_empty() {
            // a view may repeat one element a billion times: cheap to say, dear to look at
            return Err(AskError::Violation(
                "outputs must be contiguous, strided views are not taken".to_owned(),
            ));
        }
        let tensors = message::tensors(&frame, &reply.attached, child.folder())?;
        if self.pending() == Pending::Something {
            return Err(AskError::Violation(format!("it replied to question {id} more than once")));
        }
        Ok((reply, tensors))
    }

    /// Says that the run is over.
    pub fn bye(&mut self) {
        // who is gone already needs no farewell
        let _ = self.send(&Question::Bye, &[], Instant::now() + Duration::from_secs(1));
    }

    /// Whether something came that nobody asked for.
    pub fn pending(&self) -> Pending {
        if self.stream.set_nonblocking(true).is_err() {
            return Pending::End;
        }
        let found = (&self.stream).read(&mut [0u8; 1]);
        let restored = self.stream.set_nonblocking(false);
        match found {
            Ok(0) => Pending::End,
            Ok(_) => Pending::Something,
            Err(error) if error.kind() == ErrorKind::WouldBlock && restored.is_ok() => Pending::Nothing,
            Err(_) => Pending::End,
        }
    }

    fn send(&mut self, message: &impl Serialize, payload: &[u8], until: Instant) -> Result<(), AskError> {
        let header = serde_json::to_vec(message).map_err(|error| AskError::Unsendable(error.to_string()))?;
        Ok(frame::write(&mut Timed { stream: &self.stream, until }, &header, payload)?)
    }
}

/// What lies in a connection between two questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pending {
    /// Nothing, as it should be.
    Nothing,
    /// An answer without a question.
    Something,
    /// The end of the connection.
    End,
}

/// A stream of which every read and write ends at one time, however little comes at once.
struct Timed<'a> {
    stream: &'a UnixStream,
    until: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        (&mut &*self.stream).read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        (&mut &*self.stream).write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        (&mut &*self.stream).flush()
    }
}
