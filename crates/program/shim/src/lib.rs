//! The library that `aquifer run` loads into an unmodified program by `LD_PRELOAD`.
//!
//! The library attaches the program to the agent, by `attach`, before the program's own code runs.
//! Nothing is attached if the environment does not name a run.

#![allow(non_upper_case_globals, reason = "the dynamic linker finds the symbol by its name")]

use core::ffi::CStr;

use aquifer_attach::{Paged, attach_program, fatal};
use aquifer_ipc::RunToken;

/// Makes the dynamic linker call [`start`] before the program's own code.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Shows other libraries of Aquifer that the shim is loaded: [`aquifer_ipc::SHIM_SYMBOL`].
#[unsafe(no_mangle)]
pub static aquifer_shim_is_loaded: u8 = 1;

extern "C" fn start() {
    // SAFETY: the process has one thread, so no other thread changes the environment.
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
