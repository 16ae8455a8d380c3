//! Material of a layer of experts: the inputs, who has which row, and what the oracle allows each token.

use std::sync::OnceLock;

use shardcheck_cases::{ExpertWeights, MoeCase};
use shardcheck_engine::{
    Activation, Configuration, ExpertSharding, MoeExchange, MoePlan, Operation, OperationKind, Profile,
    SharedExpert, Tensor, Tensors,
};
use shardcheck_formats::{Contract, Dtype};
use shardcheck_references::bound::interval;
use shardcheck_references::moe::{Addend, Gating, Mlp, Reduction, Term, combine, mlp};

use crate::judge::Allowed;
use crate::routing::Routing;

/// Material of one layer of experts.
pub struct MoeMaterial {
    /// The case.
    pub case: MoeCase,
    /// What the session is opened with.
    pub configuration: Configuration,
    /// The step.
    pub operation: Operation,
    /// Inputs of the step.
    pub inputs: Tensors,
    /// The oracle of the router.
    pub routing: Routing,
    contract: Contract,
    seed: u64,
    expected: OnceLock<Vec<Option<Vec<TokenOutput>>>>,
}

/// What a token may come out as, given its experts.
#[derive(Debug, Clone)]
pub struct TokenOutput {
    /// Its experts.
    pub experts: Vec<usize>,
    /// `[h]`.
    pub allowed: Vec<Allowed>,
}

impl MoeMaterial {
    /// Makes the material for an engine of that profile.
    ///
    /// # Errors
    /// That its contract is missing.
    pub fn new(case: &MoeCase, seed: u64, profile: &Profile) -> Result<Self, String> {
        let contract =
            profile.operation(OperationKind::Moe).and_then(|operation| operation.contract.as_ref());
        let contract = contract.ok_or("the engine declares no contract for moe")?.clone();
        Ok(Self::with(case.clone(), seed, contract))
    }

    fn with(case: MoeCase, seed: u64, contract: Contract) -> Self {
        let inputs = case.tensors(seed);
        let routing = Routing::new(&case.router, &inputs, contract.kexp);
        let (configuration, operation) = (case.configuration(), case.operation());
        Self { case, configuration, operation, inputs, routing, contract, seed, expected: OnceLock::new() }
    }

    /// The same tokens and experts on other ranks.
    pub fn on(&self, plan: MoePlan, dp_tokens: Vec<usize>) -> Self {
        Self::with(MoeCase { plan, dp_tokens, ..self.case.clone() }, self.seed, self.contract.clone())
    }

    /// The same tokens and experts on one rank.
    pub fn on_one_rank(&self) -> Self {
        let plan = MoePlan {
            dp: 1,
            pcp: 1,
            tp: 1,
            exchange: MoeExchange::Local,
            sharding: ExpertSharding::Whole,
            ..self.case.plan
        };
        self.on(plan, vec![self.case.tokens()])
    }

    /// Element type of the output.
    pub fn output_dtype(&self) -> Dtype {
        self.contract.output
    }

    /// Data-parallel group and rank of prefill context parallelism of a rank.
    pub fn place(&self, rank: usize) -> (usize, usize) {
        let MoePlan { pcp, tp, .. } = self.case.plan;
        (rank / (pcp * tp), rank / tp % pcp)
    }

    /// Tokens that a rank has, in the order of its rows.
    pub fn rows_of(&self, rank: usize) -> Vec<usize> {
        let (group, column) = self.place(rank);
        let first: usize = self.case.dp_tokens[..group].iter().sum();
        let splits = matches!(self.case.plan.exchange, MoeExchange::Local | MoeExchange::Gathered);
        (0..self.case.dp_tokens[group])
            .filter(|row| !splits || row % self.case.plan.pcp == column)
            .map(|row| first + row)
            .collect()
    }

    /// Rows R of the fullest rank.
    pub fn rows(&self) -> usize {
        (0..self.case.plan.ranks()).map(|rank| self.rows_of(rank).len()).max().unwrap_or(0)
    }

    /// Rows that a rank enters the exchange with, padding included: as many as the fullest rank that takes part in it.
    pub fn slice_rows(&self, rank: usize) -> usize {
        let MoePlan { tp, exchange, .. } = self.case.plan;
        let fullest =
            |ranks: &mut dyn Iterator<Item = usize>| ranks.map(|r| self.rows_of(r).len()).max().unwrap_or(0);
        match exchange {
            MoeExchange::Local => {
                let (group, _) = self.place(rank);
                fullest(&mut (0..self.case.plan.ranks()).filter(|other| self.place(*other).0 == group))
            }
            MoeExchange::Gathered | MoeExchange::Redundant => self.rows(),
            MoeExchange::Sliced => self.rows().div_ceil(tp),
        }
    }

    /// Ranks that share the experts of a rank's rows, and tokens that reach them.
    pub fn pool(&self, rank: usize) -> (Vec<usize>, Vec<usize>) {
        if self.case.plan.exchange == MoeExchange::Local {
            let tp = self.case.plan.tp;
            let first = rank / tp * tp;
            return ((first..first + tp).collect(), self.rows_of(rank));
        }
        ((0..self.case.plan.ranks()).collect(), (0..self.case.tokens()).collect())
    }

    /// Name of an element of `out`, by its flat index.
    pub fn place_words(&self, flat: usize) -> String {
        let (row, dim) = (flat / self.case.hidden, flat % self.case.hidden);
        let (rank, row) = (row / self.rows().max(1), row % self.rows().max(1));
        let (group, column) = self.place(rank);
        let token =
            self.rows_of(rank).get(row).map_or("no token".to_owned(), |token| format!("token {token}"));
        let tp = rank % self.case.plan.tp;
        format!("rank {rank} (dp {group}, pcp {column}, tp {tp}), row {row} ({token}), dim {dim}")
    }

    /// What each token may come out as, one entry for each set of experts that it may have; `None` where those are too many.
    pub fn expected(&self) -> &[Option<Vec<TokenOutput>>] {
        self.expected.get_or_init(|| {
            let values = |name: &str| self.inputs.find(name).map(Tensor::to_f32);
            let hidden = values("hidden").unwrap_or_default();
            let weights = ["w_gate", "w_up", "w_down", "shared_gate", "shared_up", "shared_down"].map(values);
            (0..self.case.tokens())
                .map(|token| {
                    let x = &hidden[token * self.case.hidden..(token + 1) * self.case.hidden];
                    self.token(token, x, &weights)
                })
                .collect()
        })
    }

    fn gating(&self) -> Gating {
        gating(self.case.plan.activation)
    }

    fn token(&self, token: usize, x: &[f32], weights: &[Option<Vec<f32>>; 6]) -> Option<Vec<TokenOutput>> {
        let size = self.case.hidden * self.case.inner;
        let [gate, up, down, shared_gate, shared_up, shared_down] = weights;
        let shared = (self.case.plan.shared != SharedExpert::None).then(|| {
            let (up, down) =
                (shared_up.as_deref().unwrap_or_default(), shared_down.as_deref().unwrap_or_default());
            mlp(&Mlp { gate: shared_gate.as_deref(), up, down, gating: self.gating() }, x, &self.contract)
        });
        let own = |matrix: &'_ Vec<f32>, expert: usize| matrix[expert * size..(expert + 1) * size].to_vec();
        let term = |expert: usize| -> Term {
            let gate = gate.as_ref().map(|gate| own(gate, expert));
            let (up, down) =
                (up.as_ref().map(|up| own(up, expert)), down.as_ref().map(|down| own(down, expert)));
            let (up, down) = (up.unwrap_or_default(), down.unwrap_or_default());
            mlp(
                &Mlp { gate: gate.as_deref(), up: &up, down: &down, gating: self.gating() },
                x,
                &self.contract,
            )
        };
        let outputs = self.routing.sets(token)?.into_iter().map(|experts| {
            let terms: Vec<Term> = experts.iter().map(|expert| term(*expert)).collect();
            let weights = self.routing.weights(token, &experts);
            let mut addends: Vec<Addend<'_>> = terms
                .iter()
                .enumerate()
                .map(|(index, term)| Addend {
                    weight: weights.value[index],
                    weight_error: weights.error[index],
                    term,
                })
                .collect();
            addends.extend(shared.iter().map(|term| Addend { weight: 1.0, weight_error: 0.0, term }));
            let reduction = Reduction { ranks: self.case.plan.expert_ranks() };
            let (out, bound) = combine(&addends, self.case.hidden, reduction, &self.contract);
            let allowed = out.iter().zip(&bound).map(|(out, bound)| {
                let (low, high) = interval(*out, *bound, self.contract.output);
                Allowed::Between { expected: *out, low, high }
            });
            TokenOutput { experts, allowed: allowed.collect() }
        });
        Some(outputs.collect())
    }

    /// Whether the output spells who computed what, and each column of it exactly.
    pub fn is_exact(&self, column: usize) -> bool {
        let shares = self.case.plan.dp * self.case.plan.pcp;
        let is_shared = column == MoeCase::column(self.case.experts);
        self.case.weights == ExpertWeights::Tagged
            && (!is_shared || self.case.plan.shared != SharedExpert::Replicated || shares.is_power_of_two())
    }
}

/// How the references name what gate and up-projection are multiplied as.
pub fn gating(activation: Activation) -> Gating {
    match activation {
        Activation::SituGated => Gating::Situ,
        Activation::SiluGated | Activation::Linear => Gating::Silu,
    }
}

#[cfg(test)]
mod tests {
    use shardcheck_cases::{Body, Case, Family, SuiteName, suite};
    use shardcheck_cpu::{CpuEngine, faults};
    use shardcheck_engine::Engine;

    use crate::finding::Finding;
    use crate::laboratory::Laboratory;
    use crate::material::Material;
    use crate::properties;

    fn cases(name: SuiteName, seed: u64) -> Vec<Case> {
        let of_experts = |case: &Case| matches!(case.family, Family::Route | Family::Moe);
        suite(name, seed).into_iter().filter(of_experts).collect()
    }

    /// Properties of experts that fail on the case, and those that say nothing.
    fn findings(engine: &dyn Engine, case: &Case) -> (Vec<String>, usize) {
        let material = Material::of(case, engine.profile()).unwrap();
        let laboratory = Laboratory::new(case, engine, &material);
        let (mut failed, mut compared) = (Vec::new(), 0);
        for property in properties::of(case) {
            match property.judge(&laboratory) {
                Finding::Holds(measured) => compared += measured.compared as usize,
                finding if finding.status().is_failure() => failed.push(property.id.to_owned()),
                other => panic!("{} says nothing of {}: {other:?}", property.id, case.id()),
            }
        }
        (failed, compared)
    }

    #[test]
    fn the_embedded_engine_routes_every_token_of_the_gate_and_of_the_nightly_suite() {
        let engine = shardcheck_cpu::engine();
        for (name, seed) in [(SuiteName::Gate, 1), (SuiteName::Gate, 2), (SuiteName::Nightly, 6)] {
            let cases = cases(name, seed);
            assert!(cases.len() >= 88, "{name}: {}", cases.len());
            let mut total = 0;
            for case in &cases {
                let (failed, compared) = findings(&engine, case);
                assert_eq!(failed, Vec::<String>::new(), "{}", case.id());
                total += compared;
            }
            assert!(total > 50_000, "{total}");
        }
    }

    #[test]
    fn every_fault_of_experts_fails_every_property_that_it_names_on_the_gate() {
        let cases = cases(SuiteName::Gate, 1);
        let of_experts = |id: &str| id.starts_with("moe.") || id.starts_with("route.");
        let mut tried = 0;
        let mut unseen = Vec::new();
        for fault in faults().iter().filter(|fault| of_experts(fault.killed_by[0])) {
            let engine = CpuEngine::with_fault(fault);
            let mut left: Vec<&str> = fault.killed_by.to_vec();
            for case in &cases {
                if left.is_empty() {
                    break;
                }
                let (failed, _) = findings(&engine, case);
                left.retain(|property| !failed.iter().any(|id| id == property));
            }
            if !left.is_empty() {
                unseen.push(format!("{} is not seen by {}", fault.name, left.join(", ")));
            }
            tried += 1;
        }
        assert!(unseen.is_empty(), "{}", unseen.join("\n"));
        assert!(tried >= 40, "{tried}");
    }

    #[test]
    fn nine_tokens_over_four_ranks_are_padded_to_slices_of_three_and_more_where_another_group_has_more() {
        let slices = |tokens: &str, dp: usize| {
            let id = format!(
                "moe/sigmoid.scores.e8.k2.g1.kept1.zero.raw.x1/sliced.whole.linear.dp{dp}.pcp1.tp4.none/{tokens}.h8.i8.j0.identity.random/1"
            );
            let Body::Moe(moe) = id.parse::<Case>().unwrap().body else { panic!("{id}") };
            let material = super::MoeMaterial::new(&moe, 1, shardcheck_cpu::engine().profile()).unwrap();
            (0..moe.plan.ranks()).map(|rank| material.slice_rows(rank)).collect::<Vec<_>>()
        };
        assert_eq!(slices("n9", 1), [3; 4]);
        assert_eq!(slices("n9+14", 2), [4; 8]);
        assert_eq!(slices("n0", 1), [0; 4]);
    }
}
