//! Tests of the embedded directory across restarts, and of files that it refuses.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aquifer_directory::clock::ManualClock;
use aquifer_directory::embedded::EmbeddedDirectory;
use aquifer_directory::{Directory, DirectoryError, LeaseId};
use redb::{Database, TableDefinition};

const TTL: Duration = Duration::from_secs(10);
const HEAD: TableDefinition<'_, &str, u64> = TableDefinition::new("aquifer-directory");

fn file(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("directory.redb")
}

fn refusal(path: &Path) -> String {
    match EmbeddedDirectory::open(path) {
        Err(DirectoryError::Format { why, .. }) => why,
        other => panic!("a refusal was expected, not {other:?}"),
    }
}

#[test]
fn entries_revision_epoch_and_leases_survive() {
    let folder = tempfile::tempdir().unwrap();
    let (before, lease) = {
        let directory = EmbeddedDirectory::open(&file(&folder)).unwrap();
        let revoked = directory.lease_grant(TTL).unwrap();
        let lease = directory.lease_grant(TTL).unwrap();
        directory.put("plain", b"\0bytes\xff", None).unwrap();
        directory.put("deleted", b"", None).unwrap();
        directory.put("leased", b"v", Some(lease.id)).unwrap();
        directory.put("revoked", b"v", Some(revoked.id)).unwrap();
        directory.delete("deleted").unwrap();
        directory.lease_revoke(revoked.id).unwrap();
        (directory.list("").unwrap(), lease)
    };
    let clock = Arc::new(ManualClock::default());
    let directory = EmbeddedDirectory::open_with_clock(&file(&folder), clock.clone()).unwrap();
    assert_eq!(directory.list("").unwrap(), before);
    assert!(directory.lease_grant(TTL).unwrap().epoch > lease.epoch);
    assert_eq!(directory.put("next", b"", None).unwrap(), before.revision + 1);
    assert_eq!(directory.lease_keep_alive(LeaseId(1)), Err(DirectoryError::LeaseGone(LeaseId(1))));

    // The lease has its full time to live again.
    clock.advance(TTL - Duration::from_millis(1));
    assert!(directory.get("leased").unwrap().is_some());
    clock.advance(Duration::from_millis(1));
    assert!(directory.get("leased").unwrap().is_none());
    drop(directory);
    let directory = EmbeddedDirectory::open(&file(&folder)).unwrap();
    assert!(directory.get("leased").unwrap().is_none(), "the end of the lease is stored");
}

#[test]
fn after_a_restart_a_watch_continues_from_the_last_revision_only() {
    let folder = tempfile::tempdir().unwrap();
    let revision = {
        let directory = EmbeddedDirectory::open(&file(&folder)).unwrap();
        directory.put("a", b"", None).unwrap();
        directory.put("b", b"", None).unwrap()
    };
    let directory = EmbeddedDirectory::open(&file(&folder)).unwrap();
    let mut watch = directory.watch("", revision + 1).unwrap();
    directory.put("c", b"", None).unwrap();
    assert_eq!(watch.next(TTL).unwrap().unwrap().key, "c");
    let compacted = DirectoryError::Compacted { asked: revision, oldest: revision + 1 };
    assert_eq!(directory.watch("", revision).unwrap_err(), compacted);
}

#[test]
fn a_file_is_opened_once() {
    let folder = tempfile::tempdir().unwrap();
    let _first = EmbeddedDirectory::open(&file(&folder)).unwrap();
    let error = EmbeddedDirectory::open(&file(&folder)).unwrap_err();
    assert!(matches!(error, DirectoryError::Storage { .. }), "{error}");
    assert!(error.to_string().contains("another process has it open"), "{error}");
}

#[test]
fn a_file_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let _directory = EmbeddedDirectory::open(&file(&folder)).unwrap();
    assert_eq!(std::fs::metadata(file(&folder)).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn other_versions_and_other_programs_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    drop(EmbeddedDirectory::open(&file(&folder)).unwrap());
    {
        let database = Database::create(file(&folder)).unwrap();
        let transaction = database.begin_write().unwrap();
        transaction.open_table(HEAD).unwrap().insert("format", 2).unwrap();
        transaction.commit().unwrap();
    }
    assert!(refusal(&file(&folder)).contains("version 2"));

    let other = folder.path().join("other.redb");
    drop(Database::create(&other).unwrap());
    assert!(refusal(&other).contains("another program"));

    let text = folder.path().join("text");
    std::fs::write(&text, "no database at all\n".repeat(1000)).unwrap();
    assert!(!refusal(&text).is_empty());
}

#[test]
fn a_file_that_contradicts_itself_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    EmbeddedDirectory::open(&file(&folder)).unwrap().put("k", b"", None).unwrap();
    {
        let database = Database::create(file(&folder)).unwrap();
        let transaction = database.begin_write().unwrap();
        transaction.open_table(HEAD).unwrap().insert("revision", 0).unwrap();
        transaction.commit().unwrap();
    }
    assert!(refusal(&file(&folder)).contains("revision 0"));
}

#[test]
fn an_absent_folder_is_named() {
    let error = EmbeddedDirectory::open(Path::new("/nonexistent/directory.redb")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/directory.redb"), "{error}");
}

/// A damaged file is refused, or the damage has no effect: never a panic, never other contents.
#[test]
fn a_damaged_file_is_refused_or_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let expected = {
        let directory = EmbeddedDirectory::open(&file(&folder)).unwrap();
        for number in 0..50 {
            directory.put(&format!("key/{number}"), &[number; 100], None).unwrap();
        }
        directory.list("").unwrap()
    };
    let whole = std::fs::read(file(&folder)).unwrap();
    let damaged = folder.path().join("damaged.redb");
    let mut refused = 0;
    let mut random = 1_u64;
    for _ in 0..60 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut bytes = whole.clone();
        let at = usize::try_from(random >> 16).unwrap() % bytes.len();
        let end = bytes.len().min(at + 64);
        bytes[at..end].fill(0xa5);
        std::fs::write(&damaged, &bytes).unwrap();
        match EmbeddedDirectory::open(&damaged) {
            Ok(directory) => assert_eq!(directory.list("").unwrap(), expected, "damaged at {at}"),
            Err(_) => refused += 1,
        }
    }
    for length in [1, 100, 4096, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&damaged, &whole[..length]).unwrap();
        refused += usize::from(EmbeddedDirectory::open(&damaged).is_err());
    }
    assert!(refused > 0, "some of this damage must be detected");
}

/// A small file system of its own, which is unmounted at the end; `None` if that needs more rights.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mount = |folder: &Path| {
            std::process::Command::new("mount")
                .args(["-t", "tmpfs", "-o", "size=2M", "tmpfs"])
                .arg(folder)
                .stderr(std::process::Stdio::null())
                .status()
        };
        mount(folder.path()).is_ok_and(|status| status.success()).then(|| Self(folder))
    }

    /// Writes a file until the disk is full.
    fn fill(&self) -> PathBuf {
        let path = self.0.path().join("filling");
        let mut file = std::fs::File::create(&path).unwrap();
        while std::io::Write::write(&mut file, &[1; 4096]).is_ok_and(|length| length > 0) {}
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_directory_on_a_full_disk_serves_reads_and_recovers_when_there_is_space() {
    let Some(disk) = SmallDisk::mount() else {
        return aquifer_tests_support::skip("only root can mount a file system");
    };
    let path = disk.0.path().join("directory.redb");
    let directory = EmbeddedDirectory::open(&path).unwrap();
    let lease = directory.lease_grant(TTL).unwrap();
    directory.put("before", b"v", Some(lease.id)).unwrap();
    let filling = disk.fill();
    for number in 0..20 {
        directory.put("small", format!("{number}").as_bytes(), None).unwrap();
    }
    // More than the file has room for.
    let put_large = |number: usize| directory.put(&format!("large-{number}"), &[7; 60 << 10], None).is_ok();
    let accepted = (0..40).take_while(|number| put_large(*number)).count();
    assert!(accepted < 40, "2 MiB cannot hold that");
    assert!(directory.get("before").unwrap().is_some(), "the directory is readable");
    directory.lease_keep_alive(lease.id).unwrap();

    std::fs::remove_file(filling).unwrap();
    for number in 0..accepted {
        assert!(directory.get(&format!("large-{number}")).unwrap().is_some(), "the change was acknowledged");
        directory.delete(&format!("large-{number}")).unwrap();
    }
    directory.put("after", b"w", None).unwrap();
    drop(directory);
    let directory = EmbeddedDirectory::open(&path).unwrap();
    let keys: Vec<_> = directory.list("").unwrap().entries.into_iter().map(|entry| entry.key).collect();
    assert_eq!(keys, ["after", "before", "small"]);
    assert_eq!(directory.get("small").unwrap().unwrap().value, b"19");
}
