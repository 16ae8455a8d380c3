//! What an engine prints: drained whatever its amount, kept up to a limit, its last lines at hand for a verdict.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Bytes that are kept of one run.
const MAX_KEPT_BYTES: usize = 16 << 20;
/// Bytes of the end that are at hand.
const TAIL_BYTES: usize = 2048;
/// Characters of a text of an engine that a verdict quotes.
const MAX_QUOTED_CHARS: usize = 4000;

/// An engine's own text as it may be shown: nothing that a terminal would obey or that turns what is written around, and no more than
/// fits a screen.
pub(crate) fn legible(text: &str) -> String {
    // marks, embeddings, overrides and isolates of the bidirectional algorithm
    let turns = |c: char| matches!(c, '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}');
    let obeyed = |c: char| (c.is_control() && !matches!(c, '\n' | '\t')) || turns(c);
    let shown = |c: char| if obeyed(c) { '\u{FFFD}' } else { c };
    let mut quoted: String = text.chars().take(MAX_QUOTED_CHARS).map(shown).collect();
    let left_out = text.chars().count().saturating_sub(MAX_QUOTED_CHARS);
    if left_out > 0 {
        quoted += &format!(" [… {left_out} more characters]");
    }
    quoted
}

/// A log that processes write to and verdicts quote.
#[derive(Debug, Clone, Default)]
pub struct EngineLog(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    /// What came before there was a file.
    waiting: Vec<u8>,
    file: Option<File>,
    kept_bytes: usize,
    dropped_bytes: u64,
    tail: VecDeque<u8>,
}

impl EngineLog {
    /// Writes what has come and what will come to a file.
    ///
    /// # Errors
    /// What the file system says.
    pub fn keep_in(&self, path: &Path) -> std::io::Result<()> {
        let mut inner = self.lock();
        let mut file = File::options().create(true).append(true).open(path)?;
        let waiting = std::mem::take(&mut inner.waiting);
        file.write_all(&waiting)?;
        inner.file = Some(file);
        Ok(())
    }

    /// The last lines, as text.
    pub fn tail(&self) -> String {
        let inner = self.lock();
        let bytes: Vec<u8> = inner.tail.iter().copied().collect();
        legible(String::from_utf8_lossy(&bytes).trim())
    }

    /// Forgets the last lines: what a new process says is its own.
    pub fn start_anew(&self) {
        self.lock().tail.clear();
    }

    /// Drains `stream` on a thread of its own until it ends.
    pub(crate) fn drain(&self, mut stream: impl Read + Send + 'static) {
        let log = self.clone();
        thread::spawn(move || {
            let mut buffer = vec![0u8; 64 << 10];
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                log.take(&buffer[..count]);
            }
        });
    }

    fn take(&self, bytes: &[u8]) {
        let mut inner = self.lock();
        let room = MAX_KEPT_BYTES - inner.kept_bytes;
        let kept = &bytes[..bytes.len().min(room)];
        inner.kept_bytes += kept.len();
        if kept.len() < bytes.len() && inner.dropped_bytes == 0 {
            let note = b"\n[the rest is not kept]\n";
            inner.write(&[kept, note].concat());
        } else {
            inner.write(kept);
        }
        inner.dropped_bytes += (bytes.len() - kept.len()) as u64;
        let end = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
        inner.tail.extend(end);
        let surplus = inner.tail.len().saturating_sub(TAIL_BYTES);
        inner.tail.drain(..surplus);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // bytes are appended whole, so a panic elsewhere leaves the log readable
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn write(&mut self, bytes: &[u8]) {
        match &mut self.file {
            // a log that can't be written is not worth a verdict
            Some(file) => drop(file.write_all(bytes)),
            None => self.waiting.extend_from_slice(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quoted_text_commands_no_terminal_and_fills_no_screen() {
        assert_eq!(legible("\u{1b}[2Jrow 3:\tNaN\r\n"), "\u{FFFD}[2Jrow 3:\tNaN\u{FFFD}\n");
        assert_eq!(legible("\u{202E}ssap\u{2069}"), "\u{FFFD}ssap\u{FFFD}");
        let long = legible(&"é".repeat(MAX_QUOTED_CHARS + 7));
        assert!(long.ends_with("é [… 7 more characters]"), "{long}");
    }

    #[test]
    fn what_came_before_the_file_is_in_it_and_a_flood_is_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("engine.log");
        let log = EngineLog::default();
        log.take(b"first line\n");
        log.keep_in(&path).unwrap();
        for _ in 0..40 {
            log.take(&vec![b'x'; 1 << 20]);
        }
        log.take(b"\nlast line\n");
        let kept = std::fs::read(&path).unwrap();
        assert!(kept.starts_with(b"first line\n") && kept.len() < MAX_KEPT_BYTES + 100);
        assert!(kept.ends_with(b"not kept]\n"));
        assert!(log.tail().ends_with("last line") && log.tail().len() <= TAIL_BYTES);
        log.start_anew();
        assert_eq!(log.tail(), "");
    }
}
