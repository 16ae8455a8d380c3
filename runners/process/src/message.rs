//! Messages: the headers of frames as values, and tensors beside them.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use shardcheck_engine::archive::{self, ArchiveError, Image, StridedViews};
use shardcheck_engine::{
    Configuration, EffectivePath, Operation, OperationKind, Profile, RuleSetName, Settings, Tensors,
    Validation,
};

use crate::frame::{FrameError, Head};

/// Payloads up to this many bytes travel within the frame to a peer that does not say what it likes.
pub const INLINE_BYTES: u64 = 1 << 20;
/// Largest file that is read as a payload.
pub const MAX_FILE_BYTES: u64 = 64 << 30;

/// Where the tensors of a message are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Plain name of a file in the shared folder that holds the payload; the reader removes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// What the payload does not say about strided views.
    #[serde(default, skip_serializing_if = "StridedViews::is_empty")]
    pub strided: StridedViews,
}

/// A message of the harness.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Question {
    /// The answer to a hello that is accepted.
    Welcome {
        /// Version that both sides speak from now on.
        protocol: u32,
        /// Largest payload that the harness likes in a frame.
        #[serde(default = "inline_bytes", skip_serializing_if = "is_default")]
        inline_bytes: u64,
    },
    /// The answer to a hello that is not.
    Refused {
        /// Why.
        reason: String,
    },
    /// What do your configuration rules say?
    Validate {
        /// Number of the question.
        id: u64,
        /// Whose rules.
        rules: RuleSetName,
        /// Launch settings.
        settings: Settings,
    },
    /// Make a session.
    Open {
        /// Number of the question.
        id: u64,
        /// Name of the session from now on.
        session: u64,
        /// What it is opened with.
        configuration: Box<Configuration>,
    },
    /// Perform one operation.
    Step {
        /// Number of the question.
        id: u64,
        /// Session.
        session: u64,
        /// What to do.
        operation: Box<Operation>,
        /// Its name in the profile.
        kind: OperationKind,
        /// Where the inputs are.
        #[serde(flatten)]
        attached: Attached,
    },
    /// The session is no longer needed.
    Close {
        /// Number of the question.
        id: u64,
        /// Session.
        session: u64,
    },
    /// The run is over.
    Bye,
}

/// A message of an adapter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Said {
    /// The first message.
    Hello(Hello),
    /// The answer to one question.
    Reply(Box<Reply>),
}

/// What an adapter says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// The word of `SHARDCHECK_TOKEN`.
    pub token: String,
    /// Lowest and highest version of the protocol that the adapter speaks.
    pub protocol: [u32; 2],
    /// What the adapter is written with.
    #[serde(default)]
    pub sdk: String,
    /// Largest payload that it likes in a frame; a larger one comes as a file.
    #[serde(default = "inline_bytes", skip_serializing_if = "is_default")]
    pub inline_bytes: u64,
    /// What the engine declares.
    pub profile: Box<Profile>,
}

/// The answer to one question.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// Number of the question.
    pub id: u64,
    /// How it went.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Where the outputs are.
    #[serde(flatten)]
    pub attached: Attached,
}

/// How a question went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Outcome {
    /// It was done.
    Ok {
        /// What really ran (steps).
        #[serde(default)]
        effective: EffectivePath,
        /// Collectives that each rank entered (steps).
        #[serde(default)]
        collectives: Vec<u64>,
        /// What the rules say (validate).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        result: Option<Validation>,
    },
    /// The engine does not do that.
    Unsupported {
        /// Why.
        reason: String,
    },
    /// The engine failed.
    Error {
        /// How.
        class: ErrorClass,
        /// What it said.
        #[serde(default)]
        text: String,
        /// The rank that waits (timeout).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rank: Option<usize>,
    },
}

fn inline_bytes() -> u64 {
    INLINE_BYTES
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_default(bytes: &u64) -> bool {
    *bytes == INLINE_BYTES
}

/// How an engine failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// An exception, an assertion, an error of its own.
    Crash,
    /// Ranks waited for each other too long.
    Timeout,
    /// The device went away.
    DeviceLost,
    /// The inputs do not fit.
    Input,
}

/// A message that can't be understood, sent or found.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// The frame.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// The header.
    #[error("the header is not understood: {0}")]
    Header(serde_json::Error),
    /// The tensors.
    #[error("{0}")]
    Tensors(ArchiveError),
    /// The file of the tensors.
    #[error("the file {name:?} of the shared folder can't be used: {reason}")]
    File {
        /// Name that was given.
        name: String,
        /// Why not.
        reason: String,
    },
}

impl From<ArchiveError> for MessageError {
    fn from(error: ArchiveError) -> Self {
        match error {
            ArchiveError::Stream(error) => Self::Frame(error.into()),
            damaged => Self::Tensors(damaged),
        }
    }
}

/// The value of a header.
///
/// # Errors
/// [`MessageError::Header`] for what is no message of this protocol.
pub fn parse<'a, T: Deserialize<'a>>(head: &'a Head) -> Result<T, MessageError> {
    serde_json::from_slice(&head.header).map_err(MessageError::Header)
}

/// The tensors of a message: those that follow its head in the stream, or those in its file, which is removed.
///
/// # Errors
/// [`MessageError`]; the stream can't be read further then.
pub fn tensors(
    stream: &mut impl Read,
    head: &Head,
    attached: &Attached,
    folder: &Path,
) -> Result<Tensors, MessageError> {
    let Some(name) = &attached.file else {
        return following(stream, head.payload_bytes, &attached.strided);
    };
    let unfit = |reason: String| MessageError::File { name: name.clone(), reason };
    if !is_plain_name(name) {
        return Err(unfit("it must be a plain name".to_owned()));
    }
    if head.payload_bytes > 0 {
        return Err(unfit("the frame has a payload of its own".to_owned()));
    }
    let path = folder.join(name);
    let about = std::fs::symlink_metadata(&path).map_err(|error| unfit(error.to_string()))?;
    if !about.is_file() || about.len() > MAX_FILE_BYTES {
        return Err(unfit("it is no file, or a larger one than is read".to_owned()));
    }
    let mut file = File::open(&path).map_err(|error| unfit(error.to_string()))?;
    // whoever has it open still reads it
    let _ = std::fs::remove_file(&path);
    archive::read(&mut file, about.len(), &attached.strided).map_err(|error| match error {
        ArchiveError::Stream(error) => unfit(error.to_string()),
        damaged => damaged.into(),
    })
}

fn following(
    stream: &mut impl Read,
    payload_bytes: u64,
    strided: &StridedViews,
) -> Result<Tensors, MessageError> {
    if payload_bytes == 0 {
        return Ok(Tensors::new());
    }
    let mut payload = stream.take(payload_bytes);
    archive::read(&mut payload, payload_bytes, strided).map_err(|error| match error {
        ArchiveError::Stream(cut) if cut.kind() == ErrorKind::UnexpectedEof => {
            let found = (payload_bytes - payload.limit()) as usize;
            FrameError::Truncated { part: "payload", found, wanted: payload_bytes as usize }.into()
        }
        other => other.into(),
    })
}

/// Where the tensors of a message go: into the payload of its frame, or into a file of the shared folder.
#[derive(Debug)]
pub struct Parcel<'a> {
    image: Option<Image<'a>>,
    /// The rest of the header.
    pub attached: Attached,
}

impl<'a> Parcel<'a> {
    /// Of no tensors.
    pub fn empty() -> Self {
        Self { image: None, attached: Attached::default() }
    }

    /// Of `tensors`: up to `inline_bytes` in the frame, otherwise in the file `name` of `folder`, which is written here.
    ///
    /// # Errors
    /// [`MessageError`] when safetensors refuses a tensor or the file can't be written.
    pub fn of(
        tensors: &'a Tensors,
        folder: &Path,
        name: &str,
        inline_bytes: u64,
    ) -> Result<Self, MessageError> {
        if tensors.is_empty() {
            return Ok(Self::empty());
        }
        let mut image = Image::of(tensors.iter())?;
        let strided = std::mem::take(&mut image.strided);
        if image.len() as u64 <= inline_bytes {
            return Ok(Self { image: Some(image), attached: Attached { file: None, strided } });
        }
        let written = File::create(folder.join(name)).and_then(|file| {
            let mut file = BufWriter::new(file);
            image.write_to(&mut file)?;
            file.flush()
        });
        let unfit = |reason: String| MessageError::File { name: name.to_owned(), reason };
        written.map_err(|error| unfit(error.to_string()))?;
        Ok(Self { image: None, attached: Attached { file: Some(name.to_owned()), strided } })
    }

    /// The payload of the frame.
    pub fn pieces(&self) -> Vec<&[u8]> {
        self.image.iter().flat_map(Image::pieces).collect()
    }
}

fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
}
