//! The functions that are used, by name.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::Library;

use crate::CollectivesError;

/// Whose collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vendor {
    /// NVIDIA's NCCL.
    Nccl,
    /// AMD's RCCL.
    Rccl,
}

impl Vendor {
    /// Names under which the library is installed. Wheels have the first alone, without which nothing would be found.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Self::Nccl => &["libnccl.so.2", "libnccl.so"],
            Self::Rccl => &["librccl.so.1", "librccl.so"],
        }
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nccl => "NCCL",
            Self::Rccl => "RCCL",
        })
    }
}

/// `ncclUniqueId`: 128 bytes that name a communicator.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RawUniqueId(pub [u8; 128]);

/// The first fields of `ncclConfig_t`, as NCCL 2.14 and every RCCL with the function know it; `size` and `version` say that there are
/// no more.
#[repr(C)]
pub struct RawConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl RawConfig {
    /// Calls that return at once and are asked for their end.
    pub const ASYNCHRONOUS: Self = Self {
        // up to the last field: what is behind it would be taken for the next one
        size: std::mem::offset_of!(Self, blocking) + size_of::<c_int>(),
        magic: 0xCAFE_BEEF,
        version: 21_400,
        blocking: 0,
    };
}

pub type RawCommunicator = *mut c_void;
pub type Stream = *mut c_void;

macro_rules! functions {
    ($($field:ident = $symbol:literal : fn($($argument:ty),*);)*) => {
        pub struct Functions { $(pub $field: unsafe extern "C" fn($($argument),*) -> c_int,)* }
        impl Functions {
            fn load(library: &Library, file: &str) -> Result<Self, CollectivesError> {
                Ok(Self { $($field: {
                    // SAFETY: the symbol has this signature in NCCL from 2.7 on and in every RCCL that has it.
                    let symbol = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> c_int>($symbol.as_bytes()) };
                    *symbol.map_err(|_| CollectivesError::Function { file: file.to_owned(), function: $symbol })?
                },)* })
            }
        }
    };
}

functions! {
    version = "ncclGetVersion": fn(*mut c_int);
    unique_id = "ncclGetUniqueId": fn(*mut RawUniqueId);
    init_rank = "ncclCommInitRank": fn(*mut RawCommunicator, c_int, RawUniqueId, c_int);
    init_rank_config = "ncclCommInitRankConfig": fn(*mut RawCommunicator, c_int, RawUniqueId, c_int, *mut RawConfig);
    destroy = "ncclCommDestroy": fn(RawCommunicator);
    abort = "ncclCommAbort": fn(RawCommunicator);
    async_error = "ncclCommGetAsyncError": fn(RawCommunicator, *mut c_int);
    all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, RawCommunicator, Stream);
    reduce_scatter = "ncclReduceScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, RawCommunicator, Stream);
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, RawCommunicator, Stream);
    receive = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, RawCommunicator, Stream);
    group_start = "ncclGroupStart": fn();
    group_end = "ncclGroupEnd": fn();
}

/// An open library.
pub struct Collectives {
    pub(crate) functions: Functions,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    // Functions point into it. It is never closed: threads of the library may outlive a communicator.
    _library: ManuallyDrop<Library>,
}

/// What turns multicast over NVLink off, which NCCL would turn on by itself. It reads its environment once, when it is first called.
const MULTICAST: &str = "NCCL_NVLS_ENABLE";

/// Multicast over NVLink holds a resource of the host's switch that a program which ends badly may keep from everyone: it stays off
/// unless the environment says otherwise.
fn leave_multicast_off() {
    if std::env::var_os(MULTICAST).is_none() {
        // SAFETY: nothing of this program reads the environment other than through `std::env`, whose lock this takes.
        unsafe { std::env::set_var(MULTICAST, "0") };
    }
}

/// `ncclInProgress`: a call of an asynchronous communicator goes on in the background.
pub const IN_PROGRESS: c_int = 7;

impl Collectives {
    /// Opens the vendor's library, by its file where one is given.
    ///
    /// # Errors
    /// [`CollectivesError::Missing`], [`CollectivesError::Function`].
    pub fn open(vendor: Vendor, file: Option<&Path>) -> Result<Arc<Self>, CollectivesError> {
        let names: Vec<PathBuf> = match file {
            Some(file) => vec![file.to_owned()],
            None => vendor.names().iter().map(PathBuf::from).collect(),
        };
        leave_multicast_off();
        let mut reason = String::new();
        for name in names {
            // SAFETY: the initialisers are those of a vendor's library.
            match unsafe { Library::new(&name) } {
                Ok(library) => return Self::of(library, &name.display().to_string()),
                Err(error) => reason = error.to_string(),
            }
        }
        Err(CollectivesError::Missing { vendor, reason })
    }

    fn of(library: Library, file: &str) -> Result<Arc<Self>, CollectivesError> {
        let functions = Functions::load(&library, file)?;
        let function = "ncclGetErrorString";
        // SAFETY: the symbol has this signature in every release.
        let symbol =
            unsafe { library.get::<unsafe extern "C" fn(c_int) -> *const c_char>(function.as_bytes()) };
        let error_string =
            *symbol.map_err(|_| CollectivesError::Function { file: file.to_owned(), function })?;
        Ok(Arc::new(Self { functions, error_string, _library: ManuallyDrop::new(library) }))
    }

    /// Version as the library counts it: 22803 is 2.28.3.
    ///
    /// # Errors
    /// What the library says.
    pub fn version(&self) -> Result<i32, CollectivesError> {
        let mut version = 0;
        // SAFETY: the out pointer lives through the call.
        self.checked("ncclGetVersion", unsafe { (self.functions.version)(&raw mut version) })?;
        Ok(version)
    }

    /// Runs `calls` as one group: collectives of several communicators of this thread, none of which waits for another's call.
    ///
    /// # Errors
    /// What the calls say, else what the library says of their group.
    pub fn grouped<E: From<CollectivesError>>(&self, calls: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        // SAFETY: the group is ended whatever is said in it.
        self.started("ncclGroupStart", unsafe { (self.functions.group_start)() })?;
        let outcome = calls();
        // SAFETY: the group was started above.
        let ended = self.started("ncclGroupEnd", unsafe { (self.functions.group_end)() });
        outcome.and(ended.map_err(E::from))
    }

    /// As [`Self::checked`], for calls that may go on in the background.
    pub(crate) fn started(&self, call: &'static str, code: c_int) -> Result<(), CollectivesError> {
        if code == IN_PROGRESS { Ok(()) } else { self.checked(call, code) }
    }

    pub(crate) fn checked(&self, call: &'static str, code: c_int) -> Result<(), CollectivesError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a constant string for every code.
        let text = unsafe {
            let text = (self.error_string)(code);
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        Err(CollectivesError::Call { call, code, text })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_and_no_panic() {
        for vendor in [Vendor::Nccl, Vendor::Rccl] {
            let error = Collectives::open(vendor, Some(Path::new("/nowhere/libnone.so"))).err().unwrap();
            assert!(matches!(&error, CollectivesError::Missing { vendor: v, .. } if *v == vendor));
            assert!(error.to_string().starts_with(&format!("{vendor} is not installed")), "{error}");
        }
    }

    #[test]
    fn a_library_that_is_none_of_collectives_is_told_by_what_it_lacks() {
        let error = Collectives::open(Vendor::Nccl, Some(Path::new("libc.so.6"))).err().unwrap();
        assert!(matches!(error, CollectivesError::Function { function: "ncclGetVersion", .. }), "{error}");
    }
}
