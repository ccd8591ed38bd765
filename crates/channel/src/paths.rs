//! Paths of a user's own cluster, and of the agent's socket.

use std::path::{Path, PathBuf};

/// Folder of the user's own cluster.
///
/// It is in the user's runtime folder, which is removed when the last login ends; else in `/tmp`.
#[must_use]
pub fn cluster_folder() -> PathBuf {
    folder(std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from), Path::new("/run/user"))
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

/// The cluster's folder, from `XDG_RUNTIME_DIR` and the folder of all runtime folders.
fn folder(runtime: Option<PathBuf>, runtimes: &Path) -> PathBuf {
    if let Some(runtime) = runtime.filter(|path| path.is_absolute()) {
        return runtime.join("aquifer");
    }
    let user = rustix::process::geteuid().as_raw();
    let runtime = runtimes.join(user.to_string());
    if runtime.is_dir() {
        return runtime.join("aquifer");
    }
    std::env::temp_dir().join(format!("aquifer-{user}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_the_runtime_folder() {
        let runtimes = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().as_raw();
        let set = folder(Some("/somewhere".into()), runtimes.path());
        assert_eq!(set, Path::new("/somewhere/aquifer"));
        let fallback = std::env::temp_dir().join(format!("aquifer-{user}"));
        assert_eq!(folder(None, runtimes.path()), fallback);
        assert_eq!(folder(Some("relative".into()), runtimes.path()), fallback);
        let own = runtimes.path().join(user.to_string());
        std::fs::create_dir(&own).unwrap();
        assert_eq!(folder(None, runtimes.path()), own.join("aquifer"));
    }
}
