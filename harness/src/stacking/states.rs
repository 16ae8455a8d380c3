//! What the recurrent layers of a stack must hold and give: played by the oracle from the inputs that an engine showed for each row.

use std::collections::HashMap;

use shardcheck_cases::{StackCase, StackRecurrence, StackTurn};
use shardcheck_engine::{KdaGate, KdaPlan, OperationKind, Profile};
use shardcheck_formats::Contract;
use shardcheck_references::bound::interval;
use shardcheck_references::kda::{Arithmetic, Gate, Layer, Near, Row, Shape, State, Token, advance};

use super::{Shown, StackMaterial, View};
use crate::judge::Allowed;
use crate::laboratory::Halt;

/// Recurrent layers of a case.
pub struct Recurrence {
    /// Sizes.
    pub sizes: StackRecurrence,
    /// Contract of Kimi delta attention.
    pub contract: Contract,
    layers: Vec<Layer>,
}

impl Recurrence {
    /// The recurrent layers of a case, given its weights; `None` where there is none.
    ///
    /// # Errors
    /// That the engine declares no contract for them.
    pub fn new<'w>(
        case: &StackCase,
        layers: usize,
        weight: impl Fn(&str, usize) -> &'w [f32],
        profile: &Profile,
    ) -> Result<Option<Self>, String> {
        let Some(sizes) = case.recurrence else { return Ok(None) };
        let contract =
            profile.operation(OperationKind::Kda).and_then(|operation| operation.contract.as_ref());
        let contract = contract.ok_or("the engine declares no contract for kda")?.clone();
        let StackRecurrence { heads, value_heads, key_dim, value_dim, taps, .. } = sizes;
        let layer = |number: usize| {
            let wide = |name: &str| weight(name, number).iter().map(|value| f64::from(*value)).collect();
            Layer {
                shape: Shape { heads, value_heads, key_dim, value_dim, taps },
                gate: match sizes.gate {
                    KdaGate::LowerBound => Gate::LowerBound(f64::from(KdaGate::LOWER_BOUND)),
                    KdaGate::Softplus => Gate::Softplus,
                },
                convolution: wide("kda_convolution"),
                a_log: wide("kda_a_log"),
                bias: wide("kda_bias"),
                norm_weight: wide("kda_norm"),
                epsilon: f64::from(KdaPlan::EPSILON),
            }
        };
        Ok(Some(Self { sizes, contract, layers: (0..layers).map(layer).collect() }))
    }

    /// What an element of a layer's output may be; anything where its inputs were no numbers.
    pub fn allowed_out(&self, near: Near) -> Allowed {
        if !near.value.is_finite() || !near.error.is_finite() {
            return Allowed::Undefined;
        }
        let (low, high) = interval(near.value, near.error, self.contract.output);
        Allowed::Between { expected: near.value, low, high }
    }

    /// Channels of a rank by their numbers among all.
    pub fn channels(&self, rank: usize, ranks: usize) -> Vec<usize> {
        let StackRecurrence { heads, value_heads, key_dim, value_dim, .. } = self.sizes;
        let (keys, values) = (heads * key_dim, value_heads * value_dim);
        let part = |first: usize, all: usize| first + rank * all / ranks..first + (rank + 1) * all / ranks;
        [part(0, keys), part(keys, keys), part(2 * keys, values)].into_iter().flatten().collect()
    }
}

/// What one recurrent layer may show of a run.
pub struct Played {
    /// Rows, those of one request after the other's.
    pub rows: Vec<Row>,
    /// States behind all rows of each request.
    pub states: Vec<State>,
}

/// States by layer and slot, as the inputs that were shown make them.
pub struct StateStore<'a> {
    material: &'a StackMaterial,
    recurrence: &'a Recurrence,
    /// States behind no, one, … all rows of the step that last wrote a slot: by rank of prefill context parallelism, layer and slot.
    slots: HashMap<(usize, usize, usize), Vec<State>>,
}

impl<'a> StateStore<'a> {
    /// Nothing written yet; `None` for a case without recurrent layers.
    pub fn new(material: &'a StackMaterial) -> Option<Self> {
        let recurrence = material.recurrence.as_ref()?;
        Some(Self { material, recurrence, slots: HashMap::new() })
    }

    /// Plays a run: what each recurrent layer may show, on each rank of prefill context parallelism, one after the other.
    ///
    /// # Errors
    /// As [`Shown::tensor`].
    pub fn play(&mut self, turn: &StackTurn, shown: &Shown<'_>) -> Result<Vec<Vec<Played>>, Halt> {
        let (channels, gates) = (shown.tensor("kda_channels")?, shown.tensor("kda_gates")?);
        let layers = self.recurrence.layers.len();
        let mut of_lane = |lane: usize| {
            (0..layers)
                .map(|number| self.play_layer(turn, (lane, number), shown, (&channels, &gates)))
                .collect()
        };
        Ok((0..shown.lanes.world()).map(&mut of_lane).collect())
    }

    fn play_layer(
        &mut self,
        turn: &StackTurn,
        (lane, number): (usize, usize),
        shown: &Shown<'_>,
        seen: (&View, &View),
    ) -> Played {
        let layer = &self.recurrence.layers[number];
        let arithmetic = Arithmetic::of(&self.recurrence.contract, self.recurrence.sizes.chunk);
        let zero = State::zero(&layer.shape);
        let mut played = Played { rows: Vec::new(), states: Vec::new() };
        let Some(own) = &turn.states else { return played };
        let mut written = Vec::new();
        let mut first = 0;
        for (index, new) in turn.turn.new_tokens.iter().enumerate() {
            let known = own.read[index].and_then(|slot| self.slots.get(&(lane, number, slot)));
            let start = known.map_or(&zero, |states| &states[own.accepted[index]]);
            let token = |row: usize| self.token((lane, number), row, shown, seen);
            let tokens: Vec<Token> = (first..first + new).map(token).collect();
            let rows = advance(layer, start, &tokens, &arithmetic);
            let mut states = vec![start.clone()];
            states.extend(rows.iter().map(|row| row.state.clone()));
            played.states.push(states[states.len() - 1].clone());
            written.push(((lane, number, own.write[index]), states));
            played.rows.extend(rows);
            first += new;
        }
        self.slots.extend(written);
        played
    }

    /// Inputs of all heads at a row of the step, each as its rank showed it; no numbers where none has the row.
    fn token(
        &self,
        (lane, number): (usize, usize),
        row: usize,
        shown: &Shown<'_>,
        (channels, gates): (&View, &View),
    ) -> Token {
        let ranks = self.material.ranks();
        let StackRecurrence { value_heads, key_dim, value_dim, .. } = self.recurrence.sizes;
        let mut all = vec![0.0; self.recurrence.sizes.channels()];
        let own = value_heads / ranks;
        let mut token = Token { channels: vec![], gate: vec![], beta: vec![], output_gate: vec![] };
        for rank in 0..ranks {
            let wide = |view: &View| -> Vec<f64> {
                match shown.lanes.held(lane, rank, row) {
                    Some((rank, place)) => {
                        view.row(&[rank, number, place]).iter().map(|value| f64::from(*value)).collect()
                    }
                    None => vec![f64::NAN; view.shape[3]],
                }
            };
            for (channel, value) in self.recurrence.channels(rank, ranks).into_iter().zip(wide(channels)) {
                all[channel] = value;
            }
            let wide = wide(gates);
            let (decays, rest) = wide.split_at(own * key_dim);
            let (shares, open) = rest.split_at(own);
            token.gate.extend(decays);
            token.beta.extend(shares);
            token.output_gate.extend(&open[..own * value_dim]);
        }
        Token { channels: all, ..token }
    }
}

#[cfg(test)]
mod tests {
    use shardcheck_cases::{Family, SuiteName, suite};
    use shardcheck_engine::Engine;

    use super::*;
    use crate::laboratory::Laboratory;
    use crate::material::Material;

    /// Largest distance of two states, in units of their bound and of 64-bit rounding.
    fn distance(played: &State, alone: &State) -> f64 {
        assert_eq!(played.window, alone.window);
        let heads = played.heads.iter().zip(&alone.heads);
        let elements = heads.flat_map(|(one, other)| one.value.iter().zip(&other.value));
        elements.map(|(one, other)| (one - other).abs() / other.abs().max(1.0)).fold(0.0, f64::max)
    }

    #[test]
    fn a_state_is_that_of_the_tokens_of_its_request_run_one_by_one_from_zeros_whatever_the_slots() {
        let engine = shardcheck_cpu::engine();
        let (mut compared, mut forked) = (0, 0);
        for case in suite(SuiteName::Gate, 1) {
            if case.family != Family::Stack {
                continue;
            }
            let material = Material::of(&case, engine.profile()).unwrap();
            let laboratory = Laboratory::new(&case, &engine, &material);
            let own = laboratory.stack();
            let (Some(mut store), Some(recurrence)) = (StateStore::new(own), own.recurrence.as_ref()) else {
                continue;
            };
            // inputs of each token by layer, as they were last shown: no slot, no count of accepted rows
            let mut known: HashMap<(usize, u32), Token> = HashMap::new();
            for (turn, observed) in own.inputs.turns.iter().zip(laboratory.stepped().unwrap()) {
                let shown = Shown::of(own, turn, observed);
                let (channels, gates) =
                    (shown.tensor("kda_channels").unwrap(), shown.tensor("kda_gates").unwrap());
                let played = store.play(turn, &shown).unwrap();
                for (number, (played, layer)) in played[0].iter().zip(&recurrence.layers).enumerate() {
                    let mut row = 0;
                    for (index, tokens) in turn.turn.tokens.iter().enumerate() {
                        for token in &tokens[tokens.len() - turn.turn.new_tokens[index]..] {
                            known.insert(
                                (number, *token),
                                store.token((0, number), row, &shown, (&channels, &gates)),
                            );
                            row += 1;
                        }
                        let mut alone = State::zero(&layer.shape);
                        let arithmetic = Arithmetic::of(&recurrence.contract, 1);
                        for token in tokens {
                            let one = std::slice::from_ref(&known[&(number, *token)]);
                            alone = advance(layer, &alone, one, &arithmetic)[0].state.clone();
                        }
                        let off = distance(&played.states[index], &alone);
                        assert!(off < 1e-12, "{}, {}, request {index}: {off}", case.id(), own.name(turn));
                        let states = turn.states.as_ref().unwrap();
                        forked +=
                            usize::from(states.read[index].is_some_and(|slot| slot != states.write[index]));
                        compared += 1;
                    }
                }
            }
        }
        assert!(compared > 100 && forked > 0, "{compared} {forked}");
    }
}
