//! The host side of the GPU engine on HIP: load the run-time libraries, compile the kernels, launch them. Sessions come with hardware to try
//! them on.
//!
//! Nothing is linked: `libamdhip64` and `libhiprtc` are opened when they are asked for. `hipDeviceProp_t` is not used, because its layout
//! differs between releases; attributes and names are asked for one by one.

mod runtime;

pub use runtime::{Code, Hip, signatures};

/// Why there is no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoDevice {
    /// A library is not installed.
    #[error("no device: {library} is not installed ({reason})")]
    Library {
        /// Library that is missing.
        library: &'static str,
        /// What the loader said of the last name that was tried.
        reason: String,
    },
    /// A library is there and lacks a function.
    #[error("no device: {library} lacks {function}")]
    Function {
        /// Library.
        library: &'static str,
        /// Function that it lacks.
        function: &'static str,
    },
    /// The runtime finds none.
    #[error("no device: HIP finds none (error {code})")]
    None {
        /// `hipError_t` of the count.
        code: i32,
    },
}

/// A call of the runtime that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with {code}{}", if log.is_empty() { String::new() } else { format!(": {log}") })]
pub struct HipError {
    /// Function.
    pub call: &'static str,
    /// `hipError_t` or `hiprtcResult`.
    pub code: i32,
    /// What the compiler said.
    pub log: String,
}

/// Looks for a device and says which one there is.
///
/// # Errors
/// [`NoDevice`], which says what is missing.
pub fn probe() -> Result<String, NoDevice> {
    Ok(Hip::open()?.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_runtime_is_told_what_is_missing_and_one_with_it_is_named() {
        match probe() {
            Ok(name) => assert!(!name.is_empty()),
            Err(error) => assert!(error.to_string().starts_with("no device: "), "{error}"),
        }
    }
}
