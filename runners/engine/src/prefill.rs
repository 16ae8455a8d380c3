//! How prefill context parallelism shares the rows of a batch out over its ranks: the published variants.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Which rows of a prompt a rank of prefill context parallelism takes. `P` ranks, `q` new rows of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PcpStrategy {
    /// Each sequence in 2P chunks of ceil(q / 2P) rows, the last ones short or absent; rank r takes chunks r and 2P − 1 − r
    /// (vLLM DualChunkSwap).
    HeadTail,
    /// As [`Self::HeadTail`], but a sequence that would leave a chunk absent is whole on every rank (vLLM with DCP inside PCP).
    HeadTailOrWhole,
    /// Each sequence in 2P blocks that differ by one row at most, the longer ones first; rank r takes blocks r and 2P − 1 − r.
    /// A sequence has no rows or 2P and more (SGLang zigzag).
    Zigzag,
    /// Row i of the flattened batch belongs to rank i mod P, whatever its sequence (ATOM, SGLang).
    RoundRobin,
    /// Each sequence in P chunks of ceil(q / P) rows, the last ones short or absent; rank r takes chunk r.
    Contiguous,
}

impl PcpStrategy {
    /// All strategies, in a stable order.
    pub const ALL: [Self; 5] =
        [Self::HeadTail, Self::HeadTailOrWhole, Self::Zigzag, Self::RoundRobin, Self::Contiguous];

    /// Name as it stands in case ids and on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::HeadTail => "head_tail",
            Self::HeadTailOrWhole => "head_tail_or_whole",
            Self::Zigzag => "zigzag",
            Self::RoundRobin => "round_robin",
            Self::Contiguous => "contiguous",
        }
    }
}

/// What the rows of decodes in a batch of prefill context parallelism do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PcpDecodes {
    /// They are shared out like any other row.
    Split,
    /// Every rank has all of them.
    Replicated,
    /// The d-th decode that has rows, counted from 0, is whole on rank d mod P.
    Owned,
}

impl PcpDecodes {
    /// All of them, in a stable order.
    pub const ALL: [Self; 3] = [Self::Split, Self::Replicated, Self::Owned];

    /// Name as it stands in case ids and on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Split => "split",
            Self::Replicated => "replicated",
            Self::Owned => "owned",
        }
    }
}

impl fmt::Display for PcpStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for PcpDecodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PcpStrategy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|known| known.name() == text).ok_or_else(|| {
            format!("unknown strategy {text:?}; known are {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

impl FromStr for PcpDecodes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|known| known.name() == text)
            .ok_or_else(|| format!("decodes are {}; not {text:?}", Self::ALL.map(Self::name).join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_are_those_on_the_wire() {
        for strategy in PcpStrategy::ALL {
            assert_eq!(strategy.name().parse::<PcpStrategy>().unwrap(), strategy);
            assert_eq!(serde_json::to_value(strategy).unwrap(), strategy.name());
        }
        for decodes in PcpDecodes::ALL {
            assert_eq!(decodes.name().parse::<PcpDecodes>().unwrap(), decodes);
            assert_eq!(serde_json::to_value(decodes).unwrap(), decodes.name());
        }
        assert!("stripe".parse::<PcpStrategy>().unwrap_err().contains("round_robin"));
        assert!("none".parse::<PcpDecodes>().unwrap_err().contains("owned"));
    }
}
