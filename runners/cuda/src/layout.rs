//! The layout step: lengths, slots, pages, derived on the device.

use std::sync::Arc;

use shardcheck_engine::{Configuration, EngineError, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::{Batch, DeviceBatch};
use crate::caches::check;
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::shape::Shape;
use crate::team::{Seat, Team};

/// Largest page of a kernel in tokens.
const MAX_SUB_PAGE: usize = 128;

/// Derives what every rank knows of a batch. Rows are those of `query_start_loc`; the sub-page table is as wide as the blocks of the
/// longest request, and holds −1 beyond those of a request.
///
/// # Errors
/// A crash when the block table is too short for a length.
pub fn derive(team: &Team, configuration: &Configuration, inputs: &Tensors) -> Result<Reply, EngineError> {
    let batch = Batch::read(inputs, "seq_lens", None)?;
    let parts = team.each(|seat| of_seat(seat, configuration, &batch))?;
    let collectives = vec![0; configuration.tp];
    Ok(Reply { outputs: team.assemble(parts)?, collectives, ..Reply::default() })
}

/// What a device's ranks derive.
fn of_seat(
    Seat { queue, shape }: &Seat,
    configuration: &Configuration,
    batch: &Batch,
) -> Result<Tensors, EngineError> {
    let (ranks, requests, rows) = (shape.ranks as usize, batch.requests(), batch.rows);
    let causal = DeviceBatch::upload(queue, batch, true)?;
    let whole = DeviceBatch::upload(queue, batch, false)?;
    let poisoned = |bytes: usize| poisoned(queue, bytes);
    let row_lens = poisoned(4 * ranks * rows)?;
    let draft_lens = poisoned(4 * ranks * rows)?;
    let row_requests = queue.allocate(4 * rows)?;
    for (metadata, target) in [(&causal, &row_lens), (&whole, &draft_lens)] {
        row_metadata(queue, shape, metadata, rows, target, &row_requests)?;
    }
    let (local_lens, needed) = (poisoned(4 * ranks * requests)?, poisoned(4 * ranks * requests)?);
    let words = [Argument::Shape(*shape), causal.header.argument(), causal.lens.argument()];
    let arguments = [&words[..], &[local_lens.argument(), needed.argument()]].concat();
    queue.launch("request_metadata", Extent::over(ranks * requests), &arguments)?;

    let error = queue.upload_i32(&[0])?;
    let (slots, total) = position_slots(queue, shape, batch, &causal, &error)?;
    let page = largest_power_of_two(configuration.block_size).min(MAX_SUB_PAGE);
    let virtual_block = configuration.virtual_block_tokens();
    let (pages, longest) = sub_pages(queue, configuration, shape, (batch, &causal), page, &error)?;
    check(queue, &error)?;
    let i32s = |buffer: &Buffer, shape: &[usize]| -> Result<Tensor, EngineError> {
        let bytes = queue.read(buffer, 4 * shape.iter().product::<usize>())?;
        Ok(Tensor::new(Dtype::I32, shape.to_vec(), bytes)?)
    };
    let units = [virtual_block as i32, virtual_block as i32, page as i32].repeat(ranks);
    let slots = Tensor::new(Dtype::I64, vec![ranks, total], queue.read(&slots, 8 * ranks * total)?)?;
    Ok(Tensors::new()
        .with("local_lens", i32s(&local_lens, &[ranks, requests])?)
        .with("row_lens", i32s(&row_lens, &[ranks, rows])?)
        .with("draft_lens", i32s(&draft_lens, &[ranks, rows])?)
        .with("slots", slots)
        .with("blocks_needed", i32s(&needed, &[ranks, requests])?)
        .with("units", Tensor::from_i32(&[ranks, 3], &units))
        .with("sub_page_table", i32s(&pages, &[ranks, requests, longest])?))
}

/// Memory in which nothing is a length, a slot or a page.
fn poisoned(queue: &Arc<Queue>, bytes: usize) -> Result<Buffer, EngineError> {
    let buffer = queue.allocate(bytes)?;
    queue.fill(&buffer, 0xFE)?;
    Ok(buffer)
}

/// Slots `[ranks, Σ lengths]` and how many there are of each rank.
fn position_slots(
    queue: &Arc<Queue>,
    shape: &Shape,
    batch: &Batch,
    metadata: &DeviceBatch,
    error: &Buffer,
) -> Result<(Buffer, usize), EngineError> {
    let ends = batch.lens.iter().scan(0i64, |total, len| {
        *total += i64::from(*len);
        Some(*total)
    });
    let firsts: Vec<i64> = std::iter::once(0).chain(ends).collect();
    let total = firsts[batch.requests()] as usize;
    let count = shape.ranks as usize * total;
    let (firsts, slots) = (queue.upload_i64(&firsts)?, poisoned(queue, 8 * count)?);
    let arguments = [
        Argument::Shape(*shape),
        metadata.header.argument(),
        metadata.table.argument(),
        firsts.argument(),
        Argument::Long(total as i64),
        slots.argument(),
        error.argument(),
    ];
    queue.launch("position_slots", Extent::over(count), &arguments)?;
    Ok((slots, total))
}

/// The block table `[ranks, n, pages]` in pages of `page` tokens, and how many pages the longest request has.
fn sub_pages(
    queue: &Arc<Queue>,
    configuration: &Configuration,
    shape: &Shape,
    (batch, metadata): (&Batch, &DeviceBatch),
    page: usize,
    error: &Buffer,
) -> Result<(Buffer, usize), EngineError> {
    let parts = configuration.block_size / page;
    let needed = |len: &i32| (*len as usize).div_ceil(configuration.virtual_block_tokens()) * parts;
    let longest = batch.lens.iter().map(needed).max().unwrap_or(0);
    let count = shape.ranks as usize * batch.requests() * longest;
    let pages = poisoned(queue, 4 * count)?;
    let arguments = [
        Argument::Shape(*shape),
        metadata.header.argument(),
        metadata.lens.argument(),
        metadata.table.argument(),
        Argument::Int(page as i32),
        Argument::Int(longest as i32),
        pages.argument(),
        error.argument(),
    ];
    if count > 0 {
        queue.launch("sub_page_table", Extent::over(count), &arguments)?;
    }
    Ok((pages, longest))
}

/// Enqueues the lengths and requests of rows.
///
/// # Errors
/// What the driver says.
pub fn row_metadata(
    queue: &Arc<Queue>,
    shape: &Shape,
    metadata: &DeviceBatch,
    rows: usize,
    row_lens: &Buffer,
    row_requests: &Buffer,
) -> Result<(), EngineError> {
    if rows == 0 {
        return Ok(());
    }
    queue.launch(
        "row_metadata",
        Extent::over(shape.ranks as usize * rows),
        &[
            Argument::Shape(*shape),
            metadata.header.argument(),
            metadata.lens.argument(),
            metadata.starts.argument(),
            Argument::Int(rows as i32),
            row_lens.argument(),
            row_requests.argument(),
        ],
    )
}

fn largest_power_of_two(value: usize) -> usize {
    value & value.wrapping_neg()
}
