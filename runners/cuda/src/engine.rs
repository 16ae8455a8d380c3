//! The engine: one CUDA device that plays all ranks, or several with collectives between them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use shardcheck_engine::{
    Answer, Configuration, Engine, EngineError, Profile, RuleSetName, Session, Settings, Validation,
};

use crate::caches::sizes;
use crate::device::{Device, NoDevice, count};
use crate::fabric::Fabric;
use crate::placement::Placement;
use crate::profile::profile;
use crate::queue::Queue;
use crate::session::{CudaSession, ReplayFault, Setting};
use crate::shape::{Shape, code_of};
use crate::team::Absence;

/// Whether steps are captured once and replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Graphs {
    /// Kernels are launched one by one.
    Off,
    /// Kernels of a bucket are captured once and replayed.
    On,
}

/// Which devices there are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Devices<'a> {
    /// The device of that number plays all ranks by itself.
    One(usize),
    /// The devices of those numbers, of which rank r is on the `r mod G`-th, with collectives between them. One alone is a communicator of
    /// one.
    Joined(&'a [usize]),
    /// All that the driver counts, joined.
    All,
}

/// How the engine is opened.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Devices.
    pub devices: Devices<'a>,
    /// File of the library with the collectives; looked for by its names where there is none.
    pub collectives: Option<&'a Path>,
    /// How long ranks on joined devices may wait for each other.
    pub wait: Duration,
    /// Graphs.
    pub graphs: Graphs,
    /// Target that the kernels are compiled for; the card's own where there is none.
    pub target: Option<&'a str>,
    /// One defect, by its name: in the kernels, or in what a replay writes anew ([`has_fault`]).
    pub fault: Option<&'a str>,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self {
            devices: Devices::One(0),
            collectives: None,
            wait: Duration::from_secs(5),
            graphs: Graphs::Off,
            target: None,
            fault: None,
        }
    }
}

/// An engine on CUDA devices.
pub struct CudaEngine {
    // the fabric uses the devices
    setting: Setting,
    devices: Vec<Arc<Device>>,
    profile: Profile,
}

/// Whether the engine has a fault of that name: in its kernels, with graphs in what a replay writes anew, with joined devices in who enters
/// a collective. Joined devices run no layer of experts, and have no fault of one.
pub fn has_fault(name: &str, graphs: Graphs, joined: bool) -> bool {
    let in_kernels = if joined {
        shardcheck_kernels::has_fault_of_joined_devices(name)
    } else {
        shardcheck_kernels::has_fault(name)
    };
    in_kernels
        || (graphs == Graphs::On && ReplayFault::of(name).is_some())
        || (joined && Absence::of(name).is_some())
}

impl CudaEngine {
    /// Opens the devices and compiles the kernels.
    ///
    /// # Errors
    /// [`NoDevice`], which says what is missing.
    pub fn open(options: Options<'_>) -> Result<Self, NoDevice> {
        let in_kernels = options.fault.filter(|name| shardcheck_kernels::has_fault(name));
        let all: Vec<usize> =
            if options.devices == Devices::All { (0..count()?).collect() } else { Vec::new() };
        let ordinals = match &options.devices {
            Devices::One(ordinal) => std::slice::from_ref(ordinal),
            Devices::Joined(ordinals) => ordinals,
            Devices::All => &all,
        };
        let devices = Device::open_all(ordinals, options.target, in_kernels)?;
        let fabric = match options.devices {
            Devices::One(_) => None,
            Devices::Joined(_) | Devices::All => {
                let joined = Fabric::open(devices.clone(), options.collectives, options.wait);
                Some(joined.map_err(|error| NoDevice::Collectives(error.to_string()))?)
            }
        };
        if fabric.is_some() && options.graphs == Graphs::On {
            return Err(NoDevice::Collectives("captured steps are of one device so far".to_owned()));
        }
        let profile = profile(&devices, fabric.as_deref(), options.graphs);
        let setting = Setting {
            graphs: options.graphs,
            fault: options.fault.and_then(ReplayFault::of),
            absence: options.fault.and_then(Absence::of),
            fabric,
        };
        Ok(Self { setting, devices, profile })
    }

    /// The first device.
    pub fn device(&self) -> &Arc<Device> {
        &self.devices[0]
    }

    /// All devices.
    pub fn devices(&self) -> &[Arc<Device>] {
        &self.devices
    }

    /// The collectives between the devices, where they are joined.
    pub fn fabric(&self) -> Option<&Arc<Fabric>> {
        self.setting.fabric.as_ref()
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
        let placement =
            Placement { devices: self.devices.len(), ranks: configuration.tp, world: configuration.dcp };
        let used = &self.devices[..placement.seats()];
        for group in (0..2).filter_map(|number| configuration.group(number)) {
            if let Err(reason) = limits(self.device(), &group) {
                return Ok(Answer::Unsupported(reason));
            }
        }
        if let Err(reason) = room(used, configuration, &placement)? {
            return Ok(Answer::Unsupported(reason));
        }
        let queues =
            used.iter().map(|device| Queue::new(Arc::clone(device))).collect::<Result<Vec<_>, _>>()?;
        let session = CudaSession::new(&queues, configuration, &self.setting)?;
        Ok(Answer::Done(Box::new(session)))
    }
}

/// What the kernels do not hold.
fn limits(device: &Device, configuration: &Configuration) -> Result<(), String> {
    let attention = configuration.attention;
    if code_of(configuration.kv_dtype).is_none() {
        return Err(format!("no kernel reads a cache of {}", configuration.kv_dtype));
    }
    if configuration.dcp > shardcheck_kernels::MAX_WORLD {
        let most = shardcheck_kernels::MAX_WORLD;
        return Err(format!(
            "dcp {} is more than the {most} ranks that the merge kernels hold",
            configuration.dcp
        ));
    }
    let shared = shardcheck_kernels::attend_shared_bytes(attention.qk_dim(), attention.value_dim());
    if shared as usize > device.properties.shared_bytes {
        let most = device.properties.shared_bytes;
        return Err(format!(
            "heads this wide take {shared} bytes of shared memory a block; the card has {most}"
        ));
    }
    Ok(())
}

/// What the devices have no memory for: the caches of all KV groups.
fn room(
    devices: &[Arc<Device>],
    configuration: &Configuration,
    placement: &Placement,
) -> Result<Result<(), String>, EngineError> {
    for (seat, device) in devices.iter().enumerate() {
        let bytes = |group: Configuration| {
            let shape = Shape::of(&group).of_seat(placement, seat);
            sizes(&group, &shape).and_then(|[keys, values]| keys.checked_add(values))
        };
        let groups = (0..2).filter_map(|number| configuration.group(number)).map(bytes);
        let wanted = groups.sum::<Option<usize>>();
        let free = device.free_bytes()?;
        if wanted.is_none_or(|wanted| wanted > free) {
            return Ok(Err(format!(
                "the caches of all ranks take more than the {free} bytes that are free: use fewer blocks"
            )));
        }
    }
    Ok(Ok(()))
}
