//! The engine's own call in a script: a file of calls, made part of the script's text.
//!
//! Such a file is Python that has a function for each operation, by the operation's name: it is given the folder of a release and the step, takes the release's
//! own functions out of its files (`cut`) and hands them the arrays. Nothing of an adapter is in it, so what the script shows is the engine's. Of the file, and
//! of what it may import, the script has what its one operation needs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use shardcheck_engine::OperationKind;

const CALLED: &str = include_str!("called.py");
/// What calls may import by `from cutting import` and `from stepping import`: what they need of it is part of the script.
const CUTTING: &str = include_str!("../../../runners/python/reproductions/cutting.py");
const STEPPING: &str = include_str!("../../../runners/python/reproductions/stepping.py");

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
        let taken: BTreeSet<&str> =
            [script, CUTTING, STEPPING, CALLED].into_iter().flat_map(defined).collect();
        if let Some(name) = names.intersection(&taken).next() {
            return Err(CallError::NameTaken { file, name: (*name).to_owned() });
        }
        let texts = [CUTTING, STEPPING, &self.text].map(without_heads);
        let blocks: Vec<Block<'_>> = texts.iter().flat_map(|text| blocks(text)).collect();
        let calls = needed(&blocks, [operation.name()].into_iter().chain(words(CALLED)).collect());
        let body = CALLED.replacen("@CALLS@", calls.trim(), 1);
        Ok(body.replacen("@FUNCTION@", operation.name(), 1).trim_end().to_owned())
    }
}

/// The packages that a Python text imports at its outermost level.
pub(super) fn imported(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| ["import ", "from "].into_iter().find_map(|word| line.strip_prefix(word)))
        .filter_map(|behind| names(behind).next())
}

/// Names of the functions, classes and values that a Python text defines at its outermost level.
fn defined(text: &str) -> BTreeSet<&str> {
    text.lines().filter_map(defines).collect()
}

/// The name that a line defines at the outermost level.
fn defines(line: &str) -> Option<&str> {
    let behind = ["def ", "class "].into_iter().find_map(|word| line.strip_prefix(word));
    let name = match behind {
        Some(behind) => behind.split(['(', ':']).next()?,
        None => line.split_once(" = ")?.0,
    };
    is_name(name).then_some(name)
}

/// A piece of Python at the outermost level: a definition with what stands before it (comments, decorators), or any other statement.
struct Block<'a> {
    /// What it defines; nothing for an import, a docstring, or a statement.
    name: Option<&'a str>,
    text: String,
}

/// The pieces of a text, in order.
fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    // whether the last piece still waits for the line that it belongs to, or for the end of a string
    let (mut is_open, mut in_string) = (false, false);
    for line in text.lines() {
        let leads = line.starts_with(['#', '@']);
        if !(in_string || is_open || continues(line)) || blocks.is_empty() {
            blocks.push(Block { name: None, text: String::new() });
        }
        if let Some(block) = blocks.last_mut() {
            if !in_string && !continues(line) {
                block.name = block.name.or(defines(line));
                is_open = leads;
            }
            block.text += line;
            block.text.push('\n');
        }
        in_string ^= line.matches("\"\"\"").count() % 2 == 1;
    }
    blocks
}

/// Whether a line goes on with what the line before it began.
fn continues(line: &str) -> bool {
    let words = ["else:", "elif ", "except", "finally:"];
    line.is_empty()
        || line.starts_with([' ', ')', ']', '}'])
        || words.iter().any(|word| line.starts_with(word))
}

/// The text of the pieces that `wanted` names need, and of all that have no name, with what those need.
fn needed<'a>(blocks: &'a [Block<'_>], mut wanted: BTreeSet<&'a str>) -> String {
    let mut is_kept = vec![false; blocks.len()];
    loop {
        let found = blocks
            .iter()
            .enumerate()
            .position(|(at, block)| !is_kept[at] && block.name.is_none_or(|name| wanted.contains(name)));
        let Some(at) = found else { break };
        is_kept[at] = true;
        wanted.extend(words(&blocks[at].text));
    }
    blocks.iter().zip(is_kept).filter(|(_, is_kept)| *is_kept).map(|(block, _)| block.text.as_str()).collect()
}

/// Whatever may be a name in a text: not what stands in comments and in strings, unless a string as a whole is one.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut words = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(['"', '\'', '#']) {
        let (before, behind) = rest.split_at(at);
        words.extend(names(before));
        let is_formatted = before.ends_with(['f', 'F']);
        let quote = ["\"\"\"", "\"", "'"].into_iter().find(|quote| behind.starts_with(quote));
        let inside = &behind[quote.map_or(1, str::len)..];
        let end = ends_at(inside, quote.unwrap_or("\n"));
        let within = &inside[..end];
        if quote.is_some() && (is_formatted || is_name(within)) {
            words.extend(names(within));
        }
        rest = inside[end..].strip_prefix(quote.unwrap_or("\n")).unwrap_or(&inside[end..]);
    }
    words.extend(names(rest));
    words.into_iter()
}

/// Where what `quote` ends does end, past characters behind a backslash.
fn ends_at(text: &str, quote: &str) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices() {
        if !is_escaped && text[at..].starts_with(quote) {
            return at;
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    text.len()
}

fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// A text without what may stand only at the head of a file, or stands in the script already; two empty lines behind it.
fn without_heads(text: &str) -> String {
    let heads = ["from __future__ ", "from cutting ", "from stepping "];
    let stays = |line: &&str| !heads.iter().any(|head| line.starts_with(head));
    text.lines().filter(stays).collect::<Vec<_>>().join("\n").trim().to_owned() + "\n\n\n"
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
        let text = "\"\"\"Calls.\"\"\"\nfrom __future__ import annotations\nfrom cutting import cut\n\ndef verify(release, step):\n    return cut({})\n";
        let body = call(text).body(OperationKind::Verify, "def other(): ...").unwrap();
        assert!(body.contains("return verify(release, step)") && body.contains("def cut("), "{body}");
        let heads = ["from __future__", "from cutting", "from stepping"];
        assert!(!body.lines().any(|line| heads.iter().any(|head| line.starts_with(head))), "{body}");
        assert!(!body.contains("@C") && !body.contains("@F"), "{body}");
    }

    #[test]
    fn the_script_has_what_its_operation_needs_of_a_file_and_nothing_else() {
        let text = "\"\"\"Calls\nof two lines.\"\"\"\nimport ast\nSIZE = 3\nOTHER = \"\"\"4\nSIZE\n\"\"\"\n\n# of the helper\n@cache\ndef helper(\n    a,\n) -> int:\n    return SIZE\n\ndef verify(release, step):\n    return on_ranks(helper(1))\n\ndef decode(release, step):\n    return OTHER\n";
        let verify = call(text).body(OperationKind::Verify, "").unwrap();
        for part in [
            "of two lines.",
            "import ast",
            "SIZE = 3",
            "# of the helper\n@cache\ndef helper(\n    a,\n) -> int:",
            "def on_ranks(",
            "class RankGroup:",
        ] {
            assert!(verify.contains(part), "{part}\n{verify}");
        }
        for part in ["OTHER", "def decode(", "def cut(", "def caches_of("] {
            assert!(!verify.contains(part), "{part}\n{verify}");
        }
        let decode = call(text).body(OperationKind::Decode, "").unwrap();
        assert!(decode.contains("OTHER = \"\"\"4\nSIZE\n\"\"\"\n") && !decode.contains("helper"), "{decode}");
    }

    #[test]
    fn what_a_text_imports_is_packages_and_what_a_function_imports_is_its_own_matter() {
        let text = "import ast\nimport torch.distributed as dist\nfrom numpy import ones\ndef f():\n    import triton\n";
        assert_eq!(imported(text).collect::<Vec<_>>(), ["ast", "torch", "numpy"]);
    }

    #[test]
    fn names_in_prose_are_none_and_one_that_is_a_whole_string_or_is_formatted_is() {
        let text = "a(\"b\", 'c d', f\"{e} f\") # g 'h\n\"\"\"i\nj\"\"\"\nk = \"\\\"l\" + m\n";
        assert_eq!(words(text).collect::<Vec<_>>(), ["a", "b", "f", "e", "f", "k", "m"]);
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
