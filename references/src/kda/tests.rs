//! The recurrence against a product of matrices, against the published chunk form, and its bounds against arithmetic in 32 bits.

use super::recurrence::{HeadState, HeadToken, chunk, step};
use super::*;
use shardcheck_formats::contract::Merge;
use shardcheck_formats::recipe::Counter;

const SHAPE: Shape = Shape { heads: 2, value_heads: 4, key_dim: 8, value_dim: 6, taps: 4 };

fn arithmetic(chunk: usize) -> Arithmetic {
    let contract = Contract { partial: Dtype::F32, ..Contract::bf16_default(Merge::A2a) };
    Arithmetic { u_acc: f64::from(f32::EPSILON) / 2.0, ..Arithmetic::of(&contract, chunk) }
}

fn draw(random: &mut Counter, count: usize, size: f64) -> Vec<f64> {
    (0..count).map(|_| f64::from((random.gaussian() * size) as f32)).collect()
}

fn layer(gate: Gate, random: &mut Counter) -> Layer {
    let heads = SHAPE.value_heads;
    Layer {
        shape: SHAPE,
        gate,
        convolution: draw(random, SHAPE.channels() * SHAPE.taps, 0.5),
        a_log: draw(random, heads, 0.5),
        bias: draw(random, heads * SHAPE.key_dim, 1.0),
        norm_weight: draw(random, SHAPE.value_dim, 1.0),
        epsilon: 1e-5,
    }
}

fn tokens(count: usize, random: &mut Counter) -> Vec<Token> {
    let heads = SHAPE.value_heads;
    (0..count)
        .map(|_| Token {
            channels: draw(random, SHAPE.channels(), 1.0),
            gate: draw(random, heads * SHAPE.key_dim, 3.0),
            beta: draw(random, heads, 2.0),
            output_gate: draw(random, heads * SHAPE.value_dim, 1.0),
        })
        .collect()
}

fn exact(values: &[f64]) -> Vec<Near> {
    values.iter().map(|value| Near { value: *value, error: 0.0 }).collect()
}

/// Tokens of one head whose inputs are numbers of binary32, decays around `pace`.
fn head_tokens(count: usize, pace: f64, random: &mut Counter) -> Vec<HeadToken> {
    (0..count)
        .map(|_| {
            let unit = |random: &mut Counter| {
                let raw = exact(&draw(random, SHAPE.key_dim, 1.0));
                let whole = normalise(&raw, 1.0, &arithmetic(1));
                // a hair shorter than 1, so that no rounding makes it longer
                exact(&whole.iter().map(|x| f64::from((x.value * 0.999_999) as f32)).collect::<Vec<_>>())
            };
            HeadToken {
                query: unit(random),
                key: unit(random),
                value: exact(&draw(random, SHAPE.value_dim, 1.0)),
                decay: exact(&draw(random, SHAPE.key_dim, pace).iter().map(|g| -g.abs()).collect::<Vec<_>>()),
                beta: Near { value: f64::from(random.unit_f64() as f32), error: 0.0 },
            }
        })
        .collect()
}

fn values(near: &[Near]) -> Vec<f64> {
    near.iter().map(|x| x.value).collect()
}

fn assert_close(seen: &[f64], wanted: &[f64], most: f64) {
    assert_eq!(seen.len(), wanted.len());
    for (seen, wanted) in seen.iter().zip(wanted) {
        assert!((seen - wanted).abs() <= most, "{seen} {wanted}");
    }
}

#[test]
fn a_head_of_width_one_goes_through_the_numbers_of_the_definition() {
    let mut state = vec![0.0];
    assert_eq!(step(&mut state, &[1.0], &[1.0], &[2.0], &[-0.5], 0.5), [1.0]);
    assert_eq!(step(&mut state, &[1.0], &[1.0], &[1.0], &[-0.1], 1.0), [1.0]);
    let kept = step(&mut state, &[2.0], &[1.0], &[7.0], &[0.0], 0.0);
    assert_eq!((state[0], kept[0]), (1.0, 2.0), "without decay and update nothing moves");
}

/// `Σ_s Π_{t>s} (I − b k kᵀ)diag(exp g) · b_s k_s v_sᵀ` with dense matrices.
fn product_of_matrices(tokens: &[HeadToken]) -> Vec<f64> {
    let (depth, width) = (SHAPE.key_dim, SHAPE.value_dim);
    let mut state = vec![0.0; depth * width];
    for (first, token) in tokens.iter().enumerate() {
        let mut part: Vec<f64> = (0..depth * width)
            .map(|at| token.beta.value * token.key[at / width].value * token.value[at % width].value)
            .collect();
        for later in &tokens[first + 1..] {
            let matrix = |row: usize, column: usize| {
                let unit = if row == column { 1.0 } else { 0.0 };
                (unit - later.beta.value * later.key[row].value * later.key[column].value)
                    * later.decay[column].value.exp()
            };
            part = (0..depth * width)
                .map(|at| {
                    (0..depth).map(|row| matrix(at / width, row) * part[row * width + at % width]).sum()
                })
                .collect();
        }
        state.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    state
}

/// The published chunk form: `A = (I + tril(b k kᵀ ∘ decays))⁻¹`, `u = A b v`, `w = A b (k ∘ exp G)`, all in f64 or f32 by `round`.
fn chunk_form(
    state: &mut [f64],
    tokens: &[HeadToken],
    inverse: bool,
    backwards: bool,
    round: fn(f64) -> f64,
) -> Vec<Vec<f64>> {
    let (depth, width, count) = (SHAPE.key_dim, SHAPE.value_dim, tokens.len());
    let sum = |terms: Vec<f64>| {
        let add = |sum: f64, term: &f64| round(sum + term);
        if backwards { terms.iter().rev().fold(0.0, add) } else { terms.iter().fold(0.0, add) }
    };
    let mut running = vec![vec![0.0; depth]; count];
    for t in 0..count {
        for i in 0..depth {
            let before = if t == 0 { 0.0 } else { running[t - 1][i] };
            running[t][i] = round(before + tokens[t].decay[i].value);
        }
    }
    let fade = |t: usize, s: usize, i: usize| round(round(running[t][i] - running[s][i]).exp());
    let meet = |by: &[Near], t: usize, s: usize| {
        let term = |i: usize| round(round(by[i].value * tokens[s].key[i].value) * fade(t, s, i));
        sum((0..depth).map(term).collect())
    };
    let mut solved = vec![vec![0.0; count]; count];
    for t in 0..count {
        solved[t][t] = 1.0;
        for s in 0..t {
            let factor = |r: usize| round(tokens[t].beta.value * meet(&tokens[t].key, t, r));
            solved[t][s] = -sum((s..t).map(|r| round(factor(r) * solved[r][s])).collect());
        }
    }
    let old: Vec<f64> = state.to_vec();
    let read = |by: &[Near], t: usize, j: usize| {
        let term = |i: usize| round(round(by[i].value * round(running[t][i].exp())) * old[i * width + j]);
        sum((0..depth).map(term).collect())
    };
    let mut updates = vec![vec![0.0; width]; count];
    for j in 0..width {
        for t in 0..count {
            let b = |s: usize| tokens[s].beta.value;
            updates[t][j] = if inverse {
                let u = sum((0..=t)
                    .map(|s| round(solved[t][s] * round(b(s) * tokens[s].value[j].value)))
                    .collect());
                let w = sum((0..=t)
                    .map(|s| round(solved[t][s] * round(b(s) * read(&tokens[s].key, s, j))))
                    .collect());
                round(u - w)
            } else {
                let met: Vec<f64> =
                    (0..t).map(|s| round(meet(&tokens[t].key, t, s) * updates[s][j])).collect();
                let whole = round(read(&tokens[t].key, t, j) + sum(met));
                round(b(t) * round(tokens[t].value[j].value - whole))
            };
        }
    }
    let outputs = (0..count)
        .map(|t| {
            (0..width)
                .map(|j| {
                    let met = (0..=t).map(|s| round(meet(&tokens[t].query, t, s) * updates[s][j])).collect();
                    round(read(&tokens[t].query, t, j) + sum(met))
                })
                .collect()
        })
        .collect();
    for i in 0..depth {
        for j in 0..width {
            let term =
                |s: usize| round(round(tokens[s].key[i].value * fade(count - 1, s, i)) * updates[s][j]);
            let kept = round(round(running[count - 1][i].exp()) * old[i * width + j]);
            state[i * width + j] = round(kept + sum((0..count).map(term).collect()));
        }
    }
    outputs
}

#[test]
fn the_recurrence_is_a_product_of_matrices_and_equals_the_chunk_form_of_any_length() {
    let mut random = Counter::new(3, 0);
    for pace in [0.01, 0.5, 6.0] {
        let tokens = head_tokens(13, pace, &mut random);
        let mut state = vec![0.0; SHAPE.key_dim * SHAPE.value_dim];
        let rows: Vec<Vec<f64>> = tokens
            .iter()
            .map(|t| {
                let [q, k, v, g] = [&t.query, &t.key, &t.value, &t.decay].map(|near| values(near));
                step(&mut state, &q, &k, &v, &g, t.beta.value)
            })
            .collect();
        assert_close(&state, &product_of_matrices(&tokens), 1e-13);
        for (length, inverse) in [(1, false), (4, false), (4, true), (13, true), (13, false)] {
            let mut other = vec![0.0; state.len()];
            let seen: Vec<Vec<f64>> = tokens
                .chunks(length)
                .flat_map(|part| chunk_form(&mut other, part, inverse, false, |x| x))
                .collect();
            assert_close(&other, &state, 1e-12);
            seen.iter().zip(&rows).for_each(|(seen, row)| assert_close(seen, row, 1e-12));
        }
        let mut now = HeadState::zero(SHAPE.key_dim, SHAPE.value_dim);
        for part in tokens.chunks(5) {
            now = chunk(&now, part, &arithmetic(5)).pop().unwrap().state;
        }
        assert_close(&now.value, &state, 1e-13);
    }
}

#[test]
fn any_published_order_in_32_bits_stays_within_the_bound_which_stays_small_over_many_tokens() {
    let single = |x: f64| f64::from(x as f32);
    let mut random = Counter::new(4, 0);
    for pace in [0.0, 0.003, 0.3, 3.0, 60.0] {
        let (mut used, mut widest) = (0.0f64, 0.0f64);
        let tokens = head_tokens(64, pace, &mut random);
        for (length, inverse, backwards) in
            [(1, false, false), (1, false, true), (8, false, true), (8, true, false), (16, true, true)]
        {
            let mut now = HeadState::zero(SHAPE.key_dim, SHAPE.value_dim);
            let mut seen = vec![0.0; now.value.len()];
            for part in tokens.chunks(length) {
                let steps = chunk(&now, part, &arithmetic(length));
                let rows = chunk_form(&mut seen, part, inverse, backwards, single);
                for (step, row) in steps.iter().zip(&rows) {
                    for (near, seen) in step.core.iter().zip(row) {
                        let off = (near.value - seen).abs();
                        assert!(off <= near.error, "{pace} {length}: {seen} {near:?}");
                        used = used.max(off / near.error);
                        widest = widest.max(near.error);
                    }
                }
                now = steps.last().unwrap().state.clone();
                for (at, element) in seen.iter().enumerate() {
                    let error = now.error[at % SHAPE.value_dim];
                    assert!((element - now.value[at]).abs() <= error, "{pace} {length}: {at}");
                }
            }
        }
        // values are around 1; a running sum of decays in the thousands costs its differences their digits, in any engine
        let most = if pace > 10.0 { 2e-2 } else { 4e-3 };
        assert!(used > 1e-3 && widest < most, "{pace}: {used} {widest}");
    }
}

#[test]
fn errors_fade_as_the_state_does() {
    let mut random = Counter::new(5, 0);
    let tokens = head_tokens(40, 0.2, &mut random);
    let mut start = HeadState::zero(SHAPE.key_dim, SHAPE.value_dim);
    start.error.fill(1.0);
    let mut previous = 1.0;
    for token in &tokens {
        start = chunk(&start, std::slice::from_ref(token), &arithmetic(1)).pop().unwrap().state;
        let most = token.decay.iter().map(|g| g.value.exp()).fold(0.0, f64::max);
        assert!(start.error[0] <= most * previous * 1.01 + 1e-4, "{}", start.error[0]);
        previous = start.error[0];
    }
    assert!(previous < 0.5, "{previous}");
}

#[test]
fn steps_of_a_sequence_are_the_whole_sequence_and_chunks_change_bounds_alone() {
    for gate in [Gate::LowerBound(-5.0), Gate::Softplus] {
        let mut random = Counter::new(6, 0);
        let (layer, tokens) = (layer(gate, &mut random), tokens(11, &mut random));
        let whole = advance(&layer, &State::zero(&SHAPE), &tokens, &arithmetic(1));
        let mut state = State::zero(&SHAPE);
        let mut place = 0;
        for count in [1, 2, 5, 0, 3] {
            let rows = advance(&layer, &state, &tokens[place..place + count], &arithmetic(4));
            for row in rows {
                assert_close(&values(&row.out), &values(&whole[place].out), 1e-13);
                assert_close(&values(&row.core), &values(&whole[place].core), 1e-13);
                state = row.state;
                place += 1;
            }
        }
        assert_eq!(state.window, whole[10].state.window);
        assert_eq!(state.window[2], tokens[10].channels);
        for (seen, wanted) in state.heads.iter().zip(&whole[10].state.heads) {
            assert_close(&seen.value, &wanted.value, 1e-13);
        }
    }
}

#[test]
fn gates_are_0_and_1_at_their_edges_and_32_bits_stay_within_their_bounds() {
    let arithmetic = arithmetic(1);
    assert_eq!(sigmoid(-2000.0, 0.0, &arithmetic).value, 0.0);
    assert_eq!(sigmoid(2000.0, 0.0, &arithmetic).value, 1.0);
    assert_eq!(decay(Gate::LowerBound(-5.0), 0.0, -2000.0, 0.0, &arithmetic).value, 0.0);
    let forgets = decay(Gate::Softplus, 1.0, 1000.0, 0.0, &arithmetic);
    assert!((forgets.value + 1000.0 * 1f64.exp()).abs() < 1e-9 && forgets.error < 1e-2);
    let mut random = Counter::new(7, 0);
    for _ in 0..4000 {
        let [a, bias, log] = [5.0, 2.0, 1.0].map(|size| (random.gaussian() * size) as f32);
        let sum = a + bias;
        let x = log.exp() * sum;
        let near = decay(Gate::LowerBound(-5.0), log.into(), a.into(), bias.into(), &arithmetic);
        let seen = f64::from(-5.0 / (1.0 + (-x).exp()));
        assert!((seen - near.value).abs() <= near.error, "{seen} {near:?}");
        let near = decay(Gate::Softplus, log.into(), a.into(), bias.into(), &arithmetic);
        let seen = f64::from(-log.exp() * if sum > 20.0 { sum } else { (1.0 + sum.exp()).ln() });
        assert!((seen - near.value).abs() <= near.error, "{seen} {near:?}");
        assert!(near.error <= 1e-5 * f64::from(log.exp()) * (1.0 + f64::from(sum.abs())));
    }
}

#[test]
fn norms_in_32_bits_stay_within_their_bounds_whatever_their_inputs_are_off_by() {
    let arithmetic = arithmetic(1);
    let mut random = Counter::new(8, 0);
    for round in 0..400 {
        let size = [1.0, 1e-2, 1e-4, 0.0][round % 4];
        let head: Vec<Near> =
            draw(&mut random, 6, size).into_iter().map(|value| Near { value, error: 1e-3 * size }).collect();
        let off: Vec<f32> =
            head.iter().map(|x| (x.value + x.error * (2.0 * random.unit_f64() - 1.0)) as f32).collect();
        let squares: f32 = off.iter().map(|x| x * x).sum();
        for (near, x) in normalise(&head, 0.5, &arithmetic).iter().zip(&off) {
            let seen = f64::from(x / (squares + 1e-6).sqrt() * 0.5);
            assert!((seen - near.value).abs() <= near.error, "{seen} {near:?}");
        }
        let [weight, gate] = [0, 1].map(|_| draw(&mut random, 6, 1.0));
        let norm = (squares / 6.0 + 1e-5).sqrt();
        for (index, near) in gated_norm(&head, &weight, &gate, 1e-5, &arithmetic).iter().enumerate() {
            let open = 1.0 / (1.0 + (-gate[index] as f32).exp());
            let seen = f64::from(off[index] / norm * weight[index] as f32 * open);
            assert!((seen - near.value).abs() <= near.error, "{seen} {near:?}");
        }
    }
}
