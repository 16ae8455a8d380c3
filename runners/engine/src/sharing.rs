//! Layers that share a selection of tokens (IndexShare): what a model's configuration says of them, and the tensors of the answer.

use serde::{Deserialize, Serialize};

use crate::operation::Provenance::Output;
use crate::operation::spec;
use crate::{TensorSpec, vocabulary};

vocabulary! {
    /// Whose reading of a model's configuration.
    SharingRule ("rule of sharing") {
        /// ATOM: layers share where selections are kept, which is asked for or follows from a period above 1. Types come first, then a
        /// pattern, then the period: layer l computes where max(l − offset, 0) mod period is 0. The offset is 1 where there is none.
        Atom = "atom",
        /// vLLM: a pattern comes first, then the period: layer l computes where max(l − offset + 1, 0) mod period is 0. The offset is 2
        /// where there is none. Types and whether selections are kept are not read.
        Vllm = "vllm",
    }
}

vocabulary! {
    /// What a layer has of an indexer.
    IndexerType ("type of a layer's indexer") {
        /// One of its own.
        Full = "full",
        /// The selection of the layer before it that has one.
        Shared = "shared",
    }
}

/// What a model's configuration says of the layers that share a selection. Under either rule, a layer that a pattern or the types are too
/// short for has an indexer of its own, and so has every draft layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexSharing {
    /// Whose reading is asked for.
    pub rule: SharingRule,
    /// Layers of the model (`num_hidden_layers`).
    pub layers: usize,
    /// Draft layers behind them (MTP).
    pub draft_layers: usize,
    /// Whether selections are kept (`use_index_cache`).
    pub index_cache: bool,
    /// Period of the layers that compute (`index_topk_freq`), 1 and more.
    pub frequency: usize,
    /// Layers before the period begins (`index_skip_topk_offset`), where the configuration has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<usize>,
    /// A type for each layer in letters, F for full and S for shared (`index_topk_pattern`), where the configuration has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// A type for each layer (`indexer_types`), where the configuration has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub types: Option<Vec<IndexerType>>,
}

pub(crate) const TENSORS: &[TensorSpec] = &[
    spec("computes", Output, "u8 [1, n]", "1 for a layer whose indexer selects, 0 for one that shares"),
    spec(
        "source",
        Output,
        "i32 [1, n]",
        "layer by whose selection each layer attends; a layer that computes is its own",
    ),
    spec(
        "rebuilds",
        Output,
        "u8 [1, n]",
        "1 for a layer that makes lists, row pointers and work plan anew before it attends, 0 for one that takes those that are there",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_are_those_on_the_wire() {
        for rule in SharingRule::ALL {
            assert_eq!(rule.name().parse::<SharingRule>().unwrap(), rule);
            assert_eq!(serde_json::to_value(rule).unwrap(), rule.name());
        }
        for kind in IndexerType::ALL {
            assert_eq!(kind.name().parse::<IndexerType>().unwrap(), kind);
        }
        assert!("sglang".parse::<SharingRule>().unwrap_err().contains("vllm"));
    }
}
