//! The run-time compiler: where it is found, and kernels made of text.
//!
//! cudarc opens libraries by bare name. Wheels of Python's package index lie off the loader's path, so the library is opened by its
//! full path first: the bare name then means the one that is open already. Its builtins have to be open too.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nvrtc::{result, sys};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// Environment variable with a folder that holds `libnvrtc.so.*`; looked at before all others.
pub const FOLDER_VARIABLE: &str = "SHARDCHECK_CUDA_LIB_DIR";

/// Why there is no compiled kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// No run-time compiler.
    #[error(
        "NVRTC (libnvrtc.so.13 or .12) is not installed: put it on the loader's path, set CUDA_HOME, or name its folder in \
         {FOLDER_VARIABLE}"
    )]
    Missing,
    /// The compiler refused.
    #[error("NVRTC does not compile the kernels for {target}: {log}")]
    Refused {
        /// Target, such as `sm_90a`.
        target: String,
        /// What it said.
        log: String,
    },
}

/// A compiled image and what the compiler said of it.
#[derive(Debug, Clone)]
pub struct Image {
    /// Machine code of one target.
    pub code: Vec<u8>,
    /// Warnings, and resources where they were asked for.
    pub log: String,
}

/// Whether the compiler can be loaded; opens it.
pub fn is_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    *PRESENT.get_or_init(|| {
        folders().iter().any(|folder| open_in(folder));
        // SAFETY: the probe opens libraries by name and closes them; their initialisers are those of a compiler.
        unsafe { sys::is_culib_present() }
    })
}

/// Compiles text for a target such as `sm_90a`; `options` are handed on.
///
/// # Errors
/// [`CompileError`].
pub fn compile(source: &str, target: &str, options: &[&str]) -> Result<Image, CompileError> {
    if !is_present() {
        return Err(CompileError::Missing);
    }
    let refused = |log: String| CompileError::Refused { target: target.to_owned(), log };
    let text = CString::new(source).map_err(|error| refused(error.to_string()))?;
    let name = CString::new("kernels.cu").map_err(|error| refused(error.to_string()))?;
    let mut program: sys::nvrtcProgram = std::ptr::null_mut();
    // SAFETY: the out pointer lives through the call, the strings end in NUL, and there are no headers.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &raw mut program,
            text.as_ptr(),
            name.as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )
    };
    created.result().map_err(|error| refused(format!("{error:?}")))?;
    let program = Program(program);
    let arguments: Vec<CString> = [&format!("--gpu-architecture={target}"), "--std=c++17"]
        .into_iter()
        .chain(options.iter().copied())
        .map(CString::new)
        .collect::<Result<_, _>>()
        .map_err(|error| refused(error.to_string()))?;
    let pointers: Vec<_> = arguments.iter().map(|argument| argument.as_ptr()).collect();
    // SAFETY: the program is alive; the pointers are to strings that outlive the call.
    let compiled =
        unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) }.result();
    let log = program.log();
    compiled.map_err(|error| refused(if log.is_empty() { format!("{error:?}") } else { log.clone() }))?;
    let code = program.code().map_err(|error| refused(format!("{error:?}")))?;
    Ok(Image { code, log })
}

/// Version of the compiler, such as `(13, 0)`.
pub fn version() -> Option<(i32, i32)> {
    if !is_present() {
        return None;
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both out pointers live through the call.
    unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result().ok()?;
    Some((major, minor))
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        // SAFETY: the program is alive.
        let raw = unsafe { result::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = raw.into_iter().map(|c| c as u8).take_while(|c| *c != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn code(&self) -> Result<Vec<u8>, result::NvrtcError> {
        let mut size = 0usize;
        // SAFETY: the program is alive and compiled; the buffer has the size that it asks for.
        unsafe {
            sys::nvrtcGetCUBINSize(self.0, &raw mut size).result()?;
            let mut code = vec![0u8; size];
            sys::nvrtcGetCUBIN(self.0, code.as_mut_ptr().cast()).result()?;
            Ok(code)
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was made by this process and is destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

/// Folders in which the library may lie off the loader's path.
fn folders() -> Vec<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut folders: Vec<PathBuf> = from(FOLDER_VARIABLE).into_iter().collect();
    for home in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(from) {
        folders.extend([home.join("lib64"), home.join("lib")]);
    }
    // wheels of the Python environment that is active, or whose interpreter adapters are run with
    let interpreter =
        from("SHARDCHECK_PYTHON").and_then(|python| Some(python.parent()?.parent()?.to_owned()));
    for environment in from("VIRTUAL_ENV").into_iter().chain(interpreter) {
        let Ok(versions) = std::fs::read_dir(environment.join("lib")) else { continue };
        for version in versions.flatten() {
            let wheels = version.path().join("site-packages").join("nvidia");
            folders.extend([wheels.join("cu13").join("lib"), wheels.join("cuda_nvrtc").join("lib")]);
        }
    }
    folders.push(PathBuf::from("/usr/local/cuda/lib64"));
    folders
}

/// Opens the compiler in a folder, for good.
fn open_in(folder: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else { return false };
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    let main = names.iter().rev().find(|name| *name == "libnvrtc.so.13" || *name == "libnvrtc.so.12");
    let Some(main) = main else { return false };
    let builtins = names.iter().filter(|name| name.starts_with("libnvrtc-builtins.so."));
    for name in builtins.chain([main]) {
        // SAFETY: the initialisers are those of a compiler; it is never closed, so nothing of it dangles.
        match unsafe { Library::open(Some(folder.join(name)), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => std::mem::forget(library),
            Err(_) => return false,
        }
    }
    true
}
