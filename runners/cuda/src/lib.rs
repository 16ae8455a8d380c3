//! The native GPU engine on CUDA: kernels compiled at run time for the card that is there, one device that plays all ranks.
//!
//! Driver and compiler are loaded when they are asked for, so everything builds and starts where there is neither. [`CudaEngine::open`]
//! probes first and says what is missing ([`NoDevice`]). Every rank's caches lie on the device; partials travel between ranks through
//! the device's memory by kernels that take the place of the collectives; metadata are derived on the device from lengths, starts and
//! block table. It shares no code with the embedded engine and never calls the reference.

mod attend;
mod batch;
mod caches;
mod context;
mod device;
mod engine;
mod exchange;
mod experts;
mod fabric;
mod layout;
pub mod nvrtc;
mod placement;
mod profile;
mod question;
mod queue;
mod readings;
mod router;
mod selected;
mod session;
mod shape;
mod sharing;
mod states;
mod team;
mod timing;
mod transfer;

pub use device::{Device, NoDevice, Properties, count};
pub use engine::{CudaEngine, Devices, Graphs, Options, has_fault};
pub use fabric::{Fabric, end_after_abort};
pub use queue::{Argument, Buffer, Extent, Graph, Queue};
pub use readings::{CardReading, readings};
pub use timing::{Decode, Exchange};

#[cfg(test)]
fn test_configuration() -> shardcheck_engine::Configuration {
    shardcheck_engine::Configuration {
        attention: shardcheck_engine::Attention::Mla { kv_lora_rank: 16, qk_rope_head_dim: 8, v_head_dim: 8 },
        tp: 4,
        dcp: 2,
        heads_per_rank: 2,
        interleave: 4,
        block_size: 8,
        blocks: 4,
        dtype: shardcheck_formats::Dtype::Bf16,
        kv_dtype: shardcheck_formats::Dtype::Bf16,
        kv_scale: 1.0,
        softmax_scale: 0.25,
        comm_backend: shardcheck_engine::CommBackend::A2a,
        lane_order: shardcheck_engine::LaneOrder::HiLo,
        query_replication: true,
        project_before_merge: false,
        second_group: None,
        kernel_head_widths: vec![],
    }
}
