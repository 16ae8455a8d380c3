//! Progress of a long command on standard error: a bar on a terminal, a line every few seconds elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use indicatif::ProgressBar;

use crate::bench::progress;

/// Seconds that lie between two lines of a log at least.
const GAP_S: f64 = 5.0;

/// Counts steps of one piece of work, from any thread, and shows how far it is until it is dropped.
pub struct Progress {
    shown: Shown,
    started: Instant,
}

enum Shown {
    Bar(ProgressBar),
    Lines(Mutex<Lines>),
}

impl Progress {
    /// Progress over `length` steps; `what` says in the plural what they are.
    pub fn new(length: usize, what: &'static str) -> Self {
        let shown = if std::io::stderr().is_terminal() {
            Shown::Bar(progress::bar(length as u64, what))
        } else {
            Shown::Lines(Mutex::new(Lines::new(length, what)))
        };
        Self { shown, started: Instant::now() }
    }

    /// One more step is done.
    pub fn step(&self) {
        match &self.shown {
            Shown::Bar(bar) => bar.inc(1),
            Shown::Lines(lines) => {
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(line) = lines.step(self.started.elapsed().as_secs_f64()) {
                    // nobody who closed standard error waits for progress
                    let _ = writeln!(std::io::stderr(), "{line}");
                }
            }
        }
    }

    /// Does something that writes to the terminal, with the bar out of the way.
    pub fn beside<T>(&self, write: impl FnOnce() -> T) -> T {
        match &self.shown {
            Shown::Bar(bar) => bar.suspend(write),
            Shown::Lines(_) => write(),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

/// Which steps get a line: the first that ends once [`GAP_S`] have passed since the last line, and never the last step,
/// since a result follows it.
struct Lines {
    what: &'static str,
    length: usize,
    done: usize,
    last_s: f64,
}

impl Lines {
    fn new(length: usize, what: &'static str) -> Self {
        Self { what, length, done: 0, last_s: 0.0 }
    }

    /// Counts a step that ended `now_s` seconds after the start.
    fn step(&mut self, now_s: f64) -> Option<String> {
        self.done += 1;
        if now_s - self.last_s < GAP_S || self.done >= self.length {
            return None;
        }
        self.last_s = now_s;
        Some(format!("[{}/{}] {}, {now_s:.0} s", self.done, self.length, self.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of work whose steps end at these seconds.
    fn lines(ends_s: &[f64]) -> Vec<String> {
        let mut lines = Lines::new(ends_s.len(), "faults");
        ends_s.iter().filter_map(|end_s| lines.step(*end_s)).collect()
    }

    #[test]
    fn quick_work_shows_no_line() {
        assert_eq!(lines(&[0.1, 2.0, 4.9]), Vec::<String>::new());
        assert_eq!(lines(&[60.0]), Vec::<String>::new(), "its result follows at once");
    }

    #[test]
    fn long_work_shows_a_line_every_five_seconds_with_what_is_done_of_how_much() {
        let ends_s: Vec<f64> = (1..=12).map(f64::from).collect();
        assert_eq!(lines(&ends_s), ["[5/12] faults, 5 s", "[10/12] faults, 10 s"]);
    }

    #[test]
    fn a_step_that_takes_long_is_told_when_it_ends() {
        assert_eq!(lines(&[1.0, 61.0, 62.0, 63.0]), ["[2/4] faults, 61 s"]);
    }

    #[test]
    fn steps_of_many_threads_are_all_counted() {
        let progress =
            Progress { shown: Shown::Lines(Mutex::new(Lines::new(1000, "cases"))), started: Instant::now() };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100).for_each(|_| progress.step()));
            }
        });
        let Shown::Lines(lines) = &progress.shown else { panic!("lines were asked for") };
        assert_eq!(lines.lock().unwrap().done, 400);
    }
}
