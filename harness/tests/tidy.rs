//! Rules of the house that a compiler does not check.

use std::path::{Path, PathBuf};

const MOST_LINES_A_FILE: usize = 600;
const MOST_LINES_A_FUNCTION: usize = 80;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

fn files(folder: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of the repository can be read") {
        let path = entry.expect("an entry can be read").path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
        if name.starts_with('.') && name != ".ci"
            || ["target", "runs", "node_modules"].contains(&name.as_str())
        {
            continue;
        }
        if path.is_dir() {
            files(&path, extensions, found);
        } else if path.extension().and_then(|e| e.to_str()).is_some_and(|e| extensions.contains(&e)) {
            found.push(path);
        }
    }
}

fn sources(extensions: &[&str]) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    files(&root(), extensions, &mut found);
    assert!(!found.is_empty(), "no source file found");
    found
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(&path).expect("a source file is UTF-8");
            (path.strip_prefix(root()).expect("below the root").to_owned(), text)
        })
        .collect()
}

#[test]
fn no_source_file_is_longer_than_a_person_reads_in_one_go() {
    let long: Vec<_> = sources(&["rs", "py", "cu", "h"])
        .into_iter()
        .filter(|(_, text)| text.lines().count() > MOST_LINES_A_FILE)
        .map(|(path, text)| format!("{} has {} lines", path.display(), text.lines().count()))
        .collect();
    assert!(long.is_empty(), "split by meaning:\n{}", long.join("\n"));
}

#[test]
fn every_rust_file_says_in_its_first_line_what_it_is() {
    let silent: Vec<_> = sources(&["rs"])
        .into_iter()
        .filter(|(_, text)| !text.starts_with("//! "))
        .map(|(path, _)| path.display().to_string())
        .collect();
    assert!(silent.is_empty(), "no first-line sentence in:\n{}", silent.join("\n"));
}

#[test]
fn no_file_is_called_after_what_it_is_not() {
    let vague: Vec<_> = sources(&["rs", "py"])
        .into_iter()
        .filter(|(path, _)| {
            let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
            ["utils", "util", "common", "helpers", "misc"].contains(&stem)
        })
        .collect();
    assert!(vague.is_empty(), "{vague:?}");
}

#[test]
fn functions_fit_on_a_screen() {
    let mut long = Vec::new();
    for (path, text) in sources(&["rs"]) {
        let mut start = None;
        for (number, line) in text.lines().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let code = line.trim_start();
            let opens =
                ["fn ", "pub fn ", "pub(crate) fn ", "pub(super) fn ", "unsafe fn ", "pub unsafe fn "];
            if start.is_none() && opens.iter().any(|word| code.starts_with(word)) {
                start = Some((number, indent, code.to_owned()));
            }
            if let Some((first, depth, name)) = &start
                && indent == *depth
                && (code == "}" || code.ends_with(';') || (number == *first && code.ends_with('}')))
            {
                if number - first > MOST_LINES_A_FUNCTION {
                    long.push(format!("{}:{} {name} ({} lines)", path.display(), first + 1, number - first));
                }
                start = None;
            }
        }
    }
    assert!(long.is_empty(), "split by meaning:\n{}", long.join("\n"));
}

#[test]
fn the_repository_names_no_machine_and_no_registry() {
    let mut found = Vec::new();
    let words = [
        concat!("/ho", "me/"),
        concat!("/ro", "ot/"),
        concat!("/wo", "rk/"),
        concat!("crates", ".io"),
        concat!("pypi", ".org"),
    ];
    for (path, text) in sources(&["rs", "py", "md", "toml", "json", "sh"]) {
        for word in words.iter().filter(|word| text.contains(**word)) {
            found.push(format!("{} contains {word}", path.display()));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn unfinished_and_silenced_code_is_not_left_behind() {
    let marks = [
        concat!("todo", "!("),
        concat!("unimplemented", "!("),
        concat!("FIX", "ME"),
        concat!("#[", "ignore"),
        concat!("#[", "allow("),
    ];
    let mut found = Vec::new();
    for (path, text) in sources(&["rs"]) {
        for mark in marks.iter().filter(|mark| text.contains(**mark)) {
            found.push(format!("{} contains {mark}", path.display()));
        }
    }
    assert!(
        found.is_empty(),
        "finish it, or state the reason with #[expect(…, reason)]:\n{}",
        found.join("\n")
    );
}
