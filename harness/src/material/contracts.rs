//! Which contract of an engine's profile a case is judged by.

use shardcheck_cases::{Family, Workload};
use shardcheck_engine::{CommBackend, OperationKind, Profile};
use shardcheck_formats::{Contract, Dtype, Merge};

/// Operation whose profile counts for a family; that of the layout where a case is of several or of none.
pub(crate) fn operation_of(family: Family) -> OperationKind {
    family.operation().unwrap_or(OperationKind::Layout)
}

/// Operation that an engine takes the step of an attention case for: a verification of one row a request is a decode, as
/// [`shardcheck_engine::Operation::kind`] has it.
pub(super) fn asked_kind(family: Family, workload: &Workload) -> OperationKind {
    match operation_of(family) {
        OperationKind::Verify if workload.requests.iter().all(|request| request.query_tokens <= 1) => {
            OperationKind::Decode
        }
        kind => kind,
    }
}

/// Contract of a family's operation on activations of `dtype`, with the merge that `backend` uses; `None` when the engine does not do
/// it.
pub(crate) fn contract_for(
    profile: &Profile,
    family: Family,
    dtype: Dtype,
    backend: CommBackend,
) -> Option<Contract> {
    contract_of(profile, operation_of(family), dtype, backend)
}

/// Contract of an operation on activations of `dtype`, with the merge that `backend` uses; `None` when the engine does not do it.
///
/// A profile declares one contract for an operation and a type; which collectives merge is the configuration's choice, so the
/// merge arithmetic follows the backend: AG+RS sums in the partial's own format.
pub(super) fn contract_of(
    profile: &Profile,
    kind: OperationKind,
    dtype: Dtype,
    backend: CommBackend,
) -> Option<Contract> {
    let mut contract = profile.operation(kind)?.contract_of(dtype)?.clone();
    contract.merge = match (backend, contract.merge) {
        (CommBackend::A2a, _) => Merge::A2a,
        (CommBackend::AgRs, Merge::AgRsF32) => Merge::AgRsF32,
        (CommBackend::AgRs, _) if dtype == Dtype::F16 => Merge::AgRsF16,
        (CommBackend::AgRs, _) => Merge::AgRsBf16,
    };
    Some(contract)
}
