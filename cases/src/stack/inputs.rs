//! Inputs of a case of a stack: weights, tokens, and the tensors of each step.

use shardcheck_engine::{Tensor, Tensors};
use shardcheck_formats::{Dtype, round_bf16};

use super::script::Script;
use super::{StackCase, StateTurn, THETA, state_turns, wired};
use crate::stream::Stream;
use crate::{Inputs, SequenceCase, Turn};

/// Deviation of the scores: some tokens carry most of the weight, so that a wrong one moves much.
const SCORE: f64 = 1.5;

/// Inputs of one case.
#[derive(Debug, Clone)]
pub struct StackInputs {
    /// Weights by name, as every step has them.
    pub weights: Tensors,
    /// Token of the vocabulary of each token of the session, by its number there.
    pub tokens: Vec<i32>,
    /// The session whose runs these are: that of the case, with the steps of drafts behind its own.
    pub session: SequenceCase,
    /// Runs, in order.
    pub turns: Vec<StackTurn>,
}

/// One run of the session.
#[derive(Debug, Clone)]
pub struct StackTurn {
    /// What the scheduler decided.
    pub turn: Turn,
    /// The run as a step of attention; its queries and keys stand for those of no layer.
    pub inputs: Inputs,
    /// How many of each request's rows, the last ones, are drafts.
    pub drafted: Vec<i32>,
    /// Token behind the last row of each request where it is known already, or −1.
    pub next: Vec<i32>,
    /// Whether drafts are verified.
    pub verifies: bool,
    /// Slots of the recurrent layers, where there are some.
    pub states: Option<StateTurn>,
    /// Positions of the tokens of each row, padding included, in each layer that has some named.
    pub selected: Vec<Vec<Vec<usize>>>,
}

/// Makes the inputs of a case. Equal arguments give equal inputs.
///
/// # Errors
/// The first step of the session that can't be taken, and why.
pub fn generate_stack(case: &StackCase, seed: u64) -> Result<StackInputs, String> {
    let mut states = match case.recurrence {
        Some(own) => state_turns(&case.session, own.drafts)?.into_iter(),
        None => Vec::new().into_iter(),
    };
    let script = Script::of(case, seed)?;
    let of_turn = |(index, turn): (usize, Turn)| {
        let run = script.runs.get(index).cloned().unwrap_or_default();
        StackTurn {
            inputs: turn.inputs(&script.session, seed),
            states: states.next(),
            selected: case.select(&turn, seed),
            turn,
            drafted: run.drafted,
            next: run.next,
            verifies: run.verifies,
        }
    };
    let turns: Vec<StackTurn> = script.turns(seed)?.into_iter().enumerate().map(of_turn).collect();
    let numbers = turns.iter().flat_map(|own| own.turn.tokens.iter().flatten()).copied();
    let count = numbers.max().map_or(0, |last| last as usize + 1);
    let longest = turns.iter().flat_map(|own| own.turn.tokens.iter().map(Vec::len)).max().unwrap_or(0);
    let mut counter = Stream::StackTokens.counter(seed);
    let mut tokens: Vec<i32> = (0..count).map(|_| counter.below(case.vocabulary as u64) as i32).collect();
    for (turn, run) in turns.iter().zip(&script.runs) {
        for (numbers, fed) in turn.turn.tokens.iter().zip(&run.fed) {
            let new = &numbers[numbers.len() - fed.len()..];
            new.iter().zip(fed).for_each(|(number, token)| tokens[*number as usize] = *token as i32);
        }
    }
    // a draft head goes on behind the tokens of the session
    // and rows of padding have a position where no request has a token
    let positions = (longest + case.drafts()).max(1);
    Ok(StackInputs { weights: weights(case, seed, positions), tokens, session: script.session, turns })
}

fn weights(case: &StackCase, seed: u64, positions: usize) -> Tensors {
    let mut counter = Stream::StackWeights.counter(seed);
    let configuration = case.configuration();
    let (hidden, inner) = (case.hidden as f64, case.inner as f64);
    let attention = configuration.attention;
    let largest = configuration.kv_dtype.max_finite() * f64::from(configuration.kv_scale);
    // keys of deviation 1, or less where the cache format ends at 8 deviations
    let unit = (largest / 8.0).min(1.0);
    let score = SCORE / (f64::from(configuration.softmax_scale) * unit * (attention.qk_dim() as f64).sqrt());
    let attended = (configuration.total_heads() * attention.v_head_dim()) as f64;
    let mut tensors = Tensors::new();
    let laid_out = case.wiring.map(|_| wired::weights(case));
    for (name, shape) in case.weight_shapes() {
        if let Some(values) = laid_out.as_ref().map(|all| &all[name]) {
            let values: Vec<f32> = values.iter().map(|value| round_bf16(*value as f32)).collect();
            tensors.insert(name, Tensor::from_f32(Dtype::Bf16, &shape, &values));
            continue;
        }
        let deviation = match name {
            "embedding" => 1.0,
            "w_query" => score / hidden.sqrt(),
            "w_key" => unit / hidden.sqrt(),
            "w_uv" => 1.0 / (unit * (attention.value_dim() as f64).sqrt()),
            // what attention gives is a mean, and smaller than what it is a mean of
            "w_output" => 2.0 / attended.sqrt(),
            // SiTU is bent at 4 and at 25, and gives as much at most
            "w_gate" | "expert_gate" if case.situ => 4.0 / hidden.sqrt(),
            "w_up" | "expert_up" if case.situ => 16.0 / hidden.sqrt(),
            "w_down" | "expert_down" if case.situ => 0.125 / inner.sqrt(),
            "w_down" | "expert_down" => 2.0 / inner.sqrt(),
            // scores of experts far enough apart that most rows have one set of them
            "w_router" => 2.0 / hidden.sqrt(),
            _ => 1.0 / hidden.sqrt(),
        };
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|_| round_bf16((counter.gaussian() * deviation) as f32))
            .collect();
        tensors.insert(name, Tensor::from_f32(Dtype::Bf16, &shape, &values));
    }
    let places = case.plan().norms();
    let spread = if case.wiring.is_some() { 0.0 } else { 0.25 };
    let norm: Vec<f32> =
        (0..places * case.hidden).map(|_| (1.0 + spread * counter.gaussian()) as f32).collect();
    tensors.insert("norm_weight", Tensor::from_f32(Dtype::F32, &[places, case.hidden], &norm));
    tensors.insert("rotary", rotary(case.rotary(), positions));
    case.add_mixture_weights(seed, &mut tensors);
    case.add_recurrent_weights(seed, &mut tensors);
    tensors
}

/// Cosines of each pair's angle at each position, then their sines.
fn rotary(width: usize, positions: usize) -> Tensor {
    let half = width / 2;
    let angle =
        |position: usize, pair: usize| position as f64 * THETA.powf(-2.0 * pair as f64 / width as f64);
    let mut values = Vec::new();
    for position in 0..positions {
        for turn in [f64::cos, f64::sin] {
            values.extend((0..half).map(|pair| turn(angle(position, pair)) as f32));
        }
    }
    Tensor::from_f32(Dtype::F32, &[positions, width], &values)
}

impl StackInputs {
    /// Token ids of the rows of a run, graph padding included.
    pub fn token_ids(&self, case: &StackCase, turn: &StackTurn) -> Vec<i32> {
        let mut ids = Vec::new();
        for (tokens, new) in turn.turn.tokens.iter().zip(&turn.turn.new_tokens) {
            ids.extend(tokens[tokens.len() - new..].iter().map(|number| self.tokens[*number as usize]));
        }
        // padding rows have a token as well, and not one that looks like nothing
        ids.resize(ids.len() + turn.turn.padded_rows, case.vocabulary as i32 - 1);
        ids
    }

    /// Tensors of a run.
    pub fn tensors(&self, case: &StackCase, turn: &StackTurn) -> Tensors {
        let ids = self.token_ids(case, turn);
        let mut tensors = turn.inputs.layout().with("token_ids", Tensor::from_i32(&[ids.len()], &ids));
        if case.drafts() > 0 {
            let of_requests = |values: &[i32]| Tensor::from_i32(&[values.len()], values);
            tensors.insert("draft_counts", of_requests(&turn.drafted));
            tensors.insert("next_tokens", of_requests(&turn.next));
        }
        if case.pcp.is_some() {
            let prefills: Vec<u64> = turn.prefills().into_iter().map(u64::from).collect();
            tensors.insert("is_prefilling", Tensor::from_codes(Dtype::U8, &[prefills.len()], &prefills));
        }
        for (name, tensor) in self.weights.iter() {
            tensors.insert(name, tensor.clone());
        }
        if let Some(selected) = case.selected_tensor(&turn.selected) {
            tensors.insert("selected", selected);
        }
        if let Some(states) = &turn.states {
            let mut insert = |name: &str, values: Vec<i32>| {
                tensors.insert(name, Tensor::from_i32(&[values.len()], &values));
            };
            insert(
                "read_slots",
                states.read.iter().map(|slot| slot.map_or(-1, |slot| slot as i32)).collect(),
            );
            insert("write_slots", states.write.iter().map(|slot| *slot as i32).collect());
            insert("accepted", states.accepted.iter().map(|rows| *rows as i32).collect());
        }
        tensors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Body, Case, StackMixture};
    use shardcheck_engine::{OperationKind, Provenance, TensorSpec};

    fn case() -> StackCase {
        let id = "stack/l2.h24.i20.v37.whole/tiny-mla/tp2.dcp2.h1.s2.b4.bf16.a2a.hi_lo/drafts/v0+5,1+0_v0+3,1+2.pad2_r0-2_d0,1/7";
        match id.parse::<Case>().unwrap().body {
            Body::Stack(body) => *body,
            _ => panic!("another body"),
        }
    }

    #[test]
    fn a_step_has_every_given_tensor_and_tokens_of_its_rows() {
        let case = case();
        let inputs = generate_stack(&case, 3).unwrap();
        let step = inputs.tensors(&case, &inputs.turns[1]);
        let given = OperationKind::Forward.tensors().iter().filter(|t| t.provenance == Provenance::Given);
        let of_drafts = ["w_draft", "draft_counts", "next_tokens", "is_prefilling", "w_output_gate"];
        let given = given.filter(|tensor| !of_drafts.contains(&tensor.name));
        let of_experts = [
            "w_router",
            "expert_gate",
            "expert_up",
            "expert_down",
            "router_bias",
            "hash_table",
            "shared_gate",
            "shared_up",
            "shared_down",
            "latent_down",
            "latent_norm",
            "latent_up",
            "selected",
        ];
        let of_states = ["read_slots", "write_slots", "accepted"];
        let is_recurrent = |name: &str| name.starts_with("kda_") || of_states.contains(&name);
        let (recurrent, given): (Vec<&TensorSpec>, Vec<&TensorSpec>) =
            given.partition(|tensor| is_recurrent(tensor.name));
        let (absent, there): (Vec<&TensorSpec>, Vec<&TensorSpec>) =
            given.into_iter().partition(|tensor| of_experts.contains(&tensor.name));
        assert!(there.iter().all(|tensor| step.find(tensor.name).is_some()));
        assert_eq!(step.iter().count(), there.len());
        let mixture = Some(StackMixture {
            experts: 5,
            top_k: 2,
            dense: 0,
            hashed: 1,
            shared: 3,
            latent: 4,
            biased: true,
        });
        let mixed = StackCase { mixture, ..case.clone() };
        let inputs_mixed = generate_stack(&mixed, 3).unwrap();
        let mixed = inputs_mixed.tensors(&mixed, &inputs_mixed.turns[1]);
        let of_mixtures = || absent.iter().filter(|tensor| tensor.name != "selected");
        assert!(of_mixtures().all(|tensor| mixed.find(tensor.name).is_some()));
        assert_eq!(mixed.get("w_gate").unwrap().shape(), [0, 20, 24]);
        let hybrid = "stack/l3.h24.i20.v37.whole.kkm.qh2.vh4.qd6.vd5.t4.c4.u2.softplus/tiny-mla/tp2.dcp2.h1.s2.b4.bf16.a2a.hi_lo/drafts/v0+5,1+0_v0+3,1+2.pad2_r0-2_d0,1/7";
        let Body::Stack(hybrid) = hybrid.parse::<Case>().unwrap().body else { panic!("another body") };
        let inputs_hybrid = generate_stack(&hybrid, 3).unwrap();
        let last = inputs_hybrid.tensors(&hybrid, &inputs_hybrid.turns[2]);
        assert!(recurrent.iter().all(|tensor| last.find(tensor.name).is_some()));
        assert_eq!(last.get("kda_value").unwrap().shape(), [2, 4, 5, 24]);
        assert_eq!(last.get("w_key").unwrap().shape()[0], 1);
        assert_eq!(last.get("accepted").unwrap().to_i64(), [1, 2]);
        assert_eq!(step.get("token_ids").unwrap().len(), 7);
        assert_eq!(step.get("token_ids").unwrap().to_i64()[5..], [36, 36]);
        assert_eq!(step.get("seq_lens").unwrap().to_i64(), [8, 2]);
        assert_eq!(step.get("rotary").unwrap().shape(), [8, case.rotary()]);
        let again = generate_stack(&case, 3).unwrap();
        assert_eq!((again.weights, again.tokens), (inputs.weights, inputs.tokens.clone()));
        assert_ne!(generate_stack(&case, 4).unwrap().tokens, inputs.tokens);
    }

    #[test]
    fn a_token_that_takes_the_place_of_a_rejected_one_is_drawn_anew() {
        let case = case();
        let inputs = generate_stack(&case, 3).unwrap();
        let number = |turn: usize, place: usize| inputs.turns[turn].turn.tokens[0][place];
        assert_ne!(number(1, 6), number(2, 6));
        assert_eq!(number(1, 5), number(2, 5));
        assert!(inputs.tokens.iter().all(|token| (0..37).contains(token)));
    }
}
