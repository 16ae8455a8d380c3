//! A session: caches and what one step leaves for the next.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use shardcheck_engine::{Answer, Configuration, EngineError, Mask, Operation, Reply, Session, Tensors};

use crate::attend::attend;
use crate::batch::{Batch, query_rows};
use crate::cache::RankCache;
use crate::communicator::{Ranks, panic_text};
use crate::context::attend_context;
use crate::derive::derive;
use crate::memory::{Memory, Metadata, StepKind};
use crate::policies::Policies;
use crate::prefill::{Split, share_out};
use crate::states::{merge_partials, merge_segments, merge_two_states, pack_lse};
use crate::write::{load_cache, read_cache, write_kv};

/// A session of the embedded engine.
pub struct CpuSession {
    configuration: Configuration,
    policies: Policies,
    caches: Vec<RankCache>,
    memories: Vec<Memory>,
    timeout: Duration,
}

impl CpuSession {
    /// A session whose caches hold NaN in every slot.
    pub fn new(configuration: Configuration, policies: Policies, timeout: Duration) -> Self {
        let caches = vec![RankCache::unwritten(&configuration); configuration.tp];
        let memories = vec![Memory::default(); configuration.tp];
        Self { configuration, policies, caches, memories, timeout }
    }

    fn perform(&mut self, operation: &Operation, inputs: &Tensors) -> Result<Answer<Reply>, EngineError> {
        let (configuration, policies) = (&self.configuration, &self.policies);
        let blocks = configuration.blocks;
        let reply = match *operation {
            Operation::Layout => {
                let batch = Batch::read(inputs, "seq_lens", None, blocks)?;
                let metadata = self.recall(StepKind::Layout, &batch, true);
                derive(&self.configuration, &metadata[0].batch, &self.policies.layout)?
            }
            Operation::WriteKv => {
                write_kv(configuration, &mut self.caches, &mut self.memories, inputs, policies)?
            }
            Operation::ReadCache => read_cache(configuration, &self.caches),
            Operation::LoadCache => load_cache(configuration, &mut self.caches, inputs, policies)?,
            Operation::Attend { mask } => {
                let rows = query_rows(inputs, configuration)?;
                let batch = Batch::read(inputs, "seq_lens", Some(rows), blocks)?;
                let metadata = self.recall(StepKind::Attend, &batch, mask == Mask::Causal);
                let ranks = self.ranks(self.configuration.tp);
                attend(&self.configuration, &self.caches, inputs, &metadata, ranks, &self.policies)?
            }
            Operation::AttendContext { chunk_budget_tokens } => {
                let rows = query_rows(inputs, configuration)?;
                let batch = Batch::read(inputs, "context_lens", Some(rows), blocks)?;
                let metadata = self.recall(StepKind::Context, &batch, true);
                let ranks = self.ranks(self.configuration.tp);
                attend_context(
                    &self.configuration,
                    &self.caches,
                    inputs,
                    &metadata[0].batch,
                    chunk_budget_tokens,
                    ranks,
                    &self.policies,
                )?
            }
            Operation::MergePartials { lse_base } => {
                let merge = policies.merge.in_base(lse_base);
                merge_partials(configuration, inputs, self.ranks(configuration.dcp), &merge, policies)?
            }
            Operation::MergeStates => merge_two_states(inputs, policies)?,
            Operation::MergeSegments { tile_tokens } => merge_segments(inputs, tile_tokens, policies)?,
            Operation::PackLse => pack_lse(configuration, inputs, policies)?,
            Operation::PcpLayout { world, strategy, decodes, padded_rows } => {
                share_out(inputs, Split { world, strategy, decodes, padded_rows }, &policies.prefill)?
            }
        };
        Ok(Answer::Done(reply))
    }

    /// The metadata that each rank runs a step with.
    fn recall(&mut self, kind: StepKind, batch: &Batch, causal: bool) -> Vec<Metadata> {
        let (world, recall) = (self.configuration.dcp, self.policies.session.recall);
        let of_rank = |(rank, memory): (usize, &mut Memory)| {
            let member = rank % world;
            let batch = batch.clone();
            recall(memory, Metadata { kind, batch, causal, member, world, enters_gather: true })
        };
        self.memories.iter_mut().enumerate().map(of_rank).collect()
    }

    fn ranks(&self, count: usize) -> Ranks {
        Ranks { count, world: self.configuration.dcp, timeout: self.timeout }
    }
}

impl Session for CpuSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        let touch = self.policies.session.touch;
        let perform = || self.perform(operation, inputs).inspect(|_| touch(inputs));
        catch_unwind(AssertUnwindSafe(perform))
            .unwrap_or_else(|panic| Err(EngineError::Crash { text: panic_text(&*panic) }))
    }
}
