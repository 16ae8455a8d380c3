//! Adapters that misbehave, for tests of whoever supervises one: each must become the right verdict, with nothing lost.

use std::fmt;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use shardcheck_engine::{Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::CANNOT_RUN_HERE;
use crate::frame::MAGIC;
use crate::message::{ErrorClass, Hello, Outcome, Reply};
use crate::unwritten::pattern;

/// How an adapter misbehaves when it should reply with an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Misbehaviour {
    /// It exits with status 3.
    Exits,
    /// It is killed by a signal.
    IsKilled,
    /// It never replies.
    Hangs,
    /// It sends its reply a byte a second.
    Trickles,
    /// It prints a hundred megabytes to standard output and then replies.
    Floods,
    /// It prints to the socket.
    PrintsToTheSocket,
    /// Its frame ends too early.
    CutsTheFrame,
    /// It announces a header of two gigabytes.
    HugeHeader,
    /// Its header is no JSON.
    GarbledHeader,
    /// Its reply bears another number.
    WrongId,
    /// It replies twice.
    RepliesTwice,
    /// A while after its reply it says what would be the reply to the next question.
    RepliesEarly,
    /// It connects and ends without a word.
    LeavesAtOnce,
    /// It says that an input is now one of another shape.
    ReshapesAnInput,
    /// It ends with the status that says that it can't run here.
    CannotGoOn,
    /// Its output has another element type.
    WrongDtype,
    /// Its output has another shape.
    WrongShape,
    /// Its output is NaN everywhere.
    NanEverywhere,
    /// A part of its output is what the buffer held before.
    LeavesUnwritten,
    /// It returns a tensor that the operation does not have.
    UnknownTensor,
    /// It names a file outside the shared folder.
    EscapesTheFolder,
    /// It says that its device went away.
    LosesTheDevice,
    /// It answers the end of a session with an error.
    RefusesToClose,
    /// It speaks another protocol.
    OtherProtocol,
    /// It says hello with another start's token.
    OtherToken,
    /// Its contract would let anything pass.
    LooseContract,
    /// It declares an observable that an operation does not have.
    UnknownObservable,
}

impl Misbehaviour {
    /// All of them, in a stable order.
    pub const ALL: [Self; 27] = [
        Self::Exits,
        Self::IsKilled,
        Self::Hangs,
        Self::Trickles,
        Self::Floods,
        Self::PrintsToTheSocket,
        Self::CutsTheFrame,
        Self::HugeHeader,
        Self::GarbledHeader,
        Self::WrongId,
        Self::RepliesTwice,
        Self::RepliesEarly,
        Self::LeavesAtOnce,
        Self::ReshapesAnInput,
        Self::CannotGoOn,
        Self::WrongDtype,
        Self::WrongShape,
        Self::NanEverywhere,
        Self::LeavesUnwritten,
        Self::UnknownTensor,
        Self::EscapesTheFolder,
        Self::LosesTheDevice,
        Self::RefusesToClose,
        Self::OtherProtocol,
        Self::OtherToken,
        Self::LooseContract,
        Self::UnknownObservable,
    ];

    /// Name as it stands on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exits => "exits",
            Self::IsKilled => "is-killed",
            Self::Hangs => "hangs",
            Self::Trickles => "trickles",
            Self::Floods => "floods",
            Self::PrintsToTheSocket => "prints-to-the-socket",
            Self::CutsTheFrame => "cuts-the-frame",
            Self::HugeHeader => "huge-header",
            Self::GarbledHeader => "garbled-header",
            Self::WrongId => "wrong-id",
            Self::RepliesTwice => "replies-twice",
            Self::RepliesEarly => "replies-early",
            Self::LeavesAtOnce => "leaves-at-once",
            Self::ReshapesAnInput => "reshapes-an-input",
            Self::CannotGoOn => "cannot-go-on",
            Self::WrongDtype => "wrong-dtype",
            Self::WrongShape => "wrong-shape",
            Self::NanEverywhere => "nan-everywhere",
            Self::LeavesUnwritten => "leaves-unwritten",
            Self::UnknownTensor => "unknown-tensor",
            Self::EscapesTheFolder => "escapes-the-folder",
            Self::LosesTheDevice => "loses-the-device",
            Self::RefusesToClose => "refuses-to-close",
            Self::OtherProtocol => "other-protocol",
            Self::OtherToken => "other-token",
            Self::LooseContract => "loose-contract",
            Self::UnknownObservable => "unknown-observable",
        }
    }
}

impl fmt::Display for Misbehaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Misbehaviour {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            format!("unknown misbehaviour {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// One misbehaviour, once in the life of a run: a file tells a process that was started anew that it has been done.
#[derive(Debug)]
pub struct Strike {
    /// What.
    pub kind: Misbehaviour,
    /// Made when it is done; nothing is done where it exists already.
    pub mark: PathBuf,
}

impl Strike {
    /// Whether to misbehave in this reply: the first with an output of attention or of a merge.
    pub(crate) fn is_due(&self, outputs: &Tensors) -> bool {
        self.kind != Misbehaviour::RefusesToClose && outputs.find("out").is_some() && self.leaves_its_mark()
    }

    /// Whether to misbehave at the end of a session.
    pub(crate) fn is_due_at_the_end(&self) -> bool {
        self.kind == Misbehaviour::RefusesToClose && self.leaves_its_mark()
    }

    fn leaves_its_mark(&self) -> bool {
        !self.mark.exists() && std::fs::write(&self.mark, "").is_ok()
    }

    pub(crate) fn on_hello(&mut self, hello: &mut Hello) {
        match self.kind {
            Misbehaviour::LeavesAtOnce => process::exit(4),
            Misbehaviour::OtherProtocol => hello.protocol = [7, 9],
            Misbehaviour::OtherToken => hello.token = "0".repeat(hello.token.len()),
            Misbehaviour::UnknownObservable => {
                for operation in hello.profile.operations.values_mut() {
                    operation.observables.push("partial_output".to_owned());
                }
            }
            Misbehaviour::LooseContract => {
                for operation in hello.profile.operations.values_mut() {
                    operation.contract.iter_mut().for_each(|contract| contract.u_acc = 0.1);
                }
            }
            _ => {}
        }
    }

    /// What is done instead of a reply, or to its tensors.
    pub(crate) fn before_reply(
        &mut self,
        id: u64,
        outputs: &mut Tensors,
        stream: &mut UnixStream,
        folder: &Path,
    ) {
        let frame = |header: &[u8], announced: u32| {
            [&MAGIC[..], &announced.to_le_bytes(), &0u64.to_le_bytes(), header].concat()
        };
        match self.kind {
            Misbehaviour::Exits => process::exit(3),
            Misbehaviour::CannotGoOn => process::exit(CANNOT_RUN_HERE),
            Misbehaviour::ReshapesAnInput => outputs.insert("input_after.q", Tensor::from_i32(&[1], &[0])),
            Misbehaviour::IsKilled => drop(kill_process(getpid(), Signal::KILL)),
            Misbehaviour::Hangs => wait_for_ever(),
            Misbehaviour::Trickles => {
                let header = format!("{{\"type\":\"reply\",\"id\":{id},\"status\":\"ok\"}}");
                for byte in frame(header.as_bytes(), header.len() as u32) {
                    send(stream, &[byte]);
                    thread::sleep(Duration::from_secs(1));
                }
            }
            Misbehaviour::Floods => {
                let line = [b'x'; 1 << 16];
                let mut stdout = std::io::stdout().lock();
                (0..1600).for_each(|_| drop(stdout.write_all(&line)));
            }
            Misbehaviour::PrintsToTheSocket => send(stream, b"Loading checkpoint shards: 100%\n"),
            Misbehaviour::CutsTheFrame => {
                send(stream, &frame(b"{\"type\":", 400));
                process::exit(0);
            }
            Misbehaviour::HugeHeader => {
                send(stream, &frame(b"{}", 1 << 31));
                wait_for_ever();
            }
            Misbehaviour::GarbledHeader => send(stream, &frame(b"[1, 2,", 6)),
            Misbehaviour::EscapesTheFolder => {
                drop(std::fs::write(folder.join("../shardcheck-outside"), b"outside"));
            }
            Misbehaviour::UnknownTensor => outputs.insert("output", Tensor::from_i32(&[1], &[0])),
            Misbehaviour::WrongDtype
            | Misbehaviour::WrongShape
            | Misbehaviour::NanEverywhere
            | Misbehaviour::LeavesUnwritten => {
                if let Some(out) = outputs.remove("out") {
                    outputs.insert("out", self.spoilt(&out));
                }
            }
            _ => {}
        }
    }

    pub(crate) fn on_reply(&mut self, reply: &mut Reply) {
        match self.kind {
            Misbehaviour::WrongId => reply.id += 1,
            Misbehaviour::EscapesTheFolder => {
                reply.attached.file = Some("../shardcheck-outside".to_owned());
            }
            Misbehaviour::LosesTheDevice => {
                let text = "the device fell off the bus".to_owned();
                reply.outcome = Outcome::Error { class: ErrorClass::DeviceLost, text, rank: None };
            }
            _ => {}
        }
    }

    /// What is said after a reply, and how long after it.
    pub(crate) fn another(&self, reply: &Reply) -> Option<(Duration, Reply)> {
        match self.kind {
            Misbehaviour::RepliesTwice => Some((Duration::ZERO, reply.clone())),
            // the harness has read the answer and looked for more by then
            Misbehaviour::RepliesEarly => {
                Some((Duration::from_millis(100), Reply { id: reply.id + 1, ..reply.clone() }))
            }
            _ => None,
        }
    }

    fn spoilt(&self, out: &Tensor) -> Tensor {
        let (dtype, shape, mut codes) = (out.dtype(), out.shape().to_vec(), out.to_codes());
        match self.kind {
            Misbehaviour::WrongDtype => Tensor::from_codes(Dtype::F64, &shape, &codes),
            Misbehaviour::WrongShape => Tensor::from_codes(dtype, &[codes.len(), 1], &codes),
            Misbehaviour::NanEverywhere => Tensor::from_f32(dtype, &shape, &vec![f32::NAN; codes.len()]),
            _ => {
                let unwritten = pattern(dtype).unwrap_or_default();
                codes.iter_mut().skip(1).step_by(3).for_each(|code| *code = unwritten);
                Tensor::from_codes(dtype, &shape, &codes)
            }
        }
    }
}

fn send(stream: &mut UnixStream, bytes: &[u8]) {
    // the harness may have left already, which is its right
    let _ = stream.write_all(bytes).and_then(|()| stream.flush());
}

fn wait_for_ever() -> ! {
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}
