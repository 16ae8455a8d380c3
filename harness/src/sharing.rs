//! Material of a case of prefill context parallelism: the batch, the step, and where the oracle puts every row.

use shardcheck_cases::PcpCase;
use shardcheck_engine::{Configuration, Operation, PcpDecodes, PcpStrategy, Tensors};
use shardcheck_references::pcp::{
    Decodes, Placed, Sequence, Strategy, first_group, padded_rows, place_groups,
};

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
    /// Rows of a rank that are asked for; 0 asks for none.
    pub asked: usize,
    /// Where each row of the batch is.
    pub placed: Vec<Placed>,
    /// Requests of each of two groups that overlap; of a batch in one piece, all and none.
    pub groups: [usize; 2],
    /// Rows of a rank for each group, padding included.
    pub group_rows: [usize; 2],
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
        let first = if case.overlap { first_group(case.world, &batch) } else { batch.len() };
        let groups = [first, batch.len() - first];
        let placed = place_groups(case.world, strategy, decodes, &batch, first);
        let (before, behind) = placed.split_at(placed.partition_point(|row| row.request < first));
        let fullest = padded_rows(case.world, before, 0);
        // only a graph asks for a number of rows; else a rank runs as many as the fullest one has
        let asked = if case.extra_rows > 0 { fullest + case.extra_rows } else { 0 };
        let group_rows = [padded_rows(case.world, before, asked), padded_rows(case.world, behind, 0)];
        Self {
            configuration: case.configuration(),
            operation: case.operation(asked),
            inputs: case.tensors(),
            world: case.world,
            padded: group_rows.iter().sum(),
            asked,
            placed,
            groups,
            group_rows,
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

#[cfg(test)]
mod tests {
    use shardcheck_cases::{Body, Case, Family, SuiteName, suite};
    use shardcheck_cpu::{CpuEngine, faults};
    use shardcheck_engine::Engine;

    use crate::laboratory::Laboratory;
    use crate::material::Material;
    use crate::properties;

    fn cases(name: SuiteName, seed: u64) -> Vec<Case> {
        suite(name, seed).into_iter().filter(|case| case.family == Family::Pcp).collect()
    }

    /// Properties of prefill context parallelism that fail on the case.
    fn failures(engine: &dyn Engine, case: &Case) -> Vec<&'static str> {
        let material = Material::of(case, engine.profile()).unwrap();
        let laboratory = Laboratory::new(case, engine, &material);
        properties::of(case)
            .filter(|property| property.judge(&laboratory).status().is_failure())
            .map(|property| property.id)
            .collect()
    }

    #[test]
    fn the_embedded_engine_shares_out_every_batch_of_the_gate_and_of_the_nightly_suite() {
        let engine = shardcheck_cpu::engine();
        for (name, seed) in [(SuiteName::Gate, 1), (SuiteName::Gate, 2), (SuiteName::Nightly, 3)] {
            let cases = cases(name, seed);
            assert!(cases.len() >= 90, "{name}: {}", cases.len());
            for case in &cases {
                assert_eq!(failures(&engine, case), Vec::<&str>::new(), "{}", case.id());
            }
        }
    }

    #[test]
    fn every_fault_of_the_split_fails_every_property_that_it_names_on_the_gate() {
        let cases = cases(SuiteName::Gate, 1);
        let of_split = faults().iter().filter(|fault| fault.killed_by[0].starts_with("pcp."));
        let mut tried = 0;
        for fault in of_split {
            let engine = CpuEngine::with_fault(fault);
            let of_layout = |id: &&str| id.starts_with("pcp.");
            let mut left: Vec<&str> = fault.killed_by.iter().copied().filter(of_layout).collect();
            for case in &cases {
                let failed = failures(&engine, case);
                left.retain(|property| !failed.contains(property));
            }
            assert!(left.is_empty(), "{} is not seen by {}", fault.name, left.join(", "));
            tried += 1;
        }
        assert!(tried >= 18, "{tried}");
    }

    #[test]
    fn rows_of_a_graph_are_asked_for_only_where_the_case_has_more_than_the_fullest_rank() {
        let asked = |id: &str| {
            let Body::Pcp(pcp) = id.parse::<Case>().unwrap().body else { panic!("{id}") };
            let material = super::SharingMaterial::new(&pcp);
            let shardcheck_engine::Operation::PcpLayout { padded_rows, .. } = material.operation else {
                panic!("{id}")
            };
            (padded_rows, material.padded)
        };
        assert_eq!(asked("pcp/head_tail.p2.replicated/0+11"), (0, 6));
        assert_eq!(asked("pcp/head_tail.p2.replicated.pad3/0+11"), (9, 9));
    }
}
