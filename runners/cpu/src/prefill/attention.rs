//! Attention of a batch whose rows are shared out: each rank gathers the keys and values of all rows, brings them into the order of
//! positions behind the cached context, and attends for its own rows.
//!
//! Formulas: SGLang `in-seq-split` (a call for the chunk from the front and one for that from the end, each with its own KV length),
//! vLLM `PCPManager` (gathered KV, `hidden[restore]`), ATOM `pcp_allgather_rerange` (rows in turn, each with its own window).

use shardcheck_engine::{
    Configuration, EffectivePath, EngineError, PcpPlan, PcpStrategy, Reply, Tensor, Tensors,
};
use shardcheck_formats::{Dtype, Overflow, decode_f32, encode_f32, round_f32};

use super::{Shared, Shares, Split};
use crate::batch::BlockTable;
use crate::cache::{KvFormat, RankCache, TokenRows, read_local_tokens};
use crate::communicator::{Link, RankResults, Ranks, Stop, run_ranks};
use crate::grid::Grid;
use crate::kernel::{Scratch, attend_row};
use crate::policies::Policies;
use crate::sparse::position;

/// Rows that a rank attends for in one call: neighbours of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Their request.
    pub request: usize,
    /// Tokens of the request that were computed before.
    pub computed: usize,
    /// Place of the first of them among the new rows of the request.
    pub first: usize,
    /// How many they are.
    pub rows: usize,
    /// Place of the first of them among the rows of the rank.
    pub local: usize,
}

impl Call {
    /// Tokens before the end of the last row.
    pub fn end(&self) -> usize {
        self.computed + self.first + self.rows
    }
}

/// Rows `[R, width]` of a rank to those of all ranks, one after the other.
pub type GatherRows = fn(&Link<'_>, Vec<f32>) -> Result<Vec<f32>, Stop>;

/// How shared rows are attended for.
#[derive(Clone, Copy, PartialEq)]
pub struct PcpPolicies {
    /// What a query is read as: `(value, format, scale)`.
    pub query: fn(f32, Dtype, f32) -> f32,
    /// Brings the keys and values of each rank together.
    pub gather: GatherRows,
    /// Gathered place of each row of the batch whose key is read, given the right ones.
    pub key_places: fn(Vec<i64>, &Shares) -> Vec<i64>,
    /// Position of a token of the cached context: `(local, member, grid)`.
    pub context_position: fn(usize, usize, &Grid) -> usize,
    /// KV length of each call of a rank.
    pub call_lens: fn(&[Call]) -> Vec<usize>,
    /// Tokens that row `row` of a call of `rows` sees: `(KV length, row, rows)`.
    pub bound: fn(usize, usize, usize) -> usize,
    /// Request whose keys a call reads.
    pub keys_of: fn(&Call) -> usize,
    /// First of the keys that a call sees.
    pub first_key: fn(&Call) -> usize,
    /// Whether a rank attends for a row that every rank has.
    pub attends: fn(usize) -> bool,
    /// The output of a row that every rank has, as a rank stores it: `(rank, type of activations, value)`.
    pub stored: fn(usize, Dtype, f32) -> f32,
    /// Gathered place of each row of the batch whose output is read, given the right ones: `(places, shares, rank)`.
    pub out_places: fn(Vec<i64>, &Shares, usize) -> Vec<i64>,
}

impl PcpPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        query: cast,
        gather: |link, own| gather(link, "all_gather_pcp_kv", own),
        key_places: |places, _| places,
        context_position: position,
        call_lens: |calls| calls.iter().map(Call::end).collect(),
        // the last row of a call sees all of it
        bound: |len, row, rows| (len + 1 + row).saturating_sub(rows),
        keys_of: |call| call.request,
        first_key: |_| 0,
        attends: |_| true,
        stored: |_, dtype, value| round_f32(dtype, value),
        out_places: |places, _, _| places,
    };
}

/// A query behind its cast, with the scale folded in again.
pub fn cast(value: f32, dtype: Dtype, scale: f32) -> f32 {
    decode_f32(dtype, encode_f32(dtype, value * scale.recip(), Overflow::Saturate)) * scale
}

pub(super) fn gather(link: &Link<'_>, name: &'static str, own: Vec<f32>) -> Result<Vec<f32>, Stop> {
    if link.world == 1 {
        return Ok(own);
    }
    let members: Vec<usize> = (0..link.world).collect();
    link.all_gather(name, own, &members)
}

struct Step<'a> {
    configuration: &'a Configuration,
    caches: &'a [RankCache],
    grid: Grid,
    format: KvFormat,
    plan: PcpPlan,
    shared: Shared,
    shares: Shares,
    table: BlockTable,
    query: Vec<f32>,
    new: TokenRows,
    policies: &'a Policies,
}

#[derive(Default)]
struct RankAttention {
    rows: Vec<i64>,
    row_lens: Vec<i32>,
    query: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    local_out: Vec<f32>,
    local_lse: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

/// Performs the step on all ranks of the plan, each on a thread of its own.
///
/// # Errors
/// As [`shardcheck_engine::Session::step`].
pub fn attend_pcp(
    (configuration, caches): (&Configuration, &[RankCache]),
    inputs: &Tensors,
    plan: PcpPlan,
    ranks: Ranks,
    policies: &Policies,
) -> Result<Reply, EngineError> {
    let PcpPlan { world, strategy, decodes, padded_rows, .. } = plan;
    let split = Split { world, strategy, decodes, padded_rows, overlap: false };
    let shared = Shared::of(inputs, split, &policies.prefill)?;
    let (rows, format) = (shared.batch.rows(), KvFormat::of(configuration));
    let table = BlockTable::read(inputs, configuration.blocks)?;
    if table.requests() != shared.batch.computed.len() {
        let text = format!("a block table of {} requests", table.requests());
        return Err(EngineError::Crash { text });
    }
    let read = |name: &str, heads: usize, dim: usize| -> Result<Vec<f32>, EngineError> {
        Ok(inputs.get(name)?.expect(name, configuration.dtype, &[rows, heads, dim])?.to_f32())
    };
    let keys = read("key", format.kv_heads, format.key_dim)?;
    let values = if format.shared { Vec::new() } else { read("value", format.kv_heads, format.value_dim)? };
    let step = Step {
        configuration,
        caches,
        grid: Grid::of(configuration),
        format,
        plan,
        shares: shared.shares(),
        shared,
        table,
        query: read("query", configuration.total_heads(), format.key_dim)?,
        new: TokenRows { keys, values },
        policies,
    };
    let run = run_ranks(Ranks { count: world, world, ..ranks }, |link| step.run_rank(link))?;
    let effective = EffectivePath::new()
        .with("route", "attend_pcp")
        .with("strategy", strategy.name())
        .with("pcp", world)
        .with("query", plan.query_dtype.name());
    let (outputs, collectives) = step.outputs(run);
    Ok(Reply { outputs, effective, collectives })
}

impl Step<'_> {
    fn run_rank(&self, link: &Link<'_>) -> Result<RankAttention, Stop> {
        let tokens = self.gather_tokens(link)?;
        let mut seen = RankAttention::default();
        self.attend(link.rank, &tokens, &mut seen)?;
        let (heads, dim) = (self.configuration.total_heads(), self.format.value_dim);
        let out = gather(link, "all_gather_pcp_out", seen.local_out.clone())?;
        let lse = gather(link, "all_gather_pcp_lse", seen.local_lse.clone())?;
        let places = (self.policies.prefill.restore)(&self.shares);
        let places = (self.policies.pcp.out_places)(places, &self.shares, link.rank);
        for place in places {
            push_row(&mut seen.out, &out, place, heads * dim);
            push_row(&mut seen.lse, &lse, place, heads);
        }
        for request in tokens {
            seen.keys.extend_from_slice(&request.keys);
            seen.values.extend_from_slice(&request.values);
        }
        Ok(seen)
    }

    /// Keys and values of every request, the cached ones first, in the order of positions.
    fn gather_tokens(&self, link: &Link<'_>) -> Result<Vec<TokenRows>, Stop> {
        let (key, value) = (self.key_width(), self.value_width());
        let mut own = Vec::new();
        for local in self.shared.run_by(link.rank) {
            push_row(&mut own, &self.new.keys, local.row as i64, key);
            push_row(&mut own, &self.new.values, local.row as i64, value);
        }
        // nobody may read what stands in padding
        own.resize(self.shared.padded * (key + value), f32::NAN);
        let gathered = (self.policies.pcp.gather)(link, own)?;
        let places = (self.policies.prefill.restore)(&self.shares);
        let places = (self.policies.pcp.key_places)(places, &self.shares);
        let (batch, mut requests) = (&self.shared.batch, Vec::new());
        for request in 0..batch.computed.len() {
            let mut tokens = self.context(request)?;
            for place in &places[batch.starts[request]..batch.starts[request + 1]] {
                let mut token = Vec::new();
                push_row(&mut token, &gathered, *place, key + value);
                tokens.keys.extend_from_slice(&token[..key]);
                tokens.values.extend_from_slice(&token[key..]);
            }
            requests.push(tokens);
        }
        Ok(requests)
    }

    /// The cached tokens of a request, from the ranks that they lie on.
    fn context(&self, request: usize) -> Result<TokenRows, Stop> {
        let (policies, grid) = (self.policies, &self.grid);
        let computed = self.shared.batch.computed[request];
        let (key, value) = (self.key_width(), self.value_width());
        let mut tokens =
            TokenRows { keys: vec![f32::NAN; computed * key], values: vec![f32::NAN; computed * value] };
        for (member, cache) in self.caches.iter().enumerate().take(grid.world) {
            let count = (policies.layout.local_len)(computed, member, grid);
            let both = (&policies.layout, &policies.cache);
            let local = read_local_tokens(cache, &self.table, request, count, both, (grid, &self.format))?;
            for index in 0..count {
                let position = (policies.pcp.context_position)(index, member, grid);
                for (from, to, width) in
                    [(&local.keys, &mut tokens.keys, key), (&local.values, &mut tokens.values, value)]
                {
                    if let Some(to) = to.get_mut(position * width..(position + 1) * width) {
                        to.copy_from_slice(&from[index * width..(index + 1) * width]);
                    }
                }
            }
        }
        Ok(tokens)
    }

    fn calls(&self, rank: usize) -> Vec<Call> {
        let (batch, rows) = (&self.shared.batch, self.shared.run_by(rank));
        // rows in turn are no neighbours
        let together = self.plan.strategy != PcpStrategy::RoundRobin;
        let mut local = 0;
        let groups = rows.chunk_by(|a, b| together && a.chunk == b.chunk).map(|group| {
            let request = batch.request_of(group[0].row);
            let first = group[0].row - batch.starts[request];
            let call = Call { request, computed: batch.computed[request], first, rows: group.len(), local };
            local += group.len();
            call
        });
        groups.collect()
    }

    /// Attention of a rank's rows; padding sees nothing.
    fn attend(&self, rank: usize, tokens: &[TokenRows], seen: &mut RankAttention) -> Result<(), Stop> {
        let pcp = &self.policies.pcp;
        let (calls, own) = (self.calls(rank), self.shared.run_by(rank));
        let lens = (pcp.call_lens)(&calls);
        let mut scratch = Scratch::default();
        for (call, len) in calls.iter().zip(lens) {
            let of = &tokens[(pcp.keys_of)(call)];
            let (first, held) = ((pcp.first_key)(call), of.keys.len() / self.key_width());
            for row in 0..call.rows {
                let local = own[call.local + row];
                let sees = (pcp.bound)(len, row, call.rows);
                if sees > held {
                    return Err(Stop::crash(format!(
                        "illegal address: token {sees} of {held} gathered ones"
                    )));
                }
                let attends = !local.everywhere || (pcp.attends)(rank);
                let visible = if attends { sees.saturating_sub(first) } else { 0 };
                let stored = |value| match local.everywhere {
                    true => (pcp.stored)(rank, self.configuration.dtype, value),
                    false => round_f32(self.configuration.dtype, value),
                };
                seen.rows.push(local.row as i64);
                seen.row_lens.push(sees as i32);
                self.attend_row(local.row, (of, first, visible), stored, &mut scratch, seen);
            }
        }
        let (padded, heads) = (self.shared.padded, self.configuration.total_heads());
        seen.rows.resize(padded, self.policies.prefill.padding);
        seen.row_lens.resize(padded, 0);
        seen.query.resize(padded * heads * self.format.key_dim, 0.0);
        seen.local_out.resize(padded * heads * self.format.value_dim, 0.0);
        seen.local_lse.resize(padded * heads, f32::NEG_INFINITY);
        Ok(())
    }

    /// Attention of all heads of a row over `visible` tokens from `first` on.
    fn attend_row(
        &self,
        row: usize,
        (tokens, first, visible): (&TokenRows, usize, usize),
        stored: impl Fn(f32) -> f32,
        scratch: &mut Scratch,
        seen: &mut RankAttention,
    ) {
        let (kernel, format) = (&self.policies.kernel, &self.format);
        let (heads, group) = (self.configuration.total_heads(), self.configuration.gathered_heads());
        let scale = (kernel.score_scale)(self.configuration);
        let mut out = vec![0.0; format.value_dim];
        for head in 0..heads {
            let at = (row * heads + head) * format.key_dim;
            let given = self.query.get(at..at + format.key_dim).unwrap_or(&[]);
            let cast = self.policies.pcp.query;
            let mut query: Vec<f32> = given
                .iter()
                .map(|value| cast(*value, self.plan.query_dtype, self.plan.query_scale))
                .collect();
            query.resize(format.key_dim, f32::NAN);
            let kv_head = (kernel.kv_head)(head % group, group, format.kv_heads);
            let view = self.policies.view(tokens, format, kv_head).skip_tokens(first);
            let lse = attend_row(&query, view, visible, scale, kernel, scratch, &mut out);
            seen.query.extend_from_slice(&query);
            seen.local_out.extend(out.iter().map(|value| stored(*value)));
            seen.local_lse.push(lse);
        }
    }

    fn key_width(&self) -> usize {
        self.format.kv_heads * self.format.key_dim
    }

    fn value_width(&self) -> usize {
        if self.format.shared { 0 } else { self.format.kv_heads * self.format.value_dim }
    }

    fn outputs(&self, run: RankResults<RankAttention>) -> (Tensors, Vec<u64>) {
        let (world, padded, rows) = (self.plan.world, self.shared.padded, self.shared.batch.rows());
        let (heads, format) = (self.configuration.total_heads(), &self.format);
        let join = |part: fn(&RankAttention) -> &[f32]| {
            run.results.iter().flat_map(|rank| part(rank).to_vec()).collect::<Vec<_>>()
        };
        let f32s = |shape: &[usize], values: &[f32]| Tensor::from_f32(Dtype::F32, shape, values);
        let dtype = self.configuration.dtype;
        let halves = |shape: &[usize], values: &[f32]| Tensor::from_f32(dtype, shape, values);
        let row_ids: Vec<i64> = run.results.iter().flat_map(|rank| rank.rows.iter().copied()).collect();
        let row_lens: Vec<i32> = run.results.iter().flat_map(|rank| rank.row_lens.iter().copied()).collect();
        let keys = join(|rank| &rank.keys);
        let tokens = keys.len() / (world * self.key_width());
        let local = [world, padded, heads, format.value_dim];
        let mut outputs = Tensors::new()
            .with("out", halves(&[world, rows, heads, format.value_dim], &join(|rank| &rank.out)))
            .with("lse", f32s(&[world, rows, heads], &join(|rank| &rank.lse)))
            .with("rows", Tensor::from_i64(&[world, padded], &row_ids))
            .with("row_lens", Tensor::from_i32(&[world, padded], &row_lens))
            .with("kernel_query", f32s(&[world, padded, heads, format.key_dim], &join(|rank| &rank.query)))
            .with("gathered_key", f32s(&[world, tokens, format.kv_heads, format.key_dim], &keys))
            .with("local_out", halves(&local, &join(|rank| &rank.local_out)))
            .with("local_lse", f32s(&local[..3], &join(|rank| &rank.local_lse)));
        if !format.shared {
            let shape = [world, tokens, format.kv_heads, format.value_dim];
            outputs.insert("gathered_value", f32s(&shape, &join(|rank| &rank.values)));
        }
        (outputs, run.collectives)
    }
}

/// Appends row `place` of a buffer of rows; NaN where there is none.
pub(super) fn push_row(to: &mut Vec<f32>, from: &[f32], place: i64, width: usize) {
    let row = usize::try_from(place).ok().and_then(|place| from.get(place * width..(place + 1) * width));
    match row {
        Some(row) => to.extend_from_slice(row),
        None => to.extend(std::iter::repeat_n(f32::NAN, width)),
    }
}
