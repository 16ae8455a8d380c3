//! The part of a suite whose activations or states are f16.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{AttentionPart, AxesFile, Collector, Edge, MergePart, WrittenSequence};

/// Cases whose activations or states are f16. They come last, so that every other case keeps the seed that it had without them.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
pub(super) struct HalfParts {
    #[serde(default)]
    pub(super) edge: Vec<Edge>,
    #[serde(default)]
    attention: Vec<AttentionPart>,
    #[serde(default)]
    merge: Vec<MergePart>,
    /// Cases by hand of every other family.
    #[serde(default)]
    pub(super) written: Vec<WrittenSequence>,
}

impl HalfParts {
    pub(super) fn collect(&self, axes: &BTreeMap<String, AxesFile>, seed: u64, suite: &mut Collector) {
        for edge in &self.edge {
            edge.collect(suite);
        }
        for part in &self.attention {
            part.collect(axes, seed, suite);
        }
        for part in &self.merge {
            part.collect(seed, suite);
        }
        for part in &self.written {
            part.collect(suite);
        }
    }
}
