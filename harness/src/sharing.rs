//! Material of a case of prefill context parallelism: the batch, the step, and where the oracle puts every row.

use shardcheck_cases::PcpCase;
use shardcheck_engine::{Configuration, Operation, PcpDecodes, PcpStrategy, Tensors};
use shardcheck_references::pcp::{Decodes, Placed, Sequence, Strategy, padded_rows, place};

/// Material of one case of prefill context parallelism.
pub struct SharingMaterial {
    /// What the session is opened with.
    pub configuration: Configuration,
    /// The step.
    pub operation: Operation,
    /// Inputs of the step.
    pub inputs: Tensors,
    /// Ranks P.
    pub world: usize,
    /// Rows R of a rank, padding included.
    pub padded: usize,
    /// Where each row of the batch is.
    pub placed: Vec<Placed>,
}

impl SharingMaterial {
    /// Makes the material.
    pub fn new(case: &PcpCase) -> Self {
        let strategy = match case.strategy {
            PcpStrategy::HeadTail => Strategy::HeadTail,
            PcpStrategy::HeadTailOrWhole => Strategy::HeadTailOrWhole,
            PcpStrategy::Zigzag => Strategy::Zigzag,
            PcpStrategy::RoundRobin => Strategy::RoundRobin,
            PcpStrategy::Contiguous => Strategy::Contiguous,
        };
        let decodes = match case.decodes {
            PcpDecodes::Split => Decodes::Split,
            PcpDecodes::Replicated => Decodes::Replicated,
            PcpDecodes::Owned => Decodes::Owned,
        };
        let batch: Vec<Sequence> = case
            .requests
            .iter()
            .map(|request| Sequence {
                context_tokens: request.context_tokens,
                rows: request.query_tokens,
                is_prefilling: request.is_prefilling,
            })
            .collect();
        let placed = place(case.world, strategy, decodes, &batch);
        let fullest = padded_rows(case.world, &placed, 0);
        // only a graph asks for a number of rows; else a rank runs as many as the fullest one has
        let asked = if case.extra_rows > 0 { fullest + case.extra_rows } else { 0 };
        Self {
            configuration: case.configuration(),
            operation: case.operation(asked),
            inputs: case.tensors(),
            world: case.world,
            padded: padded_rows(case.world, &placed, asked),
            placed,
        }
    }

    /// Rows of the batch that a rank has, in the order of the batch.
    pub fn rows_of(&self, rank: usize) -> Vec<usize> {
        (0..self.placed.len()).filter(|row| self.placed[*row].is_on(rank)).collect()
    }

    /// A row of the batch in words.
    pub fn row_place(&self, row: i64) -> String {
        match usize::try_from(row).ok().and_then(|row| self.placed.get(row)) {
            Some(placed) => format!("row {row} (request {}, position {})", placed.request, placed.position),
            None => format!("row {row} of a batch of {}", self.placed.len()),
        }
    }
}
