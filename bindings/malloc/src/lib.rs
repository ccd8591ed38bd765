//! libaquifer-malloc: an allocator whose memory is paged. A program that links it, or is started
//! with it in `LD_PRELOAD`, gets all that it asks
//! `malloc` and its relatives for from one range of addresses, of which `AQUIFER_LOCAL` says how
//! much may be resident; the rest is on memory nodes. Stacks, globals and mappings of its own stay
//! as they are. Without that variable this is mimalloc on ordinary memory.
//!
//! - [`functions`]: libc's names.
//! - [`arena`]: the range, and mimalloc on it.
//! - [`paging`]: what the environment says, and the agent's part.

mod arena;
pub mod functions;
mod paging;

use aquifer_ipc::{RUN_VARIABLE, SHIM_SYMBOL};

/// Runs when the dynamic linker has loaded the library, before the program's own code. Others may
/// have allocated by then.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    arena::prepare();
    if arena::is_wanted() && !is_paged_anyway() {
        paging::begin();
    }
}

/// Whether this is under `aquifer run`, which pages all of a program.
fn is_paged_anyway() -> bool {
    // SAFETY: looks a name up.
    let shim = unsafe { libc::dlsym(libc::RTLD_DEFAULT, SHIM_SYMBOL.as_ptr()) };
    !shim.is_null() && std::env::var_os(RUN_VARIABLE).is_some()
}
