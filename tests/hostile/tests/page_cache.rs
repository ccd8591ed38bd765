//! Pages of a user in the page cache, while another user tries to read them.

use std::process::{Command, Stdio};

use aquifer_tests_e2e::run::status;
use aquifer_tests_e2e::{SharedCluster, build, eventually};

use crate::user::{ANNE, MALLORY, Victim};

/// The programs of both users have their pages in the cache, and its blocks pass from one to the
/// other.
#[test]
fn cached_pages_of_others_cannot_be_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let meminfo = folder.path().join("meminfo");
    std::fs::write(&meminfo, "MemTotal: 16777216 kB\nMemAvailable: 16777216 kB\n").expect("our own folder");
    let environment = [("AQUIFER_MEMINFO", meminfo.to_str().expect("a plain path"))];
    let victim = Victim::of(SharedCluster::up_in(&environment, 2, &["--mempool", "24M"]));
    let checker = victim.0.path("checker");
    std::fs::copy(build::programs().join("checker"), &checker).expect("a program can be copied");
    let checker = checker.to_str().expect("a plain path");
    let words = ["run", "--local", "16M", "--", checker, "pages", "--bytes", "48M", "--rounds", "1000000"];
    let mut command: Command = victim.0.command(ANNE, &words);
    let mut anne = command.stderr(Stdio::piped()).spawn().expect("setpriv can be started");
    eventually("pages of the other user to be cached", || {
        let agent = status(&victim.0.path("agent.sock"))?;
        (agent["cached_bytes"].as_u64()? > 4 << 20).then_some(())
    });
    let attack = victim.paged_attacker("read-cached-pages", "16M").output().expect("setpriv can be started");
    assert!(attack.status.success(), "{attack:?}");
    let agent = status(&victim.0.path("agent.sock")).expect("it answers");
    let tenants = agent["tenants"].as_array().expect("a list");
    let hits = |uid: u32| tenants.iter().find(|tenant| tenant["tenant"] == uid)?["cache_hits"].as_u64();
    assert!([ANNE, MALLORY].into_iter().all(|uid| hits(uid) > Some(0)), "{agent:#}");
    assert!(anne.try_wait().expect("it was started").is_none(), "the other program has ended");
    anne.kill().expect("it runs");
    let said = anne.wait_with_output().expect("it has ended");
    let said = String::from_utf8_lossy(&said.stderr);
    assert!(!said.contains("FAILED"), "the other program saw wrong memory: {said}");
    victim.0.cluster.assert_all_free();
}
