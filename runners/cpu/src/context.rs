//! Attention of new tokens over a cached context: gathered from all ranks chunk by chunk, then merged with the new
//! tokens' own causal attention. States stay f32 from the kernel to the last merge; the output is rounded once.

use shardcheck_engine::{Configuration, EngineError, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::{Batch, query_rows, read_half};
use crate::cache::{KvFormat, RankCache, TokenRows};
use crate::chunks::{ChunkPlan, GatheredRow, StateWeights, clip};
use crate::communicator::{Link, RankResults, Ranks, Stop, run_ranks};
use crate::grid::{Grid, RowRef};
use crate::kernel::{Scratch, attend_row};
use crate::merge::{Partial, Wire};
use crate::policies::Policies;
use crate::query::{HeadShape, select_heads};

struct Step<'a> {
    configuration: &'a Configuration,
    grid: Grid,
    format: KvFormat,
    batch: &'a Batch,
    rows: Vec<Option<RowRef>>,
    plan: ChunkPlan,
    query: Vec<u16>,
    shape: HeadShape,
    new: TokenRows,
    policies: &'a Policies,
}

struct RankContext {
    context: Partial,
    merged: Partial,
    gathered_keys: Vec<f32>,
    chunk_lens: Vec<i32>,
}

/// Performs the step on all ranks; `batch.seq_lens` are the cached lengths.
///
/// # Errors
/// As [`shardcheck_engine::Session::step`].
pub fn attend_context(
    configuration: &Configuration,
    caches: &[RankCache],
    inputs: &Tensors,
    batch: &Batch,
    chunk_budget_tokens: usize,
    ranks: Ranks,
    policies: &Policies,
) -> Result<Reply, EngineError> {
    let rows = query_rows(inputs, configuration)?;
    let (grid, format) = (Grid::of(configuration), KvFormat::of(configuration));
    let shape = HeadShape {
        rows,
        own: configuration.heads_per_rank,
        total: configuration.total_heads(),
        dim: format.key_dim,
    };
    let read = |name: &str, dim: usize| -> Result<Vec<f32>, EngineError> {
        Ok(inputs.get(name)?.expect(name, configuration.dtype, &[rows, format.kv_heads, dim])?.to_f32())
    };
    let values = if format.shared { Vec::new() } else { read("value", format.value_dim)? };
    let step = Step {
        configuration,
        grid,
        format,
        batch,
        rows: batch.row_refs(&policies.layout),
        plan: (policies.context.plan)(&batch.seq_lens, chunk_budget_tokens, &grid),
        query: read_half(inputs, "query", configuration.dtype, &[rows, shape.total, shape.dim])?,
        shape,
        new: TokenRows { keys: read("key", format.key_dim)?, values },
        policies,
    };
    let run = run_ranks(ranks, |link| step.run_rank(link, &caches[link.rank]))?;
    let reported = (policies.session.dispatch)(configuration, false).reported;
    let effective = shardcheck_engine::EffectivePath::new()
        .with("route", "context")
        .with("comm_backend", reported.backend.name())
        .with("chunks", step.plan.windows.len());
    let (outputs, collectives) = step.outputs(run);
    Ok(Reply { outputs, effective, collectives })
}

impl Step<'_> {
    fn run_rank(&self, link: &Link<'_>, cache: &RankCache) -> Result<RankContext, Stop> {
        let first = (self.policies.query.first_own_head)(link.rank, link.member, self.shape.own);
        let codes = select_heads(&self.query, self.shape, first, self.shape.own);
        let (read, dtype) = (self.policies.kernel.read_query, self.configuration.dtype);
        let query: Vec<f32> = codes.iter().map(|code| read(dtype, *code)).collect();
        let mut context = self.empty_state();
        let (mut gathered_keys, mut chunk_lens) = (Vec::new(), Vec::new());
        for chunk in 0..self.plan.windows.len() {
            let gathered = self.gather(link, cache, chunk)?;
            let requests = self.reorganise(&gathered, chunk)?;
            for tokens in &requests {
                chunk_lens.push((tokens.keys.len() / (self.format.kv_heads * self.format.key_dim)) as i32);
                gathered_keys.extend_from_slice(&tokens.keys);
            }
            let counts = &chunk_lens[chunk_lens.len() - requests.len()..];
            let state = self.attend(link, &query, |row| {
                let tokens = counts[row.request] as usize;
                let visible = (self.policies.context.visible)(tokens, row.row, row.query_len);
                (&requests[row.request], 0, visible)
            });
            context = self.merge_states(&context, &state, self.policies.context.merge_chunk);
        }
        let suffix = self.attend(link, &query, |row| {
            let first = self.batch.starts[row.request] as usize;
            (&self.new, first, (self.policies.context.visible_new)(row.row, row.query_len))
        });
        let mut merged = self.merge_states(&context, &suffix, self.policies.context.merge_suffix);
        let wire = Wire::of(dtype);
        merged.out.iter_mut().for_each(|value| *value = (self.policies.merge.stored)(wire, *value));
        Ok(RankContext { context, merged, gathered_keys, chunk_lens })
    }

    fn empty_state(&self) -> Partial {
        let (rows, heads, dim) = (self.shape.rows, self.shape.own, self.format.value_dim);
        Partial {
            out: vec![0.0; rows * heads * dim],
            lse: vec![f32::NEG_INFINITY; rows * heads],
            rows,
            heads,
            dim,
        }
    }

    /// Every rank's rows of a chunk, codes as they lie in the cache, rank-major. The padding rows among them were
    /// allocated but perhaps never written.
    fn gather(&self, link: &Link<'_>, cache: &RankCache, chunk: usize) -> Result<Vec<u8>, Stop> {
        let mut local = Vec::new();
        for request in 0..self.plan.padded.len() {
            let begin = self.plan.windows[chunk].start;
            for row in begin..begin + self.plan.sent(request, chunk) {
                let (entry, offset) = (self.policies.context.page)(row, &self.grid);
                let slot =
                    self.batch.table.block(request, entry, &self.policies.layout)? * self.grid.block + offset;
                let (keys, values) = cache.token(slot, &self.format);
                local.extend_from_slice(keys);
                local.extend_from_slice(values);
            }
        }
        // the same on all ranks, so that they agree on whether there is a collective
        if link.world == 1 || local.is_empty() {
            return Ok(local);
        }
        if !(self.policies.context.enters_gather)(self.held(link.member, chunk)) {
            return Ok(local.repeat(link.world));
        }
        let members: Vec<usize> = (0..link.world).collect();
        link.all_gather("all_gather_context", local, &members)
    }

    /// Tokens that a member holds in a chunk, over all requests.
    fn held(&self, member: usize, chunk: usize) -> usize {
        let window = &self.plan.windows[chunk];
        let held = |len: &usize| clip((self.policies.layout.local_len)(*len, member, &self.grid), window);
        self.batch.seq_lens.iter().map(held).sum()
    }

    /// Tokens of each request out of a gathered chunk, padding dropped, dequantised after the exchange.
    fn reorganise(&self, gathered: &[u8], chunk: usize) -> Result<Vec<TokenRows>, Stop> {
        let (context, cached, world) = (&self.policies.context, &self.policies.cache, self.grid.world);
        let (key_bytes, token_bytes) =
            (self.format.key_bytes(), self.format.key_bytes() + self.format.value_bytes());
        let sent_rows: Vec<usize> = (0..self.plan.padded.len()).map(|r| self.plan.sent(r, chunk)).collect();
        let sent: usize = sent_rows.iter().sum();
        let (mut requests, mut before) = (Vec::new(), 0);
        for (request, rows) in sent_rows.iter().enumerate() {
            let mut tokens = TokenRows::default();
            for member in 0..world {
                let held = (self.policies.layout.local_len)(self.batch.seq_lens[request], member, &self.grid);
                for row in 0..(context.kept)(held, *rows, &self.plan.windows[chunk]) {
                    let source = (context.source)(&GatheredRow { member, before, row, sent, world });
                    let codes =
                        gathered.get(source * token_bytes..(source + 1) * token_bytes).ok_or_else(|| {
                            Stop::crash(format!("illegal address: row {source} of a gathered chunk"))
                        })?;
                    tokens.push(
                        codes.split_at(key_bytes),
                        &self.format,
                        (cached.decode_context, cached.decode_context),
                    );
                }
            }
            requests.push(tokens);
            before += rows;
        }
        Ok(requests)
    }

    /// Attention of this rank's heads; `source` gives a row's tokens, the first of them, and how many it sees.
    fn attend<'t>(
        &self,
        link: &Link<'_>,
        query: &[f32],
        source: impl Fn(RowRef) -> (&'t TokenRows, usize, usize),
    ) -> Partial {
        let (kernel, format) = (&self.policies.kernel, &self.format);
        let (heads, dim, scale) =
            (self.shape.own, format.value_dim, (kernel.score_scale)(self.configuration));
        let group_heads = self.configuration.gathered_heads();
        let mut state = self.empty_state();
        let mut scratch = Scratch::default();
        for (row, request) in self.rows.iter().enumerate() {
            let Some(request) = request else { continue };
            let (tokens, first, visible) = source(*request);
            for head in 0..heads {
                let kv_head = (kernel.kv_head)(link.member * heads + head, group_heads, format.kv_heads);
                let view = self.policies.view(tokens, format, kv_head).skip_tokens(first);
                let index = row * heads + head;
                let q = &query[index * self.shape.dim..(index + 1) * self.shape.dim];
                let out = &mut state.out[index * dim..(index + 1) * dim];
                state.lse[index] = attend_row(q, view, visible, scale, kernel, &mut scratch, out);
            }
        }
        state
    }

    fn merge_states(&self, prefix: &Partial, suffix: &Partial, by: fn(f32, f32) -> StateWeights) -> Partial {
        merge_states(prefix, suffix, by, self.policies.merge.weigh)
    }

    fn outputs(&self, run: RankResults<RankContext>) -> (Tensors, Vec<u64>) {
        let (ranks, rows, own, dim) =
            (run.results.len(), self.shape.rows, self.shape.own, self.format.value_dim);
        let (results, format, dtype) = (&run.results, &self.format, self.configuration.dtype);
        let join = |part: fn(&RankContext) -> &[f32]| {
            results.iter().flat_map(|r| part(r).to_vec()).collect::<Vec<_>>()
        };
        let chunk_lens: Vec<i32> = results.iter().flat_map(|r| r.chunk_lens.iter().copied()).collect();
        let keys = join(|r| &r.gathered_keys);
        let tokens = keys.len() / (ranks * format.kv_heads * format.key_dim).max(1);
        let f32s = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::F32, shape, values);
        let chunks = [ranks, self.plan.windows.len(), self.plan.padded.len()];
        let outputs = Tensors::new()
            .with("out", Tensor::from_f32(dtype, &[ranks, rows, own, dim], &join(|r| &r.merged.out)))
            .with("lse", f32s(&[ranks, rows, own], &join(|r| &r.merged.lse)))
            .with("context_out", f32s(&[ranks, rows, own, dim], &join(|r| &r.context.out)))
            .with("context_lse", f32s(&[ranks, rows, own], &join(|r| &r.context.lse)))
            .with("gathered_key", f32s(&[ranks, tokens, format.kv_heads, format.key_dim], &keys))
            .with("chunk_lens", Tensor::from_i32(&chunks, &chunk_lens));
        (outputs, run.collectives)
    }
}

/// Merges two states row by row, in f32.
pub fn merge_states(
    prefix: &Partial,
    suffix: &Partial,
    by: fn(f32, f32) -> StateWeights,
    weigh: fn(f32, &mut [f32]),
) -> Partial {
    let (mut merged, mut second) = (prefix.clone(), suffix.clone());
    let rows = merged.out.chunks_exact_mut(prefix.dim).zip(second.out.chunks_exact_mut(prefix.dim));
    for (index, (first, second)) in rows.enumerate() {
        let weights = by(prefix.lse[index], suffix.lse[index]);
        weigh(weights.prefix, first);
        weigh(weights.suffix, second);
        first.iter_mut().zip(second).for_each(|(sum, value)| *sum += *value);
        merged.lse[index] = weights.lse;
    }
    merged
}
