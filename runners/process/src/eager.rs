//! Reading without sleeping at once: to wake a thread takes about as long as a small question does.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// How long bytes are looked for before the thread sleeps. Whoever else wants the processor gets it meanwhile.
const EAGER: Duration = Duration::from_micros(50);

/// Bytes that come soon; `None` when there are none yet.
pub(crate) fn read_soon(stream: &UnixStream, buffer: &mut [u8]) -> Option<io::Result<usize>> {
    let started = Instant::now();
    while started.elapsed() < EAGER {
        match recv(stream, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((_, count)) => return Some(Ok(count)),
            Err(Errno::AGAIN) => thread::yield_now(),
            Err(error) => return Some(Err(error.into())),
        }
    }
    None
}

/// A stream that is read so.
#[derive(Debug)]
pub(crate) struct Eager(pub(crate) UnixStream);

impl Read for Eager {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        read_soon(&self.0, buffer).unwrap_or_else(|| self.0.read(buffer))
    }
}
