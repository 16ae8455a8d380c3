//! One part of N of the cases, by a hash of the id.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Part `index` of `count`, both counted from one.
///
/// A case belongs to part `h mod count + 1`, `h` being the first eight bytes of the BLAKE3 hash of its id, little-endian.
/// This is a promise: it does not change with other cases, versions or machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Partition {
    index: u64,
    count: u64,
}

/// A partition that does not parse, and what would.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    /// Not of the form.
    #[error("--partition {text:?} is not of the form hash:K/N: the first of eight parts is hash:1/8")]
    Malformed {
        /// What was given.
        text: String,
    },
    /// Parts are counted from one.
    #[error(
        "--partition {text:?} asks for part 0, but parts are counted from one: the first of {count} is hash:1/{count}, the last is hash:{count}/{count}"
    )]
    Zero {
        /// What was given.
        text: String,
        /// Number of parts.
        count: u64,
    },
    /// There are fewer parts.
    #[error("--partition {text:?} asks for part {index} of {count}: give a part from 1 to {count}")]
    Beyond {
        /// What was given.
        text: String,
        /// Part that was asked for.
        index: u64,
        /// Number of parts.
        count: u64,
    },
}

impl Partition {
    /// Whether the case of that id belongs to this part.
    pub fn contains(self, id: &str) -> bool {
        let hash = blake3::hash(id.as_bytes());
        let word = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("a hash has 32 bytes"));
        word % self.count == self.index - 1
    }
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hash:{}/{}", self.index, self.count)
    }
}

impl FromStr for Partition {
    type Err = PartitionError;

    fn from_str(text: &str) -> Result<Self, PartitionError> {
        let malformed = || PartitionError::Malformed { text: text.to_owned() };
        let (index, count) =
            text.strip_prefix("hash:").and_then(|rest| rest.split_once('/')).ok_or_else(malformed)?;
        let index: u64 = index.parse().map_err(|_| malformed())?;
        let count: u64 = count.parse().map_err(|_| malformed())?;
        match index {
            _ if count == 0 => Err(malformed()),
            0 => Err(PartitionError::Zero { text: text.to_owned(), count }),
            _ if index > count => Err(PartitionError::Beyond { text: text.to_owned(), index, count }),
            _ => Ok(Self { index, count }),
        }
    }
}

impl TryFrom<String> for Partition {
    type Error = PartitionError;

    fn try_from(text: String) -> Result<Self, PartitionError> {
        text.parse()
    }
}

impl From<Partition> for String {
    fn from(partition: Partition) -> Self {
        partition.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_in_exactly_one_part() {
        let parts: Vec<Partition> = (1..=7).map(|k| format!("hash:{k}/7").parse().unwrap()).collect();
        let mut sizes = [0; 7];
        for index in 0..700 {
            let id = format!("verify/tiny-mla@{index}");
            let holders: Vec<_> = (0..7).filter(|k| parts[*k].contains(&id)).collect();
            assert_eq!(holders.len(), 1, "{id}");
            sizes[holders[0]] += 1;
        }
        assert!(sizes.iter().all(|size| (50..=150).contains(size)), "{sizes:?}");
    }

    #[test]
    fn the_part_of_an_id_is_a_promise() {
        // worked out by hand from the published BLAKE3 hashes af1349b9f5f9a1a6…, 17762fddd969a453… and 6437b3ac38465133…
        for (id, part) in [("", 864), ("a", 144), ("abc", 45)] {
            let found: Vec<_> =
                (1..=1000u64).filter(|k| Partition { index: *k, count: 1000 }.contains(id)).collect();
            assert_eq!(found, [part], "{id:?}");
        }
    }

    #[test]
    fn part_zero_is_refused_with_the_right_spelling() {
        let message = "hash:0/8".parse::<Partition>().unwrap_err().to_string();
        assert!(message.contains("counted from one") && message.contains("hash:1/8"), "{message}");
    }

    #[test]
    fn other_slips_say_what_would_be_right() {
        for (text, expected) in [
            ("1/8", "hash:1/8"),
            ("hash:9/8", "from 1 to 8"),
            ("hash:1/0", "hash:K/N"),
            ("hash:-1/8", "hash:K/N"),
            ("slice:1/8", "hash:K/N"),
        ] {
            let message = text.parse::<Partition>().unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
