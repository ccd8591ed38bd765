//! Hosts of tests: a directory, and a keeper for each host.

// Each test uses only a part.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_channel::HoldRefused;
use aquifer_channel::descriptor_shares::DescriptorShares;
use aquifer_directory::embedded::EmbeddedDirectory;
use aquifer_directory::names::{self, HolderRecord};
use aquifer_directory::{Directory, DirectoryRetries, LeaseId};
use aquifer_fabric::ClusterKey;
use aquifer_ipc::{HeldItem, HeldKind};
use aquifer_keeper::KeeperStore;
use aquifer_ownership::Life;
use aquifer_segments::host::{HostLease, KeptSegment, SegmentHost, SegmentKey, SegmentOptions};

const KEY: ClusterKey = ClusterKey([7; 32]);
const TTL: Duration = Duration::from_secs(600);
/// The epoch of each life in tests.
const EPOCH: u64 = 1;

/// The directory of a test.
pub struct Records {
    folder: tempfile::TempDir,
    directory: Arc<EmbeddedDirectory>,
    leases: Mutex<Vec<(u16, LeaseId)>>,
}

impl Records {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let directory = Arc::new(EmbeddedDirectory::open(&folder.path().join("db")).unwrap());
        Self { folder, directory, leases: Mutex::default() }
    }

    /// Starts a host with the segments that `keeper` holds, like the next process of its agent.
    pub fn start(&self, host: u16, bytes_per_tenant: u64, keeper: &Arc<TestKeeper>) -> SegmentHost {
        let life = Life { host, epoch: EPOCH };
        let holder = HolderRecord { host, claim_epoch: EPOCH, grace_ms: 0, remaining_lives: None };
        self.directory.put(&names::holder_key(host), &names::encode(&holder), None).unwrap();
        let lease = self.directory.lease_grant(TTL).unwrap();
        self.leases.lock().unwrap().push((host, lease.id));
        let listen = Some("127.0.0.1:0".parse().unwrap());
        let (key, grace, sockets) = (KEY, TTL, self.folder.path().to_owned());
        let descriptors = DescriptorShares::of_process();
        let options = SegmentOptions {
            life,
            listen,
            key,
            bytes_per_tenant,
            pull_rate: None,
            grace,
            sockets,
            descriptors,
            retries: DirectoryRetries::none(),
            lease: Arc::new(EndlessLease),
        };
        let directory = Arc::clone(&self.directory) as Arc<dyn Directory>;
        let own_keeper = Arc::clone(keeper) as Arc<dyn KeeperStore>;
        SegmentHost::start(&options, directory, lease, own_keeper, keeper.kept()).unwrap()
    }

    /// Ends the life of a host, as if other hosts had recovered it.
    pub fn end_life(&self, host: u16) {
        for (_, lease) in self.leases.lock().unwrap().iter().filter(|(of, _)| *of == host) {
            self.directory.lease_revoke(*lease).unwrap();
        }
        self.directory.delete(&names::holder_key(host)).unwrap();
    }
}

/// The name of the process that [`open`] opens on a host.
pub fn name(host: &SegmentHost) -> String {
    format!("worker-{}", host.life().host)
}

/// Opens the process of a host, so that it accepts segments.
pub fn open(host: &SegmentHost, tenant: u32) {
    host.open_process(tenant, &name(host), None, &[]).unwrap();
}

/// A keeper that holds the memory of a host while the host is restarted.
#[derive(Debug, Default)]
pub struct TestKeeper(Mutex<BTreeMap<u64, (SegmentKey, Vec<OwnedFd>)>>);

impl TestKeeper {
    fn kept(&self) -> Vec<KeptSegment> {
        let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
        let kept = self.0.lock().unwrap();
        let kept = kept.iter().map(|(number, (segment, fds))| KeptSegment {
            number: *number,
            segment: *segment,
            data: copy(&fds[0]),
            present: copy(&fds[1]),
        });
        kept.collect()
    }

    pub fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

impl KeeperStore for TestKeeper {
    fn hold(&self, item: &HeldItem, fds: &[BorrowedFd<'_>]) -> Result<(), HoldRefused> {
        let fds = fds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        let segment = serde_json::from_str(&item.record).unwrap();
        assert_eq!(item.kind, HeldKind::Segment);
        let former = self.0.lock().unwrap().insert(item.id, (segment, fds));
        assert!(former.is_none(), "number {} is in use", item.id);
        Ok(())
    }

    fn hold_shared(&self, item: &HeldItem, fds: Vec<Arc<OwnedFd>>) -> Result<(), HoldRefused> {
        self.hold(item, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>())
    }

    fn release(&self, _kind: HeldKind, id: u64) {
        self.0.lock().unwrap().remove(&id);
    }
}

/// A lease that never ends.
#[derive(Debug)]
struct EndlessLease;

impl HostLease for EndlessLease {
    fn lasts(&self) -> bool {
        true
    }
}
