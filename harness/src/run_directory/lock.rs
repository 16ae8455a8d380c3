//! The lock file of a run folder: one writer at a time, and a writer that died does not block the next.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Who holds a run folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Process id.
    pub pid: u32,
    /// Host name, because a pid says nothing about another machine.
    pub host: String,
    /// Boot of the kernel that gave the pid; empty where the system does not tell.
    pub boot: String,
    /// Start of the process in clock ticks since boot: pids are reused, pairs of pid and start are not. 0 where unknown.
    pub started_ticks: u64,
}

impl Holder {
    /// This process.
    pub fn current() -> Self {
        let pid = std::process::id();
        Self {
            pid,
            host: read_trimmed("/proc/sys/kernel/hostname"),
            boot: read_trimmed("/proc/sys/kernel/random/boot_id"),
            started_ticks: process_start(pid).unwrap_or(0),
        }
    }

    /// Whether the process may still write. When in doubt, it may.
    pub fn is_alive(&self) -> bool {
        let here = Self::current();
        if self.host != here.host {
            return true;
        }
        if self.boot != here.boot {
            return false;
        }
        if !Path::new("/proc/self/stat").exists() {
            return std::process::Command::new("ps")
                .args(["-p", &self.pid.to_string()])
                .output()
                .map_or(true, |output| output.status.success());
        }
        process_start(self.pid).is_some_and(|ticks| self.started_ticks == 0 || ticks == self.started_ticks)
    }
}

/// A lock that this process holds; dropped, it gives the folder free.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
}

/// Why a lock could not be had.
#[derive(Debug)]
pub enum LockError {
    /// Somebody else holds it; `None` when the file does not say who.
    Held(Option<Holder>),
    /// The file could not be written.
    Io(io::Error),
}

impl Lock {
    /// Takes the lock at `path`, from a dead holder if need be.
    ///
    /// # Errors
    /// [`LockError::Held`] while another process may write, [`LockError::Io`] when the file can't be written.
    pub fn take(path: &Path) -> Result<Self, LockError> {
        if let Some(lock) = Self::try_create(path).map_err(LockError::Io)? {
            return Ok(lock);
        }
        let text = fs::read_to_string(path).unwrap_or_default();
        let Ok(holder) = serde_json::from_str::<Holder>(&text) else { return Err(LockError::Held(None)) };
        if holder.is_alive() {
            return Err(LockError::Held(Some(holder)));
        }
        // Two processes may find the same dead holder. The rename lets one of them win; what it took is looked at
        // again, because the loser may have renamed the winner's fresh lock.
        let aside = path.with_extension(format!("stale-{}", std::process::id()));
        fs::rename(path, &aside).map_err(|_| LockError::Held(None))?;
        let taken = fs::read_to_string(&aside).unwrap_or_default();
        if taken != text {
            let _ = fs::rename(&aside, path);
            return Err(LockError::Held(serde_json::from_str(&taken).ok()));
        }
        let _ = fs::remove_file(&aside);
        Self::try_create(path).map_err(LockError::Io)?.ok_or(LockError::Held(None))
    }

    fn try_create(path: &Path) -> io::Result<Option<Self>> {
        match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(mut file) => {
                let text = serde_json::to_string(&Holder::current()).expect("a holder is plain data");
                file.write_all(text.as_bytes())?;
                Ok(Some(Self { path: path.to_owned() }))
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn read_trimmed(path: &str) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// Start time of a living process from `/proc/PID/stat` (field 22; fields are counted behind the name, which may hold
/// blanks and parentheses). `None` for one that is gone or a zombie.
fn process_start(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_refused_while_its_holder_lives_and_free_once_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = Lock::take(&path).unwrap();
        match Lock::take(&path) {
            Err(LockError::Held(Some(holder))) => assert_eq!(holder.pid, std::process::id()),
            other => panic!("expected a held lock, got {other:?}"),
        }
        drop(lock);
        assert!(Lock::take(&path).is_ok());
    }

    #[test]
    fn the_lock_of_a_dead_process_is_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        let dead = Holder { pid, ..Holder::current() };
        fs::write(&path, serde_json::to_string(&dead).unwrap()).unwrap();
        assert!(Lock::take(&path).is_ok());
    }

    #[test]
    fn a_reused_pid_does_not_keep_the_lock_alive() {
        let current = Holder::current();
        if current.started_ticks == 0 {
            eprintln!("SKIPPED: this system does not tell when a process started");
            return;
        }
        assert!(current.is_alive());
        assert!(!Holder { started_ticks: current.started_ticks + 1, ..current }.is_alive());
    }

    #[test]
    fn a_holder_on_another_host_counts_as_alive() {
        let elsewhere = Holder { host: "some-other-host".into(), pid: u32::MAX, ..Holder::current() };
        assert!(elsewhere.is_alive());
    }

    #[test]
    fn a_lock_that_does_not_say_who_holds_it_is_respected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        fs::write(&path, "").unwrap();
        assert!(matches!(Lock::take(&path), Err(LockError::Held(None))));
        assert!(path.exists());
    }
}
