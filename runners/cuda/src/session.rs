//! A session: caches on the device, and captured steps where graphs are on.

use std::collections::HashMap;
use std::sync::Arc;

use shardcheck_engine::{Answer, Configuration, EngineError, Mask, Operation, Reply, Session, Tensors};

use crate::attend::{Bucket, Kernel, Step};
use crate::caches::{self, Caches};
use crate::context::attend_context;
use crate::engine::Graphs;
use crate::experts;
use crate::fabric::Fabric;
use crate::layout::derive;
use crate::question::Question;
use crate::queue::{Graph, Queue};
use crate::router::route;
use crate::selected::Selection;
use crate::shape::Shape;
use crate::sharing::{Split, share_out};
use crate::states::{merge_partials, merge_segments, merge_states, pack_lse};
use crate::team::{Absence, Team};
use crate::transfer::import;

/// Why joined devices run no layer of experts.
const WITHOUT_COLLECTIVES: &str = "a layer of experts has ranks of its own, which one device plays: no collective carries tokens between joined devices";

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

/// A session of the CUDA engine: one KV group, or two.
pub struct CudaSession {
    groups: Vec<Group>,
}

/// What a session is opened with beside its configuration.
#[derive(Clone)]
pub struct Setting {
    pub graphs: Graphs,
    pub fault: Option<ReplayFault>,
    pub absence: Option<Absence>,
    pub fabric: Option<Arc<Fabric>>,
}

/// What one KV group has for itself.
struct Group {
    configuration: Configuration,
    graphs: Graphs,
    fault: Option<ReplayFault>,
    // captured steps use the caches, and both the streams
    captured: HashMap<Bucket, Captured>,
    caches: Vec<Caches>,
    team: Team,
    /// Rows of the first attention step.
    first_rows: Option<usize>,
    /// Tokens of the last layer that had a selection of its own.
    selection: Option<Selection>,
}

impl CudaSession {
    /// A session whose caches hold NaN in every slot, over one stream of each device.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(
        queues: &[Arc<Queue>],
        configuration: &Configuration,
        setting: &Setting,
    ) -> Result<Self, EngineError> {
        let groups = (0..2).filter_map(|number| configuration.group(number));
        let group = |configuration| Group::new(queues, configuration, setting);
        Ok(Self { groups: groups.map(group).collect::<Result<_, _>>()? })
    }
}

impl CudaSession {
    /// Whether a KV group holds latents, where there is such a group.
    fn attends_latents(&self, number: usize) -> bool {
        self.groups.get(number).is_none_or(|group| group.configuration.attention.is_mla())
    }
}

impl Group {
    fn new(
        queues: &[Arc<Queue>],
        configuration: Configuration,
        setting: &Setting,
    ) -> Result<Self, EngineError> {
        let Setting { graphs, fault, absence, fabric } = setting.clone();
        let team = Team::new(queues.to_vec(), &configuration, fabric, absence);
        let caches = team.each(|seat| Caches::unwritten(seat, &configuration))?;
        Ok(Self {
            configuration,
            graphs,
            fault,
            captured: HashMap::new(),
            caches,
            team,
            first_rows: None,
            selection: None,
        })
    }

    fn perform(&mut self, operation: &Operation, inputs: &Tensors) -> Result<Reply, EngineError> {
        let (team, configuration, caches) = (&self.team, &self.configuration, &self.caches);
        let queue = &team.first().queue;
        team.begin();
        match *operation {
            Operation::Layout => derive(team, configuration, inputs),
            Operation::WriteKv => caches::write(team, configuration, caches, inputs),
            Operation::ReadCache => caches::read(team, configuration, caches),
            Operation::LoadCache => caches::load(team, configuration, caches, inputs),
            Operation::ImportCache { ref source } => import(team, configuration, caches, inputs, source),
            Operation::Attend { mask } => {
                let question = Question::read(inputs, configuration, mask == Mask::Causal)?;
                match self.graphs {
                    Graphs::Off => self.attend(&question),
                    Graphs::On => self.replay(&question),
                }
            }
            Operation::AttendSelected { list, shared } => {
                // lists grow with the batch, so no graph is captured for them
                let own = if shared { self.selection.clone() } else { None };
                let question = Question::read_selected(inputs, configuration, list, own)?;
                self.selection.clone_from(&question.selection);
                self.attend(&question)
            }
            Operation::AttendContext { chunk_budget_tokens } => {
                attend_context(team, configuration, caches, inputs, chunk_budget_tokens)
            }
            Operation::MergePartials { lse_base } => merge_partials(team, configuration, inputs, lse_base),
            Operation::MergeStates => merge_states(queue, inputs),
            Operation::MergeSegments { tile_tokens } => merge_segments(queue, inputs, tile_tokens),
            Operation::PackLse => pack_lse(queue, configuration, &team.first().shape, inputs),
            Operation::PcpLayout { world, strategy, decodes, padded_rows, .. } => {
                share_out(queue, inputs, &Split { world, strategy, decodes, padded_rows })
            }
            Operation::Route { ref router } => route(queue, inputs, router),
            Operation::Moe { ref router, plan } => experts::run(queue, inputs, router, plan),
            Operation::InGroup { .. }
            | Operation::AttendSinks
            | Operation::AcceptDrafts { .. }
            | Operation::SelectSparse { .. }
            | Operation::IndexLayers { .. }
            | Operation::Kda { .. }
            | Operation::Forward { .. }
            | Operation::AttendPcp { .. }
            | Operation::SelectPcp { .. }
            | Operation::CompressPcp { .. } => {
                unreachable!("the step was answered before")
            }
        }
    }

    fn attend(&mut self, question: &Question) -> Result<Reply, EngineError> {
        let rows = question.batch.rows;
        let larger = rows > *self.first_rows.get_or_insert(rows);
        let (team, whole) = (&self.team, Shape::of(&self.configuration));
        let kernel = Kernel::of(&team.first().queue, &self.configuration, &whole);
        let (longest, total) = question.tokens(&whole);
        let bucket = Bucket {
            rows,
            requests: question.batch.requests(),
            entries: question.batch.table.len(),
            // those of one device, however many there are: a row's sums don't depend on who plays the ranks
            segments: match question.selection {
                Some(_) => 1,
                None => kernel.segments(&team.first().queue, &whole, rows, longest, total),
            },
            projects: question.w_uv.is_some(),
            listing: question.selection.as_ref().map(|selection| selection.shape),
        };
        let step = Step::allocate(team, &self.configuration, bucket)?;
        question.ask(team, &step)?;
        step.enqueue(team, &self.caches, larger)?;
        question.reply(team, &self.configuration, &step)
    }

    /// As [`Self::attend`], by a graph that was captured for the bucket that the question falls into: rows and requests beyond those
    /// of the question are padding, lengths are whatever they are now.
    fn replay(&mut self, question: &Question) -> Result<Reply, EngineError> {
        let rows = question.batch.rows.next_power_of_two();
        let (team, whole) = (&self.team, Shape::of(&self.configuration));
        let queue = &team.first().queue;
        let kernel = Kernel::of(queue, &self.configuration, &whole);
        // a graph is fixed to its segments, so they are those of rows that share what the cache holds at most
        let longest = self.configuration.blocks * self.configuration.block_size;
        let total = longest * self.configuration.tp;
        let bucket = Bucket {
            rows,
            requests: question.batch.requests().next_power_of_two(),
            entries: question.batch.table.len().next_power_of_two(),
            segments: kernel.segments(queue, &whole, rows, longest, total),
            projects: question.w_uv.is_some(),
            listing: None,
        };
        let seen = self.captured.contains_key(&bucket);
        if !seen {
            if self.captured.len() >= MAX_CAPTURED {
                self.captured.clear();
            }
            let step = Step::allocate(team, &self.configuration, bucket)?;
            // the first run of a kernel may load code, which a capture does not allow
            question.ask(team, &step)?;
            step.enqueue(team, &self.caches, false)?;
            queue.wait()?;
            let graph = queue.capture(|| step.enqueue(team, &self.caches, false))?;
            let single_rows = question.batch.max_query_len() <= 1;
            self.captured.insert(bucket, Captured { graph, step, single_rows });
        }
        let captured = &self.captured[&bucket];
        let fault = self.fault.filter(|_| seen);
        question.ask_as(team, &captured.step, fault, captured.single_rows)?;
        captured.graph.replay()?;
        if fault == Some(ReplayFault::LateLengths) {
            question.write_lengths(team, &captured.step)?;
        }
        let mut reply = question.reply(team, &self.configuration, &captured.step)?;
        let graph = if seen { "replayed" } else { "captured" };
        reply.effective = reply.effective.with("graph", graph).with("bucket_rows", rows);
        Ok(reply)
    }
}

impl Session for CudaSession {
    fn step(&mut self, operation: &Operation, inputs: &mut Tensors) -> Result<Answer<Reply>, EngineError> {
        let (number, operation) = match operation {
            Operation::InGroup { group, step } => (*group, &**step),
            step => (0, step),
        };
        let unsupported = |why: String| Ok(Answer::Unsupported(why));
        match operation {
            Operation::InGroup { .. } => {
                return unsupported("a KV group has no groups of its own".to_owned());
            }
            Operation::Moe { .. } if self.groups.iter().any(|group| group.team.has_fabric()) => {
                return unsupported(WITHOUT_COLLECTIVES.to_owned());
            }
            Operation::AcceptDrafts { .. } => {
                return unsupported("no kernel accepts drafts".to_owned());
            }
            Operation::IndexLayers { .. } => {
                return unsupported("no model is loaded whose layers could share".to_owned());
            }
            Operation::SelectSparse { .. } => {
                return unsupported("there is no kernel of an indexer".to_owned());
            }
            Operation::PcpLayout { overlap: true, .. } => {
                return unsupported("no kernel divides a batch into groups that overlap".to_owned());
            }
            Operation::AttendPcp { .. } => {
                return unsupported("no kernel attends for rows that are shared out".to_owned());
            }
            Operation::SelectPcp { .. } | Operation::CompressPcp { .. } => {
                return unsupported(
                    "no kernel selects or compresses for rows that are shared out".to_owned(),
                );
            }
            Operation::AttendSelected { .. } if !self.attends_latents(number) => {
                return unsupported("the kernel of selected tokens is that of MLA".to_owned());
            }
            Operation::Kda { .. } => return unsupported("there are no kernels of KDA".to_owned()),
            Operation::Forward { .. } => {
                return unsupported("no kernels stand between two attentions".to_owned());
            }
            _ => {}
        }
        let groups = self.groups.len();
        let Some(group) = self.groups.get_mut(number) else {
            return unsupported(format!("there is no KV group {number}: the session has {groups}"));
        };
        group.perform(operation, inputs).map(Answer::Done)
    }
}
