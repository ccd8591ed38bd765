//! The library that `aquifer run` loads into an unmodified program (LD_PRELOAD): it attaches the program before its own code runs. How, is in
//! `attach`; it does nothing at all in a program that no run owns.

#![allow(non_upper_case_globals, reason = "the name is one for the dynamic linker")]

use core::ffi::CStr;

use aquifer_attach::{Paged, attach_program, fatal};
use aquifer_ipc::RunToken;

/// Runs when the dynamic linker has loaded the library, before the program's own code.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Tells other libraries of ours that this one is there; see [`aquifer_ipc::SHIM_SYMBOL`].
#[unsafe(no_mangle)]
pub static aquifer_shim_is_loaded: u8 = 1;

extern "C" fn start() {
    // SAFETY: no other thread runs yet, so the environment does not change under us.
    let variable = |name: &CStr| unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_bytes())
    };
    let (Some(path), Some(run)) = (variable(c"AQUIFER_SOCKET"), variable(c"AQUIFER_RUN")) else {
        return;
    };
    match RunToken::from_hex(run) {
        Some(token) => attach_program(path, token, Paged::All),
        None => fatal::exit("AQUIFER_RUN is not a run's token: start programs with `aquifer run`", 0),
    }
}
