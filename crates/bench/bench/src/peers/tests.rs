//! Tests of complete setups. They change the machine, so they run one after the other, and need
//! root.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use parking_lot::{Mutex, MutexGuard};

use super::*;
use aquifer_swap::setup::cleanup_stale;

const MIB: u64 = 1 << 20;

static TURNS: Mutex<()> = Mutex::new(());

/// Waits for the other tests. `None` if this user may not set up swap: then only the refusal is
/// tested.
fn turn() -> Option<MutexGuard<'static, ()>> {
    let guard = TURNS.lock();
    if rustix::process::geteuid().is_root() {
        return Some(guard);
    }
    assert!(matches!(PeerSetup::new(Peer::SwapFile, 64 * MIB, 64 * MIB), Err(SetupError::NotRoot)));
    eprintln!("not root: only the refusal was tested");
    None
}

fn build_faultbench(folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/e2e/programs/faultbench.c");
    let program = folder.join("faultbench");
    let built = Command::new("cc").args(["-O2", "-o"]).arg(&program).arg(source).status().unwrap();
    assert!(built.success());
    program
}

fn swaps() -> String {
    fs::read_to_string("/proc/swaps").unwrap()
}

/// Runs faultbench over three times the limit, and returns the usage.
fn run_faultbench(setup: &PeerSetup) -> SetupUsage {
    let folder = tempfile::tempdir().unwrap();
    let output = setup
        .command(build_faultbench(folder.path()))
        .unwrap()
        .args(["--bytes", "192M", "--pattern", "seq", "--op", "write", "--passes", "1"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("\"verified_pages\":49152,\"errors\":0"), "{text}");
    setup.usage().unwrap()
}

fn swaps_and_verifies(peer: Peer) -> SetupUsage {
    let before = swaps();
    let mut setup = PeerSetup::new(peer, 64 * MIB, 256 * MIB).unwrap();
    setup.set_read_ahead(ReadAhead::EightPages).unwrap();
    assert_ne!(swaps(), before);
    let usage = run_faultbench(&setup);
    assert!(usage.memory_peak_bytes <= 65 * MIB, "{usage:?}");
    assert!(usage.major_faults > 1000, "{usage:?}");
    assert_eq!(usage.oom_kills, 0);
    if let Some(swap_peak_bytes) = usage.swap_peak_bytes {
        assert!(swap_peak_bytes >= 100 * MIB, "{usage:?}");
    }
    setup.close().unwrap();
    assert_eq!(swaps(), before);
    usage
}

#[test]
fn a_swap_file_holds_the_pages_over_the_limit() {
    let Some(_turn) = turn() else { return };
    let usage = swaps_and_verifies(Peer::SwapFile);
    assert_eq!(usage.store_peak_bytes, 0);
}

#[test]
fn zram_holds_the_pages_over_the_limit() {
    let Some(_turn) = turn() else { return };
    if matches!(PeerSetup::new(Peer::Zram, 64 * MIB, 64 * MIB), Err(SetupError::NoZram)) {
        eprintln!("no zram here: only the refusal was tested");
        return;
    }
    let usage = swaps_and_verifies(Peer::Zram);
    // Half of each page is random: the store cannot be smaller than half of what was swapped.
    assert!(usage.store_peak_bytes >= 50 * MIB, "{usage:?}");
}

#[test]
fn the_kill_of_a_program_that_outgrows_memory_and_swap_is_counted() {
    let Some(_turn) = turn() else { return };
    let folder = tempfile::tempdir().unwrap();
    let faultbench = build_faultbench(folder.path());
    let setup = PeerSetup::new(Peer::SwapFile, 32 * MIB, 32 * MIB).unwrap();
    let status = setup.command(faultbench).unwrap().args(["--bytes", "192M"]).status().unwrap();
    assert!(!status.success());
    assert_eq!(setup.usage().unwrap().oom_kills, 1);
    setup.close().unwrap();
}

#[test]
fn a_program_without_memory_is_woken_to_retry_and_is_not_killed() {
    const TIMES: usize = 500;
    const TIMES_MAX: usize = 1_000_000;
    let Some(_turn) = turn() else { return };
    let folder = tempfile::tempdir().unwrap();
    let faultbench = build_faultbench(folder.path());
    let setup = PeerSetup::new(Peer::SwapFile, 32 * MIB, 32 * MIB).unwrap();
    setup.cgroup.set_oom_waits(true).unwrap();
    let mut child = setup.command(faultbench).unwrap().args(["--bytes", "192M"]).spawn().unwrap();
    while !setup.cgroup.is_under_oom() {
        assert!(child.try_wait().unwrap().is_none(), "the program ended before it had to wait for memory");
        std::thread::yield_now();
    }
    // No memory is freed, so the program retries only if it is woken.
    let tries = || setup.cgroup.limit_hits().unwrap();
    let before = tries();
    let mut woken = 0;
    while (woken < TIMES || tries() < before + 10) && woken < TIMES_MAX {
        setup.cgroup.set_oom_waits(true).unwrap();
        woken += 1;
    }
    assert!(tries() >= before + 10, "woken {woken} times");
    assert_eq!(setup.usage().unwrap().oom_kills, 0, "woken {woken} times");
    setup.close().unwrap();
    assert!(!child.wait().unwrap().success());
}

#[test]
fn read_ahead_is_restored_and_programs_are_ended() {
    let Some(_turn) = turn() else { return };
    let former = read_number(Path::new(PAGE_CLUSTER)).unwrap();
    let mut setup = PeerSetup::new(Peer::SwapFile, 16 * MIB, 16 * MIB).unwrap();
    setup.set_read_ahead(ReadAhead::OnePage).unwrap();
    setup.set_read_ahead(ReadAhead::EightPages).unwrap();
    setup.set_read_ahead(ReadAhead::OnePage).unwrap();
    assert_eq!(read_number(Path::new(PAGE_CLUSTER)).unwrap(), 0);
    let mut child = setup.command("sleep").unwrap().arg("600").spawn().unwrap();
    setup.close().unwrap();
    assert!(!child.wait().unwrap().success());
    assert_eq!(read_number(Path::new(PAGE_CLUSTER)).unwrap(), former);
}

#[test]
fn a_panic_leaves_nothing_behind() {
    let Some(_turn) = turn() else { return };
    let before = swaps();
    let caught = std::panic::catch_unwind(|| {
        let _setup = PeerSetup::new(Peer::SwapFile, 16 * MIB, 16 * MIB).unwrap();
        assert_eq!(swaps(), before, "this is the panic that the test wants");
    });
    assert!(caught.is_err());
    assert_eq!(swaps(), before);
}

#[test]
fn the_setup_of_a_dead_owner_is_undone_once() {
    let Some(_turn) = turn() else { return };
    let before = swaps();
    let setup = PeerSetup::new(Peer::SwapFile, 16 * MIB, 16 * MIB).unwrap();
    let (name, path) = (setup.record.name().to_owned(), setup.record.path().to_owned());
    // Process numbers are smaller, so the owner of this record has ended.
    let stale = path.with_file_name("aquifer-setup-4294967295-1-0");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(&name));
    fs::write(
        &stale,
        "page-cluster 3\ncgroup /sys/fs/cgroup/memory/aquifer-setup-4294967295-1-0\nswap-file /var/tmp/aq",
    )
    .unwrap();
    // Owners of other tests may have been killed as well.
    assert!(cleanup_stale().unwrap() >= 1);
    assert!(!stale.exists());
    // The setup of a running owner is not removed.
    assert!(path.exists());
    assert_ne!(swaps(), before);
    cleanup_stale().unwrap();
    assert!(path.exists());
    setup.close().unwrap();
    assert!(!path.exists());

    // A record that names a file outside the setup is refused, and left in place.
    fs::write(&stale, "swap-file /etc/passwd\n").unwrap();
    assert!(matches!(cleanup_stale(), Err(SetupError::Record { .. })));
    assert!(Path::new("/etc/passwd").exists());
    fs::remove_file(&stale).unwrap();
}

#[test]
fn sizes_are_bounded() {
    for bytes in [0, MIB - 1, (1 << 40) + 1, u64::MAX] {
        assert!(matches!(
            PeerSetup::new(Peer::SwapFile, bytes, MIB),
            Err(SetupError::Size { what: "memory limit", .. })
        ));
        assert!(matches!(
            PeerSetup::new(Peer::SwapFile, MIB, bytes),
            Err(SetupError::Size { what: "swap device", .. })
        ));
    }
    assert!(SIZE_BYTES.contains(&MIB) && SIZE_BYTES.contains(&(1 << 40)));
    let Some(_turn) = turn() else { return };
    PeerSetup::new(Peer::SwapFile, MIB, MIB).unwrap().close().unwrap();
}

#[test]
fn every_error_is_a_sentence() {
    let message =
        SetupError::io("open", Path::new("/x"))(std::io::Error::from_raw_os_error(libc::ENOENT)).to_string();
    assert!(message.starts_with("cannot open /x: No such file"), "{message}");
    assert!(SetupError::NoSwapFolder { tried: "/tmp".into() }.to_string().contains("/tmp"));
}

mod long {
    use super::*;

    #[test]
    fn a_program_that_never_gets_memory_is_killed_although_it_waits() {
        let Some(_turn) = turn() else { return };
        let folder = tempfile::tempdir().unwrap();
        let faultbench = build_faultbench(folder.path());
        let setup = PeerSetup::new(Peer::SwapFile, 32 * MIB, 32 * MIB).unwrap();
        let mut command = setup.command(faultbench).unwrap();
        let (status, has_waited) =
            setup.with_oom_waits(|| command.args(["--bytes", "192M"]).status()).unwrap();
        assert!(!status.unwrap().success() && has_waited);
        assert_eq!(setup.usage().unwrap().oom_kills, 1);
        setup.close().unwrap();
    }
}
