//! Paths of a user's own cluster, and of the agent's socket.

use std::path::{Path, PathBuf};

/// Folder of the user's own cluster.
///
/// The folder is in the user's runtime folder, which is removed when the last login ends. Without a
/// runtime folder it is `/run/aquifer` for root, and `.local/state/aquifer` in the home folder for
/// other users: another user cannot create these first.
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

/// State folder of the daemons that systemd starts, by the units in `packaging/systemd`.
///
/// Root's own folder is another one, so that `aquifer up` and `aquifer down` of root do not affect
/// these daemons.
pub const SYSTEM_FOLDER: &str = "/run/aquifer-system";

/// Default socket of an agent that serves all users of its host.
const SHARED_AGENT: &str = "/run/aquifer.sock";

/// The agent's socket in a state folder.
const AGENT_SOCKET: &str = "agent.sock";

/// The state folder that `AQUIFER_STATE` names, if it is set and not empty; without symbolic links
/// if it exists.
#[must_use]
pub fn folder_of_environment() -> Option<PathBuf> {
    path_of_environment("AQUIFER_STATE").map(|path| path.canonicalize().unwrap_or(path))
}

/// Whether `AQUIFER_AGENT` names the agent's socket.
#[must_use]
pub fn is_agent_in_environment() -> bool {
    path_of_environment("AQUIFER_AGENT").is_some()
}

/// Path of the socket at which a program reaches the agent of its host.
///
/// The socket that `AQUIFER_AGENT` names; else that in the state folder that `AQUIFER_STATE` names;
/// else the first that exists of those of the user's own cluster, of the agent that serves all
/// users, and of the agent that systemd starts.
#[must_use]
pub fn agent_socket() -> PathBuf {
    chosen_agent_socket(None, None)
}

/// Path of the agent's socket for a command with options: `agent` is a socket, and `state` a state
/// folder. Options precede the environment, as [`agent_socket`] has it.
#[must_use]
pub fn chosen_agent_socket(agent: Option<&Path>, state: Option<&Path>) -> PathBuf {
    let default = [
        cluster_folder().join(AGENT_SOCKET),
        PathBuf::from(SHARED_AGENT),
        Path::new(SYSTEM_FOLDER).join(AGENT_SOCKET),
    ];
    choose(
        [
            (agent, state),
            (path_of_environment("AQUIFER_AGENT").as_deref(), folder_of_environment().as_deref()),
        ],
        default,
    )
}

/// The first socket that is named; else the first default that exists.
///
/// `named` has pairs of a socket and a state folder, the first pair before the second.
fn choose(named: [(Option<&Path>, Option<&Path>); 2], mut default: [PathBuf; 3]) -> PathBuf {
    let in_pair = |(agent, state): (Option<&Path>, Option<&Path>)| {
        agent.map(Path::to_owned).or_else(|| state.map(|state| state.join(AGENT_SOCKET)))
    };
    named.into_iter().find_map(in_pair).unwrap_or_else(|| {
        let existing = default.iter().position(|path| path.exists()).unwrap_or(0);
        std::mem::take(&mut default[existing])
    })
}

/// The path in an environment variable, if the variable is set and not empty. The path is made
/// absolute, because programs have other working directories.
fn path_of_environment(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)?;
    Some(std::path::absolute(&path).unwrap_or(path))
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
    fn an_option_precedes_the_environment_which_precedes_what_exists() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let default = || ["own", "shared", "system"].map(path);
        let (socket, state) = (Path::new("/a/agent.sock"), Path::new("/b"));
        let (other, elsewhere) = (Path::new("/c/agent.sock"), Path::new("/d"));
        let chosen = |options, environment| choose([options, environment], default());
        let environment = (Some(other), Some(elsewhere));
        assert_eq!(chosen((Some(socket), Some(state)), environment), socket);
        assert_eq!(chosen((None, Some(state)), environment), state.join("agent.sock"));
        assert_eq!(chosen((None, None), environment), other);
        assert_eq!(chosen((None, None), (None, Some(elsewhere))), elsewhere.join("agent.sock"));
        let by_default = || chosen((None, None), (None, None));
        assert_eq!(by_default(), path("own"), "none exists");
        for existing in ["system", "shared", "own"] {
            std::fs::write(path(existing), "").unwrap();
            assert_eq!(by_default(), path(existing));
        }
    }

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
