//! The engine's own call in a script: a file of calls, made part of the script's text.
//!
//! Such a file is Python that has a function for each operation, by the operation's name: it is given the folder of a release and the step, takes the release's
//! own functions out of its files (`cut`) and hands them the arrays. Nothing of an adapter is in it, so what the script shows is the engine's.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use shardcheck_engine::OperationKind;

const CALLED: &str = include_str!("called.py");
/// What calls may import by `from cutting import`: it is part of the script.
const CUTTING: &str = include_str!("../../../runners/python/reproductions/cutting.py");

/// A file of calls.
#[derive(Debug)]
pub struct Call {
    path: PathBuf,
    text: String,
}

/// Calls that can't stand in a script.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The file can't be read.
    #[error("failed to read the calls {file}: {source}; give their file by --call")]
    NotReadable {
        /// The file.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// It has no function for the case's operation.
    #[error(
        "{file} has no function {operation}(release, step), which the case needs: give another file by --call, or fill in the place in the script"
    )]
    NoFunction {
        /// The file.
        file: String,
        /// The operation.
        operation: OperationKind,
    },
    /// A name that the script has already.
    #[error("{file} defines {name}, and so does the script that it becomes part of: rename it")]
    NameTaken {
        /// The file.
        file: String,
        /// The name.
        name: String,
    },
}

impl Call {
    /// The file of that path.
    ///
    /// # Errors
    /// [`CallError::NotReadable`].
    pub fn read(path: &Path) -> Result<Self, CallError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| CallError::NotReadable { file: path.display().to_string(), source })?;
        Ok(Self { path: path.to_owned(), text })
    }

    /// The part of a script that calls the engine for an operation. `script` is the text around it.
    ///
    /// # Errors
    /// [`CallError::NoFunction`], [`CallError::NameTaken`].
    pub fn body(&self, operation: OperationKind, script: &str) -> Result<String, CallError> {
        let file = self.path.display().to_string();
        let names = defined(&self.text);
        if !names.contains(operation.name()) {
            return Err(CallError::NoFunction { file, operation });
        }
        let taken: BTreeSet<&str> = [script, CUTTING, CALLED].into_iter().flat_map(defined).collect();
        if let Some(name) = names.intersection(&taken).next() {
            return Err(CallError::NameTaken { file, name: (*name).to_owned() });
        }
        let body = CALLED.replacen("@CUTTING@", &without_heads(CUTTING), 1).replacen(
            "@CALL@",
            &without_heads(&self.text),
            1,
        );
        Ok(body.replacen("@FUNCTION@", operation.name(), 1).trim_end().to_owned())
    }
}

/// Names of the functions, classes and values that a Python text defines at its outermost level.
fn defined(text: &str) -> BTreeSet<&str> {
    text.lines().filter_map(defines).collect()
}

/// The name that a line defines at the outermost level.
fn defines(line: &str) -> Option<&str> {
    let is_name = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let behind = ["def ", "class "].into_iter().find_map(|word| line.strip_prefix(word));
    let name = match behind {
        Some(behind) => behind.split(['(', ':']).next()?,
        None => line.split_once(" = ")?.0,
    };
    is_name(name).then_some(name)
}

/// A text without what may stand only at the head of a file, or stands in the script already.
fn without_heads(text: &str) -> String {
    let stands_elsewhere =
        |line: &&str| line.starts_with("from __future__ ") || line.starts_with("from cutting ");
    text.lines().filter(|line| !stands_elsewhere(line)).collect::<Vec<_>>().join("\n").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(text: &str) -> Call {
        Call { path: PathBuf::from("calls.py"), text: text.to_owned() }
    }

    #[test]
    fn what_a_text_defines_is_seen_and_what_stands_deeper_is_not() {
        let text = "A = 1\ndef f(x):\n    b = 2\n    def g(): ...\nclass C:\n    d = 1\nif x == 3:\n    pass\nx[0] = 1\n";
        assert_eq!(defined(text), BTreeSet::from(["A", "f", "C"]));
    }

    #[test]
    fn a_file_of_calls_stands_in_the_script_without_its_heads_and_is_called_by_the_operations_name() {
        let text = "\"\"\"Calls.\"\"\"\nfrom __future__ import annotations\nfrom cutting import cut\n\ndef verify(release, step):\n    return {}\n";
        let body = call(text).body(OperationKind::Verify, "def other(): ...").unwrap();
        assert!(
            body.contains("return verify(release_folder(), step)") && body.contains("def cut("),
            "{body}"
        );
        let heads = ["from __future__", "from cutting"];
        assert!(!body.lines().any(|line| heads.iter().any(|head| line.starts_with(head))), "{body}");
        assert!(!body.contains("@C") && !body.contains("@F"), "{body}");
    }

    #[test]
    fn a_file_without_the_function_and_one_that_takes_a_name_of_the_script_are_refused() {
        let error = call("def decode(release, step): ...").body(OperationKind::Verify, "").unwrap_err();
        assert!(error.to_string().contains("no function verify(release, step)"), "{error}");
        let twice = "def verify(release, step): ...\ndef line(): ...";
        let error = call(twice).body(OperationKind::Verify, "def line(name):\n    pass\n").unwrap_err();
        assert!(error.to_string().contains("defines line"), "{error}");
        let error = call("def verify(): ...\ndef cut(): ...").body(OperationKind::Verify, "").unwrap_err();
        assert!(matches!(error, CallError::NameTaken { .. }), "{error}");
        let missing = Call::read(Path::new("/nowhere/calls.py")).unwrap_err().to_string();
        assert!(missing.contains("/nowhere/calls.py") && missing.contains("--call"), "{missing}");
    }
}
