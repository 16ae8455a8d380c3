//! One CUDA device: probed without a panic, opened once, with the kernels compiled for it.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use shardcheck_engine::EngineError;

use crate::nvrtc::{self, CompileError};

/// Why there is no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoDevice {
    /// No driver.
    #[error("no device: the CUDA driver (libcuda.so.1) is not installed")]
    NoDriver,
    /// The driver does not start, or is too old for a call that is needed.
    #[error("no device: the CUDA driver does not start: {0}")]
    Driver(String),
    /// Fewer devices than the one that is asked for.
    #[error("no device: CUDA device {ordinal} is asked for, and there are {count}")]
    Ordinal {
        /// Number of the device.
        ordinal: usize,
        /// Devices that are there.
        count: usize,
    },
    /// One device for two ranks' worth of communicators.
    #[error("CUDA device {ordinal} is named twice: a communicator has one rank a device")]
    Repeated {
        /// Number of the device.
        ordinal: usize,
    },
    /// No device is named.
    #[error("no device: none is named")]
    Unnamed,
    /// The devices can't be joined.
    #[error("no device that can be used with others: {0}")]
    Collectives(String),
    /// The kernels can't be compiled.
    #[error("no device that can be used: {0}")]
    Compile(#[from] CompileError),
}

/// What was read of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Name that the driver gives.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Most dynamic shared memory of a block in bytes.
    pub shared_bytes: usize,
    /// Memory in bytes.
    pub memory_bytes: usize,
    /// Version of the driver's interface, such as 13000.
    pub driver_version: i32,
    /// Target that the kernels are compiled for.
    pub target: String,
}

/// The target of a compute capability: with the architecture's own instructions from Hopper on.
fn target_of((major, minor): (i32, i32)) -> String {
    format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
}

/// A device with its context and kernels.
pub struct Device {
    /// What was read of it.
    pub properties: Properties,
    ordinal: sys::CUdevice,
    context: sys::CUcontext,
    module: sys::CUmodule,
    functions: HashMap<&'static str, sys::CUfunction>,
}

// SAFETY: handles of the driver may be used from any thread that has made the context its current one.
unsafe impl Send for Device {}
// SAFETY: as above; the driver's calls are thread-safe and the table of functions is not changed after it is made.
unsafe impl Sync for Device {}

/// Kernels that a session launches, and whether only some cards have them.
const KERNELS: &[&str] = &[
    "row_metadata",
    "request_metadata",
    "position_slots",
    "sub_page_table",
    "write_slots",
    "write_tokens",
    "fill_words",
    "read_strided",
    "narrow",
    "select_own_heads",
    "gather_heads",
    "select_group_heads",
    "strip_heads",
    "project_heads",
    "attend_paged",
    "list_counts",
    "list_starts",
    "list_slots",
    "list_lens",
    "list_attend",
    "attend_dense",
    "attend_latent_bf16",
    "attend_latent_byte",
    "finish_segments",
    "finish_state",
    "pack_lse",
    "scrub_empty",
    "pack_partials",
    "exchange_words",
    "spread_gathered",
    "bundle_words",
    "spread_arrived",
    "sum_members",
    "import_tokens",
    "gather_words",
    "gather_bytes",
    "sum_partials",
    "correct_partials",
    "reduce_partials",
    "merge_states",
    "merge_segments",
    "read_chunk",
    "reorganise_chunk",
    "rows_of_chunk",
    "rows_of_suffix",
    "share_counts",
    "share_width",
    "share_rows",
    "place_rows",
    "restore_rows",
    "repeat_writers",
    "route_rows",
    "enter_exchange",
    "enter_rows",
    "gather_tokens",
    "activate_experts",
    "activate_shared",
    "sum_experts",
    "count_tokens",
    "sum_tensor_parallel",
    "scatter_rows",
    "expert_owners",
    "order_parcels",
    "send_parcels",
    "answer_parcels",
    "count_parcels",
    "combine_parcels",
    "join_slices",
    "measure_exp",
    "measure_mma",
    "measure_warpgroup",
    "measure_mma_byte",
    "measure_codes",
];

/// How many devices there are.
///
/// # Errors
/// [`NoDevice`] without a driver.
pub fn count() -> Result<usize, NoDevice> {
    // SAFETY: the probe opens the driver by name and closes it again.
    if !unsafe { sys::is_culib_present() } {
        return Err(NoDevice::NoDriver);
    }
    // a driver that lacks a symbol panics at its first use
    let counted =
        catch_unwind(AssertUnwindSafe(|| result::init().and_then(|()| result::device::get_count())));
    match counted {
        Ok(Ok(count)) => Ok(usize::try_from(count).unwrap_or(0)),
        Ok(Err(error)) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
        Ok(Err(error)) => Err(NoDevice::Driver(text_of(&error))),
        Err(_) => Err(NoDevice::Driver("it lacks a function".to_owned())),
    }
}

impl Device {
    /// Opens a device and compiles the kernels for it, with one defect where `fault` names one; `target` replaces the card's own.
    ///
    /// # Errors
    /// [`NoDevice`].
    pub fn open(ordinal: usize, target: Option<&str>, fault: Option<&str>) -> Result<Arc<Self>, NoDevice> {
        Self::open_with(ordinal, target, fault, &mut None)
    }

    /// Opens several devices, of which each is named once. Kernels are compiled once where the devices are of one kind.
    ///
    /// # Errors
    /// [`NoDevice`].
    pub fn open_all(
        ordinals: &[usize],
        target: Option<&str>,
        fault: Option<&str>,
    ) -> Result<Vec<Arc<Self>>, NoDevice> {
        if let Some(at) = (1..ordinals.len()).find(|at| ordinals[..*at].contains(&ordinals[*at])) {
            return Err(NoDevice::Repeated { ordinal: ordinals[at] });
        }
        if ordinals.is_empty() {
            return Err(NoDevice::Unnamed);
        }
        let mut compiled = None;
        ordinals.iter().map(|ordinal| Self::open_with(*ordinal, target, fault, &mut compiled)).collect()
    }

    /// `compiled`: the last target that was compiled for, and its image.
    fn open_with(
        ordinal: usize,
        target: Option<&str>,
        fault: Option<&str>,
        compiled: &mut Option<(String, nvrtc::Image)>,
    ) -> Result<Arc<Self>, NoDevice> {
        let count = count()?;
        if ordinal >= count {
            return Err(NoDevice::Ordinal { ordinal, count });
        }
        let driver = |error: DriverError| NoDevice::Driver(text_of(&error));
        let handle = result::device::get(ordinal as i32).map_err(driver)?;
        let mut properties = read_properties(handle).map_err(driver)?;
        if let Some(target) = target {
            properties.target = target.to_owned();
        }
        // SAFETY: the device exists; its primary context is released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(handle) }.map_err(driver)?;
        // SAFETY: the context was just retained.
        unsafe { result::ctx::set_current(context) }.map_err(driver)?;
        keep_freed_memory(handle).map_err(driver)?;
        let image = match compiled.take() {
            Some((target, image)) if target == properties.target => image,
            _ => nvrtc::compile(&shardcheck_kernels::source(fault), &properties.target, &[])?,
        };
        let (_, image) = compiled.insert((properties.target.clone(), image));
        // SAFETY: the image is machine code for this device and outlives the call.
        let module = unsafe { result::module::load_data(image.code.as_ptr().cast()) }.map_err(driver)?;
        let mut device = Self { properties, ordinal: handle, context, module, functions: HashMap::new() };
        for name in KERNELS {
            let symbol = CString::new(*name).map_err(|error| NoDevice::Driver(error.to_string()))?;
            if *name == "measure_warpgroup" && !device.has_warpgroups() {
                continue;
            }
            // SAFETY: the module is loaded and stays so as long as the function is kept.
            let function = unsafe { result::module::get_function(device.module, symbol) }.map_err(driver)?;
            device.allow_shared(name, function).map_err(driver)?;
            device.functions.insert(name, function);
        }
        Ok(Arc::new(device))
    }

    fn allow_shared(&self, name: &str, function: sys::CUfunction) -> Result<(), DriverError> {
        let wanted = if name.starts_with("attend_latent") {
            shardcheck_kernels::LATENT_SHARED_BYTES as usize
        } else if name.starts_with("attend_") {
            self.properties.shared_bytes
        } else {
            return Ok(());
        };
        if wanted > self.properties.shared_bytes {
            return Ok(());
        }
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module.
        unsafe { result::function::set_function_attribute(function, attribute, wanted as i32) }
    }

    /// Whether the latent kernels fit the device.
    pub fn has_latent_kernels(&self) -> bool {
        self.properties.shared_bytes >= shardcheck_kernels::LATENT_SHARED_BYTES as usize + 2048
    }

    /// Whether the latent kernels are those of Hopper's warpgroup instructions.
    pub fn has_warpgroups(&self) -> bool {
        self.properties.target == "sm_90a"
    }

    /// Makes the device's context current on this thread, which every step begins with.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enter(&self) -> Result<(), EngineError> {
        // SAFETY: the context is retained as long as this lives.
        unsafe { result::ctx::set_current(self.context) }.map_err(|error| failure("cuCtxSetCurrent", &error))
    }

    /// Its number.
    pub(crate) fn ordinal(&self) -> sys::CUdevice {
        self.ordinal
    }

    /// The kernel of that name.
    pub(crate) fn function(&self, name: &str) -> sys::CUfunction {
        // a name that is not in the table is a bug of this crate
        self.functions[name]
    }

    /// Memory that is free, in bytes, what earlier sessions left with the process included.
    ///
    /// # Errors
    /// What the driver says.
    pub fn free_bytes(&self) -> Result<usize, EngineError> {
        self.enter()?;
        let (free, _) = result::mem_get_info().map_err(|error| failure("cuMemGetInfo", &error))?;
        // a driver that does not tell is taken to hold nothing back
        Ok(free + kept_bytes(self.ordinal).unwrap_or(0))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: nothing of the module runs any more: sessions hold the device, and each waits for its work before it goes.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = result::module::unload(self.module);
            let _ = result::primary_ctx::release(self.ordinal);
        }
    }
}

fn read_properties(device: sys::CUdevice) -> Result<Properties, DriverError> {
    // SAFETY: the device exists.
    let attribute = |which: Attribute| unsafe { result::device::get_attribute(device, which) };
    let mut driver_version = 0;
    // SAFETY: the out pointer lives through the call.
    unsafe { sys::cuDriverGetVersion(&raw mut driver_version) }.result()?;
    let capability = (
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    Ok(Properties {
        name: result::device::get_name(device)?,
        capability,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
        // SAFETY: the device exists.
        memory_bytes: unsafe { result::device::total_mem(device) }?,
        driver_version,
        target: target_of(capability),
    })
}

/// Freed memory stays with the process: sessions come and go by the thousand.
fn keep_freed_memory(device: sys::CUdevice) -> Result<(), DriverError> {
    let mut threshold = u64::MAX;
    // SAFETY: the pool is the device's own, and the attribute takes a 64-bit number.
    unsafe {
        let pool = result::device::get_default_mem_pool(device)?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast::<c_void>())
    }
}

/// Memory that the process holds and does not use.
fn kept_bytes(device: sys::CUdevice) -> Result<usize, DriverError> {
    use sys::CUmemPool_attribute::{CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_CURRENT};
    let (mut reserved, mut used) = (0u64, 0u64);
    // SAFETY: the pool is the device's own, and both attributes are 64-bit numbers.
    unsafe {
        let pool = result::device::get_default_mem_pool(device)?;
        for (attribute, value) in [
            (CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &raw mut reserved),
            (CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &raw mut used),
        ] {
            sys::cuMemPoolGetAttribute(pool, attribute, value.cast()).result()?;
        }
    }
    Ok(reserved.saturating_sub(used) as usize)
}

/// What the driver says of an error.
pub(crate) fn text_of(error: &DriverError) -> String {
    let name = error.error_name().ok().map(|name| name.to_string_lossy().into_owned());
    let text = error.error_string().ok().map(|text| text.to_string_lossy().into_owned());
    format!("{} ({})", name.unwrap_or_else(|| format!("{:?}", error.0)), text.unwrap_or_default())
}

/// The engine error of a failed call. Errors after which a context answers nothing any more are a lost device.
pub(crate) fn failure(call: &str, error: &DriverError) -> EngineError {
    use sys::CUresult as Code;
    let text = format!("{call}: {}", text_of(error));
    match error.0 {
        Code::CUDA_ERROR_ILLEGAL_ADDRESS
        | Code::CUDA_ERROR_LAUNCH_TIMEOUT
        | Code::CUDA_ERROR_ASSERT
        | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
        | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | Code::CUDA_ERROR_MISALIGNED_ADDRESS
        | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | Code::CUDA_ERROR_INVALID_PC
        | Code::CUDA_ERROR_LAUNCH_FAILED
        | Code::CUDA_ERROR_ECC_UNCORRECTABLE
        | Code::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | Code::CUDA_ERROR_SYSTEM_NOT_READY
        | Code::CUDA_ERROR_UNKNOWN => EngineError::DeviceLost { text },
        _ => EngineError::Crash { text },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_have_the_instructions_of_their_architecture_from_hopper_on() {
        assert_eq!(target_of((8, 0)), "sm_80");
        assert_eq!(target_of((9, 0)), "sm_90a");
        assert_eq!(target_of((10, 0)), "sm_100a");
    }
}
