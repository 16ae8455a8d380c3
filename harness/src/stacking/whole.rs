//! What a stack gives from its first stage to its last, whatever an engine shows in between: one rank, one token at a time.
//!
//! Rows are kept by the number of their token: a token that takes the place of a rejected one has another, and so has what stands behind it.

use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};

use shardcheck_cases::StackTurn;
use shardcheck_engine::StackPlan;
use shardcheck_references::kda::Near;
use shardcheck_references::moe::{Gating, Mlp};
use shardcheck_references::stack::exact;
use shardcheck_references::whole::{FeedForward, Layer, Setting};

use super::StackMaterial;
use crate::judge::Allowed;

/// A row through all layers.
struct WholeRow {
    /// Stream at each place.
    streams: Vec<Vec<Near>>,
    /// Key of each layer.
    keys: Vec<Vec<Near>>,
    /// Behind the last norm.
    normed: Vec<Near>,
    /// Token behind it, where no rounding makes it another.
    token: Option<usize>,
}

/// A row of the draft head.
struct DraftRow {
    key: Vec<Near>,
    stream: Vec<Near>,
    /// Token that it drafts, where no other can come of it.
    token: Option<usize>,
}

/// What is known of the drafts of a request in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drafts {
    /// Drafts that are accepted; `None` where rounding may decide it.
    pub accepted: Option<usize>,
    /// New drafts, as far as they are known.
    pub tokens: Vec<Option<usize>>,
}

/// Rows that were computed, whichever property or engine they were asked for.
#[derive(Default)]
pub(super) struct WholeRows {
    rows: HashMap<u32, WholeRow>,
    /// By the token's number and the token behind it.
    drafted: HashMap<(u32, usize), DraftRow>,
}

/// The oracle of a whole run.
pub struct WholeRun<'a> {
    material: &'a StackMaterial,
    setting: Setting<'a>,
    layers: Vec<Layer<'a>>,
    known: MutexGuard<'a, WholeRows>,
}

impl<'a> WholeRun<'a> {
    /// The oracle of a material, which keeps what it computed.
    pub fn new(material: &'a StackMaterial) -> Self {
        let (case, configuration) = (&material.case, material.configuration());
        let attention = configuration.attention;
        let setting = Setting {
            hidden: case.hidden,
            heads: material.heads(),
            latent: attention.value_dim(),
            up_dim: attention.v_head_dim(),
            scale: f64::from(configuration.softmax_scale),
            epsilon: f64::from(StackPlan::EPSILON),
            rotary: material.weight("rotary", None),
            rotary_width: case.rotary(),
            ranks: material.ranks(),
            expert_ranks: material.expert_ranks(),
            world: configuration.dcp,
            cache: (configuration.kv_dtype, f64::from(configuration.kv_scale)),
            contract: &material.contract,
        };
        let count = case.layers + case.plan().heads_of_drafts();
        let layers = (0..count).map(|layer| weights(material, layer)).collect();
        // a row is complete when it is put in, whatever became of another
        let known = material.whole.lock().unwrap_or_else(PoisonError::into_inner);
        Self { material, setting, layers, known }
    }

    fn embedded(&self, token: usize) -> Vec<Near> {
        let (table, hidden) = (self.material.weight("embedding", None), self.setting.hidden);
        exact(&table[token * hidden..(token + 1) * hidden])
    }

    /// Computes the rows of some tokens, each behind those in front of it.
    fn run(&mut self, numbers: &[u32]) {
        let inputs = &self.material.inputs;
        for (position, number) in numbers.iter().enumerate() {
            if self.known.rows.contains_key(number) {
                continue;
            }
            let mut streams = vec![self.embedded(inputs.tokens[*number as usize] as usize)];
            let mut keys = Vec::new();
            for (layer, weights) in self.layers[..self.material.case.layers].iter().enumerate() {
                let key = |number: &u32| self.known.rows[number].keys[layer].as_slice();
                let before: Vec<&[Near]> = numbers[..position].iter().map(key).collect();
                let own = self.setting.layer(weights, &streams[2 * layer], position, &before);
                keys.push(own.key);
                streams.extend(own.streams);
            }
            let last = self.material.case.plan().places() - 1;
            let normed = self.setting.normed(&streams[last], self.material.weight("norm_weight", Some(last)));
            let token = self.setting.token(self.material.weight("w_head", None), &normed);
            self.known.rows.insert(*number, WholeRow { streams, keys, normed, token });
        }
    }

    /// What the stream of a row may be at a place; `None` where nothing is known.
    pub fn stream(&mut self, numbers: &[u32], place: usize) -> Option<Vec<Allowed>> {
        self.run(numbers);
        let row = &self.known.rows[numbers.last()?].streams[place];
        let is_known = row.iter().all(|near| near.value.is_finite() && near.error.is_finite());
        is_known.then(|| self.material.stored(row))
    }

    /// Token behind some tokens, where no rounding makes it another.
    pub fn token(&mut self, numbers: &[u32]) -> Option<usize> {
        self.run(numbers);
        self.known.rows[numbers.last()?].token
    }

    /// What becomes of the drafts of a request, and what it drafts.
    pub fn drafts(&mut self, turn: &StackTurn, request: usize) -> Drafts {
        let unknown = Drafts { accepted: None, tokens: vec![None; self.material.case.drafts()] };
        let (numbers, rows) = (&turn.turn.tokens[request], turn.turn.new_tokens[request]);
        let drafts = turn.drafted[request] as usize;
        let ids: Vec<usize> =
            numbers.iter().map(|number| self.material.inputs.tokens[*number as usize] as usize).collect();
        let mut last = numbers.len() - 1 - drafts;
        debug_assert!(drafts < rows, "a row in front of the drafts");
        for _ in 0..drafts {
            match self.token(&numbers[..=last]) {
                None => return unknown,
                Some(token) if token == ids[last + 1] => last += 1,
                Some(_) => break,
            }
        }
        let accepted = Some(last + 1 + drafts - numbers.len());
        let behind = match usize::try_from(turn.next[request]) {
            Ok(known) => Some(known),
            Err(_) => self.token(&numbers[..=last]),
        };
        let Some(behind) = behind else { return Drafts { accepted, ..unknown } };
        Drafts { accepted, tokens: self.proposed(&numbers[..=last], &ids, behind) }
    }

    /// New drafts behind some tokens and the one that follows them.
    fn proposed(&mut self, numbers: &[u32], ids: &[usize], behind: usize) -> Vec<Option<usize>> {
        self.run(numbers);
        let of = |position: usize| if position + 1 < numbers.len() { ids[position + 1] } else { behind };
        for (position, number) in numbers.iter().enumerate() {
            let at = (*number, of(position));
            if !self.known.drafted.contains_key(&at) {
                let key = |before: usize| self.known.drafted[&(numbers[before], of(before))].key.as_slice();
                let before: Vec<&[Near]> = (0..position).map(key).collect();
                let row = self.draft_row(of(position), &self.known.rows[number].normed, position, &before);
                self.known.drafted.insert(at, row);
            }
        }
        let last = &self.known.drafted[&(numbers[numbers.len() - 1], behind)];
        let keys: Vec<&[Near]> =
            (0..numbers.len()).map(|at| self.known.drafted[&(numbers[at], of(at))].key.as_slice()).collect();
        let (mut tokens, mut stream) = (vec![last.token], last.stream.clone());
        let mut chain: Vec<Vec<Near>> = Vec::new();
        while tokens.len() < self.material.case.drafts() {
            let Some(token) = tokens[tokens.len() - 1] else {
                tokens.push(None);
                continue;
            };
            let before: Vec<&[Near]> = keys.iter().copied().chain(chain.iter().map(Vec::as_slice)).collect();
            let row = self.draft_row(token, &stream, before.len(), &before);
            tokens.push(row.token);
            stream = row.stream;
            chain.push(row.key);
        }
        tokens
    }

    fn draft_row(&self, token: usize, stream: &[Near], position: usize, before: &[&[Near]]) -> DraftRow {
        let material = self.material;
        let first = material.case.plan().places();
        let norm = |place: usize| material.weight("norm_weight", Some(first + place));
        let mut both = self.setting.normed(&self.embedded(token), norm(0));
        both.extend(self.setting.normed(stream, norm(1)));
        let row = self.setting.projected(material.weight("w_draft", None), &both);
        let own = self.setting.layer(&self.layers[material.case.layers], &row, position, before);
        let [_, stream] = own.streams;
        let normed = self.setting.normed(&stream, norm(4));
        let token = self.setting.token(material.weight("w_head", None), &normed);
        DraftRow { key: own.key, stream, token }
    }
}

/// Weights of a layer; that of a draft head stands behind the others.
fn weights(material: &StackMaterial, layer: usize) -> Layer<'_> {
    let plan = material.case.plan();
    let place = if layer < plan.layers { 2 * layer } else { plan.places() + 2 };
    let of = |name: &str| material.weight(name, Some(layer));
    let mlp = |dense: usize| {
        let [gate, up, down] = ["w_gate", "w_up", "w_down"].map(|name| material.weight(name, Some(dense)));
        FeedForward::Mlp(Mlp { gate: Some(gate), up, down, gating: Gating::Silu })
    };
    let feed_forward = match (layer < plan.layers, layer.checked_sub(plan.dense())) {
        (true, Some(mixture)) => {
            let count = material.case.mixture.map_or(0, |own| own.experts);
            let all =
                ["expert_gate", "expert_up", "expert_down"].map(|name| material.weight(name, Some(mixture)));
            let size = material.case.hidden * material.case.inner;
            let expert = |index: usize| {
                let [gate, up, down] = all.map(|own| &own[index * size..(index + 1) * size]);
                Mlp { gate: Some(gate), up, down, gating: Gating::Silu }
            };
            let router = material.weight("w_router", Some(mixture));
            FeedForward::Experts { router, experts: (0..count).map(expert).collect() }
        }
        (true, None) => mlp(layer),
        (false, _) => mlp(plan.dense()),
    };
    Layer {
        norms: [0, 1].map(|own| material.weight("norm_weight", Some(place + own))),
        query: of("w_query"),
        key: of("w_key"),
        up: of("w_uv"),
        output: of("w_output"),
        feed_forward,
    }
}
