//! Attention with sinks for the battery: groups of ranks, both exchanges, a rank alone, ranks without tokens, rows of padding.

use shardcheck_engine::{CommBackend, Operation, Tensor};
use shardcheck_formats::Dtype;

use super::{Battery, Scene, step};

const NAMES: [&str; 4] = ["out", "lse", "partial_out", "partial_lse"];

impl Battery<'_> {
    pub(super) fn sinks(&mut self) {
        for (world, backend) in [(1, CommBackend::AgRs), (3, CommBackend::AgRs), (3, CommBackend::A2a)] {
            let scene = scene(world, backend);
            let mut session = scene.open(self.engine);
            let written = step(session.as_mut(), &Operation::WriteKv, &mut scene.write_inputs());
            let heads = scene.configuration.total_heads();
            let sinks: Vec<f32> = (0..heads).map(|head| 1.5 + 0.75 * head as f32).collect();
            let mut inputs =
                scene.attend_inputs().with("sinks", Tensor::from_f32(Dtype::F32, &[heads], &sinks));
            let reply = written.and_then(|_| step(session.as_mut(), &Operation::AttendSinks, &mut inputs));
            self.reply("sinks", &NAMES, &reply);
            inputs.remove("sinks");
            let without = step(session.as_mut(), &Operation::AttendSinks, &mut inputs);
            self.reply("sinks", &NAMES, &without);
        }
    }
}

fn scene(world: usize, backend: CommBackend) -> Scene {
    Scene::small(world).with(|s| {
        s.configuration.tp = 2 * world;
        s.configuration.comm_backend = backend;
        s.requests = vec![(0, 1), (30, 3), (0, 0), (1, 1), (50, 1)];
    })
}
