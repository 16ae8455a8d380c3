//! Material of a merge case: given states, the operation, and what the oracle allows.

use std::sync::OnceLock;

use shardcheck_cases::{Family, MergeCase, MergeInputs, generate_merge};
use shardcheck_engine::{Configuration, EmptyPartial, LseBase, Operation, Profile, Tensor, Tensors};
use shardcheck_formats::{Contract, Dtype, Merge};
use shardcheck_references::bound::{MergeInputs as GivenStates, certify_merge};
use shardcheck_references::merge::{Segment, active_segments, merge_segments};

use crate::expected::{ExpectedState, allowed_out};
use crate::judge::Allowed;
use crate::laboratory::{Halt, Observed};
use crate::material::{contract_for, operation_of};

/// Material of one merge case.
pub struct MergeMaterial {
    /// What the session is opened with.
    pub configuration: Configuration,
    /// The step.
    pub operation: Operation,
    /// Inputs of the step.
    pub inputs: MergeInputs,
    family: Family,
    case: MergeCase,
    contract: Contract,
    states: Vec<State>,
    nothing: f64,
    expected: OnceLock<Result<ExpectedState, String>>,
}

/// One given state: `[rows, heads, dim]` and `[rows, heads]`.
#[derive(Debug, Clone)]
struct State {
    out: Vec<f64>,
    lse: Vec<f64>,
}

impl MergeMaterial {
    /// Makes the material for an engine of that profile.
    ///
    /// # Errors
    /// Why the case can't be judged against such an engine.
    pub fn new(family: Family, case: &MergeCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        let relied_on = profile.operation(operation_of(family)).map(|o| o.conventions.empty_partial);
        let mut inputs = generate_merge(family, case, seed);
        let nothing = if relied_on == Some(EmptyPartial::Zero) { 0.0 } else { f64::NAN };
        if nothing == 0.0 {
            inputs = inputs.with_zeros_for_nothing();
        }
        let contract = contract_for(profile, family, case.configuration(family).dtype, case.comm_backend);
        let mut contract = contract.unwrap_or_else(|| Contract::bf16_default(Merge::A2a));
        contract.output = case.dtype;
        let names: &[(&str, &str)] = match family {
            Family::MergeStates => &[("prefix_out", "prefix_lse"), ("suffix_out", "suffix_lse")],
            Family::MergePartials => &[("partial_out", "partial_lse")],
            _ => &[],
        };
        let mut states = Vec::new();
        for (out, lse) in names {
            let read = |name: &str| inputs.tensors.get(name).map(Tensor::to_f64).map_err(|e| e.to_string());
            let parts = if family == Family::MergePartials { case.world } else { 1 };
            let (out, lse) = (read(out)?, read(lse)?);
            let (outs, lses) = (out.len() / parts, lse.len() / parts);
            for part in 0..parts {
                states.push(State {
                    out: out[part * outs..(part + 1) * outs].to_vec(),
                    lse: lse[part * lses..(part + 1) * lses].to_vec(),
                });
            }
        }
        Ok(Self {
            configuration: case.configuration(family),
            operation: operation(family),
            inputs,
            family,
            case: case.clone(),
            contract,
            states,
            nothing,
            expected: OnceLock::new(),
        })
    }

    /// Ranks, or states.
    pub fn world(&self) -> usize {
        self.states.len()
    }

    /// What an output holds that goes with nothing: NaN, or zero where the engine declares that it relies on that.
    pub fn nothing(&self) -> f64 {
        self.nothing
    }

    /// Element type of the merged output: that of the given outputs.
    pub fn output_dtype(&self) -> Dtype {
        self.case.dtype
    }

    /// Shape of `out`: `[ranks, T, H, D]`, one rank where the merge is not over ranks.
    pub fn output_shape(&self) -> Vec<usize> {
        let ranks = if self.family == Family::MergePartials { self.case.world } else { 1 };
        vec![ranks, self.case.rows, self.case.heads_per_rank, self.case.dim]
    }

    /// Place of a flat index of `out`.
    pub fn place(&self, flat: usize) -> String {
        format!("{}, dim {}", self.place_state(flat / self.case.dim), flat % self.case.dim)
    }

    /// Place of a flat index of `lse`.
    pub fn place_state(&self, flat: usize) -> String {
        let (heads, rows) = (self.case.heads_per_rank, self.case.rows);
        format!("rank {}, row {}, head {}", flat / heads / rows, flat / heads % rows, flat % heads)
    }

    /// Place of a flat index over all heads, as the fold of two-state merges gives it.
    pub fn place_folded(&self, flat: usize) -> String {
        let state = flat / self.case.dim;
        format!("row {}, head {}, dim {}", state / self.heads(), state % self.heads(), flat % self.case.dim)
    }

    /// What the oracle allows, in the order of `out` and `lse`.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when no bound can be derived.
    pub fn expected(&self) -> Result<&ExpectedState, Halt> {
        let make = || match self.family {
            Family::MergeSegments => self.expected_segments(),
            _ => self.expected_of(&self.states),
        };
        self.expected.get_or_init(make).as_ref().map_err(|why| Halt::Inconclusive(why.clone()))
    }

    /// Inputs in which only state `keep` holds something, and what must come out: that state, bit for bit.
    pub fn with_only(&self, keep: usize) -> (Tensors, ExpectedState) {
        let mut states = self.states.clone();
        for (index, state) in states.iter_mut().enumerate() {
            if index != keep {
                state.out.fill(self.nothing);
                state.lse.fill(f64::NEG_INFINITY);
            }
        }
        let kept = &self.states[keep];
        let dim = self.case.dim;
        let out = (0..kept.out.len())
            .map(|flat| match self.role(kept.lse[flat / dim]) {
                Role::Counts => Allowed::Exactly(kept.out[flat]),
                Role::Empty => Allowed::Exactly(0.0),
                Role::EmptyOrNan => Allowed::Exactly(0.0).or_nan(),
            })
            .collect::<Vec<_>>();
        let lse = kept.lse.iter().map(|lse| match self.role(*lse) {
            Role::Counts => Allowed::Exactly(*lse),
            Role::Empty => Allowed::NegativeInfinity,
            Role::EmptyOrNan => Allowed::NegativeInfinity.or_nan(),
        });
        let lse = lse.collect::<Vec<_>>();
        (self.tensors(&states), self.by_rank(&out, &lse))
    }

    /// The states in reverse order.
    pub fn reversed(&self) -> Tensors {
        let mut states = self.states.clone();
        states.reverse();
        self.tensors(&states)
    }

    /// Contiguous copies of the states.
    pub fn contiguous(&self) -> Tensors {
        let mut tensors = Tensors::new();
        for (name, tensor) in self.inputs.tensors.iter() {
            tensors.insert(name, tensor.to_contiguous());
        }
        tensors
    }

    /// All LSEs moved by `by`, and what must come out.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when no bound can be derived.
    pub fn shifted(&self, by: f64) -> Result<(Tensors, ExpectedState), Halt> {
        let mut states = self.states.clone();
        for lse in states.iter_mut().flat_map(|state| &mut state.lse) {
            *lse = f64::from((*lse + by) as f32);
        }
        let expected = self.expected_of(&states).map_err(Halt::Inconclusive)?;
        Ok((self.tensors(&states), expected))
    }

    /// The states with their LSEs in base 2, and what must come out, its LSE in that base.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when no bound can be derived.
    pub fn in_base_2(&self) -> Result<(Tensors, ExpectedState), Halt> {
        let base = LseBase::Two;
        let mut given = self.states.clone();
        given.iter_mut().flat_map(|state| &mut state.lse).for_each(|lse| {
            *lse = f64::from((*lse / base.ln()) as f32);
        });
        let mut natural = given.clone();
        natural.iter_mut().flat_map(|state| &mut state.lse).for_each(|lse| *lse *= base.ln());
        let mut expected = self.expected_of(&natural).map_err(Halt::Inconclusive)?;
        // the interval is as wide as in natural units, and the rounding of the result is relative to its size
        expected.lse.iter_mut().for_each(|lse| *lse = lse.scaled(1.0 / base.ln()));
        Ok((self.tensors(&given), expected))
    }

    /// State of a rank as f32 tensors `[T, Hg, D]` and `[T, Hg]`, for a two-state merge.
    pub fn state_of(&self, rank: usize) -> (Tensor, Tensor) {
        let state = &self.states[rank];
        self.state_tensors(state, Dtype::F32)
    }

    /// The state that a two-state merge returned.
    ///
    /// # Errors
    /// [`Halt::Broken`] when shape or dtype are wrong.
    pub fn state_from(&self, observed: &Observed) -> Result<(Tensor, Tensor), Halt> {
        let shape = [1, self.case.rows, self.heads(), self.case.dim];
        let out = observed.output("out", Dtype::F32, &shape)?.to_f32();
        let lse = observed.output("lse", Dtype::F32, &shape[..3])?.to_f32();
        Ok((
            Tensor::from_f32(Dtype::F32, &shape[1..], &out),
            Tensor::from_f32(Dtype::F32, &shape[1..3], &lse),
        ))
    }

    /// What folding f32 two-state merges over the ranks may give, `[T, Hg, D]` and `[T, Hg]`.
    ///
    /// Each step adds the bound of its own merge and carries the error of the state before it: that of its output by
    /// its weight, that of its LSE e by at most 2·expm1(e)·max|o|, since weights move by a factor of e^(±e).
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when no bound can be derived.
    pub fn expected_fold(&self) -> Result<ExpectedState, Halt> {
        let mut contract = self.contract.clone();
        contract.output = Dtype::F32;
        contract.merge = Merge::A2a;
        let u = f64::from(f32::EPSILON) / 2.0;
        let (rows, heads, v_dim) = (self.case.rows, self.heads(), self.case.dim);
        let mut state = self.states[0].clone();
        let mut out_error = vec![0.0; state.out.len()];
        let mut lse_error = vec![0.0f64; state.lse.len()];
        for next in &self.states[1..] {
            let (out, lse) =
                ([&state.out[..], &next.out[..]].concat(), [&state.lse[..], &next.lse[..]].concat());
            let given = GivenStates { rows, heads, v_dim, out: &out, lse: &lse };
            let step = certify_merge(&given, &contract, false)
                .map_err(|error| Halt::Inconclusive(error.to_string()))?;
            for index in 0..out_error.len() {
                let at = index / v_dim;
                let weight = (state.lse[at] - step.lse[at]).exp();
                let reach = state.out[index].abs().max(next.out[index].abs()) + out_error[index];
                out_error[index] = weight * out_error[index] * (1.0 + 4.0 * u)
                    + 2.0 * lse_error[at].exp_m1() * reach
                    + step.pre[index]
                    + u * (step.out[index].abs() + reach);
            }
            for at in 0..lse_error.len() {
                lse_error[at] += step.lse_bound[at] + u * step.lse[at].abs();
            }
            state = State { out: step.out, lse: step.lse };
        }
        let out = state.out.iter().zip(&out_error).map(|(out, error)| Allowed::near(*out, *error)).collect();
        let lse = state.lse.iter().zip(&lse_error).map(|(lse, error)| Allowed::near(*lse, *error)).collect();
        Ok(ExpectedState { out, lse })
    }

    /// Lines that say whose row and head an output carries, for the first broken elements.
    pub fn identify(&self, seen: &[f64], broken: &[usize]) -> Vec<String> {
        let Ok(expected) = self.expected() else { return Vec::new() };
        let dim = self.case.dim;
        let mut lines = Vec::new();
        let mut states: Vec<usize> = broken.iter().map(|flat| flat / dim).collect();
        states.dedup();
        for state in states.into_iter().take(4) {
            let matches =
                |other: &usize| (0..dim).all(|d| expected.out[other * dim + d].admits(seen[state * dim + d]));
            if let Some(other) = (0..expected.lse.len()).find(|other| *other != state && matches(other)) {
                lines.push(format!(
                    "{} carries what belongs to {}",
                    self.place_state(state),
                    self.place_state(other)
                ));
            }
        }
        lines
    }

    /// Heads of one given state.
    fn heads(&self) -> usize {
        match self.family {
            Family::MergePartials => self.case.heads_per_rank * self.case.world,
            _ => self.case.heads_per_rank,
        }
    }

    fn role(&self, lse: f64) -> Role {
        if lse.is_nan() && self.family == Family::MergeStates {
            // the published two-state merges turn +inf into −inf and let NaN through, or take it for −inf as well
            Role::EmptyOrNan
        } else if lse.is_finite() {
            Role::Counts
        } else {
            Role::Empty
        }
    }

    fn expected_of(&self, states: &[State]) -> Result<ExpectedState, String> {
        let (rows, heads, v_dim) = (self.case.rows, self.heads(), self.case.dim);
        let mut spoiled = vec![false; rows * heads];
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for state in states {
            out.extend_from_slice(&state.out);
            for (at, value) in state.lse.iter().enumerate() {
                spoiled[at] |= self.role(*value) == Role::EmptyOrNan;
                lse.push(if value.is_finite() { *value } else { f64::NEG_INFINITY });
            }
        }
        let given = GivenStates { rows, heads, v_dim, out: &out, lse: &lse };
        let certified = certify_merge(&given, &self.contract, false).map_err(|error| error.to_string())?;
        let u = f64::from(f32::EPSILON) / 2.0;
        let open = |at: usize, allowed: Allowed| if spoiled[at] { allowed.or_nan() } else { allowed };
        let out = (0..certified.out.len())
            .map(|flat| match certified.lse[flat / v_dim] {
                f64::NEG_INFINITY => open(flat / v_dim, Allowed::Exactly(0.0)),
                _ => open(
                    flat / v_dim,
                    allowed_out(certified.out[flat], certified.pre[flat], self.contract.output),
                ),
            })
            .collect::<Vec<_>>();
        let lse = (0..certified.lse.len())
            .map(|at| {
                let exact = certified.lse[at];
                open(at, Allowed::near(exact, certified.lse_bound[at] + u * exact.abs()))
            })
            .collect::<Vec<_>>();
        Ok(self.by_rank(&out, &lse))
    }

    /// Reorders `[T, Hg, D]` and `[T, Hg]` into the rank axis of the outputs: rank j keeps heads [jH, (j+1)H).
    fn by_rank(&self, out: &[Allowed], lse: &[Allowed]) -> ExpectedState {
        let shape = self.output_shape();
        let (heads, dim) = (self.heads(), shape[3]);
        let mut ordered = ExpectedState { out: Vec::new(), lse: Vec::new() };
        for rank in 0..shape[0] {
            for row in 0..shape[1] {
                for head in 0..shape[2] {
                    let at = row * heads + rank * shape[2] + head;
                    ordered.lse.push(lse[at]);
                    ordered.out.extend_from_slice(&out[at * dim..(at + 1) * dim]);
                }
            }
        }
        ordered
    }

    fn state_tensors(&self, state: &State, dtype: Dtype) -> (Tensor, Tensor) {
        let shape = [self.case.rows, self.heads(), self.case.dim];
        let narrow = |values: &[f64]| values.iter().map(|v| *v as f32).collect::<Vec<_>>();
        (
            Tensor::from_f32(dtype, &shape, &narrow(&state.out)),
            Tensor::from_f32(Dtype::F32, &shape[..2], &narrow(&state.lse)),
        )
    }

    /// Contiguous inputs that hold `states`.
    fn tensors(&self, states: &[State]) -> Tensors {
        if self.family == Family::MergeStates {
            let (prefix_out, prefix_lse) = self.state_tensors(&states[0], self.case.dtype);
            let (suffix_out, suffix_lse) = self.state_tensors(&states[1], self.case.dtype);
            return Tensors::new()
                .with("prefix_out", prefix_out)
                .with("prefix_lse", prefix_lse)
                .with("suffix_out", suffix_out)
                .with("suffix_lse", suffix_lse);
        }
        let narrow = |values: Vec<f64>| values.into_iter().map(|v| v as f32).collect::<Vec<_>>();
        let out = narrow(states.iter().flat_map(|s| s.out.clone()).collect());
        let lse = narrow(states.iter().flat_map(|s| s.lse.clone()).collect());
        let shape = [states.len(), self.case.rows, self.heads(), self.case.dim];
        Tensors::new()
            .with("partial_out", Tensor::from_f32(self.case.dtype, &shape, &out))
            .with("partial_lse", Tensor::from_f32(Dtype::F32, &shape[..3], &lse))
    }

    /// f32 bound of the segment merge: a sum of the active segments with base-2 exponentials, one division, one logarithm.
    /// (segments + 2·kexp + 6)·u bounds the relative error of each weighted summand and of the normaliser together.
    fn expected_segments(&self) -> Result<ExpectedState, String> {
        let read = |name: &str| self.inputs.tensors.get(name).map(Tensor::to_f64).map_err(|e| e.to_string());
        let (max, sum, acc, lens) =
            (read("segment_max")?, read("segment_sum")?, read("segment_acc")?, read("row_lens")?);
        let Operation::MergeSegments { tile_tokens } = self.operation else {
            return Err("not a segment merge".to_owned());
        };
        let (rows, heads, dim) = (self.case.rows, self.case.heads_per_rank, self.case.dim);
        let u = f64::from(f32::EPSILON) / 2.0;
        let mut expected = ExpectedState { out: Vec::new(), lse: Vec::new() };
        for state in 0..rows * heads {
            let (_, active) = active_segments(lens[state / heads] as usize, self.case.world, tile_tokens);
            let at = |segment: usize| segment * rows * heads + state;
            let segments: Vec<Segment> = (0..active)
                .map(|s| Segment {
                    max: max[at(s)],
                    sum: sum[at(s)],
                    acc: acc[at(s) * dim..(at(s) + 1) * dim].to_vec(),
                })
                .collect();
            if active == 0 {
                expected.out.extend(std::iter::repeat_n(Allowed::Exactly(0.0), dim));
                expected.lse.push(Allowed::NegativeInfinity);
                continue;
            }
            let (out, lse) = merge_segments(&segments);
            let most = segments.iter().map(|s| s.max).fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = segments.iter().map(|s| s.sum * (s.max - most).exp2()).sum();
            let relative = (active as f64 + 2.0 * self.contract.kexp + 6.0) * u;
            for d in 0..dim {
                let reach: f64 = segments.iter().map(|s| (s.acc[d] * (s.max - most).exp2()).abs()).sum();
                expected.out.push(Allowed::near(out[d], relative * (reach / total + out[d].abs())));
            }
            expected.lse.push(Allowed::near(lse, relative + 4.0 * u * (lse.abs() + most.abs() + 1.0)));
        }
        Ok(expected)
    }
}

/// What a given LSE says of its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// It holds something.
    Counts,
    /// It holds nothing.
    Empty,
    /// It holds nothing, or spoils what it is merged with.
    EmptyOrNan,
}

fn operation(family: Family) -> Operation {
    match family {
        Family::MergeStates => Operation::MergeStates,
        Family::MergeSegments => Operation::MergeSegments { tile_tokens: MergeCase::TILE_TOKENS },
        Family::PackLse => Operation::PackLse,
        _ => Operation::MergePartials { lse_base: LseBase::E },
    }
}

#[cfg(test)]
mod tests;
