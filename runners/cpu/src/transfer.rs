//! Taking requests over from a session of another layout: a prefill on W₁ ranks that a decode on W₂ goes on from.
//!
//! Tokens keep their bytes and change their places: owner, block and slot are those of the source on the one side and of this
//! session on the other (vLLM-Ascend's P/D transfer between context-parallel sizes, ATOM's block-interleaved transfer).

use shardcheck_engine::{CacheLayout, Configuration, EngineError, Reply, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::{BlockTable, wrong_shape};
use crate::cache::{KvFormat, RankCache};
use crate::communicator::Stop;
use crate::derive::failed;
use crate::grid::Grid;
use crate::policies::Policies;

/// How the tokens of another layout are found and placed.
#[derive(Clone, Copy, PartialEq)]
pub struct TransferPolicies {
    /// Layout that the given caches are read by: `(the source's, the session's own)`.
    pub source: fn(Grid, Grid) -> Grid,
    /// Cache that stands for a rank of the source: `(rank, ranks of the source)`.
    pub part: fn(usize, usize) -> usize,
    /// Positions of a request that are taken over: `(tokens, the source's layout, the session's own)`.
    pub taken: fn(usize, &Grid, &Grid) -> usize,
    /// Block-table entries that tokens are placed by: `(the session's own, the source's, blocks of the session's caches)`.
    pub entries: fn(&[i64], &[i64], usize) -> Vec<i64>,
}

impl TransferPolicies {
    /// As it must be.
    pub const HEALTHY: Self = Self {
        source: |source, _| source,
        part: |rank, _| rank,
        taken: |tokens, _, _| tokens,
        entries: |own, _, _| own.to_vec(),
    };
}

/// The given caches of the source.
struct Source {
    /// By rank.
    caches: Vec<RankCache>,
    table: BlockTable,
    grid: Grid,
}

impl Source {
    fn read(
        inputs: &Tensors,
        layout: &CacheLayout,
        format: &KvFormat,
        grid: Grid,
    ) -> Result<Self, EngineError> {
        let tensor = inputs.get("source_key_cache")?;
        let blocks = tensor.shape().get(1).copied().unwrap_or(0);
        let read = |name: &str, dim: usize| -> Result<Vec<Vec<u8>>, EngineError> {
            let tensor = inputs.get(name)?;
            let shape = vec![layout.dcp, blocks, layout.block_size, format.kv_heads, dim];
            tensor.expect(name, format.dtype, &shape)?;
            let contiguous = tensor.to_contiguous();
            let bytes = contiguous.bytes();
            let size = tensor.len() * format.dtype.size_bytes() / layout.dcp.max(1);
            if size == 0 || bytes.len() < size * layout.dcp {
                return Err(wrong_shape(name, tensor, shape));
            }
            Ok(bytes.chunks_exact(size).take(layout.dcp).map(<[u8]>::to_vec).collect())
        };
        let keys = read("source_key_cache", format.key_dim)?;
        let values = if format.shared {
            vec![Vec::new(); keys.len()]
        } else {
            read("source_value_cache", format.value_dim)?
        };
        let caches = keys.into_iter().zip(values).map(|(keys, values)| RankCache { keys, values }).collect();
        let table = BlockTable::read_named(inputs, "source_block_table", blocks)?;
        Ok(Self { caches, table, grid })
    }
}

/// Places every token of the given caches on the rank that owns it here.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit, a crash for a block that does not exist.
pub fn import_cache(
    configuration: &Configuration,
    caches: &mut [RankCache],
    inputs: &Tensors,
    source: &CacheLayout,
    policies: &Policies,
) -> Result<Reply, EngineError> {
    let (format, grid) = (KvFormat::of(configuration), Grid::of(configuration));
    let given = Grid { world: source.dcp, interleave: source.interleave, block: source.block_size };
    let source = Source::read(inputs, source, &format, (policies.transfer.source)(given, grid))?;
    let table = BlockTable::read(inputs, configuration.blocks)?;
    let lens = inputs.get("seq_lens")?.expect("seq_lens", Dtype::I32, &[table.requests()])?.to_i64();
    if source.table.requests() != table.requests() {
        let tensor = inputs.get("source_block_table")?;
        return Err(wrong_shape("source_block_table", tensor, vec![table.requests(), 0]));
    }
    for (request, len) in lens.iter().enumerate() {
        let tokens = usize::try_from(*len).map_err(|_| EngineError::Crash {
            text: format!("seq_lens holds a negative length for request {request}"),
        })?;
        let import = Import {
            source: &source,
            table: &table,
            blocks: configuration.blocks,
            grid,
            format: &format,
            policies,
        };
        import.request(request, tokens, configuration.dcp, caches).map_err(failed)?;
    }
    Ok(Reply { collectives: vec![0; caches.len()], ..Reply::default() })
}

struct Import<'a> {
    source: &'a Source,
    table: &'a BlockTable,
    blocks: usize,
    grid: Grid,
    format: &'a KvFormat,
    policies: &'a Policies,
}

impl Import<'_> {
    fn request(
        &self,
        request: usize,
        tokens: usize,
        world: usize,
        caches: &mut [RankCache],
    ) -> Result<(), Stop> {
        let (layout, transfer) = (&self.policies.layout, &self.policies.transfer);
        let (own, theirs) = (self.table.entries(request), self.source.table.entries(request));
        let entries = (transfer.entries)(own, theirs, self.blocks);
        for position in 0..(transfer.taken)(tokens, &self.source.grid, &self.grid) {
            let (keys, values) = self.given(request, position)?;
            let entry = (layout.table_entry)(position, &self.grid);
            let block = self.table.block_among(&entries, request, entry, layout)?;
            let slot = layout.slot(position, block, &self.grid);
            let owner = (layout.owner)(position, &self.grid);
            for cache in caches.iter_mut().skip(owner).step_by(world) {
                let (own_keys, own_values) = cache.token_mut(slot, self.format);
                own_keys.copy_from_slice(keys);
                own_values.copy_from_slice(values);
            }
        }
        Ok(())
    }

    /// Codes of a token in the given caches.
    fn given(&self, request: usize, position: usize) -> Result<(&[u8], &[u8]), Stop> {
        let (layout, grid) = (&self.policies.layout, &self.source.grid);
        let ranks = self.source.caches.len();
        let entry = (layout.table_entry)(position, grid);
        let block = self.source.table.block(request, entry, layout)?;
        let slot = layout.slot(position, block, grid);
        let rank = (self.policies.transfer.part)((layout.owner)(position, grid), ranks);
        let cache =
            self.source.caches.get(rank).ok_or_else(|| {
                Stop::crash(format!("illegal address: rank {rank} of {ranks} of the source"))
            })?;
        if (slot + 1) * self.format.key_bytes() > cache.keys.len() {
            return Err(Stop::crash(format!("illegal address: slot {slot} of rank {rank} of the source")));
        }
        Ok(cache.token(slot, self.format))
    }
}
