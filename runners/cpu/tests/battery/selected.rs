//! Attention over selected tokens for the battery: rows of several and of none, ranks that own nothing, both formats of caches.

use shardcheck_engine::{Operation, SlotList, Tensor, Tensors};
use shardcheck_formats::Dtype;

use super::{Battery, Scene, step};

const NAMES: [&str; 8] =
    ["out", "lse", "partial_out", "partial_lse", "gathered_query", "counts", "indptr", "slots"];

impl Battery<'_> {
    pub(super) fn selected(&mut self) {
        for list in SlotList::ALL {
            for (dtype, scale) in [(Dtype::Bf16, 1.0), (Dtype::E4m3fn, 0.5)] {
                for top_k in [1, 4, 9] {
                    let scene = scene(dtype, scale);
                    let mut session = scene.open(self.engine);
                    let written = step(session.as_mut(), &Operation::WriteKv, &mut scene.write_inputs());
                    let mut inputs = inputs(&scene, top_k);
                    let operation = Operation::AttendSelected { list, shared: false };
                    let reply = written.and_then(|_| step(session.as_mut(), &operation, &mut inputs));
                    self.reply("selected", &NAMES, &reply);
                    let mut fewer = without_first(&scene, top_k);
                    let full = step(session.as_mut(), &operation, &mut fewer);
                    self.reply("shared", &NAMES, &full);
                    fewer.remove("topk");
                    let shared = Operation::AttendSelected { list, shared: true };
                    let reply = step(session.as_mut(), &shared, &mut fewer);
                    self.reply("shared", &NAMES, &reply);
                }
            }
        }
    }
}

fn scene(dtype: Dtype, scale: f32) -> Scene {
    Scene::small(3).with(|s| {
        s.configuration.interleave = 2;
        s.configuration.kv_dtype = dtype;
        s.configuration.kv_scale = scale;
        s.requests = vec![(0, 1), (30, 3), (0, 0), (21, 2), (50, 1)];
    })
}

/// Every fifth row selects nothing; others up to k tokens, from the newest to the oldest, every second or third of them.
fn inputs(scene: &Scene, top_k: usize) -> Tensors {
    let mut topk: Vec<i32> = Vec::new();
    for (request, (cached, rows)) in scene.requests.iter().enumerate() {
        for t in 0..*rows {
            let own = (0..=cached + t).rev().step_by(2 + request % 2);
            let count = if topk.len() / top_k % 5 == 3 { 0 } else { top_k };
            let end = topk.len() + top_k;
            topk.extend(own.take(count).map(|position| position as i32));
            topk.resize(end, -1);
        }
    }
    topk.resize(scene.rows() * top_k, -1);
    scene.attend_inputs().with("topk", Tensor::from_i32(&[scene.rows(), top_k], &topk))
}

/// The same without the first token of each row.
fn without_first(scene: &Scene, top_k: usize) -> Tensors {
    let mut given = inputs(scene, top_k);
    let mut topk: Vec<i32> = given.get("topk").unwrap().to_i64().into_iter().map(|p| p as i32).collect();
    for row in topk.chunks_exact_mut(top_k) {
        row.rotate_left(1);
        row[top_k - 1] = -1;
    }
    given.insert("topk", Tensor::from_i32(&[scene.rows(), top_k], &topk));
    given
}
