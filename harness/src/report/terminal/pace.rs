//! How often a log gets a progress line.

/// Seconds that lie between two lines at least.
const SHORTEST_GAP_S: f64 = 1.0;
/// Seconds after which a line is due whatever was done, so that a CI that watches for silence sees life.
const LONGEST_GAP_S: f64 = 60.0;

/// Decides when a progress line is due: after one twentieth of the cases, at most once a second, and at least once a minute
/// while cases come in.
#[derive(Debug, Clone)]
pub struct Pace {
    step: usize,
    last_done: usize,
    last_s: f64,
}

impl Pace {
    /// Pace of a run of `selected` cases.
    pub fn new(selected: usize) -> Self {
        Self { step: selected.div_ceil(20).max(1), last_done: 0, last_s: 0.0 }
    }

    /// Whether a line is due with `done` cases at `now_s` seconds; when it is, the wait starts anew.
    pub fn is_due(&mut self, done: usize, now_s: f64) -> bool {
        let gap_s = now_s - self.last_s;
        let due = (gap_s >= SHORTEST_GAP_S && done >= self.last_done + self.step) || gap_s >= LONGEST_GAP_S;
        if due {
            self.last_done = done;
            self.last_s = now_s;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(selected: usize, seconds_per_case: f64) -> usize {
        let mut pace = Pace::new(selected);
        (1..=selected).filter(|done| pace.is_due(*done, *done as f64 * seconds_per_case)).count()
    }

    #[test]
    fn a_fast_run_gets_at_most_a_line_a_second() {
        assert_eq!(lines(10_000, 0.0005), 5);
        assert_eq!(lines(100, 0.001), 0);
    }

    #[test]
    fn a_slow_run_gets_a_line_every_twentieth() {
        assert_eq!(lines(1000, 0.1), 20);
    }

    #[test]
    fn a_very_slow_run_shows_life_every_minute() {
        assert_eq!(lines(200, 30.0), 100);
    }
}
