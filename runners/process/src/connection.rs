//! The connection to one running command: the handshake, and one question at a time.

use std::collections::VecDeque;
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, recv, sockopt};
use serde::Serialize;
use shardcheck_engine::{Profile, Tensors};

use crate::child::{Child, in_words};
use crate::eager::read_soon;
use crate::engine::StartError;
use crate::frame::{self, FrameError, MAX_INLINE_BYTES};
use crate::log::legible;
use crate::message::{self, INLINE_BYTES, MessageError, Outcome, Parcel, Question, Reply, Said};
use crate::{CANNOT_RUN_HERE, PROTOCOL};

/// Bytes that are read ahead: a small reply costs one call of the system.
const READ_AHEAD_BYTES: usize = 64 << 10;
/// What the socket takes before a writer waits: a large tensor is then read while it is written.
const SOCKET_BYTES: usize = 4 << 20;

/// A connection on which a hello was accepted.
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<Timed>,
    next_id: u64,
    /// Questions that go out with the next one that is waited for: the peer is woken once.
    held: Vec<u8>,
    /// Questions whose answers nobody waits for.
    owed: VecDeque<Owed>,
    /// Answers to those that open sessions which were not `ok`.
    refusals: Vec<Reply>,
    /// Largest payload that the peer likes in a frame.
    inline_bytes: u64,
}

/// A question whose answer nobody waits for.
#[derive(Debug, Clone, Copy)]
struct Owed {
    id: u64,
    /// Whether it closes a session: nothing depends on its answer then, and a session that can't be closed is a fault.
    closes: bool,
}

/// What came of a peer that connected.
enum Greeting {
    /// It is the one that was started.
    Welcomed(Box<Profile>),
    /// It is another one.
    Stranger,
    /// It left without a word.
    Silent,
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
        let mut turned_away = "";
        listener.set_nonblocking(true).map_err(StartError::System)?;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(StartError::System)?;
                    let mut connection = Self::over(stream);
                    match connection.greet(child, until)? {
                        Greeting::Welcomed(profile) => return Ok((connection, *profile)),
                        Greeting::Stranger => {
                            turned_away = "; a peer with another start's token was turned away"
                        }
                        Greeting::Silent => {}
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
                    _ => StartError::Ended { how: in_words(status), said: String::new(), turned_away },
                });
            }
            if Instant::now() >= until {
                let waited_s = patience.as_secs_f64();
                return Err(StartError::Silent { waited_s, said: String::new(), turned_away });
            }
        }
    }

    fn over(stream: UnixStream) -> Self {
        // a system that grants less is slower with large tensors, no more
        let _ = sockopt::set_socket_send_buffer_size(&stream, SOCKET_BYTES);
        let timed = Timed { stream, until: Instant::now(), armed: [Duration::ZERO; 2] };
        let stream = BufReader::with_capacity(READ_AHEAD_BYTES, timed);
        Self {
            stream,
            next_id: 1,
            held: Vec::new(),
            owed: VecDeque::new(),
            refusals: Vec::new(),
            inline_bytes: INLINE_BYTES,
        }
    }

    fn greet(&mut self, child: &Child, until: Instant) -> Result<Greeting, StartError> {
        self.stream.get_mut().until = until;
        let hello = frame::read_head(&mut self.stream)
            .map_err(MessageError::from)
            .and_then(|head| message::parse::<Said>(&head));
        let refuse = |connection: &mut Self, reason: String| {
            // the peer is told if it listens; the verdict does not depend on it
            let _ = connection.send(&Question::Refused { reason: reason.clone() }, &Parcel::empty(), until);
            StartError::Refused { reason }
        };
        match hello {
            // how its process ended says more, and so does the time that passes without a hello
            Err(MessageError::Frame(FrameError::Closed)) => Ok(Greeting::Silent),
            Err(error) => Err(refuse(self, format!("its hello is not understood: {error}"))),
            Ok(Said::Reply(_)) => Err(refuse(self, "its first message is no hello".to_owned())),
            Ok(Said::Hello(hello)) if hello.token != child.token => {
                refuse(self, "this is another start's token".to_owned());
                Ok(Greeting::Stranger)
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
                self.inline_bytes = hello.inline_bytes.min(MAX_INLINE_BYTES);
                let welcome = Question::Welcome { protocol: PROTOCOL, inline_bytes: MAX_INLINE_BYTES };
                // the first question meets one that left after its hello, however soon it did
                let _ = self.send(&welcome, &Parcel::empty(), until);
                Ok(Greeting::Welcomed(hello.profile))
            }
        }
    }

    /// The number of the next question.
    pub fn number(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    /// Largest payload that the peer likes in a frame.
    pub fn inline_bytes(&self) -> u64 {
        self.inline_bytes
    }

    /// Asks the question of number `id`, and waits for its answer.
    ///
    /// # Errors
    /// [`AskError`].
    pub fn ask(
        &mut self,
        id: u64,
        question: &Question,
        parcel: &Parcel<'_>,
        child: &Child,
        patience: Duration,
    ) -> Result<(Reply, Tensors), AskError> {
        if self.unasked() == Pending::Something {
            return Err(AskError::Violation("it said something before it was asked".to_owned()));
        }
        self.send(question, parcel, Instant::now() + patience)?;
        while !self.owed.is_empty() {
            self.reply_owed(child)?;
        }
        let answer = self.reply_to(id, child)?;
        if self.unasked() == Pending::Something {
            return Err(AskError::Violation(format!("it replied to question {id} more than once")));
        }
        Ok(answer)
    }

    /// Asks the question of number `id` together with the next one that is waited for, and reads its answer before that one's.
    ///
    /// # Errors
    /// [`AskError::Unsendable`].
    pub fn tell(&mut self, id: u64, question: &Question) -> Result<(), AskError> {
        frame::write(&mut self.held, &header_of(question)?, &[])?;
        self.owed.push_back(Owed { id, closes: matches!(question, Question::Close { .. }) });
        Ok(())
    }

    /// The answer to a question that nobody waited for, if it has come and was not `ok`.
    pub fn refusal(&mut self, id: u64) -> Option<Reply> {
        let at = self.refusals.iter().position(|reply| reply.id == id)?;
        Some(self.refusals.swap_remove(at))
    }

    fn reply_owed(&mut self, child: &Child) -> Result<(), AskError> {
        let Some(owed) = self.owed.pop_front() else { return Ok(()) };
        let (reply, _) = self.reply_to(owed.id, child)?;
        match &reply.outcome {
            Outcome::Ok { .. } => Ok(()),
            Outcome::Error { text: why, .. } | Outcome::Unsupported { reason: why } if owed.closes => {
                let text = format!("it could not close the session before: {}", legible(why));
                Err(AskError::Violation(text))
            }
            _ => {
                self.refusals.push(reply);
                Ok(())
            }
        }
    }

    fn reply_to(&mut self, id: u64, child: &Child) -> Result<(Reply, Tensors), AskError> {
        let head = frame::read_head(&mut self.stream)?;
        let reply = match message::parse::<Said>(&head)? {
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
        let tensors = message::tensors(&mut self.stream, &head, &reply.attached, child.folder())?;
        Ok((reply, tensors))
    }

    /// Says that the run is over.
    pub fn bye(&mut self) {
        // who is gone already needs no farewell
        let _ = self.send(&Question::Bye, &Parcel::empty(), Instant::now() + Duration::from_secs(1));
    }

    /// What came that nobody asked for.
    pub fn unasked(&self) -> Pending {
        if !self.stream.buffer().is_empty() {
            return Pending::Something;
        }
        match recv(&self.stream.get_ref().stream, &mut [0u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 1..)) => Pending::Something,
            Err(rustix::io::Errno::AGAIN) => Pending::Nothing,
            Ok(_) | Err(_) => Pending::End,
        }
    }

    fn send(
        &mut self,
        message: &impl Serialize,
        parcel: &Parcel<'_>,
        until: Instant,
    ) -> Result<(), AskError> {
        let stream = self.stream.get_mut();
        stream.until = until;
        let held = std::mem::take(&mut self.held);
        Ok(frame::write_behind(stream, held, &header_of(message)?, &parcel.pieces())?)
    }
}

fn header_of(message: &impl Serialize) -> Result<Vec<u8>, AskError> {
    serde_json::to_vec(message).map_err(|error| AskError::Unsendable(error.to_string()))
}

/// What lies in a connection between two questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pending {
    /// Nothing, as it should be.
    Nothing,
    /// An answer that was not read.
    Something,
    /// The end of the connection.
    End,
}

/// A stream of which every read and write ends at one time, however little comes at once.
#[derive(Debug)]
struct Timed {
    stream: UnixStream,
    until: Instant,
    /// What the system was last told of reading and of writing.
    armed: [Duration; 2],
}

/// Which of the two limits of a socket.
#[derive(Debug, Clone, Copy)]
enum Limit {
    Reading,
    Writing,
}

impl Timed {
    /// Sets the socket's limit to the time that is left, unless it is that to a tenth already.
    fn arm(&mut self, limit: Limit) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        let armed = &mut self.armed[limit as usize];
        if left <= *armed && left >= armed.mul_f64(0.9) {
            return Ok(());
        }
        match limit {
            Limit::Reading => self.stream.set_read_timeout(Some(left))?,
            Limit::Writing => self.stream.set_write_timeout(Some(left))?,
        }
        *armed = left;
        Ok(())
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if Instant::now() >= self.until {
            return Err(ErrorKind::TimedOut.into());
        }
        if let Some(read) = read_soon(&self.stream, buffer) {
            return read;
        }
        self.arm(Limit::Reading)?;
        self.stream.read(buffer)
    }
}

impl Write for Timed {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.arm(Limit::Writing)?;
        self.stream.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
