//! libaquifer-malloc: an allocator whose memory is paged.
//!
//! A program links the library, or preloads it with `LD_PRELOAD`. All memory of `malloc` and
//! related functions then comes from one range of addresses, the arena. `AQUIFER_LOCAL` limits the
//! resident memory of the arena; the rest is on memory nodes. Stacks, globals and other mappings of
//! the program are not paged. Without that variable the library is mimalloc on ordinary memory.
//!
//! - [`functions`]: the functions of libc that the library replaces.
//! - [`arena`]: the arena, and mimalloc on it.
//! - [`paging`]: environment variables, and the run at the agent.

mod arena;
pub mod functions;
mod paging;

use aquifer_ipc::{RUN_VARIABLE, SHIM_SYMBOL};

/// Function that the dynamic linker calls before the program's own code. Other libraries may have
/// allocated memory before.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    arena::prepare();
    if arena::is_wanted() && !is_paged_by_shim() {
        paging::begin();
    }
}

/// Whether the program runs under `aquifer run`, whose shim pages all memory.
fn is_paged_by_shim() -> bool {
    // SAFETY: the name of the symbol is a C string.
    let shim = unsafe { libc::dlsym(libc::RTLD_DEFAULT, SHIM_SYMBOL.as_ptr()) };
    !shim.is_null() && std::env::var_os(RUN_VARIABLE).is_some()
}
