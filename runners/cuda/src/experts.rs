//! A layer of experts over the ranks of a plan, all of them played by one device: what a rank has is a kernel's to say, the host knows
//! only how many rows there are to make room for.

use std::sync::Arc;

use shardcheck_engine::{
    Activation, EngineError, ExpertSharding, MoeExchange, MoePlan, Reply, Router, SharedExpert, Tensors,
};
use shardcheck_formats::Dtype;

use crate::batch::{bytes_of, contiguous, crash};
use crate::queue::{Argument, Buffer, Extent, Queue};
use crate::router::{Chosen, Routing, token_ids, word};
use crate::states::whole;

/// Most ranks of a plan.
const MAX_RANKS: usize = 4096;

/// `Layer` of the kernels, field by field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct LayerShape {
    pub dp: i32,
    pub pcp: i32,
    pub tp: i32,
    pub exchange: i32,
    pub is_split: i32,
    pub shared: i32,
    pub is_gated: i32,
    pub hidden: i32,
    pub inner: i32,
    pub shared_inner: i32,
    pub experts: i32,
    pub top_k: i32,
}

/// Weights of experts on the device: gate, up, down. Null pointers stand for what is not there.
struct Mlp {
    gate: Option<Buffer>,
    up: Option<Buffer>,
    down: Option<Buffer>,
    inner: usize,
}

/// A layer with its tensors on the device.
struct Layer<'a> {
    queue: &'a Arc<Queue>,
    plan: MoePlan,
    shape: LayerShape,
    routing: Routing,
    dp_tokens: Buffer,
    tokens: Rows,
    experts: Mlp,
    shared: Mlp,
}

/// Rows: `hidden [rows, h]`, `logits [rows, E]`, ids, and whether each is a token and no padding.
struct Rows {
    hidden: Buffer,
    logits: Buffer,
    ids: Option<Buffer>,
    real: Option<Buffer>,
}

/// How many rows every rank enters with, has of its own, and has once they are gathered, `[ranks]` each; and the most of each.
struct Counts {
    entering: Buffer,
    own: Buffer,
    gathered: Buffer,
    cap: usize,
    most: usize,
    width: usize,
}

/// What the ranks end with: `out [ranks, most, h]`, experts and weights `[ranks, most, k]`, `expert_tokens [ranks, E]`.
struct Outcome {
    out: Buffer,
    ids: Buffer,
    shares: Buffer,
    expert_tokens: Buffer,
}

/// Runs a layer of experts.
///
/// # Errors
/// [`EngineError::Input`] for tensors that do not fit, a crash for a plan or a router that asks for more than there is.
pub fn run(
    queue: &Arc<Queue>,
    inputs: &Tensors,
    router: &Router,
    plan: MoePlan,
) -> Result<Reply, EngineError> {
    let layer = Layer::read(queue, inputs, router, plan)?;
    let (ranks, hidden) = (plan.ranks(), layer.shape.hidden as usize);
    let (experts, top_k) = (layer.routing.experts(), layer.routing.top_k());
    let counts = layer.counts()?;
    let rows = layer.gather(&counts)?;
    let chosen = layer.routing.enqueue(
        queue,
        (ranks, counts.width, &counts.gathered),
        &rows.logits,
        rows.ids.as_ref().ok_or_else(|| crash("gathered rows have no ids"))?,
    )?;
    let outcome = match plan.exchange {
        MoeExchange::Sliced => layer.slice(&counts, &rows, &chosen)?,
        _ => layer.merge(&counts, &rows, &chosen)?,
    };
    let most = counts.most;
    let outputs = Tensors::new()
        .with("out", whole(queue, &outcome.out, Dtype::Bf16, &[ranks, most, hidden])?)
        .with("expert_tokens", whole(queue, &outcome.expert_tokens, Dtype::I32, &[ranks, experts])?)
        .with("slice_rows", whole(queue, &counts.entering, Dtype::I32, &[ranks])?)
        .with("topk_ids", whole(queue, &outcome.ids, Dtype::I32, &[ranks, most, top_k])?)
        .with("topk_weights", whole(queue, &outcome.shares, Dtype::F32, &[ranks, most, top_k])?);
    Ok(Reply { outputs, collectives: vec![exchanges(&plan); ranks], ..Reply::default() })
}

/// Exchanges that every rank enters: rows are gathered, sums are brought back, or rows are sent, answered and joined.
fn exchanges(plan: &MoePlan) -> u64 {
    let sources = match plan.exchange {
        MoeExchange::Local => 1,
        MoeExchange::Gathered => plan.dp * plan.pcp,
        MoeExchange::Redundant => plan.dp,
        MoeExchange::Sliced => return 3,
    };
    u64::from(sources > 1) + u64::from(plan.tp > 1) + u64::from(plan.exchange != MoeExchange::Local)
}

/// Extents of a plan that was checked to have ranks, and not too many.
fn check(plan: &MoePlan) -> Result<(), EngineError> {
    let product = plan.dp.checked_mul(plan.pcp).and_then(|ranks| ranks.checked_mul(plan.tp));
    if product.is_none_or(|ranks| ranks == 0 || ranks > MAX_RANKS) {
        return Err(crash(format!("{plan:?} has no ranks, or too many")));
    }
    Ok(())
}

impl<'a> Layer<'a> {
    fn read(
        queue: &'a Arc<Queue>,
        inputs: &Tensors,
        router: &Router,
        plan: MoePlan,
    ) -> Result<Self, EngineError> {
        check(&plan)?;
        let given = inputs.get("dp_tokens")?.expect("dp_tokens", Dtype::I32, &[plan.dp])?.to_i64();
        if given.iter().any(|tokens| *tokens < 0) {
            return Err(crash("a group has fewer than no tokens"));
        }
        let total = given.iter().sum::<i64>() as usize;
        word("tokens", total)?;
        let dp_tokens: Vec<i32> = given.into_iter().map(|tokens| tokens as i32).collect();
        let routing = Routing::read(queue, inputs, router)?;
        let last = |name: &str| -> Result<usize, EngineError> {
            Ok(inputs.get(name)?.shape().last().copied().unwrap_or(0))
        };
        let (experts, hidden) = (routing.experts(), last("hidden")?);
        let upload = |name: &str, dtype: Dtype, shape: &[usize]| {
            queue.upload(&contiguous(inputs, name, dtype, shape)?)
        };
        let tokens = Rows {
            hidden: upload("hidden", Dtype::Bf16, &[total, hidden])?,
            logits: upload("logits", Dtype::F32, &[total, experts])?,
            ids: token_ids(queue, inputs, router, total)?,
            real: None,
        };
        let mlp = |[gate, up, down]: [&str; 3], count: &[usize]| -> Result<Mlp, EngineError> {
            let inner = last(down)?;
            let read = |name: &str, rows: usize, columns: usize| {
                upload(name, Dtype::Bf16, &[count, &[rows, columns]].concat())
            };
            let is_gated = plan.activation.is_gated();
            let gate = is_gated.then(|| read(gate, inner, hidden)).transpose()?;
            let (up, down) = (read(up, inner, hidden)?, read(down, hidden, inner)?);
            Ok(Mlp { gate, up: Some(up), down: Some(down), inner })
        };
        let own = mlp(["w_gate", "w_up", "w_down"], &[experts])?;
        let shared = match plan.shared {
            SharedExpert::None => Mlp { gate: None, up: None, down: None, inner: 0 },
            _ => mlp(["shared_gate", "shared_up", "shared_down"], &[])?,
        };
        let shape = LayerShape {
            hidden: word("elements of a token", hidden)?,
            inner: word("inner elements", own.inner)?,
            shared_inner: word("inner elements", shared.inner)?,
            experts: experts as i32,
            top_k: routing.top_k() as i32,
            ..extents(&plan)
        };
        let dp_tokens = queue.upload(&bytes_of(&dp_tokens))?;
        Ok(Self { queue, plan, shape, routing, dp_tokens, tokens, experts: own, shared })
    }

    fn ranks(&self) -> usize {
        self.plan.ranks()
    }

    /// Bytes of so many rows' tokens in bf16.
    fn token_bytes(&self, rows: usize) -> usize {
        2 * rows * self.shape.hidden as usize
    }

    /// Launches a kernel whose first argument is the layer.
    fn launch(&self, kernel: &str, extent: Extent, arguments: &[Argument]) -> Result<(), EngineError> {
        self.queue.launch(kernel, extent, &[&[Argument::Layer(self.shape)], arguments].concat())
    }

    /// Lets the device count the rows of every rank.
    fn counts(&self) -> Result<Counts, EngineError> {
        let bytes = 4 * self.ranks();
        let counts = || self.queue.unwritten(bytes);
        let (entering, own, gathered) = (counts()?, counts()?, counts()?);
        let arguments = [self.dp_tokens.argument(), entering.argument(), own.argument(), gathered.argument()];
        self.launch("enter_exchange", Extent::over(self.ranks()), &arguments)?;
        let most =
            |counts: &Buffer| -> Result<usize, EngineError> { most_of(&self.queue.read(counts, bytes)?) };
        let (cap, most, width) = (most(&entering)?, most(&own)?, most(&gathered)?);
        Ok(Counts { entering, own, gathered, cap, most, width })
    }

    /// Room for `rows` rows of each rank.
    fn room(&self, rows: usize) -> Result<Rows, EngineError> {
        let all = self.ranks() * rows;
        Ok(Rows {
            hidden: self.queue.unwritten(self.token_bytes(all))?,
            logits: self.queue.unwritten(4 * all * self.routing.experts())?,
            ids: Some(self.queue.unwritten(8 * all)?),
            real: Some(self.queue.unwritten(all)?),
        })
    }

    /// Rows of every rank: its own with their padding, and those of the ranks that it gathers from.
    fn gather(&self, counts: &Counts) -> Result<Rows, EngineError> {
        let entered = self.room(counts.cap)?;
        let cap = Argument::Int(counts.cap as i32);
        let given = [self.dp_tokens.argument(), counts.entering.argument(), cap];
        let arguments = [&given[..], &self.tokens.arguments()[..3], &entered.arguments()].concat();
        self.launch("enter_rows", Extent::blocks(counts.cap, self.ranks(), 1), &arguments)?;
        let gathered = self.room(counts.width)?;
        let given = [counts.entering.argument(), cap, Argument::Int(counts.width as i32)];
        let arguments = [&given[..], &entered.arguments(), &gathered.arguments()].concat();
        self.launch("gather_tokens", Extent::blocks(counts.width, self.ranks(), 1), &arguments)?;
        Ok(gathered)
    }

    /// What the shared expert's part has between its two products, for every row `[ranks, width, J]`.
    fn activate_shared(&self, counts: &Counts, rows: &Rows) -> Result<Buffer, EngineError> {
        let active = self.queue.unwritten(2 * self.ranks() * counts.width * self.shared.inner)?;
        let given = [counts.gathered.argument(), Argument::Int(counts.width as i32), rows.hidden.argument()];
        let arguments = [&given[..], &self.shared.arguments(), &[active.argument()]].concat();
        if self.plan.shared != SharedExpert::None {
            self.launch("activate_shared", Extent::blocks(counts.width, self.ranks(), 1), &arguments)?;
        }
        Ok(active)
    }

    /// Merge 0, merge 1, and decodes that every rank of prefill context parallelism has.
    fn merge(&self, counts: &Counts, rows: &Rows, chosen: &Chosen) -> Result<Outcome, EngineError> {
        let (queue, ranks, width) = (self.queue, self.ranks(), counts.width);
        let (slots, words) = (ranks * width * self.routing.top_k(), Argument::Int(width as i32));
        let active = queue.unwritten(2 * slots * self.experts.inner)?;
        let given = [counts.gathered.argument(), words, rows.hidden.argument(), chosen.experts.argument()];
        let arguments = [&given[..], &self.experts.arguments(), &[active.argument()]].concat();
        let extent = Extent::blocks(width * self.routing.top_k(), ranks, 1);
        self.launch("activate_experts", extent, &arguments)?;
        let shared_active = self.activate_shared(counts, rows)?;
        let mut partial = queue.unwritten(self.token_bytes(ranks * width))?;
        let [[_, _, down], [_, _, shared_down]] = [self.experts.arguments(), self.shared.arguments()];
        let arguments = [
            counts.gathered.argument(),
            words,
            chosen.experts.argument(),
            chosen.weights.argument(),
            down,
            active.argument(),
            shared_down,
            shared_active.argument(),
            partial.argument(),
        ];
        self.launch("sum_experts", Extent::blocks(width, ranks, 1), &arguments)?;
        if self.plan.tp > 1 {
            let summed = queue.unwritten(partial.bytes())?;
            let arguments = [words, partial.argument(), summed.argument()];
            self.launch("sum_tensor_parallel", Extent::over(partial.bytes() / 2), &arguments)?;
            partial = summed;
        }
        let given = [counts.entering.argument(), counts.own.argument(), counts.gathered.argument(), words];
        let expert_tokens = self.count("count_tokens", counts, rows, chosen, None)?;
        self.bring_back("scatter_rows", counts, &given, &partial, chosen, expert_tokens)
    }

    /// The last kernel: every rank's own rows of `sums [ranks, width, h]`, with the experts that they had.
    fn bring_back(
        &self,
        kernel: &str,
        counts: &Counts,
        given: &[Argument],
        sums: &Buffer,
        chosen: &Chosen,
        expert_tokens: Buffer,
    ) -> Result<Outcome, EngineError> {
        let (rows, top_k) = (self.ranks() * counts.most, self.routing.top_k());
        let out = self.queue.unwritten(self.token_bytes(rows))?;
        let (ids, shares) =
            (self.queue.unwritten(4 * rows * top_k)?, self.queue.unwritten(4 * rows * top_k)?);
        let made = [
            Argument::Int(counts.most as i32),
            sums.argument(),
            chosen.experts.argument(),
            chosen.weights.argument(),
            out.argument(),
            ids.argument(),
            shares.argument(),
        ];
        let extent = Extent::blocks(counts.most, self.ranks(), 1);
        self.launch(kernel, extent, &[given, &made].concat())?;
        Ok(Outcome { out, ids, shares, expert_tokens })
    }

    /// Tokens that every rank ran through its part of each expert.
    fn count(
        &self,
        kernel: &str,
        counts: &Counts,
        rows: &Rows,
        chosen: &Chosen,
        owners: Option<&Buffer>,
    ) -> Result<Buffer, EngineError> {
        let count = self.ranks() * self.routing.experts();
        let expert_tokens = self.queue.unwritten(4 * count)?;
        let given =
            [counts.gathered.argument(), Argument::Int(counts.width as i32), chosen.experts.argument()];
        let owners: Vec<Argument> = owners.into_iter().map(Buffer::argument).collect();
        let [_, _, _, real] = rows.arguments();
        let arguments = [&given[..], &owners, &[real, expert_tokens.argument()]].concat();
        self.launch(kernel, Extent::over(count), &arguments)?;
        Ok(expert_tokens)
    }

    /// Slices over tensor parallelism: rows are sent to their experts and back, and the slices joined without their padding.
    fn slice(&self, counts: &Counts, rows: &Rows, chosen: &Chosen) -> Result<Outcome, EngineError> {
        let (queue, ranks, width) = (self.queue, self.ranks(), counts.width);
        let (slots, words) = (width * self.routing.top_k(), Argument::Int(width as i32));
        let owners = queue.unwritten(4 * self.routing.experts())?;
        self.launch("expert_owners", Extent::over(self.routing.experts()), &[owners.argument()])?;
        // what nobody writes is -1: no parcel, no result
        let (parcels, results) = (queue.unwritten(4 * ranks * slots)?, queue.unwritten(4 * ranks * slots)?);
        let arguments = [
            counts.gathered.argument(),
            words,
            chosen.experts.argument(),
            owners.argument(),
            parcels.argument(),
            results.argument(),
        ];
        self.launch("order_parcels", Extent::over(ranks * ranks), &arguments)?;
        let sent = queue.unwritten(self.token_bytes(ranks * slots))?;
        let arguments = [words, rows.hidden.argument(), parcels.argument(), sent.argument()];
        self.launch("send_parcels", Extent::blocks(slots, ranks, 1), &arguments)?;
        let active = queue.unwritten(2 * ranks * slots * self.experts.inner)?;
        let answers = queue.unwritten(2 * sent.bytes())?;
        let given =
            [words, sent.argument(), parcels.argument(), chosen.experts.argument(), owners.argument()];
        let made = [active.argument(), answers.argument()];
        let arguments = [&given[..], &self.experts.arguments(), &made].concat();
        self.launch("answer_parcels", Extent::blocks(slots, ranks, 1), &arguments)?;
        let shared_active = self.activate_shared(counts, rows)?;
        let slices = queue.unwritten(self.token_bytes(ranks * width))?;
        let [_, _, shared_down] = self.shared.arguments();
        let arguments = [
            counts.gathered.argument(),
            words,
            chosen.weights.argument(),
            results.argument(),
            answers.argument(),
            shared_down,
            shared_active.argument(),
            slices.argument(),
        ];
        self.launch("combine_parcels", Extent::blocks(width, ranks, 1), &arguments)?;
        let expert_tokens = self.count("count_parcels", counts, rows, chosen, Some(&owners))?;
        let given = [counts.entering.argument(), counts.own.argument(), words];
        self.bring_back("join_slices", counts, &given, &slices, chosen, expert_tokens)
    }
}

/// Plan alone; the widths are those of nothing.
fn extents(plan: &MoePlan) -> LayerShape {
    LayerShape {
        dp: plan.dp as i32,
        pcp: plan.pcp as i32,
        tp: plan.tp as i32,
        exchange: match plan.exchange {
            MoeExchange::Local => 0,
            MoeExchange::Gathered => 1,
            MoeExchange::Redundant => 2,
            MoeExchange::Sliced => 3,
        },
        is_split: i32::from(plan.sharding == ExpertSharding::Split),
        shared: match plan.shared {
            SharedExpert::None => 0,
            SharedExpert::Replicated => 1,
            SharedExpert::Sharded => 2,
        },
        is_gated: match plan.activation {
            Activation::Linear => 0,
            Activation::SiluGated => 1,
            Activation::SituGated => 2,
        },
        hidden: 0,
        inner: 0,
        shared_inner: 0,
        experts: 0,
        top_k: 0,
    }
}

/// The largest of counts; a negative one means that no kernel wrote it.
fn most_of(counts: &[u8]) -> Result<usize, EngineError> {
    let counts = counts.chunks_exact(4).map(|word| i32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    let counts = counts.map(usize::try_from).collect::<Result<Vec<_>, _>>();
    let counts = counts.map_err(|_| crash("a rank has fewer than no rows"))?;
    Ok(counts.into_iter().max().unwrap_or(0))
}

impl Rows {
    fn arguments(&self) -> [Argument; 4] {
        let optional =
            |buffer: &Option<Buffer>| buffer.as_ref().map_or(Argument::Pointer(0), Buffer::argument);
        [self.hidden.argument(), self.logits.argument(), optional(&self.ids), optional(&self.real)]
    }
}

impl Mlp {
    fn arguments(&self) -> [Argument; 3] {
        [&self.gate, &self.up, &self.down]
            .map(|buffer| buffer.as_ref().map_or(Argument::Pointer(0), Buffer::argument))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: MoePlan = MoePlan {
        dp: 2,
        pcp: 3,
        tp: 2,
        exchange: MoeExchange::Gathered,
        sharding: ExpertSharding::Split,
        shared: SharedExpert::Sharded,
        activation: Activation::SiluGated,
    };

    #[test]
    fn the_shape_is_as_long_as_the_twelve_words_of_the_kernels() {
        assert_eq!(size_of::<LayerShape>(), 12 * 4);
        let shape = extents(&PLAN);
        assert_eq!((shape.dp, shape.pcp, shape.tp, shape.exchange, shape.is_split), (2, 3, 2, 1, 1));
        assert_eq!((shape.shared, shape.is_gated), (2, 1));
    }

    #[test]
    fn a_plan_without_ranks_or_with_too_many_is_refused() {
        check(&PLAN).unwrap();
        for plan in
            [MoePlan { tp: 0, ..PLAN }, MoePlan { dp: 4096, ..PLAN }, MoePlan { dp: usize::MAX, ..PLAN }]
        {
            assert!(check(&plan).unwrap_err().to_string().contains("ranks"), "{plan:?}");
        }
    }

    #[test]
    fn exchanges_are_those_of_the_plan() {
        let of = |exchange, (dp, pcp, tp)| exchanges(&MoePlan { dp, pcp, tp, exchange, ..PLAN });
        assert_eq!(of(MoeExchange::Local, (2, 2, 1)), 0);
        assert_eq!(of(MoeExchange::Local, (2, 2, 2)), 1);
        assert_eq!(of(MoeExchange::Gathered, (1, 2, 2)), 3);
        assert_eq!(of(MoeExchange::Redundant, (1, 2, 2)), 2);
        assert_eq!(of(MoeExchange::Sliced, (1, 1, 4)), 3);
    }

    #[test]
    fn a_count_that_no_kernel_wrote_is_no_count() {
        assert_eq!(most_of(&bytes_of(&[3, 0, 7])).unwrap(), 7);
        assert!(most_of(&bytes_of(&[3, -1])).is_err());
    }
}
