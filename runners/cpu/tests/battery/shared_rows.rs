//! Attention of shared rows for the battery: hit prefixes, prompts of every length, decodes, caches over ranks, queries of eight bits.

use shardcheck_engine::{
    Attention, CompressPlan, IndexPlan, Operation, PcpDecodes, PcpPlan, PcpStrategy, Tensor, Tensors,
};
use shardcheck_formats::Dtype;

use super::{Battery, Scene, step, uniform};

const NAMES: [&str; 9] = [
    "out",
    "lse",
    "rows",
    "row_lens",
    "kernel_query",
    "gathered_key",
    "gathered_value",
    "local_out",
    "local_lse",
];

impl Battery<'_> {
    pub(super) fn shared_rows(&mut self) {
        let splits = [
            (PcpStrategy::HeadTail, PcpDecodes::Replicated, 0),
            (PcpStrategy::HeadTail, PcpDecodes::Owned, 9),
            (PcpStrategy::HeadTailOrWhole, PcpDecodes::Replicated, 0),
            (PcpStrategy::RoundRobin, PcpDecodes::Split, 11),
            (PcpStrategy::Contiguous, PcpDecodes::Replicated, 0),
        ];
        for (strategy, decodes, padded_rows) in splits {
            for (scene, query_dtype, query_scale) in
                [(latent(), Dtype::Bf16, 1.0), (grouped(), Dtype::E4m3fn, 0.125)]
            {
                let plan = PcpPlan { world: 3, strategy, decodes, padded_rows, query_dtype, query_scale };
                let mut session = scene.open(self.engine);
                let _ = step(session.as_mut(), &Operation::WriteKv, &mut scene.write_context_inputs());
                let prefills = [1u64, 0, 1, 1, 1, 0];
                let flags = Tensor::from_codes(Dtype::U8, &[prefills.len()], &prefills);
                let mut inputs = scene.context_inputs().with("is_prefilling", flags);
                let reply = step(session.as_mut(), &Operation::AttendPcp { plan }, &mut inputs);
                self.reply("prefill", &NAMES, &reply);
            }
        }
    }
}

impl Battery<'_> {
    /// Two groups that overlap, and batches that are not divided.
    pub(super) fn groups(&mut self) {
        let (strategy, decodes) = (PcpStrategy::RoundRobin, PcpDecodes::Split);
        for starts in [vec![0, 9, 10, 11], vec![0, 1, 2, 3, 14, 20], vec![0, 2, 5], vec![0, 12]] {
            let count = starts.len() - 1;
            let mut inputs = Tensors::new()
                .with("query_start_loc", Tensor::from_i32(&[count + 1], &starts))
                .with("context_lens", Tensor::from_i32(&[count], &vec![3; count]))
                .with("is_prefilling", Tensor::from_codes(Dtype::U8, &[count], &vec![1; count]));
            let operation =
                Operation::PcpLayout { world: 3, strategy, decodes, padded_rows: 0, overlap: true };
            let reply = step(Scene::small(1).open(self.engine).as_mut(), &operation, &mut inputs);
            self.reply("pcp", &["rows", "positions", "row_lens", "restore", "kv_writer", "groups"], &reply);
        }
    }
}

impl Battery<'_> {
    /// Selections and compressions of shared rows: hit prefixes, decodes, graphs, blocks over ranks and steps.
    pub(super) fn shared_tokens(&mut self) {
        let requests = [(5usize, 11usize, 1u64), (9, 1, 0), (0, 7, 1), (4, 2, 1), (0, 5, 1), (11, 1, 0)];
        let rows: usize = requests.iter().map(|(_, rows, _)| rows).sum();
        let computed: usize = requests.iter().map(|(computed, _, _)| computed).sum();
        let starts: Vec<i32> = (0..=requests.len())
            .map(|end| requests[..end].iter().map(|(_, rows, _)| *rows as i32).sum())
            .collect();
        let contexts: Vec<i32> = requests.iter().map(|(computed, _, _)| *computed as i32).collect();
        let flags: Vec<u64> = requests.iter().map(|(_, _, prefills)| *prefills).collect();
        let batch = Tensors::new()
            .with("query_start_loc", Tensor::from_i32(&[starts.len()], &starts))
            .with("context_lens", Tensor::from_i32(&[contexts.len()], &contexts))
            .with("is_prefilling", Tensor::from_codes(Dtype::U8, &[flags.len()], &flags));
        let drawn = |dtype: Dtype, seed: u64, shape: &[usize]| {
            Tensor::from_f32(dtype, shape, &uniform(seed, shape.iter().product()))
        };
        for (strategy, decodes, padded_rows) in [
            (PcpStrategy::HeadTail, PcpDecodes::Owned, 0),
            (PcpStrategy::RoundRobin, PcpDecodes::Split, 12),
            (PcpStrategy::Contiguous, PcpDecodes::Replicated, 0),
        ] {
            let mut inputs = batch
                .clone()
                .with("index_query", drawn(Dtype::Bf16, 1, &[rows, 2, 8]))
                .with("index_weights", drawn(Dtype::F32, 2, &[rows, 2]))
                .with("index_key", drawn(Dtype::Bf16, 3, &[rows, 8]))
                .with("index_context", drawn(Dtype::Bf16, 4, &[computed, 8]));
            let plan = IndexPlan { world: 3, strategy, decodes, padded_rows, top_k: 4 };
            let mut session = Scene::small(1).open(self.engine);
            let reply = step(session.as_mut(), &Operation::SelectPcp { plan }, &mut inputs);
            let names = ["topk", "rows", "row_lens", "gathered_key", "index_scores", "local_topk"];
            self.reply("index", &names, &reply);
            for (ratio, overlap) in [(4, true), (3, false)] {
                let (columns, mut held) = (6, 0);
                for (computed, _, _) in requests {
                    held += computed - (computed / ratio).saturating_sub(usize::from(overlap)) * ratio;
                }
                let mut inputs = batch
                    .clone()
                    .with("kv", drawn(Dtype::F32, 5, &[rows, columns]))
                    .with("gate", drawn(Dtype::F32, 6, &[rows, columns]))
                    .with("gate_bias", drawn(Dtype::F32, 7, &[ratio, columns]))
                    .with("state_kv", drawn(Dtype::F32, 8, &[held, columns]))
                    .with("state_gate", drawn(Dtype::F32, 9, &[held, columns]));
                let plan = CompressPlan { world: 3, strategy, decodes, padded_rows, ratio, overlap };
                let reply = step(session.as_mut(), &Operation::CompressPcp { plan }, &mut inputs);
                let names = ["entry_start_loc", "entries", "rows", "entry_lens", "new_state_kv"];
                self.reply("compress", &names, &reply);
            }
        }
    }
}

fn latent() -> Scene {
    Scene::small(2).with(|s| {
        s.configuration.interleave = 2;
        s.requests = vec![(5, 11), (9, 1), (0, 7), (4, 2), (0, 1), (13, 1)];
        s.padded_rows = 0;
    })
}

fn grouped() -> Scene {
    latent().with(|s| {
        s.configuration.attention = Attention::Gqa { kv_heads: 2, head_dim: 16, v_head_dim: 16 };
        s.requests.swap(0, 2);
    })
}
