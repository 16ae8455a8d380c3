//! What an attention step is asked, and what it answers.

use shardcheck_engine::{Configuration, EngineError, Reply, SlotList, Tensors};
use shardcheck_formats::Dtype;

use crate::attend::Step;
use crate::batch::{Batch, bytes_of, contiguous, query_rows};
use crate::selected::Selection;
use crate::session::ReplayFault;
use crate::shape::Shape;
use crate::team::{Seat, Team};

/// What a step is asked, checked and on the host.
pub struct Question {
    pub batch: Batch,
    pub causal: bool,
    pub query: Vec<u8>,
    pub w_uv: Option<Vec<u8>>,
    /// Tokens that rows attend to, where they were selected.
    pub selection: Option<Selection>,
}

impl Question {
    /// Reads the inputs.
    ///
    /// # Errors
    /// [`EngineError::Input`] for tensors that do not fit.
    pub fn read(inputs: &Tensors, configuration: &Configuration, causal: bool) -> Result<Self, EngineError> {
        let rows = query_rows(inputs, configuration)?;
        let batch = Batch::read(inputs, "seq_lens", Some(rows))?;
        let attention = configuration.attention;
        let shape = [rows, configuration.total_heads(), attention.qk_dim()];
        let query = contiguous(inputs, "query", Dtype::Bf16, &shape)?;
        let weights = [configuration.total_heads(), attention.value_dim(), attention.v_head_dim()];
        let w_uv = match inputs.find("w_uv") {
            Some(_) => Some(contiguous(inputs, "w_uv", Dtype::Bf16, &weights)?),
            None => None,
        };
        Ok(Self { batch, causal, query, w_uv, selection: None })
    }

    /// Reads the inputs of a step over selected tokens, its own or those of a layer before it.
    ///
    /// # Errors
    /// As [`Self::read`], and for rows that are given what they do not see.
    pub fn read_selected(
        inputs: &Tensors,
        configuration: &Configuration,
        list: SlotList,
        shared: Option<Selection>,
    ) -> Result<Self, EngineError> {
        let question = Self::read(inputs, configuration, true)?;
        let selection = match shared {
            Some(selection) => Some(selection.of_rows(question.batch.rows)?),
            None => Some(Selection::read(inputs, &question.batch, list)?),
        };
        Ok(Self { selection, ..question })
    }

    /// Most tokens that a row sees on a rank, and those of all rows on all ranks, at most.
    pub fn tokens(&self, shape: &Shape) -> (usize, usize) {
        let round = (shape.interleave * shape.world) as usize;
        let local = |len: i32| {
            let len = len as usize;
            len / round * shape.interleave as usize + (len % round).min(shape.interleave as usize)
        };
        let lens = || self.batch.lens.iter().map(|len| local(*len));
        let rows = self.batch.starts.windows(2).map(|edge| (edge[1] - edge[0]) as usize);
        let total = rows.zip(lens()).map(|(rows, len)| rows * len).sum::<usize>();
        (lens().max().unwrap_or(0), total * shape.ranks as usize)
    }

    /// Puts the question into the buffers of a step, on every device. Rows and requests beyond those of the question are padding.
    ///
    /// # Errors
    /// What the driver says.
    pub fn ask(&self, team: &Team, step: &Step) -> Result<(), EngineError> {
        self.ask_as(team, step, None, false)
    }

    /// The same, leaving as it was what a fault leaves.
    ///
    /// # Errors
    /// What the driver says.
    pub fn ask_as(
        &self,
        team: &Team,
        step: &Step,
        fault: Option<ReplayFault>,
        captured_without_mask: bool,
    ) -> Result<(), EngineError> {
        let masked = !(fault == Some(ReplayFault::Mask) && captured_without_mask);
        for (Seat { queue, .. }, part) in team.seats().iter().zip(step.parts()) {
            part.metadata.write_header(queue, &self.batch, self.causal && masked)?;
            if !matches!(fault, Some(ReplayFault::Lengths | ReplayFault::LateLengths)) {
                queue.write(&part.metadata.lens, &bytes_of(&self.batch.lens))?;
            }
            if fault != Some(ReplayFault::Rows) {
                queue.write(&part.metadata.starts, &bytes_of(&self.batch.starts))?;
            }
            if fault != Some(ReplayFault::Table) {
                queue.write(&part.metadata.table, &bytes_of(&self.batch.table))?;
            }
            if let (Some(selection), Some(listed)) = (&self.selection, &part.listed) {
                queue.write(&listed.topk, &bytes_of(&selection.topk))?;
            }
            queue.write(&part.query, &self.query)?;
            queue.write(&part.w_uv, self.w_uv.as_deref().unwrap_or_default())?;
        }
        Ok(())
    }

    /// Puts the lengths of requests into the buffers of a step.
    ///
    /// # Errors
    /// What the driver says.
    pub fn write_lengths(&self, team: &Team, step: &Step) -> Result<(), EngineError> {
        for (Seat { queue, .. }, part) in team.seats().iter().zip(step.parts()) {
            queue.write(&part.metadata.lens, &bytes_of(&self.batch.lens))?;
        }
        Ok(())
    }

    /// The reply, once the step has run.
    ///
    /// # Errors
    /// As [`Step::outputs`].
    pub fn reply(
        &self,
        team: &Team,
        configuration: &Configuration,
        step: &Step,
    ) -> Result<Reply, EngineError> {
        team.settle()?;
        let outputs = step.outputs(team, self.batch.rows)?;
        let route = match (&self.selection, self.causal, self.batch.max_query_len()) {
            (Some(_), _, _) => "attend_selected",
            (None, false, _) => "draft",
            (None, true, 0 | 1) => "decode",
            (None, true, _) => "verify",
        };
        let effective = step.report(configuration.lane_order).with("route", route);
        let collectives = team.entered(step.collectives());
        Ok(Reply { outputs, effective: team.report(effective), collectives })
    }
}
