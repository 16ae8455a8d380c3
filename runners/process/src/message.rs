//! Messages: the headers of frames as values, and tensors beside them.

use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use shardcheck_engine::archive::{self, ArchiveError, StridedViews};
use shardcheck_engine::{
    Configuration, EffectivePath, Operation, OperationKind, Profile, RuleSetName, Settings, Tensors,
    Validation,
};

use crate::frame::{Frame, FrameError};

/// Payloads up to this many bytes travel within the frame.
pub const INLINE_BYTES: usize = 1 << 20;
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
        operation: Operation,
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
    Tensors(#[from] ArchiveError),
    /// The file of the tensors.
    #[error("the file {name:?} of the shared folder can't be used: {reason}")]
    File {
        /// Name that was given.
        name: String,
        /// Why not.
        reason: String,
    },
}

/// The value of a header.
///
/// # Errors
/// [`MessageError::Header`] for what is no message of this protocol.
pub fn parse<'a, T: Deserialize<'a>>(frame: &'a Frame) -> Result<T, MessageError> {
    serde_json::from_slice(&frame.header).map_err(MessageError::Header)
}

/// The tensors of a message: those in the frame, or those in its file, which is removed.
///
/// # Errors
/// [`MessageError`].
pub fn tensors(frame: &Frame, attached: &Attached, folder: &Path) -> Result<Tensors, MessageError> {
    let Some(name) = &attached.file else {
        if frame.payload.is_empty() {
            return Ok(Tensors::new());
        }
        return Ok(archive::unpack(&frame.payload, &attached.strided)?);
    };
    let unfit = |reason: String| MessageError::File { name: name.clone(), reason };
    if !is_plain_name(name) {
        return Err(unfit("it must be a plain name".to_owned()));
    }
    let path = folder.join(name);
    let about = std::fs::symlink_metadata(&path).map_err(|error| unfit(error.to_string()))?;
    if !about.is_file() || about.len() > MAX_FILE_BYTES {
        return Err(unfit("it is no file, or a larger one than is read".to_owned()));
    }
    let file = std::fs::File::open(&path).map_err(|error| unfit(error.to_string()))?;
    // whoever has it open still reads it
    let _ = std::fs::remove_file(&path);
    Ok(archive::unpack_file(&file, &attached.strided)?)
}

/// Puts tensors where the reader of a message finds them: the payload of the frame, and the rest of the header.
///
/// # Errors
/// [`MessageError`].
pub fn attach(tensors: &Tensors, folder: &Path, name: &str) -> Result<(Vec<u8>, Attached), MessageError> {
    if tensors.is_empty() {
        return Ok((Vec::new(), Attached::default()));
    }
    let bytes: usize = tensors.iter().map(|(_, tensor)| tensor.bytes().len()).sum();
    if bytes <= INLINE_BYTES {
        let (payload, strided) = archive::pack(tensors.iter())?;
        return Ok((payload, Attached { file: None, strided }));
    }
    let strided = archive::pack_into(&folder.join(name), tensors.iter())?;
    Ok((Vec::new(), Attached { file: Some(name.to_owned()), strided }))
}

fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
}
