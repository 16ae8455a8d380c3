//! The part of a suite that is about layers that share a selection: a covering array over configurations, and cases by hand.

use serde::Deserialize;
use shardcheck_engine::SharingRule;

use super::Collector;
use crate::covering::covering;
use crate::{Case, IndexLayersCase};

/// A covering array of configurations, and cases by hand.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct IndexLayersPart {
    strength: usize,
    count: usize,
    rules: Vec<SharingRule>,
    layers: Vec<usize>,
    draft_layers: Vec<usize>,
    kept: Vec<bool>,
    frequencies: Vec<usize>,
    /// Offsets; −1 for a configuration without one.
    offsets: Vec<i64>,
    /// Patterns and types in letters, of which a model with fewer layers has the first; `none` for none.
    patterns: Vec<String>,
    types: Vec<String>,
    /// Cases by hand.
    written: Vec<String>,
}

impl IndexLayersPart {
    pub(super) fn collect(&self, seed: u64, suite: &mut Collector) {
        for id in &self.written {
            suite.add(id.parse().unwrap_or_else(|error| panic!("a suite has layers by hand: {error}")));
        }
        let levels = [
            self.rules.len(),
            self.layers.len(),
            self.draft_layers.len(),
            self.kept.len(),
            self.frequencies.len(),
            self.offsets.len(),
            self.patterns.len(),
            self.types.len(),
        ];
        suite.fill(self.count, |round| {
            let rows = covering(&levels, self.strength, &|_| true, seed.wrapping_add(round << 32));
            rows.iter()
                .map(|row| Case::index_layers(self.case(row)))
                .filter(|case| case.check().is_ok())
                .collect()
        });
    }

    fn case(&self, row: &[usize]) -> IndexLayersCase {
        let layers = self.layers[row[1]];
        let first = |letters: &str| match letters {
            "none" => letters.to_owned(),
            letters => letters.chars().take(layers).collect(),
        };
        let kept = if self.kept[row[3]] { ".kept" } else { "" };
        let offset = match self.offsets[row[5]] {
            ..0 => String::new(),
            offset => format!(".o{offset}"),
        };
        let (rule, drafts, frequency) =
            (self.rules[row[0]], self.draft_layers[row[2]], self.frequencies[row[4]]);
        let period = format!("{rule}.l{layers}.m{drafts}{kept}.f{frequency}{offset}");
        IndexLayersCase::read(&period, &first(&self.patterns[row[6]]), &first(&self.types[row[7]]))
            .unwrap_or_else(|error| panic!("a suite has layers that do not read: {error}"))
    }
}
