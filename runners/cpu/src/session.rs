//! A session: caches and what one step leaves for the next.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use shardcheck_engine::{
    Answer, Configuration, EngineError, Mask, Operation, Reply, Session, SlotList, StackPlan, Tensors,
};

use crate::acceptance::accept_drafts;
use crate::attend::{attend, listing};
use crate::batch::{Batch, BlockTable, query_rows};
use crate::cache::RankCache;
use crate::communicator::{Ranks, Stop, panic_text};
use crate::context::attend_context;
use crate::derive::derive;
use crate::experts;
use crate::grid::{Grid, Grids};
use crate::kda::KdaMemory;
use crate::memory::{Memory, Metadata, StepKind};
use crate::policies::{Policies, TableUse};
use crate::prefill::attention::attend_pcp;
use crate::prefill::compressing::compress_pcp;
use crate::prefill::indexing::select_pcp;
use crate::prefill::{Split, share_out};
use crate::router::route;
use crate::selected::{Plan, Plans, Selection};
use crate::sharing::index_layers;
use crate::sinks::read_sinks;
use crate::sparse;
use crate::stack::{Scene, StackMemory, forward};
use crate::states::{merge_partials, merge_segments, merge_two_states, pack_lse};
use crate::transfer::import_cache;
use crate::write::{load_cache, read_cache, write_kv};

/// A session of the embedded engine: one KV group, or two.
pub struct CpuSession {
    groups: Vec<Group>,
    policies: Policies,
    timeout: Duration,
    /// Steps of attention that were answered.
    attended: usize,
}

/// What one KV group has for itself.
struct Group {
    number: usize,
    configuration: Configuration,
    grids: Grids,
    caches: Vec<RankCache>,
    memories: Vec<Memory>,
    /// Block table of its last step.
    table: Option<BlockTable>,
    /// States of Kimi delta attention.
    kda: KdaMemory,
    /// Caches of the layers of a stack.
    stack: StackMemory,
    /// Selections that layers may share.
    plans: Plans,
}

impl CpuSession {
    /// A session whose caches hold NaN in every slot.
    pub fn new(configuration: Configuration, policies: Policies, timeout: Duration) -> Self {
        let configurations: Vec<Configuration> =
            (0..2).filter_map(|number| configuration.group(number)).collect();
        let grids = |number: usize| {
            let own = Grids::all(Grid::of(&configurations[number]));
            let other = configurations.get(1 - number).map(Grid::of);
            other.map_or(own, |other| (policies.session.group_grids)(number, own, other))
        };
        let group = |(number, configuration): (usize, &Configuration)| Group {
            number,
            grids: grids(number),
            caches: vec![RankCache::unwritten(configuration); configuration.tp],
            memories: vec![Memory::default(); configuration.tp],
            table: None,
            kda: KdaMemory::default(),
            stack: StackMemory::default(),
            plans: Plans::default(),
            configuration: configuration.clone(),
        };
        Self {
            groups: configurations.iter().enumerate().map(group).collect(),
            policies,
            timeout,
            attended: 0,
        }
    }

    fn perform(
        &mut self,
        number: usize,
        operation: &Operation,
        inputs: &Tensors,
    ) -> Result<Answer<Reply>, EngineError> {
        if let Operation::InGroup { group, step } = operation {
            return match **step {
                Operation::InGroup { .. } => {
                    Ok(Answer::Unsupported("a KV group has no groups of its own".to_owned()))
                }
                ref step => self.perform(*group, step, inputs),
            };
        }
        if matches!(operation, Operation::Forward { .. })
            && self.groups.get(number).is_some_and(|group| !group.configuration.attention.is_mla())
        {
            return Ok(Answer::Unsupported("layers of a stack have latent attention".to_owned()));
        }
        if number >= self.groups.len() {
            let groups = self.groups.len();
            return Ok(Answer::Unsupported(format!(
                "there is no KV group {number}: the session has {groups}"
            )));
        }
        let others = self.groups.iter().filter(|other| other.number != number);
        let other = others.into_iter().find_map(|other| other.table.clone());
        let (policies, timeout) = (&self.policies, self.timeout);
        let group = &mut self.groups[number];
        group.perform(operation, inputs, other.as_ref(), policies, timeout).map(Answer::Done)
    }
}

impl Group {
    /// `other` is the block table of the last step of the group beside this one.
    fn perform(
        &mut self,
        operation: &Operation,
        inputs: &Tensors,
        other: Option<&BlockTable>,
        policies: &Policies,
        timeout: Duration,
    ) -> Result<Reply, EngineError> {
        let (configuration, blocks) = (&self.configuration, self.configuration.blocks);
        let ranks = Ranks { count: configuration.tp, world: configuration.dcp, timeout };
        match *operation {
            Operation::Layout => {
                let batch = Batch::read(inputs, "seq_lens", None, blocks)?;
                let metadata = self.recall(StepKind::Layout, batch, true, policies);
                derive(&self.configuration, self.grids.derived, &metadata[0].batch, &policies.layout)
            }
            Operation::WriteKv => {
                let table = BlockTable::read(inputs, blocks)?;
                let used = self.used(TableUse::Write, table, other, policies);
                let (caches, memories) = (&mut self.caches, &mut self.memories);
                write_kv((&self.configuration, self.grids.slots), caches, memories, inputs, used, policies)
            }
            Operation::ReadCache => Ok(read_cache(configuration, &self.caches)),
            Operation::LoadCache => load_cache(configuration, &mut self.caches, inputs, policies),
            Operation::ImportCache { ref source } => {
                import_cache(configuration, &mut self.caches, inputs, source, policies)
            }
            Operation::Attend { mask } => {
                self.attend(inputs, (mask == Mask::Causal, None), other, ranks, policies)
            }
            Operation::AttendSinks => {
                let sinks = read_sinks(inputs, configuration)?;
                self.attend(inputs, (true, Some(sinks)), other, ranks, policies)
            }
            Operation::AttendSelected { list, shared } => {
                self.attend_selected(inputs, (list, shared), other, ranks, policies)
            }
            Operation::AttendContext { chunk_budget_tokens } => {
                self.attend_context(inputs, chunk_budget_tokens, ranks, policies)
            }
            Operation::MergePartials { lse_base } => {
                let (merge, ranks) =
                    (policies.merge.in_base(lse_base), Ranks { count: configuration.dcp, ..ranks });
                merge_partials(configuration, inputs, ranks, &merge, policies)
            }
            Operation::MergeStates => merge_two_states(inputs, policies),
            Operation::MergeSegments { tile_tokens } => merge_segments(inputs, tile_tokens, policies),
            Operation::PackLse => pack_lse(configuration, inputs, policies),
            Operation::PcpLayout { .. }
            | Operation::AttendPcp { .. }
            | Operation::SelectPcp { .. }
            | Operation::CompressPcp { .. } => self.share(operation, inputs, ranks, policies),
            Operation::Route { router } => route(inputs, router, &policies.moe.router),
            Operation::Moe { router, plan } => experts::run(inputs, (router, plan), timeout, &policies.moe),
            Operation::AcceptDrafts { method, ranks } => {
                accept_drafts(inputs, (method, ranks), &policies.acceptance)
            }
            Operation::SelectSparse { selector } => {
                let rows = inputs.get("index_query")?.shape().first().copied();
                let batch = Batch::read(inputs, "seq_lens", rows, blocks)?;
                let shape = (&self.configuration, self.grids.derived);
                sparse::select(shape, inputs, &batch, selector, ranks, (&policies.layout, &policies.sparse))
            }
            Operation::IndexLayers { ref sharing } => index_layers(sharing, &policies.sharing),
            Operation::Kda { plan } => {
                let ranks = (configuration.tp, configuration.dcp);
                self.kda.step(inputs, plan, ranks, &policies.kda)
            }
            Operation::Forward { plan } => self.forward(inputs, plan, ranks, policies),
            Operation::InGroup { .. } => unreachable!("the session has chosen the group"),
        }
    }

    /// Attention of new rows over all that they see, with the sinks of all heads where they have some.
    fn attend(
        &mut self,
        inputs: &Tensors,
        (causal, sinks): (bool, Option<Vec<f32>>),
        other: Option<&BlockTable>,
        ranks: Ranks,
        policies: &Policies,
    ) -> Result<Reply, EngineError> {
        let rows = query_rows(inputs, &self.configuration)?;
        let mut batch = Batch::read(inputs, "seq_lens", Some(rows), self.configuration.blocks)?;
        batch.table = self.used(TableUse::Attend, batch.table, other, policies);
        let metadata = self.recall(StepKind::Attend, batch, causal, policies);
        let shape = (&self.configuration, self.grids);
        attend(shape, &self.caches, (inputs, None, sinks), &metadata, ranks, policies)
    }

    /// A step for rows that lie on the ranks of prefill context parallelism.
    fn share(
        &self,
        operation: &Operation,
        inputs: &Tensors,
        ranks: Ranks,
        policies: &Policies,
    ) -> Result<Reply, EngineError> {
        let prefill = &policies.prefill;
        match *operation {
            Operation::PcpLayout { world, strategy, decodes, padded_rows, overlap } => {
                share_out(inputs, Split { world, strategy, decodes, padded_rows, overlap }, prefill)
            }
            Operation::AttendPcp { plan } => {
                attend_pcp((&self.configuration, &self.caches), inputs, plan, ranks, policies)
            }
            Operation::SelectPcp { plan } => select_pcp(inputs, plan, ranks, (prefill, &policies.index)),
            Operation::CompressPcp { plan } => {
                compress_pcp(inputs, plan, ranks, (prefill, &policies.compress))
            }
            _ => unreachable!("the session has chosen the step"),
        }
    }

    /// Attention of new tokens over a context that is gathered in chunks.
    fn attend_context(
        &mut self,
        inputs: &Tensors,
        chunk_budget_tokens: usize,
        ranks: Ranks,
        policies: &Policies,
    ) -> Result<Reply, EngineError> {
        let rows = query_rows(inputs, &self.configuration)?;
        let batch = Batch::read(inputs, "context_lens", Some(rows), self.configuration.blocks)?;
        let metadata = self.recall(StepKind::Context, batch, true, policies);
        let (configuration, caches) = (&self.configuration, &self.caches);
        attend_context(
            configuration,
            caches,
            inputs,
            &metadata[0].batch,
            chunk_budget_tokens,
            ranks,
            policies,
        )
    }

    /// A step through all layers of a stack.
    fn forward(
        &mut self,
        inputs: &Tensors,
        plan: StackPlan,
        ranks: Ranks,
        policies: &Policies,
    ) -> Result<Reply, EngineError> {
        let rows = inputs.get("token_ids")?.len();
        let batch = Batch::read(inputs, "seq_lens", Some(rows), self.configuration.blocks)?;
        let metadata = self.recall(StepKind::Attend, batch.clone(), true, policies);
        let (configuration, grids) = (&self.configuration, self.grids);
        let scene = Scene { configuration, grids, batch: &batch, metadata: &metadata, ranks, policies };
        forward(&scene, inputs, plan, &mut self.stack)
    }

    /// Attention over selected tokens: those of the step, or those that a layer before it left.
    fn attend_selected(
        &mut self,
        inputs: &Tensors,
        (list, shared): (SlotList, bool),
        other: Option<&BlockTable>,
        ranks: Ranks,
        policies: &Policies,
    ) -> Result<Reply, EngineError> {
        let rows = query_rows(inputs, &self.configuration)?;
        let mut batch = Batch::read(inputs, "seq_lens", Some(rows), self.configuration.blocks)?;
        let own = if shared { None } else { Some(Selection::read(inputs, &batch, list)?) };
        batch.table = self.used(TableUse::Attend, batch.table, other, policies);
        let metadata = self.recall(StepKind::Attend, batch, true, policies);
        let plan = self.plan(own, (rows, list), &metadata, policies)?;
        let shape = (&self.configuration, self.grids);
        attend(shape, &self.caches, (inputs, Some(&plan), None), &metadata, ranks, policies)
    }

    /// The plan that a step over selected tokens goes by: of its own selection, or of that of a layer before it.
    fn plan(
        &mut self,
        own: Option<Selection>,
        (rows, list): (usize, SlotList),
        metadata: &[Metadata],
        policies: &Policies,
    ) -> Result<Plan, EngineError> {
        let Some(selection) = own else {
            let plan = (policies.selected.shared)(&self.plans);
            let plan = plan.filter(|plan| plan.selection.is_of(rows, list)).cloned();
            let text = || format!("no layer before has a selection for {rows} rows, listed {list}");
            return plan.ok_or_else(|| EngineError::Crash { text: text() });
        };
        let lists_of = |metadata: &Metadata| {
            let grid = &self.grids.lengths;
            let row_lens =
                metadata.batch.row_lens(&policies.layout, metadata.member % grid.world, grid, true);
            selection.lists(listing(policies, &self.grids, metadata, &row_lens))
        };
        // lists wait for no other rank
        let failed = |stop| match stop {
            Stop::Failed(error) => error,
            Stop::Peer => EngineError::Crash { text: "a list of slots was given up".to_owned() },
        };
        let lists = metadata.iter().map(lists_of).collect::<Result<_, Stop>>().map_err(failed)?;
        let plan = (policies.selected.renewed)(&self.plans, Plan { selection, lists });
        self.plans.keep(&plan);
        Ok(plan)
    }

    /// The block table that a step uses, given its own, which is kept for the other group's faults.
    fn used(
        &mut self,
        table_use: TableUse,
        own: BlockTable,
        other: Option<&BlockTable>,
        policies: &Policies,
    ) -> BlockTable {
        self.table = Some(own.clone());
        match other {
            Some(other) => (policies.session.group_table)(table_use, self.number, own, other),
            None => own,
        }
    }

    /// The metadata that each rank runs a step with.
    fn recall(&mut self, kind: StepKind, batch: Batch, causal: bool, policies: &Policies) -> Vec<Metadata> {
        let (world, recall) = (self.configuration.dcp, policies.session.recall);
        let of_rank = |(rank, memory): (usize, &mut Memory)| {
            let member = rank % world;
            let batch = batch.clone();
            recall(memory, Metadata { kind, batch, causal, member, world, enters_gather: true })
        };
        self.memories.iter_mut().enumerate().map(of_rank).collect()
    }
}

impl Session for CpuSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        let perform = || {
            let answer = self.perform(0, operation, inputs)?;
            (self.policies.session.touch)(self.attended, inputs);
            self.attended += usize::from(is_attention(operation));
            Ok(answer)
        };
        catch_unwind(AssertUnwindSafe(perform))
            .unwrap_or_else(|panic| Err(EngineError::Crash { text: panic_text(&*panic) }))
    }
}

/// Whether rows attend over the cache in a step, in either KV group.
fn is_attention(operation: &Operation) -> bool {
    match operation {
        Operation::InGroup { step, .. } => is_attention(step),
        operation => matches!(
            operation,
            Operation::Attend { .. } | Operation::AttendSelected { .. } | Operation::AttendSinks
        ),
    }
}
