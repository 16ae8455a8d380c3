//! Frames: what goes over the socket in one piece, and the limits that keep a hostile peer from costing more than a message.

use std::io::{ErrorKind, Read, Write};

/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"SCK1";
/// Bytes before the header.
pub const PREFIX_BYTES: usize = 16;
/// Longest header.
pub const MAX_HEADER_BYTES: usize = 16 << 20;
/// Longest payload within a frame; a larger one travels as a file.
pub const MAX_INLINE_BYTES: u64 = 4 << 30;
/// What is written in one piece: a small message costs one call of the system.
const GATHERED_BYTES: usize = 64 << 10;

/// A frame as far as it was read: its payload is still to come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// JSON text.
    pub header: Vec<u8>,
    /// Length of the image of a safetensors file that follows, or 0.
    pub payload_bytes: u64,
}

/// Why no frame could be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer closed the connection between two frames.
    #[error("the connection was closed")]
    Closed,
    /// The time for it is over.
    #[error("no answer in time")]
    TimedOut,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Broken(std::io::Error),
    /// The connection was closed within a frame.
    #[error("the frame was cut off after {found} of {wanted} bytes of its {part}")]
    Truncated {
        /// `prefix`, `header` or `payload`.
        part: &'static str,
        /// Bytes that came.
        found: usize,
        /// Bytes that were announced.
        wanted: usize,
    },
    /// What came is no frame.
    #[error(
        "this is no frame of the protocol: it starts with {found:?}; print to standard output, not to the socket"
    )]
    Magic {
        /// First bytes.
        found: [u8; 4],
    },
    /// A length that is not accepted.
    #[error("a {part} of {found} bytes is not accepted, at most {limit} are{hint}")]
    TooLong {
        /// `header` or `payload`.
        part: &'static str,
        /// Bytes announced.
        found: u64,
        /// Bytes accepted.
        limit: u64,
        /// What to do instead.
        hint: &'static str,
    },
}

impl From<std::io::Error> for FrameError {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::TimedOut,
            _ => Self::Broken(error),
        }
    }
}

/// Reads a frame up to its payload. No more memory is taken than bytes have come.
///
/// # Errors
/// [`FrameError`]; after any of them the stream can't be read further.
pub fn read_head(stream: &mut impl Read) -> Result<Head, FrameError> {
    let mut prefix = [0u8; PREFIX_BYTES];
    let found = fill(stream, &mut prefix)?;
    if found == 0 {
        return Err(FrameError::Closed);
    }
    if found >= MAGIC.len() && prefix[..4] != MAGIC {
        return Err(FrameError::Magic { found: [prefix[0], prefix[1], prefix[2], prefix[3]] });
    }
    if found < PREFIX_BYTES {
        return Err(FrameError::Truncated { part: "prefix", found, wanted: PREFIX_BYTES });
    }
    let header_bytes = u32::from_le_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]) as usize;
    let mut word = [0u8; 8];
    word.copy_from_slice(&prefix[8..16]);
    let payload_bytes = u64::from_le_bytes(word);
    if header_bytes > MAX_HEADER_BYTES {
        let (found, limit) = (header_bytes as u64, MAX_HEADER_BYTES as u64);
        return Err(FrameError::TooLong { part: "header", found, limit, hint: "" });
    }
    if payload_bytes > MAX_INLINE_BYTES {
        let hint = ": put it into a file of the shared folder and name that in `file`";
        return Err(FrameError::TooLong {
            part: "payload",
            found: payload_bytes,
            limit: MAX_INLINE_BYTES,
            hint,
        });
    }
    let header = take(stream, "header", header_bytes)?;
    Ok(Head { header, payload_bytes })
}

/// Writes one frame, whose payload may lie in several pieces; a writer that buffers is not flushed.
///
/// # Errors
/// [`FrameError`].
pub fn write(stream: &mut impl Write, header: &[u8], payload: &[&[u8]]) -> Result<(), FrameError> {
    write_behind(stream, Vec::new(), header, payload)
}

/// As [`write`], behind frames that were not sent yet.
///
/// # Errors
/// [`FrameError`].
pub(crate) fn write_behind(
    stream: &mut impl Write,
    mut gathered: Vec<u8>,
    header: &[u8],
    payload: &[&[u8]],
) -> Result<(), FrameError> {
    let payload_bytes: usize = payload.iter().map(|piece| piece.len()).sum();
    gathered.reserve(PREFIX_BYTES + header.len() + payload_bytes.min(GATHERED_BYTES));
    gathered.extend_from_slice(&MAGIC);
    gathered.extend_from_slice(&(header.len() as u32).to_le_bytes());
    gathered.extend_from_slice(&(payload_bytes as u64).to_le_bytes());
    gathered.extend_from_slice(header);
    for piece in payload {
        if gathered.len() + piece.len() > GATHERED_BYTES {
            stream.write_all(&gathered)?;
            gathered.clear();
        }
        if piece.len() > GATHERED_BYTES {
            stream.write_all(piece)?;
        } else {
            gathered.extend_from_slice(piece);
        }
    }
    stream.write_all(&gathered)?;
    Ok(())
}

/// Reads until `buffer` is full or the stream ends.
fn fill(stream: &mut impl Read, buffer: &mut [u8]) -> Result<usize, FrameError> {
    let mut found = 0;
    while found < buffer.len() {
        match stream.read(&mut buffer[found..]) {
            Ok(0) => break,
            Ok(count) => found += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(found)
}

fn take(stream: &mut impl Read, part: &'static str, wanted: usize) -> Result<Vec<u8>, FrameError> {
    // a length that is only announced costs nothing: the buffer grows with what comes
    let mut bytes = Vec::with_capacity(wanted.min(1 << 20));
    stream.take(wanted as u64).read_to_end(&mut bytes)?;
    if bytes.len() < wanted {
        return Err(FrameError::Truncated { part, found: bytes.len(), wanted });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framed(header: &[u8], payload: &[&[u8]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, header, payload).unwrap();
        bytes
    }

    #[test]
    fn a_frame_comes_back_as_it_went_and_the_next_one_behind_it() {
        let mut bytes = framed(b"{}", &[&[1, 2], &[], &[3]]);
        bytes.extend(framed(b"{\"a\":1}", &[]));
        let mut stream = bytes.as_slice();
        assert_eq!(read_head(&mut stream).unwrap(), Head { header: b"{}".to_vec(), payload_bytes: 3 });
        assert_eq!(take(&mut stream, "payload", 3).unwrap(), [1, 2, 3]);
        assert_eq!(read_head(&mut stream).unwrap().header, b"{\"a\":1}");
        assert!(matches!(read_head(&mut stream), Err(FrameError::Closed)));
    }

    #[test]
    fn pieces_of_every_size_are_written_in_order() {
        let content: Vec<u8> = (0..3 * GATHERED_BYTES).map(|index| (index % 253) as u8).collect();
        for cut in [1, 100, GATHERED_BYTES - 30, GATHERED_BYTES, GATHERED_BYTES + 1, 2 * GATHERED_BYTES] {
            let (first, rest) = content.split_at(cut);
            let bytes = framed(b"{}", &[first, &[], rest]);
            let head = read_head(&mut bytes.as_slice()).unwrap();
            assert_eq!(head.payload_bytes, content.len() as u64);
            assert_eq!(&bytes[PREFIX_BYTES + 2..], content, "cut at {cut}");
        }
    }

    #[test]
    fn a_head_that_is_cut_anywhere_is_told_from_a_closed_connection() {
        let bytes = framed(b"{\"type\":\"reply\"}", &[]);
        for length in 1..bytes.len() {
            let error = read_head(&mut &bytes[..length]).unwrap_err();
            assert!(matches!(error, FrameError::Truncated { .. }), "{length}: {error}");
        }
    }

    #[test]
    fn text_on_the_socket_is_named() {
        let error = read_head(&mut &b"Loading model...\n"[..]).unwrap_err().to_string();
        assert!(error.contains("standard output"), "{error}");
    }

    #[test]
    fn a_header_of_two_gigabytes_and_a_payload_of_an_exabyte_are_refused_before_anything_is_read() {
        let mut prefix = MAGIC.to_vec();
        prefix.extend(0x8000_0000u32.to_le_bytes());
        prefix.extend(0u64.to_le_bytes());
        assert!(matches!(read_head(&mut prefix.as_slice()), Err(FrameError::TooLong { part: "header", .. })));
        let mut prefix = MAGIC.to_vec();
        prefix.extend(2u32.to_le_bytes());
        prefix.extend((1u64 << 60).to_le_bytes());
        let error = read_head(&mut prefix.as_slice()).unwrap_err();
        assert!(error.to_string().contains("shared folder"), "{error}");
    }
}
