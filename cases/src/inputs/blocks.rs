//! Which physical block each request gets, and which slot each position.

use shardcheck_engine::Configuration;
use shardcheck_formats::Counter;

use crate::{Placement, Workload};

/// Where a position of a request lies in the caches of a decode-context-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Rank of the group that owns the position.
    pub owner: usize,
    /// Entry of the request's row in the block table.
    pub entry: usize,
    /// Slot within the block.
    pub offset: usize,
}

/// Interleave of ATOM's `dcp_owner_rank` and `dcp_local_index`: runs of S tokens go round the ranks.
pub(crate) fn place(configuration: &Configuration, position: usize) -> Place {
    let (s, w, b) = (configuration.interleave, configuration.dcp, configuration.block_size);
    let local = position / (s * w) * s + position % s;
    Place { owner: position / s % w, entry: position / (b * w), offset: local % b }
}

/// Blocks that a request of `tokens` tokens needs, the same number on every rank.
pub(super) fn blocks_needed(configuration: &Configuration, tokens: usize) -> usize {
    tokens.div_ceil(configuration.virtual_block_tokens())
}

/// The block table [n, width] and its width. Block 0 is given to nobody; entries that are not needed hold ids that no cache
/// has, so that reading one cannot go unnoticed.
pub(crate) fn block_table(
    workload: &Workload,
    configuration: &Configuration,
    counter: &mut Counter,
) -> (Vec<i32>, usize) {
    let needed: Vec<usize> =
        workload.requests.iter().map(|request| blocks_needed(configuration, request.seq_len())).collect();
    let width = needed.iter().max().copied().unwrap_or(0) + 1;
    let out_of_range = [-7, i32::MAX / 2, configuration.blocks as i32 + 3];
    let mut table: Vec<i32> = (0..needed.len() * width).map(|index| out_of_range[index % 3]).collect();
    let order = order_of_need(workload.placement, &needed);
    let mut ids: Vec<i32> = (1..configuration.blocks as i32).collect();
    match workload.placement {
        Placement::Sequential => {}
        Placement::Descending => ids.reverse(),
        Placement::Shuffled => {
            for last in (1..ids.len()).rev() {
                ids.swap(last, counter.below(last as u64 + 1) as usize);
            }
        }
    }
    assert!(order.len() <= ids.len(), "{} blocks do not hold {} entries", configuration.blocks, order.len());
    for ((request, entry), id) in order.into_iter().zip(ids) {
        table[request * width + entry] = id;
    }
    (table, width)
}

/// `(request, entry)` in the order in which blocks are handed out.
fn order_of_need(placement: Placement, needed: &[usize]) -> Vec<(usize, usize)> {
    let mut order: Vec<(usize, usize)> = needed
        .iter()
        .enumerate()
        .flat_map(|(request, count)| (0..*count).map(move |entry| (request, entry)))
        .collect();
    if placement == Placement::Descending {
        // requests that grew side by side, a block each in turn
        order.sort_by_key(|(request, entry)| (*entry, *request));
    }
    order
}
