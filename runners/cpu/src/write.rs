//! Cache writes, reads and replacement.

use shardcheck_engine::{Configuration, EngineError, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::{BlockTable, wrong_shape};
use crate::cache::{KvFormat, RankCache, WrittenToken};
use crate::communicator::Stop;
use crate::derive::failed;
use crate::grid::Grid;
use crate::memory::{Memory, Origin, WriteMap};
use crate::policies::Policies;

/// Appends tokens through a block table: every rank writes those that it owns.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit, a crash for a block that does not exist.
pub fn write_kv(
    (configuration, grid): (&Configuration, Grid),
    caches: &mut [RankCache],
    memories: &mut [Memory],
    inputs: &Tensors,
    table: BlockTable,
    policies: &Policies,
) -> Result<Reply, EngineError> {
    let format = KvFormat::of(configuration);
    let tokens = inputs.get("positions")?.len();
    let (heads, key_dim, value_dim) = (format.kv_heads, format.key_dim, format.value_dim);
    let key = inputs.get("key")?.expect("key", configuration.dtype, &[tokens, heads, key_dim])?.to_f32();
    let value = if format.shared {
        Vec::new()
    } else {
        inputs.get("value")?.expect("value", configuration.dtype, &[tokens, heads, value_dim])?.to_f32()
    };
    let positions = inputs.get("positions")?.expect("positions", Dtype::I64, &[tokens])?.to_i64();
    let requests = inputs.get("requests")?.expect("requests", Dtype::I32, &[tokens])?.to_i64();
    let batch = WriteBatch { key, value, grid, format, policies };
    let map = WriteMap { positions, requests, table };
    let mut slots = Vec::with_capacity(caches.len() * tokens);
    for (rank, (cache, memory)) in caches.iter_mut().zip(memories).enumerate() {
        let map = (policies.session.recall_write)(memory, map.clone());
        slots.extend(batch.write_rank(&map, rank % grid.world, cache, memory).map_err(failed)?);
    }
    let outputs = Tensors::new().with("slots", Tensor::from_i64(&[caches.len(), tokens], &slots));
    Ok(Reply { outputs, collectives: vec![0; caches.len()], ..Reply::default() })
}

/// Tokens that are written, as a rank has them.
pub(crate) struct WriteBatch<'a> {
    /// `[N, K, Dk]`.
    pub key: Vec<f32>,
    /// `[N, K, Dv]`; empty for MLA.
    pub value: Vec<f32>,
    /// Layout of the slots.
    pub grid: Grid,
    /// Format of the cache.
    pub format: KvFormat,
    /// Every policy.
    pub policies: &'a Policies,
}

impl WriteBatch<'_> {
    /// Writes those that a member of a group owns, and says where; −1 for the others.
    ///
    /// # Errors
    /// A crash for a block that does not exist.
    pub fn write_rank(
        &self,
        map: &WriteMap,
        member: usize,
        cache: &mut RankCache,
        memory: &mut Memory,
    ) -> Result<Vec<i64>, Stop> {
        let overwrites = self.policies.session.overwrites;
        (0..map.positions.len())
            .map(|token| match self.slot(map, token, member)? {
                Some((slot, origin)) => {
                    if overwrites(memory, slot, origin) {
                        self.write_token(token, (slot, origin.1), cache);
                    }
                    Ok(slot as i64)
                }
                None => Ok(-1),
            })
            .collect()
    }

    /// The slot of a token on a rank, and whose token it is.
    fn slot(&self, map: &WriteMap, token: usize, member: usize) -> Result<Option<(usize, Origin)>, Stop> {
        let (layout, cached, grid) = (&self.policies.layout, &self.policies.cache, &self.grid);
        let Some(request) = (cached.written_request)(map.requests[token] as i32) else { return Ok(None) };
        // padding rows may carry any position; only those of a request are looked at
        let Ok(position) = usize::try_from(map.positions[token]) else { return Ok(None) };
        if !(cached.writes)((layout.owner)(position, grid), member) {
            return Ok(None);
        }
        let block = map.table.block(request, (layout.table_entry)(position, grid), layout)?;
        let first = map.table.entries(request).first().copied().unwrap_or(-1);
        Ok(Some((layout.slot(position, block, grid), (first, position))))
    }

    fn write_token(&self, token: usize, (slot, position): (usize, usize), cache: &mut RankCache) {
        let (format, cached) = (&self.format, &self.policies.cache);
        let local = (self.policies.layout.local_index)(position, &self.grid);
        let written = WrittenToken { position, local, row: token };
        let encode = |values: &[f32], dim: usize, codes: &mut [u8]| {
            let heads = codes.chunks_exact_mut(dim * format.dtype.size_bytes());
            values.chunks_exact(dim).zip(heads).for_each(|(row, codes)| (cached.encode)(row, format, codes));
        };
        let end_of_block = (slot / self.grid.block + 1) * self.grid.block;
        for target in slot..(slot + 1 + cached.overwritten_rows).min(end_of_block) {
            let (keys, values) = cache.token_mut(target, format);
            let width = format.kv_heads * format.key_dim;
            let mut key = self.key[token * width..(token + 1) * width].to_vec();
            key.chunks_exact_mut(format.key_dim).for_each(|head| (cached.turn)(head, format, &written));
            encode(&key, format.key_dim, keys);
            if !format.shared {
                let width = format.kv_heads * format.value_dim;
                encode(&self.value[token * width..(token + 1) * width], format.value_dim, values);
            }
        }
    }
}

/// The caches as they are.
pub fn read_cache(configuration: &Configuration, caches: &[RankCache]) -> Reply {
    let format = KvFormat::of(configuration);
    let tensor = |dim: usize, codes: fn(&RankCache) -> &[u8]| {
        let bytes = caches.iter().flat_map(|cache| codes(cache).iter().copied()).collect();
        let shape = cache_shape(configuration, &format, dim);
        Tensor::new(format.dtype, shape, bytes).unwrap_or_else(|error| panic!("{error}"))
    };
    let mut outputs = Tensors::new().with("key_cache", tensor(format.key_dim, |cache| &cache.keys));
    if !format.shared {
        outputs.insert("value_cache", tensor(format.value_dim, |cache| &cache.values));
    }
    Reply { outputs, collectives: vec![0; caches.len()], ..Reply::default() }
}

/// Replaces the caches by the given ones.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit; the caches are unchanged then.
pub fn load_cache(
    configuration: &Configuration,
    caches: &mut [RankCache],
    inputs: &Tensors,
    policies: &Policies,
) -> Result<Reply, EngineError> {
    let format = KvFormat::of(configuration);
    let read = |name: &str, dim: usize| -> Result<Vec<u8>, EngineError> {
        let tensor = inputs.get(name)?;
        let shape = cache_shape(configuration, &format, dim);
        tensor.expect(name, format.dtype, &shape)?;
        let bytes = tensor.to_contiguous().bytes().to_vec();
        let needed = tensor.len() * format.dtype.size_bytes();
        if bytes.len() < needed { Err(wrong_shape(name, tensor, shape)) } else { Ok(bytes) }
    };
    let keys = read("key_cache", format.key_dim)?;
    let values = if format.shared { Vec::new() } else { read("value_cache", format.value_dim)? };
    let ranks = caches.len();
    let blocks = configuration.blocks;
    let taken = (policies.cache.given_blocks)(blocks).min(blocks);
    for (rank, cache) in caches.iter_mut().enumerate() {
        let source = (policies.cache.given_part)(rank, ranks);
        let take = |from: &[u8], to: &mut [u8]| {
            let (whole, size) = (to.len(), to.len() / blocks * taken);
            to[..size].copy_from_slice(&from[source * whole..][..size]);
        };
        take(&keys, &mut cache.keys);
        take(&values, &mut cache.values);
    }
    Ok(Reply { collectives: vec![0; ranks], ..Reply::default() })
}

fn cache_shape(configuration: &Configuration, format: &KvFormat, dim: usize) -> Vec<usize> {
    vec![configuration.tp, configuration.blocks, configuration.block_size, format.kv_heads, dim]
}
