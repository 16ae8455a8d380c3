//! Selections of tokens for the battery: rows that see more and fewer tokens than k, ties, negative scores, both formats of keys.

use shardcheck_engine::{
    IndexSharing, IndexerType, Operation, SelectionMode, Selector, SharingRule, SlotList, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

use super::{Battery, Scene, step};
use crate::scene::uniform;

const HEADS: usize = 2;
const WIDTH: usize = 8;

/// How scores come out.
#[derive(Clone, Copy, PartialEq)]
enum Scores {
    Any,
    Equal,
    Negative,
}

impl Battery<'_> {
    pub(super) fn selections(&mut self) {
        for list in SlotList::ALL {
            for mode in SelectionMode::ALL {
                for (dtype, scores) in [
                    (Dtype::Bf16, Scores::Any),
                    (Dtype::Bf16, Scores::Equal),
                    (Dtype::Bf16, Scores::Negative),
                    (Dtype::E4m3fn, Scores::Any),
                ] {
                    for top_k in [1, 5, 40] {
                        let scene = scene();
                        let mut inputs = inputs(&scene, dtype, scores);
                        let operation = Operation::SelectSparse { selector: Selector { top_k, mode, list } };
                        let reply = step(scene.open(self.engine).as_mut(), &operation, &mut inputs);
                        self.reply("sparse", &["topk", "counts", "indptr", "slots", "index_scores"], &reply);
                    }
                }
            }
        }
    }
}

impl Battery<'_> {
    /// Layers that share a selection: periods, lists that are too short, drafts, and what contradicts itself.
    pub(super) fn layers_that_share(&mut self) {
        use IndexerType::{Full, Shared};
        let lists = [(None, None), (Some("FSS"), None), (Some("FSFSFS"), Some(vec![Full, Full, Shared]))];
        for rule in SharingRule::ALL {
            for (frequency, offset, index_cache) in
                [(1, None, false), (1, None, true), (3, None, false), (3, Some(0), true), (2, Some(3), false)]
            {
                for (pattern, types) in lists.clone() {
                    let pattern = pattern.map(str::to_owned);
                    let sharing = IndexSharing {
                        rule,
                        layers: 9,
                        draft_layers: 2,
                        index_cache,
                        frequency,
                        // the first layer would share
                        offset: offset.filter(|offset| *offset > 0 || rule == SharingRule::Atom),
                        pattern,
                        types,
                    };
                    let operation = Operation::IndexLayers { sharing };
                    let mut session = Scene::small(1).open(self.engine);
                    let reply = step(session.as_mut(), &operation, &mut Tensors::new());
                    self.reply("sharing", &["computes", "source", "rebuilds"], &reply);
                }
            }
        }
    }
}

fn scene() -> Scene {
    Scene::small(3).with(|s| {
        s.configuration.interleave = 2;
        s.requests = vec![(30, 3), (0, 0), (0, 4), (41, 2), (5, 1), (150, 1)];
    })
}

/// Keys in every slot of every rank, so that one from the wrong slot counts as well as any.
fn inputs(scene: &Scene, dtype: Dtype, scores: Scores) -> Tensors {
    let configuration = &scene.configuration;
    let slots = [configuration.tp, configuration.blocks, configuration.block_size];
    let count: usize = slots.iter().product();
    let shaped = |value: f32| match scores {
        Scores::Any => value,
        Scores::Equal => (2.0 * value).round(),
        Scores::Negative => value.abs(),
    };
    let drawn = |seed: u64, count: usize| uniform(seed, count).into_iter().map(shaped).collect::<Vec<_>>();
    let mut weights = drawn(3, scene.rows() * HEADS);
    if scores == Scores::Negative {
        weights.iter_mut().for_each(|weight| *weight = -weight.abs());
    }
    let (query, keys) = (drawn(1, scene.rows() * HEADS * WIDTH), drawn(2, count * WIDTH));
    let mut inputs = scene
        .metadata()
        .with("index_query", Tensor::from_f32(dtype, &[scene.rows(), HEADS, WIDTH], &query))
        .with("index_weights", Tensor::from_f32(Dtype::F32, &[scene.rows(), HEADS], &weights))
        .with("index_cache", Tensor::from_f32(dtype, &[slots[0], slots[1], slots[2], WIDTH], &keys));
    if dtype == Dtype::E4m3fn {
        let scales: Vec<f32> = uniform(4, count).iter().map(|scale| 0.1 + scale.abs()).collect();
        inputs.insert("index_scale", Tensor::from_f32(Dtype::F32, &slots, &scales));
    }
    inputs
}
