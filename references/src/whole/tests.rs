//! A transformer against one that is written out plainly, and against engines that round where they may.

use std::cell::RefCell;

use shardcheck_formats::Counter;
use shardcheck_formats::contract::{Contract, Depth, Merge};
use shardcheck_formats::dtype::Dtype;

use super::*;
use crate::bound::U32;
use crate::moe::Gating;

const HIDDEN: usize = 6;
const HEADS: usize = 2;
const LATENT: usize = 4;
const ROTARY: usize = 2;
const UP: usize = 3;
const KEY: usize = LATENT + ROTARY;
const INNER: usize = 5;

fn contract() -> Contract {
    Contract { u_acc: U32, depth: Depth::Any, ..Contract::bf16_default(Merge::AgRsBf16) }
}

fn drawn(counter: &mut Counter, count: usize, size: f64) -> Vec<f32> {
    (0..count).map(|_| (counter.gaussian() * size) as f32).collect()
}

/// The weights of a small layer, as vectors.
struct Owned {
    norms: [Vec<f32>; 2],
    query: Vec<f32>,
    key: Vec<f32>,
    up: Vec<f32>,
    output: Vec<f32>,
    mlp: [Vec<f32>; 3],
}

impl Owned {
    fn drawn(seed: u64) -> Self {
        let counter = &mut Counter::new(seed, 77);
        Self {
            norms: [0, 1].map(|_| drawn(counter, HIDDEN, 1.0)),
            query: drawn(counter, HEADS * KEY * HIDDEN, 0.5),
            key: drawn(counter, KEY * HIDDEN, 0.5),
            up: drawn(counter, HEADS * LATENT * UP, 0.5),
            output: drawn(counter, HIDDEN * HEADS * UP, 0.5),
            mlp: [INNER * HIDDEN, INNER * HIDDEN, HIDDEN * INNER].map(|count| drawn(counter, count, 0.5)),
        }
    }

    fn layer(&self) -> Layer<'_> {
        let [gate, up, down] = &self.mlp;
        Layer {
            norms: [&self.norms[0], &self.norms[1]],
            query: &self.query,
            key: &self.key,
            up: &self.up,
            output: &self.output,
            feed_forward: FeedForward::Mlp(Mlp { gate: Some(gate), up, down, gating: Gating::Silu }),
        }
    }
}

fn rotary(positions: usize) -> Vec<f32> {
    (0..positions).flat_map(|at| [(at as f32 * 0.7).cos(), (at as f32 * 0.7).sin()]).collect()
}

fn setting<'a>(rotary: &'a [f32], contract: &'a Contract, ranks: usize) -> Setting<'a> {
    Setting {
        hidden: HIDDEN,
        heads: HEADS,
        latent: LATENT,
        up_dim: UP,
        scale: 0.6,
        epsilon: 1e-5,
        rotary,
        rotary_width: ROTARY,
        ranks,
        expert_ranks: ranks,
        world: ranks,
        cache: (Dtype::Bf16, 1.0),
        contract,
    }
}

fn rows(count: usize, seed: u64) -> Vec<Vec<f64>> {
    let counter = &mut Counter::new(seed, 78);
    (0..count).map(|_| (0..HIDDEN).map(|_| counter.gaussian()).collect()).collect()
}

fn near(row: &[f64]) -> Vec<Near> {
    row.iter().map(|value| Near { value: *value, error: 0.0 }).collect()
}

/// A layer in plain words; `round` is applied wherever something is stored.
struct Plain<'a> {
    owned: &'a Owned,
    round: &'a dyn Fn(f64) -> f64,
}

fn dot(w: &[f32], x: &[f64]) -> f64 {
    w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()
}

impl Plain<'_> {
    fn norm(&self, x: &[f64], weight: &[f32]) -> Vec<f64> {
        let root = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + 1e-5).sqrt();
        x.iter().zip(weight).map(|(x, w)| (self.round)(x / root * f64::from(*w))).collect()
    }

    fn turn(&self, weights: &[f32], x: &[f64], at: usize) -> Vec<f64> {
        let round = self.round;
        let mut vector: Vec<f64> = weights.chunks(HIDDEN).map(|w| round(dot(w, x))).collect();
        let angle = at as f32 * 0.7;
        let (cos, sin) = (f64::from(angle.cos()), f64::from(angle.sin()));
        let (a, b) = (vector[LATENT], vector[LATENT + 1]);
        (vector[LATENT], vector[LATENT + 1]) = (round(a * cos - b * sin), round(b * cos + a * sin));
        vector
    }

    /// What attention gives to all heads of the last row.
    fn attended(&self, normed: &[Vec<f64>]) -> Vec<f64> {
        let last = normed.len() - 1;
        let keys: Vec<Vec<f64>> =
            normed.iter().enumerate().map(|(at, x)| self.turn(&self.owned.key, x, at)).collect();
        let mut attended = Vec::new();
        for head in 0..HEADS {
            let query =
                self.turn(&self.owned.query[head * KEY * HIDDEN..][..KEY * HIDDEN], &normed[last], last);
            let score = |key: &Vec<f64>| 0.6 * key.iter().zip(&query).map(|(k, q)| k * q).sum::<f64>();
            let weights: Vec<f64> = keys.iter().map(|key| score(key).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for column in 0..UP {
                let of_dim = |dim: usize| {
                    let mixed: f64 = weights.iter().zip(&keys).map(|(w, key)| w / sum * key[dim]).sum();
                    mixed * f64::from(self.owned.up[(head * LATENT + dim) * UP + column])
                };
                attended.push((self.round)((0..LATENT).map(of_dim).sum()));
            }
        }
        attended
    }

    fn last_row(&self, rows: &[Vec<f64>]) -> Vec<f64> {
        let (owned, round) = (self.owned, self.round);
        let normed: Vec<Vec<f64>> = rows.iter().map(|row| self.norm(row, &owned.norms[0])).collect();
        let attended = self.attended(&normed);
        let update = owned.output.chunks(HEADS * UP).map(|w| round(dot(w, &attended)));
        let middle: Vec<f64> = rows[rows.len() - 1].iter().zip(update).map(|(x, u)| round(x + u)).collect();
        let normed = self.norm(&middle, &owned.norms[1]);
        let [gate, up, down] = &owned.mlp;
        let neuron = |(gate, up): (&[f32], &[f32])| {
            let gate = dot(gate, &normed);
            round(gate / (1.0 + (-gate).exp()) * dot(up, &normed))
        };
        let active: Vec<f64> = gate.chunks(HIDDEN).zip(up.chunks(HIDDEN)).map(neuron).collect();
        let update = down.chunks(INNER).map(|w| round(dot(w, &active)));
        middle.iter().zip(update).map(|(x, update)| round(x + update)).collect()
    }
}

/// The last row by the oracle.
fn whole(owned: &Owned, rows: &[Vec<f64>], ranks: usize) -> Vec<Near> {
    let (contract, table) = (contract(), rotary(rows.len()));
    let setting = setting(&table, &contract, ranks);
    let layer = owned.layer();
    let mut keys: Vec<Vec<Near>> = Vec::new();
    let mut last = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        let before: Vec<&[Near]> = keys.iter().map(Vec::as_slice).collect();
        let own = setting.layer(&layer, &near(row), at, &before);
        let [_, behind] = own.streams;
        keys.push(own.key);
        last = behind;
    }
    last
}

#[test]
fn a_layer_is_the_one_that_is_written_out() {
    for seed in 0..20 {
        let (owned, rows) = (Owned::drawn(seed), rows(1 + seed as usize % 5, seed));
        let wanted = Plain { owned: &owned, round: &|value| value }.last_row(&rows);
        for (own, wanted) in whole(&owned, &rows, 1).iter().zip(wanted) {
            assert!((own.value - wanted).abs() <= 1e-9 * (1.0 + wanted.abs()), "{own:?} {wanted}");
        }
    }
}

#[test]
fn whatever_is_stored_rounded_lies_within_the_error_and_near_enough_to_say_something() {
    let mut largest: f64 = 0.0;
    for seed in 0..60 {
        let (owned, rows) = (Owned::drawn(seed), rows(1 + seed as usize % 5, seed));
        let allowed = whole(&owned, &rows, 1);
        let counter = RefCell::new(Counter::new(seed, 79));
        // up or down by half a unit, as it happens
        let round = |value: f64| {
            let part = counter.borrow_mut().below(2001) as f64 / 1000.0 - 1.0;
            value + part * half_ulp(Dtype::Bf16, value)
        };
        let seen = Plain { owned: &owned, round: &round }.last_row(&rows);
        for (own, seen) in allowed.iter().zip(seen) {
            let used = (seen - own.value).abs() / own.error;
            assert!(used <= 1.0, "seed {seed}: {own:?} {seen}");
            largest = largest.max(used);
        }
    }
    assert!(largest > 0.02, "{largest}: a bound that nothing comes near");
}

#[test]
fn more_ranks_may_only_be_farther_off() {
    for seed in 0..10 {
        let (owned, rows) = (Owned::drawn(seed), rows(4, seed));
        for (one, many) in whole(&owned, &rows, 1).iter().zip(whole(&owned, &rows, 4)) {
            assert_eq!(one.value, many.value);
            assert!(many.error > one.error);
        }
    }
}

fn key(value: f64, address: f64, error: f64) -> Vec<Near> {
    vec![Near { value, error }, Near { value: address, error }]
}

#[test]
fn attention_whose_winner_is_far_ahead_gives_its_value_however_its_scores_move() {
    let (contract, up) = (contract(), [1.0f32]);
    let query = [Near { value: 0.0, error: 0.0 }, Near { value: 60.0, error: 2.0 }];
    let head = Head { query: &query, up: &up, latent: 1, scale: 1.0, world: 2 };
    let keys = [key(3.0, 1.0, 0.01), key(-5.0, 0.0, 0.01), key(7.0, 0.1, 0.01)];
    let keys: Vec<&[Near]> = keys.iter().map(Vec::as_slice).collect();
    let out = attend(&head, &keys, &contract)[0];
    assert!((out.value - 3.0).abs() < 1e-12 && out.error < 0.01 + 3.0 * 0.03, "{out:?}");
    let blunt = Head { query: &[query[0], Near { value: 1.0, error: 2.0 }], ..head };
    let out = attend(&blunt, &keys, &contract)[0];
    let plain = |q: f64| {
        let weights = [1.0, 0.0, 0.1].map(|address: f64| (q * address).exp());
        (3.0 * weights[0] - 5.0 * weights[1] + 7.0 * weights[2]) / weights.iter().sum::<f64>()
    };
    // whatever the query is of what it may be
    for q in [-1.0, 0.0, 2.0, 3.0] {
        assert!((plain(q) - out.value).abs() <= out.error, "{q}: {} {out:?}", plain(q));
    }
    assert!(out.error > (plain(-1.0) - plain(1.0)).abs(), "{out:?}");
}

#[test]
fn keys_that_hold_the_same_may_have_any_weights() {
    let (contract, up) = (contract(), [1.0f32]);
    let query = [Near { value: 0.0, error: 0.0 }, Near { value: 5.0, error: 50.0 }];
    let head = Head { query: &query, up: &up, latent: 1, scale: 1.0, world: 1 };
    let keys = [key(3.0, 1.0, 0.0), key(3.0, 0.0, 0.0)];
    let keys: Vec<&[Near]> = keys.iter().map(Vec::as_slice).collect();
    let out = attend(&head, &keys, &contract)[0];
    assert!((out.value - 3.0).abs() < 1e-12 && out.error < 0.05, "{out:?}");
}

#[test]
fn a_row_wins_when_no_other_can_reach_it_with_the_same_x() {
    let near = |value: f64, error: f64| Near { value, error };
    let contract = contract();
    let won = |x: [Near; 2]| winner(&[1.0, 0.0, 0.0, 1.0, 1.0, -0.25], &x, &contract);
    assert_eq!(won([near(4.0, 0.2), near(1.0, 0.2)]), Some(0));
    assert_eq!(won([near(1.0, 0.2), near(4.0, 0.2)]), Some(1));
    assert_eq!(won([near(4.0, 3.0), near(1.0, 0.2)]), None, "the second may be larger");
    assert_eq!(won([near(9.0, 3.0), near(1.0, 0.2)]), Some(0), "the third moves as the first does");
    assert_eq!(won([near(4.0, 0.2), near(0.0, 0.2)]), None, "the third may be larger");
    assert_eq!(won([near(4.0, f64::INFINITY), near(1.0, 0.2)]), None);
    assert_eq!(winner(&[], &[], &contract), None);
}
