//! The serving process: lends memory and echoes messages.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aquifer_bench::BenchError;
use aquifer_bench::support::serving;
use aquifer_fabric::shm::{ShmOptions, ShmTarget};
use aquifer_fabric::tcp::{self, TcpTarget};
use aquifer_fabric::{Access, Memory, Scope, Target};

use super::wire;

/// Bytes of the lent memory: many times the size of processor caches.
pub const REGION_BYTES: usize = 256 << 20;
/// Pause between two polls for messages when idle. Long, so that the processor time of this process
/// shows that one-sided operations need none.
const IDLE_PAUSE: Duration = Duration::from_millis(20);
/// Number of polls without a message after which the process is idle.
const BUSY_POLLS_MAX: u32 = 200_000;

/// Serves at `path` over shared memory, and over TCP, until standard input ends.
///
/// Standard input ends when the process that measures ends.
///
/// # Errors
/// If the process cannot listen at `path`.
pub fn serve_at(path: &Path) -> Result<(), BenchError> {
    let memory = filled(REGION_BYTES)?;
    let target = lend(path, Arc::clone(&memory))?;
    let failed = |error: String| BenchError::Fabric { reason: error };
    let any_port = "127.0.0.1:0".parse().expect("a constant");
    let tcp_target = TcpTarget::listen(
        any_port,
        &wire::KEY,
        tcp::TcpOptions { encrypt: false, ..tcp::TcpOptions::default() },
    )
    .map_err(|error| failed(error.to_string()))?;
    tcp_target.register(memory, Access::ALL, Scope::Anyone).map_err(|error| failed(error.to_string()))?;
    let echoes = wire::serve_echo().map_err(|error| failed(error.to_string()))?;
    serving::ready(path, &format!("{} {echoes}", tcp_target.address()))?;
    let mut message = Vec::new();
    let mut empty_polls = 0;
    loop {
        if echo(&target, &mut message) {
            empty_polls = 0;
        } else if empty_polls < BUSY_POLLS_MAX {
            empty_polls += 1;
            std::hint::spin_loop();
        } else {
            target.wait(IDLE_PAUSE);
        }
    }
}

/// Sends the oldest message back to its sender; returns false if there is none.
pub fn echo(target: &ShmTarget, message: &mut Vec<u8>) -> bool {
    message.clear();
    let Some(from) = target.receive(message) else {
        return false;
    };
    target.reply(from.endpoint, message);
    true
}

/// Lends memory over shared memory at `path`.
///
/// # Errors
/// If the target cannot listen.
pub fn lend(path: &Path, memory: Arc<Memory>) -> Result<ShmTarget, BenchError> {
    let failed = |error: String| BenchError::Fabric { reason: error };
    let target = ShmTarget::listen(path, ShmOptions::default()).map_err(|error| failed(error.to_string()))?;
    target.register(memory, Access::ALL, Scope::Anyone).map_err(|error| failed(error.to_string()))?;
    Ok(target)
}

/// Allocates shared memory with all pages resident.
///
/// # Errors
/// If there is not enough memory.
pub fn filled(bytes: usize) -> Result<Arc<Memory>, BenchError> {
    let memory =
        Memory::create("aquifer-bench", bytes).map_err(BenchError::io("create", Path::new("a memfd")))?;
    for offset in (0..bytes).step_by(4096) {
        memory.write(offset, &[1; 64]);
    }
    Ok(Arc::new(memory))
}
