//! Which mistakes can first show at which stage of a step.

use shardcheck_cpu::FaultClass;

use crate::finding::Stage;

/// Whether a mistake of a class can first show at a stage: the pairs that the known faults show on the cases that kill them.
///
/// A class says what kind of mistake it is, not where it is made: a wrong length of a draft shows at a row's bound in attention, and
/// in the output of a recurrence, which has no bound before it.
pub(super) fn agrees(class: FaultClass, stage: Stage) -> bool {
    use FaultClass as C;
    use Stage as S;
    let stages: &[Stage] = match class {
        C::LayoutIndex => {
            const NOT: [Stage; 2] = [S::Routing, S::Configuration];
            return !NOT.contains(&stage);
        }
        C::CausalBound => &[S::Layout, S::RowBound, S::Gather, S::Partial, S::Merge, S::Output],
        C::SpecDecode => {
            &[S::Layout, S::Selection, S::RowBound, S::Query, S::Gather, S::Partial, S::Merge, S::Output]
        }
        C::LseMath => &[S::Gather, S::Partial, S::Exchange, S::Merge, S::Output],
        C::EmptyShard => &[S::Layout, S::RowBound, S::Partial, S::Merge, S::Output],
        C::DtypeScale => {
            &[S::Selection, S::Write, S::Query, S::Gather, S::Partial, S::Exchange, S::Merge, S::Output]
        }
        C::HeadLayout => {
            &[S::Query, S::Gather, S::Partial, S::Exchange, S::Merge, S::Output, S::Configuration]
        }
        C::CollectiveOrder => &[
            S::Routing,
            S::Selection,
            S::RowBound,
            S::Query,
            S::Gather,
            S::Partial,
            S::Exchange,
            S::Merge,
            S::Output,
        ],
        C::Padding => {
            const NOT: [Stage; 3] = [S::Selection, S::Query, S::Configuration];
            return !NOT.contains(&stage);
        }
        C::ConfigGate => &[S::Layout, S::Selection, S::Exchange, S::Merge, S::Output, S::Configuration],
        C::TopKSelect => &[S::Layout, S::Selection, S::RowBound, S::Partial, S::Exchange],
        C::MoeRoute => &[S::Routing, S::Exchange, S::Merge],
        C::StaleMetadata => {
            &[S::Layout, S::Selection, S::RowBound, S::Write, S::Gather, S::Partial, S::Output]
        }
        C::Hang => &S::ALL,
    };
    stages.contains(&stage)
}
