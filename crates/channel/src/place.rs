//! Where the parts of a user's own cluster are found.

use std::path::{Path, PathBuf};

/// The folder of the user's own cluster: in the runtime folder, which ends with the login as a cluster's memory does; else one in /tmp.
#[must_use]
pub fn cluster_folder() -> PathBuf {
    folder(std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from), Path::new("/run/user"))
}

/// Where an agent that serves all users of its host listens, as is usual.
const SHARED_AGENT: &str = "/run/aquifer.sock";

/// Where a program finds the agent of its host: `AQUIFER_AGENT` says, else it is that of the user's own cluster, else the one for all.
#[must_use]
pub fn agent_socket() -> PathBuf {
    std::env::var_os("AQUIFER_AGENT")
        .map_or_else(|| own_or_shared(cluster_folder().join("agent.sock")), PathBuf::from)
}

/// This socket, unless there is none and the host has one for all.
#[must_use]
pub fn own_or_shared(own: PathBuf) -> PathBuf {
    let shared = Path::new(SHARED_AGENT);
    if !own.exists() && shared.exists() { shared.to_owned() } else { own }
}

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
