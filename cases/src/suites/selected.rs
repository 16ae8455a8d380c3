//! The part of a suite that is about attention over selected tokens: a covering array, and cases by hand.

use serde::Deserialize;
use shardcheck_engine::{Configuration, SlotList};

use super::Collector;
use super::sparse::{Batch, Layout};
use crate::axes::{Cache, Exchange, Projection};
use crate::covering::covering;
use crate::{
    AttentionCase, Case, Family, Model, Placement, Probe, SelectedTokens, TokenChoice, default_blocks,
};

/// A covering array of attention over selected tokens, and cases by hand.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SelectedPart {
    strength: usize,
    count: usize,
    /// Name of the model, which is one of MLA.
    model: String,
    layouts: Vec<Layout>,
    heads: Vec<usize>,
    top_k: Vec<usize>,
    lists: Vec<SlotList>,
    choices: Vec<TokenChoice>,
    batches: Vec<Batch>,
    placements: Vec<Placement>,
    caches: Vec<String>,
    exchanges: Vec<Exchange>,
    replications: Vec<bool>,
    projections: Vec<Projection>,
    probes: Vec<Probe>,
    /// Cases by hand: ids up to the seed.
    written: Vec<String>,
}

impl SelectedPart {
    pub(super) fn collect(&self, seed: u64, suite: &mut Collector) {
        for written in &self.written {
            let id = format!("{written}/0");
            suite.add(id.parse().unwrap_or_else(|error| {
                panic!("a suite has attention over selected tokens by hand: {error}")
            }));
        }
        let levels = [
            self.layouts.len(),
            self.heads.len(),
            self.top_k.len(),
            self.lists.len(),
            self.choices.len(),
            self.batches.len(),
            self.placements.len(),
            self.caches.len(),
            self.exchanges.len(),
            self.replications.len(),
            self.projections.len(),
            self.probes.len(),
        ];
        suite.fill(self.count, |round| {
            let rows = covering(&levels, self.strength, &|_| true, seed.wrapping_add(round << 32));
            rows.iter().map(|row| Case::attention(Family::AttendSelected, self.case(row), 0)).collect()
        });
    }

    fn case(&self, row: &[usize]) -> AttentionCase {
        let model = Model::find(&self.model).unwrap_or_else(|| panic!("a suite names {:?}", self.model));
        let (tp, dcp, interleave, block_size) = self.layouts[row[0]];
        let (heads_per_rank, top_k) = (self.heads[row[1]], self.top_k[row[2]]);
        let workload = self.batches[row[5]].workload(top_k, dcp, self.placements[row[6]]);
        let cache: Cache = self.caches[row[7]].parse().unwrap_or_else(|error| panic!("{error}"));
        let (comm_backend, lane_order) = self.exchanges[row[8]].settings();
        let projection = self.projections[row[10]];
        let configuration = Configuration {
            attention: model.attention(heads_per_rank * dcp),
            tp,
            dcp,
            heads_per_rank,
            interleave,
            block_size,
            blocks: default_blocks(&workload, block_size * dcp),
            dtype: cache.activations,
            kv_dtype: cache.dtype,
            kv_scale: cache.scale,
            softmax_scale: model.softmax_scale,
            comm_backend,
            lane_order,
            query_replication: self.replications[row[9]],
            project_before_merge: projection == Projection::Before,
            kernel_head_widths: Vec::new(),
            second_group: None,
        };
        AttentionCase {
            model: model.name.clone(),
            configuration,
            workload,
            probe: self.probes[row[11]],
            latent_output: projection == Projection::None,
            selected: Some(SelectedTokens { top_k, list: self.lists[row[3]], choice: self.choices[row[4]] }),
        }
    }
}
