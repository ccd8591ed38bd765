//! The other process: lends memory and sends messages back.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::shm::{Options, ShmTarget};
use aquifer_fabric::tcp::{self, TcpTarget};
use aquifer_fabric::{Access, Memory, Scope, Target};

use super::wire;
use crate::bench::BenchError;
use crate::bench::support::other;

/// Many times what any processor caches.
pub const REGION_BYTES: usize = 256 << 20;
/// How long it sleeps when nobody writes: so seldom that one-sided work shows to need nobody here.
const IDLE: Duration = Duration::from_millis(20);
/// After so many looks in vain it sleeps between them.
const LOOKS: u32 = 200_000;

/// Serves at `path` until its input ends, as it does when whoever started it is gone.
///
/// # Errors
/// If it cannot listen there.
pub fn serve_at(path: &Path) -> Result<(), BenchError> {
    let target = lend(path)?;
    let failed = |error: String| BenchError::Fabric { reason: error };
    let anywhere = "127.0.0.1:0".parse().expect("a constant");
    let elsewhere = TcpTarget::listen(anywhere, &wire::KEY, tcp::Options::default())
        .map_err(|error| failed(error.to_string()))?;
    elsewhere
        .register(filled(REGION_BYTES)?, Access::ALL, Scope::Anyone)
        .map_err(|error| failed(error.to_string()))?;
    let echoes = wire::serve_echo().map_err(|error| failed(error.to_string()))?;
    other::ready(path, &format!("{} {echoes}", elsewhere.address()))?;
    let mut message = Vec::new();
    let mut looks = 0;
    loop {
        if echo(&target, &mut message) {
            looks = 0;
        } else if looks < LOOKS {
            looks += 1;
            std::hint::spin_loop();
        } else {
            std::thread::sleep(IDLE);
        }
    }
}

/// Sends the oldest message back to where it came from; false if there is none.
pub fn echo(target: &ShmTarget, message: &mut Vec<u8>) -> bool {
    message.clear();
    let Some(from) = target.receive(message) else {
        return false;
    };
    target.send(from.host, message);
    true
}

/// Listens, with memory whose pages are all there.
///
/// # Errors
/// If it cannot listen there.
pub fn lend(path: &Path) -> Result<ShmTarget, BenchError> {
    let failed = |error: String| BenchError::Fabric { reason: error };
    let target = ShmTarget::listen(path, Options::default()).map_err(|error| failed(error.to_string()))?;
    let memory = filled(REGION_BYTES)?;
    target.register(memory, Access::ALL, Scope::Anyone).map_err(|error| failed(error.to_string()))?;
    Ok(target)
}

/// Memory with a byte of its own in each page.
///
/// # Errors
/// If there is none.
pub fn filled(bytes: usize) -> Result<Arc<Memory>, BenchError> {
    let memory =
        Memory::create("aquifer-bench", bytes).map_err(BenchError::io("make", Path::new("a memfd")))?;
    for offset in (0..bytes).step_by(4096) {
        memory.write(offset, &[1; 64]);
    }
    Ok(Arc::new(memory))
}
