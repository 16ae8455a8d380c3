//! The paged caches of all ranks on the device: loaded, written, read back.

use std::sync::Arc;

use shardcheck_engine::{Configuration, EngineError, Reply, Tensor, Tensors};
use shardcheck_formats::{Dtype, Overflow, encode};

use crate::batch::{Batch, DeviceBatch, contiguous, crash, read_table};
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::shape::Shape;

/// Caches of all ranks, `[ranks, blocks, B, K, D]` codes.
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
        queue: &Arc<Queue>,
        configuration: &Configuration,
        shape: &Shape,
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

/// Bytes of all keys and of all values; `None` beyond the address space.
pub fn sizes(configuration: &Configuration, shape: &Shape) -> Option<[usize; 2]> {
    let dtype = configuration.kv_dtype;
    let tokens = [configuration.tp, configuration.blocks, configuration.block_size]
        .into_iter()
        .try_fold(1usize, usize::checked_mul)?;
    Some([
        tokens.checked_mul(shape.key_bytes(dtype))?.next_multiple_of(4),
        tokens.checked_mul(shape.value_bytes(dtype))?.next_multiple_of(4),
    ])
}

fn cache_shape(configuration: &Configuration, dim: usize) -> Vec<usize> {
    let heads = configuration.attention.kv_heads();
    vec![configuration.tp, configuration.blocks, configuration.block_size, heads, dim]
}

/// Replaces the caches by the given ones.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit; the caches are unchanged then.
pub fn load(
    queue: &Arc<Queue>,
    configuration: &Configuration,
    caches: &Caches,
    inputs: &Tensors,
) -> Result<Reply, EngineError> {
    let attention = configuration.attention;
    let mut given = vec![("key_cache", attention.qk_dim(), &caches.keys)];
    if !attention.is_mla() {
        given.push(("value_cache", attention.value_dim(), &caches.values));
    }
    for (name, dim, _) in &given {
        inputs.get(name)?.expect(name, configuration.kv_dtype, &cache_shape(configuration, *dim))?;
    }
    for (name, dim, buffer) in given {
        let tensor = inputs.get(name)?;
        if tensor.is_contiguous() {
            let bytes = tensor.len() * configuration.kv_dtype.size_bytes();
            queue.write(buffer, &tensor.bytes()[..bytes])?;
        } else {
            let shape = cache_shape(configuration, dim);
            queue.write(buffer, &contiguous(inputs, name, configuration.kv_dtype, &shape)?)?;
        }
    }
    queue.wait()?;
    Ok(Reply { collectives: vec![0; configuration.tp], ..Reply::default() })
}

/// The caches as they are.
///
/// # Errors
/// What the driver says.
pub fn read(
    queue: &Arc<Queue>,
    configuration: &Configuration,
    caches: &Caches,
) -> Result<Reply, EngineError> {
    let attention = configuration.attention;
    let tensor = |buffer: &Buffer, dim: usize| -> Result<Tensor, EngineError> {
        let shape = cache_shape(configuration, dim);
        let bytes = shape.iter().product::<usize>() * configuration.kv_dtype.size_bytes();
        Ok(Tensor::new(configuration.kv_dtype, shape, queue.read(buffer, bytes)?)?)
    };
    let mut outputs = Tensors::new().with("key_cache", tensor(&caches.keys, attention.qk_dim())?);
    if !attention.is_mla() {
        outputs.insert("value_cache", tensor(&caches.values, attention.value_dim())?);
    }
    Ok(Reply { outputs, collectives: vec![0; configuration.tp], ..Reply::default() })
}

/// Appends tokens: every rank writes those that it owns.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit, a crash for a block that does not exist.
pub fn write(
    queue: &Arc<Queue>,
    configuration: &Configuration,
    shape: &Shape,
    caches: &Caches,
    inputs: &Tensors,
) -> Result<Reply, EngineError> {
    let tokens = inputs.get("positions")?.len();
    let attention = configuration.attention;
    let heads = attention.kv_heads();
    let bf16 = |name: &str, dim: usize| contiguous(inputs, name, Dtype::Bf16, &[tokens, heads, dim]);
    let key = queue.upload(&bf16("key", attention.qk_dim())?)?;
    let value = if attention.is_mla() { Vec::new() } else { bf16("value", attention.value_dim())? };
    let value = queue.upload(&value)?;
    let positions = queue.upload(&contiguous(inputs, "positions", Dtype::I64, &[tokens])?)?;
    let requests = queue.upload(&contiguous(inputs, "requests", Dtype::I32, &[tokens])?)?;
    let (table, count, width) = read_table(inputs)?;
    let batch = Batch { lens: vec![0; count], starts: vec![0; count + 1], table, width, rows: 0 };
    let metadata = DeviceBatch::upload(queue, &batch, true)?;
    let ranks = configuration.tp;
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
    let slots = Tensor::new(Dtype::I64, vec![ranks, tokens], queue.read(&slots, 8 * ranks * tokens)?)?;
    let outputs = Tensors::new().with("slots", slots);
    Ok(Reply { outputs, collectives: vec![0; ranks], ..Reply::default() })
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
