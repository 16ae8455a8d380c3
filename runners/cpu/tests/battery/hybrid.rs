//! Sessions of a stack with recurrent layers and every kind of mixture for the battery: rows that take the place of rejected ones, a fork, a
//! recycled slot, padding.

use shardcheck_engine::{
    Activation, ExpertChoice, KdaGate, KdaPlan, MaskedFill, Operation, PcpDecodes, PcpStrategy, Renormalise,
    Router, Scoring, SlotList, StackExperts, StackPcp, StackPlan, StreamLayout, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

use super::Battery;
use crate::scene::{Scene, step, uniform};

const PATTERN: &str = "mkkskrsr";
const LAYERS: usize = 8;
const LATENT_LAYERS: usize = 5;
const SELECTIONS: usize = 2;
const SELECTED: usize = 3;
const RECURRENT: usize = 3;
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
const EXPERTS: usize = 6;
const TOP_K: usize = 2;
const MIXTURES: usize = LAYERS - 1;
const HASHED: usize = 2;
const NARROW: usize = 9;
const SHARED: usize = 5;
const KEY_HEADS: usize = 4;
const VALUE_HEADS: usize = 8;
const DEPTH: usize = 4;
const WIDTH: usize = 3;
const TAPS: usize = 3;

const SHOWN: [&str; 19] = [
    "hidden",
    "normed",
    "update",
    "query",
    "key",
    "attention",
    "gated",
    "router_logits",
    "topk_ids",
    "latent",
    "latent_sum",
    "latent_normed",
    "kda_channels",
    "kda_gates",
    "kda_out",
    "kda_state",
    "kda_window",
    "logits",
    "tokens",
];

/// Length and new rows of a request; the slot that it reads (−1: new), rows that count there, the slot that it writes.
type Request = [i32; 5];

/// Both requests, and rows of padding.
const STEPS: [([Request; 2], usize); 6] = [
    ([[6, 6, -1, 0, 0], [2, 2, -1, 0, 1]], 0),
    ([[9, 3, 0, 6, 0], [4, 2, 1, 2, 1]], 1),
    ([[9, 2, 0, 1, 0], [5, 1, 1, 2, 1]], 2),
    ([[10, 1, 0, 2, 0], [7, 2, 0, 2, 2]], 0),
    ([[11, 1, 0, 1, 0], [1, 1, -1, 0, 1]], 0),
    ([[12, 1, 0, 1, 0], [2, 1, 1, 1, 1]], 1),
];

fn plan(stream: StreamLayout, latent: bool, pcp: Option<StackPcp>) -> StackPlan {
    let router = Router {
        scoring: Scoring::Sigmoid,
        choice: ExpertChoice::Biased,
        top_k: TOP_K,
        groups: 1,
        top_groups: 1,
        fill: MaskedFill::NegativeInfinity,
        renormalise: Renormalise::Sum,
        scale: 1.0,
    };
    StackPlan {
        layers: LAYERS,
        stream,
        experts: Some(StackExperts {
            dense: LAYERS - MIXTURES,
            router,
            hashed: HASHED,
            latent,
            shared: true,
        }),
        pattern: Some(PATTERN.parse().unwrap()),
        recurrent: Some(KdaPlan { gate: KdaGate::Softplus, slots: 3, drafts: 2, chunk: 2 }),
        activation: if latent { Activation::SiluGated } else { Activation::SituGated },
        output_gate: latent,
        list: Some(SlotList::Packed),
        drafts: 0,
        pcp,
    }
}

impl Battery<'_> {
    pub(super) fn hybrids(&mut self) {
        let chunks = StackPcp {
            world: 2,
            strategy: PcpStrategy::HeadTail,
            decodes: PcpDecodes::Replicated,
            merged: false,
        };
        let turns = StackPcp {
            world: 3,
            strategy: PcpStrategy::RoundRobin,
            decodes: PcpDecodes::Split,
            merged: true,
        };
        for (stream, latent, pcp) in [
            (StreamLayout::Whole, true, None),
            (StreamLayout::Sharded, false, None),
            (StreamLayout::Whole, true, Some(chunks)),
            (StreamLayout::Sharded, false, Some(turns)),
        ] {
            let scene = Scene::small(RANKS).with(|scene| scene.configuration.dcp = 2);
            let mut session = scene.open(self.engine);
            for (number, (requests, padding)) in STEPS.iter().enumerate() {
                let operation = Operation::Forward { plan: plan(stream, latent, pcp) };
                let mut given = inputs(number, requests, *padding, latent);
                if pcp.is_some() {
                    let prompts = requests.map(|request| u64::from(request[1] > 1));
                    given.insert("is_prefilling", Tensor::from_codes(Dtype::U8, &[2], &prompts));
                }
                let reply = step(session.as_mut(), &operation, &mut given);
                let of_ranks = ["rows", "restored"].into_iter().filter(|_| pcp.is_some());
                let names: Vec<&str> = SHOWN
                    .into_iter()
                    .filter(|name| latent || !name.starts_with("latent") && *name != "gated")
                    .chain(of_ranks)
                    .collect();
                self.reply("stack", &names, &reply);
            }
        }
    }
}

fn drawn(seed: u64, dtype: Dtype, shape: &[usize], size: f32) -> Tensor {
    let values: Vec<f32> =
        uniform(1300 + seed, shape.iter().product()).iter().map(|value| value * size).collect();
    Tensor::from_f32(dtype, shape, &values)
}

fn inputs(number: usize, requests: &[Request; 2], padding: usize, latent: bool) -> Tensors {
    let column = |at: usize| {
        let values = requests.map(|request| request[at]);
        Tensor::from_i32(&[2], &values)
    };
    let starts = [0, requests[0][1], requests[0][1] + requests[1][1]];
    let rows = starts[2] as usize + padding;
    let ids: Vec<i32> = (0..rows).map(|row| ((7 * row + 5 * number) % VOCABULARY) as i32).collect();
    let half = |seed: u64, shape: &[usize]| drawn(seed, Dtype::Bf16, shape, 1.0);
    let width = if latent { NARROW } else { HIDDEN };
    let mut tensors = Tensors::new()
        .with("token_ids", Tensor::from_i32(&[rows], &ids))
        .with("seq_lens", column(0))
        .with("query_start_loc", Tensor::from_i32(&[3], &starts))
        .with("block_table", Tensor::from_i32(&[2, 3], &[5, 9, 9999, 2, 40, 9999]))
        .with("selected", selected(requests, padding))
        .with("read_slots", column(2))
        .with("accepted", column(3))
        .with("write_slots", column(4))
        .with("embedding", drawn(1, Dtype::Bf16, &[VOCABULARY, HIDDEN], 2.0))
        .with("norm_weight", drawn(2, Dtype::F32, &[2 * LAYERS + 1, HIDDEN], 1.0))
        .with("rotary", drawn(3, Dtype::F32, &[POSITIONS, ROTARY], 1.0))
        .with("w_query", half(4, &[LATENT_LAYERS, HEADS, KEY_DIM, HIDDEN]))
        .with("w_key", drawn(5, Dtype::Bf16, &[LATENT_LAYERS, KEY_DIM, HIDDEN], 0.5))
        .with("w_uv", half(6, &[LATENT_LAYERS, HEADS, LATENT, UP_DIM]))
        .with("w_output", half(7, &[LATENT_LAYERS, HIDDEN, HEADS * UP_DIM]))
        .with("w_gate", half(8, &[LAYERS - MIXTURES, INNER, HIDDEN]))
        .with("w_up", half(9, &[LAYERS - MIXTURES, INNER, HIDDEN]))
        .with("w_down", half(10, &[LAYERS - MIXTURES, HIDDEN, INNER]))
        .with("w_router", half(11, &[MIXTURES, EXPERTS, HIDDEN]))
        .with("router_bias", drawn(12, Dtype::F32, &[MIXTURES, EXPERTS], 1.0))
        .with("hash_table", table())
        .with("expert_gate", half(13, &[MIXTURES, EXPERTS, INNER, width]))
        .with("expert_up", half(14, &[MIXTURES, EXPERTS, INNER, width]))
        .with("expert_down", half(15, &[MIXTURES, EXPERTS, width, INNER]))
        .with("shared_gate", half(16, &[MIXTURES, SHARED, HIDDEN]))
        .with("shared_up", half(17, &[MIXTURES, SHARED, HIDDEN]))
        .with("shared_down", half(18, &[MIXTURES, HIDDEN, SHARED]))
        .with("w_head", half(19, &[VOCABULARY, HIDDEN]));
    if latent {
        tensors.insert("w_output_gate", half(23, &[LATENT_LAYERS, HEADS * UP_DIM, HIDDEN]));
        tensors.insert("latent_down", half(20, &[MIXTURES, NARROW, HIDDEN]));
        tensors.insert("latent_norm", drawn(21, Dtype::F32, &[MIXTURES, NARROW], 1.0));
        tensors.insert("latent_up", half(22, &[MIXTURES, HIDDEN, NARROW]));
    }
    recurrent(tensors)
}

/// Experts of each token in both layers that are routed by token id.
fn table() -> Tensor {
    let entry = |at: usize| {
        let (token, place) = (at / TOP_K, at % TOP_K);
        ((token * 5 + token / VOCABULARY + 2 * place) % EXPERTS) as i32
    };
    let entries: Vec<i32> = (0..HASHED * VOCABULARY * TOP_K).map(entry).collect();
    Tensor::from_i32(&[HASHED, VOCABULARY, TOP_K], &entries)
}

/// Tokens of each row in both layers that have some named: other ones in the second.
fn selected(requests: &[Request; 2], padding: usize) -> Tensor {
    let mut all = Vec::new();
    for layer in 0..SELECTIONS as i32 {
        for [length, rows, ..] in requests {
            for row in 0..*rows {
                let seen = length - rows + row + 1;
                let entry = |place: i32| {
                    if place < seen {
                        (seen - 1 + (1 - 2 * layer) * place + layer).rem_euclid(seen)
                    } else {
                        -1
                    }
                };
                all.extend((0..SELECTED as i32).map(entry));
            }
        }
        all.extend(vec![-1; padding * SELECTED]);
    }
    Tensor::from_i32(&[SELECTIONS, all.len() / SELECTIONS / SELECTED, SELECTED], &all)
}

fn recurrent(tensors: Tensors) -> Tensors {
    let half = |seed: u64, shape: &[usize]| drawn(seed, Dtype::Bf16, shape, 1.0);
    let single = |seed: u64, shape: &[usize]| drawn(seed, Dtype::F32, shape, 1.0);
    let channels = 2 * KEY_HEADS * DEPTH + VALUE_HEADS * WIDTH;
    tensors
        .with("kda_query", half(30, &[RECURRENT, KEY_HEADS, DEPTH, HIDDEN]))
        .with("kda_key", half(31, &[RECURRENT, KEY_HEADS, DEPTH, HIDDEN]))
        .with("kda_value", half(32, &[RECURRENT, VALUE_HEADS, WIDTH, HIDDEN]))
        .with("kda_gate", half(33, &[RECURRENT, VALUE_HEADS, DEPTH, HIDDEN]))
        .with("kda_beta", half(34, &[RECURRENT, VALUE_HEADS, HIDDEN]))
        .with("kda_output_gate", half(35, &[RECURRENT, VALUE_HEADS, WIDTH, HIDDEN]))
        .with("kda_convolution", single(36, &[RECURRENT, channels, TAPS]))
        .with("kda_a_log", single(37, &[RECURRENT, VALUE_HEADS]))
        .with("kda_bias", single(38, &[RECURRENT, VALUE_HEADS, DEPTH]))
        .with("kda_norm", single(39, &[RECURRENT, WIDTH]))
        .with("kda_output", half(40, &[RECURRENT, HIDDEN, VALUE_HEADS * WIDTH]))
}
