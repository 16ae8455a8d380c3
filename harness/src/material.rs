//! Material of a case: its inputs, and what the oracle says of them. Made once, shared by every engine the case is tried on.

mod contracts;
mod given;
mod kinds;
mod words;

use std::collections::HashSet;
use std::sync::OnceLock;

use shardcheck_cases::{AttentionCase, Family, Inputs, Request, cache_code, generate};
use shardcheck_engine::{
    Configuration, Conventions, Mask, Operation, OperationKind, Profile, Reply, Tensors,
};
use shardcheck_formats::{Contract, Dtype};
use shardcheck_references::layout::Layout;
use shardcheck_references::visibility::Visible;

use crate::event::Coverage;
use crate::expected::{self, Expected, ExpectedState};
use crate::laboratory::{Halt, Observed};

pub use kinds::Material;

use contracts::{asked_kind, contract_of};
pub(crate) use contracts::{contract_for, operation_of};
use given::check_selected;
pub(crate) use given::negate_future;

/// Material of an attention case.
pub struct AttentionMaterial {
    /// The case.
    pub case: AttentionCase,
    /// Family: which step is asked for.
    pub family: Family,
    /// The published layout for the case's sizes.
    pub layout: Layout,
    /// `(request, row within the request)` of each row; `None` for padding.
    pub rows: Vec<Option<(usize, usize)>>,
    /// Conventions of the engine's operation.
    pub conventions: Conventions,
    pub(crate) inputs: Inputs,
    pub(crate) held_keys: Vec<Vec<f32>>,
    pub(crate) held_values: Vec<Vec<f32>>,
    seed: u64,
    profile: Profile,
    expected: OnceLock<Result<Expected, Halt>>,
    context: OnceLock<Result<ExpectedState, Halt>>,
}

impl AttentionMaterial {
    fn new(family: Family, case: AttentionCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        let inputs = generate(family, &case, seed);
        Self::over(family, case, seed, profile, inputs)
    }

    /// Material of a case over inputs that were made elsewhere.
    ///
    /// # Errors
    /// Why the case can't be judged against an engine of that profile.
    pub(crate) fn over(
        family: Family,
        case: AttentionCase,
        seed: u64,
        profile: &Profile,
        inputs: Inputs,
    ) -> Result<Self, String> {
        let configuration = &case.configuration;
        let layout = Layout::new(configuration.dcp, configuration.interleave, configuration.block_size)
            .map_err(|error| error.to_string())?;
        let kind = asked_kind(family, &case.workload);
        let writes = profile.operation(OperationKind::WriteKv).or(profile.operation(kind));
        let conventions = match profile.operation(kind).or(writes) {
            Some(operation) => operation.conventions.clone(),
            None => return Err(format!("the engine does not declare {kind}")),
        };
        let cast = writes.map_or(&conventions, |operation| &operation.conventions);
        check_selected(&inputs)?;
        let held_keys = inputs.held_keys(cast);
        let held_values = inputs.held_values(cast);
        let rows = case.workload.rows();
        Ok(Self {
            rows,
            family,
            layout,
            conventions,
            held_keys,
            held_values,
            inputs,
            seed,
            profile: profile.clone(),
            case,
            expected: OnceLock::new(),
            context: OnceLock::new(),
        })
    }

    /// The same data for a changed case; `change` must not touch what the data depend on.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when the changed case contradicts itself.
    pub fn variant(&self, case: AttentionCase) -> Result<Self, Halt> {
        case.configuration.check().map_err(|error| Halt::Inconclusive(error.to_string()))?;
        if case.workload != self.case.workload {
            return Self::new(self.family, case, self.seed, &self.profile).map_err(Halt::Inconclusive);
        }
        // values of the token-code probe spell a place in the layout, so the data must not be drawn again for another one
        let inputs = self.inputs.relaid(&case.configuration, self.seed);
        Self::over(self.family, case, self.seed, &self.profile, inputs).map_err(Halt::Inconclusive)
    }

    /// The case with `request` alone in its batch, with the same tokens.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when that case contradicts itself.
    pub fn alone(&self, request: usize) -> Result<Self, Halt> {
        let mut case = self.case.clone();
        case.workload.requests = vec![self.case.workload.requests[request]];
        case.workload.padded_rows = 0;
        let whole = &self.inputs;
        let first = self.case.workload.query_start_loc()[request] as usize;
        let row = self.heads() * self.configuration().attention.qk_dim();
        let rows = first * row..(first + case.workload.query_rows()) * row;
        let inputs = Inputs {
            family: self.family,
            case: case.clone(),
            query: whole.query[rows].to_vec(),
            keys: vec![whole.keys[request].clone()],
            values: vec![whole.values[request].clone()],
            stale_keys: vec![whole.stale_keys[request].clone()],
            stale_values: vec![whole.stale_values[request].clone()],
            w_uv: whole.w_uv.clone(),
            sinks: whole.sinks.clone(),
            selected: whole.selected.iter().skip(first).take(case.workload.query_rows()).cloned().collect(),
            block_table: self.block_table(request).to_vec(),
            width: whole.width,
        };
        Self::over(self.family, case, self.seed, &self.profile, inputs).map_err(Halt::Inconclusive)
    }

    /// The same case in which every token behind the first new row of its request is another one.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when that case contradicts itself.
    pub fn with_other_future(&self) -> Result<Self, Halt> {
        let mut inputs = self.inputs.clone();
        negate_future(&mut inputs);
        Self::over(self.family, self.case.clone(), self.seed, &self.profile, inputs)
            .map_err(Halt::Inconclusive)
    }

    /// The same case with keys and values multiplied by `factor`, a power of two.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when that case contradicts itself.
    pub fn magnified(&self, factor: f32) -> Result<Self, Halt> {
        let mut inputs = self.inputs.clone();
        for tokens in [&mut inputs.keys, &mut inputs.values] {
            tokens.iter_mut().flatten().for_each(|value| *value *= factor);
        }
        Self::over(self.family, self.case.clone(), self.seed, &self.profile, inputs)
            .map_err(Halt::Inconclusive)
    }

    /// The same case with queries of zeros, in padding rows too: all logits are equal.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when that case contradicts itself.
    pub fn with_equal_logits(&self) -> Result<Self, Halt> {
        let mut inputs = self.inputs.clone();
        inputs.query.fill(0.0);
        self.with_inputs(inputs)
    }

    /// The same case with other inputs.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when the case contradicts itself.
    pub(crate) fn with_inputs(&self, inputs: Inputs) -> Result<Self, Halt> {
        Self::over(self.family, self.case.clone(), self.seed, &self.profile, inputs)
            .map_err(Halt::Inconclusive)
    }

    /// What the session is opened with.
    pub fn configuration(&self) -> &Configuration {
        &self.case.configuration
    }

    /// The step that the case is about.
    pub fn operation(&self) -> Operation {
        match self.family {
            Family::Draft => Operation::Attend { mask: Mask::Bidirectional },
            Family::Context => {
                Operation::AttendContext { chunk_budget_tokens: self.case.workload.chunk_budget_tokens }
            }
            Family::Decode | Family::Verify => Operation::Attend { mask: Mask::Causal },
            Family::AttendSinks => Operation::AttendSinks,
            _ => self.case.selected.map_or(Operation::Layout, |tokens| tokens.operation()),
        }
    }

    /// Inputs of the write that precedes the step: all tokens for attention over a cache, the context alone for the
    /// context family, whose new tokens come with the step.
    pub fn write_inputs(&self) -> Tensors {
        match self.family {
            family if family.brings_new_keys() => self.inputs.write_context(),
            _ => self.inputs.write_kv(),
        }
    }

    /// Inputs of a write that comes before all others: tokens that nothing may read, as rejected drafts leave them.
    pub fn stale_inputs(&self) -> Option<Tensors> {
        self.inputs.write_stale()
    }

    /// Inputs of the step.
    pub fn step_inputs(&self) -> Tensors {
        match self.family {
            family if family.brings_new_keys() => self.inputs.attend_context(),
            Family::Decode | Family::Verify | Family::Draft => self.inputs.attend(),
            Family::AttendSelected => self.inputs.attend_selected(),
            Family::AttendSinks => self.inputs.attend_sinks(),
            _ => self.inputs.layout(),
        }
    }

    /// Caches laid out by the harness, as inputs of a `LoadCache` step.
    pub fn laid_out_caches(&self) -> Tensors {
        let mut tensors = Tensors::new();
        for name in self.cache_names() {
            let shape = self.cache_shape(name);
            let width: usize = shape[3..].iter().product();
            let slots = shape[1] * shape[2];
            let dtype = self.configuration().kv_dtype;
            let nan = shardcheck_formats::encode(dtype, f64::NAN, shardcheck_formats::Overflow::NonFinite);
            let mut codes = vec![nan; shape.iter().product()];
            for (request, spec) in self.case.workload.requests.iter().enumerate() {
                let stored = self.cache_codes(name, request);
                for position in 0..stored.len() / width {
                    if position >= self.stored_tokens(*spec) + self.stale_tokens(request) {
                        break;
                    }
                    for rank in 0..self.ranks() {
                        let slot = self.layout.slot(position, self.dcp_rank(rank), self.block_table(request));
                        let Ok(slot) = usize::try_from(slot) else { continue };
                        let to = (rank * slots + slot) * width;
                        codes[to..to + width]
                            .copy_from_slice(&stored[position * width..(position + 1) * width]);
                    }
                }
            }
            tensors.insert(name, shardcheck_engine::Tensor::from_codes(dtype, &shape, &codes));
        }
        tensors
    }

    /// Whether `caches` hold every stored token where the published layout puts it.
    pub(crate) fn caches_are_right(&self, caches: &Reply) -> bool {
        let wanted = self.laid_out_caches();
        self.cache_names().into_iter().all(|name| {
            let (Ok(wanted), Some(seen)) = (wanted.get(name), caches.outputs.find(name)) else {
                return false;
            };
            if seen.shape() != wanted.shape() || seen.dtype() != wanted.dtype() {
                return false;
            }
            let width: usize = wanted.shape()[3..].iter().product();
            let (wanted, seen) = (wanted.to_codes(), seen.to_codes());
            let slots = self.configuration().blocks * self.configuration().block_size;
            (0..self.ranks()).all(|rank| {
                self.owned_slots(rank).into_iter().all(|slot| {
                    let range = (rank * slots + slot) * width..(rank * slots + slot + 1) * width;
                    wanted[range.clone()] == seen[range]
                })
            })
        })
    }

    fn cache_names(&self) -> Vec<&'static str> {
        if self.configuration().attention.is_mla() {
            vec!["key_cache"]
        } else {
            vec!["key_cache", "value_cache"]
        }
    }

    /// Shape of a cache: `[ranks, blocks, B, K, D]`.
    pub fn cache_shape(&self, name: &str) -> Vec<usize> {
        let configuration = self.configuration();
        let attention = configuration.attention;
        let width = if name == "key_cache" { attention.qk_dim() } else { attention.value_dim() };
        vec![self.ranks(), configuration.blocks, configuration.block_size, attention.kv_heads(), width]
    }

    /// Codes that the cache holds for the tokens of a request and for the stale tokens behind them, `[tokens, K, D]`.
    pub fn cache_codes(&self, name: &str, request: usize) -> Vec<u64> {
        let conventions = self.profile.operation(OperationKind::WriteKv).map(|o| &o.conventions);
        let conventions = conventions.unwrap_or(&self.conventions);
        let inputs = &self.inputs;
        let (fresh, stale) = if name == "key_cache" {
            (&inputs.keys[request], &inputs.stale_keys[request])
        } else {
            (&inputs.values[request], &inputs.stale_values[request])
        };
        let width: usize = self.cache_shape(name)[3..].iter().product();
        let stored = self.stored_tokens(self.case.workload.requests[request]) * width;
        let tokens = fresh[..stored].iter().chain(stale);
        tokens.map(|value| cache_code(self.configuration(), conventions, *value)).collect()
    }

    /// Tokens of a request that were written behind its own before everything else.
    fn stale_tokens(&self, request: usize) -> usize {
        let attention = self.configuration().attention;
        self.inputs.stale_keys[request].len() / (attention.kv_heads() * attention.qk_dim())
    }

    /// Sinks of the heads of a group `[Hg]`; `None` where heads have none.
    pub fn sinks(&self, group: usize) -> Option<Vec<f64>> {
        let heads = self.configuration().gathered_heads();
        let of_group = self.inputs.sinks.get(group * heads..(group + 1) * heads)?;
        Some(of_group.iter().map(|sink| f64::from(*sink)).collect())
    }

    /// The same case with other sinks, by head.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when that case contradicts itself.
    pub fn with_sinks(&self, sink: impl Fn(usize) -> f32) -> Result<Self, Halt> {
        let mut inputs = self.inputs.clone();
        inputs.sinks.iter_mut().enumerate().for_each(|(head, value)| *value = sink(head));
        self.with_inputs(inputs)
    }

    /// Where the engine attends to new tokens beside the ranks' shares: position of a request's first.
    pub fn beside_from(&self, request: usize) -> Option<usize> {
        let beside = self.family == Family::Verify && !self.conventions.new_tokens.are_on_ranks();
        let request = self.case.workload.requests[request];
        beside.then(|| request.seq_len() - request.query_tokens)
    }

    /// Tokens of a request that lie in the cache before the step.
    fn stored_tokens(&self, request: Request) -> usize {
        if self.family.brings_new_keys() { request.context_tokens } else { request.seq_len() }
    }

    /// Requests and positions of the tokens of [`Self::write_inputs`], in order; request −1 is padding.
    pub fn written_tokens(&self) -> (Vec<i64>, Vec<i64>) {
        let inputs = self.write_inputs();
        let read = |name: &str| inputs.get(name).map(shardcheck_engine::Tensor::to_i64).unwrap_or_default();
        (read("requests"), read("positions"))
    }

    /// Slots of a rank that hold a token of the batch.
    pub fn owned_slots(&self, rank: usize) -> HashSet<usize> {
        let mut owned = HashSet::new();
        for (index, request) in self.case.workload.requests.iter().enumerate() {
            for position in 0..self.stored_tokens(*request) {
                let slot = self.layout.slot(position, self.dcp_rank(rank), self.block_table(index));
                owned.extend(usize::try_from(slot).ok());
            }
        }
        owned
    }

    /// Block table of a request, unused entries included.
    pub fn block_table(&self, request: usize) -> &[i32] {
        let width = self.inputs.width;
        &self.inputs.block_table[request * width..(request + 1) * width]
    }

    /// Block-table entries that a request needs.
    pub fn used_blocks(&self, request: usize) -> &[i32] {
        let needed = self.layout.blocks_needed(self.case.workload.requests[request].seq_len());
        &self.block_table(request)[..needed]
    }

    /// `(request, position)` of a token in the flattened batch.
    pub fn token_at(&self, flat: usize) -> (usize, usize) {
        let mut rest = flat;
        for (index, request) in self.case.workload.requests.iter().enumerate() {
            if rest < request.seq_len() {
                return (index, rest);
            }
            rest -= request.seq_len();
        }
        (self.case.workload.requests.len(), rest)
    }

    /// Query of a row and head of all ranks, `[Dk]`.
    pub fn query(&self, row: usize, head: usize) -> &[f32] {
        let dim = self.configuration().attention.qk_dim();
        let base = (row * self.heads() + head) * dim;
        &self.inputs.query[base..base + dim]
    }

    /// Keys of a request as the cache holds them, `[L, K, Dk]`.
    pub fn held_keys(&self, request: usize) -> &[f32] {
        &self.held_keys[request]
    }

    /// Whether the step applies an up-projection.
    pub fn is_projected(&self) -> bool {
        self.inputs.w_uv.is_some() && !self.family.brings_new_keys()
    }

    /// Up-projection of a group's heads, `[Hg, Dv, V]`, where the step applies one.
    pub fn up_projection(&self, group: usize) -> Option<&[f32]> {
        let configuration = self.configuration();
        let attention = configuration.attention;
        let size = configuration.gathered_heads() * attention.value_dim() * attention.v_head_dim();
        let weights = self.inputs.w_uv.as_ref().filter(|_| self.is_projected())?;
        Some(&weights[group * size..(group + 1) * size])
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.configuration().tp
    }

    /// Query heads of all ranks.
    pub fn heads(&self) -> usize {
        self.configuration().total_heads()
    }

    /// Rank within its decode-context-parallel group.
    pub fn dcp_rank(&self, rank: usize) -> usize {
        rank % self.configuration().dcp
    }

    /// Shape of `out`: `[ranks, T, H, D]`.
    pub fn output_shape(&self) -> Vec<usize> {
        let configuration = self.configuration();
        let attention = configuration.attention;
        let dim = if self.is_projected() { attention.v_head_dim() } else { attention.value_dim() };
        vec![self.ranks(), self.rows.len(), configuration.heads_per_rank, dim]
    }

    /// Width that the exchange carries: read off the reply's partials, the cache's value width without them.
    pub fn exchanged_dim(&self, observed: &Observed) -> usize {
        let seen = observed.reply.outputs.find("partial_out").and_then(|t| t.shape().last().copied());
        seen.unwrap_or(self.configuration().attention.value_dim())
    }

    /// Tokens that a row attends to in all: 0 for padding.
    pub fn visible_tokens(&self, row: usize) -> usize {
        if let Some(own) = self.inputs.selected.get(row) {
            return own.len();
        }
        let Some((request, t)) = self.rows[row] else { return 0 };
        let spec = self.case.workload.requests[request];
        match self.family {
            Family::Draft => spec.seq_len(),
            _ => self.layout.row_boundary(spec.seq_len(), spec.query_tokens, t),
        }
    }

    /// The tokens that a row attends to.
    pub fn visible(&self, row: usize) -> Visible {
        match self.inputs.selected.get(row) {
            // that they are different was checked when the material was made
            Some(own) => Visible::set(own.clone()).unwrap_or(Visible::Prefix(0)),
            None => Visible::Prefix(self.visible_tokens(row)),
        }
    }

    /// Tokens that a row attends to on a rank of its group.
    pub fn local_visible_tokens(&self, row: usize, dcp_rank: usize) -> usize {
        if let Some(own) = self.inputs.selected.get(row) {
            return own.iter().filter(|position| self.layout.owner(**position) == dcp_rank).count();
        }
        self.layout.local_len(self.visible_tokens(row), dcp_rank)
    }

    /// What the oracle allows.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when no bound can be derived, [`Halt::Unsupported`] when the engine does not declare the step.
    pub fn expected(&self) -> Result<&Expected, Halt> {
        let make = || {
            let contract = self.contract()?;
            expected::attention(self, &contract).map_err(Halt::Inconclusive)
        };
        self.expected.get_or_init(make).as_ref().map_err(Clone::clone)
    }

    /// Changes what the oracle allows, to prove that a wrong bound is noticed.
    ///
    /// # Errors
    /// [`Halt::Inconclusive`] when no bound can be derived.
    pub(crate) fn change_expected(&mut self, change: impl FnOnce(&mut Expected)) -> Result<(), Halt> {
        let mut expected = self.expected()?.clone();
        change(&mut expected);
        self.expected = OnceLock::from(Ok(expected));
        Ok(())
    }

    /// What the oracle allows for the state of the cached context alone.
    ///
    /// # Errors
    /// As those of [`Self::expected`].
    pub fn expected_context(&self) -> Result<&ExpectedState, Halt> {
        let make = || {
            let contract = self.contract()?;
            expected::context_state(self, &contract).map_err(Halt::Inconclusive)
        };
        self.context.get_or_init(make).as_ref().map_err(Clone::clone)
    }

    /// The rounding contract of the case's step, its merge being that of the configured backend.
    ///
    /// # Errors
    /// [`Halt::Unsupported`] when the engine does not declare the step, [`Halt::Inconclusive`] when it declares no contract for it.
    pub(crate) fn contract(&self) -> Result<Contract, Halt> {
        let kind = asked_kind(self.family, &self.case.workload);
        let dtype = self.configuration().dtype;
        match self.profile.operation(kind) {
            None => return Err(Halt::Unsupported(format!("the engine does not declare {kind}"))),
            Some(operation) if !operation.takes(dtype) => {
                return Err(Halt::Unsupported(format!("the engine does not declare {kind} in {dtype}")));
            }
            Some(_) => {}
        }
        contract_of(&self.profile, kind, dtype, self.configuration().comm_backend)
            .ok_or_else(|| Halt::Inconclusive(format!("the engine declares no rounding contract for {kind}")))
    }

    /// Element type of `out`: what the contract says, that of activations where there is none.
    pub fn output_dtype(&self) -> Dtype {
        self.contract().map_or(self.configuration().dtype, |contract| contract.output)
    }

    /// What the case reaches, for the line against vacuity.
    pub(crate) fn coverage(&self) -> Coverage {
        let rows = self.rows.iter().flatten();
        let masked = |(request, t): &&(usize, usize)| {
            self.family == Family::Verify && *t + 1 < self.case.workload.requests[*request].query_tokens
        };
        let world = self.configuration().dcp;
        let empty = |rank: usize| {
            self.case
                .workload
                .requests
                .iter()
                .filter(|r| self.layout.local_len(r.seq_len(), rank) == 0)
                .count()
        };
        Coverage {
            rows: rows.clone().count() as u64,
            masked_rows: rows.filter(masked).count() as u64,
            shards: (world * self.case.workload.requests.len()) as u64,
            empty_shards: (0..world).map(empty).sum::<usize>() as u64,
            real_heads: self.heads() >= 32 && !matches!(self.family, Family::Layout | Family::Write),
        }
    }
}

#[cfg(test)]
mod tests;
