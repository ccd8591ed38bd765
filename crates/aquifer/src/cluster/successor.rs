//! The agent that takes over from this one.
//!
//! systemd restarts an agent that ends with an error. One that `aquifer up` has started starts its
//! successor itself.

use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use aquifer_channel::socket::wait_readable;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Longest time for which a successor waits: the kernel frees the memory of the one before.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// Starts another process with the arguments of this one. It serves after this one has ended.
///
/// # Errors
/// If it cannot be started.
pub fn start() -> io::Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).args(["--after", &std::process::id().to_string()]);
    // The log is standard error.
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    tracing::info!(pid = child.id(), "started the next agent");
    Ok(())
}

/// Waits until a process has ended.
///
/// # Errors
/// If it does not end in time.
pub fn await_end(process: i32) -> io::Result<()> {
    let Some(Ok(pidfd)) = Pid::from_raw(process).map(|pid| pidfd_open(pid, PidfdFlags::empty())) else {
        // There is no such process.
        return Ok(());
    };
    if wait_readable(&[&pidfd], END_TIMEOUT)? {
        return Ok(());
    }
    Err(io::Error::other(format!("process {process} has not ended within {} s", END_TIMEOUT.as_secs())))
}
