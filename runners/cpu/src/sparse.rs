//! Selection of the tokens that a row attends to: each rank scores the keys that it has, candidates are gathered and chosen from again,
//! and a rank lists the slots of those that it owns.
//!
//! Scores: DeepSeek-V3.2 (`fp8_mqa_logits`). Exchange, partition and compaction: ATOM `merge_dcp_topk`, `dcp_sparse_filter`; vLLM
//! `merge_dcp_topk_global`, `filter_and_convert_dcp_index`. 32-bit scores; of equal ones the candidate of the lower rank, then the older.

mod lists;

use shardcheck_engine::{
    Configuration, EffectivePath, EngineError, Reply, SelectionMode, Selector, SlotList, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

use crate::batch::{Batch, wrong_shape};
use crate::communicator::{Link, Ranks, Stop, run_ranks};
use crate::grid::{Grid, LayoutPolicies, RowRef, Sight};

pub use lists::{Form, Lists, Slots};

/// Most scores of a reply: a long prefill has more than anyone looks at.
const MAX_SCORES: usize = 1 << 22;

/// A token with its score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Score.
    pub score: f32,
    /// Global position; −1 for none.
    pub position: i64,
}

/// How tokens are selected.
#[derive(Clone, Copy, PartialEq)]
pub struct SparsePolicies {
    /// Row whose tokens a row gets: `(row, rows that are not padding)`; `None` for padding.
    pub row: fn(usize, usize) -> Option<usize>,
    /// Tokens of a rank that a row sees.
    pub row_len: fn(&LayoutPolicies, &Sight) -> usize,
    /// Block-table entry and offset of a local token's key.
    pub page: fn(usize, &Grid) -> (usize, usize),
    /// Element of the query that meets an element of the key: `(element, width)`.
    pub element: fn(usize, usize) -> usize,
    /// What a head adds: `(q·k, weight)`.
    pub head: fn(f32, f32) -> f32,
    /// What a score is multiplied by, given the scale of its key.
    pub key_scale: fn(f32) -> f32,
    /// Candidates that a rank gives: `(k, ranks)`.
    pub candidates: fn(usize, usize) -> usize,
    /// Indices of the best scores, so many of them.
    pub best: fn(&[f32], usize) -> Vec<usize>,
    /// Global position of a local token: `(local, member, grid)`.
    pub position: fn(usize, usize, &Grid) -> usize,
    /// A score as it travels.
    pub wire: fn(f32) -> f32,
    /// What stands where a rank has fewer tokens than candidates.
    pub filler: Candidate,
    /// Whose candidates a rank chooses from, in this order: `(own member, ranks, mode)`.
    pub sources: fn(usize, usize, SelectionMode) -> Vec<usize>,
    /// Tokens of a row, of `k` that are asked for and so many candidates of each rank.
    pub kept: fn(usize, usize) -> usize,
    /// Whether a rank lists a position: `(position, member, grid)`.
    pub owns: fn(usize, usize, &Grid) -> bool,
    /// Block-table entry of a position.
    pub entry: fn(usize, &Grid) -> usize,
    /// Offset of a position within its block.
    pub offset: fn(usize, &Grid) -> usize,
    /// The list of a row: what it owns of its tokens, in their order, `None` for those of others.
    pub list: fn(Vec<Option<i32>>) -> Vec<i32>,
    /// Count of a row, given its entries.
    pub count: fn(usize) -> usize,
    /// Entries of a row in the list: `(tokens, k, how they are listed)`.
    pub entries: fn(usize, usize, SlotList) -> usize,
    /// What stands in an entry that has no token.
    pub empty_entry: fn(SlotList) -> i32,
}

impl SparsePolicies {
    /// As published.
    pub const HEALTHY: Self = Self {
        row: |row, rows| (row < rows).then_some(row),
        row_len: |layout, sight| (layout.row_len)(layout, sight),
        page: |local, grid| (local / grid.block, local % grid.block),
        element: |element, _| element,
        head: |dot, weight| weight * dot.max(0.0),
        key_scale: |scale| scale,
        candidates: |k, _| k,
        best,
        position,
        wire: |score| score,
        filler: Candidate { score: f32::NEG_INFINITY, position: -1 },
        sources: |own, world, mode| match mode {
            SelectionMode::Exact => (0..world).collect(),
            SelectionMode::Union => vec![own],
        },
        kept: |k, _| k,
        owns: |position, member, grid| position / grid.interleave % grid.world == member,
        entry: |position, grid| position / (grid.block * grid.world),
        offset: |position, grid| {
            (position / grid.round_tokens() * grid.interleave + position % grid.interleave) % grid.block
        },
        list: |tokens| tokens.into_iter().flatten().collect(),
        count: |tokens| tokens,
        entries: |tokens, k, list| match list {
            SlotList::Padded => k,
            SlotList::Packed => tokens,
            SlotList::PackedDummy => tokens.max(1),
        },
        empty_entry: |list| if list == SlotList::PackedDummy { 0 } else { -1 },
    };
}

/// Indices of the `count` best scores, the best first, of equal ones the lower index first.
pub fn best(scores: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    let by_score = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b));
    if count > 0 && count < order.len() {
        order.select_nth_unstable_by(count - 1, by_score);
    }
    order.truncate(count);
    order.sort_unstable_by(by_score);
    order
}

/// Global position of a local token.
pub fn position(local: usize, member: usize, grid: &Grid) -> usize {
    (local / grid.interleave * grid.world + member) * grid.interleave + local % grid.interleave
}

/// The keys of one rank.
struct Keys {
    values: Vec<f32>,
    scales: Option<Vec<f32>>,
}

/// A step with its inputs.
struct Step<'a> {
    selector: Selector,
    grid: Grid,
    batch: &'a Batch,
    layout: &'a LayoutPolicies,
    policies: &'a SparsePolicies,
    rows: Vec<Option<RowRef>>,
    query: Vec<f32>,
    weights: Vec<f32>,
    heads: usize,
    width: usize,
    keys: Vec<Keys>,
}

/// What one rank answers.
#[derive(Default)]
struct Listed {
    topk: Vec<i32>,
    lists: Lists,
    scores: Vec<f32>,
}

/// Selects tokens over the ranks of a session.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit; a crash for a selector that selects nothing, and for an illegal address.
pub fn select(
    (configuration, grid): (&Configuration, Grid),
    inputs: &Tensors,
    batch: &Batch,
    selector: Selector,
    ranks: Ranks,
    (layout, policies): (&LayoutPolicies, &SparsePolicies),
) -> Result<Reply, EngineError> {
    let step = Step::read((configuration, grid), inputs, batch, selector, (layout, policies))?;
    let run = run_ranks(ranks, |link| step.on_rank(link))?;
    let (count, rows, k) = (ranks.count, batch.rows, selector.top_k);
    let flat = |of: fn(&Listed) -> &[i32]| run.results.iter().flat_map(of).copied().collect::<Vec<_>>();
    let mut outputs = Tensors::new()
        .with("topk", Tensor::from_i32(&[count, rows, k], &flat(|rank| &rank.topk)))
        .with("counts", Tensor::from_i32(&[count, rows], &flat(|rank| &rank.lists.counts)))
        .with("indptr", Tensor::from_i32(&[count, rows + 1], &flat(|rank| &rank.lists.indptr)))
        .with("slots", Tensor::from_i32(&[count, rows * k], &flat(|rank| &rank.lists.slots)));
    if step.returns_scores(count) {
        let scores: Vec<f32> = run.results.iter().flat_map(|rank| rank.scores.iter().copied()).collect();
        let shape = [count, rows, step.most_local()];
        outputs.insert("index_scores", Tensor::from_f32(Dtype::F32, &shape, &scores));
    }
    let effective = EffectivePath::new().with("selection", selector.mode.name());
    Ok(Reply { outputs, effective, collectives: run.collectives })
}

impl<'a> Step<'a> {
    fn read(
        (configuration, grid): (&Configuration, Grid),
        inputs: &Tensors,
        batch: &'a Batch,
        selector: Selector,
        (layout, policies): (&'a LayoutPolicies, &'a SparsePolicies),
    ) -> Result<Self, EngineError> {
        let query = inputs.get("index_query")?;
        let &[rows, heads, width] = query.shape() else {
            return Err(wrong_shape("index_query", query, vec![batch.rows, 1, 1]));
        };
        if selector.top_k == 0 || heads == 0 || width == 0 {
            let text = format!("{} tokens by {heads} heads of width {width}", selector.top_k);
            return Err(EngineError::Crash { text });
        }
        let dtype = if query.dtype() == Dtype::E4m3fn { Dtype::E4m3fn } else { Dtype::Bf16 };
        query.expect("index_query", dtype, &[rows, heads, width])?;
        let (ranks, blocks, block) = (configuration.tp, configuration.blocks, configuration.block_size);
        let weights = inputs.get("index_weights")?.expect("index_weights", Dtype::F32, &[rows, heads])?;
        let cache =
            inputs.get("index_cache")?.expect("index_cache", dtype, &[ranks, blocks, block, width])?.to_f32();
        let scales = match dtype {
            Dtype::E4m3fn => Some(
                inputs
                    .get("index_scale")?
                    .expect("index_scale", Dtype::F32, &[ranks, blocks, block])?
                    .to_f32(),
            ),
            _ => None,
        };
        let slots = blocks * block;
        let of_rank = |rank: usize| Keys {
            values: cache[rank * slots * width..(rank + 1) * slots * width].to_vec(),
            scales: scales.as_ref().map(|all| all[rank * slots..(rank + 1) * slots].to_vec()),
        };
        Ok(Self {
            selector,
            grid,
            batch,
            layout,
            policies,
            rows: batch.row_refs(layout),
            query: query.to_f32(),
            weights: weights.to_f32(),
            heads,
            width,
            keys: (0..ranks).map(of_rank).collect(),
        })
    }

    /// Local tokens that the block table has room for.
    fn most_local(&self) -> usize {
        match self.batch.table.requests() {
            0 => 0,
            _ => self.batch.table.entries(0).len() * self.grid.block,
        }
    }

    fn returns_scores(&self, ranks: usize) -> bool {
        ranks * self.batch.rows * self.most_local() <= MAX_SCORES
    }

    fn on_rank(&self, link: &Link<'_>) -> Result<Listed, Stop> {
        let (policies, world) = (self.policies, link.world);
        let each = (policies.candidates)(self.selector.top_k, world);
        let mut listed = Listed::default();
        let mut own = Vec::with_capacity(self.batch.rows * each);
        for row in 0..self.batch.rows {
            let source = (policies.row)(row, self.batch.real_rows());
            let scores = match source.and_then(|source| self.rows[source].zip(Some(source))) {
                Some((request, source)) => self.scores(link, source, &request)?,
                None => Vec::new(),
            };
            let candidates = (policies.best)(&scores, each.min(scores.len())).into_iter().map(|local| {
                let position = (policies.position)(local, link.member, &self.grid) as i64;
                Candidate { score: (policies.wire)(scores[local]), position }
            });
            own.extend(candidates);
            own.resize((row + 1) * each, policies.filler);
            if self.returns_scores(self.keys.len()) {
                listed.scores.extend(&scores);
                listed.scores.resize((row + 1) * self.most_local(), f32::NEG_INFINITY);
            }
        }
        let sources = (policies.sources)(link.member, world, self.selector.mode);
        let gathered = if world > 1 && self.selector.mode == SelectionMode::Exact {
            let parts = link.exchange("gather_candidates", own)?;
            sources.iter().map(|member| parts[*member].to_vec()).collect()
        } else {
            vec![own]
        };
        let kept = (policies.kept)(self.selector.top_k, each);
        for row in 0..self.batch.rows {
            let pool: Vec<Candidate> =
                gathered.iter().flat_map(|part| part[row * each..(row + 1) * each].iter().copied()).collect();
            let scores: Vec<f32> = pool.iter().map(|candidate| candidate.score).collect();
            let chosen = (policies.best)(&scores, kept.min(pool.len()));
            let chosen =
                chosen.into_iter().map(|index| pool[index].position).filter(|position| *position >= 0);
            self.add(link, row, &chosen.collect::<Vec<_>>(), &mut listed)?;
        }
        listed.lists = listed.lists.finished(self.form());
        Ok(listed)
    }

    /// Scores of the rank's tokens that a row sees.
    fn scores(&self, link: &Link<'_>, row: usize, of: &RowRef) -> Result<Vec<f32>, Stop> {
        let (policies, keys) = (self.policies, &self.keys[link.rank]);
        let sight = Sight {
            seq_len: self.batch.seq_lens[of.request],
            query_len: of.query_len,
            row: of.row,
            member: link.member,
            grid: self.grid,
        };
        let (heads, width) = (self.heads, self.width);
        // a query is turned once, not for every key
        let query: Vec<f32> = (0..heads * width)
            .map(|at| {
                self.query[row * heads * width + at / width * width + (policies.element)(at % width, width)]
            })
            .collect();
        let weights = &self.weights[row * heads..(row + 1) * heads];
        let score = |local: usize| {
            let (entry, offset) = (policies.page)(local, &self.grid);
            let block = self.batch.table.block(of.request, entry, self.layout)?;
            let slot = block * self.grid.block + offset;
            let key = &keys.values[slot * width..(slot + 1) * width];
            let mut sum = 0.0;
            for (query, weight) in query.chunks_exact(width).zip(weights) {
                let dot: f32 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                sum += (policies.head)(dot, *weight);
            }
            Ok(match &keys.scales {
                Some(scales) => sum * (policies.key_scale)(scales[slot]),
                None => sum,
            })
        };
        (0..(policies.row_len)(self.layout, &sight)).map(score).collect()
    }

    /// Adds the tokens of a row to what the rank answers.
    fn add(&self, link: &Link<'_>, row: usize, chosen: &[i64], listed: &mut Listed) -> Result<(), Stop> {
        let k = self.selector.top_k;
        let slots =
            Slots { grid: &self.grid, batch: self.batch, layout: self.layout, policies: self.policies };
        let slot = |position: &i64| match self.rows[row] {
            Some(of) => slots.of(of.request, *position as usize, link.member),
            None => Ok(None),
        };
        let tokens = chosen.iter().map(slot).collect::<Result<Vec<_>, Stop>>()?;
        listed.topk.extend(chosen.iter().map(|position| *position as i32).take(k));
        listed.topk.resize((row + 1) * k, -1);
        listed.lists.add(tokens, self.form(), self.policies);
        Ok(())
    }

    fn form(&self) -> Form {
        Form { rows: self.batch.rows, top_k: self.selector.top_k, list: self.selector.list }
    }
}
