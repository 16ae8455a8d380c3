//! Streams of random numbers: one for each thing that is drawn, so that nothing is drawn twice and nothing shifts another.

use shardcheck_formats::Counter;

/// What is drawn under a seed. The numbers are part of what a seed means: a number is never given to anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub(crate) enum Stream {
    /// Queries.
    Query = 1,
    /// Keys.
    Key = 2,
    /// Values.
    Value = 3,
    /// What all keys of a probe have in common.
    KeyMean = 4,
    /// What all values of a probe have in common.
    ValueMean = 5,
    /// Up-projections.
    UpProjection = 6,
    /// Blocks that requests are given.
    Placement = 7,
    /// Sinks of heads.
    Sinks = 8,
    /// Outputs of states that are merged.
    MergeOut = 101,
    /// Their LSEs.
    MergeLse = 102,
    /// Which of them are empty.
    MergeEmpty = 103,
    /// Sums of kernel segments.
    MergeSum = 104,
    /// Lengths of rows of kernel segments.
    MergeRowLen = 105,
    /// Rows of covering arrays.
    Covering = 200,
    /// Seeds of a suite's cases.
    CaseSeeds = 300,
    /// Sequences of a suite.
    Sequences = 301,
    /// Logits of a router.
    RouteLogits = 401,
    /// Biases of a router.
    RouteBias = 402,
    /// Token ids of a router.
    RouteTokenIds = 403,
    /// Experts by token id.
    RouteTable = 404,
    /// The order in which a session's blocks are given away at first.
    SessionBlocks = 410,
    /// Tokens of a layer of experts.
    MoeHidden = 411,
    /// Gates of experts.
    MoeGate = 412,
    /// Up-projections of experts.
    MoeUp = 413,
    /// Down-projections of experts.
    MoeDown = 414,
    /// Gate of the shared expert.
    MoeSharedGate = 415,
    /// Its up-projection.
    MoeSharedUp = 416,
    /// Its down-projection.
    MoeSharedDown = 417,
    /// The order of blocks in the caches that a session takes requests over from.
    SourceBlocks = 420,
    /// Weights of a stack.
    StackWeights = 430,
    /// Token ids of a stack.
    StackTokens = 431,
    /// Weights of its recurrent layers.
    StackRecurrence = 432,
    /// Weights of its mixtures of experts.
    StackMixture = 433,
    /// Tokens that its rows select.
    StackSelection = 434,
    /// The order of the tokens of a text that is laid out.
    StackText = 435,
    /// Queries of an indexer.
    IndexQuery = 501,
    /// Weights of its heads.
    IndexWeights = 502,
    /// Its keys.
    IndexKey = 503,
    /// Scales of its keys.
    IndexScale = 504,
    /// Blocks of its cache.
    IndexPlacement = 505,
    /// The rank that owns the best tokens.
    IndexRank = 506,
    /// Tokens that rows attend to.
    Selected = 511,
    /// What tokens have to be pooled.
    CompressValue = 521,
    /// Their gates.
    CompressGate = 522,
    /// Biases of gates.
    CompressBias = 523,
    /// Logits of target and drafts.
    AcceptanceLogits = 541,
    /// Drafted tokens.
    AcceptanceDrafts = 542,
    /// Numbers that decide.
    AcceptanceUniform = 543,
    /// Noise of drawn tokens.
    AcceptanceNoise = 544,
    /// Temperatures.
    AcceptanceTemperature = 545,
    /// Weights of a recurrent layer.
    KdaWeights = 551,
    /// Its rows.
    KdaRows = 552,
}

impl Stream {
    /// Numbers of the stream under a seed.
    pub fn counter(self, seed: u64) -> Counter {
        Counter::new(seed, self as u32)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_is_drawn_does_not_depend_on_what_else_is() {
        let first = |stream: Stream| stream.counter(7).next_u64();
        assert_eq!(first(Stream::StackText), first(Stream::StackText));
        assert_ne!(first(Stream::StackText), first(Stream::StackRecurrence));
        assert_ne!(first(Stream::AcceptanceDrafts), first(Stream::Query));
        assert_ne!(first(Stream::KdaRows), first(Stream::Query));
    }

    /// Two entries of one enumeration can't have the same number, so it is enough that no number stands elsewhere.
    #[test]
    fn nothing_is_drawn_from_a_stream_that_has_no_entry_here() {
        let mut elsewhere = Vec::new();
        files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut |path, text| {
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            let named = ["Counter::new(", "stream: Stream::"].iter().any(|made| code.contains(made));
            let numbered = code.lines().any(|line| line.contains("STREAM") || line.contains("enum Stream"));
            if (named || numbered) && path.file_name() != Some("stream.rs".as_ref()) {
                elsewhere.push(path.to_owned());
            }
        });
        assert_eq!(elsewhere, Vec::<std::path::PathBuf>::new());
    }

    fn files(folder: &Path, found: &mut dyn FnMut(&Path, &str)) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                files(&path, found);
            } else if path.extension() == Some("rs".as_ref()) && path.file_name() != Some("tests.rs".as_ref())
            {
                found(&path, &std::fs::read_to_string(&path).unwrap());
            }
        }
    }
}
