//! Which steps a fault can show in: those that ask a part of the table that it changes.

use shardcheck_engine::Operation;

use crate::faults::Fault;
use crate::policies::Policies;

/// A part of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Layout,
    Cache,
    Query,
    Kernel,
    Merge,
    Sinks,
    Context,
    Segments,
    Transfer,
    Prefill,
    Pcp,
    Index,
    Compress,
    Moe,
    Acceptance,
    Sparse,
    Selected,
    Sharing,
    Kda,
    Stack,
    Gates,
    Session,
}

impl Part {
    /// Whether it is another one in the second table. Entries that are copies of each other are equal; others that compare as equal are the
    /// same code.
    fn differs(self, a: &Policies, b: &Policies) -> bool {
        match self {
            Self::Layout => a.layout != b.layout,
            Self::Cache => a.cache != b.cache,
            Self::Query => a.query != b.query,
            Self::Kernel => a.kernel != b.kernel,
            Self::Merge => a.merge != b.merge,
            Self::Sinks => a.sinks != b.sinks,
            Self::Context => a.context != b.context,
            Self::Segments => a.segments != b.segments,
            Self::Transfer => a.transfer != b.transfer,
            Self::Prefill => a.prefill != b.prefill,
            Self::Pcp => a.pcp != b.pcp,
            Self::Index => a.index != b.index,
            Self::Compress => a.compress != b.compress,
            Self::Moe => a.moe != b.moe,
            Self::Acceptance => a.acceptance != b.acceptance,
            Self::Sparse => a.sparse != b.sparse,
            Self::Selected => a.selected != b.selected,
            Self::Sharing => a.sharing != b.sharing,
            Self::Kda => a.kda != b.kda,
            Self::Stack => a.stack != b.stack,
            Self::Gates => a.gates != b.gates,
            Self::Session => a.session != b.session,
        }
    }
}

/// What attention over a cache asks, and with it most of what has caches.
const ATTENTION: &[Part] = &[Part::Layout, Part::Cache, Part::Query, Part::Kernel, Part::Merge];

/// Parts of the table that a step may ask, beside what belongs to the session.
fn asked(operation: &Operation) -> [&'static [Part]; 2] {
    let beside: &[Part] = match operation {
        Operation::InGroup { step, .. } => return asked(step),
        Operation::Layout
        | Operation::WriteKv
        | Operation::ReadCache
        | Operation::LoadCache
        | Operation::Attend { .. }
        | Operation::PackLse => &[],
        Operation::AttendSinks => &[Part::Sinks],
        Operation::ImportCache { .. } => &[Part::Transfer],
        Operation::AttendContext { .. } => &[Part::Context],
        Operation::AttendSelected { .. } | Operation::SelectSparse { .. } => &[Part::Sparse, Part::Selected],
        Operation::MergePartials { .. } | Operation::MergeStates | Operation::MergeSegments { .. } => {
            &[Part::Context, Part::Segments]
        }
        Operation::PcpLayout { .. } => &[Part::Prefill],
        Operation::AttendPcp { .. } => &[Part::Prefill, Part::Pcp, Part::Context],
        Operation::SelectPcp { .. } => &[Part::Prefill, Part::Index, Part::Sparse],
        Operation::CompressPcp { .. } => &[Part::Prefill, Part::Compress],
        Operation::Route { .. } | Operation::Moe { .. } => &[Part::Moe],
        Operation::AcceptDrafts { .. } => &[Part::Acceptance],
        Operation::IndexLayers { .. } => &[Part::Sharing],
        Operation::Kda { .. } => &[Part::Kda],
        Operation::Forward { .. } => {
            &[Part::Stack, Part::Kda, Part::Moe, Part::Prefill, Part::Sparse, Part::Selected]
        }
    };
    [ATTENTION, beside]
}

impl Fault {
    /// Whether a step may ask what the fault changes. Where not, the engine with the fault answers it as the healthy one does.
    pub fn is_asked_in(&self, operation: &Operation) -> bool {
        let parts = asked(operation);
        self.changes(parts.into_iter().flatten().chain(&[Part::Session]))
    }

    /// Whether a session may ask what the fault changes when it is opened.
    pub fn is_asked_at_opening(&self) -> bool {
        self.changes(&[Part::Session])
    }

    /// Whether configuration rules may ask what the fault changes.
    pub fn is_asked_by_rules(&self) -> bool {
        self.changes(&[Part::Gates])
    }

    fn changes<'a>(&self, parts: impl IntoIterator<Item = &'a Part>) -> bool {
        let healthy = Policies::HEALTHY;
        // a copy, so that what the fault leaves alone compares as equal
        let mut faulty = healthy;
        (self.apply)(&mut faulty);
        parts.into_iter().any(|part| part.differs(&healthy, &faulty))
    }
}

#[cfg(test)]
mod tests {
    use shardcheck_engine::Mask;

    use super::*;
    use crate::faults;

    #[test]
    fn every_fault_changes_a_part_that_something_asks() {
        for fault in faults() {
            let forward = [ATTENTION, &[Part::Stack, Part::Kda, Part::Moe, Part::Session, Part::Gates]];
            let others = [
                &[Part::Context, Part::Segments, Part::Transfer, Part::Prefill, Part::Pcp][..],
                &[
                    Part::Sinks,
                    Part::Index,
                    Part::Compress,
                    Part::Acceptance,
                    Part::Sparse,
                    Part::Selected,
                    Part::Sharing,
                ],
            ];
            let all = forward.into_iter().chain(others).flatten();
            assert!(fault.changes(all), "{}", fault.name);
        }
    }

    #[test]
    fn attention_asks_no_layers_and_rules_ask_no_ranks() {
        let attend = Operation::Attend { mask: Mask::Causal };
        let asked = |name: &str| {
            let fault = crate::fault(name).unwrap();
            (fault.is_asked_in(&attend), fault.is_asked_by_rules())
        };
        assert_eq!(asked("committed-prefix-rows"), (true, false));
        assert_eq!(asked("stack-attention-not-summed"), (false, false));
        let skipped = faults().iter().filter(|fault| !fault.is_asked_in(&attend)).count();
        assert!(skipped > faults().len() / 3, "{skipped} of {}", faults().len());
        assert!(faults().iter().any(Fault::is_asked_by_rules));
    }
}
