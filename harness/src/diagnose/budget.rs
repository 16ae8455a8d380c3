//! What a diagnosis may cost: time of the processor, so that whatever else a machine does changes nothing of what is found.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// How often its seconds may pass on the clock before a diagnosis ends on a busy machine all the same.
const PATIENCE: u32 = 6;

/// What is left to spend: seconds of processor time on each thread that works, or a number of tries.
#[derive(Debug)]
pub struct Budget {
    /// Processor time of this program when it was made, and at which it is used up.
    began_at: Duration,
    used_up_at: Duration,
    /// Threads that work.
    threads: u32,
    /// Time on the clock at which it ends whatever was used.
    ends_at: Option<Instant>,
    /// Tries that are left; `usize::MAX` where time alone counts.
    tries: AtomicUsize,
    started: Instant,
}

impl Budget {
    /// `seconds` of processor time on each of the threads that work at the moment.
    pub fn of(seconds: Duration) -> Self {
        let threads = u32::try_from(rayon::current_num_threads()).unwrap_or(u32::MAX);
        let (started, began_at) = (Instant::now(), processor_time());
        Self {
            began_at,
            used_up_at: began_at.saturating_add(seconds.saturating_mul(threads)),
            threads,
            ends_at: started.checked_add(seconds.saturating_mul(PATIENCE)),
            tries: AtomicUsize::new(usize::MAX),
            started,
        }
    }

    /// So many tries, however long they take.
    #[cfg(test)]
    pub fn of_tries(tries: usize) -> Self {
        let unlimited = Self::of(Duration::from_secs(1 << 20));
        unlimited.tries.store(tries, Ordering::Relaxed);
        unlimited
    }

    /// Takes a try; none when the budget is used up.
    pub(super) fn take(&self) -> bool {
        let one = |left: usize| match left {
            usize::MAX => Some(left),
            left => left.checked_sub(1),
        };
        !self.is_up() && self.tries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one).is_ok()
    }

    /// Whether it is used up.
    pub fn is_up(&self) -> bool {
        processor_time() >= self.used_up_at || self.ends_at.is_some_and(|end| Instant::now() >= end)
    }

    /// Processor time of each thread since it was made, or the share of its limit on the clock that has passed, if that is more.
    pub fn spent(&self) -> Duration {
        let worked = processor_time().saturating_sub(self.began_at) / self.threads.max(1);
        worked.max(self.elapsed() / PATIENCE)
    }

    /// Time on the clock since it was made.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

/// Processor time of all threads of this program.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_costs_nothing_and_computing_does() {
        let budget = Budget::of(Duration::from_secs(3600));
        let before = processor_time();
        let mut sum = 0u64;
        while processor_time() == before {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(processor_time() > before && !budget.is_up());
        assert!(Budget::of(Duration::ZERO).is_up());
    }

    #[test]
    fn tries_are_counted_to_the_last() {
        let budget = Budget::of_tries(2);
        assert_eq!([budget.take(), budget.take(), budget.take()], [true, true, false]);
    }
}
