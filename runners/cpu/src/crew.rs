//! Threads that play ranks, kept from one step to the next: to begin and end one takes longer than most steps do.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Most threads of a crew that are kept; those of larger steps end with them.
const MOST_KEPT: usize = 32;

/// Crews that nobody uses at the moment.
static IDLE: Mutex<Vec<Crew>> = Mutex::new(Vec::new());

/// Runs `body(1)` to `body(count - 1)` on a thread each and `body(0)` on the caller's, and returns when all have ended. What panics on a
/// thread is dropped: a body that can says so in its own way.
///
/// # Errors
/// No thread can be begun; then `body` has not run at all.
pub fn on_threads(count: usize, body: &(dyn Fn(usize) + Sync)) -> io::Result<()> {
    let mut crew = lock(&IDLE).pop().unwrap_or_default();
    let outcome = crew.run(count, body);
    crew.workers.truncate(MOST_KEPT);
    lock(&IDLE).push(crew);
    outcome
}

/// Threads that wait for work.
#[derive(Default)]
struct Crew {
    workers: Vec<Sender<Task>>,
}

impl Crew {
    fn run(&mut self, count: usize, body: &(dyn Fn(usize) + Sync)) -> io::Result<()> {
        let others = count.saturating_sub(1);
        while self.workers.len() < others {
            self.workers.push(begin()?);
        }
        let running = Arc::new(Running { left: Mutex::new(others), none_left: Condvar::new() });
        // waits on the way out, also where `body` panics here
        let waits = Waits(&running);
        // SAFETY: only the lifetime changes. What is made of it here is used by nobody behind `waits`, which ends when every task has been
        // counted out, and a task is counted out behind its last use of the body
        let body_of_tasks: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(body) };
        for (index, worker) in self.workers[..others].iter().enumerate() {
            let task = Task { body: body_of_tasks, rank: index + 1, counted: Counted(Arc::clone(&running)) };
            // a thread that is gone gives the task back, and dropping it counts it out
            drop(worker.send(task));
        }
        body(0);
        drop(waits);
        Ok(())
    }
}

/// One call of a body. The body is dropped from use before the task is counted out.
struct Task {
    body: &'static (dyn Fn(usize) + Sync),
    rank: usize,
    counted: Counted,
}

fn begin() -> io::Result<Sender<Task>> {
    let (send, receive) = channel::<Task>();
    thread::Builder::new().name("rank".to_owned()).spawn(move || {
        for Task { body, rank, counted } in receive {
            let _ = catch_unwind(AssertUnwindSafe(|| body(rank)));
            drop(counted);
        }
    })?;
    Ok(send)
}

/// Tasks of one run that have not ended.
struct Running {
    left: Mutex<usize>,
    none_left: Condvar,
}

/// A task that is counted out when it is dropped.
struct Counted(Arc<Running>);

impl Drop for Counted {
    fn drop(&mut self) {
        let mut left = lock(&self.0.left);
        *left -= 1;
        if *left == 0 {
            self.0.none_left.notify_all();
        }
    }
}

/// Waits for all tasks when it is dropped.
struct Waits<'a>(&'a Running);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let mut left = lock(&self.0.left);
        while *left > 0 {
            left = self.0.none_left.wait(left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_rank_runs_once_each_time_and_has_ended_when_the_call_returns() {
        for count in [1, 4, 2, 40, 0, 3] {
            let seen: Vec<AtomicUsize> = (0..count.max(1)).map(|_| AtomicUsize::new(0)).collect();
            on_threads(count, &|rank| {
                thread::yield_now();
                seen[rank].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert!(seen.iter().all(|times| times.load(Ordering::Relaxed) == 1), "{count}");
        }
    }

    #[test]
    fn ranks_run_at_the_same_time_and_calls_inside_calls_have_threads_of_their_own() {
        let barrier = std::sync::Barrier::new(3);
        let inner = AtomicUsize::new(0);
        on_threads(3, &|_| {
            barrier.wait();
            on_threads(4, &|_| {
                inner.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        })
        .unwrap();
        assert_eq!(inner.into_inner(), 12);
    }

    #[test]
    fn a_panic_on_the_callers_thread_waits_for_the_others_and_one_on_another_is_dropped() {
        let ended = AtomicUsize::new(0);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            on_threads(3, &|rank| {
                if rank != 1 {
                    std::panic::resume_unwind(Box::new("deliberate"));
                }
                thread::sleep(std::time::Duration::from_millis(20));
                ended.fetch_add(1, Ordering::Relaxed);
            })
        }));
        assert!(outcome.is_err());
        assert_eq!(ended.load(Ordering::Relaxed), 1, "rank 1 had ended when the panic came out");
        on_threads(3, &|_| {
            ended.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(ended.into_inner(), 4, "threads go on after a panic");
    }
}
