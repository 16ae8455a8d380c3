//! The table that the engine is assembled from: every decision that a public bug got wrong is one entry.

use shardcheck_engine::{Configuration, Tensors};

use crate::acceptance::AcceptancePolicies;
use crate::batch::BlockTable;
use crate::cache::{CachePolicies, KvFormat, TokenRows};
use crate::chunks::ContextPolicies;
use crate::experts::MoePolicies;
use crate::grid::{Grid, Grids, LayoutPolicies};
use crate::kda::KdaPolicies;
use crate::kernel::{KernelPolicies, KvView};
use crate::memory::{Memory, Metadata, Origin, WriteMap};
use crate::merge::MergePolicies;
use crate::prefill::PrefillPolicies;
use crate::prefill::attention::PcpPolicies;
use crate::prefill::compressing::CompressPolicies;
use crate::prefill::indexing::IndexPolicies;
use crate::query::QueryPolicies;
use crate::route::{Dispatch, dispatch};
use crate::rules::GatePolicies;
use crate::selected::SelectedPolicies;
use crate::sharing::SharingPolicies;
use crate::sinks::SinkPolicies;
use crate::sparse::SparsePolicies;
use crate::stack::StackPolicies;
use crate::states::SegmentPolicies;
use crate::transfer::TransferPolicies;

/// What a block table is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableUse {
    /// Attention.
    Attend,
    /// Writes.
    Write,
}

/// Decisions of a session as a whole.
#[derive(Clone, Copy, PartialEq)]
pub struct SessionPolicies {
    /// Refuses a configuration that no rank could run.
    pub admit: fn(&Configuration) -> Result<(), String>,
    /// Which features take effect: `(configuration, whether there is an up-projection)`.
    pub dispatch: fn(&Configuration, bool) -> Dispatch,
    /// The metadata that a rank runs a step with, given what earlier steps left behind.
    pub recall: fn(&mut Memory, Metadata) -> Metadata,
    /// The slot mapping that a rank writes with, likewise.
    pub recall_write: fn(&mut Memory, WriteMap) -> WriteMap,
    /// Layouts that a KV group goes by, of two: `(number of the group, its own, the other's)`.
    pub group_grids: fn(usize, Grids, Grid) -> Grids,
    /// Block table by which a KV group attends or writes: `(use, number of the group, its own, the last of the other)`.
    pub group_table: fn(TableUse, usize, BlockTable, &BlockTable) -> BlockTable,
    /// Whether a token may be written into a slot: `(memory, slot, whose token it is)`.
    pub overwrites: fn(&mut Memory, usize, Origin) -> bool,
    /// What a step does to its inputs: `(steps of attention before it in the session, inputs)`.
    pub touch: fn(usize, &mut Tensors),
    /// Rows of the output that are written: `(rows, rows that are not padding)`.
    pub written_rows: fn(usize, usize) -> usize,
}

impl SessionPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        admit: |configuration| configuration.check().map_err(|error| error.to_string()),
        dispatch,
        recall: |_, metadata| metadata,
        recall_write: |_, map| map,
        group_grids: |_, own, _| own,
        group_table: |_, _, own, _| own,
        overwrites: |_, _, _| true,
        touch: |_, _| {},
        written_rows: |rows, _| rows,
    };
}

/// Every policy of the engine.
#[derive(Clone, Copy, PartialEq)]
pub struct Policies {
    /// Layout of the KV cache.
    pub layout: LayoutPolicies,
    /// Cache writes and reads.
    pub cache: CachePolicies,
    /// Query heads.
    pub query: QueryPolicies,
    /// Local attention.
    pub kernel: KernelPolicies,
    /// Exchange and merge.
    pub merge: MergePolicies,
    /// Sinks of heads.
    pub sinks: SinkPolicies,
    /// Gather and merge of a cached context.
    pub context: ContextPolicies,
    /// Merge of kernel segments.
    pub segments: SegmentPolicies,
    /// Transfer from a session of another layout.
    pub transfer: TransferPolicies,
    /// Prefill context parallelism.
    pub prefill: PrefillPolicies,
    /// Attention under prefill context parallelism.
    pub pcp: PcpPolicies,
    /// Selection of tokens under prefill context parallelism.
    pub index: IndexPolicies,
    /// Compression of tokens under prefill context parallelism.
    pub compress: CompressPolicies,
    /// Layers of experts.
    pub moe: MoePolicies,
    /// Acceptance of drafted tokens.
    pub acceptance: AcceptancePolicies,
    /// Selection of tokens.
    pub sparse: SparsePolicies,
    /// Attention over selected tokens.
    pub selected: SelectedPolicies,
    /// Layers that share a selection.
    pub sharing: SharingPolicies,
    /// Kimi delta attention.
    pub kda: KdaPolicies,
    /// Whole transformers.
    pub stack: StackPolicies,
    /// Configuration rules.
    pub gates: GatePolicies,
    /// Session.
    pub session: SessionPolicies,
}

impl Policies {
    /// The published algorithms.
    pub const HEALTHY: Self = Self {
        layout: LayoutPolicies::HEALTHY,
        cache: CachePolicies::HEALTHY,
        query: QueryPolicies::HEALTHY,
        kernel: KernelPolicies::HEALTHY,
        merge: MergePolicies::HEALTHY,
        sinks: SinkPolicies::HEALTHY,
        context: ContextPolicies::HEALTHY,
        segments: SegmentPolicies::HEALTHY,
        transfer: TransferPolicies::HEALTHY,
        prefill: PrefillPolicies::HEALTHY,
        pcp: PcpPolicies::HEALTHY,
        index: IndexPolicies::HEALTHY,
        compress: CompressPolicies::HEALTHY,
        moe: MoePolicies::HEALTHY,
        acceptance: AcceptancePolicies::HEALTHY,
        sparse: SparsePolicies::HEALTHY,
        selected: SelectedPolicies::HEALTHY,
        sharing: SharingPolicies::HEALTHY,
        kda: KdaPolicies::HEALTHY,
        stack: StackPolicies::HEALTHY,
        gates: GatePolicies::HEALTHY,
        session: SessionPolicies::HEALTHY,
    };

    /// Keys and values of one KV head among tokens that were read.
    pub fn view<'t>(&self, tokens: &'t TokenRows, format: &KvFormat, kv_head: usize) -> KvView<'t> {
        let (key_stride, value_stride) =
            (format.kv_heads * format.key_dim, format.kv_heads * format.value_dim);
        let (key_column, dtype) = (kv_head * format.key_dim, format.activations);
        if format.shared {
            let value_column = key_column + (self.cache.value_column)(format);
            let (stride, column) = ((key_stride, key_stride), (key_column, value_column));
            return KvView { keys: &tokens.keys, values: &tokens.keys, stride, column, dtype };
        }
        let column = (key_column, kv_head * format.value_dim);
        let stride = (key_stride, value_stride);
        KvView { keys: &tokens.keys, values: &tokens.values, stride, column, dtype }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcheck_formats::Dtype;

    #[test]
    fn a_view_of_a_kv_head_starts_at_its_columns_and_steps_over_all_heads() {
        let format = KvFormat {
            dtype: Dtype::Bf16,
            activations: Dtype::F16,
            scale: 1.0,
            kv_heads: 3,
            key_dim: 5,
            value_dim: 2,
            rope_start: 5,
            shared: false,
        };
        let tokens = TokenRows { keys: vec![1.0; 30], values: vec![2.0; 12] };
        let view = Policies::HEALTHY.view(&tokens, &format, 2);
        assert_eq!((view.stride, view.column), ((15, 6), (10, 4)));
        assert_eq!(view.dtype, Dtype::F16, "probabilities have the type of activations, not of the cache");
        assert_eq!((view.keys, view.values), (&tokens.keys[..], &tokens.values[..]));
        let latent = Policies::HEALTHY.view(&tokens, &KvFormat { shared: true, ..format }, 2);
        assert_eq!((latent.stride, latent.column), ((15, 15), (10, 10)), "values are columns of the keys");
        assert_eq!(latent.values, &tokens.keys[..]);
    }
}
