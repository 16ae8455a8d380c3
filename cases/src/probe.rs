//! Input families, each made to expose a class of faults.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How queries, keys and values are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Probe {
    /// Independent, zero mean, scores of unit deviation.
    Gaussian,
    /// The newest visible keys of each request take most of the weight: a wrong causal edge moves the output by its own size.
    NewestDominant,
    /// The first key that a row must not see is aligned with its query and carries a huge value.
    ForbiddenPoison,
    /// All scores strongly negative: an empty shard that claims LSE 0 takes over.
    Cold,
    /// All scores strongly positive: overflow of an unshifted exponential. In the write family, where nothing is scored, values
    /// up to and beyond the largest one that the cache format holds.
    Hot,
    /// Position 0 takes most of the weight, as attention sinks do.
    Sink,
    /// A large common part in keys and values: normalisation and subtraction errors show.
    CommonMode,
    /// Values that cancel to nearly nothing, queries that cancel in the product.
    Cancellation,
    /// All scores equal and values that spell the token's position, so that the attended set can be read back.
    TokenCode,
}

impl Probe {
    /// All probes, in a stable order.
    pub const ALL: [Self; 9] = [
        Self::Gaussian,
        Self::NewestDominant,
        Self::ForbiddenPoison,
        Self::Cold,
        Self::Hot,
        Self::Sink,
        Self::CommonMode,
        Self::Cancellation,
        Self::TokenCode,
    ];

    /// Name as it stands in case ids and filters.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gaussian => "gaussian",
            Self::NewestDominant => "newest-dominant",
            Self::ForbiddenPoison => "forbidden-poison",
            Self::Cold => "cold",
            Self::Hot => "hot",
            Self::Sink => "sink",
            Self::CommonMode => "common-mode",
            Self::Cancellation => "cancellation",
            Self::TokenCode => "token-code",
        }
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Probe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|probe| probe.name() == text).ok_or_else(|| {
            format!("unknown probe {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}
