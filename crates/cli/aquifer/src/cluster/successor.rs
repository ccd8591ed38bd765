//! The agent that takes over from this one when the lease of this host has ended.
//!
//! systemd restarts an agent that ends with an error. One that `aquifer up` has started starts its
//! successor itself.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use aquifer_channel::exiting::is_exiting;
use aquifer_channel::socket::wait_readable;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Interval between log lines of a successor that waits for the end of the previous agent, which
/// frees its memory.
const WAIT_LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Time for which a successor waits for the end of a killed agent. It then replaces the lock file.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Ends this process as if it were killed.
pub fn end() {
    tracing::error!(
        "ending, because this host's lease has ended: start the agent again, and it resumes the programs of \
         this host unless other hosts have recovered their memory"
    );
    std::process::exit(1);
}

/// Starts the next agent, and ends this process as if it were killed.
pub fn end_with_successor() {
    match start() {
        Ok(pid) => tracing::warn!(pid, "the next agent takes over, because this host's lease has ended"),
        Err(error) => tracing::error!(%error, "the next agent cannot be started: run `aquifer up`"),
    }
    std::process::exit(1);
}

/// Starts another process with the arguments of this one. It serves after this one has ended.
fn start() -> io::Result<u32> {
    let path = std::env::current_exe()?;
    // The file may have been replaced or removed after this process had started.
    let path = if path.exists() { &path } else { Path::new("/proc/self/exe") };
    let mut command = Command::new(path);
    command.args(std::env::args_os().skip(1)).args(["--after", &std::process::id().to_string()]);
    // Standard error is inherited: it is the log.
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    Ok(child.id())
}

/// Waits until a process has ended. The wait may be long: until then no other agent can serve, and
/// the keeper ends no program.
///
/// # Errors
/// If a system call fails.
pub fn await_end(process: i32) -> io::Result<()> {
    let Some(Ok(pidfd)) = Pid::from_raw(process).map(|pid| pidfd_open(pid, PidfdFlags::empty())) else {
        // There is no such process.
        return Ok(());
    };
    if wait_readable(&[&pidfd], EXIT_TIMEOUT)? || is_exiting(process.unsigned_abs()) {
        return Ok(());
    }
    while !wait_readable(&[&pidfd], WAIT_LOG_INTERVAL)? {
        tracing::warn!(pid = process, "waiting for the end of the previous agent");
    }
    Ok(())
}
