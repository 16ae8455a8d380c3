//! One rank of a communicator.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::CollectivesError;
use crate::library::{Collectives, IN_PROGRESS, RawCommunicator, RawConfig, RawUniqueId};

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
    /// f16.
    F16,
}

impl Element {
    fn code(self) -> c_int {
        match self {
            Self::U8 => 1,
            Self::F16 => 6,
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
    /// On the heap, where the library writes it, perhaps in the background.
    raw: Box<AtomicPtr<c_void>>,
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
        let raw = Box::new(AtomicPtr::new(std::ptr::null_mut()));
        // SAFETY: the out pointer lives through the call; the name is passed by value.
        let code =
            unsafe { (library.functions.init_rank)(raw.as_ptr(), world as c_int, id.0, rank as c_int) };
        library.checked("ncclCommInitRank", code)?;
        Ok(Self { library: Arc::clone(library), raw, rank, world })
    }

    /// The same without waiting for the others, for calls that never wait either: each returns at once, and the communicator is not used
    /// again before it [is ready](Self::is_ready). One thread may join all ranks in [a group](Collectives::grouped), each with its device
    /// the current one.
    ///
    /// # Errors
    /// What the library says.
    pub fn join_asynchronously(
        library: &Arc<Collectives>,
        id: &UniqueId,
        rank: usize,
        world: usize,
    ) -> Result<Self, CollectivesError> {
        let raw = Box::new(AtomicPtr::new(std::ptr::null_mut()));
        let mut config = RawConfig::ASYNCHRONOUS;
        // SAFETY: the out pointer stays where it is as long as the communicator; the configuration is read by the call.
        let code = unsafe {
            let (world, rank) = (world as c_int, rank as c_int);
            (library.functions.init_rank_config)(raw.as_ptr(), world, id.0, rank, &raw mut config)
        };
        library.started("ncclCommInitRankConfig", code)?;
        Ok(Self { library: Arc::clone(library), raw, rank, world })
    }

    /// Whether the last call has come to its end, so that its work is in the stream.
    ///
    /// # Errors
    /// What went wrong in it.
    pub fn is_ready(&self) -> Result<bool, CollectivesError> {
        let mut state = 0;
        // SAFETY: the communicator is alive and the out pointer lives through the call.
        let code = unsafe { (self.library.functions.async_error)(self.raw(), &raw mut state) };
        self.library.checked("ncclCommGetAsyncError", code)?;
        self.library.started("a collective in the background", state)?;
        Ok(state != IN_PROGRESS)
    }

    fn raw(&self) -> RawCommunicator {
        self.raw.load(Ordering::Acquire)
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
                self.raw(),
                stream,
            )
        };
        self.library.started("ncclAllGather", code)
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
                self.raw(),
                stream,
            )
        };
        self.library.started("ncclReduceScatter", code)
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
        self.library.grouped(|| {
            for peer in 0..self.world {
                let at = (peer * count * element_bytes) as u64;
                // SAFETY: the caller's promise; the parts of a peer lie inside both.
                let codes = unsafe {
                    let (code, peer, raw) = (element.code(), peer as c_int, self.raw());
                    let (from, to) = ((from + at) as *const c_void, (to + at) as *mut c_void);
                    [
                        ("ncclSend", (functions.send)(from, count, code, peer, raw, stream)),
                        ("ncclRecv", (functions.receive)(to, count, code, peer, raw, stream)),
                    ]
                };
                for (call, code) in codes {
                    self.library.started(call, code)?;
                }
            }
            Ok(())
        })
    }

    /// Whether something went wrong in the background, such as a peer that died.
    ///
    /// # Errors
    /// What went wrong, or what the library says.
    pub fn check(&self) -> Result<(), CollectivesError> {
        let mut state = 0;
        // SAFETY: the communicator is alive and the out pointer lives through the call.
        let code = unsafe { (self.library.functions.async_error)(self.raw(), &raw mut state) };
        self.library.checked("ncclCommGetAsyncError", code)?;
        self.library.checked("a collective in the background", state)
    }

    /// Gives up what is under way, also where peers are gone.
    ///
    /// # Errors
    /// What the library says.
    pub fn abort(self) -> Result<(), CollectivesError> {
        let raw = self.raw.swap(std::ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: the communicator is alive and is not used again.
        self.library.started("ncclCommAbort", unsafe { (self.library.functions.abort)(raw) })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let raw = self.raw.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !raw.is_null() {
            // SAFETY: the communicator is alive and is not used again; an error has nobody to be told to.
            unsafe { (self.library.functions.destroy)(raw) };
        }
    }
}
