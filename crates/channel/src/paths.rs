//! Paths of a user's own cluster, and of the agent's socket.

use std::path::{Path, PathBuf};

/// Folder of the user's own cluster.
///
/// It is in the user's runtime folder, which is removed when the last login ends. Without one it is
/// `/run/aquifer` for root, and `.local/state/aquifer` in the home folder for others: never where
/// another user could create it first.
#[must_use]
pub fn cluster_folder() -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    folder(
        user,
        std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from),
        Path::new("/run/user"),
        std::env::home_dir(),
    )
}

/// Default socket of an agent that serves all users of its host.
const SHARED_AGENT: &str = "/run/aquifer.sock";

/// Path of the socket at which a program reaches the agent of its host.
///
/// `AQUIFER_AGENT` if it is set; else the socket of the user's own cluster; else the one that
/// serves all users.
#[must_use]
pub fn agent_socket() -> PathBuf {
    std::env::var_os("AQUIFER_AGENT")
        .map_or_else(|| own_or_shared_socket(cluster_folder().join("agent.sock")), PathBuf::from)
}

/// Returns `own`, or the socket that serves all users if only that exists.
#[must_use]
pub fn own_or_shared_socket(own: PathBuf) -> PathBuf {
    let shared = Path::new(SHARED_AGENT);
    if !own.exists() && shared.exists() { shared.to_owned() } else { own }
}

/// The cluster's folder, from `XDG_RUNTIME_DIR`, the folder of all runtime folders and the home
/// folder.
fn folder(user: u32, runtime: Option<PathBuf>, runtimes: &Path, home: Option<PathBuf>) -> PathBuf {
    if let Some(runtime) = runtime.filter(|path| path.is_absolute()) {
        return runtime.join("aquifer");
    }
    let runtime = runtimes.join(user.to_string());
    if runtime.is_dir() {
        return runtime.join("aquifer");
    }
    match home.filter(|path| path.is_absolute()) {
        _ if user == 0 => PathBuf::from("/run/aquifer"),
        Some(home) => home.join(".local/state/aquifer"),
        // The owner of the folder is checked before it is used.
        None => std::env::temp_dir().join(format!("aquifer-{user}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_the_runtime_folder() {
        let runtimes = tempfile::tempdir().unwrap();
        let home = || Some(PathBuf::from("/homes/anne"));
        let set = folder(7, Some("/somewhere".into()), runtimes.path(), home());
        assert_eq!(set, Path::new("/somewhere/aquifer"));
        let state = Path::new("/homes/anne/.local/state/aquifer");
        assert_eq!(folder(7, None, runtimes.path(), home()), state);
        assert_eq!(folder(7, Some("relative".into()), runtimes.path(), home()), state);
        assert_eq!(folder(0, None, runtimes.path(), home()), Path::new("/run/aquifer"));
        assert!(folder(7, None, runtimes.path(), None).ends_with("aquifer-7"));
        std::fs::create_dir(runtimes.path().join("7")).unwrap();
        assert_eq!(folder(7, None, runtimes.path(), home()), runtimes.path().join("7/aquifer"));
    }
}
