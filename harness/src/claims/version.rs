//! Versions of engines and ranges of them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A version, ordered as PEP 440 orders releases: dotted parts as numbers (a missing part is zero), then `dev` < `a` < `b` < `rc` <
/// the release < `post`. What stands behind a `+` (a build) does not count, and a leading `v` neither.
#[derive(Debug, Clone)]
pub struct Version {
    text: String,
    key: Key,
}

/// What a version is ordered by: parts without trailing zeros, pre-release, post-release, development release.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    parts: Vec<u64>,
    /// 0 for a development release of the release itself, 1 to 3 for `a`, `b`, `rc`, 4 for none.
    pre: (u8, u64),
    /// 0 for none, else the number and one.
    post: u64,
    /// The greatest number for none.
    dev: u64,
}

/// No pre-release.
const RELEASE: (u8, u64) = (4, 0);

/// A version or a range that does not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VersionError {
    /// Not a version.
    #[error("{text:?} is not a version: dotted numbers, then rc1, .post1 or .dev1 at most, as in 0.25.1rc2")]
    Version {
        /// What was given.
        text: String,
    },
    /// Not a range.
    #[error("{text:?} is not a range of versions: comparisons joined by commas, as in \">=0.11.2, <0.25.1\"")]
    Range {
        /// What was given.
        text: String,
    },
}

impl FromStr for Version {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, VersionError> {
        let error = || VersionError::Version { text: text.to_owned() };
        let trimmed = text.trim();
        let body = trimmed.split('+').next().unwrap_or_default().to_ascii_lowercase();
        let body = body.strip_prefix('v').unwrap_or(&body);
        let key = Key::read(body).ok_or_else(error)?;
        Ok(Self { text: trimmed.to_owned(), key })
    }
}

impl Key {
    fn read(text: &str) -> Option<Self> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (release, mut rest) = (text[..end].trim_end_matches('.'), &text[end..]);
        let mut parts = release.split('.').map(|part| part.parse().ok()).collect::<Option<Vec<u64>>>()?;
        while parts.len() > 1 && parts.last() == Some(&0) {
            parts.pop();
        }
        let mut key = Self { parts, pre: RELEASE, post: 0, dev: u64::MAX };
        let mut highest = 0;
        while !rest.is_empty() {
            let word = rest.trim_start_matches(['.', '-', '_']);
            let letters = word.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(word.len());
            let behind = word[letters..].trim_start_matches(['.', '-', '_']);
            let digits = behind.find(|c: char| !c.is_ascii_digit()).unwrap_or(behind.len());
            let number = if digits == 0 { 0 } else { behind[..digits].parse::<u64>().ok()? };
            let place = match &word[..letters] {
                "a" | "alpha" => key.set_pre(1, number),
                "b" | "beta" => key.set_pre(2, number),
                "rc" | "c" => key.set_pre(3, number),
                "post" | "rev" | "r" => {
                    key.post = number.checked_add(1)?;
                    2
                }
                "dev" => {
                    key.dev = number;
                    3
                }
                _ => return None,
            };
            // each at most once, in this order
            if place <= highest {
                return None;
            }
            highest = place;
            rest = &behind[digits..];
        }
        if key.pre == RELEASE && key.post == 0 && key.dev != u64::MAX {
            key.pre = (0, 0);
        }
        Some(key)
    }

    fn set_pre(&mut self, kind: u8, number: u64) -> u8 {
        self.pre = (kind, number);
        1
    }

    fn is_release(&self) -> bool {
        self.pre == RELEASE && self.post == 0 && self.dev == u64::MAX
    }
}

impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Version {}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// How a version is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relation {
    AtMost,
    AtLeast,
    Below,
    Above,
    Equal,
    Unequal,
}

impl Relation {
    /// Longer signs first, so that `<=` is not read as `<`.
    const ALL: [(Self, &'static str); 6] = [
        (Self::AtMost, "<="),
        (Self::AtLeast, ">="),
        (Self::Unequal, "!="),
        (Self::Equal, "=="),
        (Self::Below, "<"),
        (Self::Above, ">"),
    ];

    fn sign(self) -> &'static str {
        Self::ALL.into_iter().find(|(relation, _)| *relation == self).map_or("", |(_, sign)| sign)
    }

    /// As PEP 440 has it, `<V` leaves the pre-releases of a release V out, since what V brings is in them, and `>V` its
    /// post-releases.
    fn holds(self, version: &Version, bound: &Version) -> bool {
        let same_release = version.key.parts == bound.key.parts && bound.key.is_release();
        match self {
            Self::AtMost => version <= bound,
            Self::AtLeast => version >= bound,
            Self::Below => version < bound && !same_release,
            Self::Above => version > bound && !same_release,
            Self::Equal => version == bound,
            Self::Unequal => version != bound,
        }
    }
}

/// A range of versions: comparisons joined by commas, all of which must hold; a bare version is that version alone, and `*` is any.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Versions(Vec<(Relation, Version)>);

impl Versions {
    /// Whether the range holds the version.
    pub fn contains(&self, version: &Version) -> bool {
        self.0.iter().all(|(relation, bound)| relation.holds(version, bound))
    }
}

impl FromStr for Versions {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, VersionError> {
        if text.trim() == "*" {
            return Ok(Self(Vec::new()));
        }
        let read = |part: &str| -> Result<(Relation, Version), VersionError> {
            let part = part.trim();
            let sign = Relation::ALL.into_iter().find(|(_, sign)| part.starts_with(sign));
            let (relation, rest) =
                sign.map_or((Relation::Equal, part), |(relation, sign)| (relation, &part[sign.len()..]));
            match rest.trim() {
                "" => Err(VersionError::Range { text: text.to_owned() }),
                version => Ok((relation, version.parse()?)),
            }
        };
        Ok(Self(text.split(',').map(read).collect::<Result<_, _>>()?))
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("*");
        }
        let parts: Vec<_> =
            self.0.iter().map(|(relation, bound)| format!("{}{bound}", relation.sign())).collect();
        f.write_str(&parts.join(", "))
    }
}

impl TryFrom<String> for Versions {
    type Error = VersionError;

    fn try_from(text: String) -> Result<Self, VersionError> {
        text.parse()
    }
}

impl From<Versions> for String {
    fn from(versions: Versions) -> Self {
        versions.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Version {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    fn contains(range: &str, text: &str) -> bool {
        range.parse::<Versions>().unwrap_or_else(|error| panic!("{error}")).contains(&version(text))
    }

    #[test]
    fn versions_are_ordered_by_numbers_and_by_what_comes_before_and_after_a_release() {
        let ascending = [
            "0.9",
            "0.11.0.dev3",
            "0.11.0a1.dev2",
            "0.11.0a1",
            "0.11.0b2",
            "0.11.0rc1.dev1",
            "0.11.0rc1",
            "0.11.0rc10",
            "0.11.0",
            "0.11.0.post1.dev4",
            "0.11.0.post1",
            "0.11.2",
            "0.100.0",
            "1",
        ];
        for pair in ascending.windows(2) {
            assert!(version(pair[0]) < version(pair[1]), "{} < {}", pair[0], pair[1]);
        }
    }

    #[test]
    fn zeros_builds_and_a_leading_letter_make_no_other_version() {
        for (a, b) in
            [("0.33", "0.33.0"), ("0.33.0+cpu", "0.33.0"), ("v0.33.0", "0.33"), ("1.0rc1", "1.0.0-rc.1")]
        {
            assert_eq!(version(a), version(b), "{a} {b}");
        }
    }

    #[test]
    fn what_is_no_version_is_refused() {
        for text in ["", "latest", "1..2", "1.x", "0.1rc1rc2", "0.1.dev1rc1", "99999999999999999999999"] {
            assert!(text.parse::<Version>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_range_holds_what_all_its_comparisons_hold() {
        assert!(contains("<=0.24.0", "0.24") && !contains("<=0.24.0", "0.24.0.post1"));
        assert!(contains(">=0.11.2, <0.25.1", "0.25.0") && !contains(">=0.11.2, <0.25.1", "0.25.1"));
        assert!(!contains(">=0.11.2,<0.25.1", "0.9.0"), "parts are numbers");
        assert!(contains("0.33.0", "0.33.0+cpu") && !contains("0.33.0", "0.33.0rc1"));
        assert!(contains("!=0.30.0, >0.29", "0.31.0") && !contains("!=0.30.0, >0.29", "0.30"));
        assert!(contains("*", "7"));
    }

    #[test]
    fn a_release_is_not_below_its_own_candidates_where_a_fix_is_told_by_the_release() {
        assert!(!contains("<0.25.1", "0.25.1rc1") && contains("<0.25.1", "0.25.0rc1"));
        assert!(contains(">=0.25.1rc1", "0.25.1rc2") && contains("<0.25.1rc2", "0.25.1rc1"));
        assert!(!contains(">0.25.1", "0.25.1.post1") && contains(">=0.25.1", "0.25.1.post1"));
    }

    #[test]
    fn a_range_survives_a_round_trip_and_half_a_comparison_is_refused() {
        for text in ["<=0.24.0", ">=0.11.2, <0.25.1", "==0.33.0", "*"] {
            assert_eq!(text.parse::<Versions>().unwrap().to_string(), text);
        }
        for text in ["", "<", ">=0.1,", "=>1", "~1.0"] {
            assert!(text.parse::<Versions>().is_err(), "{text}");
        }
    }
}
