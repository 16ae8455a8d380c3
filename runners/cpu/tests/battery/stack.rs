//! Sessions of a stack for the battery: prefill, rows that take the place of rejected ones, a second request, padding; a stream that is
//! whole and one that is sharded; an MLP and experts; a draft head.

use shardcheck_engine::{
    Activation, ExpertChoice, MaskedFill, Operation, Renormalise, Router, Scoring, StackExperts, StackPlan,
    StreamLayout, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

use super::Battery;
use crate::scene::{Scene, step, uniform};

const LAYERS: usize = 3;
const HIDDEN: usize = 12;
const INNER: usize = 7;
const VOCABULARY: usize = 11;
const RANKS: usize = 4;
const KEY_DIM: usize = 24;
const LATENT: usize = 16;
const UP_DIM: usize = 4;
const ROTARY: usize = 8;
const POSITIONS: usize = 32;
const HEADS: usize = 2 * RANKS;
const EXPERTS: usize = 5;

/// One layer with an MLP, two with experts.
const MIXED: StackExperts = StackExperts {
    dense: 1,
    router: Router {
        scoring: Scoring::Sigmoid,
        choice: ExpertChoice::Scores,
        top_k: 2,
        groups: 1,
        top_groups: 1,
        fill: MaskedFill::NegativeInfinity,
        renormalise: Renormalise::Sum,
        scale: 1.0,
    },
    hashed: 0,
    latent: false,
    shared: false,
};
const MIXTURES: usize = LAYERS - MIXED.dense;

const SHOWN: [&str; 10] = [
    "hidden",
    "normed",
    "update",
    "query",
    "key",
    "attention",
    "router_logits",
    "topk_ids",
    "logits",
    "tokens",
];

/// `(length, new rows)` of both requests, and rows of padding.
const STEPS: [([(i32, i32); 2], usize); 4] =
    [([(9, 9), (0, 0)], 0), ([(13, 4), (5, 5)], 1), ([(12, 2), (6, 1)], 2), ([(13, 1), (7, 1)], 0)];

impl Battery<'_> {
    pub(super) fn stacks(&mut self) {
        for stream in StreamLayout::ALL {
            let scene = Scene::small(RANKS).with(|scene| scene.configuration.dcp = 2);
            let mut session = scene.open(self.engine);
            for (number, (requests, padding)) in STEPS.iter().enumerate() {
                let plan = StackPlan {
                    layers: LAYERS,
                    stream,
                    experts: Some(MIXED),
                    pattern: None,
                    recurrent: None,
                    activation: Activation::SiluGated,
                    output_gate: false,
                    list: None,
                    drafts: 0,
                    pcp: None,
                };
                let operation = Operation::Forward { plan };
                let reply = step(session.as_mut(), &operation, &mut inputs(number, requests, *padding));
                self.reply("stack", &SHOWN, &reply);
            }
        }
    }

    /// Drafts of which none, one, or all are the target's own, and a prompt whose next token is known.
    pub(super) fn draft_heads(&mut self) {
        let scene = Scene::small(RANKS).with(|scene| scene.configuration.dcp = 2);
        let plan = StackPlan {
            layers: LAYERS,
            stream: StreamLayout::Whole,
            experts: Some(MIXED),
            pattern: None,
            recurrent: None,
            activation: Activation::SiluGated,
            output_gate: false,
            list: None,
            drafts: 3,
            pcp: None,
        };
        let operation = Operation::Forward { plan };
        // drafts of the second step that are taken from what the target gave for the rows before them
        let mut ids: Vec<i32> = ids(1, 10);
        for right in 0..=3 {
            let mut session = scene.open(self.engine);
            let mut tokens = Vec::new();
            for (number, (requests, padding)) in STEPS.iter().enumerate() {
                let drafted = [[0, 0], [3, 0], [1, 0], [0, 0]][number];
                let next = [[4, -1], [-1, 7], [-1, -1], [-1, -1]][number];
                let mut given = of_layers(number, requests, *padding, 1)
                    .with("w_draft", matrix(16, &[HIDDEN, 2 * HIDDEN], 9.0))
                    .with("draft_counts", Tensor::from_i32(&[2], &drafted))
                    .with("next_tokens", Tensor::from_i32(&[2], &next));
                if number == 1 {
                    given.insert("token_ids", Tensor::from_i32(&[ids.len()], &ids));
                }
                let reply = step(session.as_mut(), &operation, &mut given);
                self.reply("stack", &SHOWN, &reply);
                self.reply("stack", &["accepted_drafts", "draft_tokens"], &reply);
                if let (1, Ok(reply)) = (number, &reply) {
                    tokens = reply.outputs.find("tokens").map_or(Vec::new(), Tensor::to_i64);
                }
            }
            if let Some(token) = tokens.get(right).filter(|_| right < 3) {
                ids[right + 1] = *token as i32;
            }
        }
    }
}

/// Tokens of a step's rows.
fn ids(number: usize, rows: usize) -> Vec<i32> {
    (0..rows).map(|row| ((7 * row + 5 * number) % VOCABULARY) as i32).collect()
}

fn drawn(seed: u64, dtype: Dtype, shape: &[usize], size: f32) -> Tensor {
    let values: Vec<f32> =
        uniform(900 + seed, shape.iter().product()).iter().map(|value| value * size).collect();
    Tensor::from_f32(dtype, shape, &values)
}

fn matrix(seed: u64, shape: &[usize], size: f32) -> Tensor {
    drawn(seed, Dtype::Bf16, shape, size)
}

fn inputs(number: usize, requests: &[(i32, i32); 2], padding: usize) -> Tensors {
    of_layers(number, requests, padding, 0)
}

/// Tensors of a step with so many draft heads.
fn of_layers(number: usize, requests: &[(i32, i32); 2], padding: usize, heads: usize) -> Tensors {
    let (layers, dense) = (LAYERS + heads, MIXED.dense + heads);
    let mut starts = vec![0];
    requests.iter().for_each(|(_, rows)| starts.push(starts[starts.len() - 1] + rows));
    let rows = starts[requests.len()] as usize + padding;
    let ids = ids(number, rows);
    let lens: Vec<i32> = requests.iter().map(|(len, _)| *len).collect();
    Tensors::new()
        .with("token_ids", Tensor::from_i32(&[rows], &ids))
        .with("seq_lens", Tensor::from_i32(&[2], &lens))
        .with("query_start_loc", Tensor::from_i32(&[3], &starts))
        .with("block_table", Tensor::from_i32(&[2, 3], &[5, 9, 9999, 2, 40, 9999]))
        .with("embedding", matrix(1, &[VOCABULARY, HIDDEN], 2.0))
        .with("norm_weight", drawn(2, Dtype::F32, &[2 * LAYERS + 1 + 5 * heads, HIDDEN], 1.0))
        .with("rotary", drawn(3, Dtype::F32, &[POSITIONS, ROTARY], 1.0))
        .with("w_query", matrix(4, &[layers, HEADS, KEY_DIM, HIDDEN], 1.0))
        .with("w_key", matrix(5, &[layers, KEY_DIM, HIDDEN], 0.5))
        .with("w_uv", matrix(6, &[layers, HEADS, LATENT, UP_DIM], 1.0))
        .with("w_output", matrix(7, &[layers, HIDDEN, HEADS * UP_DIM], 1.0))
        .with("w_gate", matrix(8, &[dense, INNER, HIDDEN], 1.0))
        .with("w_up", matrix(9, &[dense, INNER, HIDDEN], 1.0))
        .with("w_down", matrix(10, &[dense, HIDDEN, INNER], 1.0))
        .with("w_router", matrix(12, &[MIXTURES, EXPERTS, HIDDEN], 1.0))
        .with("expert_gate", matrix(13, &[MIXTURES, EXPERTS, INNER, HIDDEN], 1.0))
        .with("expert_up", matrix(14, &[MIXTURES, EXPERTS, INNER, HIDDEN], 1.0))
        .with("expert_down", matrix(15, &[MIXTURES, EXPERTS, HIDDEN, INNER], 1.0))
        .with("w_head", matrix(11, &[VOCABULARY, HIDDEN], 1.0))
}
