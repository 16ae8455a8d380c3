//! The built program, run in a folder of its own.

use std::path::{Path, PathBuf};
use std::time::Duration;

use assert_cmd::cargo::cargo_bin;
use shardcheck::record::RunRecord;
use shardcheck::run_directory::{read_events, resolve};
use tempfile::TempDir;

/// Longest time that any command of these tests may take: far beyond what a slow machine needs.
const LIMIT: Duration = Duration::from_secs(600);

/// A folder, and the program that is run in it.
pub struct Program {
    folder: TempDir,
}

/// How a command ended.
pub struct Outcome {
    /// The command line, for messages.
    pub line: String,
    /// Exit code; `None` when it was killed.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Program {
    /// An empty folder.
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder can be made") }
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file into the folder.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), content).expect("the folder can be written");
    }

    /// Runs the program, whatever comes of it.
    pub fn run(&self, arguments: &[&str]) -> Outcome {
        self.finish(self.command(arguments), arguments)
    }

    /// Runs a command that [`Self::command`] made, whatever comes of it.
    pub fn finish(&self, command: std::process::Command, arguments: &[&str]) -> Outcome {
        let output =
            assert_cmd::Command::from_std(command).timeout(LIMIT).output().expect("the program starts");
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("the program prints UTF-8");
        Outcome {
            line: format!("shardcheck {}", arguments.join(" ")),
            code: output.status.code(),
            out: text(&output.stdout),
            err: text(&output.stderr),
        }
    }

    /// Runs the program and expects an exit code.
    #[track_caller]
    pub fn expect(&self, code: i32, arguments: &[&str]) -> Outcome {
        let outcome = self.run(arguments);
        assert_eq!(
            outcome.code,
            Some(code),
            "{}\n--- out\n{}\n--- err\n{}",
            outcome.line,
            outcome.out,
            outcome.err
        );
        assert!(!outcome.err.contains("panicked at"), "{}\n{}", outcome.line, outcome.err);
        outcome
    }

    /// The command, not started yet.
    pub fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = std::process::Command::new(cargo_bin!("shardcheck"));
        command.args(arguments).current_dir(self.folder.path()).env("NO_COLOR", "1");
        command.env_remove("GITHUB_ACTIONS");
        command
    }

    /// The folder of the run that was started last.
    pub fn latest(&self) -> PathBuf {
        resolve(&self.path("runs"), "latest").expect("there is a run")
    }

    /// Events of the run that was started last.
    pub fn record(&self) -> RunRecord {
        read_events(&self.latest()).expect("the events read back")
    }

    /// The ids that `list` prints.
    pub fn ids(&self, arguments: &[&str]) -> Vec<String> {
        let outcome = self.expect(0, &[&["list"], arguments].concat());
        outcome.out.lines().map(str::to_owned).collect()
    }
}

/// The one folder below `cases/` of a run.
pub fn only_case_folder(run: &Path) -> PathBuf {
    let mut folders: Vec<_> = std::fs::read_dir(run.join("cases"))
        .expect("a run with failures has a folder of cases")
        .map(|entry| entry.expect("the folder reads").path())
        .collect();
    assert_eq!(folders.len(), 1, "{folders:?}");
    folders.remove(0)
}
