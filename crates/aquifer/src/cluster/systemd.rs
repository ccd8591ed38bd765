//! What systemd hands to a service, and wants to hear from it: sockets that listen already, and word that it serves.
//!
//! The same as libsystemd's `sd_listen_fds_with_names` and `sd_notify`, which are a few lines each.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::net::SocketType;
use rustix::net::sockopt::{socket_acceptconn, socket_type};

/// The first descriptor that is handed over.
const FIRST: RawFd = 3;
/// No part listens at more.
const SOCKETS_MAX: usize = 16;

/// The socket that listens for a part, if systemd has one for us: the one of the part's name, else the only one there is.
/// To be called once.
///
/// # Errors
/// If what is handed over makes no sense, or does not listen as this part needs it.
pub fn listener(name: &str, kind: SocketType) -> io::Result<Option<OwnedFd>> {
    let variable = |name: &str| std::env::var(name).ok();
    let names = parse(
        variable("LISTEN_PID").as_deref(),
        variable("LISTEN_FDS").as_deref(),
        variable("LISTEN_FDNAMES").as_deref(),
        std::process::id(),
    )
    .map_err(io::Error::other)?;
    let Some(at) = choose(&names, name) else {
        if names.is_empty() {
            return Ok(None);
        }
        return Err(io::Error::other(format!(
            "systemd has sockets named {} for us, and none named {name}: set FileDescriptorName={name}",
            names.join(", ")
        )));
    };
    let socket = take(FIRST + RawFd::try_from(at).expect("there are few"))?;
    let is_fit = socket_type(&socket)? == kind && socket_acceptconn(&socket)?;
    if is_fit {
        Ok(Some(socket))
    } else {
        Err(io::Error::other(format!("the socket for {name} {}", wanted(kind))))
    }
}

fn wanted(kind: SocketType) -> &'static str {
    if kind == SocketType::SEQPACKET {
        "must be one that listens and keeps message boundaries: ListenSequentialPacket=PATH"
    } else {
        "must be one that listens for streams: ListenStream=ADDRESS:PORT"
    }
}

fn take(descriptor: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl with this command takes numbers alone, and says whether the descriptor is open.
    if unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, was opened for us before we began, and is taken once: nobody else here owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// The names of the sockets that are handed to process `own`.
fn parse(
    pid: Option<&str>,
    count: Option<&str>,
    names: Option<&str>,
    own: u32,
) -> Result<Vec<String>, String> {
    let (Some(pid), Some(count)) = (pid, count) else { return Ok(Vec::new()) };
    // What was meant for the process that started us.
    if pid.parse() != Ok(own) {
        return Ok(Vec::new());
    }
    let count: usize = count.parse().ok().filter(|count| *count <= SOCKETS_MAX).ok_or_else(|| {
        format!("LISTEN_FDS is \"{count}\", and {SOCKETS_MAX} are the most that are of use")
    })?;
    let Some(names) = names else { return Ok(vec!["unknown".to_owned(); count]) };
    let names: Vec<String> = names.split(':').map(str::to_owned).collect();
    if names.len() != count {
        return Err(format!("LISTEN_FDNAMES has {} names for {count} sockets", names.len()));
    }
    Ok(names)
}

fn choose(names: &[String], wanted: &str) -> Option<usize> {
    let named = names.iter().position(|name| name == wanted);
    // systemd itself names a socket after its unit.
    named.or_else(|| names.iter().position(|name| *name == format!("aquifer-{wanted}.socket"))).or({
        match names {
            [only] if only == "unknown" => Some(0),
            _ => None,
        }
    })
}

/// Tell systemd, if it started us, that we serve. A service of `Type=notify` counts as started then.
///
/// # Errors
/// The system's.
pub fn tell_ready() -> io::Result<()> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let path = path.into_encoded_bytes();
    let address = match path.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(&path))?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.send_to_addr(b"READY=1", &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_meant_for_us_is_taken() {
        let parse = |pid, count, names| parse(pid, count, names, 7);
        assert_eq!(parse(None, Some("1"), None).unwrap().len(), 0);
        assert_eq!(parse(Some("8"), Some("1"), None).unwrap().len(), 0);
        assert_eq!(parse(Some("7"), None, None).unwrap().len(), 0);
        assert_eq!(parse(Some("7"), Some("2"), Some("a:b")).unwrap(), ["a", "b"]);
        assert_eq!(parse(Some("7"), Some("1"), None).unwrap(), ["unknown"]);
        for (count, names) in [("-1", None), ("x", None), ("17", None), ("1", Some("a:b")), ("2", Some("a"))]
        {
            assert!(parse(Some("7"), Some(count), names).is_err(), "{count} {names:?}");
        }
    }

    #[test]
    fn sockets_are_chosen_by_name() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(choose(&names(&["x", "agent"]), "agent"), Some(1));
        assert_eq!(choose(&names(&["x", "aquifer-agent.socket"]), "agent"), Some(1));
        assert_eq!(choose(&names(&["unknown"]), "agent"), Some(0));
        assert_eq!(choose(&names(&["other"]), "agent"), None);
        assert_eq!(choose(&names(&["unknown", "unknown"]), "agent"), None);
    }
}
