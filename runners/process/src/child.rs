//! The command: started with what it needs to find the harness, and ended with everything that it started.

use std::io;
use std::os::unix::net::UnixListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{self, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::Pid;
use tempfile::TempDir;

use crate::family::Family;
use crate::log::EngineLog;
use crate::progress::Progress;
use crate::{ADDRESS_VARIABLE, FOLDER_VARIABLE, PROGRESS_VARIABLE, TOKEN_VARIABLE};

/// How long a process that closed its connection may take to end.
const ENDING: Duration = Duration::from_secs(1);

/// A running command.
#[derive(Debug)]
pub struct Child {
    process: process::Child,
    family: Family,
    folder: TempDir,
    /// Where its ranks are.
    pub progress: Progress,
    /// The word that its hello must say.
    pub token: String,
}

impl Child {
    /// Starts `command` through the shell, as the leader of a process group.
    ///
    /// # Errors
    /// What the system says.
    pub fn start(command: &str, log: &EngineLog) -> io::Result<(Self, UnixListener)> {
        let folder = shared_folder()?;
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket)?;
        let progress_path = folder.path().join("progress");
        let progress = Progress::create(&progress_path)?;
        let token = new_token();
        log.start_anew();
        let mut process = Command::new("sh")
            .arg("-c")
            .arg(command)
            .env(ADDRESS_VARIABLE, format!("unix:{}", socket.display()))
            .env(TOKEN_VARIABLE, &token)
            .env(FOLDER_VARIABLE, folder.path())
            .env(PROGRESS_VARIABLE, &progress_path)
            .env("PYTHONUNBUFFERED", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        if let Some(stdout) = process.stdout.take() {
            log.drain(stdout);
        }
        if let Some(stderr) = process.stderr.take() {
            log.drain(stderr);
        }
        let leader = Pid::from_child(&process);
        let family = Family { leader, token: token.clone(), folder: folder.path().to_owned() };
        family.register();
        Ok((Self { process, family, folder, progress, token }, listener))
    }

    /// The folder for large payloads.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// How the command ended, if it did.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().ok().flatten()
    }

    /// How the command ended, after a moment for it to do so; in words.
    pub fn ending(&mut self) -> String {
        let until = Instant::now() + ENDING;
        loop {
            if let Some(status) = self.ended() {
                return in_words(status);
            }
            if Instant::now() >= until {
                return "the process is still there but closed its connection".to_owned();
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the command to end by itself, no longer than `patience`.
    pub fn wait(&mut self, patience: Duration) {
        let until = Instant::now() + patience;
        while self.ended().is_none() && Instant::now() < until {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.family.kill();
        // a killed process leaves an entry until somebody asks how it ended
        let _ = self.process.wait();
    }
}

/// How a process ended, in words.
pub fn in_words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        // as the shell says it
        (Some(code @ 129..=192), _) => {
            format!("the process ended with exit status {code}: killed by signal {}", code - 128)
        }
        (Some(code), _) => format!("the process ended with exit status {code}"),
        (None, Some(signal)) => format!("the process was killed by signal {signal}"),
        (None, None) => "the process ended".to_owned(),
    }
}

/// In memory where there is such a place, else among temporary files.
fn shared_folder() -> io::Result<TempDir> {
    let named = || {
        let mut builder = tempfile::Builder::new();
        builder.prefix("shardcheck-");
        builder
    };
    named().tempdir_in("/dev/shm").or_else(|_| named().tempdir())
}

/// Not a secret: it tells one start from another.
fn new_token() -> String {
    static STARTS: AtomicU64 = AtomicU64::new(0);
    let start = STARTS.fetch_add(1, Ordering::Relaxed);
    let nanos = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_nanos());
    format!("{}-{start}-{nanos:x}", process::id())
}
