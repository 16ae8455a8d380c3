//! Layers of a stack that attend to selected tokens: which selection a layer goes by, and its lists on every rank.

use shardcheck_engine::{EngineError, LayerKind, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::Step;
use super::lanes::Lane;
use crate::attend::listing;
use crate::derive::failed;
use crate::memory::Metadata;
use crate::selected::{Plan, Selection};

/// Selection that a layer goes by: `(what it is, its own)`.
pub type SelectionPolicy = fn(LayerKind, Option<usize>) -> Option<usize>;

impl Step<'_> {
    /// What a layer goes by for the rows of a rank of prefill context parallelism, listed by the metadata of each of its ranks; `None` where it attends to all that its rows see.
    pub(super) fn selection(
        &self,
        layer: usize,
        lane: &Lane,
        metadata: &[Metadata],
    ) -> Result<Option<Plan>, EngineError> {
        let (policies, grids) = (self.scene.policies, self.scene.grids);
        let crash = |text: String| EngineError::Crash { text };
        let kind = self.plan.kind(layer);
        let own = self.plan.selection(layer);
        if kind == LayerKind::Sharing && own.is_none() {
            return Err(crash(format!("layer {layer} shares a selection, and no layer before has one")));
        }
        let (Some(number), Some(list)) = ((policies.stack.selection)(kind, own), self.plan.list) else {
            return match own {
                Some(_) if self.plan.list.is_none() => Err(crash("the plan has no list of slots".to_owned())),
                _ => Ok(None),
            };
        };
        let all = self.inputs.get("selected")?;
        let &[count, rows, top_k] = all.shape() else {
            return Err(crash("selected has three axes".to_owned()));
        };
        let entries = all.expect("selected", Dtype::I32, &[count, rows, top_k])?.to_i64();
        let entries: Vec<i32> = entries.into_iter().map(|entry| entry as i32).collect();
        let part = entries
            .get(number * rows * top_k..(number + 1) * rows * top_k)
            .ok_or_else(|| crash(format!("layer {layer} has no selection among {count}")))?;
        let own = |place: &Option<usize>| match place {
            Some(row) => part[row * top_k..(row + 1) * top_k].to_vec(),
            None => vec![-1; top_k],
        };
        let part: Vec<i32> = lane.rows.places.iter().flat_map(own).collect();
        let inputs = Tensors::new().with("topk", Tensor::from_i32(&[lane.rows.places.len(), top_k], &part));
        let selection = Selection::read(&inputs, &lane.batch, list)?;
        let lists_of = |metadata: &Metadata| {
            let grid = &grids.lengths;
            let row_lens =
                metadata.batch.row_lens(&policies.layout, metadata.member % grid.world, grid, true);
            selection.lists(listing(policies, &grids, metadata, &row_lens)).map_err(failed)
        };
        let lists = metadata.iter().map(lists_of).collect::<Result<_, _>>()?;
        Ok(Some(Plan { selection, lists }))
    }
}
