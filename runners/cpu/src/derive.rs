//! The layout step: what an engine derives from lengths and block table before any token is touched.

use shardcheck_engine::{Configuration, EngineError, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::Batch;
use crate::communicator::Stop;
use crate::grid::{Grid, LayoutPolicies};

/// Derives lengths, slots, units and sub-pages for every rank. Rows are those of `query_start_loc`; the sub-page table
/// is as wide as the blocks of the longest request, and holds −1 beyond those of a request.
///
/// # Errors
/// A crash when the block table is too short for a length.
pub fn derive(
    configuration: &Configuration,
    grid: Grid,
    batch: &Batch,
    layout: &LayoutPolicies,
) -> Result<Reply, EngineError> {
    let (ranks, requests, rows) = (configuration.tp, batch.seq_lens.len(), batch.rows);
    let members = || (0..ranks).map(|rank| rank % grid.world);
    let as_i32 = |values: Vec<usize>| values.into_iter().map(|v| v as i32).collect::<Vec<_>>();
    let lens = |member: usize| batch.seq_lens.iter().map(move |len| (layout.local_len)(*len, member, &grid));
    let local_lens = as_i32(members().flat_map(lens).collect());
    let row_lens = as_i32(members().flat_map(|m| batch.row_lens(layout, m, &grid, true)).collect());
    let draft_lens = as_i32(members().flat_map(|m| batch.row_lens(layout, m, &grid, false)).collect());
    let needed: Vec<usize> = batch.seq_lens.iter().map(|len| (layout.blocks_needed)(*len, &grid)).collect();
    let slots: Vec<i64> = members()
        .map(|m| slots(batch, m, &grid, layout))
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?
        .concat();
    let units = [(layout.virtual_block)(&grid), (layout.hash_unit)(&grid), (layout.sub_page)(&grid)];
    let (width, mask) = masks(batch, ranks, &grid, layout);
    let (starts, entries, lists) = lists(batch, ranks, &grid, layout);
    let (pages, sub_pages) = sub_pages(batch, &grid, layout).map_err(failed)?;
    let everywhere = |values: &[i32]| values.repeat(ranks);
    let outputs = Tensors::new()
        .with("local_lens", Tensor::from_i32(&[ranks, requests], &local_lens))
        .with("row_lens", Tensor::from_i32(&[ranks, rows], &row_lens))
        .with("draft_lens", Tensor::from_i32(&[ranks, rows], &draft_lens))
        .with("slots", Tensor::from_i64(&[ranks, batch.seq_lens.iter().sum()], &slots))
        .with("blocks_needed", Tensor::from_i32(&[ranks, requests], &everywhere(&as_i32(needed))))
        .with("units", Tensor::from_i32(&[ranks, 3], &everywhere(&as_i32(units.to_vec()))))
        .with("sub_page_table", Tensor::from_i32(&[ranks, requests, pages], &everywhere(&sub_pages)))
        .with("row_mask", Tensor::from_codes(Dtype::U8, &[ranks, rows, width], &mask))
        .with("read_indptr", Tensor::from_i32(&[ranks, rows + 1], &starts))
        .with("read_slots", Tensor::from_i64(&[ranks, entries], &lists));
    Ok(Reply { outputs, collectives: vec![0; ranks], ..Reply::default() })
}

/// The engine error of a failure outside the ranks.
pub fn failed(stop: Stop) -> EngineError {
    match stop {
        Stop::Failed(error) => error,
        Stop::Peer => EngineError::Crash { text: "a rank failed without a reason".to_owned() },
    }
}

fn slots(batch: &Batch, member: usize, grid: &Grid, layout: &LayoutPolicies) -> Result<Vec<i64>, Stop> {
    let mut slots = Vec::with_capacity(batch.seq_lens.iter().sum());
    for (request, len) in batch.seq_lens.iter().enumerate() {
        for position in 0..*len {
            slots.push(if (layout.owner)(position, grid) == member {
                let block = batch.table.block(request, (layout.table_entry)(position, grid), layout)?;
                layout.slot(position, block, grid) as i64
            } else {
                -1
            });
        }
    }
    Ok(slots)
}

/// Width and entries `[ranks, rows, width]` of the masks of causal rows over the local tokens of their requests; nothing is seen behind
/// those, nor by padding.
fn masks(batch: &Batch, ranks: usize, grid: &Grid, layout: &LayoutPolicies) -> (usize, Vec<u64>) {
    let held = |request: usize, member: usize| (layout.local_len)(batch.seq_lens[request], member, grid);
    let refs = batch.row_refs(layout);
    let longest =
        (0..batch.seq_lens.len()).flat_map(|request| (0..grid.world).map(move |m| held(request, m)));
    let width = longest.max().unwrap_or(0);
    let mut mask = vec![0; ranks * batch.rows * width];
    for rank in 0..ranks {
        for (index, row) in refs.iter().enumerate() {
            let Some(row) = row else { continue };
            let member = rank % grid.world;
            let sight = batch.sight(row, member, grid);
            let count = held(row.request, member);
            let begin = (rank * batch.rows + index) * width;
            for (local, seen) in mask[begin..begin + count].iter_mut().enumerate() {
                *seen = u64::from((layout.row_sees)(&sight, local, count));
            }
        }
    }
    (width, mask)
}

/// What each rank's kernel is told to read: where the entries of a row begin `[ranks, rows + 1]`, entries of the longest list, and slots
/// `[ranks, entries]`, −1 behind a rank's own and where a page is looked up that no table has.
fn lists(batch: &Batch, ranks: usize, grid: &Grid, layout: &LayoutPolicies) -> (Vec<i32>, usize, Vec<i64>) {
    let refs = batch.row_refs(layout);
    let (mut starts, mut lists) = (Vec::new(), Vec::new());
    for rank in 0..ranks {
        let member = rank % grid.world;
        let seen = batch.row_lens(layout, member, grid, true);
        let mut slots = Vec::new();
        starts.push(0);
        for (row, seen) in refs.iter().zip(seen) {
            if let Some(row) = row {
                let held = (layout.local_len)(batch.seq_lens[row.request], member, grid);
                slots.extend((layout.listed)(seen, held, grid).into_iter().map(|local| {
                    let (entry, offset) = (layout.page)(local, seen, grid);
                    let block = batch.table.block(row.request, entry, layout);
                    block.map_or(-1, |block| (block * grid.block + offset) as i64)
                }));
            }
            starts.push(slots.len() as i32);
        }
        lists.push(slots);
    }
    let entries = lists.iter().map(Vec::len).max().unwrap_or(0);
    lists.iter_mut().for_each(|slots| slots.resize(entries, -1));
    (starts, entries, lists.concat())
}

/// Width and entries `[requests, width]` of the block table in sub-pages: every page of every block that a request needs.
fn sub_pages(batch: &Batch, grid: &Grid, layout: &LayoutPolicies) -> Result<(usize, Vec<i32>), Stop> {
    let parts = (grid.block / (layout.sub_page)(grid).max(1)).max(1);
    let needed = |len: &usize| (layout.blocks_needed)(*len, grid) * parts;
    let width = batch.seq_lens.iter().map(needed).max().unwrap_or(0);
    let mut table = vec![-1; batch.seq_lens.len() * width];
    for (request, len) in batch.seq_lens.iter().enumerate() {
        for index in 0..needed(len) {
            let block = batch.table.block(request, index / parts, layout)?;
            table[request * width + index] = (layout.sub_page_id)(block as i32, index % parts, parts);
        }
    }
    Ok((width, table))
}
