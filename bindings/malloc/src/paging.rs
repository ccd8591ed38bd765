//! A run at the agent for this process and its children.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_attach::{Paged, attach_program, fatal};
use aquifer_channel::socket::wait_readable;
use aquifer_channel::{connect, paths, receive_frame, send_frame};
use aquifer_ipc::{Frame, LOCAL_MAX_VARIABLE, LOCAL_VARIABLE, OpenRun, REPLICAS_VARIABLE, RunToken, size};

use crate::arena;

/// Advice in most error messages.
const ADVICE: &str = "start a cluster (aquifer up), or name the agent's socket with AQUIFER_AGENT, or \
    unset AQUIFER_LOCAL to use ordinary memory";

/// Time without an answer of the agent after which a message says that the program waits.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(1);

/// Opens a run and registers the arena with the agent.
///
/// On failure, ends the process with a message: without paging the limit would not hold.
pub fn begin() {
    let limit_bytes = limit();
    let limit_max_bytes = limit_max();
    let replicas = replicas();
    let path = agent();
    let Some((start, end)) = arena::range() else {
        fatal::exit(
            "the allocator cannot reserve a range of addresses; check the limit of the address space \
                (ulimit -v)",
            0,
        )
    };
    let open = OpenRun {
        limit_bytes,
        limit_max_bytes,
        replicas,
        backup: None,
        outlives_owner: true,
        is_strict: false,
        wait_for_room_ms: None,
        name: name(),
    };
    let (socket, token) = open_run(&path, open);
    attach_program(path.as_os_str().as_bytes(), token, Paged::Only(start, end));
    // The run lasts until its last process ends, with or without this connection.
    drop(socket);
}

fn limit() -> u64 {
    let given = std::env::var_os(LOCAL_VARIABLE).unwrap_or_default();
    let text = given.to_string_lossy();
    size::parse(&text).unwrap_or_else(|error| {
        fatal::exit_with(&format_args!("{LOCAL_VARIABLE}: {error}"));
    })
}

fn limit_max() -> Option<u64> {
    let given = std::env::var_os(LOCAL_MAX_VARIABLE)?;
    let parsed = size::parse_or_auto(&given.to_string_lossy());
    Some(parsed.unwrap_or_else(|error| fatal::exit_with(&format_args!("{LOCAL_MAX_VARIABLE}: {error}"))))
}

fn replicas() -> u32 {
    let Some(given) = std::env::var_os(REPLICAS_VARIABLE) else { return 1 };
    let text = given.to_string_lossy();
    match text.parse() {
        Ok(count @ 1..=3) => count,
        _ => fatal::exit_with(&format_args!("{REPLICAS_VARIABLE}: \"{text}\" is not 1, 2 or 3")),
    }
}

/// Absolute path of the agent's socket, since the process may change its working directory.
fn agent() -> PathBuf {
    let path = paths::agent_socket();
    std::path::absolute(&path).unwrap_or(path)
}

/// Name of the program, for `aquifer status` and logs.
fn name() -> String {
    let program = std::env::args_os().next().unwrap_or_default();
    Path::new(&program).file_name().unwrap_or(&program).to_string_lossy().into_owned()
}

fn open_run(path: &Path, open: OpenRun) -> (OwnedFd, RunToken) {
    let socket = connect(path).unwrap_or_else(|error| {
        fatal::exit_with(&format_args!("no agent answers at {} ({error}): {ADVICE}", path.display()))
    });
    let sent = send_frame(&socket, &Frame::OpenRun(open), &[]);
    // The keeper holds the socket of an agent that has ended, for the next agent.
    if sent.is_ok() && wait_readable(&[&socket], NOTICE_TIMEOUT).is_ok_and(|is_answered| !is_answered) {
        // Fails if standard error is closed; then there is no message.
        let _closed = writeln!(
            std::io::stderr(),
            "aquifer: waiting for the agent at {}, which does not answer: start it again if it has ended",
            path.display()
        );
    }
    let answer = sent.map_err(Into::into).and_then(|()| receive_frame(&socket));
    match answer {
        Ok((Frame::RunOpened(token), _)) => (socket, token),
        Ok((Frame::Refused(reason), _)) => fatal::exit_with(&reason),
        Ok(_) => {
            fatal::exit_with(&format_args!("unexpected answer of the agent at {}: {ADVICE}", path.display()))
        }
        Err(error) => {
            fatal::exit_with(&format_args!("connection to the agent at {} failed: {error}", path.display()))
        }
    }
}
