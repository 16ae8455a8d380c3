//! The paged caches of all ranks on the device: loaded, written, read back.

use std::sync::Arc;

use shardcheck_engine::{Configuration, EngineError, Reply, Tensors};
use shardcheck_formats::{Dtype, Overflow, encode};

use crate::batch::{Batch, DeviceBatch, contiguous, crash, read_table};
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::shape::Shape;
use crate::states::whole;
use crate::team::{Seat, Team};

/// Caches of a device's ranks, `[ranks, blocks, B, K, D]` codes.
pub struct Caches {
    pub keys: Buffer,
    pub values: Buffer,
}

impl Caches {
    /// Caches whose every slot holds NaN.
    ///
    /// # Errors
    /// What the driver says.
    pub fn unwritten(
        Seat { queue, shape }: &Seat,
        configuration: &Configuration,
    ) -> Result<Self, EngineError> {
        let dtype = configuration.kv_dtype;
        let [keys, values] = sizes(configuration, shape).ok_or_else(|| crash("the caches are too large"))?;
        let caches = Self { keys: queue.allocate(keys)?, values: queue.allocate(values)? };
        let nan = encode(dtype, f64::NAN, Overflow::NonFinite) as u32;
        let pattern = match dtype.size_bytes() {
            1 => nan * 0x0101_0101,
            2 => nan * 0x0001_0001,
            _ => nan,
        };
        for buffer in [&caches.keys, &caches.values] {
            // sizes that are no multiple of four are filled byte by byte behind the last word
            let words = buffer.bytes() / 4;
            let arguments = [buffer.argument(), Argument::Int(pattern as i32), Argument::Long(words as i64)];
            if words > 0 {
                queue.launch("fill_words", Extent::over(words), &arguments)?;
            }
        }
        Ok(caches)
    }
}

/// Bytes of all keys and of all values of a device's ranks; `None` beyond the address space.
pub fn sizes(configuration: &Configuration, shape: &Shape) -> Option<[usize; 2]> {
    let dtype = configuration.kv_dtype;
    let tokens = [shape.ranks as usize, configuration.blocks, configuration.block_size]
        .into_iter()
        .try_fold(1usize, usize::checked_mul)?;
    Some([
        tokens.checked_mul(shape.key_bytes(dtype))?.next_multiple_of(4),
        tokens.checked_mul(shape.value_bytes(dtype))?.next_multiple_of(4),
    ])
}

fn cache_shape(configuration: &Configuration, ranks: usize, dim: usize) -> Vec<usize> {
    let heads = configuration.attention.kv_heads();
    vec![ranks, configuration.blocks, configuration.block_size, heads, dim]
}

/// Replaces the caches by the given ones.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit; the caches are unchanged then.
pub fn load(
    team: &Team,
    configuration: &Configuration,
    caches: &[Caches],
    inputs: &Tensors,
) -> Result<Reply, EngineError> {
    type Which = fn(&Caches) -> &Buffer;
    let attention = configuration.attention;
    let mut given: Vec<(&str, usize, Which)> = vec![("key_cache", attention.qk_dim(), |c| &c.keys)];
    if !attention.is_mla() {
        given.push(("value_cache", attention.value_dim(), |c| &c.values));
    }
    let shape = |dim: usize| cache_shape(configuration, configuration.tp, dim);
    for (name, dim, _) in &given {
        inputs.get(name)?.expect(name, configuration.kv_dtype, &shape(*dim))?;
    }
    for (name, dim, which) in given {
        let bytes = contiguous(inputs, name, configuration.kv_dtype, &shape(dim))?;
        for (number, (Seat { queue, .. }, caches)) in team.seats().iter().zip(caches).enumerate() {
            queue.write(which(caches), &team.part_of(number, &bytes))?;
        }
    }
    for Seat { queue, .. } in team.seats() {
        queue.wait()?;
    }
    Ok(Reply { collectives: vec![0; configuration.tp], ..Reply::default() })
}

/// The caches as they are.
///
/// # Errors
/// What the driver says.
pub fn read(team: &Team, configuration: &Configuration, caches: &[Caches]) -> Result<Reply, EngineError> {
    let attention = configuration.attention;
    let of_seat = |(Seat { queue, shape }, caches): (&Seat, &Caches)| -> Result<Tensors, EngineError> {
        let tensor = |buffer: &Buffer, dim: usize| {
            let shape = cache_shape(configuration, shape.ranks as usize, dim);
            whole(queue, buffer, configuration.kv_dtype, &shape)
        };
        let mut outputs = Tensors::new().with("key_cache", tensor(&caches.keys, attention.qk_dim())?);
        if !attention.is_mla() {
            outputs.insert("value_cache", tensor(&caches.values, attention.value_dim())?);
        }
        Ok(outputs)
    };
    let parts = team.seats().iter().zip(caches).map(of_seat).collect::<Result<_, _>>()?;
    let collectives = vec![0; configuration.tp];
    Ok(Reply { outputs: team.assemble(parts)?, collectives, ..Reply::default() })
}

/// Appends tokens: every rank writes those that it owns.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit, a crash for a block that does not exist.
pub fn write(
    team: &Team,
    configuration: &Configuration,
    caches: &[Caches],
    inputs: &Tensors,
) -> Result<Reply, EngineError> {
    let given = NewTokens::read(configuration, inputs)?;
    let parts =
        team.seats().iter().zip(caches).map(|(seat, caches)| given.write(seat, configuration, caches));
    let parts = parts.collect::<Result<_, _>>()?;
    let collectives = vec![0; configuration.tp];
    Ok(Reply { outputs: team.assemble(parts)?, collectives, ..Reply::default() })
}

/// Tokens to be appended, on the host.
struct NewTokens {
    count: usize,
    key: Vec<u8>,
    value: Vec<u8>,
    positions: Vec<u8>,
    requests: Vec<u8>,
    batch: Batch,
}

impl NewTokens {
    fn read(configuration: &Configuration, inputs: &Tensors) -> Result<Self, EngineError> {
        let count = inputs.get("positions")?.len();
        let attention = configuration.attention;
        let heads = attention.kv_heads();
        let bf16 = |name: &str, dim: usize| contiguous(inputs, name, Dtype::Bf16, &[count, heads, dim]);
        let key = bf16("key", attention.qk_dim())?;
        let value = if attention.is_mla() { Vec::new() } else { bf16("value", attention.value_dim())? };
        let positions = contiguous(inputs, "positions", Dtype::I64, &[count])?;
        let requests = contiguous(inputs, "requests", Dtype::I32, &[count])?;
        let batch = Batch::of_table(read_table(inputs, "block_table")?);
        Ok(Self { count, key, value, positions, requests, batch })
    }

    /// Writes those of a device's ranks; the slots that they went to.
    fn write(
        &self,
        Seat { queue, shape }: &Seat,
        configuration: &Configuration,
        caches: &Caches,
    ) -> Result<Tensors, EngineError> {
        let (key, value) = (queue.upload(&self.key)?, queue.upload(&self.value)?);
        let (positions, requests) = (queue.upload(&self.positions)?, queue.upload(&self.requests)?);
        let metadata = DeviceBatch::upload(queue, &self.batch, true)?;
        let (ranks, tokens) = (shape.ranks as usize, self.count);
        let slots = queue.allocate(8 * ranks * tokens)?;
        let winners = queue.allocate(4 * ranks * configuration.blocks * configuration.block_size)?;
        let error = queue.upload_i32(&[0])?;
        queue.fill(&slots, 0xFE)?;
        queue.fill(&winners, 0xFF)?;
        queue.launch(
            "write_slots",
            Extent::over(ranks * tokens),
            &[
                Argument::Shape(*shape),
                metadata.header.argument(),
                metadata.table.argument(),
                positions.argument(),
                requests.argument(),
                Argument::Int(tokens as i32),
                slots.argument(),
                winners.argument(),
                error.argument(),
            ],
        )?;
        check(queue, &error)?;
        queue.launch(
            "write_tokens",
            Extent::blocks(tokens, ranks, 1),
            &[
                Argument::Shape(*shape),
                key.argument(),
                value.argument(),
                Argument::Int(tokens as i32),
                slots.argument(),
                winners.argument(),
                caches.keys.argument(),
                caches.values.argument(),
            ],
        )?;
        Ok(Tensors::new().with("slots", whole(queue, &slots, Dtype::I64, &[ranks, tokens])?))
    }
}

/// Waits, and reads the error word that kernels write instead of an address that is not theirs.
///
/// # Errors
/// A crash that says what was out of range.
pub fn check(queue: &Arc<Queue>, error: &Buffer) -> Result<(), EngineError> {
    let word = queue.read(error, 4)?;
    match i32::from_le_bytes([word[0], word[1], word[2], word[3]]) {
        0 => Ok(()),
        1 => Err(crash("illegal address: a block table has fewer entries than its request needs")),
        _ => Err(crash("illegal address: a block id that a request needs is none of the cache's")),
    }
}
