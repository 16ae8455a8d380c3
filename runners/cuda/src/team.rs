//! The devices of a session, each with a stream and the ranks that it plays, and what passes between ranks.
//!
//! Where one device plays all ranks, an exchange is a kernel. Where the engine has a fabric, kernels lay out what a device's ranks have
//! for those of each other device, a collective carries it, and kernels take it apart again.

mod carried;

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use shardcheck_engine::{Configuration, EffectivePath, EngineError, Tensor, Tensors};

use crate::fabric::{Fabric, Halt, lost};
use crate::placement::{GroupSeats, Placement};
use crate::queue::{Event, Queue};
use crate::shape::Shape;

/// Longest pause between two looks at the streams.
const LOOK: Duration = Duration::from_micros(500);
/// How many times longer than ranks may wait for each other they may compute while others wait.
const COMPUTE_PER_WAIT: u32 = 3;

/// Which ranks wrongly keep out of a collective. Each is the embedded engine's fault of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// The last rank of a group skips the gather of queries.
    QueryGather,
    /// The last rank of a group skips the gather of LSEs.
    LseGather,
    /// A rank that holds no token of a chunk skips its gather.
    ContextGather,
    /// The last rank of a group skips the gather of queries in a step of more rows than the session's first.
    LargerStep,
}

impl Absence {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::QueryGather, Self::LseGather, Self::ContextGather, Self::LargerStep];

    /// Name among all faults.
    pub fn name(self) -> &'static str {
        match self {
            Self::QueryGather => "one-rank-skips-the-query-gather",
            Self::LseGather => "one-rank-skips-the-lse-gather",
            Self::ContextGather => "rank-without-context-skips-the-gather",
            Self::LargerStep => "one-rank-keeps-out-of-the-gather-of-a-larger-step",
        }
    }

    /// The fault of that name.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|absence| absence.name() == name)
    }
}

/// One device of a session.
#[derive(Clone)]
pub struct Seat {
    pub queue: Arc<Queue>,
    pub shape: Shape,
}

/// The devices of a session.
pub struct Team {
    seats: Vec<Seat>,
    placement: Placement,
    fabric: Option<Arc<Fabric>>,
    /// How often the fabric was aborted when the session began.
    generation: u64,
    /// What is wrongly left out.
    pub absence: Option<Absence>,
    trace: Mutex<Trace>,
}

/// What a step entered so far.
struct Trace {
    entries: Vec<Entry>,
    /// Collectives that each rank entered.
    entered: Vec<u64>,
}

/// A collective of a group as one device sees it.
struct Entry {
    name: &'static str,
    seat: usize,
    /// Ranks of the device in the group.
    ranks: Vec<usize>,
    /// Ranks of the group whose devices keep out.
    absent: Vec<usize>,
    before: Event,
    after: Option<Event>,
}

/// One collective of one group.
struct Collective<'a> {
    name: &'static str,
    number: usize,
    group: &'a GroupSeats,
    /// Whether each of the group's devices keeps out.
    absent: Vec<bool>,
}

/// What a device does.
enum Doing {
    Nothing,
    Computing,
    /// Waiting in the trace's entry of that number.
    Waiting(usize),
}

impl Team {
    /// A session's devices: one stream for each that plays a rank.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(
        queues: Vec<Arc<Queue>>,
        configuration: &Configuration,
        fabric: Option<Arc<Fabric>>,
        absence: Option<Absence>,
    ) -> Self {
        let devices = fabric.as_ref().map_or(1, |fabric| fabric.devices().len());
        let placement = Placement { devices, ranks: configuration.tp, world: configuration.dcp };
        let whole = Shape::of(configuration);
        let seat = |(seat, queue)| Seat { queue, shape: whole.of_seat(&placement, seat) };
        let seats: Vec<Seat> = queues.into_iter().enumerate().map(seat).collect();
        let trace = Trace { entries: Vec::new(), entered: vec![0; placement.ranks] };
        let generation = fabric.as_ref().map_or(0, |fabric| fabric.generation());
        Self { seats, placement, fabric, generation, absence, trace: Mutex::new(trace) }
    }

    /// The devices of one group alone.
    #[must_use]
    pub fn of_one_group(&self) -> Self {
        let placement = Placement { ranks: self.placement.world, ..self.placement };
        let seats = self.seats[..placement.seats()].iter().enumerate();
        let seat = |(number, seat): (usize, &Seat)| Seat {
            queue: Arc::clone(&seat.queue),
            shape: seat.shape.of_seat(&placement, number),
        };
        let trace = Trace { entries: Vec::new(), entered: vec![0; placement.ranks] };
        Self {
            seats: seats.map(seat).collect(),
            placement,
            fabric: self.fabric.clone(),
            trace: Mutex::new(trace),
            ..*self
        }
    }

    /// The devices that play a rank.
    pub fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// The first device, which does what is no rank's own.
    pub fn first(&self) -> &Seat {
        &self.seats[0]
    }

    /// Whether exchanges are collectives of devices.
    pub fn has_fabric(&self) -> bool {
        self.fabric.is_some()
    }

    /// Buffers of the same kind on every device.
    ///
    /// # Errors
    /// What `make` does.
    pub fn each<T>(&self, make: impl Fn(&Seat) -> Result<T, EngineError>) -> Result<Vec<T>, EngineError> {
        self.seats.iter().map(make).collect()
    }

    /// Begins a step.
    pub fn begin(&self) {
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        trace.entries.clear();
        trace.entered.fill(0);
    }

    /// Collectives that each rank entered since the step began, where they are counted; else `expected` of each.
    pub fn entered(&self, expected: u64) -> Vec<u64> {
        match self.fabric {
            Some(_) => self.trace.lock().unwrap_or_else(PoisonError::into_inner).entered.clone(),
            None => vec![expected; self.placement.ranks],
        }
    }

    /// Counts collectives that have nothing to carry: every rank enters them all the same.
    pub fn pass(&self, collectives: u64) {
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        trace.entered.iter_mut().for_each(|entered| *entered += collectives);
    }

    /// Where the ranks are, as facts of the effective path.
    pub fn report(&self, path: EffectivePath) -> EffectivePath {
        let Some(fabric) = &self.fabric else { return path };
        let devices = fabric.devices().len();
        path.with("devices", devices)
            .with("ranks", format!("rank r on device r mod {devices}"))
            .with("collectives", format!("NCCL {}", fabric.version()))
    }

    /// Rank-major outputs of all ranks out of those of each device: its own ranks one behind the other.
    ///
    /// # Errors
    /// A tensor that does not have a device's ranks: a bug of this crate.
    pub fn assemble(&self, parts: Vec<Tensors>) -> Result<Tensors, EngineError> {
        if let [_] = parts.as_slice() {
            return Ok(parts.into_iter().next().unwrap_or_default());
        }
        let mut whole = Tensors::new();
        for (name, first) in parts[0].iter() {
            let shape = [&[self.placement.ranks], &first.shape()[1..]].concat();
            let rank_bytes = shape[1..].iter().product::<usize>() * first.dtype().size_bytes();
            let mut bytes = Vec::with_capacity(self.placement.ranks * rank_bytes);
            for rank in 0..self.placement.ranks {
                let (seat, place) = self.placement.place_of(rank);
                bytes.extend_from_slice(
                    &parts[seat].get(name)?.bytes()[place * rank_bytes..(place + 1) * rank_bytes],
                );
            }
            whole.insert(name, Tensor::new(first.dtype(), shape, bytes)?);
        }
        Ok(whole)
    }

    /// The part of a rank-major tensor's bytes that a device's ranks have.
    pub fn part_of(&self, seat: usize, bytes: &[u8]) -> Vec<u8> {
        if self.seats.len() == 1 {
            return bytes.to_vec();
        }
        let rank_bytes = bytes.len() / self.placement.ranks;
        let of_rank = |rank: usize| bytes[rank * rank_bytes..(rank + 1) * rank_bytes].iter().copied();
        self.placement.ranks_of(seat).flat_map(of_rank).collect()
    }

    fn collective<'a>(
        &self,
        name: &'static str,
        number: usize,
        group: &'a GroupSeats,
        keeps_out: &dyn Fn(usize) -> bool,
    ) -> Collective<'a> {
        let keeps_out = |seat: &usize| self.ranks_in(number, *seat).into_iter().any(keeps_out);
        Collective { name, number, group, absent: group.seats.iter().map(keeps_out).collect() }
    }

    /// Ranks of a device in a group.
    fn ranks_in(&self, number: usize, seat: usize) -> Vec<usize> {
        let world = self.placement.world;
        self.placement.ranks_of(seat).filter(|rank| rank / world == number).collect()
    }

    /// Enqueues one collective and keeps trace of it.
    fn run(
        &self,
        fabric: &Fabric,
        collective: &Collective<'_>,
        mut call: impl FnMut(
            usize,
            &mut shardcheck_collectives::Communicator,
            *mut std::ffi::c_void,
        ) -> Result<(), shardcheck_collectives::CollectivesError>,
    ) -> Result<(), EngineError> {
        let seats = &collective.group.seats;
        let absent: Vec<usize> = seats
            .iter()
            .zip(&collective.absent)
            .filter(|(_, absent)| **absent)
            .flat_map(|(seat, _)| self.ranks_in(collective.number, *seat))
            .collect();
        let there = |index: usize| !collective.absent[index];
        let queues: Vec<Option<&Arc<Queue>>> = seats
            .iter()
            .enumerate()
            .map(|(index, seat)| there(index).then_some(&self.seats[*seat].queue))
            .collect();
        let mut entries = Vec::new();
        for (index, seat) in seats.iter().enumerate().filter(|(index, _)| there(*index)) {
            let ranks = self.ranks_in(collective.number, *seat);
            let before = self.seats[seats[index]].queue.record()?;
            let absent = absent.clone();
            entries.push(Entry { name: collective.name, seat: *seat, ranks, absent, before, after: None });
        }
        let outcome = fabric.enqueue(self.generation, seats, &queues, |index, communicator| {
            let stream = self.seats[seats[index]].queue.handle();
            call(index, communicator, stream)
        });
        match outcome {
            Ok(()) => {}
            Err(Halt::Failed(error)) => return Err(error),
            Err(Halt::Late) => {
                let waiter = entries.iter().flat_map(|entry| entry.ranks.iter().copied()).min();
                return Err(timed_out(waiter, collective.name, &absent, fabric.wait));
            }
        }
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        for mut entry in entries {
            entry.after = Some(self.seats[entry.seat].queue.record()?);
            for rank in &entry.ranks {
                trace.entered[*rank] += 1;
            }
            trace.entries.push(entry);
        }
        Ok(())
    }

    /// Waits until every device has done what was enqueued. Ranks that wait for others longer than they may are told by name, and
    /// everything is aborted.
    ///
    /// # Errors
    /// [`EngineError::Timeout`] with the rank and the collective; what the driver says.
    pub fn settle(&self) -> Result<(), EngineError> {
        let Some(fabric) = &self.fabric else { return Ok(()) };
        let (began, mut resting_since) = (Instant::now(), Instant::now());
        let mut pause = Duration::from_micros(5);
        loop {
            let doing = self.doing()?;
            if doing.iter().all(|doing| matches!(doing, Doing::Nothing)) {
                // what was aborted has run through as well, and says nothing
                return if fabric.generation() == self.generation { Ok(()) } else { Err(lost()) };
            }
            if doing.iter().any(|doing| matches!(doing, Doing::Computing)) {
                resting_since = Instant::now();
            }
            if resting_since.elapsed() > fabric.wait || began.elapsed() > fabric.wait * COMPUTE_PER_WAIT {
                let lost_to_another = fabric.generation() != self.generation;
                fabric.abort();
                return Err(if lost_to_another { lost() } else { self.late(&doing, began.elapsed()) });
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LOOK);
        }
    }

    /// What each device does.
    fn doing(&self) -> Result<Vec<Doing>, EngineError> {
        let trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        let mut doing = Vec::with_capacity(self.seats.len());
        for (number, seat) in self.seats.iter().enumerate() {
            doing.push(if seat.queue.is_idle()? {
                Doing::Nothing
            } else {
                Self::waits_in(&trace, number)?.map_or(Doing::Computing, Doing::Waiting)
            });
        }
        Ok(doing)
    }

    /// The collective that a device has entered and not left.
    fn waits_in(trace: &Trace, seat: usize) -> Result<Option<usize>, EngineError> {
        for (number, entry) in trace.entries.iter().enumerate().filter(|(_, entry)| entry.seat == seat) {
            if !entry.before.is_past()? {
                return Ok(None);
            }
            if let Some(after) = &entry.after
                && !after.is_past()?
            {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    fn late(&self, doing: &[Doing], waited: Duration) -> EngineError {
        let trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = doing.iter().filter_map(|doing| match doing {
            Doing::Waiting(entry) => trace.entries.get(*entry),
            Doing::Nothing | Doing::Computing => None,
        });
        match waiting.min_by_key(|entry| entry.ranks.first().copied()) {
            Some(entry) => {
                // a device that kept out of an earlier collective answers the next one in its place, and is missing at the end
                let entered = |rank: usize| trace.entered[rank];
                let own = entry.ranks.iter().map(|rank| entered(*rank)).max().unwrap_or(0);
                let group = entry.ranks.first().map_or(0, |rank| rank / self.placement.world);
                let ranks = group * self.placement.world..(group + 1) * self.placement.world;
                let behind: Vec<usize> = ranks.filter(|rank| entered(*rank) < own).collect();
                let absent = if entry.absent.is_empty() { &behind } else { &entry.absent };
                timed_out(entry.ranks.first().copied(), entry.name, absent, waited)
            }
            None => timed_out(None, "a kernel", &[], waited),
        }
    }
}

fn timed_out(rank: Option<usize>, name: &str, absent: &[usize], waited: Duration) -> EngineError {
    let waiting_in =
        if absent.is_empty() { name.to_owned() } else { format!("{name} (not there: rank {absent:?})") };
    EngineError::Timeout { rank, waiting_in, waited_s: waited.as_secs_f64() }
}
