//! Silence for panics that are answers: an engine with a fault may panic, and its diagnosis must not fill the terminal with that.

use std::panic::{set_hook, take_hook};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Guards that are alive.
static GUARDS: AtomicUsize = AtomicUsize::new(0);

/// While one of these lives, no panic of this process is printed. What panics is still told where it is caught.
pub(crate) struct Quiet(());

impl Quiet {
    /// Silence until the guard is dropped.
    pub fn new() -> Self {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(|| {
            let before = take_hook();
            set_hook(Box::new(move |panic| {
                if GUARDS.load(Ordering::Relaxed) == 0 {
                    before(panic);
                }
            }));
        });
        GUARDS.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        GUARDS.fetch_sub(1, Ordering::Relaxed);
    }
}
