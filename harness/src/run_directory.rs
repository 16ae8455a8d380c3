//! The folder that a run leaves behind: written live, readable after a kill, and taken up again where it stopped.

mod clock;
mod lock;
mod reader;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::event::{CaseResult, Event, RESULTS_SCHEMA_VERSION, RunHeader};
use crate::finding::Finding;
use crate::record::{Results, RunRecord};
use crate::select::Selection;

pub use clock::utc_compact;
pub use lock::Holder;
use lock::{Lock, LockError};
pub use reader::{read_events, read_header, read_results};

/// Name of the header's file.
pub const RUN_FILE: &str = "run.json";
/// Name of the file that holds one event a line.
pub const EVENTS_FILE: &str = "events.jsonl";
/// Name of the file that holds the whole result, written at the end.
pub const RESULTS_FILE: &str = "results.json";
/// Name of the folder that holds a folder for each failed case.
pub const CASES_FOLDER: &str = "cases";
/// Name of the link, in the folder of all runs, to the run that was started or resumed last.
pub const LATEST: &str = "latest";
const LOCK_FILE: &str = "lock";

/// Why a run folder can't be used, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum RunDirectoryError {
    /// A file or folder can't be created or written.
    #[error("failed to write {}: {source}; choose a folder that can be written with `--runs DIR`", path.display())]
    NotWritable {
        /// What was to be written.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file can't be read.
    #[error("failed to read {}: {source}", path.display())]
    NotReadable {
        /// What was to be read.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The path is no run folder.
    #[error("{} is not a run folder: {reason}; give a folder that `shardcheck run` made, a run id, or `latest`", path.display())]
    NotARun {
        /// The path that was given.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// A file does not hold what it should.
    #[error("{} line {line} does not read: {reason}; remove that line, or take the run from its backup", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// One-based line.
        line: usize,
        /// What the parser said.
        reason: String,
    },
    /// Written by another version of the program.
    #[error("{} has schema version {found}, this program reads {RESULTS_SCHEMA_VERSION}: read it with the version of shardcheck that wrote it", path.display())]
    UnknownVersion {
        /// The file.
        path: PathBuf,
        /// Version in the file.
        found: String,
    },
    /// A resume with other options than the run was started with.
    #[error("{} can't be resumed, because it was started differently: {}; use the same options, or start a new run", path.display(), differences.join("; "))]
    HeaderMismatch {
        /// The run folder.
        path: PathBuf,
        /// One line for each difference: `seed was 1, now 2`.
        differences: Vec<String>,
    },
    /// Another process writes into the folder.
    #[error("{} is in use by {}; wait for it, or delete {} if that process is gone", path.display(), describe_holder(holder.as_ref()), path.join(LOCK_FILE).display())]
    Locked {
        /// The run folder.
        path: PathBuf,
        /// Who holds it, where the lock tells.
        holder: Option<Holder>,
    },
    /// A prefix of a run id that fits several runs.
    #[error("run {prefix:?} is ambiguous: {}; give more of the id", candidates.join(", "))]
    Ambiguous {
        /// What was given.
        prefix: String,
        /// Runs that it fits.
        candidates: Vec<String>,
    },
    /// A figure that JSON can't hold. A bug of the property that measured it.
    #[error("the {what} of case {id} is {value}, which JSON can't hold: report it as a bug of shardcheck")]
    NotFinite {
        /// Case id.
        id: String,
        /// Which figure.
        what: String,
        /// Its value.
        value: f64,
    },
}

fn describe_holder(holder: Option<&Holder>) -> String {
    match holder {
        Some(holder) if holder.host.is_empty() => format!("process {}", holder.pid),
        Some(holder) => format!("process {} on host {}", holder.pid, holder.host),
        None => "another process".to_owned(),
    }
}

/// A run folder that this process writes. Its lock is given free when it is dropped.
#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
    header: RunHeader,
    events: File,
    _lock: Lock,
}

impl RunDirectory {
    /// Makes `root/<utc>-<hash>/` with run.json and an empty events.jsonl, and points `root/latest` at it.
    ///
    /// `run_id` and `schema_version` of the header are set here; take them back with [`RunDirectory::header`].
    ///
    /// # Errors
    /// [`RunDirectoryError::NotWritable`].
    pub fn create(root: &Path, header: &RunHeader) -> Result<Self, RunDirectoryError> {
        fs::create_dir_all(root).map_err(not_writable(root))?;
        let now = SystemTime::now();
        let (path, run_id) = make_new_folder(root, header, now)?;
        let lock = take_lock(&path)?;
        let header = RunHeader { schema_version: RESULTS_SCHEMA_VERSION, run_id, ..header.clone() };
        let text = serde_json::to_string_pretty(&header).expect("a header is plain data");
        write_atomically(&path.join(RUN_FILE), &(text + "\n"))?;
        let events = open_to_append(&path.join(EVENTS_FILE))?;
        point_latest_at(root, &header.run_id)?;
        Ok(Self { path, header, events, _lock: lock })
    }

    /// Takes a run up again, to append what it still lacks. A torn last line is cut off first.
    ///
    /// `expected` is the header that the run would be started with now; suite, seed, engine and its profile, fault, selection
    /// and tool version must be those that it was started with. Which cases need no second run is told by [`RunRecord::judged_ids`].
    ///
    /// # Errors
    /// [`RunDirectoryError::HeaderMismatch`], [`RunDirectoryError::Locked`] while another process writes,
    /// [`RunDirectoryError::NotARun`], [`RunDirectoryError::UnknownVersion`], [`RunDirectoryError::Malformed`].
    pub fn reopen(path: &Path, expected: &RunHeader) -> Result<(Self, RunRecord), RunDirectoryError> {
        let header = read_header(path)?;
        let differences = header_differences(&header, expected);
        if !differences.is_empty() {
            return Err(RunDirectoryError::HeaderMismatch { path: path.to_owned(), differences });
        }
        let lock = take_lock(path)?;
        let record = read_events(path)?;
        reader::end_last_line(&path.join(EVENTS_FILE))?;
        let events = open_to_append(&path.join(EVENTS_FILE))?;
        // results of the earlier end would contradict the events until this one ends
        match fs::remove_file(path.join(RESULTS_FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(not_writable(&path.join(RESULTS_FILE))(error));
            }
            _ => {}
        }
        if let Some(root) = path.parent() {
            point_latest_at(root, &header.run_id)?;
        }
        Ok((Self { path: path.to_owned(), header, events, _lock: lock }, record))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The header as it stands in run.json.
    pub fn header(&self) -> &RunHeader {
        &self.header
    }

    /// Writes one event as one line, with one system call: a process that is killed leaves every finished line whole.
    ///
    /// # Errors
    /// [`RunDirectoryError::NotWritable`]; [`RunDirectoryError::NotFinite`] for a figure that would not read back.
    pub fn append(&mut self, event: &Event) -> Result<(), RunDirectoryError> {
        if let Event::CaseJudged(result) = event {
            check_finite(result)?;
        }
        let mut line = serde_json::to_string(event).expect("an event is plain data");
        line.push('\n');
        let path = self.path.join(EVENTS_FILE);
        self.events.write_all(line.as_bytes()).map_err(not_writable(&path))?;
        self.events.flush().map_err(not_writable(&path))
    }

    /// Reads the events back and writes results.json in one step.
    ///
    /// # Errors
    /// As [`read_events`], and [`RunDirectoryError::NotWritable`].
    pub fn finish(&mut self) -> Result<Results, RunDirectoryError> {
        let results = read_events(&self.path)?.results();
        let text = serde_json::to_string(&results).expect("results are plain data");
        write_atomically(&self.path.join(RESULTS_FILE), &(text + "\n"))?;
        Ok(results)
    }

    /// The folder of one case, made when it is not there: `cases/<readable part>-<hash of the id>`.
    ///
    /// # Errors
    /// [`RunDirectoryError::NotWritable`].
    pub fn case_directory(&self, id: &str) -> Result<PathBuf, RunDirectoryError> {
        let path = self.path.join(CASES_FOLDER).join(case_folder_name(id));
        fs::create_dir_all(&path).map_err(not_writable(&path))?;
        Ok(path)
    }
}

/// Name of a case's folder: its id with everything but letters, digits, `.`, `_`, `=` and `-` replaced, and 12 digits of the
/// BLAKE3 hash of the id, so that two ids that look alike do not meet.
pub fn case_folder_name(id: &str) -> String {
    let readable: String = id
        .chars()
        .take(80)
        .map(|c| if c.is_ascii_alphanumeric() || "._=-".contains(c) { c } else { '_' })
        .collect();
    let hash = blake3::hash(id.as_bytes()).to_hex();
    format!("{}-{}", readable.trim_start_matches('.'), &hash[..12])
}

/// The run folder that a user names: `latest`, a run id or the start of one, or a path.
///
/// # Errors
/// [`RunDirectoryError::NotARun`] when there is none, [`RunDirectoryError::Ambiguous`] when a prefix fits several.
pub fn resolve(root: &Path, name: &str) -> Result<PathBuf, RunDirectoryError> {
    let not_a_run =
        |reason: &str| RunDirectoryError::NotARun { path: PathBuf::from(name), reason: reason.to_owned() };
    if name.is_empty() {
        // every id begins with nothing
        let (path, reason) = (PathBuf::from("\"\""), "the name is empty".to_owned());
        return Err(RunDirectoryError::NotARun { path, reason });
    }
    if name == LATEST {
        let link = root.join(LATEST);
        let target = match fs::read_link(&link) {
            Ok(target) => root.join(target),
            Err(_) => match fs::read_to_string(&link) {
                Ok(text) => root.join(text.trim()),
                Err(_) => return Err(not_a_run(&format!("{} holds no run yet", root.display()))),
            },
        };
        return if target.join(RUN_FILE).is_file() {
            Ok(target)
        } else {
            Err(not_a_run(&format!("{} is gone or empty", target.display())))
        };
    }
    if Path::new(name).join(RUN_FILE).is_file() {
        return Ok(PathBuf::from(name));
    }
    if Path::new(name).exists() {
        return Err(not_a_run(&format!("it holds no {RUN_FILE}")));
    }
    let mut candidates: Vec<String> = fs::read_dir(root)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.path().join(RUN_FILE).is_file())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|run| run != LATEST && run.starts_with(name))
        .collect();
    candidates.sort_unstable();
    match candidates.as_slice() {
        [] => Err(not_a_run("there is no such path and no such run id")),
        [one] => Ok(root.join(one)),
        _ => Err(RunDirectoryError::Ambiguous { prefix: name.to_owned(), candidates }),
    }
}

fn header_differences(was: &RunHeader, now: &RunHeader) -> Vec<String> {
    let fault = |header: &RunHeader| header.fault.clone().unwrap_or_else(|| "none".to_owned());
    [
        ("suite", was.suite.clone(), now.suite.clone()),
        ("seed", was.seed.to_string(), now.seed.to_string()),
        ("engine", was.engine.clone(), now.engine.clone()),
        ("fault", fault(was), fault(now)),
        ("tool version", was.tool_version.clone(), now.tool_version.clone()),
        ("selection", Selection::in_words(&was.selection), Selection::in_words(&now.selection)),
        ("engine profile", short_hash(&was.profile), short_hash(&now.profile)),
        ("claims", claims_in_words(was), claims_in_words(now)),
    ]
    .into_iter()
    .filter(|(_, was, now)| was != now)
    .map(|(what, was, now)| format!("{what} was {was}, now {now}"))
    .collect()
}

/// Claims of a run in words: none, or whose they are and which.
pub(crate) fn claims_in_words(header: &RunHeader) -> String {
    header.claims.as_ref().map_or("none".to_owned(), |claims| {
        let hash = short_hash(&serde_json::to_value(claims).unwrap_or_default());
        format!("{} {} ({hash})", claims.engine, claims.version)
    })
}

/// Names a value that is too long to be told.
pub(crate) fn short_hash(value: &serde_json::Value) -> String {
    blake3::hash(value.to_string().as_bytes()).to_hex()[..8].to_owned()
}

/// Makes the first folder of this time and header that does not exist yet.
fn make_new_folder(
    root: &Path,
    header: &RunHeader,
    now: SystemTime,
) -> Result<(PathBuf, String), RunDirectoryError> {
    let header = serde_json::to_vec(header).expect("a header is plain data");
    for attempt in 0u32.. {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&header).update(&std::process::id().to_le_bytes()).update(&attempt.to_le_bytes());
        let run_id = format!("{}-{}", utc_compact(now), &hasher.finalize().to_hex()[..8]);
        let path = root.join(&run_id);
        match fs::create_dir(&path) {
            Ok(()) => return Ok((path, run_id)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < 1000 => {}
            Err(source) => return Err(RunDirectoryError::NotWritable { path, source }),
        }
    }
    unreachable!("the loop ends by its 1001st attempt")
}

fn take_lock(path: &Path) -> Result<Lock, RunDirectoryError> {
    Lock::take(&path.join(LOCK_FILE)).map_err(|error| match error {
        LockError::Held(holder) => RunDirectoryError::Locked { path: path.to_owned(), holder },
        LockError::Io(source) => RunDirectoryError::NotWritable { path: path.join(LOCK_FILE), source },
    })
}

fn open_to_append(path: &Path) -> Result<File, RunDirectoryError> {
    OpenOptions::new().create(true).append(true).open(path).map_err(not_writable(path))
}

fn check_finite(result: &CaseResult) -> Result<(), RunDirectoryError> {
    let fail = |what: String, value| Err(RunDirectoryError::NotFinite { id: result.id.clone(), what, value });
    if !result.elapsed_s.is_finite() {
        return fail("elapsed time".to_owned(), result.elapsed_s);
    }
    for check in &result.checks {
        match &check.finding {
            Finding::Holds(measured) if !measured.worst_ratio.is_finite() => {
                return fail(format!("worst ratio of {}", check.property), measured.worst_ratio);
            }
            Finding::Broken(failure) => {
                // `None` is how a ratio that is no number is written
                if let Some(ratio) = failure.worst.as_ref().and_then(|w| w.ratio).filter(|r| !r.is_finite()) {
                    return fail(format!("worst ratio of {}", check.property), ratio);
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Replaces a file in one step, so that a reader sees the old content or the new one. A link stays a link, and what is no file, such as
/// a pipe or `/dev/null`, is written to: neither may be replaced by a file of its name.
///
/// # Errors
/// [`RunDirectoryError::NotWritable`].
pub fn write_atomically(path: &Path, text: &str) -> Result<(), RunDirectoryError> {
    let target = fs::canonicalize(path);
    let is_no_file = fs::metadata(path).is_ok_and(|metadata| !metadata.is_file());
    let leads_nowhere = target.is_err() && path.is_symlink();
    if is_no_file || leads_nowhere {
        return fs::write(path, text).map_err(not_writable(path));
    }
    let path = target.as_deref().unwrap_or(path);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".tmp-{}", std::process::id()));
    let temporary = path.with_file_name(name);
    fs::write(&temporary, text).map_err(not_writable(&temporary))?;
    fs::rename(&temporary, path).map_err(not_writable(path))
}

/// Points `latest` at a run: a symbolic link, or a file with the name where links are not to be had.
fn point_latest_at(root: &Path, run_id: &str) -> Result<(), RunDirectoryError> {
    let temporary = root.join(format!(".{LATEST}.tmp-{}-{run_id}", std::process::id()));
    let linked = symbolic_link(run_id, &temporary).and_then(|()| fs::rename(&temporary, root.join(LATEST)));
    match linked {
        Ok(()) => Ok(()),
        Err(_) => {
            let _ = fs::remove_file(&temporary);
            write_atomically(&root.join(LATEST), run_id)
        }
    }
}

#[cfg(unix)]
fn symbolic_link(target: &str, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symbolic_link(_target: &str, _link: &Path) -> io::Result<()> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

fn not_writable(path: &Path) -> impl FnOnce(io::Error) -> RunDirectoryError {
    let path = path.to_owned();
    move |source| RunDirectoryError::NotWritable { path, source }
}

#[cfg(test)]
mod tests;
