//! The functions of HIP and hipRTC that are used, by name.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::{HipError, NoDevice};

/// Names under which the runtime is installed, newest first.
const RUNTIME: &[&str] = &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];
/// Names of the compiler; old releases have it in the runtime.
const COMPILER: &[&str] = &[
    "libhiprtc.so.7",
    "libhiprtc.so.6",
    "libhiprtc.so.5",
    "libhiprtc.so",
    "libamdhip64.so.5",
    "libamdhip64.so",
];

type Handle = *mut c_void;

/// Loads functions into a struct of function pointers.
macro_rules! functions {
    ($(#[$meta:meta])* $table:ident of $library:literal { $($field:ident = $symbol:literal : fn($($argument:ty),*);)* }) => {
        $(#[$meta])*
        struct $table { $($field: unsafe extern "C" fn($($argument),*) -> c_int,)* }
        impl $table {
            /// Each function with the sizes of its arguments in bytes.
            const SIGNATURES: &'static [(&'static str, &'static [usize])] =
                &[$(($symbol, &[$(size_of::<$argument>()),*])),*];

            fn load(library: &Library) -> Result<Self, NoDevice> {
                Ok(Self { $($field: {
                    // SAFETY: the symbol has this signature in every release that the names above stand for.
                    let symbol = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> c_int>($symbol.as_bytes()) };
                    *symbol.map_err(|_| NoDevice::Function { library: $library, function: $symbol })?
                },)* })
            }
        }
    };
}

functions! {
    /// libamdhip64.
    Runtime of "libamdhip64" {
        init = "hipInit": fn(c_uint);
        count = "hipGetDeviceCount": fn(*mut c_int);
        set_device = "hipSetDevice": fn(c_int);
        name = "hipDeviceGetName": fn(*mut c_char, c_int, c_int);
        malloc = "hipMalloc": fn(*mut Handle, usize);
        free = "hipFree": fn(Handle);
        to_device = "hipMemcpyHtoD": fn(Handle, *const c_void, usize);
        to_host = "hipMemcpyDtoH": fn(*mut c_void, Handle, usize);
        synchronize = "hipDeviceSynchronize": fn();
        load_module = "hipModuleLoadData": fn(*mut Handle, *const c_void);
        get_function = "hipModuleGetFunction": fn(*mut Handle, Handle, *const c_char);
        launch = "hipModuleLaunchKernel": fn(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut Handle, *mut Handle);
    }
}

functions! {
    /// libhiprtc.
    Compiler of "libhiprtc" {
        create = "hiprtcCreateProgram": fn(*mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
        compile = "hiprtcCompileProgram": fn(Handle, c_int, *const *const c_char);
        log_size = "hiprtcGetProgramLogSize": fn(Handle, *mut usize);
        log = "hiprtcGetProgramLog": fn(Handle, *mut c_char);
        code_size = "hiprtcGetCodeSize": fn(Handle, *mut usize);
        code = "hiprtcGetCode": fn(Handle, *mut c_char);
        destroy = "hiprtcDestroyProgram": fn(*mut Handle);
    }
}

/// The functions that are used, each with the sizes of its arguments in bytes: what bindings of the vendor's headers are held against.
pub fn signatures() -> impl Iterator<Item = (&'static str, &'static [usize])> {
    Runtime::SIGNATURES.iter().chain(Compiler::SIGNATURES).copied()
}

/// Machine code of the current device.
#[derive(Debug, Clone)]
pub struct Code(Vec<u8>);

impl Code {
    /// Its bytes: an ELF image.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The runtime, its compiler, and the first device.
pub struct Hip {
    runtime: Runtime,
    compiler: Compiler,
    // functions point into them
    _libraries: [Library; 2],
}

fn open(library: &'static str, names: &[&str]) -> Result<Library, NoDevice> {
    let mut reason = String::new();
    for name in names {
        // SAFETY: the initialisers are those of a vendor's runtime.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok(library),
            Err(error) => reason = error.to_string(),
        }
    }
    Err(NoDevice::Library { library, reason })
}

fn checked(call: &'static str, code: c_int) -> Result<(), HipError> {
    if code == 0 { Ok(()) } else { Err(HipError { call, code, log: String::new() }) }
}

impl Hip {
    /// Opens the libraries and the first device.
    ///
    /// # Errors
    /// [`NoDevice`].
    pub fn open() -> Result<Self, NoDevice> {
        let runtime_library = open("libamdhip64.so", RUNTIME)?;
        let compiler_library = open("libhiprtc.so", COMPILER)?;
        let (runtime, compiler) = (Runtime::load(&runtime_library)?, Compiler::load(&compiler_library)?);
        let mut count = 0;
        // SAFETY: the out pointer lives through the calls.
        let code = unsafe {
            let code = (runtime.init)(0);
            if code == 0 { (runtime.count)(&raw mut count) } else { code }
        };
        // SAFETY: device 0 exists where there is one.
        if code != 0 || count == 0 || unsafe { (runtime.set_device)(0) } != 0 {
            return Err(NoDevice::None { code });
        }
        Ok(Self { runtime, compiler, _libraries: [runtime_library, compiler_library] })
    }

    /// Name of the device.
    pub fn name(&self) -> String {
        let mut name = [0u8; 256];
        // SAFETY: the buffer is as long as is said; its last byte stays zero.
        let code = unsafe { (self.runtime.name)(name.as_mut_ptr().cast(), 255, 0) };
        let text: Vec<u8> = name.into_iter().take_while(|byte| *byte != 0).collect();
        if code == 0 { String::from_utf8_lossy(&text).into_owned() } else { "HIP device 0".to_owned() }
    }

    /// Compiles text for the current device.
    ///
    /// # Errors
    /// [`HipError`] with the compiler's log.
    pub fn compile(&self, source: &str) -> Result<Code, HipError> {
        let text = CString::new(source).map_err(|error| HipError {
            call: "CString",
            code: -1,
            log: error.to_string(),
        })?;
        let (name, option) = (c"kernels.hip", c"-std=c++17");
        let mut program: Handle = std::ptr::null_mut();
        let options = [option.as_ptr()];
        // SAFETY: strings end in NUL and outlive the calls; buffers have the sizes that were asked for; the program is destroyed once.
        unsafe {
            let none = std::ptr::null();
            checked(
                "hiprtcCreateProgram",
                (self.compiler.create)(&raw mut program, text.as_ptr(), name.as_ptr(), 0, none, none),
            )?;
            let compiled = (self.compiler.compile)(program, 1, options.as_ptr());
            let (mut log_size, mut code_size) = (0usize, 0usize);
            (self.compiler.log_size)(program, &raw mut log_size);
            let mut log = vec![0u8; log_size.max(1)];
            (self.compiler.log)(program, log.as_mut_ptr().cast());
            let mut code = Vec::new();
            let got = if compiled == 0 && (self.compiler.code_size)(program, &raw mut code_size) == 0 {
                code = vec![0u8; code_size];
                (self.compiler.code)(program, code.as_mut_ptr().cast())
            } else {
                compiled
            };
            (self.compiler.destroy)(&raw mut program);
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
            if compiled != 0 || got != 0 {
                return Err(HipError { call: "hiprtcCompileProgram", code: compiled.max(got), log });
            }
            Ok(Code(code))
        }
    }

    /// Runs one kernel of `code` over buffers that are copied to the device before and back after, and waits for it.
    ///
    /// # Errors
    /// [`HipError`] of the first call that fails.
    pub fn run(
        &self,
        code: &Code,
        kernel: &str,
        (blocks, threads): (u32, u32),
        buffers: &mut [Vec<u8>],
    ) -> Result<(), HipError> {
        let name = CString::new(kernel).map_err(|error| HipError {
            call: "CString",
            code: -1,
            log: error.to_string(),
        })?;
        let runtime = &self.runtime;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the image is this device's and outlives the module's loading; every pointer is to memory of the size that is copied.
        unsafe {
            checked("hipModuleLoadData", (runtime.load_module)(&raw mut module, code.0.as_ptr().cast()))?;
            checked(
                "hipModuleGetFunction",
                (runtime.get_function)(&raw mut function, module, name.as_ptr()),
            )?;
            let mut addresses = Vec::with_capacity(buffers.len());
            for buffer in buffers.iter() {
                let mut address: Handle = std::ptr::null_mut();
                checked("hipMalloc", (runtime.malloc)(&raw mut address, buffer.len().max(1)))?;
                checked("hipMemcpyHtoD", (runtime.to_device)(address, buffer.as_ptr().cast(), buffer.len()))?;
                addresses.push(address);
            }
            let mut arguments: Vec<Handle> =
                addresses.iter_mut().map(|address| std::ptr::from_mut(address).cast()).collect();
            let stream = std::ptr::null_mut();
            checked(
                "hipModuleLaunchKernel",
                (runtime.launch)(
                    function,
                    blocks,
                    1,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    stream,
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut(),
                ),
            )?;
            checked("hipDeviceSynchronize", (runtime.synchronize)())?;
            for (buffer, address) in buffers.iter_mut().zip(addresses) {
                checked(
                    "hipMemcpyDtoH",
                    (runtime.to_host)(buffer.as_mut_ptr().cast(), address, buffer.len()),
                )?;
                checked("hipFree", (runtime.free)(address))?;
            }
        }
        Ok(())
    }
}
