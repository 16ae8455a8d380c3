//! A session: caches on the device, and captured steps where graphs are on.

use std::collections::HashMap;
use std::sync::Arc;

use shardcheck_engine::{
    Answer, Configuration, EngineError, LseBase, Mask, Operation, Reply, Session, Tensors,
};

use crate::attend::{Bucket, Kernel, Question, Step};
use crate::caches::{self, Caches};
use crate::context::attend_context;
use crate::engine::Graphs;
use crate::layout::derive;
use crate::queue::{Graph, Queue};
use crate::shape::Shape;
use crate::states::{merge_partials, merge_segments, merge_states, pack_lse};

/// Most captured steps that a session keeps.
const MAX_CAPTURED: usize = 16;

/// What a replay may wrongly leave as it was captured. Each is the embedded engine's fault of the same name, in the place where graphs
/// make it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayFault {
    /// Lengths are never written again.
    Lengths,
    /// The block table is never written again.
    Table,
    /// Starts of requests are never written again.
    Rows,
    /// Lengths are written after the kernels have read them.
    LateLengths,
    /// A graph that was captured with one row a request goes on without a mask.
    Mask,
}

impl ReplayFault {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Lengths, Self::Table, Self::Rows, Self::LateLengths, Self::Mask];

    /// Name among all faults.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lengths => "lengths-captured-by-bucket",
            Self::Table => "block-table-of-the-first-step",
            Self::Rows => "rows-of-the-first-step",
            Self::LateLengths => "lengths-of-the-previous-step",
            Self::Mask => "mask-absent-since-capture",
        }
    }

    /// The fault of that name.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|fault| fault.name() == name)
    }
}

/// A step whose kernels were captured once and are replayed over what its buffers hold.
struct Captured {
    // the graph goes before the memory that it uses
    graph: Graph,
    step: Step,
    /// Whether no request had more than one row when it was captured.
    single_rows: bool,
}

/// A session of the CUDA engine.
pub struct CudaSession {
    configuration: Configuration,
    shape: Shape,
    graphs: Graphs,
    fault: Option<ReplayFault>,
    captured: HashMap<Bucket, Captured>,
    caches: Caches,
    queue: Arc<Queue>,
}

impl CudaSession {
    /// A session whose caches hold NaN in every slot.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(
        queue: Arc<Queue>,
        configuration: Configuration,
        graphs: Graphs,
        fault: Option<ReplayFault>,
    ) -> Result<Self, EngineError> {
        let shape = Shape::of(&configuration);
        let caches = Caches::unwritten(&queue, &configuration, &shape)?;
        Ok(Self { configuration, shape, graphs, fault, captured: HashMap::new(), caches, queue })
    }

    fn perform(&mut self, operation: &Operation, inputs: &Tensors) -> Result<Reply, EngineError> {
        let (queue, configuration, shape) = (&self.queue, &self.configuration, &self.shape);
        match *operation {
            Operation::Layout => derive(queue, configuration, shape, inputs),
            Operation::WriteKv => caches::write(queue, configuration, shape, &self.caches, inputs),
            Operation::ReadCache => caches::read(queue, configuration, &self.caches),
            Operation::LoadCache => caches::load(queue, configuration, &self.caches, inputs),
            Operation::Attend { mask } => {
                let question = Question::read(inputs, configuration, mask == Mask::Causal)?;
                match self.graphs {
                    Graphs::Off => self.attend(&question),
                    Graphs::On => self.replay(&question),
                }
            }
            Operation::AttendContext { chunk_budget_tokens } => {
                attend_context(queue, configuration, shape, &self.caches, inputs, chunk_budget_tokens)
            }
            Operation::MergePartials { .. } => merge_partials(queue, configuration, shape, inputs),
            Operation::MergeStates => merge_states(queue, inputs),
            Operation::MergeSegments { tile_tokens } => merge_segments(queue, inputs, tile_tokens),
            Operation::PackLse => pack_lse(queue, configuration, shape, inputs),
            Operation::ImportCache { .. }
            | Operation::InGroup { .. }
            | Operation::PcpLayout { .. }
            | Operation::Route { .. }
            | Operation::Moe { .. }
            | Operation::AcceptDrafts { .. } => {
                unreachable!("the step was answered before")
            }
        }
    }

    fn attend(&self, question: &Question) -> Result<Reply, EngineError> {
        let rows = question.batch.rows;
        let kernel = Kernel::of(&self.queue, &self.configuration, &self.shape);
        let (longest, total) = question.tokens(&self.shape);
        let bucket = Bucket {
            rows,
            requests: question.batch.requests(),
            entries: question.batch.table.len(),
            segments: kernel.segments(&self.queue, &self.shape, rows, longest, total),
            projects: question.w_uv.is_some(),
        };
        let step = Step::allocate(&self.queue, &self.configuration, &self.shape, bucket)?;
        question.ask(&self.queue, &step)?;
        step.enqueue(&self.queue, &self.caches)?;
        question.reply(&self.queue, &self.configuration, &step)
    }

    /// As [`Self::attend`], by a graph that was captured for the bucket that the question falls into: rows and requests beyond those
    /// of the question are padding, lengths are whatever they are now.
    fn replay(&mut self, question: &Question) -> Result<Reply, EngineError> {
        let rows = question.batch.rows.next_power_of_two();
        let kernel = Kernel::of(&self.queue, &self.configuration, &self.shape);
        // a graph is fixed to its segments, so they are those of rows that share what the cache holds at most
        let longest = self.configuration.blocks * self.configuration.block_size;
        let total = longest * self.configuration.tp;
        let bucket = Bucket {
            rows,
            requests: question.batch.requests().next_power_of_two(),
            entries: question.batch.table.len().next_power_of_two(),
            segments: kernel.segments(&self.queue, &self.shape, rows, longest, total),
            projects: question.w_uv.is_some(),
        };
        let seen = self.captured.contains_key(&bucket);
        if !seen {
            if self.captured.len() >= MAX_CAPTURED {
                self.captured.clear();
            }
            let step = Step::allocate(&self.queue, &self.configuration, &self.shape, bucket)?;
            // the first run of a kernel may load code, which a capture does not allow
            question.ask(&self.queue, &step)?;
            step.enqueue(&self.queue, &self.caches)?;
            self.queue.wait()?;
            let graph = self.queue.capture(|| step.enqueue(&self.queue, &self.caches))?;
            let single_rows = question.batch.max_query_len() <= 1;
            self.captured.insert(bucket, Captured { graph, step, single_rows });
        }
        let captured = &self.captured[&bucket];
        let fault = self.fault.filter(|_| seen);
        question.ask_as(&self.queue, &captured.step, fault, captured.single_rows)?;
        captured.graph.replay()?;
        if fault == Some(ReplayFault::LateLengths) {
            question.write_lengths(&self.queue, &captured.step)?;
        }
        let mut reply = question.reply(&self.queue, &self.configuration, &captured.step)?;
        let graph = if seen { "replayed" } else { "captured" };
        reply.effective = reply.effective.with("graph", graph).with("bucket_rows", rows);
        Ok(reply)
    }
}

/// Why there are no kernels for an operation.
fn absent(operation: &Operation) -> Option<&'static str> {
    match operation {
        Operation::MergePartials { lse_base: LseBase::Two } => {
            Some("the merge kernels take natural LSEs only")
        }
        Operation::ImportCache { .. } => Some("no kernel takes requests over from another layout"),
        Operation::InGroup { .. } => Some("a session has one KV group"),
        Operation::PcpLayout { .. } => Some("no kernel shares a batch out over ranks of prefill"),
        Operation::Route { .. } | Operation::Moe { .. } => Some("there are no kernels of experts"),
        Operation::AcceptDrafts { .. } => Some("no kernel accepts drafts"),
        _ => None,
    }
}

impl Session for CudaSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        if let Some(why) = absent(operation) {
            return Ok(Answer::Unsupported(why.to_owned()));
        }
        self.queue.device.enter()?;
        self.perform(operation, inputs).map(Answer::Done)
    }
}
