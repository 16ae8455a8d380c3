//! The GSM8K questions on disk: where the two files may lie, what they hold, and their checksums.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::outcome::Error;

/// The checksum of the 1,319 test questions as published (github openai/grade-school-math 3101c7d).
pub const PUBLISHED_TEST_SHA256: &str = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14";
/// The checksum of the 7,473 train questions as published (github openai/grade-school-math 3101c7d).
pub const PUBLISHED_TRAIN_SHA256: &str = "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465";

/// One question with its worked answer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Item {
    /// The question as it is put to the model.
    pub question: String,
    /// The worked answer; its last line is `#### N`.
    pub answer: String,
}

/// Both splits, in file order, with the checksums of the files they came from.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The questions that are scored.
    pub test: Vec<Item>,
    /// The questions that shots are drawn from.
    pub train: Vec<Item>,
    /// SHA-256 of the test file, lower-case hex.
    pub test_sha256: String,
    /// SHA-256 of the train file, lower-case hex.
    pub train_sha256: String,
}

impl Dataset {
    /// Reads both splits below `folder`.
    ///
    /// Accepted layouts: `test.jsonl` and `train.jsonl` in `folder` itself, in `folder/main` (the
    /// `openai/gsm8k` data set, converted from parquet) or in `folder/grade_school_math/data` (the original
    /// repository).
    ///
    /// # Errors
    /// [`Error::Data`] when no layout fits (with the conversion to do when only parquet is there) or a line is
    /// not `{"question": …, "answer": …}`; [`Error::Io`] when a file cannot be read.
    pub fn load(folder: &Path) -> Result<Self, Error> {
        let home = find_home(folder)?;
        let (test, test_sha256) = read_split(&home.join("test.jsonl"))?;
        let (train, train_sha256) = read_split(&home.join("train.jsonl"))?;
        Ok(Self { test, train, test_sha256, train_sha256 })
    }

    /// Whether both files are, byte for byte, the published ones.
    pub fn is_published(&self) -> bool {
        self.test_sha256 == PUBLISHED_TEST_SHA256 && self.train_sha256 == PUBLISHED_TRAIN_SHA256
    }
}

/// SHA-256 of a text's UTF-8 bytes in lower-case hex: lm-eval's `hash_string`.
pub fn sha256_hex(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// Bytes as lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn find_home(folder: &Path) -> Result<PathBuf, Error> {
    let candidates = [folder.to_owned(), folder.join("main"), folder.join("grade_school_math/data")];
    for home in &candidates {
        if home.join("test.jsonl").is_file() && home.join("train.jsonl").is_file() {
            return Ok(home.clone());
        }
    }
    if candidates.iter().any(|home| holds_parquet(home)) {
        return Err(Error::Data(format!(
            "{} holds GSM8K as parquet, which is not read here. Convert it once, for test and for train:\n  \
             python -c \"import pandas; pandas.read_parquet('main/test-00000-of-00001.parquet')\
             .to_json('main/test.jsonl', orient='records', lines=True, force_ascii=False)\"\n\
             The checksum of the prompts tells whether the conversion kept every character.",
            folder.display()
        )));
    }
    Err(Error::Data(format!(
        "no GSM8K data in {}: expected test.jsonl and train.jsonl there, in main/ or in grade_school_math/data/. \
         They are in the repository openai/grade-school-math, folder grade_school_math/data.",
        folder.display()
    )))
}

fn holds_parquet(folder: &Path) -> bool {
    fs::read_dir(folder).is_ok_and(|entries| {
        entries.flatten().any(|entry| entry.path().extension().is_some_and(|ext| ext == "parquet"))
    })
}

fn read_split(path: &Path) -> Result<(Vec<Item>, String), Error> {
    let bytes = fs::read(path).map_err(|source| Error::io("read", path, source))?;
    let checksum = hex(&Sha256::digest(&bytes));
    let text =
        String::from_utf8(bytes).map_err(|_| Error::Data(format!("{} is not UTF-8 text", path.display())))?;
    let items = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(index, line)| {
            serde_json::from_str(line).map_err(|why| {
                Error::Data(format!(
                    "{}:{}: expected {{\"question\": …, \"answer\": …}}: {why}",
                    path.display(),
                    index + 1
                ))
            })
        })
        .collect::<Result<Vec<Item>, Error>>()?;
    if items.is_empty() {
        return Err(Error::Data(format!("{} holds no question", path.display())));
    }
    Ok((items, checksum))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str, text: &str) {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    const LINE: &str = "{\"question\": \"Q\", \"answer\": \"#### 1\"}\n";

    #[test]
    fn each_of_the_three_layouts_is_found() {
        for prefix in ["", "main/", "grade_school_math/data/"] {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), &format!("{prefix}test.jsonl"), LINE);
            write(folder.path(), &format!("{prefix}train.jsonl"), &LINE.repeat(2));
            let data = Dataset::load(folder.path()).unwrap();
            assert_eq!((data.test.len(), data.train.len()), (1, 2), "{prefix}");
            assert_ne!(data.test_sha256, data.train_sha256);
            assert!(!data.is_published());
        }
    }

    #[test]
    fn a_parquet_folder_gets_the_conversion_and_an_empty_one_the_expected_names() {
        let folder = tempfile::tempdir().unwrap();
        let message = Dataset::load(folder.path()).unwrap_err().to_string();
        assert!(message.contains("expected test.jsonl and train.jsonl"), "{message}");
        write(folder.path(), "main/test-00000-of-00001.parquet", "PAR1");
        let message = Dataset::load(folder.path()).unwrap_err().to_string();
        assert!(message.contains("read_parquet"), "{message}");
    }

    #[test]
    fn a_broken_line_is_named_by_file_and_number() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "test.jsonl", &format!("{LINE}{{\"question\": \"Q\"}}\n"));
        write(folder.path(), "train.jsonl", LINE);
        let message = Dataset::load(folder.path()).unwrap_err().to_string();
        assert!(message.contains("test.jsonl:2") && message.contains("answer"), "{message}");
    }

    #[test]
    fn text_is_hashed_as_utf8() {
        assert_eq!(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(sha256_hex("é").len(), 64);
    }
}
