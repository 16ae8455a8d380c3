//! Every function of the runtime that is loaded by name takes arguments of the sizes that the vendor's headers say.

use hip_sys::hiprt;

/// A function of C.
trait Signature {
    /// Sizes of its arguments in bytes.
    fn argument_bytes(&self) -> Vec<usize>;
}

macro_rules! signature {
    ($($argument:ident)*) => {
        impl<R, $($argument),*> Signature for unsafe extern "C" fn($($argument),*) -> R {
            fn argument_bytes(&self) -> Vec<usize> {
                assert_eq!(size_of::<R>(), size_of::<std::ffi::c_int>(), "a status is an int");
                vec![$(size_of::<$argument>()),*]
            }
        }
    };
}

signature!();
signature!(A);
signature!(A B);
signature!(A B C);
signature!(A B C D E F G H I J K);

/// What the bindings say of a function.
fn of_the_headers(name: &str) -> Option<Vec<usize>> {
    type F1<A, R> = unsafe extern "C" fn(A) -> R;
    type F2<A, B, R> = unsafe extern "C" fn(A, B) -> R;
    type F3<A, B, C, R> = unsafe extern "C" fn(A, B, C) -> R;
    type F11<A, B, C, D, E, F, G, H, I, J, K, R> = unsafe extern "C" fn(A, B, C, D, E, F, G, H, I, J, K) -> R;
    Some(match name {
        "hipInit" => (hiprt::hipInit as F1<_, _>).argument_bytes(),
        "hipGetDeviceCount" => (hiprt::hipGetDeviceCount as F1<_, _>).argument_bytes(),
        "hipSetDevice" => (hiprt::hipSetDevice as F1<_, _>).argument_bytes(),
        "hipDeviceGetName" => (hiprt::hipDeviceGetName as F3<_, _, _, _>).argument_bytes(),
        "hipMalloc" => (hiprt::hipMalloc as F2<_, _, _>).argument_bytes(),
        "hipFree" => (hiprt::hipFree as F1<_, _>).argument_bytes(),
        "hipMemcpyHtoD" => (hiprt::hipMemcpyHtoD as F3<_, _, _, _>).argument_bytes(),
        "hipMemcpyDtoH" => (hiprt::hipMemcpyDtoH as F3<_, _, _, _>).argument_bytes(),
        "hipDeviceSynchronize" => {
            (hiprt::hipDeviceSynchronize as unsafe extern "C" fn() -> _).argument_bytes()
        }
        "hipModuleLoadData" => (hiprt::hipModuleLoadData as F2<_, _, _>).argument_bytes(),
        "hipModuleGetFunction" => (hiprt::hipModuleGetFunction as F3<_, _, _, _>).argument_bytes(),
        "hipModuleLaunchKernel" => {
            (hiprt::hipModuleLaunchKernel as F11<_, _, _, _, _, _, _, _, _, _, _, _>).argument_bytes()
        }
        _ => return None,
    })
}

#[test]
fn every_function_that_is_loaded_takes_what_the_headers_say() {
    for (name, loaded) in shardcheck_hip::signatures() {
        match of_the_headers(name) {
            Some(headers) => assert_eq!(loaded, headers, "{name}"),
            None => assert!(name.starts_with("hiprtc"), "{name} is held against nothing"),
        }
    }
}
