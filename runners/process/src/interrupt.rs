//! The end of a harness that is interrupted: commands first, then what its user has to know.

use std::io::Write;
use std::sync::{Mutex, Once, PoisonError};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::family;

/// What is said last.
static WORDS: Mutex<Option<String>> = Mutex::new(None);

/// Says a line on standard error when the process is interrupted, such as where its results lie; the last call counts.
pub fn say_at_interrupt(words: String) {
    watch();
    *WORDS.lock().unwrap_or_else(PoisonError::into_inner) = Some(words);
}

/// Sees to it that everything which was started ends with this process. The signal then does what it does.
pub fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) else { return };
        thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                family::end_all();
                if let Some(words) = &*WORDS.lock().unwrap_or_else(PoisonError::into_inner) {
                    // the terminal may be gone, which is no reason to stay
                    let _ = writeln!(std::io::stderr(), "\n{words}");
                }
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        });
    });
}
