//! Progress records: how often each rank entered something that it may wait in, and what it is in.
//!
//! A file of 64 bytes of head and one record of 64 bytes a rank, so that a rank writes its own record and nobody else's.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Records in the file.
pub const RANKS: usize = 1024;

const RECORD_BYTES: usize = 64;
const LABEL_BYTES: usize = RECORD_BYTES - 8;
const MAGIC: [u8; 4] = *b"SCKP";
const VERSION: u32 = 1;

/// What one rank says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgressRecord {
    /// Rank.
    pub rank: usize,
    /// How often it entered something.
    pub count: u64,
    /// What it is in.
    pub label: String,
}

/// The file.
#[derive(Debug)]
pub struct Progress {
    file: File,
}

impl Progress {
    /// Makes the file anew, with nothing counted.
    ///
    /// # Errors
    /// What the file system says.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(((1 + RANKS) * RECORD_BYTES) as u64)?;
        let mut head = MAGIC.to_vec();
        head.extend(VERSION.to_le_bytes());
        head.extend((RANKS as u32).to_le_bytes());
        file.write_all_at(&head, 0)?;
        Ok(Self { file })
    }

    /// Opens the file that the harness made.
    ///
    /// # Errors
    /// What the file system says.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::options().read(true).write(true).open(path)? })
    }

    /// Notes that `rank` enters `label` as its `count`-th.
    ///
    /// # Errors
    /// What the file system says; a rank beyond [`RANKS`] is an error too.
    pub fn enter(&self, rank: usize, count: u64, label: &str) -> io::Result<()> {
        if rank >= RANKS {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("rank {rank} has no record")));
        }
        let mut record = [0u8; RECORD_BYTES];
        record[..8].copy_from_slice(&count.to_le_bytes());
        let length =
            (0..=label.len().min(LABEL_BYTES)).rev().find(|at| label.is_char_boundary(*at)).unwrap_or(0);
        record[8..8 + length].copy_from_slice(&label.as_bytes()[..length]);
        self.file.write_all_at(&record, ((1 + rank) * RECORD_BYTES) as u64)
    }

    /// Records of the ranks that have counted at all.
    ///
    /// # Errors
    /// What the file system says.
    pub fn records(&self) -> io::Result<Vec<ProgressRecord>> {
        let mut bytes = vec![0u8; RANKS * RECORD_BYTES];
        self.file.read_exact_at(&mut bytes, RECORD_BYTES as u64)?;
        let records = bytes.as_chunks::<RECORD_BYTES>().0.iter().enumerate().filter_map(|(rank, record)| {
            let mut word = [0u8; 8];
            word.copy_from_slice(&record[..8]);
            let count = u64::from_le_bytes(word);
            let label = record[8..].split(|byte| *byte == 0).next().unwrap_or_default();
            let label = String::from_utf8_lossy(label).into_owned();
            (count > 0).then_some(ProgressRecord { rank, count, label })
        });
        Ok(records.collect())
    }

    /// The rank that is behind, and in words where it and the others are. `None` when no rank has counted.
    pub fn straggler(&self) -> Option<(usize, String)> {
        let records = self.records().ok()?;
        let behind = records.iter().min_by_key(|record| record.count)?;
        let ahead = records.iter().max_by_key(|record| record.count)?;
        let mut text = format!("{} (number {})", behind.label, behind.count);
        if ahead.count > behind.count {
            text.push_str(&format!("; rank {} is in {} (number {})", ahead.rank, ahead.label, ahead.count));
        }
        Some((behind.rank, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_entered_least_is_named_with_what_the_others_wait_in() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("progress");
        let progress = Progress::create(&path).unwrap();
        assert_eq!(progress.straggler(), None);
        let adapter = Progress::open(&path).unwrap();
        adapter.enter(0, 4, "all_gather").unwrap();
        adapter.enter(1, 3, "decode").unwrap();
        adapter.enter(2, 4, "all_gather").unwrap();
        let (rank, text) = progress.straggler().unwrap();
        assert_eq!(rank, 1);
        assert!(text.contains("decode") && text.contains("all_gather"), "{text}");
    }

    #[test]
    fn a_long_label_is_cut_between_characters() {
        let folder = tempfile::tempdir().unwrap();
        let progress = Progress::create(&folder.path().join("progress")).unwrap();
        progress.enter(5, 1, &"é".repeat(40)).unwrap();
        assert_eq!(progress.records().unwrap()[0].label, "é".repeat(28));
        assert!(progress.enter(RANKS, 1, "x").is_err());
    }
}
