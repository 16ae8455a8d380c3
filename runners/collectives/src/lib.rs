//! The vendors' collectives: one loader for NCCL and RCCL, which keep the same names and signatures.
//!
//! Nothing is linked. The library is opened by its full path where one is given, else by the names under which wheels and packages install it.
//! Two ranks can't share a device: NCCL refuses that, so a device that plays several ranks exchanges through its own memory, and a
//! communicator is for one rank a device.

mod communicator;
mod library;

pub use communicator::{Communicator, Element, UniqueId};
pub use library::{Collectives, Vendor};

/// Why a collective is not to be had, or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CollectivesError {
    /// No library.
    #[error("{vendor} is not installed ({reason}): name its file")]
    Missing {
        /// Whose library.
        vendor: Vendor,
        /// What the loader said of the last name that was tried.
        reason: String,
    },
    /// The library lacks a function.
    #[error("{file} lacks {function}")]
    Function {
        /// File.
        file: String,
        /// Function that it lacks.
        function: &'static str,
    },
    /// A call failed.
    #[error("{call} failed with {code}: {text}")]
    Call {
        /// Function.
        call: &'static str,
        /// `ncclResult_t`.
        code: i32,
        /// What the library says of it.
        text: String,
    },
}

/// Ends the process at once with this status: nothing that libraries have left to be done at the end of a process is done.
pub fn end_at_once(status: u8) -> ! {
    unsafe extern "C" {
        fn _exit(status: std::ffi::c_int) -> !;
    }
    // SAFETY: it takes any status, touches no memory of the program, and does not return.
    unsafe { _exit(i32::from(status)) }
}
