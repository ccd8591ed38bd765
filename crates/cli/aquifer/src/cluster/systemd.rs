//! Socket activation and readiness notification of systemd.
//!
//! Does the work of libsystemd's `sd_listen_fds_with_names` and `sd_notify`, without the library.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::net::SocketType;
use rustix::net::sockopt::{socket_acceptconn, socket_type};

/// The first descriptor that systemd passes.
const FIRST_DESCRIPTOR: RawFd = 3;
/// Most sockets that are accepted from systemd.
const SOCKETS_MAX: usize = 16;

/// The listening socket that systemd passes to a daemon, if any.
///
/// Chooses the socket with the daemon's name, or the only socket if systemd gives no names. Must be
/// called at most once in a process.
///
/// # Errors
/// If the environment variables are not valid, if sockets are passed and none has the name, or if
/// the socket does not listen or is of another kind.
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
            "systemd passed sockets named {}, but none named {name}: set FileDescriptorName={name} in the \
                socket unit",
            names.join(", ")
        )));
    };
    let socket = own_descriptor(FIRST_DESCRIPTOR + RawFd::try_from(at).expect("at most SOCKETS_MAX"))?;
    let is_usable = socket_type(&socket)? == kind && socket_acceptconn(&socket)?;
    if is_usable {
        Ok(Some(socket))
    } else {
        Err(io::Error::other(format!("socket {name} from systemd {}", requirement(kind))))
    }
}

fn requirement(kind: SocketType) -> &'static str {
    if kind == SocketType::SEQPACKET {
        "does not listen for sequenced packets: use ListenSequentialPacket=PATH in the socket unit"
    } else {
        "does not listen for streams: use ListenStream=ADDRESS:PORT in the socket unit"
    }
}

/// Takes ownership of a descriptor that was open when the process started.
fn own_descriptor(descriptor: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl with this command uses no pointers. It fails if the descriptor is not open.
    if unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: systemd has opened the descriptor, which has no other owner because `listener` is
    // called once.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// The names of the sockets that systemd passes to the process with the number `own`.
///
/// # Errors
/// A message if the variables are not valid.
fn parse(
    pid: Option<&str>,
    count: Option<&str>,
    names: Option<&str>,
    own: u32,
) -> Result<Vec<String>, String> {
    let (Some(pid), Some(count)) = (pid, count) else { return Ok(Vec::new()) };
    // Otherwise the variables are inherited from a parent process.
    if pid.parse() != Ok(own) {
        return Ok(Vec::new());
    }
    let count: usize = count
        .parse()
        .ok()
        .filter(|count| *count <= SOCKETS_MAX)
        .ok_or_else(|| format!("LISTEN_FDS is \"{count}\"; expected a number up to {SOCKETS_MAX}"))?;
    let Some(names) = names else { return Ok(vec!["unknown".to_owned(); count]) };
    let names: Vec<String> = names.split(':').map(str::to_owned).collect();
    if names.len() != count {
        return Err(format!("LISTEN_FDNAMES has {} names, but LISTEN_FDS is {count}", names.len()));
    }
    Ok(names)
}

/// The index of the socket to use.
fn choose(names: &[String], daemon: &str) -> Option<usize> {
    let named = names.iter().position(|name| name == daemon);
    // By default systemd names a socket after its unit.
    named.or_else(|| names.iter().position(|name| *name == format!("aquifer-{daemon}.socket"))).or({
        match names {
            [only] if only == "unknown" => Some(0),
            _ => None,
        }
    })
}

/// Notifies systemd that the daemon serves, if systemd started it with `Type=notify`.
///
/// # Errors
/// If the notification cannot be sent.
pub fn notify_ready() -> io::Result<()> {
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
    fn sockets_of_other_processes_are_ignored() {
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
