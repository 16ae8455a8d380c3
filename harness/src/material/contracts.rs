//! Which contract of an engine's profile a case is judged by.

use shardcheck_cases::Family;
use shardcheck_engine::{CommBackend, OperationKind, Profile};
use shardcheck_formats::{Contract, Merge};

/// Operation whose profile counts for a family; that of the layout where a case is of several or of none.
pub(crate) fn operation_of(family: Family) -> OperationKind {
    family.operation().unwrap_or(OperationKind::Layout)
}

/// Contract of a family's operation with the merge that `backend` uses; `None` when the engine does not do it.
///
/// A profile declares one contract for an operation; which collectives merge is the configuration's choice, so the
/// merge arithmetic follows the backend: AG+RS sums in the partial's own format.
pub(crate) fn contract_for(profile: &Profile, family: Family, backend: CommBackend) -> Option<Contract> {
    let mut contract = profile.operation(operation_of(family))?.contract.clone()?;
    contract.merge = match (backend, contract.merge) {
        (CommBackend::A2a, _) => Merge::A2a,
        (CommBackend::AgRs, Merge::AgRsF32) => Merge::AgRsF32,
        (CommBackend::AgRs, _) => Merge::AgRsBf16,
    };
    Some(contract)
}
