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
use crate::policies::Policies;
use crate::states::{merge_partials, merge_segments, merge_two_states, pack_lse};
use crate::write::{load_cache, read_cache, write_kv};

/// A session of the embedded engine.
pub struct CpuSession {
    configuration: Configuration,
    policies: Policies,
    caches: Vec<RankCache>,
    earlier: Option<Batch>,
    timeout: Duration,
}

impl CpuSession {
    /// A session whose caches hold NaN in every slot.
    pub fn new(configuration: Configuration, policies: Policies, timeout: Duration) -> Self {
        let caches = vec![RankCache::unwritten(&configuration); configuration.tp];
        Self { configuration, policies, caches, earlier: None, timeout }
    }

    fn perform(&mut self, operation: &Operation, inputs: &Tensors) -> Result<Answer<Reply>, EngineError> {
        let (configuration, policies) = (&self.configuration, &self.policies);
        let blocks = configuration.blocks;
        let reply = match *operation {
            Operation::Layout => {
                derive(configuration, &Batch::read(inputs, "seq_lens", None, blocks)?, &policies.layout)?
            }
            Operation::WriteKv => write_kv(configuration, &mut self.caches, inputs, policies)?,
            Operation::ReadCache => read_cache(configuration, &self.caches),
            Operation::LoadCache => load_cache(configuration, &mut self.caches, inputs, policies)?,
            Operation::Attend { mask } => {
                let rows = query_rows(inputs, configuration)?;
                let batch = Batch::read(inputs, "seq_lens", Some(rows), blocks)?;
                let batch = (policies.session.recall)(&mut self.earlier, batch);
                let (ranks, causal) = (self.ranks(configuration.tp), mask == Mask::Causal);
                attend(configuration, &self.caches, inputs, &batch, causal, ranks, policies)?
            }
            Operation::AttendContext { chunk_budget_tokens } => {
                let rows = query_rows(inputs, configuration)?;
                let batch = Batch::read(inputs, "context_lens", Some(rows), blocks)?;
                let ranks = self.ranks(configuration.tp);
                attend_context(
                    configuration,
                    &self.caches,
                    inputs,
                    &batch,
                    chunk_budget_tokens,
                    ranks,
                    policies,
                )?
            }
            Operation::MergePartials => {
                merge_partials(configuration, inputs, self.ranks(configuration.dcp), policies)?
            }
            Operation::MergeStates => merge_two_states(inputs, policies)?,
            Operation::MergeSegments { tile_tokens } => merge_segments(inputs, tile_tokens, policies)?,
            Operation::PackLse => pack_lse(configuration, inputs, policies)?,
        };
        Ok(Answer::Done(reply))
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
