//! The interface between the harness and any engine under test.
//!
//! An [`Engine`] declares a [`Profile`], answers [`Engine::validate`] for launch settings, and opens a
//! [`Session`] for a [`Configuration`]. A session performs one [`Operation`] per [`Session::step`]; its caches and
//! metadata live as long as the session does. Every array in and out is a named [`Tensor`]; results carry a
//! rank axis, because all ranks are judged and not rank 0 alone.

mod acceptance;
pub mod archive;
mod configuration;
mod effective;
mod indexing;
mod kda;
mod large;
mod moe;
mod operation;
mod prefill;
mod profile;
mod session;
mod settings;
mod sharing;
mod sparse;
mod stack;
mod tensor;
mod vocabulary;

pub use acceptance::AcceptanceMethod;
pub use configuration::{Attention, CommBackend, Configuration, ConfigurationError, LaneOrder};
pub use effective::EffectivePath;
pub use indexing::{CompressPlan, IndexPlan};
pub use kda::{KdaGate, KdaPlan};
pub use moe::{
    Activation, ExpertChoice, ExpertSharding, MaskedFill, MoeExchange, MoePlan, Renormalise, Router, Scoring,
    SharedExpert,
};
pub use operation::{CacheLayout, Mask, Operation, OperationKind, Provenance, TensorSpec};
pub use prefill::{PcpDecodes, PcpPlan, PcpStrategy};
pub use profile::{Conventions, EmptyPartial, LseBase, NewTokens, OperationProfile, Profile, ScaleRounding};
pub use session::{Answer, Engine, EngineError, Reply, Session};
pub use settings::{Decision, Disabled, RuleSetName, Settings, Validation, Warning};
pub use sharing::{IndexSharing, IndexerType, SharingRule};
pub use sparse::{SelectionMode, Selector, SlotList};
pub use stack::{LayerKind, LayerPattern, StackExperts, StackPcp, StackPlan, StreamLayout};
pub use tensor::{Tensor, TensorError, Tensors};
