//! Buffers of large tensors: filled as bytes come, in pages that the system hands out by the megabyte.

use std::io::{self, ErrorKind, Read};

/// Bytes that are made ready at a time: few enough to stay in a cache until the stream has filled them.
const PIECE_BYTES: usize = 1 << 20;
/// Buffers of this size are worth large pages.
#[cfg(target_os = "linux")]
const HUGE_FROM_BYTES: usize = 8 << 20;

/// Reads exactly `length` bytes. A length that is only announced costs no memory: what the buffer reserves is taken when bytes have come.
///
/// # Errors
/// `UnexpectedEof` for a stream that ends early, `OutOfMemory` for a length that can't be reserved, and those of the stream.
pub(crate) fn take(stream: &mut impl Read, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let wanted = usize::try_from(length).map_err(|_| ErrorKind::OutOfMemory)?;
    bytes.try_reserve_exact(wanted).map_err(|_| ErrorKind::OutOfMemory)?;
    advise_large_pages(&mut bytes);
    while bytes.len() < wanted {
        let filled = bytes.len();
        bytes.resize(wanted.min(filled + PIECE_BYTES), 0);
        stream.read_exact(&mut bytes[filled..])?;
    }
    Ok(bytes)
}

/// Asks for large pages behind a buffer that nothing was written to yet: a gigabyte costs a thousand page faults instead of 260,000.
#[cfg(target_os = "linux")]
fn advise_large_pages(buffer: &mut Vec<u8>) {
    const PAGE_BYTES: usize = 4096;
    if buffer.capacity() < HUGE_FROM_BYTES {
        return;
    }
    let start = (buffer.as_mut_ptr() as usize).next_multiple_of(PAGE_BYTES);
    let end = (buffer.as_mut_ptr() as usize + buffer.capacity()) / PAGE_BYTES * PAGE_BYTES;
    // SAFETY: the range lies within the buffer's own allocation, and the advice changes how its pages are backed, not what they hold.
    // A system that refuses it backs them by small pages.
    let _ = unsafe { rustix::mm::madvise(start as *mut _, end - start, rustix::mm::Advice::LinuxHugepage) };
}

#[cfg(not(target_os = "linux"))]
fn advise_large_pages(_buffer: &mut Vec<u8>) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_of_many_pieces_holds_what_the_stream_had() {
        let content: Vec<u8> = (0..9 * PIECE_BYTES + 5).map(|index| (index % 251) as u8).collect();
        assert_eq!(take(&mut content.as_slice(), content.len() as u64).unwrap(), content);
    }

    #[test]
    fn a_length_that_nothing_can_hold_and_one_that_does_not_come_are_errors() {
        let error = take(&mut [1u8, 2].as_slice(), u64::MAX).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        let error = take(&mut [1u8, 2].as_slice(), 3).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    }
}
