//! `aquifer check`: checks whether this machine, this user and a program can use the pool, and
//! names the memory of the program that is not paged.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use aquifer_ipc::size::ByteSize;

use crate::Outcome;
use crate::cli::CheckArguments;
use crate::run::{check_program, has_executable_heap};
use crate::say::{say, say_line};

/// The list of unsupported features. The README has the same text.
const UNSUPPORTED: &str = include_str!("check/unsupported.txt");
/// The oldest supported kernel.
const KERNEL_MIN: (u32, u32) = (6, 8);
/// Exit code if something is missing.
const EXIT_MISSING: u8 = 1;

/// The outcome of one check.
#[derive(PartialEq, Eq, Debug)]
enum Verdict {
    Ok(String),
    /// Programs can run, with a restriction.
    Note(String),
    Missing(String),
}

use Verdict::{Missing, Note, Ok as Fine};

/// Checks the kernel, the user, the cluster, and a program if one is given.
///
/// # Errors
/// If the state folder cannot be used. Missing requirements are printed.
pub fn check(state: Option<&Path>, arguments: &CheckArguments) -> Outcome {
    let socket = arguments.agent.socket(state)?;
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut checks = vec![("kernel", kernel(&release)), ("user", user()), ("cluster", cluster(&socket))];
    if let Some(program) = arguments.command.first() {
        checks.push(("program", program_verdict(program)));
    }
    let mut is_fine = true;
    for (name, verdict) in &checks {
        let (word, text) = match verdict {
            Fine(text) => ("ok", text),
            Note(text) => ("note", text),
            Missing(text) => ("no", text),
        };
        is_fine &= !matches!(verdict, Missing(_));
        say_line!("{name:<8} {word:<5} {text}");
    }
    say!("\n{UNSUPPORTED}");
    Ok(if is_fine { ExitCode::SUCCESS } else { ExitCode::from(EXIT_MISSING) })
}

fn kernel(release: &str) -> Verdict {
    let mut numbers = release.split(['.', '-']).map_while(|word| word.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let (major, minor) = KERNEL_MIN;
    if version < KERNEL_MIN {
        Missing(format!("Linux {release}: programs are paged from Linux {major}.{minor} on"))
    } else {
        Fine(format!("Linux {release}"))
    }
}

fn user() -> Verdict {
    let uid = rustix::process::geteuid().as_raw();
    match aquifer_agent::can_serve_programs() {
        Ok(()) => Fine(format!("user {uid} can have an agent: the kernel lends it userfaultfd")),
        Err(error) => Note(why_no_agent(&error)),
    }
}

/// The message about an agent of this user that could serve no programs.
pub fn why_no_agent(error: &std::io::Error) -> String {
    let uid = rustix::process::geteuid().as_raw();
    format!(
        "an agent of user {uid} can serve no programs, because userfaultfd with fork events needs \
         CAP_SYS_PTRACE ({error}): use an agent of root (as root: aquifer up --shared-socket \
         /run/aquifer.sock), which programs find by themselves, or by --agent SOCKET"
    )
}

fn cluster(socket: &Path) -> Verdict {
    match aquifer_host::client::status(socket) {
        Ok(Some(status)) if status.nodes.is_empty() => {
            Missing("the cluster has no memory node: start one (aquifer up)".into())
        }
        Ok(Some(status)) => {
            let free = status.nodes.iter().map(|node| node.free_bytes).sum();
            let lent = status.nodes.iter().map(|node| node.memory_bytes).sum();
            let count = status.nodes.len();
            let room = format!("memory nodes: {count}, {} of {} free", ByteSize(free), ByteSize(lent));
            let failed = status.nodes.iter().find_map(|node| Some((node.id, node.failure.as_ref()?)));
            match failed {
                None if lent == 0 => Missing(format!("{room}: none has answered, or they lend no memory")),
                None if free == 0 => Note(format!("{room}: programs over their limits wait for room")),
                None => Fine(room),
                Some((id, failure)) => {
                    let text = format!("{room}; memory node {id}: {failure}");
                    if lent == 0 { Missing(text) } else { Note(text) }
                }
            }
        }
        Ok(None) => {
            Missing(format!("no agent answers at {}: start a cluster (aquifer up)", socket.display()))
        }
        Err(error) => Missing(format!("the agent at {}: {error}", socket.display())),
    }
}

fn program_verdict(name: &OsString) -> Verdict {
    match check_program(name) {
        Ok(path) if has_executable_heap(&path) => Missing(format!(
            "{} has its heap in memory that may be executed, which is not paged: its limit must be larger \
             than its heap, or kernel swap pages it (aquifer run --swap, as root)",
            path.display()
        )),
        Ok(path) => Fine(format!("{} can be paged", path.display())),
        Err(error) => Missing(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_kernels_are_refused() {
        assert!(matches!(kernel("6.8.0-generic"), Fine(_)));
        assert!(matches!(kernel("7.0"), Fine(_)));
        assert!(matches!(kernel("6.10-rc1"), Fine(_)));
        for old in ["6.7.12", "5.15.0", "unknown"] {
            assert!(matches!(kernel(old), Missing(_)), "{old}");
        }
    }
}
