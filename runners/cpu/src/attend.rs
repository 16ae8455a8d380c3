//! Attention of new rows over the cached tokens of their request, or over selected ones: decode, verification, draft block.

use shardcheck_engine::{Configuration, EngineError, Reply, Tensor, Tensors};
use shardcheck_formats::Dtype;

use crate::batch::{half_tensor, query_rows, read_half};
use crate::cache::{KvFormat, RankCache, TokenRows, read_local_tokens};
use crate::communicator::{Link, RankResults, Ranks, Stop, run_ranks};
use crate::grid::{Grids, RowRef};
use crate::kernel::{KvView, Scratch, attend_row, round_all};
use crate::memory::Metadata;
use crate::merge::{Partial, Wire, merge_with};
use crate::policies::Policies;
use crate::query::{HeadShape, rows_of_members, select_heads};
use crate::route::Route;
use crate::selected::{Listing, Plan, read_slots};
use crate::sinks::Sinks;
use crate::sparse::Lists;

/// Up-projection of every head: `[heads of all ranks, value width, V]`.
struct UpProjection {
    weights: Vec<f32>,
    from: usize,
    to: usize,
    /// Element type of what is projected and of what comes out.
    dtype: Dtype,
}

impl UpProjection {
    fn read(
        inputs: &Tensors,
        configuration: &Configuration,
        policies: &Policies,
    ) -> Result<Option<Self>, EngineError> {
        let Some(tensor) = inputs.find("w_uv") else { return Ok(None) };
        let (from, to) = (configuration.attention.value_dim(), configuration.attention.v_head_dim());
        let dtype = configuration.dtype;
        tensor.expect("w_uv", dtype, &[configuration.total_heads(), from, to])?;
        Ok(Some(Self { weights: (policies.query.read_projection)(tensor), from, to, dtype }))
    }

    /// Projects every head, in f32, rounded to 16 bits once; `head_of` gives a head's place among all heads.
    fn apply(&self, partial: &Partial, head_of: impl Fn(usize) -> usize) -> Partial {
        let mut out = vec![0.0; partial.rows * partial.heads * self.to];
        for (index, row) in out.chunks_exact_mut(self.to).enumerate() {
            let head = head_of(index % partial.heads);
            let weights = &self.weights[head * self.from * self.to..][..self.from * self.to];
            let latent = partial.row(index / partial.heads, index % partial.heads);
            for (value, columns) in latent.iter().zip(weights.chunks_exact(self.to)) {
                row.iter_mut().zip(columns).for_each(|(sum, weight)| *sum += value * weight);
            }
            round_all(self.dtype, row);
        }
        Partial { out, lse: partial.lse.clone(), dim: self.to, ..*partial }
    }
}

/// Everything that the ranks of a step share.
struct Step<'a> {
    configuration: &'a Configuration,
    grids: Grids,
    format: KvFormat,
    /// By rank.
    metadata: &'a [Metadata],
    query: Vec<u16>,
    shape: HeadShape,
    up: Option<UpProjection>,
    route: Route,
    /// Tokens that rows attend to, where they were selected.
    plan: Option<&'a Plan>,
    /// Sinks of all heads, where they have some.
    sinks: Option<Vec<f32>>,
    policies: &'a Policies,
}

struct RankAttend {
    merged: Partial,
    partial: Partial,
    row_lens: Vec<usize>,
    gathered: Vec<u16>,
}

/// Performs the step on all ranks, each with its own metadata; rows attend to all that they see, or to a selection of it.
///
/// # Errors
/// As [`shardcheck_engine::Session::step`].
pub fn attend(
    (configuration, grids): (&Configuration, Grids),
    caches: &[RankCache],
    (inputs, plan, sinks): (&Tensors, Option<&Plan>, Option<Vec<f32>>),
    metadata: &[Metadata],
    ranks: Ranks,
    policies: &Policies,
) -> Result<Reply, EngineError> {
    let rows = query_rows(inputs, configuration)?;
    let dim = configuration.attention.qk_dim();
    let shape =
        HeadShape { rows, own: configuration.heads_per_rank, total: configuration.total_heads(), dim };
    let up = UpProjection::read(inputs, configuration, policies)?;
    let dispatch = (policies.session.dispatch)(configuration, up.is_some());
    let step = Step {
        configuration,
        grids,
        format: KvFormat::of(configuration),
        metadata,
        query: read_half(inputs, "query", configuration.dtype, &[rows, shape.total, dim])?,
        shape,
        up,
        route: dispatch.run,
        plan,
        sinks,
        policies,
    };
    let run = run_ranks(ranks, |link| step.run_rank(link, &caches[link.rank]))?;
    let heads =
        (policies.kernel.kernel_heads)(configuration.gathered_heads(), &configuration.kernel_head_widths);
    let route = match (plan, metadata[0].causal, metadata[0].batch.max_query_len()) {
        (Some(_), _, _) => "attend_selected",
        _ if step.sinks.is_some() => "attend_sinks",
        (None, false, _) => "draft",
        (None, true, 0 | 1) => "decode",
        (None, true, _) => "verify",
    };
    let effective =
        dispatch.reported.report(configuration.lane_order).with("route", route).with("kernel_heads", heads);
    let (outputs, collectives) = step.outputs(run);
    Ok(Reply { outputs, effective, collectives })
}

impl Step<'_> {
    fn run_rank(&self, link: &Link<'_>, cache: &RankCache) -> Result<RankAttend, Stop> {
        let policies = self.policies;
        let gathered = self.kernel_query(link)?;
        let metadata = &self.metadata[link.rank];
        let row_lens = metadata.batch.row_lens(
            &policies.layout,
            link.rank % self.grids.lengths.world,
            &self.grids.lengths,
            metadata.causal,
        );
        let slots = self.selected(link, cache, metadata, &row_lens)?;
        let row_lens = slots.as_ref().map_or(row_lens, |slots| slots.iter().map(Vec::len).collect());
        let sinks = self.sinks_of(link);
        let local = (cache, slots.as_deref());
        let latent = self.local_attention(local, metadata, &gathered, &row_lens, sinks.as_ref())?;
        let partial = match &self.up {
            Some(up) if self.route.project_before_merge => {
                let own = self.shape.own;
                let first = (policies.query.first_group_head)(link.group(), link.world, own);
                up.apply(&latent, |head| (policies.query.projected_head)(first, head, own, link.member))
            }
            _ => latent,
        };
        let order = self.configuration.lane_order;
        let how = (self.route.backend, Wire::of(self.configuration.dtype), order);
        let mut merged = merge_with(link, &partial, how, &policies.merge, sinks.as_ref())?;
        if let Some(up) = self.up.as_ref().filter(|_| !self.route.project_before_merge) {
            merged = up.apply(&merged, |head| link.rank * self.shape.own + head);
        }
        self.leave_unwritten(metadata, &mut merged);
        Ok(RankAttend { merged, partial, row_lens, gathered })
    }

    /// Sinks of the heads that the rank's group gathers, as scores.
    fn sinks_of(&self, link: &Link<'_>) -> Option<Sinks> {
        let (own, policies) = (self.shape.own, self.policies.sinks);
        let scale = self.configuration.softmax_scale;
        let first = link.group() * own * link.world;
        let of_group = (policies.of_group)(self.sinks.as_ref()?, first, own, link.world, link.member);
        let logits = of_group.into_iter().map(|sink| (policies.logit)(sink, scale)).collect();
        Some(Sinks { logits, policies })
    }

    /// Slots that each row attends to on the rank; none where rows attend to all that they see.
    fn selected(
        &self,
        link: &Link<'_>,
        cache: &RankCache,
        metadata: &Metadata,
        row_lens: &[usize],
    ) -> Result<Option<Vec<Vec<usize>>>, Stop> {
        let Some(Plan { selection, lists }) = self.plan else { return Ok(None) };
        if (self.policies.selected.dense)(&metadata.batch.seq_lens, selection.top_k()) {
            return Ok(None);
        }
        let slots = cache.keys.len() / self.format.key_bytes();
        let of = listing(self.policies, &self.grids, metadata, row_lens);
        selection.attended(&lists[link.rank], slots, of).map(Some)
    }

    /// Output buffers start as NaN; rows that nobody writes stay so.
    fn leave_unwritten(&self, metadata: &Metadata, merged: &mut Partial) {
        let written = (self.policies.session.written_rows)(merged.rows, metadata.batch.real_rows());
        merged.out[written * merged.heads * merged.dim..].fill(f32::NAN);
        merged.lse[written * merged.heads..].fill(f32::NAN);
    }

    fn kernel_query(&self, link: &Link<'_>) -> Result<Vec<u16>, Stop> {
        let (own, heads) = (self.shape.own, &self.policies.query);
        if self.route.query_replication {
            let first = (heads.first_group_head)(link.group(), link.world, own);
            return Ok(select_heads(&self.query, self.shape, first, own * link.world));
        }
        let first = (heads.first_own_head)(link.rank, link.member, own);
        let selected = select_heads(&self.query, self.shape, first, own);
        if !self.metadata[link.rank].enters_gather {
            return Ok(rows_of_members(&selected.repeat(link.world), link.world, self.shape));
        }
        (heads.gather)(link, selected, self.shape)
    }

    /// Attention of every gathered head over this rank's tokens, or over those in the slots of each row, rounded to the type of
    /// activations.
    fn local_attention(
        &self,
        (cache, slots): (&RankCache, Option<&[Vec<usize>]>),
        metadata: &Metadata,
        query: &[u16],
        row_lens: &[usize],
        sinks: Option<&Sinks>,
    ) -> Result<Partial, Stop> {
        let refs = metadata.batch.row_refs(&self.policies.layout);
        let (kernel, format) = (&self.policies.kernel, &self.format);
        let (rows, heads, dim) = (self.shape.rows, self.configuration.gathered_heads(), format.value_dim);
        let width = (kernel.kernel_heads)(heads, &self.configuration.kernel_head_widths);
        let scale = (kernel.score_scale)(self.configuration);
        let mut partial = Partial {
            out: vec![f32::NAN; rows * heads * dim],
            lse: vec![f32::NAN; rows * heads],
            rows,
            heads,
            dim,
        };
        let (mut scratch, mut out, mut lse) = (Scratch::default(), vec![0.0; width * dim], vec![0.0; width]);
        let mut loaded: Option<(usize, TokenRows)> = None;
        for row in 0..rows {
            let request = refs[row].map_or(0, |r| r.request);
            if let Some(slots) = slots {
                let policies = (&self.policies.cache, &self.policies.selected);
                loaded = Some((request, read_slots(cache, &slots[row], policies, format)));
            } else if row_lens[row] > 0 && loaded.as_ref().is_none_or(|(of, _)| *of != request) {
                let count = longest(&refs, row_lens, request);
                loaded = Some((request, self.tokens_of(cache, metadata, request, count)?));
            }
            let empty = TokenRows::default();
            let tokens = loaded.as_ref().filter(|_| row_lens[row] > 0).map_or(&empty, |(_, tokens)| tokens);
            let at = row * heads * self.shape.dim;
            let codes = &query[at..at + heads * self.shape.dim];
            let values = self.query_values(codes);
            let padded = (kernel.pad_heads)(&values, self.shape.dim, width);
            for head in 0..width {
                let kv_head = (kernel.kv_head)(head, heads, format.kv_heads);
                let view = self.view(tokens, kv_head);
                let q = &padded[head * self.shape.dim..(head + 1) * self.shape.dim];
                let target = &mut out[head * dim..(head + 1) * dim];
                let seen = (kernel.seen_by_head)(row_lens, row, head, width);
                lse[head] = attend_row(q, view, seen, scale, kernel, &mut scratch, target);
            }
            let (first, first_lse) =
                ((kernel.first_kept_head)(width, heads), (kernel.first_kept_lse)(width, heads));
            if let Some(sinks) = sinks {
                let kept = &mut out[first * dim..(first + heads) * dim];
                sinks.take_share(self.configuration.dcp, kept, &mut lse[first_lse..first_lse + heads]);
            }
            let kept = &out[first * dim..(first + heads) * dim];
            let target = &mut partial.out[row * heads * dim..(row + 1) * heads * dim];
            target.copy_from_slice(kept);
            (kernel.store)(self.configuration.dtype, target);
            partial.lse[row * heads..(row + 1) * heads].copy_from_slice(&lse[first_lse..first_lse + heads]);
        }
        Ok(partial)
    }

    fn query_values(&self, codes: &[u16]) -> Vec<f32> {
        let read = self.policies.kernel.read_query;
        codes.iter().map(|code| read(self.configuration.dtype, *code)).collect()
    }

    fn tokens_of(
        &self,
        cache: &RankCache,
        metadata: &Metadata,
        request: usize,
        count: usize,
    ) -> Result<TokenRows, Stop> {
        let policies = (&self.policies.layout, &self.policies.cache);
        let table = &metadata.batch.table;
        read_local_tokens(cache, table, request, count, policies, (&self.grids.pages, &self.format))
    }

    fn view<'t>(&self, tokens: &'t TokenRows, kv_head: usize) -> KvView<'t> {
        self.policies.view(tokens, &self.format, kv_head)
    }

    fn outputs(&self, run: RankResults<RankAttend>) -> (Tensors, Vec<u64>) {
        let (ranks, rows, own) = (run.results.len(), self.shape.rows, self.shape.own);
        let (heads, dtype) = (self.configuration.gathered_heads(), self.configuration.dtype);
        let results = &run.results;
        let dim = results.first().map_or(0, |r| r.merged.dim);
        let partial_dim = results.first().map_or(0, |r| r.partial.dim);
        let join = |part: fn(&RankAttend) -> &[f32]| {
            results.iter().flat_map(|r| part(r).to_vec()).collect::<Vec<_>>()
        };
        let gathered: Vec<u16> = results.iter().flat_map(|r| r.gathered.iter().copied()).collect();
        let f32s = |shape: &[usize], values: Vec<f32>| Tensor::from_f32(Dtype::F32, shape, &values);
        let mut outputs = Tensors::new()
            .with("out", Tensor::from_f32(dtype, &[ranks, rows, own, dim], &join(|r| &r.merged.out)))
            .with("lse", f32s(&[ranks, rows, own], join(|r| &r.merged.lse)))
            .with("partial_out", f32s(&[ranks, rows, heads, partial_dim], join(|r| &r.partial.out)))
            .with("partial_lse", f32s(&[ranks, rows, heads], join(|r| &r.partial.lse)))
            .with("gathered_query", half_tensor(dtype, &[ranks, rows, heads, self.shape.dim], &gathered));
        let Some(Plan { selection, lists }) = self.plan else {
            let row_lens = results.iter().flat_map(|rank| rank.row_lens.iter().map(|len| *len as i32));
            let row_lens: Vec<i32> = row_lens.collect();
            outputs.insert("row_lens", Tensor::from_i32(&[ranks, rows], &row_lens));
            return (outputs, run.collectives);
        };
        let of = |part: fn(&Lists) -> &Vec<i32>| lists.iter().flat_map(part).copied().collect::<Vec<_>>();
        let entries = rows * selection.top_k();
        outputs.insert("counts", Tensor::from_i32(&[ranks, rows], &of(|lists| &lists.counts)));
        outputs.insert("indptr", Tensor::from_i32(&[ranks, rows + 1], &of(|lists| &lists.indptr)));
        outputs.insert("slots", Tensor::from_i32(&[ranks, entries], &of(|lists| &lists.slots)));
        (outputs, run.collectives)
    }
}

/// What the lists of a rank are made by.
pub fn listing<'a>(
    policies: &'a Policies,
    grids: &'a Grids,
    metadata: &'a Metadata,
    row_lens: &'a [usize],
) -> Listing<'a> {
    Listing {
        batch: &metadata.batch,
        grid: &grids.slots,
        member: metadata.member,
        row_lens,
        layout: &policies.layout,
        sparse: &policies.sparse,
        selected: &policies.selected,
    }
}

/// Local tokens that any row of a request sees.
fn longest(refs: &[Option<RowRef>], row_lens: &[usize], request: usize) -> usize {
    let of_request = |row: &Option<RowRef>| row.is_some_and(|r| r.request == request);
    refs.iter().zip(row_lens).filter(|(row, _)| of_request(row)).map(|(_, len)| *len).max().unwrap_or(0)
}
