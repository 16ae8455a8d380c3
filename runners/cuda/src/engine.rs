//! The engine: one CUDA device that plays all ranks.

use std::sync::Arc;

use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Profile, RuleSetName, Session, Settings, Validation,
};

use crate::caches::sizes;
use crate::device::{Device, NoDevice};
use crate::profile::profile;
use crate::queue::Queue;
use crate::session::{CudaSession, ReplayFault};
use crate::shape::{Shape, code_of};

/// Whether steps are captured once and replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Graphs {
    /// Kernels are launched one by one.
    Off,
    /// Kernels of a bucket are captured once and replayed.
    On,
}

/// How the engine is opened.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Number of the device.
    pub ordinal: usize,
    /// Graphs.
    pub graphs: Graphs,
    /// Target that the kernels are compiled for; the card's own where there is none.
    pub target: Option<&'a str>,
    /// One defect, by its name: in the kernels, or in what a replay writes anew ([`has_fault`]).
    pub fault: Option<&'a str>,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self { ordinal: 0, graphs: Graphs::Off, target: None, fault: None }
    }
}

/// An engine on one CUDA device.
pub struct CudaEngine {
    device: Arc<Device>,
    graphs: Graphs,
    fault: Option<ReplayFault>,
    profile: Profile,
}

/// Whether the engine has a fault of that name: in its kernels, or with graphs in what a replay writes anew.
pub fn has_fault(name: &str, graphs: Graphs) -> bool {
    shardcheck_kernels::has_fault(name) || (graphs == Graphs::On && ReplayFault::of(name).is_some())
}

impl CudaEngine {
    /// Opens the device and compiles the kernels.
    ///
    /// # Errors
    /// [`NoDevice`], which says what is missing.
    pub fn open(options: Options<'_>) -> Result<Self, NoDevice> {
        let in_kernels = options.fault.filter(|name| shardcheck_kernels::has_fault(name));
        let device = Device::open(options.ordinal, options.target, in_kernels)?;
        let profile = profile(&device.properties, options.graphs);
        Ok(Self { device, graphs: options.graphs, fault: options.fault.and_then(ReplayFault::of), profile })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Engine for CudaEngine {
    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn validate(&self, rules: RuleSetName, _: &Settings) -> Result<Answer<Validation>, EngineError> {
        let why = format!(
            "rules {rules}: this engine has kernels and no configuration rules; those are the embedded engine's"
        );
        Ok(Answer::Unsupported(why))
    }

    fn open(&self, configuration: &Configuration) -> Result<Answer<Box<dyn Session>>, EngineError> {
        if let Err(error) = configuration.check() {
            return Ok(Answer::Unsupported(error.to_string()));
        }
        if configuration.second_group.is_some() {
            return Ok(Answer::Unsupported("a session has one KV group".to_owned()));
        }
        if let Err(reason) = limits(&self.device, configuration)? {
            return Ok(Answer::Unsupported(reason));
        }
        let queue = Queue::new(Arc::clone(&self.device))?;
        let session = CudaSession::new(queue, configuration.clone(), self.graphs, self.fault)?;
        Ok(Answer::Done(Box::new(session)))
    }
}

/// What the device does not hold.
fn limits(device: &Device, configuration: &Configuration) -> Result<Result<(), String>, EngineError> {
    let attention = configuration.attention;
    if code_of(configuration.kv_dtype).is_none() {
        return Ok(Err(format!("no kernel reads a cache of {}", configuration.kv_dtype)));
    }
    if configuration.dcp > shardcheck_kernels::MAX_WORLD {
        let most = shardcheck_kernels::MAX_WORLD;
        return Ok(Err(format!(
            "dcp {} is more than the {most} ranks that the merge kernels hold",
            configuration.dcp
        )));
    }
    let shared = shardcheck_kernels::attend_shared_bytes(attention.qk_dim(), attention.value_dim());
    if shared as usize > device.properties.shared_bytes {
        let most = device.properties.shared_bytes;
        return Ok(Err(format!(
            "heads this wide take {shared} bytes of shared memory a block; the card has {most}"
        )));
    }
    let shape = Shape::of(configuration);
    let free = device.free_bytes()?;
    Ok(match sizes(configuration, &shape).map(|[keys, values]| keys.checked_add(values)) {
        Some(Some(bytes)) if bytes <= free => Ok(()),
        _ => Err(format!(
            "the caches of all ranks take more than the {free} bytes that are free: use fewer blocks"
        )),
    })
}
