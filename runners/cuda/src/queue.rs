//! A stream with its memory: every call of the driver that a session makes, checked.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use shardcheck_engine::EngineError;

use crate::device::{Device, failure};
use crate::experts::LayerShape;
use crate::router::RouterShape;
use crate::selected::ListingShape;
use crate::shape::{Group, Shape};
use crate::sharing::SplitShape;

/// A stream of a device.
pub struct Queue {
    /// The device.
    pub device: Arc<Device>,
    stream: sys::CUstream,
}

// SAFETY: a stream may be used from any thread that has made its context the current one; a session is used by one at a time.
unsafe impl Send for Queue {}
// SAFETY: as above: the driver's calls on a stream are thread-safe.
unsafe impl Sync for Queue {}

/// One argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Argument {
    /// `Shape`, by value.
    Shape(Shape),
    /// `Group`, by value.
    Group(Group),
    /// `Router`, by value.
    Router(RouterShape),
    /// `Layer`, by value.
    Layer(LayerShape),
    /// `Listing`, by value.
    Listing(ListingShape),
    /// `Split`, by value.
    Split(SplitShape),
    /// A pointer into the device's memory.
    Pointer(u64),
    /// A 32-bit integer.
    Int(i32),
    /// A 64-bit integer.
    Long(i64),
    /// A 32-bit float.
    Float(f32),
}

/// Extent of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    /// Blocks along the three axes.
    pub blocks: (usize, usize, usize),
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
}

impl Extent {
    /// One thread an element.
    pub fn over(elements: usize) -> Self {
        Self::blocks(elements.div_ceil(shardcheck_kernels::THREADS as usize).max(1), 1, 1)
    }

    /// Blocks along the axes, of the usual number of threads.
    pub fn blocks(x: usize, y: usize, z: usize) -> Self {
        Self { blocks: (x, y, z), threads: shardcheck_kernels::THREADS, shared_bytes: 0 }
    }
}

impl Queue {
    /// A new stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(device: Arc<Device>) -> Result<Arc<Self>, EngineError> {
        device.enter()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| failure("cuStreamCreate", &error))?;
        Ok(Arc::new(Self { device, stream }))
    }

    /// The driver's handle, for collectives.
    pub fn handle(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Memory that nothing was written to.
    ///
    /// # Errors
    /// What the driver says, such as that there is none left.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Buffer, EngineError> {
        self.device.enter()?;
        // an empty tensor still has an address
        let size = bytes.max(16);
        // SAFETY: the stream is alive; the memory is used on it alone and freed on it.
        let pointer = unsafe { result::malloc_async(self.stream, size) }.map_err(|error| {
            let call = format!("cuMemAllocAsync of {bytes} bytes");
            failure(&call, &error)
        })?;
        Ok(Buffer { pointer, bytes, queue: Arc::clone(self) })
    }

    /// Memory whose every float is NaN and whose every integer is −1, until something is written.
    ///
    /// # Errors
    /// What the driver says, such as that there is none left.
    pub fn unwritten(self: &Arc<Self>, bytes: usize) -> Result<Buffer, EngineError> {
        let buffer = self.allocate(bytes)?;
        self.fill(&buffer, 0xFF)?;
        Ok(buffer)
    }

    /// Memory that holds `bytes`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn upload(self: &Arc<Self>, bytes: &[u8]) -> Result<Buffer, EngineError> {
        let buffer = self.allocate(bytes.len())?;
        self.write(&buffer, bytes)?;
        Ok(buffer)
    }

    /// Memory that holds 32-bit integers.
    ///
    /// # Errors
    /// What the driver says.
    pub fn upload_i32(self: &Arc<Self>, values: &[i32]) -> Result<Buffer, EngineError> {
        self.upload(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Memory that holds 64-bit integers.
    ///
    /// # Errors
    /// What the driver says.
    pub fn upload_i64(self: &Arc<Self>, values: &[i64]) -> Result<Buffer, EngineError> {
        self.upload(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Copies bytes to the front of a buffer. They are taken before this returns.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the buffer is shorter: a bug of this crate.
    pub fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<(), EngineError> {
        assert!(bytes.len() <= buffer.bytes, "{} bytes into a buffer of {}", bytes.len(), buffer.bytes);
        if bytes.is_empty() {
            return Ok(());
        }
        self.device.enter()?;
        // SAFETY: both ranges are as long as `bytes`; memory that is not page-locked is staged before the call returns.
        unsafe { result::memcpy_htod_async(buffer.pointer, bytes, self.stream) }
            .map_err(|error| failure("cuMemcpyHtoDAsync", &error))
    }

    /// Copies bytes into a buffer from byte `at` on.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the buffer is shorter: a bug of this crate.
    pub fn write_at(&self, buffer: &Buffer, at: usize, bytes: &[u8]) -> Result<(), EngineError> {
        assert!(at + bytes.len() <= buffer.bytes, "{} bytes at {at} of {}", bytes.len(), buffer.bytes);
        self.device.enter()?;
        // SAFETY: as in `write`; the range is inside the buffer.
        unsafe { result::memcpy_htod_async(buffer.pointer + at as u64, bytes, self.stream) }
            .map_err(|error| failure("cuMemcpyHtoDAsync", &error))
    }

    /// The first bytes of a buffer, after all work before.
    ///
    /// # Errors
    /// What the driver says, also of work before.
    ///
    /// # Panics
    /// When the buffer is shorter: a bug of this crate.
    pub fn read(&self, buffer: &Buffer, bytes: usize) -> Result<Vec<u8>, EngineError> {
        assert!(bytes <= buffer.bytes, "{bytes} bytes out of a buffer of {}", buffer.bytes);
        let mut target = vec![0u8; bytes];
        self.device.enter()?;
        if bytes > 0 {
            // SAFETY: both ranges are that long, and the target lives until the stream has been waited for.
            unsafe { result::memcpy_dtoh_async(&mut target, buffer.pointer, self.stream) }
                .map_err(|error| failure("cuMemcpyDtoHAsync", &error))?;
        }
        self.wait()?;
        Ok(target)
    }

    /// Fills a buffer with one byte.
    ///
    /// # Errors
    /// What the driver says.
    pub fn fill(&self, buffer: &Buffer, byte: u8) -> Result<(), EngineError> {
        if buffer.bytes == 0 {
            return Ok(());
        }
        self.device.enter()?;
        // SAFETY: the range is the buffer's own.
        unsafe { result::memset_d8_async(buffer.pointer, byte, buffer.bytes, self.stream) }
            .map_err(|error| failure("cuMemsetD8Async", &error))
    }

    /// Copies one buffer to the front of another on the device.
    ///
    /// # Errors
    /// What the driver says.
    pub fn copy(&self, from: &Buffer, to: &Buffer, bytes: usize) -> Result<(), EngineError> {
        self.copy_part((from, 0), (to, 0), bytes)
    }

    /// Copies bytes from a place of one buffer to a place of another on the device.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When either is shorter: a bug of this crate.
    pub fn copy_part(
        &self,
        (from, at): (&Buffer, usize),
        (to, place): (&Buffer, usize),
        bytes: usize,
    ) -> Result<(), EngineError> {
        assert!(at + bytes <= from.bytes, "{bytes} bytes at {at} of {}", from.bytes);
        assert!(place + bytes <= to.bytes, "{bytes} bytes to {place} of {}", to.bytes);
        if bytes == 0 {
            return Ok(());
        }
        self.device.enter()?;
        let (from, to) = (from.pointer + at as u64, to.pointer + place as u64);
        // SAFETY: both ranges are inside their buffers.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }
            .map_err(|error| failure("cuMemcpyDtoDAsync", &error))
    }

    /// Marks what was enqueued so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(self: &Arc<Self>) -> Result<Event, EngineError> {
        self.device.enter()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|error| failure("cuEventCreate", &error))?;
        let event = Event { event, device: Arc::clone(&self.device) };
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(event.event, self.stream) }
            .map_err(|error| failure("cuEventRecord", &error))?;
        Ok(event)
    }

    /// Lets what is enqueued from now on wait for what an event marks.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait_for(&self, event: &Event) -> Result<(), EngineError> {
        self.device.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are alive.
        unsafe { result::stream::wait_event(self.stream, event.event, flags) }
            .map_err(|error| failure("cuStreamWaitEvent", &error))
    }

    /// Whether all work has run.
    ///
    /// # Errors
    /// What the driver says of that work.
    pub fn is_idle(&self) -> Result<bool, EngineError> {
        self.device.enter()?;
        // SAFETY: the stream is alive.
        ended("cuStreamQuery", unsafe { sys::cuStreamQuery(self.stream) })
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// What the driver says of that work.
    pub fn wait(&self) -> Result<(), EngineError> {
        self.device.enter()?;
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|error| failure("cuStreamSynchronize", &error))
    }

    /// Launches a kernel. Nothing is launched where an axis has no block.
    ///
    /// # Errors
    /// What the driver says.
    pub fn launch(&self, kernel: &str, extent: Extent, arguments: &[Argument]) -> Result<(), EngineError> {
        let (x, y, z) = extent.blocks;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        if x > i32::MAX as usize || y > 65_535 || z > 65_535 {
            return Err(EngineError::Crash {
                text: format!("{kernel}: {x} x {y} x {z} blocks are more than a launch has"),
            });
        }
        self.device.enter()?;
        let mut pointers: Vec<*mut c_void> = arguments
            .iter()
            .map(|argument| match argument {
                Argument::Group(value) => std::ptr::from_ref(value) as *mut c_void,
                Argument::Shape(value) => std::ptr::from_ref(value) as *mut c_void,
                Argument::Router(value) => std::ptr::from_ref(value) as *mut c_void,
                Argument::Layer(value) => std::ptr::from_ref(value) as *mut c_void,
                Argument::Listing(value) => std::ptr::from_ref(value) as *mut c_void,
                Argument::Split(value) => std::ptr::from_ref(value) as *mut c_void,
                Argument::Pointer(value) => std::ptr::from_ref(value) as *mut c_void,
                Argument::Int(value) => std::ptr::from_ref(value) as *mut c_void,
                Argument::Long(value) => std::ptr::from_ref(value) as *mut c_void,
                Argument::Float(value) => std::ptr::from_ref(value) as *mut c_void,
            })
            .collect();
        // SAFETY: arguments are in the order and of the types of the kernel, which the tests of this crate run against the embedded
        // engine; the driver copies them before it returns.
        unsafe {
            result::launch_kernel(
                self.device.function(kernel),
                (x as u32, y as u32, z as u32),
                (extent.threads, 1, 1),
                extent.shared_bytes,
                self.stream,
                &mut pointers,
            )
        }
        .map_err(|error| failure(kernel, &error))
    }

    /// Captures what `enqueue` puts into the stream, without running it.
    ///
    /// # Errors
    /// What the driver says, and what `enqueue` does.
    pub fn capture(
        self: &Arc<Self>,
        enqueue: impl FnOnce() -> Result<(), EngineError>,
    ) -> Result<Graph, EngineError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and no capture is under way: a session is used by one thread at a time.
        unsafe { result::stream::begin_capture(self.stream, mode) }
            .map_err(|error| failure("cuStreamBeginCapture", &error))?;
        let enqueued = enqueue();
        // SAFETY: the capture was begun above; it has to be ended whatever was said in it.
        let graph = unsafe { result::stream::end_capture(self.stream) };
        enqueued?;
        let graph = graph.map_err(|error| failure("cuStreamEndCapture", &error))?;
        // SAFETY: the graph is alive; the instance holds what it needs of it.
        let instance = unsafe {
            let instance = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let destroyed = result::graph::destroy(graph);
            instance.and_then(|instance| destroyed.map(|()| instance))
        }
        .map_err(|error| failure("cuGraphInstantiate", &error))?;
        Ok(Graph { instance, queue: Arc::clone(self) })
    }

    /// Milliseconds of `repeats` runs of `enqueue`, one by one, by the device's own events.
    ///
    /// # Errors
    /// What the driver says.
    pub fn time_ms(
        &self,
        repeats: usize,
        mut enqueue: impl FnMut() -> Result<(), EngineError>,
    ) -> Result<Vec<f32>, EngineError> {
        self.device.enter()?;
        let checked = |call: &'static str| move |error: DriverError| failure(call, &error);
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let begin = result::event::create(flags).map_err(checked("cuEventCreate"))?;
        let end = result::event::create(flags).map_err(checked("cuEventCreate"))?;
        let mut times = Vec::with_capacity(repeats);
        for _ in 0..repeats {
            // SAFETY: events and stream are alive.
            unsafe { result::event::record(begin, self.stream) }.map_err(checked("cuEventRecord"))?;
            enqueue()?;
            // SAFETY: as above.
            times.push(unsafe {
                result::event::record(end, self.stream).map_err(checked("cuEventRecord"))?;
                result::event::synchronize(end).map_err(checked("cuEventSynchronize"))?;
                result::event::elapsed(begin, end).map_err(checked("cuEventElapsedTime"))?
            });
        }
        // SAFETY: the events are not used any more.
        unsafe {
            result::event::destroy(begin).map_err(checked("cuEventDestroy"))?;
            result::event::destroy(end).map_err(checked("cuEventDestroy"))?;
        }
        Ok(times)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // errors here were told by the step that made them
        let _ = self.device.enter();
        // SAFETY: the stream is alive and not used any more: buffers and graphs hold the queue.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::stream::destroy(self.stream);
        }
    }
}

/// Memory of the device, freed in the order of its stream.
pub struct Buffer {
    pointer: sys::CUdeviceptr,
    bytes: usize,
    queue: Arc<Queue>,
}

impl Buffer {
    /// As an argument of a kernel.
    pub fn argument(&self) -> Argument {
        Argument::Pointer(self.pointer)
    }

    /// Address in the device's memory.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.queue.device.enter();
        // SAFETY: the memory was allocated on this stream and is freed once; an error was told by the step that made it.
        unsafe {
            let _ = result::free_async(self.pointer, self.queue.stream);
        }
    }
}

/// A mark in a stream.
pub struct Event {
    event: sys::CUevent,
    device: Arc<Device>,
}

// SAFETY: an event may be used from any thread with the context current.
unsafe impl Send for Event {}

impl Event {
    /// Whether everything before the mark has run.
    ///
    /// # Errors
    /// What the driver says of that work.
    pub fn is_past(&self) -> Result<bool, EngineError> {
        self.device.enter()?;
        // SAFETY: the event is alive.
        ended("cuEventQuery", unsafe { sys::cuEventQuery(self.event) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.enter();
        // SAFETY: the event is destroyed once; the driver keeps what a stream still waits for.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

/// Whether what a query asks for has ended.
fn ended(call: &str, code: sys::CUresult) -> Result<bool, EngineError> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(true),
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        other => Err(failure(call, &DriverError(other))),
    }
}

/// Captured work.
pub struct Graph {
    instance: sys::CUgraphExec,
    queue: Arc<Queue>,
}

// SAFETY: an instance may be launched from any thread with the context current; a session is used by one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Runs the work again, with what its buffers hold now.
    ///
    /// # Errors
    /// What the driver says.
    pub fn replay(&self) -> Result<(), EngineError> {
        // SAFETY: instance and stream are alive.
        unsafe { result::graph::launch(self.instance, self.queue.stream) }
            .map_err(|error| failure("cuGraphLaunch", &error))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.queue.device.enter();
        // SAFETY: the instance is destroyed once, after its work.
        unsafe {
            let _ = result::stream::synchronize(self.queue.stream);
            let _ = result::graph::exec_destroy(self.instance);
        }
    }
}
