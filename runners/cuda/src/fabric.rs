//! The collectives between the devices of an engine: one communicator for each set of devices that a group is on, all of this process.
//!
//! Calls never wait inside the vendor's library: every communicator is asynchronous, and is asked for its end no longer than ranks may
//! wait. One lock orders the collectives of all sessions, and each device runs them in that order, so that two sessions can't wait for
//! each other crosswise. A collective that hangs is aborted with all communicators; sessions that were under way are lost with it.
//!
//! What was joined stays joined and goes on to the process's next engine with the same devices. Asynchronous communicators are freed on
//! threads of the library, of which nothing says when they end: a process that ended, or let go of a device, while NCCL 2.28.9 freed one
//! was brought down by it.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use shardcheck_collectives::{Collectives, CollectivesError, Communicator, UniqueId, Vendor};
use shardcheck_engine::EngineError;

use crate::device::Device;
use crate::queue::{Event, Queue};

/// How long joining a communicator may take: the library looks at the whole machine before it answers.
const JOIN_LIMIT: Duration = Duration::from_secs(120);
/// How long a session that hung waits for what it gave up: the end of a process would take the library's memory away under it.
const ABORT_LIMIT: Duration = Duration::from_secs(20);
/// Pause between two looks at whether something has come to its end.
const LOOK: Duration = Duration::from_micros(20);

/// The devices of an engine and their communicators.
pub struct Fabric {
    /// How long ranks may wait for each other.
    pub wait: Duration,
    /// `None` once it has gone back to [`IDLE`].
    joint: Option<Joint>,
}

/// Devices that are joined, for one engine at a time.
struct Joint {
    library: Arc<Collectives>,
    /// The library's file, where one was given.
    file: Option<PathBuf>,
    devices: Vec<Arc<Device>>,
    /// How often everything was aborted.
    aborted: AtomicU64,
    state: Mutex<State>,
}

/// Joined devices that no engine has.
static IDLE: Mutex<Vec<Joint>> = Mutex::new(Vec::new());

fn idle() -> MutexGuard<'static, Vec<Joint>> {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Fabric {
    fn drop(&mut self) {
        idle().extend(self.joint.take());
    }
}

#[derive(Default)]
struct State {
    /// One communicator a device, by the devices.
    cliques: BTreeMap<Vec<usize>, Vec<Communicator>>,
    /// Behind the last collective of each device.
    turns: BTreeMap<usize, Event>,
}

/// Why a collective did not come about.
#[derive(Debug)]
pub enum Halt {
    /// The library or the driver failed.
    Failed(EngineError),
    /// It did not come to its end in time, and was aborted.
    Late,
}

impl From<CollectivesError> for Halt {
    fn from(error: CollectivesError) -> Self {
        Self::Failed(EngineError::Crash { text: error.to_string() })
    }
}

impl From<EngineError> for Halt {
    fn from(error: EngineError) -> Self {
        Self::Failed(error)
    }
}

impl Fabric {
    /// Opens the vendor's library, by its file where one is given, and joins all devices.
    ///
    /// # Errors
    /// What is missing or failed, in words.
    pub fn open(
        devices: Vec<Arc<Device>>,
        file: Option<&Path>,
        wait: Duration,
    ) -> Result<Arc<Self>, EngineError> {
        let ordinals =
            |devices: &[Arc<Device>]| devices.iter().map(|device| device.ordinal()).collect::<Vec<_>>();
        let same =
            |joint: &Joint| joint.file.as_deref() == file && ordinals(&joint.devices) == ordinals(&devices);
        // not held while devices are joined, which takes seconds
        let known = {
            let mut idle = idle();
            idle.iter().position(same).map(|place| idle.swap_remove(place))
        };
        let joint = known.map_or_else(|| Joint::of(devices, file), Ok)?;
        Ok(Arc::new(Self { wait, joint: Some(joint) }))
    }

    fn joint(&self) -> &Joint {
        self.joint.as_ref().expect("it is given back by the drop alone")
    }

    /// Version of the library as it counts: 22803 is 2.28.3.
    pub fn version(&self) -> i32 {
        self.joint().library.version().unwrap_or(0)
    }

    /// The devices.
    pub fn devices(&self) -> &[Arc<Device>] {
        &self.joint().devices
    }

    /// How often everything was aborted so far: sessions that began before the last time are lost.
    pub fn generation(&self) -> u64 {
        self.joint().aborted.load(Ordering::Acquire)
    }

    /// Puts one collective of `devices` into the streams of those that are there, `queues[i]` being that of `devices[i]` or `None` where
    /// it keeps out; `call` enqueues a device's part by its number among them.
    ///
    /// # Errors
    /// [`Halt::Late`] where the call itself does not end in time, which aborts everything; what the library or the driver says.
    pub(crate) fn enqueue(
        &self,
        generation: u64,
        devices: &[usize],
        queues: &[Option<&Arc<Queue>>],
        mut call: impl FnMut(usize, &mut Communicator) -> Result<(), CollectivesError>,
    ) -> Result<(), Halt> {
        let joint = self.joint();
        let mut state = joint.lock();
        if self.generation() != generation {
            return Err(Halt::Failed(lost()));
        }
        if !state.cliques.contains_key(devices) {
            let clique = joint.joined(devices)?;
            state.cliques.insert(devices.to_vec(), clique);
        }
        let State { cliques, turns } = &mut *state;
        let clique = cliques.get_mut(devices).expect("it was just made");
        let present = || queues.iter().enumerate().filter_map(|(index, queue)| Some((index, (*queue)?)));
        for (index, queue) in present() {
            if let Some(turn) = turns.get(&devices[index]) {
                queue.wait_for(turn)?;
            }
        }
        joint.library.grouped(|| -> Result<(), Halt> {
            for (index, queue) in present() {
                queue.device.enter()?;
                call(index, &mut clique[index])?;
            }
            Ok(())
        })?;
        let began = Instant::now();
        for (index, queue) in present() {
            while !clique[index].is_ready()? {
                if began.elapsed() > self.wait {
                    joint.abort_all(std::mem::take(&mut state.cliques));
                    return Err(Halt::Late);
                }
                thread::sleep(LOOK);
            }
            turns.insert(devices[index], queue.record()?);
        }
        Ok(())
    }

    /// Gives up everything that is under way: what hangs on a device ends, and new sessions join anew.
    pub fn abort(&self) {
        let joint = self.joint();
        let cliques = std::mem::take(&mut joint.lock().cliques);
        joint.abort_all(cliques);
    }
}

impl Joint {
    fn of(devices: Vec<Arc<Device>>, file: Option<&Path>) -> Result<Self, EngineError> {
        let crash = |error: CollectivesError| EngineError::Crash { text: error.to_string() };
        let library = Collectives::open(Vendor::Nccl, file).map_err(crash)?;
        let (aborted, state) = (AtomicU64::new(0), Mutex::new(State::default()));
        let joint = Self { library, file: file.map(Path::to_owned), devices, aborted, state };
        let all: Vec<usize> = (0..joint.devices.len()).collect();
        match joint.joined(&all) {
            Ok(clique) => drop(joint.lock().cliques.insert(all, clique)),
            Err(Halt::Failed(error)) => return Err(error),
            Err(Halt::Late) => {
                return Err(EngineError::Crash { text: "the devices did not join in time".to_owned() });
            }
        }
        Ok(joint)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn joined(&self, devices: &[usize]) -> Result<Vec<Communicator>, Halt> {
        let id = UniqueId::new(&self.library)?;
        let mut clique = Vec::with_capacity(devices.len());
        self.library.grouped(|| -> Result<(), Halt> {
            for (rank, device) in devices.iter().enumerate() {
                self.devices[*device].enter()?;
                clique.push(Communicator::join_asynchronously(&self.library, &id, rank, devices.len())?);
            }
            Ok(())
        })?;
        let began = Instant::now();
        for communicator in &clique {
            while !communicator.is_ready()? {
                if began.elapsed() > JOIN_LIMIT {
                    return Err(Halt::Late);
                }
                thread::sleep(LOOK);
            }
        }
        Ok(clique)
    }

    fn abort_all(&self, cliques: BTreeMap<Vec<usize>, Vec<Communicator>>) {
        self.aborted.fetch_add(1, Ordering::AcqRel);
        ABORTED.store(true, Ordering::Release);
        // on a thread of its own: the library may itself wait. It keeps the devices' contexts alive
        let devices = self.devices.clone();
        let abort = move || {
            for communicator in cliques.into_values().flatten() {
                // it is given up either way
                let _ = communicator.abort();
            }
            drop(devices);
        };
        if let Ok(aborting) = thread::Builder::new().name("abort".to_owned()).spawn(abort) {
            let began = Instant::now();
            while !aborting.is_finished() && began.elapsed() < ABORT_LIMIT {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Whether anything was ever aborted in this process.
static ABORTED: AtomicBool = AtomicBool::new(false);

/// Ends the process with this status where communicators were aborted, and returns where none was. The library frees those on threads of
/// its own, and what a system does at the end of a process takes memory away under them: NCCL 2.28.9 crashed there, or never came back.
pub fn end_after_abort(status: u8) {
    if ABORTED.load(Ordering::Acquire) {
        // what can't be written has nobody to be told to
        let _ = std::io::stdout().flush().and(std::io::stderr().flush());
        shardcheck_collectives::end_at_once(status);
    }
}

/// The error of a session that was lost to another's hang.
pub(crate) fn lost() -> EngineError {
    EngineError::Interrupted { text: "the devices' collectives were aborted for another session".to_owned() }
}
