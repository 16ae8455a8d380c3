//! Scanning a server's log for what an accuracy figure doesn't show: errors, tracebacks, memory faults, dead engines.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::outcome::Error;
use crate::vocabulary::named;

/// How many lines of each kind are kept as evidence.
const EVIDENCE_LINES: usize = 3;
/// How much of a line is kept, in characters.
const EVIDENCE_CHARS: usize = 200;

/// What a line of a server's log can report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFinding {
    /// A line at level ERROR, CRITICAL or FATAL.
    Error,
    /// The beginning of a Python traceback.
    Traceback,
    /// An illegal access reported by a GPU runtime or the operating system.
    MemoryFault,
    /// Memory ran out.
    OutOfMemory,
    /// The engine process died or hung.
    EngineDeath,
    /// A collective timed out or failed.
    Collective,
}

impl LogFinding {
    /// Every kind of finding.
    pub const ALL: [LogFinding; 6] = [
        LogFinding::Error,
        LogFinding::Traceback,
        LogFinding::MemoryFault,
        LogFinding::OutOfMemory,
        LogFinding::EngineDeath,
        LogFinding::Collective,
    ];

    /// The name used in reports and JSON.
    pub fn name(self) -> &'static str {
        match self {
            LogFinding::Error => "error",
            LogFinding::Traceback => "traceback",
            LogFinding::MemoryFault => "memory-fault",
            LogFinding::OutOfMemory => "out-of-memory",
            LogFinding::EngineDeath => "engine-death",
            LogFinding::Collective => "collective",
        }
    }

    /// Texts that mark a line, compared in lower case; levels are recognised apart.
    fn marks(self) -> &'static [&'static str] {
        match self {
            LogFinding::Error => &[],
            LogFinding::Traceback => &["traceback (most recent call last)"],
            LogFinding::MemoryFault => &[
                "memory access fault",
                "memory-access fault",
                "hsa_status_error",
                "illegal memory access",
                "illegaladdress",
                "misaligned address",
                "segmentation fault",
                "sigsegv",
                "xid",
            ],
            LogFinding::OutOfMemory => &["out of memory", "outofmemoryerror", "oom-kill"],
            LogFinding::EngineDeath => {
                &["enginedeaderror", "engine core died", "fatal python error", "died unexpectedly"]
            }
            LogFinding::Collective => {
                &["nccl error", "rccl error", "watchdog caught collective", "collective operation timeout"]
            }
        }
    }
}

named!(LogFinding, "finding in a server log");

/// What a scan found. Lines written before the run are not counted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LogScan {
    /// Bytes scanned.
    pub bytes: u64,
    /// Lines by kind; a line counts once, under the most specific kind.
    pub counts: std::collections::BTreeMap<LogFinding, u64>,
    /// The first lines of each kind.
    pub evidence: Vec<String>,
}

impl LogScan {
    /// All findings.
    pub fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    /// Adds another scan, of a later part or another session.
    pub fn add(&mut self, other: &LogScan) {
        self.bytes += other.bytes;
        for (finding, count) in &other.counts {
            *self.counts.entry(*finding).or_default() += count;
        }
        self.evidence.extend(other.evidence.iter().cloned());
    }

    /// Scans the lines of a reader.
    ///
    /// # Errors
    /// What the reader returns.
    pub fn of(reader: impl BufRead) -> std::io::Result<Self> {
        let mut scan = Self::default();
        for line in reader.split(b'\n') {
            let line = line?;
            scan.bytes += line.len() as u64 + 1;
            let line = String::from_utf8_lossy(&line);
            if let Some(finding) = classify(&line) {
                let count = scan.counts.entry(finding).or_default();
                *count += 1;
                if *count <= EVIDENCE_LINES as u64 {
                    let excerpt: String = line.trim().chars().take(EVIDENCE_CHARS).collect();
                    scan.evidence.push(format!("{finding}: {excerpt}"));
                }
            }
        }
        Ok(scan)
    }
}

/// The length of a log in bytes: where the part that belongs to a run begins.
///
/// # Errors
/// [`Error::Data`] when the log cannot be read, since a scan that silently finds nothing would look clean.
pub fn end_of(path: &Path) -> Result<u64, Error> {
    let metadata = std::fs::metadata(path).map_err(|why| {
        Error::Data(format!("--server-log {}: {why}; give the file that the server writes", path.display()))
    })?;
    Ok(metadata.len())
}

/// Scans a log from a position on; from the beginning when the file is shorter now (it was rotated).
///
/// # Errors
/// [`Error::Io`].
pub fn scan_from(path: &Path, position: u64) -> Result<LogScan, Error> {
    let fail = |source| Error::io("read", path, source);
    let mut file = File::open(path).map_err(fail)?;
    let length = file.metadata().map_err(fail)?.len();
    let start = if length < position { 0 } else { position };
    file.seek(SeekFrom::Start(start)).map_err(fail)?;
    LogScan::of(BufReader::new(file)).map_err(fail)
}

fn classify(line: &str) -> Option<LogFinding> {
    use LogFinding::*;
    let lower = line.to_lowercase();
    let marked = [MemoryFault, OutOfMemory, EngineDeath, Collective, Traceback].into_iter().find(|finding| {
        finding.marks().iter().any(|mark| match *mark {
            "xid" => lower.contains("nvrm: xid"),
            mark => lower.contains(mark),
        })
    });
    marked.or_else(|| has_error_level(line).then_some(Error))
}

/// Whether a line carries an error level as a word of its own in upper case, as loggers write it. `error` in the
/// text of an access line is no level.
fn has_error_level(line: &str) -> bool {
    line.split(|character: char| !character.is_ascii_alphanumeric() && character != '_')
        .take(12)
        .any(|word| matches!(word, "ERROR" | "CRITICAL" | "FATAL"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const LOG: &str = "\
INFO 11-29 15:00:01 [api_server.py:90] started, error_handler=default\n\
INFO:     127.0.0.1:5 - \"POST /v1/completions HTTP/1.1\" 200 OK\n\
ERROR 11-29 15:00:02 [core.py:12] request failed\n\
(EngineCore pid=7) Traceback (most recent call last):\n\
Memory access fault by GPU node-3 (Agent handle: 0x1) on address 0x2. Reason: Unknown.\n\
[rank3]: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB\n\
2026-11-29 15:00:09,001 - atom - CRITICAL - engine core died\n\
[rank0]: Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLGATHER)\n\
[2026-11-29 15:00:10] [ERROR] something\n";

    #[test]
    fn each_kind_of_line_is_counted_once_and_access_lines_are_not() {
        let scan = LogScan::of(LOG.as_bytes()).unwrap();
        let counts: Vec<(LogFinding, u64)> =
            scan.counts.iter().map(|(kind, count)| (*kind, *count)).collect();
        use LogFinding::*;
        assert_eq!(
            counts,
            [
                (Error, 2),
                (Traceback, 1),
                (MemoryFault, 1),
                (OutOfMemory, 1),
                (EngineDeath, 1),
                (Collective, 1)
            ]
        );
        assert_eq!(scan.bytes, LOG.len() as u64);
        assert_eq!(scan.total(), 7);
        assert!(scan.evidence.iter().any(|line| line.starts_with("memory-fault: Memory access fault")));
    }

    #[test]
    fn a_clean_log_has_no_finding_and_evidence_is_bounded() {
        assert_eq!(LogScan::of("INFO all is well\n".as_bytes()).unwrap().total(), 0);
        let many = LogScan::of("ERROR x\n".repeat(50).as_bytes()).unwrap();
        assert_eq!((many.total(), many.evidence.len()), (50, EVIDENCE_LINES));
    }

    #[test]
    fn only_what_was_written_after_the_start_counts_unless_the_file_was_rotated() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"ERROR old\n").unwrap();
        let start = end_of(file.path()).unwrap();
        file.write_all(b"INFO new\nERROR new\n").unwrap();
        assert_eq!(scan_from(file.path(), start).unwrap().total(), 1);
        std::fs::write(file.path(), "ERROR\n").unwrap();
        assert_eq!(scan_from(file.path(), start).unwrap().total(), 1);
        assert!(matches!(end_of(Path::new("/nonexistent/log")), Err(Error2::Data(_))));
    }

    use crate::outcome::Error as Error2;

    #[test]
    fn findings_are_read_back_by_name() {
        for finding in LogFinding::ALL {
            assert_eq!(finding.name().parse::<LogFinding>(), Ok(finding));
        }
    }
}
