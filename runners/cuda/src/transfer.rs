//! Taking requests over from a session of another layout: given caches are uploaded whole, every rank copies the tokens that it owns.

use shardcheck_engine::{CacheLayout, Configuration, EngineError, Reply, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::{Batch, DeviceBatch, bytes_of, contiguous, crash, read_table, wrong_shape};
use crate::caches::{Caches, check};
use crate::queue::{Argument, Extent};
use crate::shape::Shape;
use crate::team::{Seat, Team};

/// What is taken over, on the host.
struct Source {
    layout: Shape,
    keys: Vec<u8>,
    values: Vec<u8>,
    table: Batch,
}

impl Source {
    fn read(
        inputs: &Tensors,
        configuration: &Configuration,
        layout: &CacheLayout,
    ) -> Result<Self, EngineError> {
        let &CacheLayout { dcp, interleave, block_size } = layout;
        if dcp == 0 || interleave == 0 || !block_size.is_multiple_of(interleave) {
            return Err(crash(format!("a source of {layout:?} has no layout")));
        }
        let attention = configuration.attention;
        let blocks = inputs.get("source_key_cache")?.shape().get(1).copied().unwrap_or(0);
        let read = |name: &str, dim: usize| {
            let shape = [dcp, blocks, block_size, attention.kv_heads(), dim];
            contiguous(inputs, name, configuration.kv_dtype, &shape)
        };
        let keys = read("source_key_cache", attention.qk_dim())?;
        let values =
            if attention.is_mla() { Vec::new() } else { read("source_value_cache", attention.value_dim())? };
        let layout = Shape {
            world: dcp as i32,
            interleave: interleave as i32,
            block: block_size as i32,
            blocks: blocks as i32,
            ..Shape::of(configuration)
        };
        Ok(Self { layout, keys, values, table: Batch::of_table(read_table(inputs, "source_block_table")?) })
    }
}

/// Places every token of the given caches on the ranks that own it here.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit, a crash for a block that does not exist.
pub fn import(
    team: &Team,
    configuration: &Configuration,
    caches: &[Caches],
    inputs: &Tensors,
    layout: &CacheLayout,
) -> Result<Reply, EngineError> {
    let source = Source::read(inputs, configuration, layout)?;
    let mut batch = Batch::of_table(read_table(inputs, "block_table")?);
    let lens = inputs.get("seq_lens")?.expect("seq_lens", Dtype::I32, &[batch.requests()])?;
    batch.lens = lens.to_i64().into_iter().map(|len| len as i32).collect();
    if source.table.requests() != batch.requests() {
        let tensor = inputs.get("source_block_table")?;
        return Err(wrong_shape("source_block_table", tensor, vec![batch.requests(), 0]));
    }
    if batch.lens.iter().any(|len| *len < 0) {
        return Err(crash("seq_lens holds a negative length"));
    }
    for (seat, caches) in team.seats().iter().zip(caches) {
        of_seat(seat, configuration, caches, &source, &batch)?;
    }
    Ok(Reply { collectives: vec![0; configuration.tp], ..Reply::default() })
}

fn of_seat(
    Seat { queue, shape }: &Seat,
    configuration: &Configuration,
    caches: &Caches,
    source: &Source,
    batch: &Batch,
) -> Result<(), EngineError> {
    let metadata = DeviceBatch::upload(queue, batch, true)?;
    let theirs = DeviceBatch::upload(queue, &source.table, true)?;
    let lens = queue.upload(&bytes_of(&batch.lens))?;
    let (keys, values) = (queue.upload(&source.keys)?, queue.upload(&source.values)?);
    let error = queue.upload_i32(&[0])?;
    let dtype = configuration.kv_dtype;
    // up to the end of the last block, which a defect may take over as well
    let round = |layout: &Shape| (layout.block * layout.world) as usize;
    let longest = batch.lens.iter().copied().max().unwrap_or(0) as usize;
    let positions =
        longest.next_multiple_of(round(shape)).min(longest.next_multiple_of(round(&source.layout)));
    let arguments = [
        Argument::Shape(*shape),
        Argument::Shape(source.layout),
        metadata.header.argument(),
        metadata.table.argument(),
        theirs.header.argument(),
        theirs.table.argument(),
        lens.argument(),
        keys.argument(),
        values.argument(),
        Argument::Int(shape.key_bytes(dtype) as i32),
        Argument::Int(shape.value_bytes(dtype) as i32),
        caches.keys.argument(),
        caches.values.argument(),
        error.argument(),
    ];
    let extent = Extent::blocks(positions, batch.requests(), shape.ranks as usize);
    queue.launch("import_tokens", extent, &arguments)?;
    check(queue, &error)
}
