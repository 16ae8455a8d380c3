//! Everything that a command started: killed as a whole, also when the harness itself is told to end.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::{TOKEN_VARIABLE, interrupt};

/// A command's processes: its group, and whoever bears its token although it left the group, as workers of launchers do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Family {
    /// Leader of the process group.
    pub leader: Pid,
    /// The word in the environment of each of them.
    pub token: String,
    /// Folder to be removed with them.
    pub folder: PathBuf,
}

/// Families that are alive, for the end of the harness.
static ALIVE: Mutex<Vec<Family>> = Mutex::new(Vec::new());

impl Family {
    /// Sees to it that the family ends when the harness is interrupted.
    pub fn register(&self) {
        interrupt::watch();
        ALIVE.lock().unwrap_or_else(PoisonError::into_inner).push(self.clone());
    }

    /// Kills every process of the family.
    pub fn kill(&self) {
        // a group that is gone already is what is wanted
        let _ = kill_process_group(self.leader, Signal::KILL);
        for pid in self.strays() {
            let _ = kill_process(pid, Signal::KILL);
        }
        ALIVE.lock().unwrap_or_else(PoisonError::into_inner).retain(|family| family != self);
    }

    /// Processes outside the group that inherited the token.
    fn strays(&self) -> Vec<Pid> {
        let entry = format!("{TOKEN_VARIABLE}={}", self.token);
        let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
        let bears_token = |pid: i32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == entry.as_bytes())
        };
        processes
            .filter_map(|process| process.ok()?.file_name().to_str()?.parse::<i32>().ok())
            .filter(|pid| *pid != std::process::id() as i32 && bears_token(*pid))
            .filter_map(Pid::from_raw)
            .collect()
    }
}

/// Kills every family that is alive, and removes what each left.
pub fn end_all() {
    let alive = std::mem::take(&mut *ALIVE.lock().unwrap_or_else(PoisonError::into_inner));
    for family in alive {
        family.kill();
        let _ = std::fs::remove_dir_all(&family.folder);
    }
}
