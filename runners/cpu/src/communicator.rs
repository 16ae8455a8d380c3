//! Collectives between ranks that are threads: a mailbox per group, with a time limit on every wait.
//!
//! A collective is told by its name and by how often the rank has entered it. A rank that skips one leaves its
//! peers waiting, as NCCL would; here the wait ends after the time limit, and all ranks with it. The clock stands still
//! while any rank computes: a slow peer on a busy machine is no hang.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shardcheck_engine::EngineError;
use shardcheck_formats::round_bf16;

use crate::crew::on_threads;

/// Ranks of a step: how many, in groups of how many, and how long one waits for its peers.
#[derive(Debug, Clone, Copy)]
pub struct Ranks {
    /// All ranks; a multiple of `world`.
    pub count: usize,
    /// Ranks of one group W. Rank `r` is member `r % world` of group `r / world`.
    pub world: usize,
    /// Longest time in which every rank waits and none gets what it waits for.
    pub timeout: Duration,
}

/// Why a rank ends early.
#[derive(Debug, Clone, PartialEq)]
pub enum Stop {
    /// This rank failed.
    Failed(EngineError),
    /// Another rank failed; its reason is the one that counts.
    Peer,
}

impl Stop {
    /// A failure that is none of time.
    pub fn crash(text: impl Into<String>) -> Self {
        Self::Failed(EngineError::Crash { text: text.into() })
    }
}

/// What all ranks returned, in rank order.
#[derive(Debug)]
pub struct RankResults<R> {
    /// Results.
    pub results: Vec<R>,
    /// Collectives that each rank entered.
    pub collectives: Vec<u64>,
}

/// Runs `body` once on every rank, each on a thread of its own and the first on the caller's.
///
/// # Errors
/// The first failure of any rank: a panic becomes [`EngineError::Crash`], a wait beyond the limit
/// [`EngineError::Timeout`] with the rank and the collective. The others are woken and end too.
pub fn run_ranks<R, F>(ranks: Ranks, body: F) -> Result<RankResults<R>, EngineError>
where
    R: Send,
    F: Fn(&Link<'_>) -> Result<R, Stop> + Sync,
{
    let fabric = Fabric::new(ranks);
    let run = |rank: usize| {
        let link = Link::new(&fabric, rank);
        let outcome = catch_unwind(AssertUnwindSafe(|| body(&link))).unwrap_or_else(|panic| {
            Err(Stop::crash(format!("rank {rank} panicked: {}", panic_text(&*panic))))
        });
        fabric.rest(&mut fabric.lock());
        match outcome {
            Ok(result) => Some((result, link.collectives.get())),
            Err(stop) => {
                fabric.fail(stop);
                None
            }
        }
    };
    let outcomes: Vec<Mutex<Option<(R, u64)>>> = (0..ranks.count.max(1)).map(|_| Mutex::new(None)).collect();
    on_threads(ranks.count, &|rank| {
        let outcome = run(rank);
        *outcomes[rank].lock().unwrap_or_else(PoisonError::into_inner) = outcome;
    })
    .map_err(|error| EngineError::Crash { text: format!("no thread for a rank: {error}") })?;
    if let Some(error) = fabric.lock().failure.take() {
        return Err(error);
    }
    let (mut results, mut collectives) = (Vec::new(), Vec::new());
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let outcome = outcome.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (result, entered) =
            outcome.ok_or_else(|| EngineError::Crash { text: format!("rank {rank} returned nothing") })?;
        results.push(result);
        collectives.push(entered);
    }
    Ok(RankResults { results, collectives })
}

/// Text of a caught panic.
pub fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

type Payload = Arc<dyn Any + Send + Sync>;
/// Group, name of the collective, and how often it was entered before.
type Key = (usize, &'static str, u64);

struct Round {
    posted: Vec<Option<Payload>>,
    taken: usize,
}

struct State {
    rounds: HashMap<Key, Round>,
    /// Ranks that neither wait nor have ended.
    computing: usize,
    /// When the last of them stopped.
    idle_since: Instant,
    failure: Option<EngineError>,
}

struct Fabric {
    ranks: Ranks,
    state: Mutex<State>,
    wake: Condvar,
}

impl Fabric {
    fn new(ranks: Ranks) -> Self {
        let state = State {
            rounds: HashMap::new(),
            computing: ranks.count,
            idle_since: Instant::now(),
            failure: None,
        };
        Self { ranks, state: Mutex::new(state), wake: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One rank stops computing: it waits, or has ended.
    fn rest(&self, state: &mut State) {
        state.computing -= 1;
        if state.computing == 0 {
            state.idle_since = Instant::now();
            self.wake.notify_all();
        }
    }

    fn fail(&self, stop: Stop) {
        if let Stop::Failed(error) = stop {
            self.lock().failure.get_or_insert(error);
        }
        self.wake.notify_all();
    }
}

/// A rank's end of the mailbox.
pub struct Link<'a> {
    fabric: &'a Fabric,
    /// Rank among all ranks.
    pub rank: usize,
    /// Rank within its group.
    pub member: usize,
    /// Ranks of the group.
    pub world: usize,
    entered: RefCell<HashMap<&'static str, u64>>,
    collectives: Cell<u64>,
}

impl<'a> Link<'a> {
    fn new(fabric: &'a Fabric, rank: usize) -> Self {
        let world = fabric.ranks.world;
        Self {
            fabric,
            rank,
            member: rank % world,
            world,
            entered: RefCell::default(),
            collectives: Cell::new(0),
        }
    }

    /// Group of the rank.
    pub fn group(&self) -> usize {
        self.rank / self.world
    }

    /// Every member gives one payload and receives all of them, in member order.
    ///
    /// # Errors
    /// [`Stop`] when a peer failed or did not come in time, or came with another kind of payload.
    pub fn exchange<T: Send + Sync + 'static>(
        &self,
        name: &'static str,
        payload: T,
    ) -> Result<Vec<Arc<T>>, Stop> {
        self.collectives.set(self.collectives.get() + 1);
        let occurrence = {
            let mut entered = self.entered.borrow_mut();
            let count = entered.entry(name).or_default();
            *count += 1;
            *count
        };
        let key = (self.group(), name, occurrence);
        let mut state = self.fabric.lock();
        let round =
            state.rounds.entry(key).or_insert_with(|| Round { posted: vec![None; self.world], taken: 0 });
        round.posted[self.member] = Some(Arc::new(payload));
        // who waits has nothing to do before the last one came: waking all for each would take W² switches
        if round.posted.iter().all(Option::is_some) {
            self.fabric.wake.notify_all();
        }
        state = self.wait_for_all(state, &key)?;
        let round = state.rounds.get_mut(&key).ok_or(Stop::Peer)?;
        let posted: Vec<Payload> = round.posted.iter().flatten().cloned().collect();
        round.taken += 1;
        if round.taken == self.world {
            state.rounds.remove(&key);
        }
        drop(state);
        posted
            .into_iter()
            .map(|payload| payload.downcast::<T>())
            .collect::<Result<_, _>>()
            .map_err(|_| Stop::crash(format!("ranks entered {name} with different payloads")))
    }

    /// All-gather: the payloads of the members one behind the other, in the order `order` of members.
    ///
    /// # Errors
    /// [`Stop`] as in [`Link::exchange`], or when the payloads differ in length.
    pub fn all_gather<T: Copy + Send + Sync + 'static>(
        &self,
        name: &'static str,
        payload: Vec<T>,
        order: &[usize],
    ) -> Result<Vec<T>, Stop> {
        let length = payload.len();
        let received = self.exchange(name, payload)?;
        if received.iter().any(|part| part.len() != length) {
            return Err(Stop::crash(format!("ranks entered {name} with different sizes")));
        }
        Ok(order.iter().flat_map(|&member| received[member].iter().copied()).collect())
    }

    /// All-to-all: piece `d` of every member reaches member `d`; the pieces come back in member order.
    ///
    /// # Errors
    /// [`Stop`] as in [`Link::exchange`].
    pub fn all_to_all<T: Clone + Send + Sync + 'static>(
        &self,
        name: &'static str,
        pieces: Vec<Vec<T>>,
    ) -> Result<Vec<Vec<T>>, Stop> {
        let received = self.exchange(name, pieces)?;
        received
            .iter()
            .map(|pieces| pieces.get(self.member).cloned())
            .collect::<Option<_>>()
            .ok_or_else(|| Stop::crash(format!("a rank entered {name} with too few pieces")))
    }

    /// Sum of what the members have, every addition rounded to bf16, in an order of them by `(own place, members)`.
    ///
    /// # Errors
    /// [`Stop`] as in [`Link::exchange`].
    pub fn sum_in_bf16(
        &self,
        name: &'static str,
        own: Vec<f32>,
        members: &[usize],
        order: fn(usize, usize) -> Vec<usize>,
    ) -> Result<Vec<f32>, Stop> {
        let received = self.exchange(name, own)?;
        let parts: Vec<&Arc<Vec<f32>>> = members.iter().map(|member| &received[*member]).collect();
        let at = members.iter().position(|member| *member == self.member).unwrap_or(0);
        let mut order = order(at, parts.len()).into_iter();
        let mut sum = order.next().map_or_else(Vec::new, |first| parts[first].to_vec());
        for part in order {
            for (sum, value) in sum.iter_mut().zip(parts[part].iter()) {
                *sum = round_bf16(*sum + value);
            }
        }
        Ok(sum)
    }

    fn wait_for_all<'g>(
        &self,
        mut state: MutexGuard<'g, State>,
        key: &Key,
    ) -> Result<MutexGuard<'g, State>, Stop> {
        let (fabric, begin) = (self.fabric, Instant::now());
        let mut rests = false;
        let outcome = loop {
            if state.failure.is_some() {
                break Err(Stop::Peer);
            }
            let Some(round) = state.rounds.get(key) else { break Err(Stop::Peer) };
            let missing: Vec<usize> = (0..self.world).filter(|&m| round.posted[m].is_none()).collect();
            if missing.is_empty() {
                break Ok(());
            }
            if !rests {
                rests = true;
                fabric.rest(&mut state);
            }
            let idle = if state.computing > 0 { Duration::ZERO } else { state.idle_since.elapsed() };
            let left = fabric.ranks.timeout.saturating_sub(idle);
            if left.is_zero() {
                state.failure = Some(self.timed_out(key.1, &missing, begin));
                fabric.wake.notify_all();
                break Err(Stop::Peer);
            }
            state = fabric.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        state.computing += usize::from(rests);
        outcome.map(|()| state)
    }

    fn timed_out(&self, name: &str, missing: &[usize], begin: Instant) -> EngineError {
        let absent: Vec<usize> = missing.iter().map(|member| self.group() * self.world + member).collect();
        EngineError::Timeout {
            rank: Some(self.rank),
            waiting_in: format!("{name} (not there: rank {absent:?})"),
            waited_s: begin.elapsed().as_secs_f64(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(count: usize, world: usize) -> Ranks {
        Ranks { count, world, timeout: Duration::from_secs(5) }
    }

    #[test]
    fn an_all_gather_lays_the_members_of_a_group_one_behind_the_other() {
        let order = [0, 1, 2];
        let run =
            run_ranks(ranks(6, 3), |link| link.all_gather("g", vec![link.rank, 10 * link.rank], &order));
        let run = run.unwrap();
        assert_eq!(run.results[1], [0, 0, 1, 10, 2, 20]);
        assert_eq!(run.results[5], [3, 30, 4, 40, 5, 50]);
        assert_eq!(run.collectives, [1; 6]);
    }

    #[test]
    fn an_all_to_all_is_the_transpose_of_what_was_sent() {
        let run = run_ranks(ranks(3, 3), |link| {
            let pieces = (0..3).map(|to| vec![(link.rank, to)]).collect();
            link.all_to_all("t", pieces)
        });
        assert_eq!(run.unwrap().results[2], [[(0, 2)], [(1, 2)], [(2, 2)]]);
    }

    #[test]
    fn the_same_collective_twice_never_mixes_its_rounds() {
        let run = run_ranks(ranks(4, 4), |link| {
            let mut seen = Vec::new();
            for round in 0..50 {
                seen.extend(link.exchange("again", round * 10 + link.rank)?.into_iter().map(|v| *v));
            }
            Ok(seen)
        });
        let expected: Vec<usize> = (0..50).flat_map(|round| (0..4).map(move |r| round * 10 + r)).collect();
        for seen in run.unwrap().results {
            assert_eq!(seen, expected);
        }
    }

    #[test]
    fn a_rank_that_skips_a_collective_times_the_others_out_by_name() {
        let short = Ranks { count: 4, world: 2, timeout: Duration::from_millis(50) };
        let error = run_ranks(short, |link| {
            if link.rank == 3 { Ok(Vec::new()) } else { link.exchange("all_gather_lse", link.rank) }
        });
        let Err(EngineError::Timeout { rank, waiting_in, waited_s }) = error else { panic!("{error:?}") };
        assert_eq!(rank, Some(2));
        assert!(waiting_in.contains("all_gather_lse") && waiting_in.contains("[3]"), "{waiting_in}");
        assert!(waited_s >= 0.05);
    }

    #[test]
    fn a_peer_that_computes_for_longer_than_the_limit_is_waited_for() {
        let short = Ranks { count: 2, world: 2, timeout: Duration::from_millis(20) };
        let run = run_ranks(short, |link| {
            if link.rank == 1 {
                std::thread::sleep(Duration::from_millis(120));
            }
            link.all_gather("late", vec![link.rank], &[0, 1])
        });
        assert_eq!(run.unwrap().results, [[0, 1], [0, 1]]);
    }

    #[test]
    fn a_panic_in_one_rank_wakes_the_others_and_is_a_crash() {
        let error = run_ranks(ranks(3, 3), |link| {
            if link.rank == 1 {
                std::panic::resume_unwind(Box::new("deliberate"));
            }
            link.exchange("barrier", ())
        });
        let Err(EngineError::Crash { text }) = error else { panic!("{error:?}") };
        assert!(text.contains("rank 1 panicked: deliberate"), "{text}");
    }

    #[test]
    fn ranks_that_disagree_on_a_payload_crash_instead_of_reading_garbage() {
        let sizes = run_ranks(ranks(2, 2), |link| link.all_gather("g", vec![0u8; link.rank + 1], &[0, 1]));
        assert!(matches!(sizes, Err(EngineError::Crash { .. })), "{sizes:?}");
        let types = run_ranks(ranks(2, 2), |link| {
            if link.rank == 0 {
                link.exchange("x", 1u8).map(drop)
            } else {
                link.exchange("x", 1u16).map(drop)
            }
        });
        assert!(matches!(types, Err(EngineError::Crash { .. })), "{types:?}");
    }
}
