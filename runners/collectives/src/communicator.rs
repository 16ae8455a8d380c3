//! One rank of a communicator.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::CollectivesError;
use crate::library::{Collectives, RawCommunicator, RawUniqueId};

/// Name of a communicator, which one rank makes and hands to the others.
#[derive(Clone, Copy)]
pub struct UniqueId(RawUniqueId);

impl UniqueId {
    /// A new name.
    ///
    /// # Errors
    /// What the library says.
    pub fn new(library: &Collectives) -> Result<Self, CollectivesError> {
        let mut id = RawUniqueId([0; 128]);
        // SAFETY: the out pointer lives through the call.
        library.checked("ncclGetUniqueId", unsafe { (library.functions.unique_id)(&raw mut id) })?;
        Ok(Self(id))
    }
}

/// Element type of a collective. fp8 travels as bytes: old releases know no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// Bytes.
    U8,
    /// f32.
    F32,
    /// bf16.
    Bf16,
}

impl Element {
    fn code(self) -> c_int {
        match self {
            Self::U8 => 1,
            Self::F32 => 7,
            Self::Bf16 => 9,
        }
    }
}

/// `ncclSum`.
const SUM: c_int = 0;

/// One rank of a communicator, on the device that was current when it was made. Every call enqueues work on a stream of that device.
pub struct Communicator {
    library: Arc<Collectives>,
    raw: RawCommunicator,
    rank: usize,
    world: usize,
}

// SAFETY: a communicator may be used from any thread, by one at a time; `&mut self` of the calls keeps it so.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins the communicator of that name as rank `rank` of `world`; returns when all have joined. Each rank has a device and a thread
    /// of its own.
    ///
    /// # Errors
    /// What the library says: invalid usage (5) where two ranks share a device.
    pub fn join(
        library: &Arc<Collectives>,
        id: &UniqueId,
        rank: usize,
        world: usize,
    ) -> Result<Self, CollectivesError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the out pointer lives through the call; the name is passed by value.
        let code =
            unsafe { (library.functions.init_rank)(&raw mut raw, world as c_int, id.0, rank as c_int) };
        library.checked("ncclCommInitRank", code)?;
        Ok(Self { library: Arc::clone(library), raw, rank, world })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the communicator.
    pub fn world(&self) -> usize {
        self.world
    }

    /// `to [world, count]` out of every rank's `from [count]`.
    ///
    /// # Errors
    /// What the library says.
    ///
    /// # Safety
    /// Both are addresses of the device's memory with room for as much, and the stream is the device's own; all live until the stream has come
    /// so far.
    pub unsafe fn all_gather(
        &mut self,
        from: u64,
        to: u64,
        count: usize,
        element: Element,
        stream: *mut c_void,
    ) -> Result<(), CollectivesError> {
        // SAFETY: the caller's promise.
        let code = unsafe {
            (self.library.functions.all_gather)(
                from as *const c_void,
                to as *mut c_void,
                count,
                element.code(),
                self.raw,
                stream,
            )
        };
        self.library.checked("ncclAllGather", code)
    }

    /// `to [count]`: the sum over ranks of their `from [world, count]`, this rank's part.
    ///
    /// # Errors
    /// What the library says.
    ///
    /// # Safety
    /// As [`Self::all_gather`].
    pub unsafe fn reduce_scatter(
        &mut self,
        from: u64,
        to: u64,
        count: usize,
        element: Element,
        stream: *mut c_void,
    ) -> Result<(), CollectivesError> {
        // SAFETY: the caller's promise.
        let code = unsafe {
            (self.library.functions.reduce_scatter)(
                from as *const c_void,
                to as *mut c_void,
                count,
                element.code(),
                SUM,
                self.raw,
                stream,
            )
        };
        self.library.checked("ncclReduceScatter", code)
    }

    /// `to [world, count]`: what every rank has for this one in its `from [world, count]`; a group of sends and receives, as releases before
    /// 2.28 have no all-to-all.
    ///
    /// # Errors
    /// What the library says.
    ///
    /// # Safety
    /// As [`Self::all_gather`].
    pub unsafe fn all_to_all(
        &mut self,
        from: u64,
        to: u64,
        count: usize,
        (element, element_bytes): (Element, usize),
        stream: *mut c_void,
    ) -> Result<(), CollectivesError> {
        let functions = &self.library.functions;
        // SAFETY: the group is ended whatever is said in it.
        self.library.checked("ncclGroupStart", unsafe { (functions.group_start)() })?;
        let mut outcome = Ok(());
        for peer in 0..self.world {
            let at = (peer * count * element_bytes) as u64;
            // SAFETY: the caller's promise; the parts of a peer lie inside both.
            let codes = unsafe {
                [
                    (
                        "ncclSend",
                        (functions.send)(
                            (from + at) as *const c_void,
                            count,
                            element.code(),
                            peer as c_int,
                            self.raw,
                            stream,
                        ),
                    ),
                    (
                        "ncclRecv",
                        (functions.receive)(
                            (to + at) as *mut c_void,
                            count,
                            element.code(),
                            peer as c_int,
                            self.raw,
                            stream,
                        ),
                    ),
                ]
            };
            for (call, code) in codes {
                outcome = outcome.and_then(|()| self.library.checked(call, code));
            }
        }
        // SAFETY: the group was started above.
        let ended = self.library.checked("ncclGroupEnd", unsafe { (functions.group_end)() });
        outcome.and(ended)
    }

    /// Whether something went wrong in the background, such as a peer that died.
    ///
    /// # Errors
    /// What went wrong, or what the library says.
    pub fn check(&self) -> Result<(), CollectivesError> {
        let mut state = 0;
        // SAFETY: the communicator is alive and the out pointer lives through the call.
        let code = unsafe { (self.library.functions.async_error)(self.raw, &raw mut state) };
        self.library.checked("ncclCommGetAsyncError", code)?;
        self.library.checked("a collective in the background", state)
    }

    /// Gives up what is under way, also where peers are gone.
    ///
    /// # Errors
    /// What the library says.
    pub fn abort(mut self) -> Result<(), CollectivesError> {
        let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        // SAFETY: the communicator is alive and is not used again.
        self.library.checked("ncclCommAbort", unsafe { (self.library.functions.abort)(raw) })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the communicator is alive and is not used again; an error has nobody to be told to.
            unsafe { (self.library.functions.destroy)(self.raw) };
        }
    }
}
