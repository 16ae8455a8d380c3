//! Selection of tokens for shared rows: each rank gathers the indexer's keys of all rows, scores its own rows by them behind the keys that
//! were computed before, and gives what it selected back.
//!
//! Formulas: SGLang `dsa_indexer` (`kv_len` of a chunk from its end in the sequence), ATOM V3.2 (gathered `k`, windows before the split).

use shardcheck_engine::{EffectivePath, EngineError, IndexPlan, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::attention::{GatherRows, gather, push_row};
use super::{PrefillPolicies, Shared, Shares, Split};
use crate::communicator::{Link, Ranks, Stop, run_ranks};
use crate::sparse::best;

/// A local row, as its bound is derived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// Tokens of its request that were computed before.
    pub computed: usize,
    /// Its place among the new rows of its request.
    pub in_request: usize,
    /// Its place among the rows of its request that the rank has.
    pub on_rank: usize,
}

/// How shared rows select.
#[derive(Clone, Copy, PartialEq)]
pub struct IndexPolicies {
    /// Brings the keys of each rank together.
    pub gather: GatherRows,
    /// Gathered place of each row of the batch whose key is read, given the right ones.
    pub key_places: fn(Vec<i64>, &Shares) -> Vec<i64>,
    /// Tokens that a row sees.
    pub bound: fn(&Seen) -> usize,
    /// First token that a row is scored for, given those that were computed before.
    pub first_key: fn(usize) -> usize,
    /// Row of the batch whose query and weights a row is scored by: `(row, rows of the batch)`.
    pub query_of: fn(usize, usize) -> usize,
    /// Tokens of the first request that a row of padding sees, given all of them.
    pub padding_sees: fn(usize) -> usize,
    /// Gathered place of each row of the batch whose selection is read, given the right ones: `(places, shares, rank)`.
    pub out_places: fn(Vec<i64>, &Shares, usize) -> Vec<i64>,
}

impl IndexPolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        gather: |link, own| gather(link, "all_gather_pcp_index_key", own),
        key_places: |places, _| places,
        bound: |row| row.computed + row.in_request + 1,
        first_key: |_| 0,
        query_of: |row, _| row,
        padding_sees: |_| 0,
        out_places: |places, _, _| places,
    };
}

struct Step<'a> {
    plan: IndexPlan,
    shared: Shared,
    shares: Shares,
    heads: usize,
    width: usize,
    query: Vec<f32>,
    weights: Vec<f32>,
    keys: Vec<f32>,
    context: Vec<f32>,
    policies: (&'a PrefillPolicies, &'a IndexPolicies),
}

#[derive(Default)]
struct Selected {
    rows: Vec<i64>,
    row_lens: Vec<i32>,
    keys: Vec<f32>,
    scores: Vec<f32>,
    local: Vec<f32>,
    topk: Vec<i32>,
}

/// Performs the step on all ranks of the plan, each on a thread of its own.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit; a crash for a plan that selects nothing, and for an illegal address.
pub fn select_pcp(
    inputs: &Tensors,
    plan: IndexPlan,
    ranks: Ranks,
    policies: (&PrefillPolicies, &IndexPolicies),
) -> Result<Reply, EngineError> {
    let IndexPlan { world, strategy, decodes, padded_rows, top_k } = plan;
    let split = Split { world, strategy, decodes, padded_rows, overlap: false };
    let shared = Shared::of(inputs, split, policies.0)?;
    let (rows, computed) = (shared.batch.rows(), shared.batch.computed.iter().sum());
    let &[_, heads, width] = inputs.get("index_query")?.shape() else {
        return Err(EngineError::Crash { text: "index_query has no three axes".to_owned() });
    };
    if top_k == 0 || heads == 0 || width == 0 {
        let text = format!("{top_k} tokens by {heads} heads of width {width}");
        return Err(EngineError::Crash { text });
    }
    let read = |name: &str, dtype: Dtype, shape: &[usize]| -> Result<Vec<f32>, EngineError> {
        Ok(inputs.get(name)?.expect(name, dtype, shape)?.to_f32())
    };
    let step = Step {
        plan,
        shares: shared.shares(),
        shared,
        heads,
        width,
        query: read("index_query", Dtype::Bf16, &[rows, heads, width])?,
        weights: read("index_weights", Dtype::F32, &[rows, heads])?,
        keys: read("index_key", Dtype::Bf16, &[rows, width])?,
        context: read("index_context", Dtype::Bf16, &[computed, width])?,
        policies,
    };
    let run = run_ranks(Ranks { count: world, world, ..ranks }, |link| step.run_rank(link))?;
    let floats =
        |part: fn(&Selected) -> &Vec<f32>| run.results.iter().flat_map(part).copied().collect::<Vec<_>>();
    let ints =
        |part: fn(&Selected) -> &Vec<i32>| run.results.iter().flat_map(part).copied().collect::<Vec<_>>();
    let padded = step.shared.padded;
    let own_rows: Vec<i64> = run.results.iter().flat_map(|rank| rank.rows.iter().copied()).collect();
    let local: Vec<i32> = floats(|rank| &rank.local).into_iter().map(|position| position as i32).collect();
    let outputs = Tensors::new()
        .with("topk", Tensor::from_i32(&[world, rows, top_k], &ints(|rank| &rank.topk)))
        .with("rows", Tensor::from_i64(&[world, padded], &own_rows))
        .with("row_lens", Tensor::from_i32(&[world, padded], &ints(|rank| &rank.row_lens)))
        .with(
            "gathered_key",
            Tensor::from_f32(Dtype::F32, &[world, computed + rows, width], &floats(|rank| &rank.keys)),
        )
        .with(
            "index_scores",
            Tensor::from_f32(Dtype::F32, &[world, padded, step.longest()], &floats(|rank| &rank.scores)),
        )
        .with("local_topk", Tensor::from_i32(&[world, padded, top_k], &local));
    let effective =
        EffectivePath::new().with("route", "select_pcp").with("strategy", strategy.name()).with("pcp", world);
    Ok(Reply { outputs, effective, collectives: run.collectives })
}

impl Step<'_> {
    /// Tokens of the longest request.
    fn longest(&self) -> usize {
        let batch = &self.shared.batch;
        let tokens =
            batch.starts.windows(2).zip(&batch.computed).map(|(pair, context)| context + pair[1] - pair[0]);
        tokens.max().unwrap_or(0)
    }

    fn run_rank(&self, link: &Link<'_>) -> Result<Selected, Stop> {
        let (prefill, policies) = self.policies;
        let tokens = self.gather_keys(link)?;
        let mut seen = Selected::default();
        let own = self.shared.run_by(link.rank);
        let mut on_rank = vec![0; tokens.len()];
        for place in 0..self.shared.padded {
            let Some(local) = own.get(place) else {
                seen.rows.push(prefill.padding);
                let held = tokens.first().map_or(0, |keys| keys.len() / self.width);
                self.select(0, (0, (policies.padding_sees)(held)), tokens.first(), &mut seen)?;
                continue;
            };
            let batch = &self.shared.batch;
            let request = batch.request_of(local.row);
            let (computed, in_request) = (batch.computed[request], local.row - batch.starts[request]);
            let row = Seen { computed, in_request, on_rank: on_rank[request] };
            on_rank[request] += 1;
            seen.rows.push(local.row as i64);
            let sees = ((policies.first_key)(computed), (policies.bound)(&row));
            let query = (policies.query_of)(local.row, batch.rows());
            self.select(query, sees, tokens.get(request), &mut seen)?;
        }
        let gathered = gather(link, "all_gather_pcp_topk", seen.local.clone())?;
        let places = (policies.out_places)((prefill.restore)(&self.shares), &self.shares, link.rank);
        let mut restored = Vec::new();
        for place in places {
            push_row(&mut restored, &gathered, place, self.plan.top_k);
        }
        seen.topk = restored.into_iter().map(|position| position as i32).collect();
        seen.keys = tokens.concat();
        Ok(seen)
    }

    /// Keys of every request, those that were computed before first, in the order of positions.
    fn gather_keys(&self, link: &Link<'_>) -> Result<Vec<Vec<f32>>, Stop> {
        let (prefill, policies) = self.policies;
        let mut own = Vec::new();
        for local in self.shared.run_by(link.rank) {
            push_row(&mut own, &self.keys, local.row as i64, self.width);
        }
        // nobody may read what stands in padding
        own.resize(self.shared.padded * self.width, f32::NAN);
        let gathered = (policies.gather)(link, own)?;
        let places = (policies.key_places)((prefill.restore)(&self.shares), &self.shares);
        let (batch, mut before, mut requests) = (&self.shared.batch, 0, Vec::new());
        for (request, computed) in batch.computed.iter().enumerate() {
            let mut keys = self.context[before * self.width..(before + computed) * self.width].to_vec();
            before += computed;
            for place in &places[batch.starts[request]..batch.starts[request + 1]] {
                push_row(&mut keys, &gathered, *place, self.width);
            }
            requests.push(keys);
        }
        Ok(requests)
    }

    /// Scores the tokens from `first` on that a row sees, and adds the best of them.
    fn select(
        &self,
        query: usize,
        (first, sees): (usize, usize),
        keys: Option<&Vec<f32>>,
        seen: &mut Selected,
    ) -> Result<(), Stop> {
        let keys: &[f32] = keys.map_or(&[], Vec::as_slice);
        if sees * self.width > keys.len() {
            let held = keys.len() / self.width;
            return Err(Stop::crash(format!("illegal address: key {sees} of {held} gathered ones")));
        }
        let row = &self.query[query * self.heads * self.width..(query + 1) * self.heads * self.width];
        let weights = &self.weights[query * self.heads..(query + 1) * self.heads];
        let score = |position: usize| -> f32 {
            let key = &keys[position * self.width..(position + 1) * self.width];
            let heads = row.chunks_exact(self.width).zip(weights);
            heads
                .map(|(query, weight)| {
                    let dot: f32 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                    weight * dot.max(0.0)
                })
                .sum()
        };
        let first = first.min(sees);
        let scores: Vec<f32> = (first..sees).map(score).collect();
        let (done, k) = (seen.row_lens.len() + 1, self.plan.top_k);
        let chosen = best(&scores, k.min(scores.len()));
        // positions travel as 32-bit floats, which hold whole numbers up to 2^24
        seen.local.extend(chosen.into_iter().map(|index| (first + index) as f32));
        seen.local.resize(done * k, -1.0);
        seen.row_lens.push(sees as i32);
        seen.scores.extend(std::iter::repeat_n(f32::NEG_INFINITY, first));
        seen.scores.extend(scores);
        seen.scores.resize(done * self.longest(), f32::NEG_INFINITY);
        Ok(())
    }
}
