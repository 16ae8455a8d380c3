//! Material of a case of attention under prefill context parallelism: where rows are, and global causal attention over the same batch.

use shardcheck_cases::{AttendPcpCase, Family, Inputs};
use shardcheck_engine::{Conventions, Operation, Profile, Tensors};
use shardcheck_formats::{Dtype, decode_f32, encode_f32};

use crate::laboratory::{Halt, Observed, Run, Watched};
use crate::material::{AttentionMaterial, negate_future};
use crate::sharing::SharingMaterial;

/// Material of one case of attention under prefill context parallelism.
pub struct PrefillMaterial {
    /// The case.
    pub case: AttendPcpCase,
    /// Where each row of the batch is.
    pub sharing: SharingMaterial,
    /// The batch on one rank: its oracle knows no ranks. Its queries are what they are behind their cast.
    pub attention: AttentionMaterial,
    /// The step.
    pub operation: Operation,
    /// Inputs of the step.
    pub inputs: Tensors,
    drawn: Inputs,
    seed: u64,
    profile: Profile,
}

impl PrefillMaterial {
    /// Makes the material for an engine of that profile.
    ///
    /// # Errors
    /// Why the case can't be judged against such an engine.
    pub fn new(case: &AttendPcpCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        Self::over(case, seed, profile, case.inputs(seed))
    }

    fn over(case: &AttendPcpCase, seed: u64, profile: &Profile, drawn: Inputs) -> Result<Self, String> {
        let declared = profile.operation(shardcheck_engine::OperationKind::AttendPcp);
        let conventions = &declared.ok_or("the engine does not declare attend_pcp")?.conventions;
        let sharing = SharingMaterial::new(&case.batch);
        let mut read = drawn.clone();
        cast(&mut read.query, case, conventions);
        if read.query.iter().any(|value| !value.is_finite()) {
            return Err(format!("a query is beyond the range of {}@{}", case.query_dtype, case.query_scale));
        }
        Ok(Self {
            case: case.clone(),
            operation: case.operation(sharing.asked),
            inputs: case.tensors(&drawn),
            attention: AttentionMaterial::over(Family::AttendPcp, case.attention(), seed, profile, read)?,
            sharing,
            drawn,
            seed,
            profile: profile.clone(),
        })
    }

    /// The same batch shared out in another way.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when the changed case contradicts itself.
    pub fn variant(&self, change: impl FnOnce(&mut AttendPcpCase)) -> Result<Self, Halt> {
        let mut case = self.case.clone();
        change(&mut case);
        Self::over(&case, self.seed, &self.profile, self.drawn.clone()).map_err(Halt::Inconclusive)
    }

    /// The same case in which every token behind the first new row of its request is another one.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when that case contradicts itself.
    pub fn with_other_future(&self) -> Result<Self, Halt> {
        let mut drawn = self.drawn.clone();
        negate_future(&mut drawn);
        Self::over(&self.case, self.seed, &self.profile, drawn).map_err(Halt::Inconclusive)
    }

    /// Ranks P.
    pub fn world(&self) -> usize {
        self.sharing.world
    }

    /// Heads, the width of an output, and its format.
    pub fn output(&self) -> (usize, usize, Dtype) {
        let dim = self.attention.configuration().attention.value_dim();
        (self.attention.heads(), dim, self.attention.output_dtype())
    }

    /// Writes the cached context, then performs the step.
    ///
    /// # Errors
    /// [`Halt`] when the engine does not do it or fails.
    pub fn observe(&self, engine: &Watched<'_>) -> Result<Observed, Halt> {
        let mut run = Run::open(engine, &self.case.configuration)?;
        if let Some(stale) = self.attention.stale_inputs() {
            run.step(&Operation::WriteKv, &stale)?;
        }
        run.step(&Operation::WriteKv, &self.attention.write_inputs())?;
        run.step(&self.operation, &self.inputs)
    }
}

/// Queries as the kernel reads them. A scale is a power of two, so that dividing and folding it in again round nothing.
fn cast(query: &mut [f32], case: &AttendPcpCase, conventions: &Conventions) {
    if !case.query_dtype.is_fp8() {
        return;
    }
    for value in query {
        let code = encode_f32(case.query_dtype, *value / case.query_scale, conventions.overflow);
        *value = decode_f32(case.query_dtype, code) * case.query_scale;
    }
}

#[cfg(test)]
mod tests;
